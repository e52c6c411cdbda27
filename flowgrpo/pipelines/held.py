"""The part of a state that a pipeline knows: what an inpainting mask keeps, or frames that are given.

There are two ways in which pipelines hold a known part. An inpainting pipeline pastes it in after each step, with noise
of the level that the next step has. A video pipeline keeps given frames clean at all levels, and its denoiser is told
so.

Here the state stays one state of flow matching. In the known part the clean value x0 is given, so the velocity is not
predicted there: it is (x - x0) / sigma, which leads from every state to x0. After a step, the known part has noise of
the next level, as in the paper of RePaint (arXiv:2201.09865, Eq. 8a): exactly with the kernels `cps` and `ddim`, and
with the others as nearly as they keep the level of any number. After the last step it is x0. No policy has an influence
on it. So its ratio is 1, and its gradient and its divergence are 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .capture import ConditionedPrompt, PipelineCall, skipping_denoiser
from .pipeline_error import PipelineError
from .recorder import LoopStopped, Paste, Recorder, Schedule

_MARK = 1000.0
"""No state has this value."""


def changed(pipe: object) -> PipelineError:
    """The error for a pipeline that changes its state between two steps in a way that is not known."""
    return PipelineError(
        f"{type(pipe).__name__} changes the state between two steps, and not by a known part that has noise of the "
        "next level or no noise at all. A rollout does not make this change, so its images would differ from the "
        "pipeline's images. Use a class whose conditioning goes into the denoiser"
    )


@dataclass(frozen=True)
class Held:
    """What a pipeline knows of the states of some prompts.

    Attributes:
        part: [*latent_shape] bool, True where the value is known.
        value: [*latent_shape], the clean value; elsewhere any number.
        noisy: whether the pipeline's states have noise in this part. If not, they have the clean value.
    """

    part: Tensor
    value: Tensor
    noisy: bool

    def at(self, place: slice) -> Held:
        """What is known of some numbers, if a state has one dimension."""
        return Held(self.part[place], self.value[place], self.noisy)

    def entered(self, x: Tensor) -> Tensor:
        """The states [N, *latent_shape] as the pipeline must see them."""
        return x if self.noisy else self.finished(x)

    def finished(self, x: Tensor) -> Tensor:
        """The states [N, *latent_shape] with the clean value in the known part."""
        return torch.where(self.part.to(x.device), self.value.to(x), x)

    def towards(self, velocity: Tensor, x: Tensor, sigma: float) -> Tensor:
        """The velocity [N, *latent_shape] at states x of the same shape, which in the known part leads to the value."""
        known = (x.to(velocity) - self.value.to(velocity)) / sigma
        return torch.where(self.part.to(velocity.device), known, velocity)


class HeldParts:
    """Finds the known part for the arguments of a call, by one or two calls that do not evaluate the denoiser.

    Attributes:
        found: whether the pipeline holds a part. Until this is set, no call is made.

    Args:
        caller: the pipeline and its arguments.
        recorder: the scheduler that replaces the pipeline's own.
        forms: see `skipping_denoiser`.
    """

    def __init__(self, caller: PipelineCall, recorder: Recorder, forms: dict[object, object]) -> None:
        self.found = False
        self._caller, self._recorder, self._forms = caller, recorder, forms
        # A key of its own, because other denoisers of the same pipeline have other sizes.
        self._owner = object()

    def of(self, prompts: Sequence[str]) -> Held | None:
        """The known part for prompts whose own arguments are equal; None if the pipeline holds nothing.

        Raises:
            PipelineError: everything is known, or the part cannot be found.
        """
        if not self.found:
            return None
        first = prompts[0]
        if not isinstance(first, ConditionedPrompt) or not first.call:
            return self._caller.recalled((self._owner, None), lambda: self._look(first))
        if first.mark is None:
            return self._look(first)
        return self._caller.recalled((self._owner, first.mark), lambda: self._look(first))

    @torch.no_grad()
    def _look(self, prompt: str) -> Held:
        first, second, still = self._two_steps(prompt, lambda clean: torch.full_like(clean, _MARK))
        if self._recorder.pastes:
            part = second == _MARK
            _, value, _ = self._two_steps(prompt, lambda clean: clean)
        else:
            part, value = (second != first + 1.0) | still, first
            if not torch.equal(second[part & ~still], first[part & ~still]):
                raise changed(self._caller.pipe)
        if bool(part.all()):
            raise PipelineError(
                f"{type(self._caller.pipe).__name__} holds the whole state of the prompt {str(prompt)!r:.80}, so there "
                "is nothing to generate. In a mask, white is what is painted, and it must be larger than one number of "
                "the latent"
            )
        return Held(part[0], value[0], noisy=self._recorder.pastes)

    def _two_steps(self, prompt: str, paste: Paste) -> tuple[Tensor, Tensor, Tensor]:
        """Take two steps at one noise level, with ones in place of the denoiser's output.

        Returns:
            The first state; the second state, for which the step returned the first state plus 1; and where the first
            prediction is 0, because the pipeline does not move these numbers.
        """
        samples: list[Tensor] = []
        still: list[Tensor] = []

        def hook(index: int, prediction: Tensor, sample: Tensor) -> Tensor:
            samples.append(sample.clone())
            if index == 1:
                raise LoopStopped
            still.append(prediction == 0)
            return sample + 1.0

        def ahead(index: int, prediction: Tensor, sample: Tensor, place: slice) -> Tensor:
            return sample + 1.0

        own = self._recorder.own
        assert own is not None
        table = Schedule(own.sigmas[:2], own.timesteps[:1]).twice()
        self._recorder.arm(hook, table=table, ahead=ahead, paste=paste)
        with skipping_denoiser(self._caller.pipe, lambda: True, self._forms, 1.0):
            self._caller.run(self._recorder, [prompt], 2, output_type="latent")
        if len(samples) != 2:
            name = type(self._caller.pipe).__name__
            raise PipelineError(f"{name} took {len(samples)} of two steps, so what it holds of a state cannot be found")
        return samples[0], samples[1], still[0]
