"""Which reward a key of a recipe means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .reward_sections import RewardConfig


def reward_place(rewards: Sequence[RewardConfig], asked: str) -> int | None:
    """Which entry of a recipe's rewards is meant: by its label, else its name, or of `FILE:NAME` the NAME alone."""
    labels = [reward.label or reward.name for reward in rewards]
    short = [reward.label or reward.name.rpartition(":")[2] for reward in rewards]
    for names in (labels, short):
        if names.count(asked) == 1:
            return names.index(asked)
    return None
