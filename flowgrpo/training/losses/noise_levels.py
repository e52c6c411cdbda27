"""The noise levels at which losses of the forward process noise finished images again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch

Draw = Literal["any", "ranges", "between"]
Density = Literal["uniform", "logit_normal", "falling"]


@dataclass(frozen=True)
class NoiseLevel:
    """One noise level of a draw.

    Attributes:
        step: the step of the rollout that begins at this level or, between two levels of the rollout, above it.
        sigma: in (0, 1].
        address: what tells this level from the others of the draw, for the noise of the images.
    """

    step: int
    sigma: float
    address: tuple[int, ...]


def draw_levels(
    sigmas: Sequence[float],
    steps: range,
    times: int | None,
    draw: Draw,
    density: Density,
    generator: torch.Generator,
) -> list[NoiseLevel]:
    """Draw noise levels, from the noisiest on.

    Args:
        sigmas: levels of the rollout, falling to 0.
        steps: whose levels may be drawn.
        times: how many; as many as `steps` if None.
        draw: see `ForwardObjective`.
        density: of levels between the levels of the rollout; see `ForwardObjective`.
        generator: on the CPU.
    """
    if draw == "between":
        return _between(sigmas, steps, times or len(steps), density, generator)
    return [NoiseLevel(step, sigmas[step], (step,)) for step in draw_steps(steps, times, draw, generator)]


def draw_steps(
    steps: range, times: int | None, draw: Literal["any", "ranges"], generator: torch.Generator
) -> list[int]:
    """Draw steps of a rollout, rising.

    Args:
        steps: from which to draw.
        times: how many; all if None.
        draw: `any` draws without further order. `ranges` divides the steps into `times` ranges of equal size, up to
            rounding, and draws one of each (AWM 2509.25050, released code).
        generator: on the CPU.
    """
    total = len(steps)
    if times is None or times >= total:
        return list(steps)
    if draw == "any":
        return [steps[k] for k in sorted(torch.randperm(total, generator=generator)[:times].tolist())]
    bounds = [total * k // times for k in range(times + 1)]
    return [steps[int(torch.randint(low, high, (), generator=generator))] for low, high in pairwise(bounds)]


def _between(
    sigmas: Sequence[float], steps: range, times: int, density: Density, generator: torch.Generator
) -> list[NoiseLevel]:
    """One place in each of `times` ranges of equal probability, and the level of each place."""
    places = (torch.arange(times) + torch.rand(times, generator=generator, dtype=torch.float64)) / times
    if density == "logit_normal":
        places = torch.special.ndtri(places).sigmoid()
    elif density == "falling":
        places = 1.0 - (1.0 - places).sqrt()
    found = []
    for number, place in enumerate(places.tolist()):
        along = steps.start + place * len(steps)
        # A sum may be rounded up to the end of the last step, whose level need not be above 0.
        step = min(int(along), steps[-1])
        part = min(along - step, 1.0 - 2.0**-20)
        found.append(NoiseLevel(step, sigmas[step] + part * (sigmas[step + 1] - sigmas[step]), (step, number)))
    return found
