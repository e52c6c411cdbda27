"""A scheduler that passes every step to a hook instead of integrating."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.configuration_utils import FrozenDict
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteSchedulerOutput
from torch import Tensor

from .noise_prediction import process_of

StepHook = Callable[[int, Tensor, Tensor], Tensor]
"""(step index, prediction, state) -> next state; all tensors have the shape of the loop's state. May raise
`LoopStopped`."""

Ahead = Callable[[int, Tensor, Tensor, slice], Tensor]
"""(step index, prediction [N, d], state [N, d], place) -> next state [N, d] of one of several states; the place says
which numbers of the joined state these are."""


Paste = Callable[[Tensor], Tensor]
"""(clean known part) -> what an inpainting pipeline pastes in after a step, same shape."""


class LoopStopped(Exception):
    """Ends a pipeline call early, when the call has shown what it was made for."""


@dataclass(frozen=True)
class Schedule:
    """A table as the pipeline itself sees it, before any inversion to our sigma.

    Attributes:
        sigmas: [T+1] float32.
        timesteps: [T], in the dtype of the shipped scheduler.
    """

    sigmas: Tensor
    timesteps: Tensor

    def step(self, i: int) -> Schedule:
        """The one-step table of step i."""
        return Schedule(self.sigmas[i : i + 2], self.timesteps[i : i + 1])

    def twice(self) -> Schedule:
        """The table with its first step taken twice."""
        return Schedule(torch.cat([self.sigmas[:1], self.sigmas]), torch.cat([self.timesteps[:1], self.timesteps]))


class Recorder(FlowMatchEulerDiscreteScheduler):
    """Replaces a pipeline's scheduler; each `step` calls a hook instead of integrating.

    A private copy of the shipped scheduler computes the table, unless a table is given to `arm`. The config is the
    shipped scheduler's config, because pipelines read it. Missing entries come from the config of the flow-matching
    Euler scheduler.

    Attributes:
        process: the noise process on which a model that predicts noise was trained; None for flow matching.
        pastes: whether a pipeline was seen to paste a known part in after a step.

    Args:
        shipped: the scheduler that belongs to the pipeline. It is not modified.
        states: how many states the pipeline steps at each noise level, one after another. If there are several, such as
            a video and its sound, they are one state [N, D] for the hook, which is called at the last of them.

    Raises:
        ValueError: if `shipped` says that the model predicts neither a flow-matching velocity nor something that can be
            converted to one.
    """

    def __init__(self, shipped: Any, states: int = 1) -> None:
        process = process_of(shipped)
        names = set(inspect.signature(FlowMatchEulerDiscreteScheduler.__init__).parameters) - {"self"}
        config = {name: value for name, value in shipped.config.items() if name in names}
        config.setdefault("shift", shipped.config.get("flow_shift", 1.0))
        super().__init__(**config)
        self._internal_dict = FrozenDict({**self.config, **shipped.config})
        self.process = process
        self.init_noise_sigma = getattr(shipped, "init_noise_sigma", 1.0) if process is None else 1.0
        self.inverted = bool(config.get("invert_sigmas", False))
        self.own: Schedule | None = None
        self._shipped = shipped
        self._table: Schedule | None = None
        self._keep: int | None = None
        self._hook: StepHook | None = None
        self._taken = 0
        self._step_index: int | None = None
        self._states = states
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        self._ahead: Ahead | None = None
        self._paste: Paste | None = None
        self.pastes = False

    def arm(
        self,
        hook: StepHook | None,
        *,
        table: Schedule | None = None,
        keep: int | None = None,
        ahead: Ahead | None = None,
        paste: Paste | None = None,
    ) -> None:
        """Prepare for one pipeline call.

        Args:
            hook: called by each `step`.
            table: use this table; None means the pipeline's own table.
            keep: index of a step; the pipeline loops over this step of its own table only.
            ahead: what the hook will return for one of several states. Some pipelines read the next state of the video
                before the sound has stepped.
            paste: what an inpainting pipeline pastes in after a step, in place of the known part with noise.
        """
        self._hook, self._table, self._keep, self._taken = hook, table, keep, 0
        self._waiting, self._ahead, self._paste = [], ahead, paste

    @property
    def taken(self) -> int:
        """Number of steps taken since the call began; the steps of several states at one noise level are one."""
        return self._taken

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorder:
        # A copy that a pipeline makes of its scheduler must still call our hook.
        return self

    def scale_model_input(self, sample: Tensor, timestep: Any = None) -> Tensor:
        """The state itself: flow matching and DDIM do not scale the model's input."""
        return sample

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        sigmas: Any = None,
        mu: float | None = None,
        timesteps: Any = None,
        **kwargs: Any,
    ) -> None:
        """Install the armed table, or let the shipped scheduler make its own table from these arguments."""
        table = self._table
        if table is None:
            request = {
                "num_inference_steps": num_inference_steps,
                "sigmas": sigmas,
                "mu": mu,
                "timesteps": timesteps,
                **kwargs,
            }
            table = self._own_table({name: value for name, value in request.items() if value is not None})
            self.own = table
        if self._keep is not None:
            table = table.step(self._keep)
        levels = table.sigmas if self.process is None else self.process.levels_of(table.sigmas)
        self.sigmas = levels.to(device)
        self.timesteps = table.timesteps.to(device)
        self.num_inference_steps = len(self.timesteps)
        self._step_index = self._begin_index = None
        self._taken = 0

    def scale_noise(self, sample: Tensor, timestep: Any, noise: Tensor | None = None) -> Tensor:
        """The clean part of a picture with noise, as the Euler scheduler makes it, or what `arm` was given."""
        pasted = self._pasted(sample)
        return super().scale_noise(sample, timestep, noise) if pasted is None else pasted

    def add_noise(self, original_samples: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """As `scale_noise`; the solvers of the shipped scheduler may have this name for it."""
        if self.process is None:
            return self.scale_noise(original_samples, timesteps, noise)
        pasted = self._pasted(original_samples)
        return self._shipped.add_noise(original_samples, noise, timesteps) if pasted is None else pasted

    def _pasted(self, clean: Tensor) -> Tensor | None:
        self.pastes = self.pastes or self._taken > 0
        return None if self._paste is None or self._taken == 0 else self._paste(clean)

    def _own_table(self, request: dict[str, Any]) -> Schedule:
        if self.process is not None:
            return Schedule(*self.process.table(request))
        if request.keys() <= inspect.signature(self._shipped.set_timesteps).parameters.keys():
            scheduler = copy.deepcopy(self._shipped)
            scheduler.set_timesteps(**request)
            table = Schedule(scheduler.sigmas.detach().cpu().float(), scheduler.timesteps.detach().cpu())
            if is_flow_table(table.sigmas, inverted=self.inverted):
                return table
        # The shipped scheduler has no flow-matching table, or cannot take this request. So the table is the Euler
        # scheduler's, with the same shift.
        known = inspect.signature(FlowMatchEulerDiscreteScheduler.set_timesteps).parameters
        super().set_timesteps(**{name: value for name, value in request.items() if name in known})
        return Schedule(self.sigmas.cpu(), self.timesteps.cpu())

    def step(
        self,
        model_output: Tensor,
        timestep: Any,
        sample: Tensor,
        *args: Any,
        return_dict: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Pass (index, prediction, sample) to the hook; its result is the next state.

        The next state has the dtype of `sample`, or of the prediction if the prediction is wider.
        """
        if self._hook is None:
            raise RuntimeError("Recorder.step was called before Recorder.arm")
        if kwargs.get("per_token_timesteps") is not None:
            # In this mode the Euler scheduler integrates with dt = sigma - sigma', so pipelines pass the negative
            # velocity.
            model_output = -model_output
        # Half of the pipelines crash if a 16-bit state is returned as float32. Others predict in float32, and require a
        # state in float32.
        kept = torch.promote_types(sample.dtype, model_output.dtype)
        if self._states == 1:
            following = self._next(model_output, sample).to(kept)
        else:
            following = self._next_alone(model_output, sample, kept)
            self._waiting.append((model_output, sample, following))
            if len(self._waiting) == self._states:
                self._step_together()
        return FlowMatchEulerDiscreteSchedulerOutput(prev_sample=following) if return_dict else (following,)

    def _next(self, prediction: Tensor, sample: Tensor) -> Tensor:
        index = self._taken
        self._taken += 1
        self._step_index = self._taken
        assert self._hook is not None
        return self._hook(index, prediction, sample)

    def _next_alone(self, prediction: Tensor, sample: Tensor, dtype: torch.dtype) -> Tensor:
        """The next one of several states, or room for it."""
        # It has the strides of the state before, because rounding in 16 bits depends on them.
        following = torch.zeros_like(sample, dtype=dtype)
        if self._ahead is not None:
            start = sum(one[0].numel() for _, one, _ in self._waiting)
            place = slice(start, start + sample[0].numel())
            found = self._ahead(self._taken, prediction.flatten(1), sample.flatten(1), place)
            following.copy_(found.view(sample.shape))
        return following

    def _step_together(self) -> None:
        """Call the hook for all states. Fill in the next states, which the pipeline may have read only if `ahead`."""
        waiting, self._waiting = self._waiting, []
        predictions, samples, following = zip(*waiting)
        found = self._next(_joined(predictions), _joined(samples))
        sizes = [part[0].numel() for part in following]
        for own, part in zip(following, found.split(sizes, dim=1)):
            own.copy_(part.view_as(own))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten(1) for part in parts], dim=1)


def is_flow_table(sigmas: Tensor, *, inverted: bool = False) -> bool:
    """Whether sigmas [T+1] fall strictly from at most 1 to exactly 0, or rise strictly to exactly 1 if inverted."""
    sigmas = 1.0 - sigmas if inverted else sigmas
    falling = bool((sigmas[1:] < sigmas[:-1]).all())
    return len(sigmas) > 1 and falling and float(sigmas[0]) <= 1.0 + 1e-6 and float(sigmas[-1]) == 0.0
