"""`flowgrpo bench iteration`: time and memory of a recipe's iterations at a model's real sizes, with random weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ..configs.schema import AnyRecipe, MaskedRecipe, Recipe, TextRecipe
from ..estimate.estimates import Estimate, estimate
from ..pipelines.random_weights import random_pipeline
from ..training.folder.run_folder import RunFolder
from ..training.model_paths import DTYPES, call_arguments, model_folder
from ..training.planning import forecast
from ..training.session import Session
from ..weights.quantized import quantize
from ..weights.trained import trainable_modules
from .measures import Report, Silent, flow_task
from .text_iteration import masked_iteration, text_iteration
from .timed_iterations import TimedIterations, checked_but_for_the_model, estimated_peaks, where


def iteration(recipe: AnyRecipe, folder: Path, report: Report, repeats: int) -> dict[str, Any]:
    """Seconds by part, and peak memory, of iterations on a model with random weights.

    The first iteration compiles and allocates, and does not count. See `image_iteration`, `text_iteration` and
    `masked_iteration`.

    Args:
        recipe: what to measure.
        folder: where a run folder is made.
        report: called with lines of text.
        repeats: number of iterations that count.

    Raises:
        ValueError: the sizes of the model are not known.
    """
    if isinstance(recipe, MaskedRecipe):
        return masked_iteration(recipe, folder, report, repeats)
    if isinstance(recipe, TextRecipe):
        return text_iteration(recipe, folder, report, repeats)
    return image_iteration(recipe, folder, report, repeats)


def image_iteration(recipe: Recipe, folder: Path, report: Report, repeats: int) -> dict[str, Any]:
    """`iteration` for a recipe of images.

    The pipeline has the class and sizes of `model.path`, a folder or a known model id. The weights are neither read nor
    downloaded. The prompts come from the embedded scenes, with noise in place of embeddings, and the reward is the size
    of a JPEG file. So the prompts and rewards of the recipe need not exist, and text encoders and reward models are not
    measured.
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
        for module in trainable_modules(pipe).values():
            quantize(module, recipe.model.quantize)
        pipe.to(device)
    session = Session(recipe, RunFolder.create(folder, ""), checked_but_for_the_model(recipe), pipe)
    trainer = session.trainer(Silent())
    counted = sum(p.numel() for part in trainer.task.weights.modules.values() for p in part.parameters())
    report(f"{type(pipe).__name__}, {counted / 1e9:.3g} billion parameters in the denoiser, on {where(device)}")
    timed = TimedIterations.of(trainer, device, repeats)
    images = recipe.rollout.prompts * flow_task(trainer).plan_for(0).counts().leaves
    timed.tell_times(report, f"{images} images")
    expected = _expected(recipe, images, timed.card or "h100")
    sampled = timed.mean("denoiser") + timed.mean("optimizer") - timed.training
    spent = {"sampling": sampled, "training": timed.training}
    # The estimate is a mean over the run, and the first windows may need more evaluations than the mean, or fewer.
    made = sum(r["evaluations"] for r in timed.records) / repeats
    flops = {**expected.flops, "sampling": expected.flops["sampling"] * made / _mean_evaluations(recipe)}
    reached = {name: flops[name] / spent[name] for name in spent}
    for name, rate in reached.items():
        report(f"{name}: {spent[name]:.2f} s, {rate / 1e12:.3g} TFLOP/s{timed.share_of_peak(rate)}")
    peaks = estimated_peaks(expected.resting, expected.passing)
    timed.tell_memory(report, peaks)
    return {
        **timed.figures(recipe, peaks), "pipeline": type(pipe).__name__, "parameters": counted, "images": images,
        "part_seconds": spent, "tflops": {name: rate / 1e12 for name, rate in reached.items()},
        "evaluations": [r["evaluations"] for r in timed.records],
    }  # fmt: skip


def _expected(recipe: Recipe, images: int, card: str) -> Estimate:
    """The estimate for what is measured: no text encoders, and no batch larger than the images of an iteration."""
    rollout = recipe.rollout.model_copy(update={"batch": min(recipe.rollout.batch, images)})
    found = estimate(recipe.model_copy(update={"rollout": rollout}), card)
    return replace(found, resting={**found.resting, "text encoders": 0})


def _mean_evaluations(recipe: Recipe) -> float:
    """Evaluations of the denoiser in an iteration, on average over the run, each distinct state once."""
    found = forecast(recipe)
    total = sum(counts.evaluations * uses for counts, uses in zip(found.counts, found.windows, strict=True))
    return recipe.rollout.prompts * total / sum(found.windows)
