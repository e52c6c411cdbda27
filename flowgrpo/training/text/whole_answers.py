"""Losses of whole answers on their summed log-probs, for causal and for masked language models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...core.advantages import group_index
from ...core.answer_losses import preferred_pairs
from ...core.preference_losses import pairs_of
from ...core.surrogates import require_gradient
from ...parts.asked import answered, asked, not_given
from ...parts.choice import Choice, choices, named
from ...parts.needs import unscored_counts
from ..losses.objective import pair

ANSWERED = ("logp", "ref_logp", "old_logp", "lengths", "log_ratio", "advantages", "correct", "groups", "pairs", "drift")
"""What a loss of answers may ask for."""

Loss = Callable[..., Tensor]


def of_answers(recipe: Any, choice: Choice) -> list[str]:
    """Faults of a recipe: it uses what only tokens have, or the loss asks for what a run does not give."""
    told, tokens = f"{choice.kind} {choice.short}", "estimated" if recipe.task == "masked" else "tokens"
    faults = [
        f"token penalty {penalty.short} works on tokens, and {told} works on whole answers; leave it out of penalties, "
        f"or use objective {tokens}"
        for penalty in recipe.penalties
    ]
    if recipe.select:
        faults.append(f"{told} takes whole groups; leave select out")
    if "pairs" in asked(choice["loss"].target):
        faults += unscored_counts(recipe, f"answer loss {choice['loss'].short}")
    if "drift" in asked(choice["loss"].target):
        asks = f"answer loss {choice['loss'].short} asks for drift, which is measured"
        if recipe.task == "masked":
            faults.append(f"{asks} for causal models alone; use another loss, such as apo")
        elif recipe.rollout.prompts < 2:
            faults.append(f"{asks} on answers behind other prompts, and rollout.prompts is 1; raise rollout.prompts")
        elif recipe.rollout.prompts < 2 * recipe.optimizer.updates:
            faults.append(
                f"{asks} on answers behind other prompts of an optimizer step, and optimizer.updates "
                f"{recipe.optimizer.updates} leaves steps with a single one of rollout.prompts "
                f"{recipe.rollout.prompts}; lower optimizer.updates, or raise rollout.prompts"
            )
    return faults + not_given(choice["loss"], ANSWERED)


@dataclass(frozen=True)
class WholeAnswers:
    """R answers, in whole groups.

    Attributes:
        logp: [R] summed log-probs under the current policy, with gradients.
        old: [R] summed log-probs under the policy that sampled.
        lengths: [R] numbers of tokens.
        trained: [R] bool: answers that are trained.
        advantages: [R].
        groups: [R] integer ids.
        reference: gives [R] under the reference, by further calls of the model.
        drawn: whether the policy drew the answers.
        drift: the KL to the reference that `AnswerObjective.measure` sums; None if the loss does not ask for it.
        compared: whether advantages are rewards less a baseline, so that 0 says nothing of an answer.
    """

    logp: Tensor
    old: Tensor
    lengths: Tensor
    trained: Tensor
    advantages: Tensor
    groups: Tensor
    reference: Callable[[], Tensor]
    drawn: bool
    drift: Tensor | None = None
    compared: bool = True


def answer_loss(loss: Loss, answers: WholeAnswers) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of a loss over its pairs, groups or answers, with a gradient even if there are none; and metrics.

    The winner of a prompt is the answer with the highest advantage, and the loser is the answer with the lowest. An
    answer with an advantage above 0 is right, and others are wrong. A prompt whose advantages are all equal has no
    winner and no loser, and no right and no wrong answers. For a loss that asks for drift, such as `kto`, a prompt
    whose answers are all at the baseline has no good and no bad answers.
    """
    asks, mine = asked(loss), answers.trained.nonzero().flatten()
    if "correct" in asks:
        mine = mine[_tells_apart(answers.advantages, answers.groups)[mine]]
    elif "drift" in asks and answers.compared:
        mine = mine[_tells_apart(answers.advantages, answers.groups, also=0.0)[mine]]
    lengths, advantage, own = answers.lengths.clamp(min=1), answers.advantages[mine], answers.groups[mine]
    pairs = pairs_of(advantage, own) if "pairs" in asks or not answers.drawn else None
    known: dict[str, Tensor] = {}

    def reference() -> Tensor:
        if not known:
            known["sums"] = answers.reference()[mine]
        return known["sums"]

    whole, before = answers.logp, answers.old
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
        "drift": lambda: answers.drift,
    }
    losses = answered(loss, has)
    require_gradient(named("answer loss", loss), losses, "`logp` or `log_ratio`")
    metrics = {"loss": torch.stack([losses.detach().sum(), losses.new_tensor(len(losses))])}
    if pairs is not None:
        metrics["pairs"] = whole.new_tensor([len(pairs), len(answers.groups.unique())])
        if not answers.drawn:
            likely = (whole[mine] - known["sums"]) if known else (whole / lengths)[mine]
            metrics["preferred"] = pair(preferred_pairs(likely.detach(), pairs))
    return losses.sum() + 0.0 * whole.sum(), metrics


