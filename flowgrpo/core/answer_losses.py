"""Losses on whole answers or images, in pairs or groups: alternatives to GRPO on the same scored rollouts.

Log-probs are sums over a row, [B]. Pairs are [P, 2] rows (winner, loser), as `pairs_of` gives them. A function returns
one loss per pair, row or group. The caller adds them up and divides by the count of the whole optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ..parts.needs import Need, needs
from ..parts.ranges import NotNegative, Positive, Share
from .advantages import group_index, sum_by_group
from .preference_losses import (
    apo,
    bco,
    bradley_terry,
    checked_doubt,
    cpo,
    discopop,
    dpo_norm,
    exo,
    f_dpo,
    gap,
    hinge,
    ipo,
    log_ratios,
    mpo,
    nca,
    orpo,
    per_token,
    require_rows,
    robust,
    sppo,
    tpo,
)

Loss = TypeVar("Loss", bound=Callable[..., Tensor])


def per_answer(loss: Loss) -> Loss:
    """Mark a loss that has one value per answer: it is divided by the number of answers, not of prompts."""
    loss.per_answer = True  # type: ignore[attr-defined]
    return loss


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
    return bradley_terry(beta * gap(log_ratios(logp, ref_logp), pairs), checked_doubt(smoothing))


def rpo(
    logp: Tensor,
    ref_logp: Tensor,
    lengths: Tensor,
    pairs: Tensor,
    *,
    beta: Positive = 0.1,
    smoothing: Share = 0.0,
    alpha: NotNegative = 1.0,
) -> Tensor:
    """`dpo` plus `-alpha logp_w / |w|`, which keeps the winner likely (Iterative RPO, arXiv 2404.19733, Eq. 1).

    DPO alone may make both answers of a pair less likely, as long as the loser falls further.

    Args:
        logp: [B] summed log-probs, with gradient.
        ref_logp: [B] summed log-probs of the reference.
        lengths: [B] numbers of columns, at least 1.
        pairs: [P, 2] rows of winner and loser.
        beta: strength of the KL to the reference.
        smoothing: probability that a preference is wrong (conservative DPO), in [0, 1/2).
        alpha: weight of the negative mean log-prob of the winner's tokens.

    Returns:
        [P].

    Raises:
        ValueError: If shapes do not match or `smoothing` is out of range.
    """
    compared = dpo(logp, ref_logp, pairs, beta=beta, smoothing=smoothing)
    return compared - alpha * per_token(logp, lengths)[pairs[:, 0]]


def simpo(
    logp: Tensor,
    lengths: Tensor,
    pairs: Tensor,
    *,
    beta: Positive = 2.0,
    margin: float = 1.0,
    alpha: float = 0.0,
) -> Tensor:
    """`-log sigmoid(beta (r_w - r_l) - margin)`, without reference (SimPO, arXiv 2405.14734, Eq. 6).

    The reward r of an answer is the mean log-prob m of its tokens. With another `alpha` than 0 it is (1 - e^(-alpha m))
    / alpha, which tends to m as alpha tends to 0 (AlphaPO, arXiv 2501.03884).

    Args:
        logp: [B] summed log-probs, with gradient.
        lengths: [B] numbers of columns, at least 1.
        pairs: [P, 2] rows of winner and loser.
        beta: scale of the difference of rewards.
        margin: gamma, the lead that the winner should have.
        alpha: shape of the reward; above 0, unlikely answers differ more.

    Returns:
        [P].

    Raises:
        ValueError: If shapes do not match.
    """
    reward = per_token(logp, lengths)
    if alpha != 0:
        reward = -(-alpha * reward).expm1() / alpha
    return bradley_terry(beta * gap(reward, pairs) - margin)


@per_answer
def likelihood(logp: Tensor, lengths: Tensor) -> Tensor:
    """`-logp / |w|`: supervised fine-tuning on every answer, whatever its advantage. Each answer counts the same.

    Args:
        logp: [B] summed log-probs, with gradient.
        lengths: [B] numbers of columns, at least 1.

    Returns:
        [B].
    """
    return -per_token(logp, lengths)


def preferred_pairs(likely: Tensor, pairs: Tensor) -> Tensor:
    """[P] whether the winner of each pair is likelier than the loser: 1, 0, or 0.5 if both are as likely.

    Args:
        likely: [B] a measure of how likely each row is, such as its log-ratio to the reference.
        pairs: [P, 2] rows of winner and loser.
    """
    return gap(likely, pairs).sign() / 2.0 + 0.5


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
    require_rows(log_ratio=log_ratio, correct=correct)
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


def inpo(
    logp: Tensor, ref_logp: Tensor, old_logp: Tensor, pairs: Tensor, *, eta: Positive = 0.1, share: Share = 0.5
) -> Tensor:
    """`(h - 1 / (2 eta))^2`, a step of self-play towards a Nash policy (INPO, arXiv 2407.00617).

    h is the winner's lead in log-prob less its lead under the mixture of reference and policy that sampled:
    h = gap(logp) - share gap(ref_logp) - (1 - share) gap(old_logp). With share = tau / eta this is the paper's loss. No
    win rate is estimated: a preference counts as certain. The loss of a pair is 0 where the lead is 1 / (2 eta), so the
    winner is not pushed on for ever.

    Args:
        logp: [B] summed log-probs, with gradient.
        ref_logp: [B] summed log-probs of the reference.
        old_logp: [B] summed log-probs of the policy that sampled.
        pairs: [P, 2] rows of winner and loser.
        eta: the smaller it is, the further winner and loser part.
        share: weight of the reference in the mixture; the policy that sampled has the rest.

    Returns:
        [P].

    Raises:
        ValueError: If shapes do not match, or an option is out of range.
    """
    if not (eta > 0 and 0 <= share <= 1):
        raise ValueError(f"eta={eta}, share={share}; use eta > 0 and a share from 0 to 1")
    require_rows(logp=logp, ref_logp=ref_logp, old_logp=old_logp)
    mixture = share * ref_logp.detach() + (1 - share) * old_logp.detach()
    return (gap(logp - mixture, pairs) - 1 / (2 * eta)).square()


@per_answer
def contrastive(
    logp: Tensor, ref_logp: Tensor, advantages: Tensor, groups: Tensor | Sequence[int], *, beta: Positive = 0.1
) -> Tensor:
    """`(d_i - d_j)^2 / (4 beta)` of every two answers of a prompt (CoPG, arXiv 2406.19185).

    d = A - beta log(pi / pi_ref) is the regularised reward of an answer. The value of an answer is the mean over the
    other answers j of its group. The gradient is REINFORCE's on d, with the mean d of the other answers as the
    baseline, whatever policy sampled: there is no importance ratio. For two answers and rewards of 1 and 0, it is IPO.
    Differences of advantages are differences of rewards only without a scale, so use `advantage.scale: none`.

    Args:
        logp: [B] summed log-probs, with gradient.
        ref_logp: [B] summed log-probs of the reference.
        advantages: [B]; a constant of the group has no influence.
        groups: [B] integer ids; whole groups.
        beta: strength of the KL to the reference, above 0.

    Returns:
        [B]; 0 for an answer that is alone in its group.

    Raises:
        ValueError: If `beta` is not positive or shapes do not match.
    """
    if not beta > 0:
        raise ValueError(f"`beta` is {beta}; use a positive strength of the KL")
    require_rows(logp=logp, ref_logp=ref_logp, advantages=advantages)
    index, _ = group_index(groups, len(logp), logp.device)
    value = advantages.detach().to(logp) - beta * (logp - ref_logp.detach())
    others = (index[:, None] == index[None, :]).fill_diagonal_(False)
    squares = torch.where(others, (value[:, None] - value[None, :]).square(), 0.0)
    return squares.sum(1) / others.sum(1).clamp(min=1) / (4 * beta)


def disco(
    logp: Tensor,
    lengths: Tensor,
    log_ratio: Tensor,
    correct: Tensor,
    groups: Tensor | Sequence[int],
    *,
    tau: Positive = 1.0,
    score: Literal["likelihood", "ratio"] = "likelihood",
    beta: NotNegative = 1000.0,
    delta: NotNegative = 1e-4,
) -> Tensor:
    """Correct answers should score above the hardest wrong ones, within a bound on the KL (DisCO, arXiv 2505.12366).

    The loss of a group is the mean over its correct answers i of tau log(mean over the wrong answers j of
    e^((s_j - s_i) / tau)), so a wrong answer counts more if it is likelier (distributionally robust optimisation). A
    question's difficulty is no weight: a group counts the same, however many of its answers are correct. To it
    `beta max(0, KL - delta)^2` is added, where KL is the mean of -log r over the answers of the group, an estimate of
    the KL per token from the policy that sampled.

    Args:
        logp: [B] summed log-probs, with gradient.
        lengths: [B] numbers of columns, at least 1.
        log_ratio: [B] with gradient: mean log-ratio of a row to the policy that sampled.
        correct: [B] bool.
        groups: [B] integer ids; whole groups.
        tau: temperature, above 0; with a small one, the likeliest wrong answer alone counts.
        score: s is the mean log-prob of a row, or its ratio e^log_ratio.
        beta: price of the KL beyond `delta`.
        delta: KL in nats per token that costs nothing.

    Returns:
        [M], one loss per group in the order of their ids. A group without a correct or without a wrong answer has only
        the price of its KL.

    Raises:
        ValueError: If an option is out of range or shapes do not match.
    """
    if not (tau > 0 and beta >= 0 and delta >= 0):
        raise ValueError(f"tau={tau}, beta={beta}, delta={delta}; use tau > 0, and beta, delta >= 0")
    require_rows(logp=logp, log_ratio=log_ratio, correct=correct)
    index, count = group_index(groups, len(logp), logp.device)
    right = correct.bool()
    scores = per_token(logp, lengths) if score == "likelihood" else log_ratio.exp()
    against = (index[:, None] == index[None, :]) & ~right[None, :]
    judged = right & against.any(1)
    hard = torch.where(against[judged], scores[None, :] / tau, -torch.inf).logsumexp(1)
    lost = tau * (hard - against[judged].sum(1).to(hard).log()) - scores[judged]
    totals = sum_by_group(torch.stack([lost, torch.ones_like(lost)], 1), index[judged], count)
    drift = sum_by_group(torch.stack([-log_ratio, torch.ones_like(log_ratio)], 1), index, count)
    excess = (drift[:, 0] / drift[:, 1] - delta).relu()
    return totals[:, 0] / totals[:, 1].clamp(min=1) + beta * excess.square()


@per_answer
def kto(
    logp: Tensor,
    ref_logp: Tensor,
    advantages: Tensor,
    drift: Tensor,
    *,
    beta: Positive = 0.1,
    desirable: NotNegative = 1.0,
    undesirable: NotNegative = 1.0,
) -> Tensor:
    """Good and bad answers without pairs (KTO, arXiv 2402.01306, Eq. 7).

    A good answer has the loss `desirable (1 - sigmoid(beta (s - z)))`, and a bad answer `undesirable (1 - sigmoid(beta
    (z - s)))`, where s = log(pi / pi_ref) and z is the KL to the reference, in nats per answer. Both are worth most
    near z, and an answer that is far from it has no gradient.

    Args:
        logp: [B] summed log-probs, with gradient.
        ref_logp: [B] summed log-probs of the reference.
        advantages: [B]; an answer with an advantage above 0 is good, and any other is bad.
        drift: z, a number of at least 0 without gradient: the mean log-ratio of answers behind prompts of others.
        beta: strength of the KL to the reference.
        desirable: weight of good answers.
        undesirable: weight of bad answers.

    Returns:
        [B].

    Raises:
        ValueError: If shapes do not match.
    """
    require_rows(logp=logp, ref_logp=ref_logp, advantages=advantages)
    lead = beta * (logp - ref_logp.detach() - drift.detach())
    return torch.where(advantages > 0, desirable * (-lead).sigmoid(), undesirable * lead.sigmoid())


@needs(
    Need(
        "advantage.scale", ("none", None), "predicts rewards, and a scale changes them", mend="use advantage.scale none"
    )
)
@per_answer
def optimal(logp: Tensor, ref_logp: Tensor, advantages: Tensor, *, beta: Positive = 1e-3) -> Tensor:
    """`(beta log(pi / pi_ref) - A)^2`: regression on the optimal advantage (A*-PO, arXiv 2505.20686).

    With A = r - V*(x) and the optimal value V* of the prompt, the loss is 0 for the policy that maximises the reward
    less beta times the KL to the reference. Nothing is compared within a group.

    Args:
        logp: [B] summed log-probs, with gradient.
        ref_logp: [B] summed log-probs of the reference.
        advantages: [B] rewards less the optimal value of their prompt, without a scale.
        beta: reward per nat of log-ratio.

    Returns:
        [B].

    Raises:
        ValueError: If shapes do not match.
    """
    require_rows(logp=logp, ref_logp=ref_logp, advantages=advantages)
    return (beta * (logp - ref_logp.detach()) - advantages.detach()).square()


ANSWER_LOSSES: dict[str, Callable[..., Tensor]] = {
    "dpo": dpo,
    "rpo": rpo,
    "simpo": simpo,
    "regression": group_regression,
    "real": real,
    "contrastive": contrastive,
    "disco": disco,
    "inpo": inpo,
    "likelihood": likelihood,
    "hinge": hinge,
    "ipo": ipo,
    "robust": robust,
    "exo": exo,
    "nca": nca,
    "bco": bco,
    "sppo": sppo,
    "apo": apo,
    "discopop": discopop,
    "f_dpo": f_dpo,
    "dpo_norm": dpo_norm,
    "mpo": mpo,
    "orpo": orpo,
    "cpo": cpo,
    "tpo": tpo,
    "kto": kto,
    "optimal": optimal,
}
"""`loss(logp, ..., *, ...) -> [n]`: a run passes the parameters before the `*` by name."""
