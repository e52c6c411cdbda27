"""Use any unmodified diffusers pipeline as a flow-matching velocity, a decoder and a source of noise.

The pipeline's own `__call__` evaluates a state. So guidance, packing, resolution-dependent shift and the choice between
experts are always the pipeline's own. A scheduler of ours ends the call at the prediction (`capture`). There are
several ways to make this call (`callers`). The lightest way that reproduces the pipeline's own loop bit for bit is
used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..weights.borrowing import replaced
from ..weights.pipeline_classes import adapter_of
from ..weights.sampling_rates import sampling_rate_of
from .arguments import pictures_left_out, refuse_other_size
from .callers import IN_STEP_LAYOUT, OWN_TABLE, VARIANTS, StateCaller, stacked
from .capture import ConditionedPrompt, PipelineCall, company, kin, stopping_at_denoiser
from .latents import LatentMap, encode, find_map, fitted
from .pipeline_error import PipelineError
from .recorder import LoopStopped, Recorder, Schedule, is_flow_table
from .selfcheck import exact_decoder, exact_variant, require_dependence, require_noise, rollout, stands_still


@dataclass(frozen=True)
class Probe:
    """State layout and noise levels of a pipeline, for given height, width, frames and steps.

    Attributes:
        latent_shape: shape of the state in the denoising loop, without the batch dimension.
        dtype: dtype of this state, chosen by the pipeline.
        sigmas: T+1 noise levels of flow matching, shift included, strictly falling from at most 1 to 0.
        timesteps: T values, as the pipeline passes them to its denoiser.
    """

    latent_shape: tuple[int, ...]
    dtype: torch.dtype
    sigmas: tuple[float, ...]
    timesteps: tuple[float, ...]


class Denoiser:
    """Velocity, decoding and initial noise of a pipeline.

    Sigma is the noise level of x = (1 - sigma) * data + sigma * noise. The velocity is dx/dsigma = noise - data. Some
    pipelines count sigma in the other direction (`invert_sigmas`); here their sigma becomes 1 - sigma. The tables of
    models that predict noise are converted to these coordinates (`noise_prediction`).

    Some pipelines pad embeddings to the longest prompt of a call. Then the neighbours of a state change its prediction
    by rounding errors. If ratios must be exact, score a state beside the neighbours that it had in the rollout.

    Args:
        pipe: the pipeline. Its scheduler is read once, here; components may change later.
        num_steps: T, number of denoising steps of the pipeline's own table.
        call: keyword arguments for the pipeline (height, width, num_frames, guidance_scale,
            negative_prompt, ...).
        variant: how states are evaluated, one of `callers.VARIANTS`; with "auto", `self_check` chooses, at the latest
            at the first evaluation.
        sigmas: a table to use instead of the pipeline's own, see `bind`.
        example: the prompt of the first call, which reads the pipeline's table and layout. If the pipeline needs a
            picture that `call` does not have, this is a `ConditionedPrompt`.

    Raises:
        ValueError: if an argument does not fit the pipeline, or the pipeline is neither a flow-matching pipeline nor
            one that predicts noise.
    """

    def __init__(
        self,
        pipe: Any,
        *,
        num_steps: int,
        call: Mapping[str, Any],
        variant: str = "auto",
        sigmas: Sequence[float] | None = None,
        example: str | None = None,
    ) -> None:
        if num_steps < 1:
            raise ValueError(f"num_steps is {num_steps}; use 1 or more")
        if variant not in ("auto", *VARIANTS):
            raise ValueError(f"variant is {variant!r}; use one of {', '.join(('auto', *VARIANTS))}")
        self.pipe = pipe
        self.num_steps = num_steps
        self.variant = variant
        self._requested = variant
        self._decoder: str | None = None
        self._latents: LatentMap | None = None
        self._example = example
        self._recorder = Recorder(pipe.scheduler, adapter_of(pipe).states)
        self._replay = StateCaller(PipelineCall(pipe, call), self._recorder, num_steps)
        self._own, self.probe = self._look()
        self._table = self._own
        self.sigmas = self.probe.sigmas
        if sigmas is not None:
            self.bind(sigmas)

    def bind(self, sigmas: Sequence[float]) -> None:
        """Evaluate at the noise levels of another table from now on.

        Args:
            sigmas: T'+1 values, strictly falling from at most 1 to exactly 0; no shift is applied to them.

        Raises:
            ValueError: if the values do not form a valid table, or this pipeline can only be replayed on its own table.
        """
        table = tuple(float(sigma) for sigma in sigmas)
        if not is_flow_table(torch.tensor(table)):
            raise ValueError(
                f"sigmas must be at least 2 values falling strictly from at most 1 to 0, got {list(table)}"
            )
        if table == self.probe.sigmas:
            self._table = self._own
        else:
            self._require_own_table(self.variant, table)
            raw = torch.tensor(table, dtype=torch.float32)
            raw = 1.0 - raw if self._recorder.inverted else raw
            process = self._recorder.process
            find = self._timesteps_at if process is None else process.timesteps_at
            self._table = Schedule(raw, find(raw[:-1]))
        self.sigmas = table

    def velocity(self, x: Tensor, i: int, prompts: Sequence[str]) -> Tensor:
        """The velocity at sigma_i, by one pipeline call.

        Args:
            x: [N, *latent_shape], any float dtype; rounded first to the dtype of the loop's state.
            i: index into the bound table, 0 <= i < T.
            prompts: N texts.

        Returns:
            [N, *latent_shape] float32, with gradient if gradients are enabled. It is exactly what the pipeline
            predicted, or the velocity that a prediction of noise implies. In a part that the pipeline knows, it leads
            to the known value; see `held`.

        Raises:
            ValueError: if x, i or prompts do not fit.
            PipelineError: if the pipeline evaluates a state other than x, or `self_check` finds no variant.
        """
        self._require(x, i, prompts)
        process, sigma = self._recorder.process, self.sigmas[i]

        def velocity(x: Tensor, prompts: Sequence[str]) -> Tensor:
            held = self._replay.held.of(prompts)
            seen = x if held is None else held.entered(x)
            z = seen if process is None else process.entered(seen, sigma)
            found = self._replay.predict(self.variant, z, self._table, i, prompts)
            if process is not None:
                found = process.velocity(found, seen, sigma)
            else:
                found = -found.float() if self._recorder.inverted else found.float()
            return found if held is None else held.towards(found, x, sigma)

        return self._by_kin(velocity, x.to(self.probe.dtype), prompts)

    def prediction(self, z: Tensor, i: int, prompts: Sequence[str]) -> Tensor:
        """What the pipeline passes to its scheduler at step i for a state of its own loop.

        Args:
            z: [N, *latent_shape], any float dtype. It is the x of `velocity`, except for models that predict noise.
            i: index into the bound table, 0 <= i < T.
            prompts: N texts.

        Returns:
            [N, *latent_shape], in the dtype in which the pipeline predicts.

        Raises:
            ValueError, PipelineError: as in `velocity`.
        """
        self._require(z, i, prompts)

        def predict(z: Tensor, prompts: Sequence[str]) -> Tensor:
            return self._replay.predict(self.variant, z, self._table, i, prompts)

        return self._by_kin(predict, z.to(self.probe.dtype), prompts)

    @property
    def replay(self) -> StateCaller:
        """The object that evaluates single states through the pipeline."""
        return self._replay

    @property
    def caller(self) -> PipelineCall:
        """The pipeline, with the arguments of its calls."""
        return self._replay.caller

    def decode(self, x: Tensor, prompts: Sequence[str]) -> Tensor:
        """Images of final states, exactly as the pipeline makes them, without gradient."""
        with torch.no_grad():
            return self.decode_with_graph(x, prompts)

    def decode_with_graph(self, x: Tensor, prompts: Sequence[str]) -> Tensor:
        """Images of final states, exactly as the pipeline makes them, in the caller's grad mode.

        With gradients enabled, the images depend on x differentiably wherever the pipeline decodes in torch alone.

        Args:
            x: [N, *latent_shape], any float dtype.
            prompts: N texts.

        Returns:
            Float32 images [N, 3, H, W] in [0, 1]; videos [N, F, 3, H, W]; sounds [N, C, S], nearly in [-1, 1].

        Raises:
            ValueError: if x or prompts do not fit, or the size of the images is not the size that the call asks for.
            PipelineError: if `self_check` finds no way to decode.
        """
        if not self.checked:
            self.self_check(prompts[:2])
        self._require_state(x, prompts)

        def decode(x: Tensor, prompts: Sequence[str]) -> Tensor:
            held = self._replay.held.of(prompts)
            x = x if held is None else held.finished(x)
            made = self._replay.decode(str(self._decoder), x, self._own, prompts)
            images = stacked(made, len(prompts)).float()
            if images.ndim == 3:
                return images
            dropped = self.caller.adapter.dropped
            frames = images.shape[1] + (dropped(self.pipe) if dropped else 0) if images.ndim == 5 else None
            refuse_other_size(self.caller.call, images.shape[-2], images.shape[-1], frames)
            return images

        return self._by_kin(decode, x.to(self.probe.dtype), prompts)

    @torch.no_grad()
    def encode(
        self, samples: Sequence[Sequence[Image.Image]], prompts: Sequence[str], device: torch.device | None = None
    ) -> tuple[Tensor, Tensor]:
        """The final states of given pictures or videos, and these as the rewards see them; see `latents.fitted`.

        Args:
            samples: N pictures, each a list of one picture in RGB of any size, or the frames of N videos.
            prompts: N texts.
            device: on which the pipeline computes; by default the CPU.

        Returns:
            [N, *latent_shape] in the dtype of the loop's state, on the device; and float32 images [N, 3, H, W] or
            videos [N, F, 3, H, W] in [0, 1], on the CPU.

        Raises:
            ValueError: a sample has another number of frames than the pipeline makes.
            PipelineError: the way from a picture to a state cannot be found for this pipeline; see `latents`.
        """
        if self.sampling_rate is not None:
            raise PipelineError(
                f"{type(self.pipe).__name__} makes sounds, and only pictures and videos can be given; sample with "
                "another sampler.plan"
            )
        if self._latents is None:
            if not self.checked:
                self.self_check(prompts[:2])
            decoder, one = str(self._decoder), prompts[:1]

            def decode(x: Tensor) -> Any:
                found = self._replay.decode(decoder, x.to(device), self._own, one)
                return None if found is None else stacked(found, 1)

            with self._naming_pictures(one):
                self._latents = find_map(self.pipe, self.probe.latent_shape, self.probe.dtype, decode)
        images = torch.stack([fitted(frames, self._latents) for frames in samples])
        states = encode(self.pipe, self._latents, images.to(device)).to(self.probe.dtype)

        def finished(x: Tensor, prompts: Sequence[str]) -> Tensor:
            held = self._replay.held.of(prompts)
            return x if held is None else held.finished(x)

        return self._by_kin(finished, states, prompts), images

    @property
    def sampling_rate(self) -> int | None:
        """Samples a second of the sounds that the pipeline makes; None if it makes pictures or videos."""
        return sampling_rate_of(self.pipe)

    @property
    def initial_std(self) -> float:
        """Standard deviation of the initial states of a rollout, in flow-matching coordinates."""
        process, first = self._recorder.process, self.sigmas[0]
        return 1.0 if process is None else process.norm(first) * process.first_std(first)

    def initial_noise(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Normal states with standard deviation `initial_std`, in the loop's layout, float32 on the CPU.

        Args:
            generators: N CPU generators, one for each sample, so that a sample does not depend on its batch.

        Returns:
            [N, *latent_shape].
        """
        drawn = torch.stack([torch.randn(self.probe.latent_shape, generator=g) for g in generators])
        return self.initial_std * drawn

    def self_check(self, prompts: Sequence[str], seed: int = 0) -> str:
        """Choose the lightest variant and decoder that reproduce the pipeline's own loop exactly.

        The pipeline runs its own loop over stochastic states, without gradient. Then each step is replayed in the
        caller's grad mode. So enable gradients if you want to check the path that training takes. If the first variant
        passes, the check costs 2T + 1 evaluations.

        Args:
            prompts: one or two texts.
            seed: of the rollout's noise.

        Returns:
            The variant, which is used from now on.

        Raises:
            PipelineError: if no variant has error 0, or if the prediction does not depend on the state or the noise
                level. The message names the pipeline, and gives the step and the error of each variant.
        """
        _require_texts(prompts)
        prompts = company(prompts, self.caller.adapter.together)
        variants = VARIANTS if self._requested == "auto" else (self._requested,)
        record = rollout(self._replay, self.probe.sigmas, prompts, seed)
        if not self._replay.held.found and stands_still(record):
            self._replay.held.found = True
            record = rollout(self._replay, self.probe.sigmas, prompts, seed)
        shape, dtype = tuple(record.final.shape[1:]), record.final.dtype
        self.probe = replace(self.probe, latent_shape=shape, dtype=dtype)
        self.variant = exact_variant(self._replay, self._own, record, variants)
        require_dependence(self._replay, self._own, record, self.variant)
        require_noise(self._replay, prompts, self.probe.sigmas[0])
        self._decoder = exact_decoder(self._replay, self._own, record)
        self._require_own_table(self.variant, self.sigmas)
        return self.variant

    @property
    def checked(self) -> bool:
        """Whether `self_check` has been made."""
        return self._decoder is not None

    def trust(self, other: Denoiser) -> None:
        """Take over what the check of another instance of the same pipeline has found, for the same call and steps."""
        self.probe, self.variant, self._decoder = other.probe, other.variant, other._decoder
        self._replay.held.found = other.replay.held.found
        self._recorder.pastes = other.replay.recorder.pastes

    def _by_kin(self, compute: Callable[[Tensor, Sequence[str]], Tensor], x: Tensor, prompts: Sequence[str]) -> Tensor:
        """The result of `compute` in the order of the rows, with one call if one call can hold all rows."""
        groups = kin(prompts, self.caller.adapter.together)
        if len(groups) == 1:
            return compute(x, prompts)
        parts = [compute(x[torch.tensor(rows, device=x.device)], [prompts[row] for row in rows]) for rows in groups]
        order = sorted(range(len(prompts)), key=[row for rows in groups for row in rows].__getitem__)
        return torch.cat(parts)[torch.tensor(order, device=parts[0].device)]

    def _look(self) -> tuple[Schedule, Probe]:
        """Call the pipeline up to its denoiser, or up to its first step if only that shows the state's layout."""
        prompts = [self._any_prompt()]
        seen: list[Tensor] = []
        prepare: Callable[..., Any] | None = getattr(self.pipe, "prepare_latents", None)

        def prepare_latents(*args: Any, **kwargs: Any) -> Any:
            made = prepare(*args, **kwargs) if prepare else ()
            parts = made if isinstance(made, tuple) else (made,)
            seen.extend(part for part in parts if isinstance(part, Tensor) and part.is_floating_point())
            return made

        def hook(index: int, prediction: Tensor, sample: Tensor) -> Tensor:
            seen.append(sample)
            raise LoopStopped

        self._recorder.arm(hook)
        with torch.no_grad(), ExitStack() as stack:
            if prepare is not None and self._requested not in IN_STEP_LAYOUT:
                stack.enter_context(replaced(self.pipe, prepare_latents=prepare_latents))
                stack.enter_context(stopping_at_denoiser(self.pipe))
            self._first_call(prompts)
        own, inverted = self._recorder.own, self._recorder.inverted
        if own is None or not is_flow_table(own.sigmas, inverted=inverted) or not seen:
            table = None if own is None else own.sigmas.tolist()
            raise ValueError(
                f"{type(self.pipe).__name__} with {type(self.pipe.scheduler).__name__} has no table of "
                f"noise levels: sigmas must fall strictly from at most 1 to 0, got {table}"
            )
        sigmas = 1.0 - own.sigmas if inverted else own.sigmas
        timesteps = tuple(float(t) for t in own.timesteps)
        return own, Probe(tuple(seen[0].shape[1:]), seen[0].dtype, tuple(sigmas.tolist()), timesteps)

    def _first_call(self, prompts: Sequence[str]) -> None:
        with self._naming_pictures(prompts):
            self.caller.run(self._recorder, prompts, self.num_steps, output_type="latent")

    @contextmanager
    def _naming_pictures(self, prompts: Sequence[str]) -> Iterator[None]:
        try:
            yield
        except (PipelineError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            # Many classes have None as the default of a picture that they cannot do without, and fail with any error.
            own = prompts[0].call if isinstance(prompts[0], ConditionedPrompt) else {}
            if not (names := pictures_left_out(self.caller.parameters, {**self.caller.call, **own})):
                raise
            raise PipelineError(
                f"{type(self.pipe).__name__} cannot be called: {error}. Its call takes pictures, and none is given for "
                f"{' and '.join(names)}"
            ) from error

    def _any_prompt(self) -> str:
        """A prompt that can be encoded, even after a prompt cache released the text encoders."""
        if self._example is not None:
            return self._example
        cache = getattr(self.pipe.__dict__.get("encode_prompt"), "prompt_cache", None)
        return cache.prompts[0] if cache is not None and cache.prompts else "a photo"

    def _timesteps_at(self, raw: Tensor) -> Tensor:
        """Timesteps [T] for sigmas [T]: N * sigma if the pipeline's own table has that, else interpolated in it."""
        scale = float(self._recorder.config.num_train_timesteps)
        own = self._own
        if own.timesteps.is_floating_point() and torch.allclose(own.timesteps, own.sigmas[:-1] * scale):
            return raw * scale
        # The pipeline's table may end before 0 or 1, and the given sigmas may reach them.
        known = np.append(own.sigmas[:-1].double().numpy(), [1.0, 0.0])
        values = np.append(own.timesteps.double().numpy(), [scale, 0.0])
        order = np.argsort(known, kind="stable")
        found = np.interp(raw.double().numpy(), known[order], values[order])
        return torch.from_numpy(found).to(own.timesteps.dtype)

    def _require_own_table(self, variant: str, table: tuple[float, ...]) -> None:
        if variant in OWN_TABLE and table != self.probe.sigmas:
            raise ValueError(
                f"{type(self.pipe).__name__} is replayed by {variant!r}, which works only with the pipeline's own "
                f"table: choose num_steps (now {self.num_steps}) instead of binding other sigmas"
            )

    def _require(self, x: Tensor, i: int, prompts: Sequence[str]) -> None:
        if not self.checked:
            self.self_check(prompts[:2])
        self._require_state(x, prompts)
        if not 0 <= i < len(self.sigmas) - 1:
            raise ValueError(f"step i is {i}; the bound table has steps 0 to {len(self.sigmas) - 2}")

    def _require_state(self, x: Tensor, prompts: Sequence[str]) -> None:
        _require_texts(prompts)
        if not x.is_floating_point() or tuple(x.shape[1:]) != self.probe.latent_shape:
            raise ValueError(
                f"x must be a float tensor [N, {', '.join(map(str, self.probe.latent_shape))}], "
                f"got {x.dtype} {tuple(x.shape)}"
            )
        if len(prompts) != len(x):
            raise ValueError(f"x holds {len(x)} states but there are {len(prompts)} prompts; give one for each")


def _require_texts(prompts: Sequence[str]) -> None:
    if isinstance(prompts, str) or not prompts:
        raise ValueError(f"prompts is {prompts!r}; give a list of texts, one for each row")
