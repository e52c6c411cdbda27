"""The ways to make a pipeline evaluate, or decode, a state that the pipeline did not compute itself.

Variants, the lightest first; in brackets, the pipelines that need the variant:

- direct: one step, the state is passed as `latents=`.
- inject: one step, the state replaces the result of `prepare_latents` (pipelines that refuse, ignore or rescale
  `latents=`).
- relay: two steps at the same noise level. The first step does not evaluate the denoiser, and returns the state
  (pipelines whose steps see the state in a layout that differs from the result of `prepare_latents`, or see only a part
  of this result).
- slice: like inject, but with the pipeline's own number of steps and its own table, from which one step is kept
  (pipelines that depend on the number of steps).
- fast_forward: the whole loop. The denoiser returns zeros up to the step before, which returns the state (pipelines
  that depend on the step's index, or edit the state between steps).

Decoders, the lightest first:

- empty: no step at all, the state is passed as `latents=`; empty_inject: the state is injected.
- null: a last step that returns the state, passed as `latents=`; null_inject: the state is injected.
- relay: a step that does not evaluate the denoiser, and returns the state.
- fast_forward: the whole loop with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .capture import PipelineCall, injecting, skipping_denoiser
from .held import Held, HeldParts
from .pipeline_error import PipelineError
from .recorder import LoopStopped, Recorder, Schedule, StepHook

VARIANTS = ("direct", "inject", "relay", "slice", "fast_forward")
OWN_TABLE = ("slice", "fast_forward")
IN_STEP_LAYOUT = ("relay", "fast_forward")
DECODERS = ("empty", "empty_inject", "null", "null_inject", "relay", "fast_forward")


@dataclass
class StateCaller:
    """Evaluates single states through a pipeline.

    Attributes:
        caller: the pipeline and its arguments.
        recorder: the scheduler that replaces the pipeline's own.
        num_steps: the pipeline's own number of steps.
        forms: structures of the denoiser's outputs, filled by the calls; see `skipping_denoiser`.
        held: the parts of the states that the pipeline knows.
    """

    caller: PipelineCall
    recorder: Recorder
    num_steps: int
    forms: dict[Any, Any] = field(default_factory=dict)
    held: HeldParts = field(init=False)

    def __post_init__(self) -> None:
        self.held = HeldParts(self.caller, self.recorder, self.forms)

    def predict(self, variant: str, x: Tensor, schedule: Schedule, i: int, prompts: Sequence[str]) -> Tensor:
        """The pipeline's prediction (guidance included) at step i of the schedule.

        Args:
            variant: one of `VARIANTS`; variants in `OWN_TABLE` use the pipeline's own table instead of `schedule`.
            x: [N, *latent_shape] in the dtype of the loop's state.
            schedule: table of T steps.
            i: step, 0 <= i < T.
            prompts: N texts.

        Returns:
            [N, *latent_shape], in the dtype in which the pipeline predicts, with gradient if gradients are enabled.

        Raises:
            PipelineError: if the pipeline does not accept a state, or evaluates a state other than x.
        """
        first, held = {"fast_forward": i, "relay": 1}.get(variant, 0), self.held.of(prompts)
        found: list[Tensor] = []

        def hook(index: int, prediction: Tensor, sample: Tensor) -> Tensor:
            if index < first:
                return x if index == first - 1 else sample
            require_same(sample, x, held)
            found.append(prediction)
            raise LoopStopped

        with ExitStack() as stack:
            if variant == "fast_forward":
                self._fast_forward(stack, hook, x, first, prompts, "latent")
            elif variant == "relay":
                self._relay(stack, hook, x, schedule.step(i).twice(), prompts, "latent")
            elif variant == "slice":
                self.recorder.arm(hook, keep=i)
                self._enter(stack, x, prompts, "inject", self.num_steps, "latent")
            else:
                self.recorder.arm(hook, table=schedule.step(i))
                self._enter(stack, x, prompts, variant, 1, "latent")
        if not found:
            raise PipelineError(f"{type(self.caller.pipe).__name__} returned without a scheduler step")
        return found[0]

    def decode(self, decoder: str, x: Tensor, own: Schedule, prompts: Sequence[str]) -> Any:
        """The pipeline's `output_type="pt"` result for a final state.

        Args:
            decoder: one of `DECODERS`.
            x: [N, *latent_shape] in the dtype of the loop's state.
            own: the pipeline's own table.
            prompts: N texts.

        Raises:
            PipelineError: if the pipeline does not accept a state, or uses a state other than x.
        """

        held = self.held.of(prompts)

        def last(index: int, prediction: Tensor, sample: Tensor) -> Tensor:
            require_same(sample, x, held)
            return sample

        def through(index: int, prediction: Tensor, sample: Tensor) -> Tensor:
            return x if index == self.num_steps - 1 else sample

        with ExitStack() as stack:
            if decoder == "fast_forward":
                return self._fast_forward(stack, through, x, self.num_steps, prompts, "pt")
            step = own.step(len(own.timesteps) - 1)
            if decoder == "relay":
                return self._relay(stack, lambda index, prediction, sample: x, x, step, prompts, "pt")
            kind, _, place = decoder.partition("_")
            table = Schedule(step.sigmas, step.timesteps[:0]) if kind == "empty" else step
            self.recorder.arm(last, table=table)
            return self._enter(stack, x, prompts, place or "direct", 1, "pt", self.recorder.pastes)

    def _enter(
        self,
        stack: ExitStack,
        x: Tensor,
        prompts: Sequence[str],
        place: str,
        steps: int,
        output: str,
        everywhere: bool = False,
    ) -> Any:
        extra: dict[str, Any] = {"output_type": output}
        # A copy, because some classes write the first frame into the tensor that they are given.
        x = x.clone()
        if place == "inject":
            stack.enter_context(injecting(self.caller.pipe, x, everywhere))
        elif self.caller.accepts("latents"):
            extra["latents"] = x
        else:
            raise PipelineError(f"{type(self.caller.pipe).__name__} takes no latents=")
        return self.caller.run(self.recorder, prompts, steps, **extra)

    def _relay(
        self, stack: ExitStack, hook: StepHook, x: Tensor, table: Schedule, prompts: Sequence[str], output: str
    ) -> Any:
        """Run a table whose first step does not evaluate the denoiser, and ends in the state x."""
        self.recorder.arm(hook, table=table, ahead=lambda index, prediction, sample, place: x[:, place])
        stack.enter_context(skipping_denoiser(self.caller.pipe, lambda: self.recorder.taken == 0, self.forms))
        return self.caller.run(self.recorder, prompts, len(table.timesteps), output_type=output)

    def _fast_forward(
        self,
        stack: ExitStack,
        hook: StepHook,
        x: Tensor,
        first: int,
        prompts: Sequence[str],
        output: str,
    ) -> Any:
        """Run the whole loop; the state after `first` steps is x."""
        self.recorder.arm(hook)
        if first == 0:
            return self._enter(stack, x, prompts, "inject", self.num_steps, output)
        stack.enter_context(skipping_denoiser(self.caller.pipe, lambda: self.recorder.taken < first, self.forms))
        extra: dict[str, Any] = {"output_type": output}
        if self.caller.accepts("callback_on_step_end"):
            # Inpainting pipelines blend the state after the step, and only the callback is called after the blending.
            def callback(pipe: Any, index: int, timestep: Any, state: dict[str, Any]) -> dict[str, Any]:
                latents = state.get("latents")
                if self.recorder.taken == first and isinstance(latents, Tensor) and latents.shape == x.shape:
                    return {"latents": x.to(device=latents.device, dtype=latents.dtype)}
                return {}

            extra["callback_on_step_end"] = callback
        return self.caller.run(self.recorder, prompts, self.num_steps, **extra)


def require_same(sample: Tensor, x: Tensor, held: Held | None = None) -> None:
    """Refuse a pipeline that works on a state other than the given state, apart from a part that the pipeline knows."""
    if sample.shape == x.shape:
        given = x.to(device=sample.device, dtype=sample.dtype)
        if held is not None:
            # The pipeline may put its own value there, which rounding sets apart from ours.
            given = torch.where(held.part.to(sample.device), sample, given)
        if torch.equal(sample, given):
            return
    require_finite(x, "the states between the denoising steps")
    raise PipelineError(
        f"the pipeline evaluated a state of shape {tuple(sample.shape)} that is not the one supplied "
        f"({tuple(x.shape)}): the pipeline ignores, rescales or repacks the state"
    )


def require_finite(values: Tensor, what: str) -> None:
    """Refuse values that have overflowed.

    Args:
        values: [N, ...], of N samples.
        what: their name in the message, a plural.

    Raises:
        PipelineError: a value is infinite or no number. The message says what to change.
    """
    finite = values.isfinite().flatten(1).all(1)
    if not bool(finite.all()):
        raise PipelineError(
            f"{what} are not finite in {int((~finite).sum())} of {len(finite)} samples: numbers have overflowed. If "
            "no weight has moved yet, they do not fit into model.dtype: use bfloat16 or float32. Otherwise the weights "
            "have gone too far: lower optimizer.learning_rate, and begin again or go on from a checkpoint"
        )


def stacked(images: Any, rows: int) -> Tensor:
    """Images of a pipeline, a tensor or a list, as one tensor [N, 3, H, W]; videos as [N, F, 3, H, W].

    Images with an alpha channel are put on white.

    Args:
        images: as the pipeline returned them. A class that makes one video may leave the first dimension out.
        rows: N.

    Raises:
        PipelineError: these are not the images of N rows.
    """
    found: Tensor = images if isinstance(images, Tensor) else torch.stack(list(images))
    if len(found) != rows:
        if rows != 1 or found.ndim != 4:
            raise PipelineError(f"the pipeline returned {len(found)} images or videos for {rows} prompts")
        found = found[None]
    if found.ndim >= 4 and found.shape[-3] == 4:
        colour, opacity = found.split((3, 1), dim=-3)
        return 1.0 - opacity * (1.0 - colour)
    return found
