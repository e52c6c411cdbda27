"""The weights of a checkpoint, outside a run: to sample, to evaluate, and to write them as a finished run would."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file

from ..configs.schema import AnyRecipe
from ..intake.json_text import parse_json
from ..intake.links import check_links
from ..training.folder.checkpoint import WEIGHTS, DamagedCheckpoint, verify_checkpoint
from ..training.folder.leftovers import BEST
from ..training.folder.run_folder import RunFolder
from ..weights.trained import TrainedWeights

LATEST = "latest"
AVERAGE = "ema.pt"


def numbers_of(run: Path) -> list[int]:
    """The iterations before which a run has written the checkpoints that it still keeps, in this order."""
    return [int(folder.name.removeprefix("iter-")) for folder in RunFolder(run).list_checkpoints()]


def find_checkpoint(model: str, which: str) -> Path:
    """The folder of a checkpoint, which is whole.

    Args:
        model: a run folder.
        which: `latest`, or the number of iterations that were done when the checkpoint was written.

    Raises:
        ValueError: the model is not a run, the run has no such checkpoint (the message lists those that exist), the
            checkpoint is damaged, or the folder has links that lead out of it.
    """
    run = Path(model)
    if not (run / "config.yaml").is_file():
        raise ValueError(f"{model} is not a run, so it has no checkpoints; leave --checkpoint out")
    check_links(run)
    kept = numbers_of(run)
    if not kept:
        raise ValueError(f"{run} has no checkpoint yet; go on with `flowgrpo resume {run}`")
    number = kept[-1] if which == LATEST else int(which) if which.isdecimal() and len(which) < 10 else None
    if number not in kept:
        raise ValueError(
            f"{run} has no checkpoint {which!r}; it keeps {', '.join(map(str, kept))} (run.keep says how many), and "
            f"{LATEST!r} is the newest"
        )
    folder = RunFolder(run).checkpoint(number)
    try:
        verify_checkpoint(folder)
    except DamagedCheckpoint:
        if folder.is_dir() or which != LATEST:
            raise
        # A run that goes on has removed it, and has a newer one.
        return find_checkpoint(model, which)
    return folder


def hint_of(run: Path) -> str:
    """What a message says about the checkpoints of a run without a result; empty if it has none."""
    kept = numbers_of(run)
    return f", or take a checkpoint: --checkpoint {kept[-1]} (there are {', '.join(map(str, kept))})" if kept else ""


def load_checkpoint(weights: TrainedWeights, folder: Path, recipe: AnyRecipe) -> None:
    """Copy a checkpoint into the trained weights: their average if the recipe has one, as evaluations do.

    Args:
        weights: of the same model, trained in the same way.
        folder: a whole checkpoint.
        recipe: of the run.

    Raises:
        ValueError: the checkpoint is gone or of other weights, or has no average.
    """
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is gone: the run goes on, and has removed it while the model was loading; try again, or keep "
            "more checkpoints with run.keep"
        )
    if recipe.optimizer.ema is None:
        weights.load_state_dict(load_file(folder / WEIGHTS))
        return
    file = folder / AVERAGE
    if not file.is_file():
        raise ValueError(f"{folder} holds no {AVERAGE}, and the recipe has optimizer.ema; name another checkpoint")
    state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    average = state.get("average") if isinstance(state, dict) else None
    if not isinstance(average, dict) or not all(isinstance(value, torch.Tensor) for value in average.values()):
        raise ValueError(f"{file} holds no average of weights; name another checkpoint")
    weights.load_state_dict(average)


def iterations_of(run: Path, results: str, unknown: int = 0) -> int:
    """Iterations after which a finished run took its results.

    Args:
        run: its folder.
        results: `evaluate.results` of its recipe. The iteration of the best evaluation is in a file beside the weights.
        unknown: returned if nothing says how many iterations there were.
    """
    if results == "best":
        with suppress(OSError, ValueError, TypeError, KeyError):
            return int(parse_json((run / f"{BEST}.json").read_text(encoding="utf-8"))["iteration"])
    # The line of an iteration has its rewards; the line of the last evaluation does not, and counts what was done.
    done = [
        line["iteration"] + any(key.startswith("reward/") for key in line)
        for line in RunFolder(run).read_metrics()
        if isinstance(line.get("iteration"), int)
    ]
    return max(done, default=unknown)
