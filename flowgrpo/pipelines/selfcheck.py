"""Find the way of replaying a pipeline that reproduces the pipeline's own loop exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .callers import DECODERS, StateCaller, stacked
from .capture import ConditionedPrompt, skipping_denoiser
from .held import changed
from .pipeline_error import PipelineError
from .recorder import LoopStopped, Schedule


@dataclass(frozen=True)
class Record:
    """A stochastic rollout in a pipeline's own loop.

    Attributes:
        prompts: N texts.
        states: T states [N, *latent_shape], one before each step.
        predictions: T predictions of the pipeline at these states, same shape.
        final: [N, *latent_shape], the state after the last step.
        images: [N, ...], the images that the pipeline decoded from the final state.
    """

    prompts: tuple[str, ...]
    states: tuple[Tensor, ...]
    predictions: tuple[Tensor, ...]
    final: Tensor
    images: Tensor


class _Changed(Exception):
    """Raised if a pipeline changes the state between two steps."""


class _Rounded(Exception):
    """Raised if a pipeline rounds the result of a step to this dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def rollout(replay: StateCaller, sigmas: Sequence[float], prompts: Sequence[str], seed: int) -> Record:
    """Run the pipeline's own loop with noise added at each step.

    Every step is recorded, because some options act on a few steps only (skipped layers, truncated guidance). A record
    of fewer steps could miss these options.

    Args:
        replay: the pipeline.
        sigmas: T+1 values of the pipeline's own table, falling to 0.
        prompts: N texts.
        seed: of the noise.

    Raises:
        PipelineError: if the pipeline does not take T scheduler steps, or changes the state between two steps. Rounding
            the state to 16 bits is no error: the record then has this 16-bit dtype. A known part that is pasted in is
            no error either; see `held`.
    """
    storage: torch.dtype | None = None
    while True:
        try:
            record = _rollout(replay, sigmas, prompts, seed, storage)
            if replay.held.found or not replay.recorder.pastes:
                return record
            # The mask of these prompts keeps nothing, but other masks may.
            replay.held.found = True
        except _Rounded as found:
            storage = found.dtype
        except _Changed:
            if replay.held.found:
                raise changed(replay.caller.pipe) from None
            replay.held.found = True


@torch.no_grad()
def _rollout(
    replay: StateCaller, sigmas: Sequence[float], prompts: Sequence[str], seed: int, storage: torch.dtype | None
) -> Record:
    recorder, last, held = replay.recorder, replay.num_steps - 1, replay.held.of(prompts)
    noise = torch.Generator().manual_seed(seed)
    states: list[Tensor] = []
    predictions: list[Tensor] = []
    # Copies of the results of the steps: some pipelines later overwrite the tensor that a step returned.
    handed: list[Tensor] = []
    ahead_drawn: list[Tensor] = []

    def following(index: int, prediction: Tensor, sample: Tensor, drawn: Tensor, place: slice | None = None) -> Tensor:
        here, there = sigmas[index], sigmas[index + 1]
        velocity = -prediction.float() if recorder.inverted else prediction.float()
        moved = sample.float() + (there - here) * velocity + 0.5 * (here - there) ** 0.5 * drawn.to(sample.device)
        moved = moved.to(storage or sample.dtype)
        if held is None:
            return moved
        return (held if place is None else held.at(place)).entered(moved)

    def ahead(index: int, prediction: Tensor, sample: Tensor, place: slice) -> Tensor:
        ahead_drawn.append(torch.randn(sample.shape, generator=noise))
        return following(index, prediction, sample, ahead_drawn[-1], place).to(sample.dtype)

    def hook(index: int, prediction: Tensor, sample: Tensor) -> Tensor:
        if handed:
            _require_kept(
                replay,
                handed[-1] if held is None else torch.where(held.part.to(sample.device), sample, handed[-1]),
                sample,
            )
        states.append(sample.clone())
        predictions.append(prediction.clone())
        drawn = torch.cat(ahead_drawn, dim=1) if ahead_drawn else torch.randn(sample.shape, generator=noise)
        ahead_drawn.clear()
        moved = following(index, prediction, sample, drawn)
        handed.append(moved.clone())
        return moved.to(sample.dtype)

    recorder.arm(hook, ahead=ahead)
    images = replay.caller.run(recorder, prompts, replay.num_steps, output_type="pt")
    if len(handed) <= last:
        name = type(replay.caller.pipe).__name__
        why = "; if its call has a strength, set it to 1" if "strength" in replay.caller.parameters else ""
        raise PipelineError(f"{name} took {recorder.taken} scheduler steps instead of {replay.num_steps}{why}")
    final = handed[last] if held is None else held.finished(handed[last])
    return Record(tuple(prompts), tuple(states), tuple(predictions), final, stacked(images, len(prompts)))


def _require_kept(replay: StateCaller, handed: Tensor, sample: Tensor) -> None:
    if torch.equal(handed.to(sample.dtype), sample):
        return
    if not bool(handed.isfinite().all()):
        raise PipelineError(
            f"the denoiser of {type(replay.caller.pipe).__name__} predicts numbers that are not finite. Its weights "
            "may be damaged, an adapter may be scaled too much, or the numbers do not fit into model.dtype"
        )
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(handed.to(dtype).to(sample.dtype), sample):
            raise _Rounded(dtype)
    raise _Changed


