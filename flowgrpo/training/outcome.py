"""What an objective gives back of one batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Outcome:
    """What one batch contributed.

    Attributes:
        statistics: [steps, 2, 5], see `core.diagnostics.step_statistics`.
        metrics: name -> [sum, count].
        error: largest |log ratio|.
    """

    statistics: Tensor
    metrics: dict[str, Tensor]
    error: Tensor
