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
from ..core.addressing import address
from ..samplers.plans import Plan
from ..samplers.transitions import batches_of, replay
from ..training.trainer import Trainer
from .measures import Report, _trainer, flow_task


def overhead(recipe: Recipe, folder: Path, report: Report, repeats: int = 20) -> dict[str, Any]:
    """Time of a whole iteration, compared with the bare forward and backward calls of its denoiser on the same batches.

    Bare calls go straight to the transformer, with tensors that are already in place: no pipeline, no decoding, no
    reward. Calls of a reference are included, with the trained weights in place of the reference weights. Iterations
    are taken from the whole run: a later window shares longer prefixes, so its iterations call the denoiser less often.
    Iterations with equal numbers of evaluations all count with their median times, whole and bare. The ratio is the sum
    of the whole times divided by the sum of the bare times. A run encodes each of its prompts once; here all are
    encoded first, and each iteration is charged its share of that time.
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
        pairs.setdefault(task.plan_for(k).counts().evaluations, []).append(
            (whole, _bare_seconds(trainer, task.plan_for(k)))
        )
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
    """`count` iterations from 1 to `end`, spread evenly by the golden section, so that they match no schedule."""
    return sorted(1 + int(end * (k * (math.sqrt(5) - 1) / 2 % 1)) for k in range(count))


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


def _bare_seconds(trainer: Trainer, plan: Plan) -> float:
    """Time of the transformer alone for one iteration of a plan."""
    policy, prompts = flow_task(trainer).policy, trainer.recipe.rollout.prompts
    pipe = policy.denoiser.pipe
    transformer = pipe.transformer
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    handle = transformer.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    rows = trainer.data.train.take(0, prompts)
    texts = [row.text for row in rows]
    rollout = policy.sample(texts, [address(0, k) for k in range(prompts)], plan, trainer.recipe.optimizer.updates)
    velocity = policy.velocity_of(texts)
    with torch.no_grad():
        # The first calls have no gradient: sampling, and the reference if a penalty needs it.
        if {"kl", "w2"} & set(policy.penalties):
            for transitions, batch in batches_of(rollout):
                replay(velocity, transitions, batch)
        sampled = len(calls)
        for transitions, batch in batches_of(rollout):
            replay(velocity, transitions, batch)
    handle.remove()
    began = time.perf_counter()
    with torch.no_grad():
        for args, kwargs in calls[:sampled]:
            transformer(*args, **kwargs)
    for args, kwargs in calls[sampled:]:
        output = transformer(*args, **kwargs)
        (output[0] if isinstance(output, tuple) else output.sample).float().square().mean().backward()
    taken = time.perf_counter() - began
    trainer.optimizer.zero_grad(set_to_none=True)
    return taken
