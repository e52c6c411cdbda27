"""Loudness of sounds, as a guard for rewards that a silent or a shouting sound would satisfy."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..options import check_count
from ..scores import Scores

SILENCE = -120.0
"""Decibels of a sound without any sound."""
CLIPPED = 0.999
"""A sample above this level counts as cut off."""


class Loudness:
    """Nearness of a sound's loudness to a target, in decibels. It has a gradient.

    The loudness is the mean square over all channels, relative to a square wave at full level (dBFS). Sub-scores are
    the loudness, the peak, and the share of samples that are cut off.

    Args:
        target: wanted loudness in dBFS; music is often near -14, and speech near -20.
        batch_size: largest number of sounds in one call.

    Raises:
        ValueError: the target is not from -120 to 0.
    """

    name = "loudness"

    def __init__(self, target: float = -20.0, *, batch_size: int = 64) -> None:
        if isinstance(target, bool) or not isinstance(target, int | float) or not SILENCE <= target <= 0.0:
            raise ValueError(f"loudness: target is {target!r}; give decibels from -120 to 0, such as -20")
        check_count(self.name, "batch_size", batch_size)
        self.target, self.batch_size = float(target), batch_size

    def __call__(self, sounds: Tensor, **columns: Any) -> Scores:
        """Minus the distance of each sound's loudness from the target, in decibels.

        Args:
            sounds: [B, C, S] in [-1, 1].
            columns: ignored.

        Returns:
            Scores with [B] float32 of at most 0, and the sub-scores `loudness`, `peak` and `clipped`.
        """
        flat = sounds.float().flatten(1)
        least = math.pow(10.0, SILENCE / 10.0)
        level = 10.0 * flat.square().mean(1).clamp(min=least).log10()
        size = flat.detach().abs()
        return Scores(
            -(level - self.target).abs(),
            sub_scores={
                "loudness": level.detach().tolist(),
                "peak": size.amax(1).tolist(),
                "clipped": (size > CLIPPED).float().mean(1).tolist(),
            },
        )
