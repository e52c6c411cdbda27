"""`flowgrpo bench iteration`: time and memory of a recipe's iterations at a model's real sizes, with random weights."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from ..configs.schema import Recipe
from ..estimate.estimates import GIB, GPUS, Estimate, estimate, gpu_of
from ..pipelines.acceleration import quantize
from ..pipelines.random_weights import random_pipeline
from ..training.checking import check
from ..training.folder.run_folder import RunFolder
from ..training.model_paths import DTYPES, call_arguments, model_folder
from ..training.planning import forecast
from ..training.session import Session
from ..training.trainer import Trainer
from .claims.results import hardware
from .measures import Report, Silent, flow_task

WARM_UP = 1


def iteration(recipe: Recipe, folder: Path, report: Report, repeats: int) -> dict[str, Any]:
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
    updates = _Updates(trainer, device)
    records = [trainer.iterate(k) for k in range(WARM_UP, WARM_UP + repeats)]
    parts = {key.removeprefix("time/"): [r[key] for r in records] for key in records[0] if key.startswith("time/")}
    whole = sorted(sum(values) for values in zip(*parts.values(), strict=True))
    seconds = whole[len(whole) // 2]
    shares = {name: sum(values) / sum(whole) for name, values in parts.items()}
    images = recipe.rollout.prompts * flow_task(trainer).plan_for(0).counts().leaves
    error = records[0].get("ratio/first_error")
    report(
        f"an iteration: {seconds:.2f} s for {images} images, median of {repeats} ({whole[0]:.2f} to {whole[-1]:.2f})"
    )
    report("  ".join(f"{name} {share:.1%}" for name, share in shares.items()))
    if error is not None:
        report(f"ratio before the first update: {'exactly 1' if error == 0 else f'up to {error:.1e} from 1'}")
    card = gpu_of(_where(device))
    expected = _expected(recipe, images, card or "h100")
    sampled = sum(parts["denoiser"]) + sum(parts["optimizer"]) - updates.seconds
    spent = {"sampling": sampled / repeats, "training": updates.seconds / repeats}
    # The estimate is a mean over the run, and the first windows may need more evaluations than the mean, or fewer.
    made = sum(r["evaluations"] for r in records) / repeats
    flops = {**expected.flops, "sampling": expected.flops["sampling"] * made / _mean_evaluations(recipe)}
    reached = {name: flops[name] / spent[name] / 1e12 for name in spent}
    for name, rate in reached.items():
        share = f" ({rate / GPUS[card].tflops:.0%} of the card's peak)" if card else ""
        report(f"{name}: {spent[name]:.2f} s, {rate:.3g} TFLOP/s{share}")
    for name, peak in updates.peaks.items():
        report(f"most memory at once in {name}: {peak / GIB:.1f} GiB, estimated {_estimated(expected, name) / GIB:.1f}")
    whole_peak = max(updates.peaks.values()) if updates.peaks else _of_the_process()
    if not updates.peaks and whole_peak is not None:
        report(f"most memory at once: {whole_peak / GIB:.1f} GiB, the whole process")
    return {
        "recipe": recipe.name, "model": recipe.model.model_dump(mode="json"),
        "rollout": recipe.rollout.model_dump(mode="json"), "hardware": hardware(),
        "pipeline": type(pipe).__name__, "parameters": counted, "images": images,
        "seconds": whole, "shares": shares, "part_seconds": spent, "tflops": reached,
        "peak_tflops": GPUS[card].tflops if card else None, "peak_bytes": whole_peak, "peaks": updates.peaks,
        "estimated_peaks": {name: _estimated(expected, name) for name in updates.peaks},
        "evaluations": [r["evaluations"] for r in records], "first_error": error,
        "grad_norm": [r["grad_norm"] for r in records],
    }  # fmt: skip


class _Updates:
    """Stands for a trainer's updates. Keeps their seconds, and the most memory in use in them and between them.

    Attributes:
        seconds: of all updates together.
        peaks: bytes at most in "sampling", with decoding, and in "training"; nothing if the device does not count.
    """

    def __init__(self, trainer: Trainer, device: torch.device) -> None:
        self.seconds = 0.0
        self.peaks: dict[str, int] = {}
        self._device, self._update = device, trainer.update
        self._end("sampling")
        self.peaks.clear()
        trainer.update = self.update  # type: ignore[method-assign, assignment]

    def update(self, *args: Any) -> dict[str, Any]:
        """As `Trainer.update`."""
        self._end("sampling")
        start = time.perf_counter()
        record = self._update(*args)
        self._end("training")
        self.seconds += time.perf_counter() - start
        return record

    def _end(self, phase: str) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            peak = torch.cuda.max_memory_allocated(self._device)
            self.peaks[phase] = max(self.peaks.get(phase, 0), peak)
            torch.cuda.reset_peak_memory_stats(self._device)


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


def _estimated(expected: Estimate, phase: str) -> int:
    """The estimated bytes of a phase; decoding belongs to sampling."""
    passing = {name: size for name, size in expected.passing.items() if (name == "training") == (phase == "training")}
    return sum(expected.resting.values()) + max(passing.values())


def _where(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def _of_the_process() -> int | None:
    """Peak bytes of the whole process so far; None on a system that does not count them."""
    try:
        import resource
    except ImportError:
        return None
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else 1024 * used
