"""An iteration's time divided by the bare time of its denoiser calls: `flowgrpo bench overhead`."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from ..configs.schema import Recipe
from ..training.trainer import Trainer
from .measures import Report, _trainer, flow_task


def overhead(recipe: Recipe, folder: Path, report: Report, repeats: int = 20) -> dict[str, Any]:
    """Time of a whole iteration, compared with the bare forward and backward calls of its denoiser on the same batches.

    Bare calls go straight to the transformer, with tensors that are already in place: no pipeline, no decoding, no
    reward. All calls of an iteration are made again, also those of further epochs, and those of a reference or an old
    policy, with the trained weights in place of theirs. Iterations are taken from the whole run: a later window shares
    longer prefixes, so its iterations call the denoiser less often. Iterations with equal numbers of evaluations all
    count with their median times, whole and bare. The ratio is the sum of the whole times divided by the sum of the
    bare times. A run encodes each of its prompts once; here all are encoded first, and each iteration is charged its
    share of that time.
    """
    trainer = _trainer(recipe, folder)
    task = flow_task(trainer)
    encoding = _encoding_seconds(trainer)
    trainer.iterate(0)
    pairs: dict[int, list[tuple[float, float]]] = {}
    parts = []
    for k in _spread(repeats, recipe.run.iterations):
        trainer.clock.lap()
        began = time.perf_counter()
        record = trainer.iterate(k)
        whole = time.perf_counter() - began + encoding / recipe.run.iterations
        parts.append({key: value for key, value in record.items() if key.startswith("time/")})
        pairs.setdefault(task.plan_for(k).counts().evaluations, []).append((whole, _bare_seconds(trainer, k)))
    kinds = [_Kind.of(evaluations, of_kind) for evaluations, of_kind in sorted(pairs.items())]
    whole, bare = (sum(len(kind.ratios) * getattr(kind, part) for kind in kinds) for part in ("whole", "bare"))
    images = recipe.rollout.prompts * task.plan_for(0).counts().leaves
    report(f"{images} images an iteration; ratio over {repeats} iterations: {whole / bare:.3f}")
    for kind in kinds:
        report(
            f"{kind.evaluations} evaluations a prompt, {len(kind.ratios)} iterations: {kind.whole:.2f} s, "
            f"bare denoiser calls {kind.bare:.2f} s; ratios from {kind.ratios[0]:.3f} to {kind.ratios[-1]:.3f}"
        )
    shares = {key: sum(p[key] for p in parts) / sum(sum(p.values()) for p in parts) for key in parts[0]}
    report("  ".join(f"{key.removeprefix('time/')} {share:.1%}" for key, share in shares.items()))
    report(f"encoding the prompts, once a run: {encoding:.1f} s, in {recipe.run.iterations} iterations")
    return {
        "ratio": whole / bare,
        "encoding_seconds": encoding,
        "pairs": {str(evaluations): of_kind for evaluations, of_kind in pairs.items()},
        "shares": shares,
        "images": images,
    }


def _spread(count: int, end: int) -> list[int]:
    """`count` iterations of a run of length `end`, without the first, which warms up.

    They are spread evenly by the golden section, so that they match no schedule.
    """
    return sorted(min(1 + int((end - 1) * (k * (math.sqrt(5) - 1) / 2 % 1)), end - 1) for k in range(count))


class _Kind(NamedTuple):
    """Iterations with equal denoiser evaluations: their median seconds, whole and bare, and their sorted ratios."""

    evaluations: int
    whole: float
    bare: float
    ratios: list[float]

    @classmethod
    def of(cls, evaluations: int, pairs: Sequence[tuple[float, float]]) -> _Kind:
        whole, bare = zip(*pairs)
        return cls(evaluations, median(whole), median(bare), sorted(w / b for w, b in pairs))


def _encoding_seconds(trainer: Trainer) -> float:
    """Time to encode the prompts that the run's iterations draw."""
    drawn = trainer.data.train.take(0, trainer.recipe.run.iterations * trainer.recipe.rollout.prompts)
    rows = {row.id: row for row in drawn}.values()
    began = time.perf_counter()
    flow_task(trainer).policy.denoiser.pipe.encode_prompt.prompt_cache.ready([row.prompt for row in rows])
    return time.perf_counter() - began


class _Call(NamedTuple):
    """A call of the denoiser: its arguments, and whether gradients were taken."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    graded: bool


def _calls(trainer: Trainer, iteration: int) -> list[_Call]:
    """The calls of the denoiser in an iteration, which is made once more."""
    calls: list[_Call] = []

    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(_Call(args, kwargs, torch.is_grad_enabled()))

    handle = _denoiser(trainer).register_forward_pre_hook(keep, with_kwargs=True)
    try:
        trainer.iterate(iteration)
    finally:
        handle.remove()
    return calls


def _denoiser(trainer: Trainer) -> Any:
    return flow_task(trainer).policy.denoiser.pipe.transformer


def _bare_seconds(trainer: Trainer, iteration: int) -> float:
    """Time of the denoiser alone for an iteration."""
    calls, denoiser = _calls(trainer, iteration), _denoiser(trainer)
    trainer.clock.lap()  # waits for an accelerator
    began = time.perf_counter()
    for args, kwargs, graded in calls:
        with torch.set_grad_enabled(graded):
            output = denoiser(*args, **kwargs)
        if graded:
            (output[0] if isinstance(output, tuple) else output.sample).float().square().mean().backward()
    trainer.clock.lap()
    taken = time.perf_counter() - began
    trainer.optimizer.zero_grad(set_to_none=True)
    return taken
