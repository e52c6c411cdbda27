"""Rewards: plug-ins that score images, videos or completions.

Nothing heavy is imported here; names are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import InvalidScores, MissingDependency, Reward, RewardError, RewardSpec, Scores
    from .registry import available, build, register, resolve
    from .runner import RewardBatch, RewardSet

__all__ = [
    "InvalidScores",
    "MissingDependency",
    "Reward",
    "RewardBatch",
    "RewardError",
    "RewardSet",
    "RewardSpec",
    "Scores",
    "available",
    "build",
    "register",
    "resolve",
]

_HOME = {
    "available": "registry",
    "build": "registry",
    "register": "registry",
    "resolve": "registry",
    "RewardBatch": "runner",
    "RewardSet": "runner",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOME.get(name, 'base')}", __name__), name)
