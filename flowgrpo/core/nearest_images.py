"""How far an image is from the images beside it, and larger advantages for good images that are far from them."""

from __future__ import annotations

import torch
from torch import Tensor

from .advantages import sum_by_group
from .grouped import grouped


def patch_means(images: Tensor, cells: int = 8) -> Tensor:
    """Where an image is by its colours alone: the mean colour of each cell of a grid, measured from mid grey.

    Args:
        images: [N, 3, H, W] in [0, 1].
        cells: of the grid, in each direction.

    Returns:
        [N, 3 · cells²].
    """
    return torch.nn.functional.adaptive_avg_pool2d(images.float(), cells).flatten(1) - 0.5


def nearest_distances(features: Tensor, groups: Tensor) -> Tensor:
    """The distance of each image to the nearest image of its group, 1 minus the cosine of their features.

    Args:
        features: [L, D], of any length.
        groups: [L] integer ids.

    Returns:
        [L] in [0, 2]; NaN for an image that is alone in its group.
    """
    unit = torch.nn.functional.normalize(features.double(), dim=1)
    found = torch.full((len(groups),), torch.nan, dtype=torch.float64, device=features.device)
    for group in groups.unique():
        mine = (groups == group).nonzero()[:, 0]
        if len(mine) > 1:
            cosines = (unit[mine] @ unit[mine].T).clamp(-1.0, 1.0).fill_diagonal_(-torch.inf)
            found[mine] = 1.0 - cosines.amax(1)
    return found


def novelty_factors(distances: Tensor, advantages: Tensor, groups: Tensor) -> Tensor:
    """Factors of advantages: the distance over its mean in the group where the advantage is above 0, else 1 (GARDO).

    So an image that is good and unlike the others counts more, and no image counts as good for being unlike the others
    alone (arXiv 2512.24138).

    Args:
        distances: [L], as `nearest_distances` gives them; a NaN gets the factor 1, and does not enter the mean.
        advantages: [L].
        groups: [L] integer ids.

    Returns:
        [L], not negative. It is 1 in a group whose images are all equal.
    """
    data = grouped(distances[:, None], groups)
    known = ~data.values.isnan()
    sums = sum_by_group(torch.cat([data.values.nan_to_num(), known.to(data.values)], 1), data.index, data.count)
    mean = (sums[:, 0] / sums[:, 1])[data.index]
    factors = distances / mean
    return torch.where((advantages > 0) & factors.isfinite(), factors, 1.0)
