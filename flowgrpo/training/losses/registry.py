"""The objectives of images by name."""

from __future__ import annotations

from collections.abc import Callable

from .contract import Objective
from .forward import ForwardObjective
from .neighbour import NeighbourObjective
from .transition import TransitionObjective

OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "transition": TransitionObjective,
    "neighbour": NeighbourObjective,
    "forward": ForwardObjective,
}
"""`objective(setting, *, ...)`: a class with the methods of `contract.Objective`."""
