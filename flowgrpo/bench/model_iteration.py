"""`flowgrpo bench iteration`: time and memory of a recipe's iterations at a model's real sizes, with random weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from ..configs.schema import Recipe
from ..estimate.estimates import GIB
from ..pipelines.acceleration import quantize
from ..pipelines.random_weights import random_pipeline
from ..training.checking import check
from ..training.folder.run_folder import RunFolder
from ..training.model_paths import DTYPES, call_arguments, model_folder
from ..training.session import Session
from .claims.results import hardware
from .measures import Report, Silent, flow_task

WARM_UP = 1


def iteration(recipe: Recipe, folder: Path, report: Report, repeats: int = 3) -> dict[str, Any]:
    """Seconds by part, and peak memory, of iterations on the recipe's pipeline with random weights.

    The pipeline has the class and sizes of `model.path`, a folder or a known model id. The weights are neither read nor
    downloaded. The prompts come from the embedded scenes, with noise in place of embeddings, and the reward is the size
    of a JPEG file. So the prompts and rewards of the recipe need not exist, and text encoders and reward models are not
    measured. The first iteration compiles and allocates, and does not count.

    Args:
        recipe: a recipe of images.
        folder: where a run folder is made.
        report: called with lines of text.
        repeats: number of iterations that count.

    Raises:
        ValueError: the sizes of the model are not known.
    """
    changes = {
        "data": {"train": "scenes:train", "heldout": None},
        "rewards": [{"name": "jpeg_compressibility"}],
        "model": {"release_text_encoders": False},
        "evaluate": {"rewards": None},
        "extensions": [],
    }
    data = recipe.model_dump()
    for name, change in changes.items():
        data[name] = {**data[name], **change} if isinstance(change, dict) else change
    recipe = Recipe.model_validate(data)
    device = Accelerator().device
    path = model_folder(recipe.model.path)
    pipe = random_pipeline(path, call_arguments(path, recipe.model.call), DTYPES[recipe.model.dtype], device)
    if recipe.model.quantize is not None:
        quantize(pipe, recipe.model.quantize)
    trainer = Session(recipe, RunFolder.create(folder, ""), check(recipe), pipe).trainer(Silent())
    counted = sum(p.numel() for part in trainer.task.weights.modules.values() for p in part.parameters())
    report(f"{type(pipe).__name__}, {counted / 1e9:.3g} billion parameters in the denoiser, on {_where(device)}")
    for k in range(WARM_UP):
        trainer.iterate(k)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    records = [trainer.iterate(k) for k in range(WARM_UP, WARM_UP + repeats)]
    peak = _peak(device)
    parts = {key.removeprefix("time/"): [r[key] for r in records] for key in records[0] if key.startswith("time/")}
    whole = sorted(sum(values) for values in zip(*parts.values(), strict=True))
    seconds = whole[len(whole) // 2]
    shares = {name: sum(values) / sum(whole) for name, values in parts.items()}
    images = recipe.rollout.prompts * flow_task(trainer).plan_for(0).counts().leaves
    report(
        f"an iteration: {seconds:.2f} s for {images} images, median of {repeats} ({whole[0]:.2f} to {whole[-1]:.2f})"
    )
    report("  ".join(f"{name} {share:.1%}" for name, share in shares.items()))
    if peak is not None:
        whose = "" if device.type == "cuda" else ", the whole process"
        report(f"most memory at once: {peak / GIB:.1f} GiB{whose}")
    return {
        "recipe": recipe.name, "model": recipe.model.model_dump(mode="json"), "hardware": hardware(),
        "pipeline": type(pipe).__name__, "parameters": counted, "images": images,
        "seconds": whole, "shares": shares, "peak_bytes": peak,
        "evaluations": [r["evaluations"] for r in records], "first_error": records[0].get("ratio/first_error"),
    }  # fmt: skip


def _where(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def _peak(device: torch.device) -> int | None:
    """Peak bytes: on an accelerator, of this process since the last reset; else, of the whole process so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # a system that does not count memory
        return None
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else 1024 * used
