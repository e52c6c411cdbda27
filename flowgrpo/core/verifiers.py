"""Binary rewards of a verifier that makes errors at known rates (arXiv 2510.00915)."""

from __future__ import annotations

import torch
from torch import Tensor

from .advantages import as_precise


def _verdicts(rewards: Tensor) -> Tensor:
    values = as_precise(rewards)
    if bool(((values != 0) & (values != 1) & ~values.isnan()).any()):
        raise ValueError(
            "`rewards` holds a value that is neither 0 nor 1; give a verifier's verdicts, NaN where there is none"
        )
    return values


def _check_rate(name: str, rate: float) -> None:
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"`{name}` is {rate}; use 0 <= rate < 1")


def corrected_rewards(rewards: Tensor, *, false_positive: float, false_negative: float) -> Tensor:
    """Backward correction (r - FP) / (1 - FP - FN): for a given truth, its mean is the truth.

    A right sample passes with probability 1 - FN, and a wrong sample passes with probability FP. The policy gradient of
    the corrected reward has no bias. The correction is one linear map, and `scale="group"` cancels a map that all
    rewards share. So use `scale="none"`, or rates that differ between verifiers.

    Args:
        rewards: [...] 0 or 1; NaN stays NaN.
        false_positive: Share of wrong samples that pass.
        false_negative: Share of right samples that fail.

    Returns:
        Rewards shaped like the input, float32 at least. They go below 0 and above 1 if the verifier makes errors.

    Raises:
        ValueError: If a rate is out of range, the rates add up to 1 or more (then a verdict carries no information), or
            a reward is neither 0 nor 1.
    """
    _check_rate("false_positive", false_positive)
    _check_rate("false_negative", false_negative)
    if false_positive + false_negative >= 1.0:
        raise ValueError(
            f"`false_positive` and `false_negative` add up to {false_positive + false_negative}; a verdict carries "
            "information only if the sum is below 1, so use another verifier"
        )
    corrected = (_verdicts(rewards) - false_positive) / (1.0 - false_positive - false_negative)
    return corrected.to(torch.promote_types(rewards.dtype, torch.float32))


def forward_weights(rewards: Tensor, *, false_negative: float) -> Tensor:
    """Forward correction: a weight of the score function that needs only the rate of false negatives.

    The weight is FN for a sample that passed and FN - 1 for a sample that failed. For a right sample its mean is 0, and
    for a wrong sample its mean is -(1 - FP - FN). This is (clean reward - 1) times a positive number. So the expected
    gradient has the direction of the clean gradient, whatever FP is. Use the weight in place of the advantage.

    Args:
        rewards: [...] 0 or 1; NaN gets 0.
        false_negative: Share of right samples that fail.

    Returns:
        Weights shaped like the input, float32 at least.

    Raises:
        ValueError: If the rate is out of range, or a reward is neither 0 nor 1.
    """
    _check_rate("false_negative", false_negative)
    verdicts = _verdicts(rewards)
    weights = torch.where(verdicts.isnan(), 0.0, false_negative - 1.0 + verdicts)
    return weights.to(torch.promote_types(rewards.dtype, torch.float32))
