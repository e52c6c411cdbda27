"""The policy of a flow-matching pipeline: it rolls out a plan, and scores the trained edges again."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from ..samplers.kernels import Coefficients, guard_weight, jacobian, log_ratio, row_mean, step
from ..samplers.plans import Plan
from ..samplers.rollout import Guide, RolloutRunner
from ..samplers.transitions import (
    Rollout,
    Transitions,
    Velocity,
    brought,
    concatenated,
    given_rollout,
    replay,
    to_host,
)
from ..weights.trained import TrainedWeights
from .callers import OWN_TABLE, require_finite
from .capture import ConditionedPrompt, intercepting
from .denoiser import Denoiser
from .experience import Experience, ImagesBeside, part_bounds
from .placement import offload_of
from .prompt_cache import encode_ahead
from .scored_edges import ScoredEdges, to_data, to_guided, to_reference, to_teacher

NEGATIVE = ("negative_prompt", "negative_prompt_2", "negative_prompt_3")
"""Arguments of a pipeline's call that only guidance reads."""
Ratio = Literal["gaussian", "guard", "cps_released"]
Weighting = Literal["none", "guard", "noise", "equalise", "rectify"]
Told = Callable[[int, int], None]
"""Called with how much is done, and with the whole."""


def silent(done: int, total: int) -> None:
    """Tell nobody."""


