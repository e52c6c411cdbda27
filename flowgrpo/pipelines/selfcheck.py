"""Which way of replaying a pipeline reproduces its own loop exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .recorder import Schedule
from .replay import DECODERS, Replay


@dataclass(frozen=True)
class Record:
    """A stochastic rollout in a pipeline's own loop.

    Attributes:
        prompts: N texts.
        states: T states [N, *latent_shape], one before each step.
        predictions: T predictions of the pipeline there, same shape.
        final: [N, *latent_shape], the state after the last step.
        images: [N, ...], what the pipeline decoded it to.
    """

    prompts: tuple[str, ...]
    states: tuple[Tensor, ...]
    predictions: tuple[Tensor, ...]
    final: Tensor
    images: Tensor


@torch.no_grad()
def rollout(replay: Replay, sigmas: Sequence[float], prompts: Sequence[str], seed: int) -> Record:
    """Run the pipeline's own loop with noise added at each step.

    Every step is recorded: options that act on a few steps only (skipped layers, truncated guidance) would
    otherwise pass unseen.

    Args:
        replay: the pipeline.
        sigmas: T+1 values of its own table, falling to 0.
        prompts: N texts.
        seed: of the noise.

    Raises:
        RuntimeError: if the pipeline does not take T scheduler steps.
    """
    recorder, last = replay.recorder, replay.num_steps - 1
    noise = torch.Generator().manual_seed(seed)
    states: list[Tensor] = []
    predictions: list[Tensor] = []
    final: list[Tensor] = []

    def hook(index: int, prediction: Tensor, sample: Tensor) -> Tensor:
        here, there = sigmas[index], sigmas[index + 1]
        states.append(sample.clone())
        predictions.append(prediction.clone())
        velocity = -prediction.float() if recorder.inverted else prediction.float()
        drawn = torch.randn(sample.shape, generator=noise).to(sample.device)
        following = sample.float() + (there - here) * velocity + 0.5 * (here - there) ** 0.5 * drawn
        following = following.to(sample.dtype)
        if index == last:
            final.append(following.clone())
        return following

    recorder.arm(hook)
    images = replay.caller.run(recorder, prompts, replay.num_steps, output_type="pt")
    if not final:
        name = type(replay.caller.pipe).__name__
        raise RuntimeError(f"{name} took {recorder.taken} scheduler steps instead of {replay.num_steps}")
    return Record(tuple(prompts), tuple(states), tuple(predictions), final[0], stacked(images))


def exact_variant(replay: Replay, own: Schedule, record: Record, variants: Sequence[str]) -> str:
    """The first of `variants` that predicts every recorded step with error 0, in the caller's grad mode.

    Raises:
        RuntimeError: if there is none; says for each variant at which step, and by how much, it differs.
    """

    def fault(variant: str) -> str | None:
        for i, x in enumerate(record.states):
            predict = partial(replay.predict, variant, x, own, i, record.prompts)
            if difference := _difference(predict, record.predictions[i]):
                return f"step {i}: {difference}"
        return None

    return _first(replay, variants, fault, "evaluate")


@torch.no_grad()
def exact_decoder(replay: Replay, own: Schedule, record: Record) -> str:
    """The first of `DECODERS` that makes the pipeline's own images of the record's final state, with error 0.

    Raises:
        RuntimeError: if there is none; says for each decoder by how much it differs.
    """

    def fault(decoder: str) -> str | None:
        return _difference(lambda: stacked(replay.decode(decoder, record.final, own, record.prompts)), record.images)

    return _first(replay, DECODERS, fault, "decode")


def stacked(images: Any) -> Tensor:
    """One tensor of a pipeline's images, which may come as a list."""
    return images if isinstance(images, Tensor) else torch.stack(list(images))


def _first(replay: Replay, names: Sequence[str], fault_of: Callable[[str], str | None], what: str) -> str:
    faults = {}
    for name in names:
        fault = fault_of(name)
        if fault is None:
            return name
        faults[name] = fault
    listed = "\n".join(f"  {name}: {fault}" for name, fault in faults.items())
    raise RuntimeError(
        f"{type(replay.caller.pipe).__name__} cannot {what} a state of its own loop again exactly:\n"
        f"{listed}\n"
        "The usual causes are dropout left on, an option whose effect carries over from step to step, and "
        "randomness outside the `generator` argument."
    )


def _difference(compute: Callable[[], Tensor], expected: Tensor) -> str | None:
    try:
        found = compute().detach()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # A pipeline called in a way it does not support may raise anything; that only rules this way out.
        return f"{type(error).__name__}: {error}"
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{found.dtype} {tuple(found.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    if torch.equal(found, expected):
        return None
    return f"max error {(found.float() - expected.float()).abs().max().item():.3g}"
