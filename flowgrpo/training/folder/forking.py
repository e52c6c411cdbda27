"""A new run that goes on from a checkpoint of another run, which stays as it is."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...configs.load import dump_recipe, load_recipe
from ...configs.run_recipes import recipes_of
from ...configs.schema import AnyRecipe
from ...configs.trust import remember_run
from ...intake.json_text import parse_json
from ...weights.saving import new_folder
from .checkpoint import RECIPE
from .files import write_text, writing
from .leftovers import BEST
from .run_folder import RunFolder, read_lines
from .run_log import NAME as LOG

NOTED = "fork.json"
"""In the folder of a fork, from which run and before which iteration it was made."""
AS_THE_WEIGHTS = frozenset({"optimizer", "ema", "anchor", "old", "compared"})
"""Parts of a checkpoint that follow the weights. Other parts may begin anew in a fork, if the run had none."""
OF_THE_WEIGHTS = ("path", "pipeline", "train", "lora")
"""Keys of section `model` that say what the numbers of a checkpoint are."""


def fork(run: RunFolder, checkpoint: Path, out: Path, words: Sequence[str] = ()) -> list[str]:
    """Make a run folder that is as the folder of a run was when it wrote a checkpoint, with another recipe.

    `resume` of the new run goes on from the checkpoint. Without changes it makes the same numbers again. The lines of
    the metrics and the samples from before the checkpoint are copied. What the run has done since then, its result,
    its gallery and its trackers are not.

    Args:
        run: the run; it is only read.
        checkpoint: one of its checkpoints, which is whole.
        out: the new folder. It appears only when it is complete.
        words: changed keys, as `load_recipe` takes them.

    Returns:
        Sentences that a person should read.

    Raises:
        ValueError: the folder exists, a key is unknown, a value is wrong or does not fit the checkpoint, the new run
            would have nothing to do, or the run has removed the checkpoint meanwhile.
        OSError: a file could not be read or written.
    """
    iteration = int(checkpoint.name.removeprefix("iter-"))
    before, recipe = load_recipe(checkpoint / RECIPE), load_recipe(checkpoint / RECIPE, words)
    _check(before, recipe, iteration, checkpoint)
    if out.exists():
        raise ValueError(f"{out} exists; name a new folder with --out")
    text = dump_recipe(recipe)
    with writing(out), new_folder(out) as folder:
        new = RunFolder(folder)
        try:
            shutil.copytree(checkpoint, new.checkpoint(iteration))
        except OSError as error:
            if checkpoint.is_dir():
                raise
            raise ValueError(
                f"{checkpoint} is gone: the run goes on, and has removed it meanwhile; name a newer one, or keep more "
                "with run.keep"
            ) from error
        for mine, own in ((run.metrics, new.metrics), (run.index, new.index)):
            if mine.is_file():
                own.parent.mkdir(exist_ok=True)
                lines = [line for line, record in read_lines(mine)[0] if record["iteration"] < iteration]
                write_text(own, "".join(f"{line}\n" for line in lines))
        for source in _kept(run, iteration):
            shutil.copytree(source, folder / source.relative_to(run.path))
        if (mark := _best(run, iteration)) is not None:
            shutil.copytree(run.path / BEST, folder / BEST)
            write_text(folder / f"{BEST}.json", mark)
        write_text(folder / NOTED, json.dumps({"run": str(run.path), "iteration": iteration}) + "\n")
        said = f"forked from {run.path}, {checkpoint.name}"
        write_text(folder / LOG, f"{time.strftime('%Y-%m-%d %H:%M:%S%z')} {said}\n")
        write_text(new.config, text)
    unremembered = remember_run(out, text)
    return [] if unremembered is None else [unremembered]


def forked_at(run: RunFolder) -> int | None:
    """The iteration before which a run was forked from another run; None if it was not."""
    try:
        return int(parse_json((run.path / NOTED).read_text(encoding="utf-8"))["iteration"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _check(before: AnyRecipe, recipe: AnyRecipe, iteration: int, checkpoint: Path) -> None:
    # Averages that the checkpoint lacks, other than the one of the results, are told by `resume`.
    changed = [f"model.{key}" for key in OF_THE_WEIGHTS if _section(before).get(key) != _section(recipe).get(key)]
    if changed:
        raise ValueError(
            f"{', '.join(changed)} would make other weights than {checkpoint} has; leave this out, or begin a new "
            "run with `flowgrpo train`"
        )
    if before.optimizer.type != recipe.optimizer.type:
        raise ValueError(
            f"{checkpoint} has averages of optimizer.type {before.optimizer.type}; leave optimizer.type as it is"
        )
    if (before.optimizer.ema is None) != (recipe.optimizer.ema is None):
        has = "no average" if before.optimizer.ema is None else "an average"
        raise ValueError(f"{checkpoint} has {has} of the weights; leave optimizer.ema as it is")
    if recipe.run.iterations <= iteration:
        raise ValueError(
            f"run.iterations is {recipe.run.iterations}, and {iteration} iterations are done in {checkpoint}, so "
            f"nothing would be left to do; write run.iterations={2 * iteration} or another number, or name an earlier "
            "checkpoint with --checkpoint"
        )


def _section(recipe: AnyRecipe) -> dict[str, Any]:
    return recipe.model.model_dump()


def _kept(run: RunFolder, iteration: int) -> Iterator[Path]:
    """Folders of a run that hold what it had before an iteration: samples, pictures of prompts, and recipes."""
    for folder in sorted(run.samples.iterdir()) if run.samples.is_dir() else ():
        made = folder.name.removeprefix("iter-")
        if folder.is_dir() and not folder.name.startswith(".") and (not made.isdecimal() or int(made) < iteration):
            yield folder
    for start, file in recipes_of(run.path):
        if start <= iteration:
            yield file.parent


def _best(run: RunFolder, iteration: int) -> str | None:
    """What a run noted of its best evaluation, if this was before an iteration."""
    try:
        mark = parse_json((run.path / f"{BEST}.json").read_text(encoding="utf-8"))
        there = (run.path / BEST).is_dir() and int(mark["iteration"]) < iteration
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return json.dumps(mark, ensure_ascii=False) + "\n" if there else None
