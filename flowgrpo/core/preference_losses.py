"""Losses of preferences: what a pair of a better and a worse answer says about their log-probs.

The losses of pairs take these arguments, and each returns one loss per pair, [P]:

- logp: [B] log-probs under the policy, summed over the tokens of an answer, with gradient.
- ref_logp: [B] the same under the reference; it gets no gradient.
- lengths: [B] numbers of tokens, at least 1.
- pairs: [P, 2] rows of (winner, loser), as `pairs_of` gives them.

s_w and s_l are the log-ratios of winner and loser to the reference, log(pi / pi_ref). Every loss raises a ValueError if
shapes do not match, or if a probability is out of range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..parts.needs import at_least, idle, needs
from ..parts.ranges import Fraction, NotNegative, Positive, Share
from .advantages import as_precise, group_index
from .forward_process import arg_extreme

PAIRINGS = ("extremes", "all")
CERTAIN = 1e-6
"""A mean log-prob nearer to 0 than this counts as this near, so that its odds are finite."""


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


def gap(values: Tensor, pairs: Tensor) -> Tensor:
    """[P] the winner's value less the loser's, of values [B] and pairs [P, 2].

    Raises:
        ValueError: If shapes do not match.
    """
    if values.dim() != 1 or pairs.dim() != 2 or pairs.shape[1] != 2:
        raise ValueError(
            f"log-probs have shape {tuple(values.shape)} and `pairs` {tuple(pairs.shape)}; give one sum per row, (B,), "
            "and (P, 2) rows of winner and loser"
        )
    return values[pairs[:, 0]] - values[pairs[:, 1]]


def checked_doubt(smoothing: float) -> float:
    """The probability that a preference is wrong.

    Raises:
        ValueError: it is not in [0, 1/2).
    """
    if not 0 <= smoothing < 0.5:
        raise ValueError(f"`smoothing` is {smoothing}; use a probability in [0, 0.5)")
    return smoothing


def require_rows(**rows: Tensor) -> None:
    """Refuse values of rows that are not all [B].

    Raises:
        ValueError: their shapes differ, or are not of one dimension.
    """
    shapes = [tuple(values.shape) for values in rows.values()]
    if len(shapes[0]) != 1 or len(set(shapes)) > 1:
        told = ", ".join(f"`{name}` {shape}" for name, shape in zip(rows, shapes))
        raise ValueError(f"shapes are {told}; give all as (B,)")


def log_ratios(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """[B] log(pi / pi_ref) of rows, without a gradient for the reference."""
    require_rows(logp=logp, ref_logp=ref_logp)
    return logp - ref_logp.detach()


def per_token(logp: Tensor, lengths: Tensor) -> Tensor:
    """[B] sums over the tokens of rows as means."""
    require_rows(logp=logp, lengths=lengths)
    return logp / lengths.to(logp)


def _both(logp: Tensor, ref_logp: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """[P] s_w and [P] s_l."""
    scores = log_ratios(logp, ref_logp)
    gap(scores, pairs)
    return scores[pairs[:, 0]], scores[pairs[:, 1]]


def hinge(logp: Tensor, ref_logp: Tensor, pairs: Tensor, *, beta: Positive = 0.1) -> Tensor:
    """`max(0, 1 - beta (s_w - s_l))` (SLiC-HF, arXiv 2305.10425; on log-ratios RSO, arXiv 2309.06657).

    A pair that the policy tells apart by 1 / beta has no gradient.

    Options:
        beta: strength of the KL to the reference.
    """
    return (1 - beta * gap(log_ratios(logp, ref_logp), pairs)).relu()


def ipo(
    logp: Tensor, ref_logp: Tensor, lengths: Tensor, pairs: Tensor, *, beta: Positive = 0.1, mean: bool = True
) -> Tensor:
    """`(s_w - s_l - 1 / (2 beta))^2` (IPO, arXiv 2310.12036, Eq. 17, where beta is tau).

    The loss of a pair is 0 where the lead is 1 / (2 beta), so a certain preference does not push without end.

    Options:
        beta: the smaller it is, the further winner and loser part.
        mean: whether s is a mean over the tokens of an answer, as in the authors' experiments, and not a sum.
    """
    scores = log_ratios(logp, ref_logp)
    return (gap(per_token(scores, lengths) if mean else scores, pairs) - 1 / (2 * beta)).square()


def robust(logp: Tensor, ref_logp: Tensor, pairs: Tensor, *, beta: Positive = 0.1, smoothing: Share = 0.1) -> Tensor:
    """DPO that labels which are wrong with a known probability do not bias (robust DPO, arXiv 2403.00409).

    `(-(1 - e) log sigmoid(m) + e log sigmoid(-m)) / (1 - 2 e)` with m = beta (s_w - s_l) and the probability e. `dpo`
    with `smoothing` is conservative instead: its optimum has a bounded lead.

    Options:
        beta: strength of the KL to the reference.
        smoothing: e, in [0, 1/2).

    Returns:
        [P]; a loss may be negative.
    """
    wrong, margin = checked_doubt(smoothing), beta * gap(log_ratios(logp, ref_logp), pairs)
    return (wrong * logsigmoid(-margin) - (1 - wrong) * logsigmoid(margin)) / (1 - 2 * wrong)


def exo(logp: Tensor, ref_logp: Tensor, pairs: Tensor, *, beta: Positive = 0.1, smoothing: Share = 1e-3) -> Tensor:
    """The reverse KL of the policy's preference from the labels (EXO, arXiv 2402.00856, Eq. 16 with two answers).

    With p = sigmoid(beta (s_w - s_l)), the loss is p log(p / (1 - e)) + (1 - p) log((1 - p) / e). DPO has the KL in the
    other direction.

    Options:
        beta: strength of the KL to the reference.
        smoothing: e, the probability that a preference is wrong, in (0, 1/2).

    Returns:
        [P], not negative.
    """
    if not 0 < smoothing < 0.5:
        raise ValueError(f"`smoothing` is {smoothing}; use a probability in (0, 0.5), since the loss has its logarithm")
    margin = beta * gap(log_ratios(logp, ref_logp), pairs)
    right, wrong = logsigmoid(margin), logsigmoid(-margin)
    labels = margin.new_tensor([1 - smoothing, smoothing]).log()
    return right.exp() * (right - labels[0]) + wrong.exp() * (wrong - labels[1])


def nca(logp: Tensor, ref_logp: Tensor, pairs: Tensor, *, beta: Positive = 0.1) -> Tensor:
    """Noise contrastive alignment of a pair (NCA, arXiv 2402.05369).

    `-log sigmoid(beta s_w) - (log sigmoid(-beta s_w) + log sigmoid(-beta s_l)) / 2`: each answer by itself, so the
    winner does not become less likely.

    Options:
        beta: strength of the KL to the reference.
    """
    better, worse = (beta * one for one in _both(logp, ref_logp, pairs))
    return -logsigmoid(better) - (logsigmoid(-better) + logsigmoid(-worse)) / 2


def bco(logp: Tensor, ref_logp: Tensor, pairs: Tensor, *, beta: Positive = 0.1) -> Tensor:
    """`-log sigmoid(beta s_w) - log sigmoid(-beta s_l)`: a classifier of single answers (BCO, arXiv 2404.04656).

    The paper's shift by the mean reward is not here.

    Options:
        beta: strength of the KL to the reference.
    """
    better, worse = _both(logp, ref_logp, pairs)
    return -logsigmoid(beta * better) - logsigmoid(-beta * worse)


def sppo(logp: Tensor, ref_logp: Tensor, pairs: Tensor, *, beta: Positive = 0.1) -> Tensor:
    """`(s_w - 1 / (2 beta))^2 + (s_l + 1 / (2 beta))^2` (SPPO, arXiv 2405.00675, Eq. 4.7, a sure preference).

    Options:
        beta: 1 / eta of the paper; the smaller it is, the further the answers part.
    """
    better, worse = _both(logp, ref_logp, pairs)
    return (better - 1 / (2 * beta)).square() + (worse + 1 / (2 * beta)).square()


def apo(
    logp: Tensor, ref_logp: Tensor, pairs: Tensor, *, beta: Positive = 0.1, anchor: Literal["zero", "down"] = "zero"
) -> Tensor:
    """Preferences that say where the answers should go, and not only how far apart (APO, arXiv 2408.06266, Eq. 7, 8).

    "zero" is for winners that are better than the policy: `1 - sigmoid(beta s_w) + sigmoid(beta s_l)` raises the winner
    and lowers the loser. "down" is for winners that are worse than the policy: `sigmoid(beta s_w) + 1 -
    sigmoid(beta (s_w - s_l))` lowers both, and the loser more.

    Options:
        beta: strength of the KL to the reference.
        anchor: where the answers should go.

    Returns:
        [P], from 0 to 2.
    """
    better, worse = (beta * one for one in _both(logp, ref_logp, pairs))
    if anchor == "zero":
        return (-better).sigmoid() + worse.sigmoid()
    return better.sigmoid() + (worse - better).sigmoid()


def discopop(logp: Tensor, ref_logp: Tensor, pairs: Tensor, *, beta: Positive = 0.1, tau: Fraction = 0.05) -> Tensor:
    """A blend of the logistic and the exponential loss (DiscoPOP, arXiv 2406.08414, Eq. 5).

    `-(1 - w) log sigmoid(m) + w e^(-m)` with m = beta (s_w - s_l) and w = sigmoid(m / tau).

    Options:
        beta: strength of the KL to the reference.
        tau: temperature of the blend. Above 1, the loss of a wrong pair would grow without bound.
    """
    margin = beta * gap(log_ratios(logp, ref_logp), pairs)
    share = (margin / tau).sigmoid()
    # e^(-m) has the weight w, which is 0 in all digits where the power would overflow.
    return -(1 - share) * logsigmoid(margin) + (logsigmoid(margin / tau) - margin).exp()


@needs(idle("alpha", where=lambda choice: choice["divergence"] != "alpha", why="only divergence alpha reads it"))
def f_dpo(
    logp: Tensor,
    ref_logp: Tensor,
    pairs: Tensor,
    *,
    beta: Positive = 0.1,
    divergence: Literal["forward", "jsd", "alpha"] = "jsd",
    alpha: Positive = 0.5,
) -> Tensor:
    """DPO with another divergence from the reference than the reverse KL (f-DPO, arXiv 2309.16240).

    `-log sigmoid(beta (f'(e^s_w) - f'(e^s_l)))`, where f' is -e^(-s) for the forward KL, log sigmoid(s) for the
    divergence of Jensen and Shannon, and e^((a - 1) s) / (a - 1) for the alpha-divergence; constants drop out.

    Options:
        beta: strength of the divergence.
        divergence: from the reference.
        alpha: a of the alpha-divergence; 1 would be the reverse KL, which `dpo` has.

    Raises:
        ValueError: If shapes do not match, or `alpha` is 1.
    """
    if divergence == "alpha" and alpha == 1:
        raise ValueError("`alpha` is 1, where the alpha-divergence is the reverse KL; use loss dpo")
    scores = log_ratios(logp, ref_logp)
    if divergence == "jsd":
        return bradley_terry(beta * gap(logsigmoid(scores), pairs))
    power = -1.0 if divergence == "forward" else alpha - 1
    # A power beyond float32 has no gradient that could be used. Less 1, it keeps its digits where alpha is nearly 1.
    return bradley_terry(beta * gap((power * scores).clamp(max=80.0).expm1() / power, pairs))


def dpo_norm(
    logp: Tensor,
    ref_logp: Tensor,
    lengths: Tensor,
    pairs: Tensor,
    *,
    beta: Positive = 5.0,
    smoothing: Share = 0.0,
) -> Tensor:
    """DPO of log-ratios that are means over the tokens of an answer (Tulu 3, arXiv 2411.15124).

    Long answers weigh no more than short ones. So `beta` is larger than for `dpo`.

    Options:
        beta: strength of the KL to the reference.
        smoothing: probability that a preference is wrong, in [0, 1/2).
    """
    scores = per_token(log_ratios(logp, ref_logp), lengths)
    return bradley_terry(beta * gap(scores, pairs), checked_doubt(smoothing))


def mpo(
    logp: Tensor,
    ref_logp: Tensor,
    lengths: Tensor,
    pairs: Tensor,
    *,
    beta: Positive = 0.1,
    preference: NotNegative = 0.8,
    quality: NotNegative = 0.2,
    alpha: NotNegative = 1.0,
) -> Tensor:
    """The weighted sum of `dpo`, `bco` and fine-tuning on the winner (MPO, arXiv 2411.10442).

    Options:
        beta: strength of the KL to the reference.
        preference: weight of the loss of `dpo`.
        quality: weight of the loss of `bco`.
        alpha: weight of the negative mean log-prob of the winner's tokens.
    """
    compared = preference * bradley_terry(beta * gap(log_ratios(logp, ref_logp), pairs))
    judged = quality * bco(logp, ref_logp, pairs, beta=beta)
    return compared + judged - alpha * per_token(logp, lengths)[pairs[:, 0]]


def orpo(logp: Tensor, lengths: Tensor, pairs: Tensor, *, weight: NotNegative = 0.1) -> Tensor:
    """Fine-tuning on the winner, and the odds ratio of winner and loser (ORPO, arXiv 2403.07691, Eq. 4 and 7).

    `-m_w - weight log sigmoid(log odds_w - log odds_l)` with the mean log-prob m of a token and odds = e^m / (1 - e^m).
    There is no reference.

    Options:
        weight: lambda, the weight of the odds ratio.
    """
    mean = per_token(logp, lengths)
    odds = mean - (-mean.clamp(max=-CERTAIN).expm1()).log()
    return -weight * logsigmoid(gap(odds, pairs)) - mean[pairs[:, 0]]


def cpo(
    logp: Tensor,
    lengths: Tensor,
    pairs: Tensor,
    *,
    beta: Positive = 0.1,
    alpha: NotNegative = 1.0,
    smoothing: Share = 0.0,
) -> Tensor:
    """DPO without a reference, and fine-tuning on the winner (CPO, arXiv 2401.08417, Eq. 3).

    `-log sigmoid(beta (logp_w - logp_l)) - alpha logp_w / |w|`.

    Options:
        beta: scale of the difference of log-probs.
        alpha: weight of the negative mean log-prob of the winner's tokens.
        smoothing: probability that a preference is wrong, in [0, 1/2).
    """
    compared = bradley_terry(beta * gap(logp, pairs), checked_doubt(smoothing))
    return compared - alpha * per_token(logp, lengths)[pairs[:, 0]]


@needs(at_least("rollout.group", lambda recipe, choice: 3, "compares two answers beside the best one", "use 3 or more"))
def tpo(
    logp: Tensor,
    lengths: Tensor,
    advantages: Tensor,
    groups: Tensor | Sequence[int],
    *,
    beta: Positive = 0.01,
    alpha: NotNegative = 1.0,
    mean: bool = False,
    margin: NotNegative = 0.0,
) -> Tensor:
    """Fine-tuning on the best answer, and a preference between two others (TPO, arXiv 2405.16681).

    `-log sigmoid(beta (logp_w - logp_l) - margin) - alpha logp_b / |b|`, without a reference. The best answer b of a
    prompt is the gold answer. The winner w and the loser l are the best and the worst of the rest. With `mean` and a
    `margin`, this is the paper's TPO-L.

    Args:
        logp: [B] summed log-probs, with gradient.
        lengths: [B] numbers of columns, at least 1.
        advantages: [B]; the order of the answers of a prompt.
        groups: [B] integer ids; whole groups.
        beta: scale of the difference of log-probs.
        alpha: weight of the negative mean log-prob of the best answer's tokens.
        mean: whether the log-probs that are compared are means over tokens.
        margin: gamma, the lead that the winner should have.

    Returns:
        [P], one loss for each prompt whose answers but the best differ in their advantages.

    Raises:
        ValueError: If shapes do not match.
    """
    index, count = group_index(groups, len(logp), logp.device)
    best = arg_extreme(as_precise(advantages), index, count, 1.0)
    rest = torch.ones_like(index, dtype=torch.bool)
    rest[best] = False
    rest = rest.nonzero().flatten()
    pairs = rest[pairs_of(advantages[rest], index[rest])]
    means = per_token(logp, lengths)
    compared = bradley_terry(beta * gap(means if mean else logp, pairs) - margin)
    return compared - alpha * means[best[index[pairs[:, 0]]]]
