"""The optimizer, and all optimizer steps of one rollout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..configs.image_recipe import ReferenceConfig
from ..configs.schema import AnyRecipe
from ..configs.sections import EmaConfig, OptimizerConfig
from ..core.diagnostics import COLUMNS
from ..weights.averages import Ema
from ..weights.pieces import cut_optimizer_state, is_cut, wholes
from ..weights.quantized import bitsandbytes
from ..weights.trained import TrainedWeights
from .anchor import Anchor
from .distributed.processes import Processes
from .losses.objective import Objective
from .reporting.clock import Clock
from .reporting.records import joint_update, update_record
from .stopping import Stop
from .tasks import Collected, Task

TAKEN = "taken"
"""The key of a state of an optimizer with the number of steps."""


def learning_rate(recipe: AnyRecipe, taken: int) -> float:
    """The learning rate of the optimizer step that follows `taken` steps.

    A linear warm-up comes first. After it, the rate falls as the schedule says: over the rest of the run, or with
    `inverse` as 1 / (1 + s / half) of the steps s after the warm-up (inverse time decay).
    """
    settings = recipe.optimizer
    if taken < settings.warmup:
        return settings.learning_rate * (taken + 1) / settings.warmup
    if settings.half is not None:
        return settings.learning_rate / (1.0 + (taken - settings.warmup) / settings.half)
    falling = recipe.run.iterations * settings.epochs * settings.updates - settings.warmup
    done = min((taken - settings.warmup) / max(falling, 1), 1.0)
    share = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[settings.schedule]
    return settings.learning_rate * share


class Stepper(Protocol):
    """What moves the trained weights by the gradients of all processes.

    Attributes:
        shared_out: what of it the processes share out, in words; "" if each process holds all of it.
    """

    shared_out: str

    def step(self) -> Tensor:
        """Take one optimizer step, and return the norm of the gradient before it was bounded.

        All processes must call `step`.
        """

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this process."""

    def state_dict(self) -> dict[str, Any]:
        """The state of AdamW for whole weights.

        All processes must call `state_dict`. Only the first process is sure to get whole tensors.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. The weights must be in place already."""


