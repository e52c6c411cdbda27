"""The objective over the tokens of completions: a surrogate of a ratio, weights, and penalties."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from ...configs.sections import BalanceConfig, EntropyConfig, VarianceConfig
from ...core.categorical import own_curvature
from ...core.corrections import Correction, auto
from ...core.guards import ALIGNMENTS, confident_rows, conflict_weights, stray_weights
from ...core.objectives import held_columns, policy_loss
from ...core.offpolicy import r2vpo, ratio_variance
from ...core.surrogates import clip, per_column
from ...core.token_penalties import TOKEN_PENALTIES
from ...parts.asked import answered, asked, not_given
from ...parts.choice import Choice, Of, given_names
from ...parts.needs import Need, needs, one_round, several_updates
from ...parts.ranges import Positive
from ...text.scoring import Measure, right_padded
from ..balance import Balance
from ..controls import Controls, moves
from .part_ratios import GIVEN, PartRatios, units_of
from .text_objective import ScoredTokens, TextObjective

if TYPE_CHECKING:
    # These import the libraries of models, and a recipe is read without them.
    from ...configs.schema import MaskedRecipe, TextRecipe
    from .text_policy import Completions, TextPolicy

PENALISED = ("logp", "ref_logp", "old_logp", "mask", "adv")
"""What a penalty of tokens may ask for."""
OF_TEXT = (*PENALISED, "entropy")
"""What a penalty of the tokens of a causal model may ask for."""


def of_tokens(recipe: TextRecipe, choice: Choice) -> list[str]:
    """Faults of a recipe: a surrogate or a penalty asks for what a run does not give, or parts are used and not cut."""
    faults = list[str]()
    asked = [f"objective.{name} part" for name in ("level", "reduce") if choice.get(name) == "part"]
    surrogate = choice.get("surrogate")
    if surrogate is not None:
        wanted = given_names(surrogate.target)
        faults += [
            f"surrogate {surrogate.short} asks for {name!r}, and a run of text gives {', '.join(GIVEN)}; use another "
            "surrogate"
            for name in wanted
            if name not in GIVEN
        ]
        asked += [f"surrogate {surrogate.short}"] if "units" in wanted else []
    if recipe.parts is None:
        faults += [
            f"{name} works on the parts of completions, and nothing says how they are cut; add a section such as "
            "parts: {cut: lines}"
            for name in asked
        ]
    names = [penalty.name for penalty in recipe.penalties]
    faults += [
        f"penalties has {name} more than once; add their weights" for name in set(names) if names.count(name) > 1
    ]
    return faults + [fault for penalty in recipe.penalties for fault in not_given(penalty, OF_TEXT)]


def _may_stray(recipe: TextRecipe, choice: Choice) -> list[str]:
    """A fault where no answer can be one that the policy has left."""
    if choice.get("off_policy") is None or recipe.generation.engine != "transformers":
        return []
    return several_updates("leaves out answers that the policy has left, with off_policy")(recipe, choice)


@needs(
    of_tokens,
    _may_stray,
    moves("balance", "bapo", "the bounds", "lower", "upper"),
    moves("variance", "r2vpo", "the price", "lam"),
    Need("objective.level", ("token",), "counts tokens with `balance`", unless="balance"),
    Need("objective.level", ("token",), "counts tokens with `variance`", unless="variance"),
    one_round("compares whole groups with `conflict`", unless="conflict"),
    Need("objective.reduce", ("sum",), "divides sums by the longest length with `constant`", unless="constant"),
)
class TokenObjective(TextObjective):
    """A surrogate of the ratio of tokens, of parts, or of whole answers.

    Args:
        recipe: what to do.
        policy: scores completions.
        controls: coefficients that move; none do if left out.
        surrogate: the surrogate of the ratio.
        level: what has a ratio: a token, a part (Rank-GRPO) or an answer (GSPO). The ratio of a part or an answer is
            the geometric mean of the ratios of its tokens.
        reduce: what the loss is a mean of: tokens, row means, or row sums; `part` is row means in which each part
            counts once.
        constant: with `sum`, divide by rows × generation.max_tokens (Dr. GRPO) in place of rows.
        correction: weight of tokens by the ratio of training engine and sampler, whose log-probs may differ.
        conflict: weight of a good answer's token if a bad answer of the prompt has the same token in the same place,
            counted from the start or the end (GTPO, 2508.03772). The token of the bad answer has weight 0. The paper
            uses 2. If left out, all weights are 1.
        confident: train only on answers whose mean entropy is at most this many nats (0.693 in GTPO); on all if left
            out.
        off_policy: leave out a bad answer if its tokens' log-prob has fallen, since it was sampled, by more than this
            many nats on average (DeepSeek-V3.2, 2512.02556, Eq. 9). TRL's documentation has 0.5. All count if left out.
        drop_truncated: leave out completions that hit generation.max_tokens (DAPO).
        entropy: a bonus that holds the entropy at a target; none if left out.
        balance: for surrogate `bapo`, search its bounds at each optimizer step; fixed if left out.
        variance: for surrogate `r2vpo`, move its `lam` until the ratio's variance is at a target; fixed if left out.
    """

    def __init__(
        self,
        recipe: TextRecipe,
        policy: TextPolicy,
        controls: Controls | None = None,
        *,
        surrogate: Annotated[Callable[..., Tensor], Of("surrogate", "clip")] = clip,
        level: Literal["token", "part", "sequence"] = "token",
        reduce: Literal["token", "part", "sequence", "sum"] = "token",
        constant: bool = False,
        correction: Annotated[Callable[..., Correction], Of("correction", "auto")] = auto,
        conflict: Annotated[float, Field(ge=1)] | None = None,
        confident: Positive | None = None,
        off_policy: Positive | None = None,
        drop_truncated: bool = False,
        entropy: EntropyConfig | None = None,
        balance: BalanceConfig | None = None,
        variance: VarianceConfig | None = None,
    ) -> None:
        super().__init__(recipe, policy)
        self.controls = controls or Controls(entropy, variance)
        self.surrogate, self.correction = surrogate, correction
        self.level, self.reduce, self.constant = level, reduce, constant
        self.conflict, self.confident, self.off_policy = conflict, confident, off_policy
        self.penalties = penalties_of(recipe)
        penalties = [penalty for _, penalty in self.penalties.values()]
        self.balance = None if balance is None else Balance(balance)
        self.parts = PartRatios(level, reduce, surrogate)
        self.entropy_before = self.parts.guided
        self.entropy_now = (
            self.controls.entropy is not None or confident is not None or any("entropy" in asked(p) for p in penalties)
        )
        self._moved = False

    def prepare(self, experience: Completions) -> None:
        """Keep the training engine's log-probs before the weights move, if several updates will need them."""
        self._moved = False
        self.parts.forget()
        if self.controls.variance is not None:
            self.surrogate = partial(r2vpo, lam=self.controls.variance.value)
        super().prepare(experience)

    def _prepared(self, rows: list[int], entropy: Tensor | None) -> None:
        self.parts.remember(rows, entropy)

    def measure(self, experience: Completions, part: int, advantages: Tensor, keep: Tensor | None) -> Tensor | None:
        """The sums that an optimizer step needs before its first batch.

        If the recipe searches bounds, the sums are the contributions of tokens to the gradient under each pair of
        bounds. From the second optimizer step of a rollout on, the search takes another pass over its completions. If
        the clip follows the entropy of parts, the sums are the sum and the number of the entropies of the step's
        tokens.
        """
        if self.parts.guided:
            counted = self._counted(experience, keep).tolist()
            mine = [row for rows in self.batches(experience, part, keep) for row in rows if counted[row]]
            return self.parts.entropies(experience, mine, self.policy.device)
        if self.balance is None:
            return None
        moved, self._moved = self._moved, True
        total = self.balance.nothing(self.policy.device)
        for batch in self.batches(experience, part, keep):
            if moved:
                with torch.no_grad():
                    scored = self._scored(experience, batch, advantages, keep)
                log_ratio, mask = scored.log_probs - scored.old, scored.mask
            else:  # until the weights move, every ratio is 1
                mask = experience.trained(batch) & self._counted(experience, keep)[batch, None]
                mask = mask.to(total.device)
                log_ratio = torch.zeros_like(mask, dtype=torch.float32)
            advantage = per_column(advantages[batch])[:, : mask.shape[1]]
            total += self.balance.contributions(log_ratio, advantage, mask)
        return total

    def settle(self, sums: Tensor) -> None:
        """Choose the bounds by the contributions, or take the mean entropy."""
        if self.parts.guided:
            return self.parts.settle(sums)
        assert self.balance is not None
        self.balance.settle(sums)
        self.surrogate = self.balance.surrogate

    def rows(self, experience: Completions, part: int, keep: Tensor | None) -> int:
        """This rank's share of the number that divides the loss: tokens or completions of a part of the rollout.

        With `constant`, it is the number of completions times the longest length.
        """
        counted = self._counted(experience, keep).tolist()
        mine = [row for rows in self.batches(experience, part, None) for row in rows if counted[row]]
        if self.reduce == "token":
            return int(experience.trained(mine).sum()) if mine else 0
        return len(mine) * (self.recipe.generation.max_tokens if self.constant else 1)

    def _scored(
        self, experience: Completions, batch: list[int], advantages: Tensor, keep: Tensor | None
    ) -> ScoredTokens:
        scored = super()._scored(experience, batch, advantages, keep)
        mask, weight = scored.mask, None
        if self.conflict is not None:
            weight = self._conflicts(experience, batch, advantages, self.conflict)[:, : mask.shape[1]]
        if self.confident is not None and scored.entropy is not None:
            sure = confident_rows(scored.entropy.detach(), mask, self.confident).float()[:, None].expand_as(mask)
            weight = sure if weight is None else weight * sure
        if self.off_policy is not None:
            sampler = scored.old - scored.gap
            near = stray_weights(sampler - scored.log_probs, scored.advantage, mask, self.off_policy)
            weight = near if weight is None else weight * near
        return replace(scored, weight=weight)

    def _measure(self, experience: Completions, batch: list[int]) -> Measure | None:
        temperature = self.policy.recipe.generation.temperature
        return (lambda logits, ids, *_: own_curvature(logits, ids, temperature)) if self.parts.curved else None

    def _conflicts(self, experience: Completions, batch: list[int], advantages: Tensor, boost: float) -> Tensor:
        """[R, T] weights of a batch. They follow from whole groups, even if the batch holds a part of a group."""
        groups = experience.groups
        rows = torch.isin(groups, groups[batch]).nonzero().flatten().tolist()
        device = self.policy.device
        ids, mask = right_padded([experience.sampled.ids[row] for row in rows], 0, device)
        of = groups[rows].to(device)
        first, last = (
            conflict_weights(ids, advantages[rows], of, mask, boost=boost, align=align) for align in ALIGNMENTS
        )
        # A token that is in conflict from both ends counts once.
        found = torch.where(first.minimum(last) == 0, 0.0, first.maximum(last))
        return found[[rows.index(row) for row in batch]]

    def _loss(self, experience: Completions, scored: ScoredTokens, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a batch over the `rows` of the optimizer step, and metrics as [sum, count]."""
        mask = scored.mask
        penalties = self._penalties(experience, scored)
        penalty = torch.stack([factor * value for factor, value in penalties.values()]).sum(0) if penalties else None
        corrected, count = self.correction(scored.gap), mask.sum().float()
        surrogate, shares = self._by_part(experience, scored)
        correction = None if corrected is None else corrected[0]
        weights = [one for one in (correction, scored.weight, shares) if one is not None]
        weight = torch.stack(weights).prod(0) if weights else None
        # With reduce part, a weight gives each part its share of the row.
        reduce = "sequence" if self.reduce == "part" else self.reduce
        loss, metrics = policy_loss(
            scored.log_probs, scored.old, scored.advantage, mask, surrogate=surrogate, level=self._level,
            weight=weight, penalty=penalty, reduce=reduce, denom=rows,
        )  # fmt: skip
        if corrected is not None:
            cut = torch.where(mask, corrected[1], False)
            metrics["correction_cut"] = torch.stack([cut.sum().float(), count])
        for name, (_, value) in penalties.items():
            metrics[name] = torch.stack([torch.where(mask, value.detach(), 0.0).sum(), count])
        if self.balance is not None:
            metrics |= self.balance.metrics(count)
        if self.controls.variance is not None:
            metrics["ratio_variance"] = ratio_variance(scored.log_probs - scored.old, mask)
        return loss, metrics

    @property
    def _level(self) -> str:
        """The level at which the loss pools ratios. For parts it is the token: the surrogate pools their ratios."""
        return "token" if self.level == "part" else self.level

    def _held(self, experience: Completions, scored: ScoredTokens) -> Tensor:
        """[R, T] bool: tokens that have no gradient because of a bound."""
        surrogate, _ = self._by_part(experience, scored)
        return held_columns(
            scored.log_probs, scored.old, scored.advantage, scored.mask, surrogate=surrogate, level=self._level
        )

    def _by_part(self, experience: Completions, scored: ScoredTokens) -> tuple[Callable[..., Tensor], Tensor | None]:
        """The surrogate of a batch, and [R, T] weights of its tokens, where the recipe uses parts."""
        if not self.parts.asked:
            return self.surrogate, None
        units = units_of(experience, scored.batch, scored.mask.device)
        made = self.parts.surrogate(self.surrogate, units, scored.batch, scored.measured)
        return made, self.parts.weight(units, scored.mask)

    def _penalties(self, experience: Completions, scored: ScoredTokens) -> dict[str, tuple[float, Tensor]]:
        """Factor and values [R, T] of each term that is added to the loss, by the name of its metric."""
        has: dict[str, Callable[[], Any]] = {
            "logp": lambda: scored.log_probs,
            "ref_logp": lambda: self._reference(experience, scored),
            "old_logp": lambda: scored.old,
            "mask": lambda: scored.mask,
            "adv": lambda: scored.advantage,
            "entropy": lambda: None if scored.entropy is None else scored.entropy.detach(),
        }
        found = {name: (weight, answered(penalty, has)) for name, (weight, penalty) in self.penalties.items()}
        if self.controls.entropy is not None and scored.entropy is not None:
            found["exact_entropy"] = -self.controls.entropy.value, scored.entropy
        return found


def penalties_of(recipe: TextRecipe | MaskedRecipe) -> dict[str, tuple[float, Callable[..., Tensor]]]:
    """Weight and function of each penalty by the name of its metric, always in the same order."""
    known = list(TOKEN_PENALTIES)
    chosen = sorted(recipe.penalties, key=lambda one: known.index(one.name) if one.name in known else len(known))
    # The prefix keeps a user's penalty from taking the name of another metric.
    names = [one.name if one.name == one.short else f"penalty/{one.short}" for one in chosen]
    return {name: (one["weight"], one.make()) for name, one in zip(names, chosen)}
