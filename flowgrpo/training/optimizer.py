"""The optimizer's part of a run: AdamW on weights that a process has whole, or a shard of."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..configs.schema import AnyRecipe
from ..weights.sharding import cut_optimizer_state, wholes
from ..weights.trained import TrainedWeights
from .distributed.processes import Processes


def learning_rate(recipe: AnyRecipe, taken: int) -> float:
    """Of the optimizer step after `taken` ones: a linear warm-up, then the schedule's fall over the rest of the run."""
    settings = recipe.optimizer
    if taken < settings.warmup:
        return settings.learning_rate * (taken + 1) / settings.warmup
    falling = recipe.run.iterations * settings.epochs * settings.updates - settings.warmup
    done = min((taken - settings.warmup) / max(falling, 1), 1.0)
    share = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[settings.schedule]
    return settings.learning_rate * share


class Stepper(Protocol):
    """What moves the trained weights by the gradients of all processes."""

    def step(self) -> Tensor:
        """Take one optimizer step; the norm of the gradient before it was bounded. All processes must call it."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this process."""

    def state_dict(self) -> dict[str, Any]:
        """The state of AdamW on whole weights; all processes must call it, and that of the first is whole."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state, after the weights have been put in place."""


class Optimizer:
    """AdamW as a recipe has it, on gradients that are added over processes.

    Args:
        recipe: with the rates and bounds.
        weights: what it moves.
        processes: of the run.
    """

    def __init__(self, recipe: AnyRecipe, weights: TrainedWeights, processes: Processes) -> None:
        self.recipe, self.processes = recipe, processes
        self.parameters = weights.parameters()
        self._inner = torch.optim.AdamW(self.parameters, **settings_of(recipe))

    def step(self) -> Tensor:
        """Take one optimizer step; the norm of the gradient before it was bounded. All processes must call it.

        Raises:
            FloatingPointError: the gradient is not finite; the weights have not moved.
        """
        self.processes.add_gradients(self.parameters)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.recipe.optimizer.max_grad_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        require_finite(norm)
        taken = int(next(iter(self._inner.state.values()))["step"]) if self._inner.state else 0
        for group in self._inner.param_groups:
            group["lr"] = learning_rate(self.recipe, taken)
        self._inner.step()
        self.zero_grad()
        return norm.detach().cpu()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this process."""
        self._inner.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Of AdamW; of shards all processes must call it, and that of the first has whole tensors, on the CPU."""
        state: dict[str, Any] = wholes(self._inner.state_dict())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state with whole tensors."""
        self._inner.load_state_dict(cut_optimizer_state(self._inner, state))


def settings_of(recipe: AnyRecipe) -> dict[str, Any]:
    """Arguments of AdamW."""
    found = recipe.optimizer
    return {
        "lr": found.learning_rate,
        "betas": found.betas,
        "weight_decay": found.weight_decay,
        "eps": found.eps,
    }


def require_finite(norm: Tensor) -> None:
    """Refuse the norm of a gradient with which no step can be taken.

    Raises:
        FloatingPointError: it is not finite.
    """
    if not bool(torch.isfinite(norm)):
        raise FloatingPointError(
            "the gradient is not finite; lower optimizer.learning_rate, or use model.dtype float32 or bfloat16"
        )
