"""The trackers of a run, such as Weights & Biases: how they start, what they get, and what happens if one fails."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ...configs.load import plain
from ...configs.publishing import publishable
from ...configs.schema import AnyRecipe
from ...intake.json_text import parse_json
from ...intake.links import links_out
from ..folder.files import write_text
from ..folder.run_folder import RunFolder
from ..joined_rollouts import Samples
from .tracked_samples import give_samples, shown_samples

PROJECT = "flowgrpo"
"""The project of all runs, for trackers that have projects."""
_OF_THE_USER = {"id": "WANDB_RUN_ID", "name": "WANDB_NAME", "dir": "WANDB_DIR", "resume": "WANDB_RESUME"}


class Trackers:
    """The trackers of a run. If a tracker fails, the run says so and goes on without it.

    A tracker has the metrics by iteration. Weights & Biases takes no step below its last one, and a resumed run may do
    iterations again. So it gets `iteration` as a value beside the others, and draws all of them over it.

    Args:
        recipe: of the run; `run.trackers` names the trackers, and all of it is given to them.
        run: the folder of the run; without one there are no trackers.
        active: whether this process gives anything to trackers; only the main process should.
    """

    def __init__(self, recipe: AnyRecipe, run: RunFolder | None, active: bool = True) -> None:
        self.recipe, self.run = recipe, run
        self.note: Callable[[str], None] = lambda text: None
        """Called with a sentence for a person."""
        self._waiting = list(dict.fromkeys(recipe.run.trackers)) if active and run is not None else []
        self._open: list[Any] = []

    def start(self, iteration: int) -> None:
        """Start the trackers, unless they are started already.

        Args:
            iteration: the next iteration. What a tracker has from there on is written again.

        Raises:
            ValueError: a tracker does not start, or the file that knows the trackers of this run cannot be read.
        """
        if not self._waiting or self.run is None:
            return
        kept = self._kept(self.run)
        for name in self._waiting:
            try:
                tracker = self._started(self.run, name, iteration, kept.get(name))
            except Exception as error:
                raise ValueError(_unstarted(self.run, name, error, kept.get(name))) from error
            self._open.append(tracker)
            # MLflow allows no parameter to change, and TensorBoard would show each start as one more run.
            if name not in kept or name == "wandb":
                self._give_recipe(name, tracker)
            kept[name] = _id_of(tracker)
        self._waiting = []
        write_text(self.run.trackers, json.dumps(kept) + "\n")

    def log(self, record: Mapping[str, Any]) -> None:
        """Give the numbers of a record of the metrics to all trackers."""
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}

        def give(tracker: Any) -> None:
            if tracker.name == "wandb":
                tracker.log(numbers)
            else:
                tracker.log(numbers, step=record["iteration"])

        self._each(f"at iteration {record['iteration']}", give)

    def samples(self, phase: str, iteration: int, samples: Samples, records: Sequence[Mapping[str, Any]]) -> None:
        """Give some samples to all trackers that can show them."""
        if self._open:
            shown = shown_samples(phase, iteration, samples, records)
            self._each(f"at iteration {iteration}", lambda tracker: give_samples(tracker, shown))

    def end(self, failed: bool = False) -> None:
        """Have all trackers write what they still hold. `failed` says that the run could not begin."""

        def finish(tracker: Any) -> None:
            if failed and tracker.name == "wandb":
                tracker.tracker.finish(exit_code=1)
            else:
                tracker.finish()

        self._each("at the end", finish)
        self._open, self._waiting = [], []

    def _each(self, when: str, give: Callable[[Any], None]) -> None:
        for tracker in list(self._open):
            try:
                give(tracker)
            except Exception as error:
                self._open.remove(tracker)
                self.note(
                    f"tracker {tracker.name} failed {when} ({_short(error)}); the run goes on without it, and "
                    "metrics.jsonl has everything"
                )

    def _kept(self, run: RunFolder) -> dict[str, str | None]:
        """The trackers that were started for this run before, each with the number that it gave the run, if it did."""
        if not run.trackers.exists():
            return {}
        with suppress(ValueError):
            kept = parse_json(run.trackers.read_bytes())
            if isinstance(kept, dict) and all(id is None or isinstance(id, str) for id in kept.values()):
                return kept
        raise ValueError(
            f"{run.trackers} is not what a run writes; remove it, and the trackers begin new runs of their own"
        )

    def _started(self, run: RunFolder, name: str, iteration: int, known: str | None) -> Any:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        # accelerate's own `init_trackers` starts all trackers at once, and does not say which one failed.
        kind: Any = LOGGER_TYPE_TO_CLASS[name]
        project, options = PROJECT, dict[str, Any]()
        if name == "wandb":
            project, options = os.environ.get("WANDB_PROJECT") or PROJECT, _for_wandb(run, known)
        elif name == "tensorboard":
            options = {"purge_step": iteration}
        elif name == "mlflow":
            options = {"run_name": run.path.resolve().name, "run_id": known}
        places = [run.path] if kind.requires_logging_directory else []
        tracker = kind(project, *places, **options)
        tracker.start()
        if name == "wandb":
            tracker.tracker.define_metric("iteration")
            tracker.tracker.define_metric("*", step_metric="iteration")
            _remove_links(run)
        return tracker

    def _give_recipe(self, name: str, tracker: Any) -> None:
        try:
            tracker.store_init_configuration(dict(flat(publishable(plain(self.recipe)))))
        except Exception as error:
            self.note(f"tracker {name} does not take the recipe ({_short(error)}); config.yaml has it")


def _for_wandb(run: RunFolder, known: str | None) -> dict[str, Any]:
    """Options of `wandb.init`. Where the user has set an environment variable of W&B, that variable counts."""
    options: dict[str, Any] = {"dir": str(run.path.resolve())}
    # A resumed run keeps the name that it has by now.
    options |= {"name": run.path.resolve().name} if known is None else {"id": known}
    if known is not None or os.environ.get("WANDB_RUN_ID"):
        options["resume"] = "allow"
    return {key: value for key, value in options.items() if not os.environ.get(_OF_THE_USER[key])}


def _remove_links(run: RunFolder) -> None:
    """Remove W&B's link to a log in the home: no command opens a run folder with links that lead out of it."""
    folder = run.path / "wandb"
    for name in links_out(folder) if folder.is_dir() else {}:
        with suppress(OSError):
            (folder / name).unlink()