class Optimizer:
    """AdamW with the settings of a recipe, on gradients that are summed over processes.

    With type `adamw_8bit`, both averages of each tensor of 4,096 numbers or more have 8 bits and a float32 scale for
    256 numbers (Dettmers et al., 2110.02861, section 2.1). The trained weights stay float32. A process holds the
    trained weights whole, or a shard of each.

    Args:
        recipe: gives the rates and bounds.
        weights: the weights to move.
        processes: the processes of the run.

    Raises:
        ValueError: the library of the optimizer is not installed, or is too old.
    """

    shared_out = ""

    def __init__(self, recipe: AnyRecipe, weights: TrainedWeights, processes: Processes) -> None:
        self.recipe, self.weights, self.processes = recipe, weights, processes
        self.parameters = weights.parameters()
        self._inner = _adamw(recipe, self.parameters)
        self._taken = 0

    def step(self) -> Tensor:
        """Take one optimizer step, and return the norm of the gradient before it was bounded.

        All processes must call `step`.

        Raises:
            FloatingPointError: the gradient is not finite; the weights have not moved.
        """
        self.processes.add_gradients(self.parameters)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.recipe.optimizer.max_grad_norm)
        norm = norm.full_tensor() if is_cut(norm) else norm
        require_finite(norm)
        for group in self._inner.param_groups:
            group["lr"] = learning_rate(self.recipe, self._taken)
        self._inner.step()
        self._taken += 1
        self.weights.write()
        self.zero_grad()
        return norm.detach().cpu()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this process."""
        self._inner.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state of AdamW, on the CPU.

        If the weights are in shards, all processes must call `state_dict`, and the first process gets whole tensors.
        """
        state: dict[str, Any] = wholes(self._inner.state_dict())
        return {**state, TAKEN: self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state with whole tensors. The settings of AdamW stay as the recipe has them."""
        settings = self._inner.state_dict()["param_groups"]
        self._inner.load_state_dict({**cut_optimizer_state(self._inner, state), "param_groups": settings})
        self._taken = steps_taken(state)


def steps_taken(state: Mapping[str, Any]) -> int:
    """The optimizer steps that a state has behind it, steps without a gradient among them.

    AdamW counts the steps of each weight, and a weight may have been without a gradient. States of older checkpoints
    have only these counts.
    """
    counts = (int(entry["step"]) for entry in state["state"].values())
    return int(state[TAKEN]) if TAKEN in state else max(counts, default=0)


def _adamw(recipe: AnyRecipe, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if recipe.optimizer.type == "adamw":
        return torch.optim.AdamW(parameters, **settings_of(recipe), fused=has_fused(parameters))
    library = library_of(recipe)
    found: torch.optim.Optimizer = library.optim.AdamW8bit(parameters, **settings_of(recipe))
    return found


def library_of(recipe: AnyRecipe) -> Any:
    """The library of a recipe's optimizer; None if PyTorch has the optimizer.

    Raises:
        ValueError: it is not installed, or is too old.
    """
    kind = recipe.optimizer.type
    return None if kind == "adamw" else bitsandbytes(f"optimizer.type {kind}", "optimizer.type")


def settings_of(recipe: AnyRecipe) -> dict[str, Any]:
    """The arguments of AdamW that a recipe gives."""
    found = recipe.optimizer
    return {
        "lr": found.learning_rate,
        "betas": found.betas,
        "weight_decay": found.weight_decay,
        "eps": found.eps,
    }


def has_fused(parameters: Iterable[Tensor]) -> bool:
    """Whether AdamW moves these weights in one kernel. On a CPU it does not, so that runs keep their numbers."""
    return all(parameter.device.type == "cuda" for parameter in parameters)


def require_finite(norm: Tensor) -> None:
    """Check the norm of a gradient before a step is taken.

    Raises:
        FloatingPointError: the norm is not finite.
    """
    if not bool(torch.isfinite(norm)):
        raise FloatingPointError(
            "the gradient is not finite; lower optimizer.learning_rate, or use model.dtype float32 or bfloat16"
        )


def one_average(saved: EmaConfig | None, old: EmaConfig | None) -> bool:
    """Whether the average that is saved is also the sampling policy, because both follow the weights in the same way.

    A run never has both in the weights at once: evaluations take the one, and rollouts and losses the other.
    """
    return saved is not None and saved == old


def averages_of(recipe: AnyRecipe, task: Task) -> dict[str, Ema]:
    """The averages of the trained weights that the recipe asks for, by name. `ema` is the average that is saved.

    There is no average `old` if it would equal `ema`: then `ema` is the sampling policy too.
    """
    wanted = {"ema": recipe.optimizer.ema, **task.followers()}
    if one_average(wanted["ema"], wanted.get("old")):
        del wanted["old"]
    return {name: _average(recipe, task, chosen) for name, chosen in wanted.items() if chosen is not None}


def _average(recipe: AnyRecipe, task: Task, chosen: EmaConfig) -> Ema:
    if isinstance(chosen, ReferenceConfig):
        return Anchor(task.weights, recipe, chosen)
    return Ema(task.weights, **chosen.model_dump())


class Updater:
    """Takes the optimizer steps of a rollout, batch by batch.

    The normaliser of the loss counts the rows of the whole optimizer step. So the losses of processes and micro-batches
    add up.

    Args:
        settings: into how many optimizer steps a rollout is cut.
        task: what is trained.
        objective: the loss.
        optimizer: moves the weights.
        averages: follow the weights.
        processes, clock: the processes and the clock of the run.
        stop: told before each step. An iteration may be given up only before its first step.
    """

    def __init__(
        self,
        settings: OptimizerConfig,
        task: Task,
        objective: Objective,
        optimizer: Stepper,
        averages: Iterable[Ema],
        processes: Processes,
        clock: Clock,
        stop: Stop,
    ) -> None:
        self.settings, self.task, self.objective, self.optimizer = settings, task, objective, optimizer
        self.averages, self.processes, self.clock, self.stop = list(averages), processes, clock, stop

    def update(self, experience: Collected, advantages: Tensor, keep: Tensor | None = None) -> dict[str, Any]:
        """Take all optimizer steps of a rollout.

        Args:
            experience: the rollout.
            advantages: [N], one for each node.
            keep: [N] bool, the nodes that are trained; None for all.

        Returns:
            Metrics of the update.
        """
        statistics = torch.zeros(experience.columns, 2, COLUMNS, dtype=torch.float64)
        sums: dict[str, Tensor] = {}
        first_error = torch.zeros(())
        norms = []
        settings, objective = self.settings, self.objective
        with self.clock.part(self.task.update_part, "before the update"):
            objective.prepare(experience)
        for step in range(settings.epochs * settings.updates):
            part = step % settings.updates
            rows = torch.tensor(float(objective.rows(experience, part, keep)), device=self.task.device)
            rows = self.processes.add(rows).clamp(min=1.0)
            shown = f"update {step + 1}/{settings.epochs * settings.updates}, batch"
            with self.clock.part(self.task.update_part, shown):
                self._settle(experience, part, advantages, keep)
                batches = list(objective.batches(experience, part, keep))
            for number, batch in enumerate(batches, start=1):
                with self.clock.part(self.task.update_part, shown):
                    self.clock.count(number, len(batches))
                    outcome = objective.backward(experience, batch, advantages, keep, rows)
                statistics += outcome.statistics
                sums = {name: sums.get(name, 0) + value for name, value in outcome.metrics.items()}
                if step == 0:
                    first_error = torch.maximum(first_error, outcome.error)
            with self.clock.part("optimizer"):
                norms.append(self._step())
        mine = statistics, {name: value.cpu() for name, value in sums.items()}, first_error
        record = update_record(*joint_update(self.processes.gather(mine)), norms)
        for average in self.averages:
            if isinstance(average, Anchor):
                record |= average.settle(record)
        return record

    def _settle(self, experience: Collected, part: int, advantages: Tensor, keep: Tensor | None) -> None:
        """Give the objective what its batches measure, summed over all processes."""
        sums = self.objective.measure(experience, part, advantages, keep)
        if sums is not None:
            self.objective.settle(self.processes.add(sums))

    def _step(self) -> Tensor:
        self.stop.settled()
        norm = self.optimizer.step()
        for average in self.averages:
            average.step()
        return norm
