"""Time and memory of a trainer's iterations, for `flowgrpo bench iteration`."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from ..configs.schema import AnyRecipe
from ..estimate.estimates import GIB, GPUS, gpu_of
from ..estimate.memory import at_once
from ..training.checking import check
from ..training.recipe_findings import Checked
from ..training.trainer import Trainer
from .claims.results import hardware
from .measures import Report

WARM_UP = 1


@dataclass(frozen=True)
class TimedIterations:
    """Iterations that were measured.

    Attributes:
        device: where the model is.
        records: the metrics of each iteration.
        parts: the seconds of each part of each iteration.
        seconds: of each iteration, in rising order.
        training: seconds of the updates of an iteration, on average.
        peaks: bytes at most in "sampling", with decoding, and in "training"; nothing if the device does not count.
    """

    device: torch.device
    records: list[dict[str, Any]]
    parts: dict[str, list[float]]
    seconds: list[float]
    training: float
    peaks: dict[str, int]

    @classmethod
    def of(cls, trainer: Trainer, device: torch.device, repeats: int) -> TimedIterations:
        """Make an iteration that does not count, because it compiles and allocates, and then `repeats` that do."""
        for k in range(WARM_UP):
            trainer.iterate(k)
        updates = _Updates(trainer, device)
        records = [trainer.iterate(k) for k in range(WARM_UP, WARM_UP + repeats)]
        parts = {key.removeprefix("time/"): [r[key] for r in records] for key in records[0] if key.startswith("time/")}
        whole = sorted(sum(values) for values in zip(*parts.values(), strict=True))
        return cls(device, records, parts, whole, updates.seconds / repeats, updates.peaks)

    @property
    def card(self) -> str | None:
        """The key in `GPUS` of the device; None for any other device."""
        return gpu_of(where(self.device))

    @property
    def shares(self) -> dict[str, float]:
        """The share of the time of each part."""
        return {name: sum(values) / sum(self.seconds) for name, values in self.parts.items()}

    def mean(self, part: str) -> float:
        """Seconds of a part of an iteration, on average."""
        return sum(self.parts[part]) / len(self.seconds)

    def share_of_peak(self, rate: float) -> str:
        """A speed in FLOP/s as a share of the card's peak, in brackets; "" for a device whose peak is not known."""
        return f" ({rate / (GPUS[self.card].tflops * 1e12):.0%} of the card's peak)" if self.card else ""

    def tell_times(self, report: Report, made: str) -> None:
        """Report the seconds, the shares of the parts, and whether the first ratios were 1.

        Args:
            report: called with lines of text.
            made: what an iteration makes, such as "24 images".
        """
        seconds, error = self.seconds, self.records[0].get("ratio/first_error")
        report(
            f"an iteration: {median(seconds):.2f} s for {made}, median of {len(seconds)} "
            f"({seconds[0]:.2f} to {seconds[-1]:.2f})"
        )
        report("  ".join(f"{name} {share:.1%}" for name, share in self.shares.items()))
        if error is not None:
            report(f"ratio before the first update: {'exactly 1' if error == 0 else f'up to {error:.1e} from 1'}")

    def tell_memory(self, report: Report, estimated: Mapping[str, int]) -> None:
        """Report the most memory of each phase, with its estimate if there is one."""
        for name, peak in self.peaks.items():
            beside = f", estimated {estimated[name] / GIB:.1f}" if name in estimated else ""
            report(f"most memory at once in {name}: {peak / GIB:.1f} GiB{beside}")
        if not self.peaks and (whole := _of_the_process()) is not None:
            report(f"most memory at once: {whole / GIB:.1f} GiB, the whole process")

    def figures(self, recipe: AnyRecipe, estimated: Mapping[str, int]) -> dict[str, Any]:
        """What was measured, for a JSON file."""
        return {
            "recipe": recipe.name, "model": recipe.model.model_dump(mode="json"),
            "rollout": recipe.rollout.model_dump(mode="json"), "hardware": hardware(),
            "seconds": self.seconds, "shares": self.shares,
            "peak_tflops": GPUS[self.card].tflops if self.card else None,
            "peak_bytes": max(self.peaks.values()) if self.peaks else _of_the_process(), "peaks": self.peaks,
            "estimated_peaks": {name: estimated[name] for name in self.peaks if name in estimated},
            "first_error": self.records[0].get("ratio/first_error"),
            "grad_norm": [r["grad_norm"] for r in self.records],
        }  # fmt: skip


def estimated_peaks(resting: Mapping[str, int], passing: Mapping[str, int]) -> dict[str, int]:
    """The estimated bytes in "sampling", with decoding, and in "training"; see `estimate` for the arguments."""
    found: dict[str, int] = {}
    for name, size in at_once(resting, passing).items():
        phase = "training" if name == "training" else "sampling"
        found[phase] = max(found.get(phase, 0), size)
    return found


def checked_but_for_the_model(recipe: AnyRecipe) -> Checked:
    """The check of a recipe whose model is given: its folder may lack weights."""
    checked = check(recipe)
    checked.findings = [finding for finding in checked.findings if finding.key != "model.path"]
    return checked


def where(device: torch.device) -> str:
    """The name of a device, as its driver gives it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


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


def _of_the_process() -> int | None:
    """Peak bytes of the whole process so far; None on a system that does not count them."""
    try:
        import resource
    except ImportError:
        return None
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else 1024 * used
