"""How far a trained reward overrates an image by the judgement of other rewards, and which images are suspect."""

from __future__ import annotations

import torch
from torch import Tensor


def rank_shares(values: Tensor) -> Tensor:
    """The place of each value among all values, from the least to the greatest, as a share of their number.

    Equal values share the mean of their places, so a verdict of 0 or 1 ranks no success above another.

    Args:
        values: [L]; a NaN has no place.

    Returns:
        [L] in (0, 1], NaN where the value is NaN.
    """
    known = ~values.isnan()
    _, inverse, counts = values[known].unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    places = (last - (counts - 1) / 2.0)[inverse]
    found = torch.full(values.shape, torch.nan, dtype=torch.float64, device=values.device)
    found[known] = places / places.numel() if places.numel() else places
    return found


def overrating(trained: Tensor, light: Tensor) -> Tensor:
    """How much better the trained reward ranks an image than light rewards rank it (GARDO, arXiv 2512.24138).

    Args:
        trained: [L] the reward that is optimised.
        light: [L, K] rewards that are not optimised, so that nothing exploits them.

    Returns:
        [L] in (-1, 1): the place by the trained reward, minus the mean of the places by the light rewards that apply.
        It is NaN where the trained reward or all light rewards do not apply.
    """
    places = torch.stack([rank_shares(column) for column in light.unbind(1)], 1)
    return rank_shares(trained) - places.nanmean(1)


def suspects(overrated: Tensor, share: float) -> Tensor:
    """The images that are overrated most: above a quantile of those that are not underrated.

    Args:
        overrated: [L], as `overrating` gives it.
        share: of the images that are not underrated, from 0 to 1.

    Returns:
        [L] bool. An image at the quantile itself is not suspect; so if all are overrated equally, none is.
    """
    high = overrated[overrated >= 0]
    if not high.numel():
        return torch.zeros_like(overrated, dtype=torch.bool)
    # The places are floats, and equal ones may differ by rounding.
    return overrated > high.quantile(1.0 - share) + 1e-9
