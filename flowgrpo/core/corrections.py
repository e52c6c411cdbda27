"""Weights of tokens that correct for the difference between the engine that sampled and the engine that trains.

All functions share the signature `(gap [R, T], *, hyper-parameters)`. They return None for no correction, or `(weight,
cut)`: the [R, T] weights without gradient, and [R, T] bool that says where a bound has changed a weight.

A gap is a log-prob of the training engine minus the log-prob of the sampler; it is 0 where no token counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ..parts.needs import needs
from ..parts.ranges import Given, NotNegative, Positive

Correction = tuple[Tensor, Tensor] | None
Level = Literal["token", "sequence"]


def _ratio(gap: Tensor, level: Level) -> Tensor:
    """[R, T] ratio of the engines' probabilities of each token, or of its whole row (a product over the tokens)."""
    whole = gap.detach() if level == "token" else gap.detach().sum(1, keepdim=True).expand_as(gap)
    return whole.clamp(max=20.0).exp()


def _with_cut(weight: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    return weight, (weight == 0) | (weight >= cap)


def none(gap: Tensor) -> Correction:
    """No correction: every token counts as it is."""
    return None


def truncate(gap: Tensor, *, level: Level = "token", cap: Positive = 2.0) -> Correction:
    """Importance weight: probability in the training engine over probability in the sampler, at most the cap.

    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" (TIS).

    Args:
        gap: [R, T].
        level: whether a token or the whole row has a weight.
        cap: largest weight.
    """
    return _with_cut(_ratio(gap, level).clamp(max=cap), cap)


def _floor_below_cap(recipe: Any, choice: Any) -> list[str]:
    if choice["floor"] < choice["cap"]:
        return []
    return [f"correction {choice.short} has floor {choice['floor']:g}, which is not below cap {choice['cap']:g}"]


@needs(_floor_below_cap)
def mask(gap: Tensor, *, level: Level = "token", cap: Positive = 2.0, floor: NotNegative = 0.0) -> Correction:
    """Importance weight of the training engine over the sampler; 0 outside its bounds (IcePop of Ring-1T, 2510.18855).

    Args:
        gap: [R, T].
        level: whether a token or the whole row has a weight.
        cap: largest weight; a weight above it becomes 0.
        floor: smallest weight; a weight below it becomes 0.
    """
    ratio = _ratio(gap, level)
    return _with_cut(torch.where((ratio >= floor) & (ratio <= cap), ratio, 0.0), cap)


def auto(gap: Tensor, *, engine: Given[str] = "transformers") -> Correction:
    """`truncate` of tokens if another engine than the training engine samples; otherwise no correction.

    Args:
        gap: [R, T].
        engine: the engine that samples, a value of `generation.engine`.
    """
    return None if engine == "transformers" else truncate(gap)


CORRECTIONS: dict[str, Callable[..., Any]] = {"auto": auto, "none": none, "truncate": truncate, "mask": mask}
"""`correction(gap, *, ...) -> (weight, cut)`."""
