"""The objective over whole answers, which compares the answers of a prompt, and all objectives of text by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor

from ...core.advantages import group_index
from ...core.answer_losses import dpo, pairs_of, preferred_pairs
from ...core.surrogates import require_gradient
from ...parts.asked import answered, asked, not_given
from ...parts.choice import Choice, Of, choices, named
from ...parts.needs import needs, unscored_counts
from ...parts.traits import whole_groups
from ..losses.objective import pair
from .distilled_objective import DistilledObjective
from .expert_objective import GuidedObjective
from .part_ratios import PartRatios
from .text_objective import ScoredTokens, TextObjective
from .token_objective import OF_TEXT, TokenObjective

if TYPE_CHECKING:
    # These import the libraries of models, and a recipe is read without them.
    from ...configs.schema import TextRecipe
    from ..controls import Controls
    from .text_policy import Completions, TextPolicy

ANSWERED = ("logp", "ref_logp", "old_logp", "lengths", "log_ratio", "advantages", "correct", "groups", "pairs")
"""What a loss of answers may ask for."""


def _of_answers(recipe: TextRecipe, choice: Choice) -> list[str]:
    """Faults of a recipe: it uses what only objective tokens has, or the loss asks for what a run does not give."""
    told = f"text objective {choice.short}"
    faults = [
        f"token penalty {penalty.short} works on tokens, and {told} works on whole answers; leave it out of penalties, "
        "or use objective tokens"
        for penalty in recipe.penalties
    ]
    if recipe.select:
        faults.append(f"{told} takes whole groups; leave select out")
    if "pairs" in asked(choice["loss"].target):
        faults += unscored_counts(recipe, f"answer loss {choice['loss'].short}")
    return faults + not_given(choice["loss"], ANSWERED)


@needs(_of_answers)
@whole_groups
class AnswerObjective(TextObjective):
    """A loss of the completions of each prompt, divided by the number of prompts or of completions.

    The winner of a prompt is the answer with the highest advantage, and the loser is the answer with the lowest. An
    answer with an advantage above 0 is right, and others are wrong. A prompt whose advantages are all equal has no
    winner and no loser, and no right and no wrong answers. The reference is the base model. The training engine gives
    the log-probs of the policy that sampled.

    Args:
        recipe: what to do.
        policy: scores completions.
        controls: coefficients that move; this objective has none.
        loss: the loss of the answers of a prompt: it compares the best answer with the worst, predicts advantages, or
            tells right answers from wrong ones.
        drop_truncated: leave out completions that hit generation.max_tokens (DAPO).
    """

    def __init__(
        self,
        recipe: TextRecipe,
        policy: TextPolicy,
        controls: Controls | None = None,
        *,
        loss: Annotated[Callable[..., Tensor], Of("answer loss", "dpo")] = dpo,
        drop_truncated: bool = False,
    ) -> None:
        super().__init__(recipe, policy)
        self.loss = loss
        self._asks = asked(loss)
        self._each = _per_answer(loss)

    def rows(self, experience: Completions, part: int, keep: Tensor | None) -> int:
        """How many prompts a part has; for a loss with one value per answer, how many completions."""
        mine = [row for rows in self.batches(experience, part, None) for row in rows]
        if self._each:
            return int(self._counted(experience, keep)[mine].sum())
        return len({experience.prompt_of_sample[row] for row in mine})

    def batches(self, experience: Completions, part: int, keep: Tensor | None) -> Iterator[list[int]]:
        """Batches of whole groups.

        Raises:
            ValueError: a group has more tokens than a batch may have.
        """
        groups, counted = experience.groups, self._scored_ones(experience) or experience.counted
        trained = torch.ones(len(groups), dtype=torch.bool) if counted is None else torch.tensor(counted)
        for batch in super().batches(experience, part, keep):
            whole = int((torch.isin(groups, groups[batch]) & trained).sum())
            if whole != len(batch):
                raise ValueError(
                    f"objective answers compares the {whole} completions of a prompt, which have more tokens than "
                    f"rollout.tokens {self.recipe.rollout.tokens} allows; raise rollout.tokens, or lower rollout.group "
                    "or generation.max_tokens"
                )
            yield batch

    def _loss(self, experience: Completions, scored: ScoredTokens, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        groups = experience.groups[scored.batch].to(scored.mask.device)
        mine = scored.mask.any(1).nonzero().flatten()
        if "correct" in self._asks:
            mine = mine[_tells_apart(scored.advantage, groups)[mine]]
        whole = torch.where(scored.mask, scored.log_probs, 0.0).sum(1)
        before = torch.where(scored.mask, scored.old, 0.0).sum(1)
        lengths = scored.mask.sum(1).clamp(min=1)
        advantage, own = scored.advantage[mine], groups[mine]
        pairs = pairs_of(advantage, own) if "pairs" in self._asks or not experience.drawn else None
        known: dict[str, Tensor] = {}

        def reference() -> Tensor:
            if not known:
                known["sums"] = torch.where(scored.mask, self._reference(experience, scored), 0.0).sum(1)[mine]
            return known["sums"]

        has: dict[str, Callable[[], Any]] = {
            "logp": lambda: whole[mine],
            "ref_logp": reference,
            "old_logp": lambda: before[mine],
            "lengths": lambda: lengths[mine],
            "log_ratio": lambda: ((whole - before) / lengths)[mine],
            "advantages": lambda: advantage,
            "correct": lambda: advantage > 0,
            "groups": lambda: own,
            "pairs": lambda: pairs,
        }
        losses = answered(self.loss, has)
        require_gradient(named("answer loss", self.loss), losses, "`logp` or `log_ratio`")
        loss = losses.sum() / rows + 0.0 * whole.sum()
        metrics = {"loss": torch.stack([losses.detach().sum(), losses.new_tensor(len(losses))])}
        if pairs is not None:
            metrics["pairs"] = whole.new_tensor([len(pairs), len(groups.unique())])
            if not experience.drawn:
                likely = (whole[mine] - known["sums"]) if known else (whole / lengths)[mine]
                metrics["preferred"] = pair(preferred_pairs(likely.detach(), pairs))
        return loss, metrics


def _tells_apart(advantages: Tensor, groups: Tensor) -> Tensor:
    """[R] bool: rows of groups whose advantages differ. Equal advantages do not say whether an answer is right."""
    index, count = group_index(groups, len(advantages), advantages.device)
    low, high = (
        advantages.new_zeros(count).scatter_reduce(0, index, advantages, how, include_self=False)
        for how in ("amin", "amax")
    )
    return (low < high)[index]


TEXT_OBJECTIVES: dict[str, type[TextObjective]] = {
    "tokens": TokenObjective,
    "answers": AnswerObjective,
    "distilled": DistilledObjective,
    "guided": GuidedObjective,
}
"""`objective(recipe, policy, controls, *, ...)`: a class with the methods of `TextObjective`."""


def _per_answer(loss: Callable[..., Tensor]) -> bool:
    while isinstance(loss, partial):
        loss = loss.func
    return bool(vars(loss).get("per_answer", False))


def compares(recipe: Any) -> bool:
    """Whether a part of the recipe asks for the log-probs of the reference."""
    kinds = ("token penalty", "answer loss")
    return any("ref_logp" in asked(choice.target) for _, choice in choices(recipe) if choice.kind in kinds)


def tried(recipe: TextRecipe) -> None:
    """Call the chosen parts of a recipe once, on two answers of one token each, so that they can refuse their options.

    Raises:
        ValueError: options are out of range or do not fit together, or a part does not return what it should.
    """
    objective, nothing, column = recipe.objective, torch.zeros(2), torch.zeros(2, 1)
    if (surrogate := objective.get("surrogate")) is not None:
        PartRatios(str(objective.get("level")), str(objective.get("reduce")), surrogate.make())
    if (correction := objective.get("correction")) is not None:
        found = correction.make(engine=recipe.generation.engine)(column)
        if found is not None:
            for one in found:
                _shaped(one, (2, 1), correction, "None, or a weight and a bool for each token")
    if (loss := objective.get("loss")) is not None:
        values: dict[str, Any] = dict.fromkeys(ANSWERED, nothing)
        values |= {"lengths": nothing + 1, "advantages": torch.tensor([1.0, -1.0])}
        values |= {"correct": torch.tensor([True, False]), "groups": nothing.long(), "pairs": torch.tensor([[0, 1]])}
        count = (2,) if _per_answer(loss.target) else (1,)
        _shaped(answered(loss.make(), _known(values)), count, loss, "one value for each pair, prompt or marked answer")
    columns = dict.fromkeys(OF_TEXT, column) | {"mask": torch.ones(2, 1, dtype=torch.bool), "adv": nothing}
    for penalty in recipe.penalties:
        _shaped(answered(penalty.make(), _known(columns)), (2, 1), penalty, "one value for each token")


def _known(values: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    return {name: partial(values.__getitem__, name) for name in values}


def _shaped(found: Any, shape: tuple[int, ...], choice: Choice, wanted: str) -> None:
    if isinstance(found, Tensor) and found.shape == shape:
        return
    has = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"{found!r:.60}"
    raise ValueError(
        f"{choice.kind} {choice.short} returns {has} for two answers of a token each, and the shape must be {shape}; "
        f"return {wanted}"
    )
