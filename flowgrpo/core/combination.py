"""Several rewards combined into one: gates, constraints with multipliers, and ensembles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .advantages import as_precise, group_index, group_moments, sum_by_group
from .grouped import one_per_row


def gated_rewards(rewards: Tensor, main: Tensor, *, threshold: float, closed: float = 0.0) -> Tensor:
    """Let rewards count only where the main one reaches a threshold (G-RA, arXiv 2508.10548; Posterior-GRPO).

    Args:
        rewards: [B] or [B, K], the rewards behind the gate; NaN stays NaN.
        main: [B], the reward that opens the gate. Where it is NaN, the state of the gate is unknown and the result is
            NaN.
        threshold: Smallest `main` that opens the gate.
        closed: The reward behind a closed gate: 0, or NaN to keep it out of the statistics.

    Returns:
        Rewards shaped like `rewards`, float32 at least, without a gradient.

    Raises:
        ValueError: If shapes do not match.
    """
    gate = one_per_row(main.to(rewards.device), len(rewards), "main")
    gate = gate.reshape(-1, *[1] * (rewards.dim() - 1))
    values = rewards.detach().to(torch.promote_types(rewards.dtype, torch.float32))
    # The comparison is made in the precision of `main`: there a reward that is written like the threshold reaches it.
    counted = torch.where(gate >= threshold, values, torch.where(values.isnan(), torch.nan, closed))
    return counted.masked_fill(gate.isnan(), torch.nan).to(values.dtype)


def group_gated_rewards(
    rewards: Tensor,
    success: Tensor,
    groups: Tensor | Sequence[int],
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    closed: float = 0.0,
) -> Tensor:
    """Let rewards count only in groups with enough, or few enough, successes.

    `at_least=1` is ConciseR (arXiv 2505.21178): length counts once all samples of a prompt are right. A smaller
    `at_least` is GRPO-lambda (2505.18086): length does not count while a group is often wrong.

    Args:
        rewards: [B] or [B, K], such as a length penalty; NaN stays NaN.
        success: [B] bool, or 0 and 1; NaN where the success is unknown. Unknown rows are left out of the share.
        groups: [B] integer ids.
        at_least: Smallest share of successes that counts.
        at_most: Largest share of successes that counts.
        closed: The reward in all other groups, and in groups whose successes are all unknown.

    Returns:
        Rewards shaped like `rewards`, float32 at least, without a gradient.

    Raises:
        ValueError: If no bound is given, a bound is outside 0..1, a success is neither 0 nor 1, or shapes do not match.
    """
    bounds = {"at_least": at_least, "at_most": at_most}
    if at_least is None and at_most is None:
        raise ValueError("Neither `at_least` nor `at_most` is given; give the share of successes that opens the gate")
    for name, bound in bounds.items():
        if bound is not None and not 0.0 <= bound <= 1.0:
            raise ValueError(f"`{name}` is {bound}; use a share from 0 to 1")
    right = as_precise(one_per_row(success, len(rewards), "success").to(rewards.device))
    if bool(((right != 0) & (right != 1) & ~right.isnan()).any()):
        raise ValueError("`success` holds a value that is neither 0 nor 1; give verdicts, NaN where unknown")
    index, count = group_index(groups, len(rewards), right.device)
    known = sum_by_group((~right.isnan()).to(right)[:, None], index, count)
    share = (sum_by_group(right.nan_to_num(0.0)[:, None], index, count) / known)[index, 0]
    is_open = torch.ones_like(share, dtype=torch.bool)
    if at_least is not None:
        is_open = is_open & (share >= at_least)
    if at_most is not None:
        is_open = is_open & (share <= at_most)
    values = rewards.detach().to(torch.promote_types(rewards.dtype, torch.float32))
    is_open = is_open.reshape(-1, *[1] * (rewards.dim() - 1))
    return torch.where(is_open | values.isnan(), values, closed).to(values.dtype)


def contrastive_signs(shown: Tensor, outcome: Tensor, groups: Tensor | Sequence[int], *, margin: float = 0.0) -> Tensor:
    """Whether a behaviour helped in its group: group contrastive masking (GCPO, arXiv 2506.07160).

    A group has a sign: 1 if the mean outcome with the behaviour minus the mean outcome without it is above 0 and at
    least `margin`, -1 if it is below 0 and at most -`margin`, and 0 otherwise, or if one of the means does not exist.

    Args:
        shown: [B] 1 for a row that shows the behaviour, 0 for one that does not, NaN where this is unknown.
        outcome: [B]; NaN rows are left out of the means.
        groups: [B] integer ids.
        margin: Smallest difference of the means that counts, not negative.

    Returns:
        [B] the sign of the group for rows that show the behaviour, 0 for rows that do not, NaN where this is unknown;
        float32 at least, without a gradient.

    Raises:
        ValueError: If `margin` is negative, `shown` holds another value, or shapes do not match.
    """
    if margin < 0:
        raise ValueError(f"`margin` is {margin}; use 0 or more, because a negative margin would count no difference")
    values = as_precise(one_per_row(outcome, len(shown), "outcome").to(shown.device))
    has = as_precise(one_per_row(shown, len(shown), "shown"))
    if bool(((has != 0) & (has != 1) & ~has.isnan()).any()):
        raise ValueError("`shown` holds a value that is neither 0 nor 1; give 1 for the behaviour, NaN where unknown")
    index, count = group_index(groups, len(shown), shown.device)
    known = ~(values.isnan() | has.isnan())
    sides = torch.stack([known & (has == 1), known & (has == 0)], 1).to(values)
    total = sum_by_group(sides * values.nan_to_num(0.0)[:, None], index, count)
    mean = total / sum_by_group(sides, index, count)
    gap = (mean[:, 0] - mean[:, 1])[index]
    sign = torch.where(gap.abs() >= margin, gap.sign(), 0.0).nan_to_num(0.0)
    return (sign * has).to(torch.promote_types(outcome.dtype, torch.float32))


def coherent_rewards(
    rewards: Tensor, likelihood: Tensor, groups: Tensor | Sequence[int], *, at_least: float = 1.0
) -> Tensor:
    """Keep the rewards of right samples more likely than their right peers (GRPO-CARE, 2506.16141).

    Args:
        rewards: [B]; a sample is right if its reward is at least `at_least`. NaN stays NaN.
        likelihood: [B] how well an answer follows from its reasoning; NaN where this is unknown.
        groups: [B] integer ids.
        at_least: Smallest reward of a right sample.

    Returns:
        [B] the reward of a right sample whose likelihood is above the mean over the right samples of its group, and 0
        for all others; float32 at least, without a gradient.

    Raises:
        ValueError: If shapes do not match.
    """
    values = rewards.detach().to(torch.promote_types(rewards.dtype, torch.float32))
    known = as_precise(one_per_row(likelihood, len(values), "likelihood").to(values.device))
    peers = known.masked_fill(~(values >= at_least), torch.nan)[:, None]
    index, count = group_index(groups, len(values), values.device)
    moments = group_moments(peers, index, count, ddof=0)
    above = (peers - moments.minimum[index] > moments.offset[index])[:, 0]
    return torch.where(above | values.isnan(), values, 0.0)


def _members(rewards: Tensor) -> Tensor:
    if rewards.dim() != 2 or rewards.shape[1] == 0:
        raise ValueError(f"`rewards` has shape {tuple(rewards.shape)}; give one column per model, (B, K)")
    return as_precise(rewards)


def worst_case_rewards(rewards: Tensor) -> Tensor:
    """The smallest reward of an ensemble (worst-case optimisation, arXiv 2310.02743, §3).

    Args:
        rewards: [B, K], one column per model, on one scale; NaN where a model does not apply. NaN is left out.

    Returns:
        [B], float32 at least, without a gradient; NaN where no model applies.

    Raises:
        ValueError: If `rewards` is not [B, K].
    """
    values = _members(rewards)
    least = values.where(~values.isnan(), torch.inf).amin(1).masked_fill(values.isnan().all(1), torch.nan)
    return least.to(torch.promote_types(rewards.dtype, torch.float32))


def uncertainty_weighted_rewards(rewards: Tensor, *, weight: float = 0.5) -> Tensor:
    """The mean of an ensemble minus its disagreement: mean - weight * variance (UWO, arXiv 2310.02743, §3).

    Args:
        rewards: [B, K], one column per model, on one scale; NaN where a model does not apply. NaN is left out.
        weight: Weight of the (population) variance over the models, not negative.

    Returns:
        [B], float32 at least, without a gradient; NaN where no model applies.

    Raises:
        ValueError: If `weight` is negative, or `rewards` is not [B, K].
    """
    if weight < 0:
        raise ValueError(f"`weight` is {weight}; use 0 or more, because a negative weight would reward disagreement")
    values = _members(rewards).T
    one = torch.zeros(len(values), dtype=torch.long, device=values.device)
    moments = group_moments(values, one, 1, ddof=0)
    found = (moments.minimum + moments.offset - weight * moments.std.square())[0]
    return found.masked_fill(moments.count[0] == 0, torch.nan).to(torch.promote_types(rewards.dtype, torch.float32))


def constrained_advantages(main: Tensor, constraints: Tensor, multipliers: Tensor) -> Tensor:
    """A = (A_main + sum over k of lambda_k A_k) / (1 + sum over k of lambda_k) (Faithful GRPO, arXiv 2604.08476).

    The weights add up to 1, so even a very large multiplier does not make the update larger.

    Args:
        main: [B] advantages of the reward.
        constraints: [B, K] advantages of the constraints, each normalised by itself.
        multipliers: [K], not negative (`Multipliers.values`).

    Returns:
        Advantages [B], float32 at least, without a gradient.

    Raises:
        ValueError: A negative multiplier, or shapes that do not match.
    """
    if constraints.dim() != 2 or constraints.shape[:1] != main.shape or constraints.shape[1:] != multipliers.shape:
        raise ValueError(
            f"`main` has shape {tuple(main.shape)}, `constraints` {tuple(constraints.shape)} and `multipliers` "
            f"{tuple(multipliers.shape)}; give (B,), (B, K) and (K,)"
        )
    weight = as_precise(multipliers.to(main.device))
    if bool((weight < 0).any()):
        raise ValueError("`multipliers` holds a negative value; use 0 for a constraint that may be ignored")
    total = (as_precise(main) + as_precise(constraints) @ weight) / (1.0 + weight.sum())
    return total.to(torch.promote_types(main.dtype, torch.float32))


class Multipliers:
    """Lagrange multipliers of constraints, adapted by dual ascent (Faithful GRPO, arXiv 2604.08476).

    Constraint k asks for a batch mean of at least `thresholds[k]`. A multiplier grows by `rate` times the shortfall,
    shrinks by `rate` times the excess, and stays within 0..`maximum`.

    Args:
        thresholds: Wanted mean of each constraint.
        rate: Step size of the ascent, above 0.
        initial: First value of every multiplier, in 0..`maximum`.
        maximum: Largest multiplier. It limits the weight of one constraint to maximum / (1 + maximum).

    Raises:
        ValueError: If there is no threshold, or a number is out of range.
    """

    def __init__(
        self, thresholds: Sequence[float], *, rate: float = 0.05, initial: float = 0.0, maximum: float = 10.0
    ) -> None:
        if len(thresholds) == 0:
            raise ValueError("`thresholds` is empty; give the wanted mean of each constraint")
        if not rate > 0:
            raise ValueError(f"`rate` is {rate}; use a number above 0")
        if not 0.0 <= initial <= maximum:
            raise ValueError(f"`initial` is {initial} and `maximum` {maximum}; use 0 <= initial <= maximum")
        self.thresholds = torch.tensor([float(t) for t in thresholds])
        self.rate = rate
        self.maximum = maximum
        self.values = torch.full_like(self.thresholds, initial)

    def step(self, constraints: Tensor) -> Tensor:
        """Adapt to the constraint rewards [B, K] of a whole batch, gathered from all ranks; return the multipliers [K].

        NaN is left out; a constraint that applies to no sample keeps its multiplier.

        Raises:
            ValueError: If the number of constraints is not the number of thresholds.
        """
        if constraints.dim() != 2 or constraints.shape[1:] != self.values.shape:
            raise ValueError(
                f"`constraints` has shape {tuple(constraints.shape)}; give one column per threshold, "
                f"(B, {len(self.values)})"
            )
        mean = as_precise(constraints).nanmean(0).to(self.values)
        moved = (self.values + self.rate * (self.thresholds - mean)).clamp(0.0, self.maximum)
        self.values = torch.where(mean.isnan(), self.values, moved)
        return self.values

    def state_dict(self) -> dict[str, Tensor]:
        return {"values": self.values.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over the multipliers of `state_dict`.

        Raises:
            ValueError: If the state belongs to another number of constraints.
        """
        if state["values"].shape != self.values.shape:
            raise ValueError(
                f"the state holds {len(state['values'])} multipliers but there are {len(self.values)} thresholds; "
                "resume with the constraints that the run was started with"
            )
        self.values = state["values"].to(self.values).clone()
