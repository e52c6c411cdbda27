"""Losses on whole answers or images, in pairs or groups: alternatives to GRPO on the same scored rollouts.

Log-probs are sums over a row, [B]. Pairs are [P, 2] rows (winner, loser), as `pairs_of` gives them. A function returns
one loss per pair, row or group. The caller adds them up and divides by the count of the whole optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from ..parts.ranges import Positive, Share
from .advantages import as_precise, group_index, sum_by_group
from .forward_process import arg_extreme

PAIRINGS = ("extremes", "all")

Loss = TypeVar("Loss", bound=Callable[..., Tensor])


def per_answer(loss: Loss) -> Loss:
    """Mark a loss that has one value per answer: it is divided by the number of answers, not of prompts."""
    loss.per_answer = True  # type: ignore[attr-defined]
    return loss


def pairs_of(rewards: Tensor, groups: Tensor | Sequence[int], *, how: str = "extremes", margin: float = 0.0) -> Tensor:
    """Preference pairs from scored groups (VerIPO, arXiv 2505.19000).

    Args:
        rewards: [B]; a row with NaN is in no pair.
        groups: [B] integer ids.
        how: "extremes" pairs the best and the worst of each group (the first of equals); "all" pairs every two rows of
            a group.
        margin: the rewards of a pair differ by more than `margin`.

    Returns:
        [P, 2] rows of the winner and the loser.

    Raises:
        ValueError: For an unknown `how`, a negative `margin`, or shapes that do not match.
    """
    if how not in PAIRINGS:
        raise ValueError(f"`how` is {how!r}; use one of {', '.join(PAIRINGS)}")
    if not margin >= 0:
        raise ValueError(f"`margin` is {margin}; use 0 or more")
    if rewards.dim() != 1:
        raise ValueError(f"`rewards` has shape {tuple(rewards.shape)}; give one reward per row, (B,)")
    values = as_precise(rewards)
    index, count = group_index(groups, len(values), values.device)
    if how == "all":
        better = (values[:, None] - values[None, :] > margin) & (index[:, None] == index[None, :])
        return better.nonzero()
    missing = values.isnan()
    best = arg_extreme(values.masked_fill(missing, -torch.inf), index, count, 1.0)
    worst = arg_extreme(values.masked_fill(missing, torch.inf), index, count, -1.0)
    pairs = torch.stack([best, worst], 1)
    return pairs[values[best] - values[worst] > margin]


def bradley_terry(margin: Tensor, smoothing: float = 0.0) -> Tensor:
    """`-(1 - s) log sigmoid(m) - s log sigmoid(-m)`: loss of a preference that is wrong with probability s."""
    return -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)


def _gap(values: Tensor, pairs: Tensor) -> Tensor:
    if values.dim() != 1 or pairs.dim() != 2 or pairs.shape[1] != 2:
        raise ValueError(
            f"log-probs have shape {tuple(values.shape)} and `pairs` {tuple(pairs.shape)}; give one sum per row, (B,), "
            "and (P, 2) rows of winner and loser"
        )
    return values[pairs[:, 0]] - values[pairs[:, 1]]


def dpo(logp: Tensor, ref_logp: Tensor, pairs: Tensor, *, beta: Positive = 0.1, smoothing: Share = 0.0) -> Tensor:
    """Direct preference optimisation, `-log sigmoid(beta (log r_w - log r_l))` (DPO, arXiv 2305.18290, Eq. 7).

    Here r is the ratio to the reference. `forward_process.flow_dpo` is the same loss with a matching error in place of
    the log-prob.

    Args:
        logp: [B] summed log-probs, with gradient.
        ref_logp: [B] summed log-probs of the reference.
        pairs: [P, 2] rows of winner and loser.
        beta: strength of the KL to the reference.
        smoothing: probability that a preference is wrong (conservative DPO), in [0, 1/2).

    Returns:
        [P].

    Raises:
        ValueError: If shapes do not match or `smoothing` is out of range.
    """
    if not 0 <= smoothing < 0.5:
        raise ValueError(f"`smoothing` is {smoothing}; use a probability in [0, 0.5)")
    return bradley_terry(beta * _gap(logp - ref_logp.detach(), pairs), smoothing)


def simpo(logp: Tensor, lengths: Tensor, pairs: Tensor, *, beta: Positive = 2.0, margin: float = 1.0) -> Tensor:
    """`-log sigmoid(beta (logp_w / |w| - logp_l / |l|) - margin)`, without reference (SimPO, arXiv 2405.14734, Eq. 6).

    Args:
        logp: [B] summed log-probs, with gradient.
        lengths: [B] numbers of columns, at least 1.
        pairs: [P, 2] rows of winner and loser.
        beta: scale of the difference of mean log-probs.
        margin: gamma, the lead that the winner should have.

    Returns:
        [P].

    Raises:
        ValueError: If shapes do not match.
    """
    return bradley_terry(beta * _gap(logp / lengths.to(logp), pairs) - margin)


@per_answer
def group_regression(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, groups: Tensor | Sequence[int], *, beta: Positive = 1.0
) -> Tensor:
    """`(A - beta (log r - its group's mean))^2 / (2 beta)`: Reg-GRPO (arXiv 2506.07464) without a partition function.

    At the optimum beta log r = A + const. The constant depends on the prompt and drops out of the difference to the
    group's mean. The paper also divides by the group's standard deviation, which is 0 on-policy because all log r are
    0; here `beta` takes its place. At r = 1, and with advantages centred in their group, the gradient is that of
    REINFORCE.

    Args:
        logp: [B] summed or mean log-probs, with gradient.
        old_logp: [B] log-probs under the policy that sampled.
        advantages: [B].
        groups: [B] integer ids; whole groups.
        beta: advantage per unit of log-ratio, above 0.

    Returns:
        [B].

    Raises:
        ValueError: If `beta` is not positive or shapes do not match.
    """
    if not beta > 0:
        raise ValueError(f"`beta` is {beta}; use a positive number")
    log_ratio = logp - old_logp.detach()
    index, count = group_index(groups, len(log_ratio), log_ratio.device)
    totals = sum_by_group(torch.stack([log_ratio, torch.ones_like(log_ratio)], 1), index, count)
    predicted = beta * (log_ratio - (totals[:, 0] / totals[:, 1])[index])
    return (advantages.detach().to(log_ratio) - predicted).square() / (2 * beta)


def real(
    log_ratio: Tensor, correct: Tensor, groups: Tensor | Sequence[int], *, tau: Positive = 0.5, each: bool = False
) -> Tensor:
    """Rewards as labels: correct answers should be likelier than wrong ones (REAL, arXiv 2602.05630).

    The loss of a group is log(1 + sum over wrong of e^(s / tau)) + log(1 + sum over correct of e^(-s / tau)). The score
    s is the log-ratio of a row, and a score above the anchor logit 0 should mean a correct answer. The gradient of a
    row is never above 1 / tau, even if its score is very wrong. With `each` the loss is plain binary cross-entropy: the
    mean over the group of softplus(-s / tau) for a correct row and softplus(s / tau) for a wrong row.

    Args:
        log_ratio: [B] with gradient: mean log-ratio of a row to the policy that sampled.
        correct: [B] bool.
        groups: [B] integer ids; whole groups.
        tau: temperature, above 0.
        each: whether every row is judged by itself.

    Returns:
        [M], one loss per group in the order of their ids.

    Raises:
        ValueError: If `tau` is not positive or shapes do not match.
    """
    if not tau > 0:
        raise ValueError(f"`tau` is {tau}; use a positive temperature")
    if log_ratio.dim() != 1 or correct.shape != log_ratio.shape:
        raise ValueError(
            f"`log_ratio` has shape {tuple(log_ratio.shape)}, `correct` {tuple(correct.shape)}; give both as (B,)"
        )
    right = correct.bool()
    index, count = group_index(groups, len(log_ratio), log_ratio.device)
    logits = torch.where(right, -log_ratio, log_ratio) / tau
    if each:
        totals = sum_by_group(torch.stack([softplus(logits), torch.ones_like(logits)], 1), index, count)
        return totals[:, 0] / totals[:, 1]
    cell = 2 * index + right.long()
    top = logits.new_zeros(2 * count).scatter_reduce(0, cell, logits.detach(), "amax")  # the anchor is 0
    total = sum_by_group((logits - top[cell]).exp()[:, None], cell, 2 * count)[:, 0]
    return (top + ((-top).exp() + total).log()).view(count, 2).sum(1)


ANSWER_LOSSES: dict[str, Callable[..., Tensor]] = {
    "dpo": dpo,
    "simpo": simpo,
    "regression": group_regression,
    "real": real,
}
"""`loss(logp, ..., *, ...) -> [n]`: a run passes the parameters before the `*` by name."""
