"""The reward that a key of a recipe means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .reward_sections import RewardConfig


def reward_place(rewards: Sequence[RewardConfig], asked: str) -> int | None:
    """Index of the reward that `asked` means: its label, its name, or only the NAME of `FILE:NAME`; None if unclear."""
    labels = [reward.label or reward.name for reward in rewards]
    short = [reward.label or reward.name.rpartition(":")[2] for reward in rewards]
    for names in (labels, short):
        if names.count(asked) == 1:
            return names.index(asked)
    return None
