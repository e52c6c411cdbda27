"""When and how the state of a run is written and read."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ...configs.load import dump_recipe
from ...configs.run_recipes import measured_alike_since
from ...configs.schema import AnyRecipe
from ...weights.averages import Ema
from ...weights.trained import TrainedWeights
from ..distributed.processes import Processes
from ..reporting.reporter import Reporter
from ..reporting.tracking import Trackers
from ..stopping import Stop
from .changing import adopt, first_checkpoint, former_ends, keeps_numbers, schedule_notes
from .checkpoint import (
    RECIPE,
    Gathered,
    Kept,
    Stateful,
    Written,
    check_readable,
    read_checkpoint,
    write_checkpoint,
)  # fmt: skip
from .files import writing
from .forking import AS_THE_WEIGHTS, forked_at
from .named_files import changed_inputs, measured_inputs, with_later_imports
from .resuming import begun_again, changes, differences, gaps, lost_samples, newest_whole, other_launch
from .run_folder import RunFolder

SHARE = 20
"""With `run.checkpoint_minutes`, the time between checkpoints is at least this many times the time to write one."""


class Keeper:
    """Writes and reads the checkpoints of a run.

    Args:
        recipe: of the run, as in its `config.yaml`.
        run: its folder.
        weights: the trained weights.
        parts: returns everything else that a checkpoint holds, by file name, including `optimizer`.
        steady: names of the parts that only an optimizer step changes.
        processes, accelerator, trackers, reporter, stop: of the run.
        clock: returns seconds.
    """

    def __init__(
        self,
        recipe: AnyRecipe,
        run: RunFolder,
        weights: TrainedWeights,
        parts: Callable[[], dict[str, Stateful]],
        steady: set[str],
        processes: Processes,
        accelerator: Accelerator,
        trackers: Trackers,
        reporter: Reporter,
        stop: Stop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.recipe, self.settings, self._text = recipe, recipe.run, dump_recipe(recipe)
        self.run, self.weights, self.parts, self.steady = run, weights, parts, steady
        self.processes, self.accelerator, self.reporter, self.stop = processes, accelerator, reporter, stop
        self.trackers = trackers
        self._inputs = measured_inputs(self._text) if accelerator.is_main_process else {}
        self._clock = clock
        self._last, self._took = clock(), 0.0
        self._saved = 0  # the start of a new run needs no checkpoint
        self.former_ends: set[int] = set()
        """Iterations after which the run had ended, before it was made longer."""
        self.alike_since = 0
        """The first iteration whose evaluation has today's settings; scores do not compare with earlier ones."""

    # -- going on ----------------------------------------------------------------------------------------------

    def resume(self) -> int:
        """Load the newest whole checkpoint; returns the next iteration. From there on, the recipe of this object holds.

        Raises:
            ValueError: no checkpoint is whole, or a process does not see the checkpoint of the main process.
        """
        chosen = self.processes.gather(self._chosen() if self.accelerator.is_main_process else None)[0]
        if chosen is not None:
            folder = self.run.checkpoint(chosen)
            if not folder.is_dir():
                raise ValueError(
                    f"process {self.processes.rank} does not see the checkpoint {folder} of the main process; put the "
                    "run folder where all processes read and write the same files"
                )
            parts = self.parts()
            anew = sorted(set(parts) - AS_THE_WEIGHTS) if forked_at(self.run) == chosen else []
            self._saved = read_checkpoint(folder, self.weights, parts, anew)
            fresh = [name for name in anew if not (folder / f"{name}.pt").exists()]
            if fresh and self.accelerator.is_main_process:
                self.reporter.note(f"the run that was forked had no {', '.join(fresh)}, so this begins anew")
        # No process writes again before all have read.
        self.processes.gather(None)
        if self.accelerator.is_main_process:
            self.run.rewind(self._saved)
            adopt(self.run, self._saved, None if chosen is None else self.run.checkpoint(chosen), self._text)
            self.tell_notes()
        ends, since = set[int](), 0
        if self.accelerator.is_main_process:
            ends, since = former_ends(self.run), measured_alike_since(self.run.path)
            if since and since == self._saved:
                self.reporter.note(
                    f"evaluations measure something else from iteration {since} on, so their scores do not compare "
                    "with earlier ones: gains since the start are left out, and curve, guards and symptoms begin anew"
                )
        self.former_ends, self.alike_since = self.processes.gather((ends, since))[0]
        return self._saved

    def _chosen(self) -> int | None:
        run = self.run
        checkpoint = newest_whole(run, partial(first_checkpoint, run), self.reporter.note)
        before = run.config if checkpoint is None else checkpoint / RECIPE
        iteration = 0 if checkpoint is None else int(checkpoint.name.removeprefix("iter-"))
        changed = changes(before, self._text)
        said = [*differences(changed, run, checkpoint), *schedule_notes(before, self.recipe, iteration)]
        if checkpoint is None:
            said += begun_again(run, keeps_numbers(before, self.recipe, changed))
        else:
            said += changed_inputs(self._text, self._inputs, checkpoint)
            said += [*gaps(run, iteration), *lost_samples(run, checkpoint, iteration)]
            said += other_launch(checkpoint, self.processes.count)
        for sentence in said:
            self.reporter.note(sentence)
        return None if checkpoint is None else iteration

    def tell_notes(self) -> None:
        """Report the notes of the run folder."""
        while self.run.notes:
            self.reporter.note(self.run.notes.pop(0))

    # -- writing -----------------------------------------------------------------------------------------------

    def log(self, record: Mapping[str, Any]) -> None:
        """Write a line of the metrics, and give its numbers to the trackers."""
        if self.accelerator.is_main_process:
            self.run.log(dict(record))
        self.trackers.log(record)

    def moving(self) -> dict[str, Written]:
        """Copies of the parts that an iteration changes before its first optimizer step.

        Raises:
            ValueError: no resume could read a state. So a run learns of it early, and not at its first checkpoint.
        """
        copies: dict[str, Written] = {}
        for name, part in self.parts().items():
            if name not in self.steady:
                copies[name] = Kept(part)
                check_readable(name, copies[name].state_dict())
        return copies

    def pause(self, iteration: int) -> int:
        """Write a checkpoint if it is due; returns the number of the signal that ends the run here, or 0.

        Call it before an iteration. Every process must call it.
        """
        wishes = self.processes.hear((self.stop.number, self._due()))
        stopped = max(number for number, _ in wishes)
        # Clocks differ, so the main process's clock decides.
        if stopped or wishes[0][1]:
            self.write(iteration)
        return stopped

    def _due(self) -> bool:
        minutes = self.settings.checkpoint_minutes
        passed = self._clock() - self._last
        return minutes is not None and passed >= max(60 * minutes, SHARE * self._took)

    def agreed(self) -> int:
        """The number of a signal that any process has received, or 0. Every process must call it."""
        return max(self.processes.hear(self.stop.number))

    def write_if_due(self, iteration: int) -> None:
        """Write the state before an iteration if it is due by the number of iterations."""
        if iteration % self.settings.checkpoint_every == 0 or iteration == self.settings.iterations:
            self.write(iteration)

    def save_results(self, name: str, average: Ema | None) -> None:
        """Write the trained weights, or their average, into a folder of the run. Every process must call it."""
        self._save(name, average, partial(self.weights.save, overwrite=True))

    def keep_results(self, name: str, average: Ema | None) -> None:
        """Write what `save_kept` makes the results of, in the same way."""
        self._save(name, average, self.weights.keep)

    def save_kept(self, kept: str, name: str) -> None:
        """Write the results that were kept in a folder of the run into another. Every process must call it."""
        if self.accelerator.is_main_process:
            with writing(self.run.path / name):
                self.weights.save_kept(self.run.path / kept, self.run.path / name)
        self.accelerator.wait_for_everyone()

    def _save(self, name: str, average: Ema | None, save: Callable[[Path], None]) -> None:
        if self.accelerator.is_main_process or self.weights.shards is not None:
            with average.applied() if average else nullcontext(), self.weights.in_one_place():
                if self.accelerator.is_main_process:
                    with writing(self.run.path / name):
                        save(self.run.path / name)
        self.accelerator.wait_for_everyone()

    def write(self, iteration: int, kept: Mapping[str, Written] | None = None) -> None:
        """Write the state before an iteration, unless it was written already. Every process must call it.

        Args:
            iteration: the next iteration.
            kept: the states of parts that have changed since the iteration began, from before the change.
        """
        if self._saved == iteration:
            return
        began = self._clock()
        self.processes.meet()
        weights: TrainedWeights | Gathered = self.weights
        parts: dict[str, Written] = {**self.parts(), **(kept or {})}
        parts["optimizer"] = Gathered(parts["optimizer"])
        if self.weights.shards is not None:
            weights = Gathered(self.weights)
            parts = {name: part if name == "optimizer" else Gathered(part) for name, part in parts.items()}
        if self.accelerator.is_main_process:
            self._inputs = with_later_imports(self._text, self._inputs)
            fill = partial(
                write_checkpoint,
                iteration=iteration,
                weights=weights,
                parts=parts,
                recipe=self._text,
                samples=self.run.count_samples(iteration),
                inputs=self._inputs,
                processes=self.processes.count,
            )
            self.run.save_checkpoint(iteration, fill, self.settings.keep)
        self.accelerator.wait_for_everyone()
        self._saved, self._last = iteration, self._clock()
        self._took = self._last - began