def exact_variant(replay: StateCaller, own: Schedule, record: Record, variants: Sequence[str]) -> str:
    """The first of `variants` that predicts every recorded step with error 0, in the caller's grad mode.

    Raises:
        PipelineError: if there is none. The message says for each variant at which step, and by how much, it differs.
    """

    def fault(variant: str) -> str | None:
        for i, x in enumerate(record.states):
            predict = partial(replay.predict, variant, x, own, i, record.prompts)
            if difference := _difference(predict, record.predictions[i]):
                return f"step {i}: {difference}"
        return None

    return _first(replay, variants, fault, "evaluate")


# A few numbers may be 0 by chance in 16 bits. A frame of a long video is more of the state than this share.
STILL = 0.005


def stands_still(record: Record) -> bool:
    """Whether a part of the first prediction is exactly 0, because the pipeline holds this part of the state.

    A model whose predictions are all 0 holds nothing, because output layers are 0 before any training.
    """
    still = (record.predictions[0] == 0).all(0)
    return not bool(still.all()) and still.float().mean().item() > STILL


def require_dependence(replay: StateCaller, own: Schedule, record: Record, variant: str) -> None:
    """Refuse a pipeline whose prediction does not depend on the state, or not on the noise level.

    A replay can be exact even without this dependence, so an exact replay is not enough. The check costs one
    evaluation. A model whose predictions are all 0 passes, because output layers are 0 before any training.

    Raises:
        PipelineError: if there is no dependence; the message says what is wrong.
    """
    if len(record.states) < 2 or not bool(record.predictions[0].any()):
        return
    with torch.no_grad():
        crossed = replay.predict(variant, record.states[0], own, 1, record.prompts)
    name = type(replay.caller.pipe).__name__
    if torch.equal(crossed, record.predictions[1]):
        raise PipelineError(
            f"{name} makes the same prediction for two different states: its denoiser does not see the state"
        )
    if torch.equal(crossed, record.predictions[0]):
        raise PipelineError(
            f"{name} makes the same prediction at the noise levels {float(own.sigmas[0]):g} and "
            f"{float(own.sigmas[1]):g}: the timestep that its denoiser sees does not come from the noise level"
        )


@torch.no_grad()
def require_noise(replay: StateCaller, prompts: Sequence[str], sigma: float) -> None:
    """Refuse a pipeline that does not begin at noise, because a given picture or video is a part of its first state.

    The check compares two first states from different seeds. What is not noise is equal in both, so their distance is
    too short. It is made only if a picture or another object is given, and evaluates nothing.

    Args:
        replay: the pipeline.
        prompts: one or two texts.
        sigma: the first noise level of the pipeline's own table.

    Raises:
        PipelineError: the first states are no noise.
    """
    given = isinstance(prompts[0], ConditionedPrompt) and bool(prompts[0].call)
    if not (given or replay.caller.conditioned):
        return
    held = replay.held.of(prompts)
    states: list[Tensor] = []

    def hook(index: int, prediction: Tensor, sample: Tensor) -> Tensor:
        states.append(sample[:1].float())
        raise LoopStopped

    for seed in (1, 2):
        replay.recorder.arm(hook)
        with skipping_denoiser(replay.caller.pipe, lambda: True, replay.forms):
            replay.caller.run(replay.recorder, prompts, replay.num_steps, seed, output_type="latent")
    process = replay.recorder.process
    first = float(replay.recorder.init_noise_sigma) if process is None else process.first_std(sigma)
    apart = (states[0] - states[1])[0] / first
    if held is not None and not held.noisy:
        apart = apart[~held.part]
    variance = float(apart.square().mean()) / 2.0
    if abs(variance - 1.0) > 0.01 + 6.0 * (2.0 / apart.numel()) ** 0.5:
        raise PipelineError(
            f"{type(replay.caller.pipe).__name__} does not begin at noise: its first states have {variance:.2g} times "
            "the variance of noise, and a rollout begins at noise. If a condition has a strength, set it to 1"
        )


@torch.no_grad()
def exact_decoder(replay: StateCaller, own: Schedule, record: Record) -> str:
    """The first of `DECODERS` that makes the pipeline's own images from the record's final state, with error 0.

    Raises:
        PipelineError: if there is none. The message says for each decoder by how much it differs.
    """

    def fault(decoder: str) -> str | None:
        def decoded() -> Tensor:
            return stacked(replay.decode(decoder, record.final, own, record.prompts), len(record.prompts))

        return _difference(decoded, record.images)

    # Where a known part is pasted in, only an injected state is decoded unchanged. Given pictures need this.
    names = sorted(DECODERS, key=lambda name: replay.recorder.pastes and not name.endswith("inject"))
    return _first(replay, names, fault, "decode")


def _first(replay: StateCaller, names: Sequence[str], fault_of: Callable[[str], str | None], what: str) -> str:
    faults = {}
    for name in names:
        fault = fault_of(name)
        if fault is None:
            return name
        faults[name] = fault
    listed = "\n".join(f"  {name}: {fault}" for name, fault in faults.items())
    raise PipelineError(
        f"{type(replay.caller.pipe).__name__} cannot {what} a state of its own loop a second time with the same "
        "result:\n"
        f"{listed}\n"
        "The usual causes are active dropout, an option whose effect carries over from step to step, and randomness "
        "that does not come from the `generator` argument."
    )


def _difference(compute: Callable[[], Tensor], expected: Tensor) -> str | None:
    try:
        found = compute().detach()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # A pipeline may raise any error if it does not support this way of calling. The error only excludes this way.
        return f"{type(error).__name__}: {error}"
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{found.dtype} {tuple(found.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    if torch.equal(found, expected):
        return None
    return f"max error {(found.float() - expected.float()).abs().max().item():.3g}"
