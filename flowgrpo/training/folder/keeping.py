"""When and how the state of a run is written, and where it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial

from accelerate import Accelerator

from ...configs.load import dump_recipe
from ...configs.schema import AnyRecipe
from ...weights.averages import Ema
from ...weights.trained import TrainedWeights
from ..distributed.processes import Processes
from ..reporting.reporter import Reporter
from ..stopping import Stop
from .checkpoint import Gathered, Kept, Stateful, Written, read_checkpoint, write_checkpoint
from .resuming import differences, gaps, newest_whole
from .run_folder import RunFolder

SHARE = 20
"""By the clock a checkpoint is due after this many times what the last one took to write, or later."""


class Keeper:
    """Writes and reads the checkpoints of a run.

    Args:
        recipe: of the run, as its `config.yaml` has it.
        run: its folder.
        weights: what is trained.
        parts: what else a checkpoint holds, by file name; `optimizer` among them.
        steady: names of the parts that only an optimizer step moves.
        processes, accelerator, reporter, stop: of the run.
        clock: seconds.
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
        reporter: Reporter,
        stop: Stop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings, self._text = recipe.run, dump_recipe(recipe)
        self.run, self.weights, self.parts, self.steady = run, weights, parts, steady
        self.processes, self.accelerator, self.reporter, self.stop = processes, accelerator, reporter, stop
        self._clock = clock
        self._last, self._took = clock(), 0.0
        self._saved = 0  # what a new run begins with needs no checkpoint

    # -- going on ----------------------------------------------------------------------------------------------

    def resume(self) -> int:
        """Put the newest whole checkpoint in place; returns the iteration to do next.

        Raises:
            ValueError: no checkpoint is whole, or a process does not see that of the main one.
        """
        chosen = self.processes.gather(self._chosen() if self.accelerator.is_main_process else None)[0]
        if chosen is not None:
            folder = self.run.checkpoint(chosen)
            if not folder.is_dir():
                raise ValueError(
                    f"process {self.processes.rank} does not see the checkpoint {folder} of the main one; put the run "
                    "folder where all of them read and write the same files"
                )
            self._saved = read_checkpoint(folder, self.weights, self.parts())
        # None writes again before all have read.
        self.processes.gather(None)
        if self.accelerator.is_main_process:
            self.run.rewind(self._saved)
            self.tell_notes()
        return self._saved

    def _chosen(self) -> int | None:
        first = min(self.settings.checkpoint_every, self.settings.iterations)
        checkpoint = newest_whole(self.run, first, self.reporter.note)
        if checkpoint is None:
            return None
        iteration = int(checkpoint.name.removeprefix("iter-"))
        for sentence in (*differences(checkpoint, self._text), *gaps(self.run, iteration)):
            self.reporter.note(sentence)
        return iteration

    def tell_notes(self) -> None:
        """Report what the run folder has to say."""
        while self.run.notes:
            self.reporter.note(self.run.notes.pop(0))

    # -- writing -----------------------------------------------------------------------------------------------

    def moving(self) -> dict[str, Written]:
        """Copies of what an iteration moves before its first optimizer step."""
        return {name: Kept(part) for name, part in self.parts().items() if name not in self.steady}

    def pause(self, iteration: int) -> int:
        """Before an iteration: write what is due; the number of the signal that ends the run here, or 0.

        All processes must call it.
        """
        wishes = self.processes.gather((self.stop.number, self._due()))
        stopped = max(number for number, _ in wishes)
        # By the main process's clock, for they differ.
        if stopped or wishes[0][1]:
            self.write(iteration)
        return stopped

    def _due(self) -> bool:
        minutes = self.settings.checkpoint_minutes
        passed = self._clock() - self._last
        return minutes is not None and passed >= max(60 * minutes, SHARE * self._took)

    def agreed(self) -> int:
        """The number of the signal that any process has had, or 0. All must call it."""
        return max(self.processes.gather(self.stop.number))

    def write_if_due(self, iteration: int) -> None:
        """Write the state before an iteration if by their count it is time."""
        if iteration % self.settings.checkpoint_every == 0 or iteration == self.settings.iterations:
            self.write(iteration)

    def save_results(self, name: str, average: Ema | None) -> None:
        """Write the trained weights, averaged if they are, into a folder of the run. All processes must call it."""
        if self.accelerator.is_main_process or self.weights.shards is not None:
            with average.applied() if average else nullcontext(), self.weights.in_one_place():
                if self.accelerator.is_main_process:
                    self.weights.save(self.run.path / name, overwrite=True)
        self.accelerator.wait_for_everyone()

    def write(self, iteration: int, kept: Mapping[str, Written] | None = None) -> None:
        """Write the state before an iteration, unless it has been written. All processes must call it.

        Args:
            iteration: the next to be done.
            kept: of parts that have moved since it began, what they were.
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
            fill = partial(write_checkpoint, iteration=iteration, weights=weights, parts=parts, recipe=self._text)
            self.run.save_checkpoint(iteration, fill, self.settings.keep)
        self.accelerator.wait_for_everyone()
        self._saved, self._last = iteration, self._clock()
        self._took = self._last - began
