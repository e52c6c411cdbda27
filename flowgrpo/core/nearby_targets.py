"""Targets near a predicted image, up and down the gradient of a reward, and the loss that fits them (DiffusionOPSD)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .advantages import goodness

LEAST = 1e-12


def targets(clean: Tensor, slope: Callable[[Tensor], Tensor], *, radius: float, ascents: int) -> tuple[Tensor, Tensor]:
    """How far a better and a worse image are from predicted ones, within a ball around each (DiffusionOPSD).

    From y, each of `ascents` steps goes `radius` |y| / `ascents` along the direction of the reward's gradient, or
    against it, and is brought back into the ball of `radius` |y|. The first gradient serves both ways.

    Args:
        clean: y, [N, ...] predicted clean latents.
        slope: gives the gradients of the rewards at latents [N, ...], of the same shape.
        radius: of the ball, as a share of the norm of y.
        ascents: steps of the ascent and of the descent, at least 1.

    Returns:
        y+ - y and y- - y, each [N, ...] float32 and without gradient.
    """
    start = clean.detach().float()
    budget = radius * _norm(start)
    first = slope(start).float()
    found = []
    for sign in (1.0, -1.0):
        moved, along = torch.zeros_like(start), first
        for number in range(ascents):
            if number:
                along = slope(start + moved).float()
            moved = moved + sign * budget / ascents * along / (_norm(along) + LEAST)
            moved = moved * (budget / (_norm(moved) + LEAST)).clamp(max=1.0)
        found.append(moved.detach())
    return found[0], found[1]


def target_loss(
    moved: Tensor, rise: Tensor, fall: Tensor, advantage: Tensor, *, beta: float = 1.0, bound: float = 5.0
) -> Tensor:
    """The distance of two implicit predictions from their targets (DiffusionOPSD).

    The prediction of the trained policy for a state is y + m, where y is that of the policy that sampled. The positive
    prediction y + beta m should meet y+, and the negative one y - beta m should meet y-. With rho = clamp(A / (2 bound)
    + 1/2, 0, 1) the loss is bound (rho l+ + (1 - rho) l-), where l is the mean of a squared difference, divided by the
    mean of its size. The divisor is detached and at least 1e-5. The forward-process form with the finished image as
    both targets is `forward_process.diffusion_nft`.

    Args:
        moved: m, [N, ...] with gradient.
        rise: y+ - y, [N, ...].
        fall: y- - y, [N, ...].
        advantage: A, [N].
        beta: Strength of the implicit policies.
        bound: The advantage at which an image counts as wholly good or bad.

    Returns:
        [N].
    """
    good, moved = goodness(advantage.to(moved), bound).float(), moved.float()
    terms = []
    for share, difference in ((good, beta * moved - rise), (1.0 - good, -beta * moved - fall)):
        size = difference.detach().abs().double().flatten(1).mean(1).clamp(min=1e-5).to(difference)
        terms.append(share * difference.square().flatten(1).mean(1) / size)
    return bound * (terms[0] + terms[1])


def _norm(values: Tensor) -> Tensor:
    """[N, 1, ...] norms of rows."""
    return values.flatten(1).norm(dim=1).view(-1, *(1,) * (values.dim() - 1))
