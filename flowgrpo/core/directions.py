"""Finite differences within a group of images, and how far a velocity has moved along them."""

from __future__ import annotations

import torch
from torch import Tensor

from .advantages import group_index, sum_by_group

SMALLEST = 1e-6
"""Added to the mean square by which a difference is divided, as in the released code of FDFO."""


def directions(x: Tensor, group: Tensor) -> Tensor:
    """From the mean of a group to each image, divided by its own mean square (FDFO, 2603.12893).

    For a pair of images, this is half of their difference, divided by its mean square. Half of the difference of their
    rewards, times this direction, is a finite difference of the reward with respect to the image.

    Args:
        x: [L, ...] clean latents.
        group: [L] integer ids.

    Returns:
        [L, ...] float32; 0 for images that are the same.
    """
    flat = x.float().flatten(1)
    index, count = group_index(group, len(flat), flat.device)
    counts = sum_by_group(torch.ones_like(flat[:, :1]), index, count)
    rows = torch.arange(len(flat), device=flat.device)
    first = torch.full((count,), len(flat), device=flat.device).scatter_reduce(0, index, rows, "amin")
    # From one of the images, so that the rounding of a mean of large numbers is no difference of the same images.
    beyond = flat - flat[first[index]]
    difference = beyond - (sum_by_group(beyond, index, count) / counts)[index]
    return (difference / (difference.square().mean(1, keepdim=True) + SMALLEST)).view(x.shape)


def log_ratio_along(moved: Tensor, direction: Tensor) -> Tensor:
    """How much closer the velocity has come to its target: mean(d^2) - mean((v - (v_old - d))^2) (FDFO, 2603.12893).

    The velocity points from the image to the noise, so the target `v_old - d` ends at an image further along `d`.

    Args:
        moved: [E, ...] v - v_old, with gradient.
        direction: [E, ...] d.

    Returns:
        [E]; exactly 0 where the velocity has not moved.
    """
    wide, along = moved.float().flatten(1), direction.float().flatten(1)
    return -(wide * (wide + 2.0 * along)).mean(1)
