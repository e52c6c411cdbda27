"""Where a run can resume: its newest whole checkpoint, and what a person should know before the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...configs.yaml_text import parse_yaml, read_text
from .checkpoint import RECIPE, DamagedCheckpoint, samples_before, verify_checkpoint
from .leftovers import DAMAGED
from .run_folder import RunFolder

Say = Callable[[str], None]
_MOST = 12


def newest_whole(run: RunFolder, first: int, say: Say) -> Path | None:
    """The newest checkpoint that is not damaged. Damaged checkpoints after it are renamed, and their names say so.

    Args:
        run: the run; this process is its only writer.
        first: the first checkpoint is written after this many iterations, at the latest.
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
    done = 1 + max((record["iteration"] for record in run.read_metrics()), default=-1)
    damaged = [path.name for path in run.checkpoints.glob(f"{DAMAGED}*")]
    if done > first or damaged:
        lost = (
            f"these are damaged: {', '.join(sorted(damaged))}" if damaged else "its metrics say that some were written"
        )
        raise ValueError(
            f"{run.checkpoints} holds no whole checkpoint, and {lost}. To begin again would drop {done} iterations. "
            f"Put one back, or train anew into another folder: `flowgrpo train {run.config} --out NEW`"
        )
    if done:
        say(f"no checkpoint was written yet: {_iterations(0, done)} done again, to the same numbers")
    return None


def differences(checkpoint: Path, recipe: str) -> Iterator[str]:
    """A sentence on how the recipe of a run differs from the recipe of its checkpoint; nothing if they are equal.

    Raises:
        ValueError: the recipe of the checkpoint cannot be read.
    """
    file = checkpoint / RECIPE
    texts = {str(file): read_text(file), "the recipe of the run": recipe}
    before, now = (dict(_leaves(parse_yaml(text, name))) for name, text in texts.items())
    changed = [key for key in dict.fromkeys([*before, *now]) if before.get(key) != now.get(key)]
    if changed:
        listed = [f"{key} {_value(before, key)} → {_value(now, key)}" for key in changed[:_MOST]]
        more = f", and {len(changed) - _MOST} more" if len(changed) > _MOST else ""
        yield (
            f"the recipe has changed since {checkpoint.name} was written: {', '.join(listed)}{more}; the run goes on "
            f"with the new values ({checkpoint / RECIPE} has the old ones)"
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
