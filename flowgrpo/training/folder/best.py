"""The weights of the best evaluation of a run, kept beside the run until it ends."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...configs.run_recipes import measure
from ...configs.sections import HeldOutConfig
from ...intake.json_text import parse_json
from ...weights.averages import Ema
from .files import write_text
from .keeping import Keeper
from .leftovers import BEST


@dataclass(frozen=True)
class Mark:
    """The best evaluation so far.

    Attributes:
        iteration: iterations done before it.
        score: mean of the reward over the held-out prompts; higher is better, or lower if its weight is negative.
        measure: what was measured: the reward and the settings that scores depend on.
    """

    iteration: int
    score: float
    measure: dict[str, Any]


class BestWeights:
    """Keeps the weights of the evaluation with the best mean of a reward, and makes them the results of the run.

    An evaluation that an interruption repeats is compared again and gives the same weights.

    Args:
        settings: of the evaluations.
        reward: name of the reward.
        lower: whether a lower mean is better, because the weight of the reward is negative.
        keeper: has the folder of the run, writes the weights.
    """

    def __init__(self, settings: HeldOutConfig, reward: str, keeper: Keeper, lower: bool = False) -> None:
        self.keeper, self.reward, self.lower = keeper, reward, lower
        self.measure = {"reward": reward, **measure(settings.model_dump(mode="json"))}
        if lower:
            self.measure["lower"] = True
        self.mark: Mark | None = None

    @property
    def _folder(self) -> Path:
        return self.keeper.run.path / BEST

    @property
    def _file(self) -> Path:
        return self.keeper.run.path / f"{BEST}.json"

    def resume(self) -> None:
        """Read what the run has kept. Every process must call it."""
        if self.keeper.accelerator.is_main_process:
            self.mark = self._read()
            if self.mark is None and (before := self._scored()):
                self.keeper.reporter.note(
                    f"the weights of evaluations up to iteration {before[-1]} were not kept, or {self._file} is "
                    "damaged or of another measure; evaluate.results=best chooses among later evaluations"
                )
        self.mark = self.keeper.processes.gather(self.mark)[0]

    def _scored(self) -> list[int]:
        """The iterations done before each evaluation that the run has the score of."""
        return [
            int(record["iteration"]) for record in self.keeper.run.read_metrics() if f"eval/{self.reward}" in record
        ]

    def _read(self) -> Mark | None:
        with suppress(OSError, ValueError, TypeError):
            mark = Mark(**parse_json(self._file.read_text(encoding="utf-8")))
            # Earlier versions also kept settings that change no score.
            if measure(mark.measure) == self.measure and self._folder.is_dir():
                return mark
        return None

    def evaluated(self, iteration: int, record: Mapping[str, float | None], average: Ema | None) -> None:
        """Keep the weights if the evaluation is the best so far. Every process must call it.

        Args:
            iteration: iterations done before the evaluation.
            record: its metrics; empty if there was none.
            average: the averaged weights, which were evaluated; None if the run has none.
        """
        score = record.get(f"eval/{self.reward}")
        if score is None or not math.isfinite(score):
            return
        if self.mark is not None and iteration != self.mark.iteration and not self._better(score, self.mark.score):
            return
        self.keeper.keep_results(BEST, average)
        self.mark = Mark(iteration, score, self.measure)
        if self.keeper.accelerator.is_main_process:
            write_text(self._file, json.dumps(vars(self.mark), ensure_ascii=False) + "\n")

    def _better(self, score: float, than: float) -> bool:
        return score < than if self.lower else score > than

    def become_results(self, name: str, done: int) -> bool:
        """Make the kept weights the results of the run; False if nothing was kept. Every process must call it.

        Args:
            name: the folder of the results.
            done: number of iterations of the run.
        """
        if self.mark is None:
            return False
        self.keeper.save_kept(BEST, name)
        if self.keeper.accelerator.is_main_process and self.mark.iteration != done:
            extreme = "lowest" if self.lower else "highest"
            self.keeper.reporter.note(
                f"{name} has the weights after {self.mark.iteration} of {done} iterations, whose {self.reward} on "
                f"held-out prompts was the {extreme} ({self.mark.score:.4g}). `evaluate.results=last` takes the last"
            )
        return True