def _tells_apart(advantages: Tensor, groups: Tensor, also: float | None = None) -> Tensor:
    """[R] bool: rows of groups whose advantages differ. Equal advantages do not say whether an answer is right.

    With `also`, the advantages of a group also count as different if they are all equal, but not to this number.
    """
    index, count = group_index(groups, len(advantages), advantages.device)
    start = advantages.new_full((count,), 0.0 if also is None else also)
    low, high = (
        start.scatter_reduce(0, index, advantages, how, include_self=also is not None) for how in ("amin", "amax")
    )
    return (low < high)[index]


def counts_answers(loss: Loss) -> bool:
    """Whether a loss has one value per answer, so that it is divided by the number of answers, not of prompts."""
    while isinstance(loss, partial):
        loss = loss.func
    return bool(vars(loss).get("per_answer", False))


def compares(recipe: Any) -> bool:
    """Whether a part of the recipe asks for the log-probs of the reference, or the reference teaches the policy."""
    kinds = ("token penalty", "answer loss")
    return bool(recipe.objective.get("frozen")) or any(
        "ref_logp" in asked(choice.target) for _, choice in choices(recipe) if choice.kind in kinds
    )


def try_loss(chosen: Choice) -> None:
    """Call a loss of answers once, on three answers of one token each.

    Raises:
        ValueError: its options are out of range or do not fit together, or it does not return what it should.
    """
    nothing = torch.zeros(3)
    values: dict[str, Any] = dict.fromkeys(ANSWERED, nothing)
    values |= {"lengths": nothing + 1, "advantages": torch.tensor([1.0, 0.0, -1.0])}
    values |= {
        "drift": torch.zeros(()),
        "correct": torch.tensor([True, False, False]),
        "groups": nothing.long(),
        "pairs": torch.tensor([[0, 2]]),
    }
    count = (3,) if counts_answers(chosen.target) else (1,)
    require_shape(
        answered(chosen.make(), called(values)),
        count,
        chosen,
        "one value for each pair, prompt or marked answer",
        "three",
    )


def called(values: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    """Functions that give values, in the form that `answered` takes."""
    return {name: partial(values.__getitem__, name) for name in values}


def require_shape(found: Any, shape: tuple[int, ...], choice: Choice, wanted: str, answers: str = "two") -> None:
    """Refuse what a part returns for two or three answers of a token each, if it has not this shape."""
    if isinstance(found, Tensor) and found.shape == shape:
        return
    has = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"{found!r:.60}"
    raise ValueError(
        f"{choice.kind} {choice.short} returns {has} for {answers} answers of a token each, and the shape must be "
        f"{shape}; return {wanted}"
    )
