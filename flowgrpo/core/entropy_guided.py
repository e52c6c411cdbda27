"""Losses and terms that depend on how uncertain the policy was at a token: entropies, and their means in a window."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..parts.needs import Need, needs
from ..parts.ranges import Given, NotNegative, Share
from .bounds import bapo
from .surrogates import held_back, holds_back, per_column


def relative_entropy(entropy: Tensor, mean: Tensor | float) -> Tensor:
    """How uncertain a token was compared with a mean: (H - mean) / (H + mean), from -1 to 1, and 0 at the mean.

    This is the hyperbolic tangent of half the logarithm of H / mean, so twice and half of the mean are equally far
    from 0.

    Args:
        entropy: of any shape, not negative.
        mean: a number or a tensor that broadcasts, not negative; where it and the entropy are both 0, the result is 0.
    """
    return ((entropy - mean) / (entropy + mean)).nan_to_num(0.0)


def window_means(values: Tensor, mask: Tensor, size: int) -> Tensor:
    """[B, T] means over the masked columns of a window that begins at each column; 0 outside `mask`.

    Args:
        values: [B, T]; NaN outside `mask` does not matter.
        mask: [B, T] bool or 0/1.
        size: columns of a window, at least 1. At the end of a row, a window has the columns that are left.

    Raises:
        ValueError: If `size` is below 1, or shapes do not match.
    """
    if size < 1:
        raise ValueError(f"`size` is {size}; use a window of 1 column or more")
    kept = mask.bool()
    if values.shape != kept.shape or values.dim() != 2:
        raise ValueError(f"`values` has shape {tuple(values.shape)}, `mask` {tuple(mask.shape)}; give both as (B, T)")
    both = torch.stack([torch.where(kept, values, 0.0), kept.to(values.dtype)])
    padded = torch.nn.functional.pad(both, (0, size - 1))
    total, count = padded.unfold(-1, size, 1).sum(-1)
    return torch.where(kept, total / count.clamp(min=1), 0.0)


def uncertain_windows(entropy: Tensor, mask: Tensor, size: int, threshold: float) -> Tensor:
    """[B, T] bool: the masked tokens that trigger exploration (ARES, 2510.08457).

    A token triggers exploration if the mean entropy of the window that begins at it is above the threshold. The entropy
    of one token alone is noisy, and the mean is not.

    Args:
        entropy: [B, T] in nats.
        mask: [B, T] bool or 0/1.
        size: tokens of a window, as in `window_means`.
        threshold: in nats, not negative.
    """
    return window_means(entropy, mask, size) > threshold


def _hapo_parts(
    log_ratio: Tensor, adv: Tensor, entropy: Tensor, mean_entropy: Tensor | float, low: float, high: float,
    spread: float, lean: float,
) -> tuple[Callable[..., Tensor], Tensor]:  # fmt: skip
    """`bapo` with HAPO's bounds, and HAPO's advantages."""
    if not (low >= 0 and high >= 0 and 0 <= spread <= 1 and 0 <= lean <= 1 and low * (1 + spread) < 1):
        raise ValueError(
            f"low={low}, high={high}, spread={spread}, lean={lean}; use low, high >= 0, spread and lean from 0 to 1, "
            "and low * (1 + spread) < 1"
        )
    level = relative_entropy(entropy.detach().to(log_ratio), mean_entropy)
    sure, unsure = level.clamp(max=0), level.clamp(min=0)
    ratio = log_ratio.detach().exp()
    neutral = (ratio > 1 - low / 2) & (ratio < 1 + high / 2)
    factor = 1 + lean * torch.where(neutral, sure, unsure)
    bounds = {"lower": 1 - low * (1 - spread * sure), "upper": 1 + high * (1 + spread * unsure)}
    return partial(bapo, **bounds), per_column(adv) * factor


def _hapo_holds_back(
    log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor,
    *, entropy: Tensor, mean_entropy: Tensor | float, low: float, high: float, spread: float, lean: float,
) -> Tensor | None:  # fmt: skip
    clipped, shared = _hapo_parts(log_ratio, adv, entropy, mean_entropy, low, high, spread, lean)
    return held_back(clipped, log_ratio, shared, logp, mask)


@needs(
    Need("task", ("text",), "reads the entropy of tokens, and all steps of images are equally certain"),
    Need("objective.level", ("token", None), "clips the ratios of tokens", task="text"),
)
@holds_back(_hapo_holds_back)
def hapo(
    log_ratio: Tensor,
    adv: Tensor,
    logp: Tensor,
    mask: Tensor,
    *,
    entropy: Given[Tensor],
    mean_entropy: Given[Tensor | float],
    low: NotNegative = 0.2,
    high: NotNegative = 0.28,
    spread: Share = 1.0,
    lean: Share = 1.0,
) -> Tensor:
    """Clip and advantage that depend on a token's entropy (HAPO, From Uniform to Heterogeneous).

    Let e be `relative_entropy` of the token, from -1 to 1. The clip is asymmetric: [1 - low (1 - spread e), 1 + high]
    for a sure token (e below 0), whose probability may fall further, and [1 - low, 1 + high (1 + spread e)] for an
    unsure token, whose probability may rise further. Advantages are redistributed: A becomes A (1 + lean e) for a sure
    token as long as its ratio is near 1, from 1 - low / 2 to 1 + high / 2, and for an unsure token as soon as its ratio
    is not near 1. So sure tokens count less until they move, and unsure tokens count more once they move. `logp` is not
    used.

    Args:
        log_ratio: [B, T].
        adv: [B] or [B, T].
        logp: [B, T].
        mask: [B, T].
        entropy: [B, T] entropies of the policy that sampled, in nats.
        mean_entropy: mean entropy over the whole step.
        low: lower clip of an unsure token, in [0, 1).
        high: upper clip of a sure token.
        spread: how far the clip follows the entropy; 0 leaves it as it is.
        lean: how far advantages follow the entropy; 0 leaves them as they are.

    Raises:
        ValueError: If an option is out of range, or low * (1 + spread) is not below 1.
    """
    clipped, shared = _hapo_parts(log_ratio, adv, entropy, mean_entropy, low, high, spread, lean)
    return clipped(log_ratio, shared, logp, mask)
