"""Binary rewards of a verifier that errs, at rates that are known (arXiv 2510.00915)."""

from __future__ import annotations

import torch
from torch import Tensor

from .advantages import as_precise


def _verdicts(rewards: Tensor) -> Tensor:
    values = as_precise(rewards)
    if bool(((values != 0) & (values != 1) & ~values.isnan()).any()):
        raise ValueError("`rewards` holds a value that is neither 0 nor 1; give a verifier's verdicts, NaN where none")
    return values


def _check_rate(name: str, rate: float) -> None:
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"`{name}` is {rate}; use a rate from 0 up to, but not, 1")


def corrected_rewards(rewards: Tensor, *, false_positive: float, false_negative: float) -> Tensor:
    """Backward correction: (r - FP) / (1 - FP - FN), whose mean given the truth is the truth.

    A sample that is truly right passes with probability 1 - FN and one that is wrong with probability FP; the policy
    gradient of the corrected reward is without bias. Under a group baseline with `scale="group"` a map that is the
    same for all rewards cancels out: use `scale="none"`, or rates that differ between verifiers.

    Args:
        rewards: [...] 0 or 1; NaN stays.
        false_positive: Share of wrong samples that pass.
        false_negative: Share of right samples that fail.

    Returns:
        Rewards shaped like the input, float32 at least, below 0 and above 1 by as much as the verifier errs.

    Raises:
        ValueError: Rates out of range or of a verifier that says nothing (their sum is 1 or more), or other rewards.
    """
    _check_rate("false_positive", false_positive)
    _check_rate("false_negative", false_negative)
    if false_positive + false_negative >= 1.0:
        raise ValueError(
            f"`false_positive` and `false_negative` add up to {false_positive + false_negative}; below 1 a verdict "
            "tells something, from 1 on it does not: use another verifier"
        )
    corrected = (_verdicts(rewards) - false_positive) / (1.0 - false_positive - false_negative)
    return corrected.to(torch.promote_types(rewards.dtype, torch.float32))


def forward_weights(rewards: Tensor, *, false_negative: float) -> Tensor:
    """Forward correction: a weight of the score function that needs the rate of false negatives alone.

    FN for a sample that passed and FN - 1 for one that failed. Its mean is 0 given that the sample is right and
    -(1 - FP - FN) given that it is wrong: the clean reward, less 1, times a positive number. So the expected gradient
    has the direction of the clean one, whatever FP is. Use it in place of the advantage.

    Args:
        rewards: [...] 0 or 1; NaN gets 0.
        false_negative: Share of right samples that fail.

    Returns:
        Weights shaped like the input, float32 at least.

    Raises:
        ValueError: A rate out of range, or other rewards.
    """
    _check_rate("false_negative", false_negative)
    verdicts = _verdicts(rewards)
    weights = torch.where(verdicts.isnan(), 0.0, false_negative - 1.0 + verdicts)
    return weights.to(torch.promote_types(rewards.dtype, torch.float32))
