"""Where a run can resume: its newest whole checkpoint, and what a person should know before the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...configs.yaml_text import parse_yaml, read_text
from .checkpoint import RECIPE, DamagedCheckpoint, processes_before, samples_before, verify_checkpoint
from .leftovers import DAMAGED
from .run_folder import RunFolder

Say = Callable[[str], None]
_MOST = 12


def newest_whole(run: RunFolder, first: Callable[[], int], say: Say) -> Path | None:
    """The newest checkpoint that is not damaged. Damaged checkpoints after it are renamed, and their names say so.

    Args:
        run: the run; this process is its only writer.
        first: gives the number of iterations after which the first checkpoint is written, at the latest.
        say: called with a sentence for each damaged checkpoint.

    Returns:
        The checkpoint, or None if no checkpoint has been written yet.

    Raises:
        ValueError: checkpoints were written, and none is whole. To begin again would drop what the run has done.
    """
    for checkpoint in reversed(run.list_checkpoints()):
        try:
            verify_checkpoint(checkpoint)
        except DamagedCheckpoint as fault:
            aside = run.set_aside(checkpoint)
            say(f"damaged checkpoint: {fault}; it is kept as {aside.name}, and the run goes on from the one before it")
        else:
            return checkpoint
    done = _done(run)
    damaged = [path.name for path in run.checkpoints.glob(f"{DAMAGED}*")]
    if damaged or done > first():
        lost = (
            f"these are damaged: {', '.join(sorted(damaged))}" if damaged else "its metrics say that some were written"
        )
        raise ValueError(
            f"{run.checkpoints} holds no whole checkpoint, and {lost}. To begin again would drop {done} iterations. "
            f"Put one back, or train anew into another folder: `flowgrpo train {run.config} --out NEW`"
        )
    return None


def begun_again(run: RunFolder, same: bool) -> Iterator[str]:
    """A sentence on what a run without a checkpoint does again; nothing if it has done no iteration.

    Args:
        run: the run.
        same: whether its numbers will be the same.
    """
    if done := _done(run):
        numbers = "to the same numbers" if same else "maybe to other numbers, because the recipe has changed"
        yield f"no checkpoint was written yet: {_iterations(0, done)} done again, {numbers}"


def changes(before: Path, recipe: str) -> dict[str, str]:
    """The keys in which a recipe differs from the recipe before, each with both values in words.

    Args:
        before: the file of the recipe before.
        recipe: the recipe from now on, as YAML.

    Raises:
        ValueError: the recipe before cannot be read.
    """
    texts = {str(before): read_text(before), "the recipe of the run": recipe}
    old, now = (dict(_leaves(parse_yaml(text, name))) for name, text in texts.items())
    keys = [key for key in dict.fromkeys([*old, *now]) if old.get(key) != now.get(key)]
    return {key: f"{_value(old, key)} → {_value(now, key)}" for key in keys}


def differences(changed: Mapping[str, str], run: RunFolder, checkpoint: Path | None) -> Iterator[str]:
    """A sentence on the changes since a checkpoint was written, or since the run began; nothing if there are none.

    Args:
        changed: see `changes`.
        run: the run.
        checkpoint: the checkpoint from which the run goes on; None if it begins again.
    """
    if changed:
        listed = [f"{key} {values}" for key, values in changed.items()][:_MOST]
        more = f", and {len(changed) - _MOST} more" if len(changed) > _MOST else ""
        since = "the run began" if checkpoint is None else f"{checkpoint.name} was written"
        onward = "begins again" if checkpoint is None else "goes on"
        kept = run.path / "recipes" if checkpoint is None else checkpoint / RECIPE
        yield (
            f"the recipe has changed since {since}: {', '.join(listed)}{more}; the run {onward} with the new values "
            f"({kept} has the old ones)"
        )


def gaps(run: RunFolder, iteration: int) -> Iterator[str]:
    """A sentence on the iterations before the checkpoint that the metrics lack; nothing if the metrics are complete."""
    there = {record["iteration"] for record in run.read_metrics()}
    lost = [number for number in range(iteration) if number not in there]
    if lost:
        state = "is missing" if not run.metrics.exists() else f"lacks {len(lost)} of them"
        yield (
            f"{iteration} iterations are done, and {run.metrics} {state} ({_numbers(lost)}); the weights come from the "
            "checkpoint, and new lines are added, but lost lines stay lost"
        )


def lost_samples(run: RunFolder, checkpoint: Path, iteration: int) -> Iterator[str]:
    """A sentence on the samples from before the checkpoint that the index lacks; nothing if the index is complete."""
    saved, there = samples_before(checkpoint), run.count_samples(iteration)
    if saved is not None and there < saved:
        state = f"lacks {saved - there} of them" if run.index.exists() else "is missing"
        yield (
            f"{saved} samples were saved before {checkpoint.name}, and {run.index} {state}; new lines are added, but "
            "lost lines stay lost, and the gallery does not show their samples"
        )


def other_launch(checkpoint: Path, processes: int) -> Iterator[str]:
    """A sentence on another number of processes than the run had until a checkpoint; nothing if it is the same one."""
    before = processes_before(checkpoint)
    if before not in (None, processes):
        had = "one process" if before == 1 else f"{before} processes"
        now = "one" if processes == 1 else str(processes)
        yield (
            f"the run had {had} until {checkpoint.name}, and goes on with {now}, so its numbers may differ; to have "
            f"{had} again, launch `resume` as `train` was launched (docs/scaling.md)"
        )


def _done(run: RunFolder) -> int:
    """Number of iterations that the metrics know."""
    return 1 + max((record["iteration"] for record in run.read_metrics()), default=-1)


def _iterations(first: int, count: int) -> str:
    return f"iteration {first} is" if count == 1 else f"iterations {first} to {first + count - 1} are"


def _numbers(found: list[int]) -> str:
    there = set(found)
    ends = [number for number in found if number + 1 not in there]
    starts = [number for number in found if number - 1 not in there]
    listed = [str(a) if a == b else f"{a} to {b}" for a, b in zip(starts, ends)]
    return ", ".join(listed[:5]) + (", …" if len(listed) > 5 else "")


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted keys of a recipe with their values; a list is one value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif path:
        yield path, value


def _value(values: dict[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "(not there)"
