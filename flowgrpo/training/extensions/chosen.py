"""The extensions of a run, in the order of its recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...configs.schema import AnyRecipe
from ..credit.pooling import Pooled
from ..data import PromptRow
from ..distributed.processes import Processes
from ..folder.checkpoint import Kept, Stateful, Written
from ..folder.saved_samples import Batch
from ..reporting.clock import Clock
from ..tasks import Task
from .extension import Comparison, Evaluation, Extension


class Extensions:
    """Calls the hooks of every extension, each with what the one before left.

    Args:
        each: name -> extension.
    """

    def __init__(self, each: Mapping[str, Extension] | None = None) -> None:
        self.each = dict(each or {})

    @classmethod
    def of(cls, recipe: AnyRecipe, trained: Sequence[str], evaluated: Sequence[str]) -> Extensions:
        """Those of a recipe; the second entry of one name is called NAME-2.

        Args:
            recipe: as it is written.
            trained: names of its rewards, in its order.
            evaluated: names of the rewards of its evaluations.

        Raises:
            ValueError: options that do not go with the rewards, or something that is no extension.
        """
        found: dict[str, Extension] = {}
        for choice in recipe.extensions:
            try:
                made = choice.make(recipe=recipe, trained=trained, evaluated=evaluated)
            except (TypeError, ValueError) as error:
                raise ValueError(f"extension {choice.short}: {error}") from error
            if not isinstance(made, Extension):
                raise ValueError(
                    f"extension {choice.name} is a {type(made).__name__}; write a class that inherits from "
                    "flowgrpo.training.extensions.Extension"
                )
            number = 1 + sum(other.short == choice.short for other in recipe.extensions[: len(found)])
            found[choice.short if number == 1 else f"{choice.short}-{number}"] = made
        return cls(found)

    def parts(self) -> dict[str, Stateful]:
        """What a checkpoint holds of those that remember something, by file name."""
        return {
            f"extensions/{name}": one
            for name, one in self.each.items()
            if type(one).state_dict is not Extension.state_dict
        }

    def kept(self) -> dict[str, Written]:
        """Copies of what they remember."""
        return {name: Kept(part) for name, part in self.parts().items()}

    def begin(self, task: Task, processes: Processes, clock: Clock) -> None:
        """The model is there."""
        for one in self.each.values():
            one.begin(task, processes, clock)

    def prompts_drawn(
        self, rows: Sequence[PromptRow], everything: Sequence[PromptRow], iteration: int
    ) -> Sequence[PromptRow]:
        """The prompts of an iteration, of all processes.

        Raises:
            ValueError: an extension gave more prompts or fewer.
        """
        for name, one in self.each.items():
            drawn = one.prompts_drawn(rows, everything, iteration)
            if len(drawn) != len(rows):
                raise ValueError(
                    f"extension {name} drew {len(drawn)} prompts for iteration {iteration}; return {len(rows)} of them"
                )
            rows = drawn
        return rows

    def samples_scored(self, batch: Batch) -> Batch:
        """The samples of this process. All processes must call it."""
        for one in self.each.values():
            batch = one.samples_scored(batch)
        return batch

    def samples_compared(self, advantages: Tensor, comparison: Comparison) -> Tensor:
        """[L] advantages of the samples of all processes."""
        for one in self.each.values():
            advantages = one.samples_compared(advantages, comparison)
        return advantages

    def advantages_made(self, advantages: Tensor, samples: Pooled, batch: Batch) -> Tensor:
        """[N] or [N, T] advantages of this process's nodes."""
        for one in self.each.values():
            advantages = one.advantages_made(advantages, samples, batch)
        return advantages

    def update_done(self, samples: Pooled, record: Mapping[str, Any]) -> dict[str, float]:
        """Tell all of an iteration's update; returns their metrics."""
        found: dict[str, float] = {}
        for one in self.each.values():
            one.update_done(samples, record)
            found |= one.record()
        return found

    def evaluation_done(self, evaluation: Evaluation) -> None:
        """Tell all of an evaluation."""
        for one in self.each.values():
            one.evaluation_done(evaluation)
