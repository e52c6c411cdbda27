"""The objectives of images by name."""

from __future__ import annotations

from collections.abc import Callable

from .direct_align import DirectAlignObjective
from .directed import DirectedObjective
from .forward import ForwardObjective
from .neighbour import NeighbourObjective
from .objective import Objective
from .reward_gradient import RewardGradientObjective
from .reward_targets import RewardTargetsObjective
from .transition import TransitionObjective
from .visited import VisitedObjective

OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "transition": TransitionObjective,
    "neighbour": NeighbourObjective,
    "forward": ForwardObjective,
    "visited": VisitedObjective,
    "directed": DirectedObjective,
    "reward_gradient": RewardGradientObjective,
    "direct_align": DirectAlignObjective,
    "reward_targets": RewardTargetsObjective,
}
"""`objective(setting, *, ...)`: a class with the methods of `objective.Objective`."""