def _id_of(tracker: Any) -> str | None:
    """The number that a tracker has given its run, if a resumed run can go on by it."""
    if tracker.name == "wandb":
        return str(tracker.tracker.id)
    return str(tracker.tracker.info.run_id) if tracker.name == "mlflow" else None


def _unstarted(run: RunFolder, name: str, error: Exception, known: str | None) -> str:
    ways = ["log in with `wandb login`", "set WANDB_MODE=offline"] if name == "wandb" else []
    ways += [] if known is None else [f"remove {run.trackers} so that it begins a new run"]
    ways = [*ways, "leave it out of run.trackers"]
    return (
        f"tracker {name} does not start: {_short(error)}; {', '.join(ways[:-1])}{', or ' if ways[1:] else ''}{ways[-1]}"
    )


def _short(error: Exception) -> str:
    """An error in one line; libraries put whole pages into their messages."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= 300 else text[:299] + "…"


def flat(value: Any, path: str = "") -> Iterator[tuple[str, int | float | str]]:
    """Dotted keys of a configuration with their values. A list of numbers or texts is one text; null is left out."""
    nested = isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value)
    if isinstance(value, dict) or nested:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, int | float | str):
        yield path, value
    elif isinstance(value, list):
        yield path, json.dumps(value, ensure_ascii=False)