class FlowPolicy:
    """A pipeline's denoiser as a policy.

    Args:
        denoiser: the pipeline.
        weights: the trained weights.
        ratio: form of the importance ratio, see `samplers.kernels.log_ratio`.
        weight: per-step weight of the surrogate: `guard` is 1/|∂μ/∂v| (GRPO-Guard's δ, exact for every
            kernel), `noise` is s divided by its mean over the trained steps (TempFlow-GRPO, Eq. 8), `equalise` is
            s/|J| divided by its median over the trained steps (SAGE-GRPO, 2603.21872: the gradient of a plain ratio is
            |J|/s), `rectify` is s/|J| divided by its mean over `pool` (Flash-GRPO, 2605.15980).
        batch: number of states in one call of the denoiser.
        decode_batch: number of images that are decoded at once.
        store: where the states of a rollout are kept between sampling and training: `device` or `host`.
        reference_call: arguments that the call of the reference has in place of the denoiser's, such as a guidance
            scale. They must not change the layout of states; see `require_calls`.
        teachers: the names of the frozen teachers, each with the arguments that its call has in place of the
            denoiser's. A teacher that `weights` does not know is the model that training began from. A whole teacher
            of `weights` has denoisers of its own, and the rest of the pipeline is the denoiser's.
        moving: the teachers that have trained weights: `reference`'s, or the `present` ones.
        pool: the steps of which any iteration may train some; by default all but the last.

    Attributes:
        reference: a context in which the weights are the reference's: the base model's, or an anchor.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        weights: TrainedWeights,
        *,
        ratio: Ratio = "guard",
        weight: Weighting = "guard",
        batch: int = 32,
        decode_batch: int = 32,
        store: Literal["device", "host"] = "device",
        reference_call: Mapping[str, Any] | None = None,
        pool: range | None = None,
        teachers: Mapping[str, Mapping[str, Any]] | None = None,
        moving: Mapping[str, Literal["reference", "present"]] | None = None,
    ) -> None:
        self.denoiser, self.weights = denoiser, weights
        self.ratio, self.weight, self.pool = ratio, weight, pool
        self.batch, self.decode_batch = batch, decode_batch
        self.store = to_host if store == "host" else None
        self.reference: Callable[[], AbstractContextManager[None]] = weights.reference
        self.reference_call, self.teachers = dict(reference_call or {}), dict(teachers or {})
        self._moving = dict(moving or {})
        self.device = next(iter(weights.modules.values())).device

    def velocity_of(self, prompts: Sequence[str]) -> Velocity:
        """The velocity as a function of states, step, and the row of each state's prompt, for the executor."""
        return lambda x, i, rows: self.denoiser.velocity(self.brought(x), i, [prompts[row] for row in rows])

    def _hybrid(self, prompts: Sequence[str], base_from: int | None) -> Velocity:
        """The velocity of `velocity_of`, but from step `base_from` on of the model before training."""
        trained = self.velocity_of(prompts)
        if base_from is None:
            return trained

        def evaluate(x: Tensor, i: int, rows: Sequence[int]) -> Tensor:
            # `reference` may be an average that moves with the training.
            with self.weights.reference() if i >= base_from else nullcontext():
                return trained(x, i, rows)

        return evaluate

    def brought(self, x: Tensor) -> Tensor:
        """The states of a rollout, moved to the device of the model."""
        return brought(x, self.device)

    def sample(
        self,
        prompts: Sequence[str],
        keys: Sequence[int],
        plan: Plan,
        updates: int = 1,
        guide: Guide | None = None,
        cuts: Sequence[int] | None = None,
        chunk: slice | None = None,
        noises: Sequence[int] | None = None,
        numbers: Sequence[Sequence[int]] | None = None,
        told: Told = silent,
        base_from: int | None = None,
    ) -> Rollout:
        """Roll out one tree for each prompt; `keys` address the noise, `updates` or `cuts` say where the parts begin.

        With a `chunk`, only the prompts of this range are rolled out. Their numbers and their noise are the same as in
        a rollout of all prompts. `noises` are the seeds of the initial noises, one for each root of the range.
        `numbers` are the numbers of the roots of all prompts, see `RolloutRunner.run`.
        After each call of the denoiser, `told` is called with the number of states that are evaluated, and with the
        number in a rollout of all prompts.
        From step `base_from` on, the model before training makes the steps.
        """
        self.bind(plan)
        self.denoiser.caller.keep_encodings(len(prompts))
        if not self.denoiser.checked:
            # The check finds the layout of the states. It runs with gradients, because it checks the path of training.
            with torch.enable_grad():
                self.denoiser.self_check(prompts[:2])
        probe, chosen = self.denoiser.probe, chunk or slice(0, len(keys))
        velocity = self._hybrid(prompts, base_from)
        runner = RolloutRunner(
            _counted(velocity, plan, chosen.start, len(prompts), told), plan, probe.latent_shape,
            dtype=probe.dtype, device=self.device, batch=self.batch,
            cuts=part_bounds(len(prompts), updates, cuts)[1:-1], guide=guide, initial_std=self.denoiser.initial_std,
            store=self.store,
        )  # fmt: skip
        encode_ahead(self.denoiser.pipe, prompts[chosen])
        return runner.run(keys[chosen], chosen.start, noises, None if numbers is None else numbers[chosen])

    def given(
        self, samples: Sequence[Callable[[], list[Image.Image]]], prompts: Sequence[str], plan: Plan, chunk: slice
    ) -> tuple[Rollout, Tensor]:
        """Given pictures or videos as a rollout without steps, and as the images that rewards see, on the CPU.

        Args:
            samples: functions that read the samples of the prompts of the chunk, as many of each as the plan has roots;
                see `Denoiser.encode`. A batch of them is in memory at a time.
            prompts: all prompts.
            plan: whose images are given.
            chunk: the range of prompts.

        Raises:
            ValueError, PipelineError: see `Denoiser.encode`.
        """
        self.bind(plan)
        owners = [p for p in range(*chunk.indices(len(prompts))) for _ in range(plan.roots)]
        states, images = zip(*self._encoded(samples, [prompts[p] for p in owners]))
        return given_rollout(owners, plan.roots, plan.num_steps, concatenated(states)), torch.cat(images)

    def beside(self, samples: Sequence[Callable[[], list[Image.Image]]], prompts: Sequence[str]) -> ImagesBeside:
        """Images of data that a penalty learns beside a rollout, one for each prompt of the rollout.

        Args:
            samples: functions that read the images; a batch of them is in memory at a time.
            prompts: the images' own prompts.

        Raises:
            ValueError, PipelineError: see `Denoiser.encode`.
        """
        states = [x for x, _ in self._encoded(samples, prompts)]
        encode_ahead(self.denoiser.pipe, prompts)
        return ImagesBeside(concatenated(states), tuple(prompts))

    def _encoded(
        self, samples: Sequence[Callable[[], list[Image.Image]]], prompts: Sequence[str]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """States of given samples, where the states of a rollout wait, and the samples as rewards see them."""
        size = self.decode_batch
        with offload_of(self.denoiser.pipe).needed("vae", when_called=True):
            for k in range(0, len(samples), size):
                read = [read() for read in samples[k : k + size]]
                x, shown = self.denoiser.encode(read, prompts[k : k + size], self.device)
                yield x if self.store is None else self.store(x), shown

    def fidelity(self, samples: Sequence[Sequence[Image.Image]], prompts: Sequence[str]) -> float:
        """How well given pictures or videos come back from their states: the peak signal-to-noise ratio, in decibels.

        A VAE loses something of every picture. A value of less than about 15 says that something is wrong.
        """
        errors, size = [], self.decode_batch
        with offload_of(self.denoiser.pipe).needed("vae", when_called=True):
            for k in range(0, len(samples), size):
                texts = prompts[k : k + size]
                states, images = self.denoiser.encode(samples[k : k + size], texts, self.device)
                errors += (self.denoiser.decode(states, texts).cpu() - images).square().flatten(1).mean(1).tolist()
        return -10.0 * math.log10(max(statistics.fmean(errors), 1e-12))

    @torch.no_grad()
    def guides(self, prompt: str) -> bool:
        """Whether a call evaluates the denoiser on several rows for one state, as classifier-free guidance does.

        This costs one call. Guidance that the denoiser has learned, as in FLUX.1-dev, takes one row. Pipelines whose
        states need several steps to be evaluated count as unguided, because their rows say nothing.
        """
        if self.denoiser.variant not in ("direct", "inject"):
            return False
        rows = 0

        def counted(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal rows
            state = next(iter((*args, *kwargs.values())))
            rows += len(state) if isinstance(state, (Tensor, list)) else 1
            return forward(*args, **kwargs)

        state = torch.zeros(1, *self.denoiser.probe.latent_shape, device=self.device)
        with intercepting(self.denoiser.pipe, counted):
            self.denoiser.velocity(state, 0, [prompt])
        return rows > 1

    def unread(self, prompt: str) -> list[str]:
        """The negative prompts of the call that the pipeline leaves unread, because it is called without guidance.

        This costs one call, if there is a negative prompt with words. The libraries' warning about it is not shown.
        """
        call = self.denoiser.caller.call
        words = [name for name, text in call.items() if name in NEGATIVE and isinstance(text, str) and text.strip()]
        known = self.denoiser.variant in ("direct", "inject")
        return words if words and known and not self.guides(prompt) else []

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """A context in which this is the reference of penalties and losses, with its weights and its call."""
        with self.reference(), self.denoiser.caller.called_with(self.reference_call):
            yield

    @contextmanager
    def as_teacher(self, name: str) -> Iterator[None]:
        """A context in which this is the teacher of this name, with its weights and its call."""
        with self._weights_of(name), self.denoiser.caller.called_with(self.teachers[name]):
            yield

    def _weights_of(self, name: str) -> AbstractContextManager[None]:
        """A context with the weights of a teacher."""
        moving = self._moving.get(name)
        if moving is None:
            return self.weights.teacher(name)
        return self.reference() if moving == "reference" else nullcontext()

    def require_calls(
        self, prompts: Sequence[str], contexts: Mapping[str, Sequence[tuple[str, str]]] | None = None
    ) -> None:
        """Refuse a call of the reference or of a teacher that cannot be replayed, or has states of another layout.

        Whole teachers are called with any call.

        Args:
            prompts: one or two texts.
            contexts: of the teachers, prompts with what the teacher reads in their place; `prompts` if left out.

        Raises:
            ValueError: an argument is unknown, or changes the shape of the states or the noise levels; or a whole
                teacher cannot be called.
            PipelineError: the pipeline's own loop is not reproduced with these arguments.
        """
        if self.reference_call:
            self._require_call("model.reference_call", self.reference_call, prompts)
        for k, (name, changes) in enumerate(self.teachers.items()):
            key, pairs = f"model.teachers.{k}", (contexts or {}).get(name, [(one, one) for one in prompts])
            read, pictured = [one for _, one in pairs[:2]], any(_arguments(a) != _arguments(b) for a, b in pairs[:2])
            if name not in self.weights.whole_teachers:
                if changes or pictured:
                    self._require_call(f"{key}.{'image' if pictured else 'call'}", changes, read, pictured)
                continue
            try:
                with self.weights.teacher(name):
                    self._require_call(key, changes, read, pictured)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                # A setting that no list has, such as the width of one more input, lets some layer fail.
                raise ValueError(
                    f"{key} cannot be called as the model is ({error}); name a pipeline with the latents and the texts "
                    "of model.path"
                ) from error

    def _require_call(
        self, key: str, changes: Mapping[str, Any], prompts: Sequence[str], pictured: bool = False
    ) -> None:
        own = self.denoiser
        call = {**own.caller.call, **changes}
        other = Denoiser(own.pipe, num_steps=own.num_steps, call=call, variant=own.variant, example=prompts[0])
        other.self_check(prompts)
        if other.probe != own.probe:
            raise ValueError(
                f"{key} changes the states: they have shape {other.probe.latent_shape} and noise levels "
                f"from {other.probe.sigmas[0]:g}, and with model.call alone shape {own.probe.latent_shape} and noise "
                f"levels from {own.probe.sigmas[0]:g}; change only what leaves them as they are, such as guidance_scale"
            )
        if pictured and (other.replay.held.found or other.replay.recorder.pastes):
            raise ValueError(
                f"{key}: {type(own.pipe).__name__} makes the pictures a part of its samples, so a teacher that sees "
                "others would be held to other samples; leave the pictures out, or use a pipeline whose denoiser reads "
                "them beside the states"
            )

    def bind(self, plan: Plan, others: Mapping[int, float] | None = None) -> None:
        """Bind the denoiser to a plan's noise levels.

        Args:
            plan: of the rollout.
            others: noise levels of some steps in place of the plan's. Each lies between the plan's levels of its step
                and of the next step.

        Raises:
            ValueError: the pipeline can only be evaluated at the levels of its own table.
        """
        sigmas = plan.sigmas
        if others:
            if self.denoiser.variant in OWN_TABLE:
                raise ValueError(
                    f"{type(self.denoiser.pipe).__name__} can only be evaluated at its own noise levels; draw from "
                    "these, with objective forward and draw: ranges"
                )
            sigmas = tuple(others.get(step, sigma) for step, sigma in enumerate(sigmas))
        if sigmas != self.denoiser.sigmas:
            self.denoiser.bind(sigmas)

    def decode(self, rollout: Rollout, prompts: Sequence[str], told: Told = silent) -> Tensor:
        """Images of the leaves, on the CPU. After each batch, `told` is called with the number of images so far.

        Raises:
            PipelineError: an image has values that are not finite; a reward would see a black one.
        """
        texts = [prompts[p] for p in rollout.leaf_prompt.tolist()]
        size = self.decode_batch
        ranges = [slice(k, k + size) for k in range(0, len(texts), size)]
        with offload_of(self.denoiser.pipe).needed("vae", when_called=True):
            images = torch.empty(0)
            for k in ranges:
                decoded = self.denoiser.decode(self.brought(rollout.x[k]), texts[k]).cpu()
                require_finite(decoded, "the decoded images")
                if k.start == 0:
                    images = decoded.new_empty(len(texts), *decoded.shape[1:])
                images[k] = decoded
                told(min(k.stop, len(texts)), len(texts))
        return images

    def score(self, experience: Experience, transitions: Transitions, batch: slice) -> ScoredEdges:
        """Evaluate one recorded batch of states again, and compare the result with the sampling policy.

        The mean shifts by Δμ = J·Δv, and J = ∂μ/∂v is one number per step. So the ratio is computed from the shift of
        the velocity. The ratio is then exactly 1 while the prediction is unchanged, and no precision is lost in a
        difference of log-probs.
        """
        self.bind(experience.plan)
        c = transitions.coefficients
        velocity = self.velocity_of(experience.prompts)
        replayed = replay(velocity, transitions, batch)
        rows = replayed.rows()
        old = self.brought(replayed.old_velocity()).to(replayed.velocity.dtype)
        scale = jacobian(c.sigma, c.sigma_next, c.kappa)
        shift = (scale * (replayed.velocity - old))[rows]
        if c.std > 0.0:
            x_next = self.brought(transitions.x_next[replayed.edges])
            noise = step(old[rows], self.brought(transitions.x[batch])[rows], c, x_next=x_next).noise
            std, ratio = c.std, log_ratio(shift, noise, c.std, form=self.ratio)
        else:
            std, ratio = 1.0, row_mean(0.0 * shift.float())
        ones = torch.ones_like(ratio.detach())[:, None]
        return ScoredEdges(
            log_ratio=ratio[:, None],
            node=transitions.node[replayed.edges],
            steps=torch.full_like(ones, transitions.step, dtype=torch.long),
            weight=ones * self.step_weight(experience.plan, transitions.step, c),
            divergence=row_mean(shift.detach().float().square())[:, None] / (2.0 * std**2),
            shift=shift,
            std=std,
            to_reference=partial(to_reference, self, transitions, replayed, velocity),
            to_guided=partial(to_guided, self, transitions, replayed, shift),
            to_teacher=partial(to_teacher, self, experience, transitions, replayed),
            scale=scale,
            to_data=partial(to_data, self, experience, transitions, replayed),
        )

    def step_weight(self, plan: Plan, i: int, coefficients: Coefficients) -> float:
        """Weight of the surrogate at step `i`."""
        if self.weight == "guard":
            return guard_weight(coefficients)
        if self.weight == "rectify":
            kernel, pool = plan.trained_kernel(i), self.pool or range(plan.num_steps - 1)
            drawn = [kernel.coefficients(plan.sigmas, t) for t in pool if t < plan.num_steps - 1]
            scales = [c.std * guard_weight(c) for c in drawn]
            return coefficients.std * guard_weight(coefficients) * len(scales) / sum(scales)
        trained = [plan.trained_coefficients(t) for t in plan.trained_steps]
        if self.weight == "noise":
            return coefficients.std * len(trained) / sum(c.std for c in trained)
        if self.weight == "equalise":
            scales = [c.std * guard_weight(c) for c in trained]
            return coefficients.std * guard_weight(coefficients) / statistics.median(scales)
        return 1.0


def _arguments(prompt: str) -> Any:
    """What distinguishes the arguments of a prompt's own call; None if it has none."""
    return prompt.mark if isinstance(prompt, ConditionedPrompt) and prompt.call else None


def _counted(velocity: Velocity, plan: Plan, first: int, prompts: int, told: Told) -> Velocity:
    """A velocity that tells how many states of a rollout of `prompts` it has evaluated, from prompt `first` on."""
    each = plan.counts().evaluations
    done = first * each

    def evaluate(x: Tensor, i: int, rows: Sequence[int]) -> Tensor:
        nonlocal done
        found = velocity(x, i, rows)
        done += len(x)
        told(done, prompts * each)
        return found

    return evaluate
