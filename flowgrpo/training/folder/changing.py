"""What a run may change when it goes on, and the recipes that it has had.

A run that goes on with other rewards or another learning rate follows no recipe. So `resume` changes only what says how
long the run is, how it is evaluated, and what it writes. `recipes/iter-NNNNNN/config.yaml` in the run folder is the
recipe from iteration N on. The folder is made at the first change.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...configs.load import dump_recipe, load_recipe
from ...configs.run_recipes import ITERATION, recipes_of
from ...configs.schema import AnyRecipe
from ...configs.yaml_text import parse_yaml, read_text
from ..updating import learning_rate
from .checkpoint import LAST
from .files import write_text
from .run_folder import RunFolder, unused

RUN_KEYS = (
    "run.iterations", "run.checkpoint_every", "run.checkpoint_minutes", "run.keep", "run.sample_every", "run.trackers",
)  # fmt: skip
BATCHES = {
    "images": ("rollout.batch", "rollout.decode_batch", "rollout.chunk", "rollout.store", "model.context_parallel"),
    "text": ("rollout.batch", "rollout.tokens"),
    "masked": ("rollout.batch", "rollout.chunk"),
}
"""Keys of memory, by task. They change results only by rounding."""
REWARD_BATCH = re.compile(r"rewards\.[^.]+\.options\.(\w+_options\.)?batch_size")
"""How many samples a reward takes in a call; it changes scores only by rounding."""
EVALUATION = "evaluate"
_UNDONE = "undone-"


def changeable(recipe: AnyRecipe) -> list[str]:
    """The keys that a run of this recipe may change when it goes on."""
    batches = BATCHES[recipe.task]
    if recipe.optimizer.cut == "edges":
        # The batches of trained states are dealt out to the updates.
        fixed = ("rollout.batch", "rollout.chunk", "model.context_parallel")
        batches = tuple(key for key in batches if key not in fixed)
    return [*RUN_KEYS, f"{EVALUATION}.*", *batches, "rewards.*.options.batch_size"]


def may_change(key: str, recipe: AnyRecipe) -> bool:
    """Whether a run of this recipe may change a key when it goes on."""
    if REWARD_BATCH.fullmatch(key):
        return True
    return key in (*changeable(recipe), EVALUATION) or key.startswith((f"{EVALUATION}.", "run.trackers."))


def with_changes(run: RunFolder, words: Sequence[str]) -> AnyRecipe:
    """The recipe of a run with `key=value` overrides. Nothing is written.

    Args:
        run: the run.
        words: overrides, as `load_recipe` takes them.

    Raises:
        ValueError: a key is unknown or may not change, a value is wrong, or the run would be shorter than it is
            already.
    """
    recipe, changed = load_recipe(run.config), load_recipe(run.config, words)
    keys = [word.partition("=")[0].strip() for word in words]
    if refused := [key for key in keys if not may_change(key, recipe)]:
        why = (
            "would deal out the trained states to other updates, because optimizer.cut is edges"
            if any(key in BATCHES[recipe.task] for key in refused)
            else "would change what the run is, in the middle of it"
        )
        raise ValueError(
            f"{', '.join(refused)} {why}. These keys may change: {', '.join(changeable(recipe))}. For anything else "
            f"make another run. `flowgrpo fork {run.path} KEY=VALUE` goes on from the newest checkpoint. `flowgrpo "
            f"train {run.config} {_from_here(recipe, run)} KEY=VALUE --out NEW` begins anew, from the weights of this "
            "run, once they are written"
        )
    done = max((_number(path) for path in run.list_checkpoints()), default=0)
    if changed.run.iterations < done:
        raise ValueError(
            f"run.iterations is {changed.run.iterations}, and {done} iterations of {run.path} are done; give {done} or "
            "more"
        )
    return changed


def _from_here(recipe: AnyRecipe, run: RunFolder) -> str:
    """The override with which a new run begins with the weights of this one."""
    if recipe.model.train == "lora":
        return f"model.lora.start={run.path}"
    return f"model.path={run.path / ('pipeline' if recipe.task == 'images' else 'model')}"


def adopt(run: RunFolder, iteration: int, checkpoint: Path | None, recipe: str) -> None:
    """Let a recipe hold from an iteration on: keep the recipe before it, and write `config.yaml`, if they differ.

    Args:
        run: the run; this process is its only writer.
        iteration: the next iteration. What was done at or after it is done again.
        checkpoint: the checkpoint before this iteration; None if the run begins again.
        recipe: the recipe, as YAML.
    """
    kept = dict(recipes_of(run.path))
    for start in [start for start in kept if start > iteration]:
        _set_aside(kept.pop(start))
    if kept:
        before = kept[max(kept)]
    else:
        before = run.config if checkpoint is None else checkpoint / run.config.name
    if parse_yaml(read_text(before), str(before)) != parse_yaml(recipe, str(run.config)):
        old = read_text(before)
        if iteration in kept:
            _set_aside(kept[iteration])
        elif not kept:
            first = _write(run, 0, old)
            if iteration == 0:
                _set_aside(first)
        if iteration > 0 or kept:
            _write(run, iteration, recipe)
    # A file that was edited by hand stays as it is.
    if not read_text(run.config) or dump_recipe(load_recipe(run.config, rewards=False)) != recipe:
        write_text(run.config, recipe)


def former_ends(run: RunFolder) -> set[int]:
    """Iterations after which the run had ended, before it was made longer."""
    return {start for (_, before), (start, _) in pairwise(recipes_of(run.path)) if _length(before) == start}


def first_checkpoint(run: RunFolder) -> int:
    """A number of iterations after which some checkpoint was written, whichever of its recipes the run had.

    A recipe that is to hold from now on has written none, so the folder alone is read.
    """
    now = load_recipe(run.config, rewards=False).run
    found = [now.checkpoint_every, now.iterations]
    for _, file in recipes_of(run.path):
        found += [int(value) for key in ("checkpoint_every", "iterations") if (value := _of_run(file).get(key))]
    return min(found)


def schedule_notes(before: Path, recipe: AnyRecipe, iteration: int) -> Iterator[str]:
    """A sentence on the learning rate, if it depends on the length of the run, and the length has changed.

    Args:
        before: the recipe before the change.
        recipe: the recipe from now on.
        iteration: the next iteration.
    """
    length, optimizer = _length(before), recipe.optimizer
    if length in (None, recipe.run.iterations):
        return
    if optimizer.schedule in ("constant", "inverse"):
        return
    if iteration == 0:
        yield (
            f"optimizer.schedule {optimizer.schedule} falls over {recipe.run.iterations} iterations from now on, and "
            f"fell over {length} before"
        )
        return
    old = recipe.model_copy(update={"run": recipe.run.model_copy(update={"iterations": length})})
    taken = iteration * optimizer.epochs * optimizer.updates
    yield (
        f"optimizer.schedule {optimizer.schedule} falls over {recipe.run.iterations} iterations from now on: the "
        f"learning rate goes on at {learning_rate(recipe, taken):.3g}; over {length} iterations it would go on at "
        f"{learning_rate(old, taken):.3g}. Iterations that are done keep the rates that they had"
    )


def keeps_numbers(before: Path, recipe: AnyRecipe, keys: Iterable[str]) -> bool:
    """Whether a run that begins again with changed keys of its recipe has the same numbers.

    Args:
        before: the recipe before the change.
        recipe: the recipe from now on.
        keys: the keys that have changed.
    """
    return all(key.startswith(RUN_KEYS) for key in keys) and not any(schedule_notes(before, recipe, 0))


def _of_run(file: Path) -> dict[str, Any]:
    """The section `run` of a recipe that the run folder keeps; it is read as plain values, and no code of it runs."""
    recipe = parse_yaml(read_text(file), str(file))
    found = recipe.get("run") if isinstance(recipe, dict) else None
    return {key: value for key, value in (found or {}).items() if isinstance(value, int) and 0 < value <= LAST}


def _length(file: Path) -> int | None:
    return _of_run(file).get("iterations")


def _write(run: RunFolder, iteration: int, recipe: str) -> Path:
    folder = run.path / "recipes" / f"iter-{iteration:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / run.config.name, recipe)
    return folder / run.config.name


def _set_aside(file: Path) -> None:
    """Rename a recipe whose iterations are done again."""
    os.replace(file.parent, unused(file.parent.with_name(f"{_UNDONE}{file.parent.name}")))


def _number(checkpoint: Path) -> int:
    match = ITERATION.fullmatch(checkpoint.name)
    return int(match[1]) if match else 0
