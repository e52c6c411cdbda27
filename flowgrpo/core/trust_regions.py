"""Surrogates whose trust region is held by a pull back to its border, or is in a token's probability."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from ..parts.needs import Need, needs
from ..parts.ranges import Positive
from .surrogates import LOG_LIMIT, beyond_limit, holds_back, per_column

ALONE = "compares the probabilities of single tokens"
OF_TOKENS = (
    Need("task", ("text",), ALONE, mend="use another surrogate, such as clip"),
    Need("objective.level", ("token",), ALONE, task="text"),
)
"""A denoising step has a density and no probability, and the mean over a row is the probability of no token."""


def old_probability(log_ratio: Tensor, logp: Tensor) -> Tensor:
    """[B, T] probability of each token under the policy that sampled, without gradient."""
    return (logp - log_ratio).detach().exp()


def _tokens_if_by_probability(recipe: Any, choice: Any) -> list[str]:
    if choice["by"] != "probability":
        return []
    who = f"surrogate {choice.short} with by: probability"
    return [fault for need in OF_TOKENS if (fault := need.fault(recipe, who))]


@needs(_tokens_if_by_probability)
@holds_back(beyond_limit)
def spo(
    log_ratio: Tensor,
    adv: Tensor,
    logp: Tensor,
    mask: Tensor,
    *,
    epsilon: Positive = 0.2,
    by: Literal["ratio", "probability"] = "ratio",
) -> Tensor:
    """Plain ratio with a pull to a border, `-A r + |A| q / (2 epsilon) (r - 1)^2` (SPO 2401.16025, DRPO 2606.09821).

    With `by: ratio`, q is 1, and this is SPO's loss. The weight of the gradient is 1 - sign(A (r - 1)) |r - 1| /
    epsilon. It falls to 0 at the border |r - 1| = epsilon. Beyond the border it is below 0, so the gradient pulls back,
    and nothing is held back. With `by: probability`, q is the token's old probability, and this is DRPO's loss. With
    the new probability p = q r, the border is |p - q| = epsilon. DRPO's published epsilon is 12.5, a border that no
    probability reaches: its weight stays between 0.92 and 1.08. The log-ratio is bounded at 20. Except for q, `logp` is
    not used.

    Options:
        epsilon: distance of the border from where the policy was.
        by: what the distance is measured in: `ratio`, or `probability` of the token.

    Raises:
        ValueError: If `epsilon` is not positive.
    """
    if not epsilon > 0:
        raise ValueError(f"`epsilon` is {epsilon}; use a positive distance of the border, such as 0.2")
    adv = per_column(adv)
    excess = log_ratio.clamp(max=LOG_LIMIT).expm1()
    pull = adv.abs() * excess.square() / (2 * epsilon)
    return -adv * (excess + 1) + (pull if by == "ratio" else pull * old_probability(log_ratio, logp))


TRUST_REGIONS: dict[str, Callable[..., Tensor]] = {"spo": spo}
