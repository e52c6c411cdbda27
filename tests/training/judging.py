"""Advantages from parts of a recipe, for a rollout that was made by hand."""

from types import SimpleNamespace
from typing import Any

import torch

from flowgrpo.parts.choice import chosen
from flowgrpo.rewards.runner import RewardBatch
from flowgrpo.training.credit.comparing import compare
from flowgrpo.training.credit.credits import Judged
from flowgrpo.training.text.text_policy import Completions


def credited(e: Any, scores: RewardBatch, credit: object, advantage: object = None) -> torch.Tensor:
    """The advantages that a credit computes from scores; `advantage` compares the samples, or nothing if None."""
    compared = SimpleNamespace(groups=e.groups, outcomes=e.outcomes, lengths=getattr(e, "lengths", None))
    leaf = None if advantage is None else compare(chosen("advantage", advantage, "group").make(), scores, compared)
    task = "text" if isinstance(e, Completions) else "images"
    found: torch.Tensor = chosen("credit", credit).make()(Judged(e, scores, leaf, None, task))  # type: ignore[arg-type]
    return found


def selections(*entries: object) -> list[tuple[str, Any]]:
    """Entries of `select`, as they are called."""
    made = [chosen("selection", entry) for entry in entries]
    return [(one["among"], one.make()) for one in made]
