"""Pipelines that give a wrong answer without an error, planted one by one: the self-check or the kit sees each."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from flowgrpo.pipelines.callers import stacked
from flowgrpo.pipelines.conformance import checks, conform
from flowgrpo.pipelines.conformance.subject import CheckOutcome, Failure, Subject
from flowgrpo.pipelines.denoiser import Denoiser
from flowgrpo.weights.pipeline_classes import ADAPTERS
from tests.tiny_pipelines import CALL, TINY, require

pytestmark = pytest.mark.slow

PROMPTS = ["a photo of two red circles", "a star"]
STEPS = 3


def planted(**hooks: Any) -> Any:
    """The SD3 pipeline with its transformer's forward replaced by `forward(own, kwargs)`."""
    pipe = TINY["sd3"]()
    own, forward = pipe.transformer.forward, hooks["forward"]
    pipe.transformer.forward = lambda **kwargs: forward(own, kwargs)
    return pipe


def denoiser(pipe: Any, **options: Any) -> Denoiser:
    return Denoiser(pipe, num_steps=STEPS, call=CALL["sd3"], **options)


def subject(pipe: Any, folder: Path) -> Subject:
    made = Subject(lambda source: pipe, "", CALL["sd3"], STEPS, folder)
    made.pipe = pipe
    made.denoiser = denoiser(pipe)
    made.denoiser.self_check(PROMPTS)
    return made


def test_a_state_that_the_denoiser_does_not_see_is_refused() -> None:
    def blind(own: Any, kwargs: dict[str, Any]) -> Any:
        return own(**{**kwargs, "hidden_states": torch.zeros_like(kwargs["hidden_states"])})

    with pytest.raises(RuntimeError, match="makes the same prediction for two different states"):
        denoiser(planted(forward=blind)).self_check(PROMPTS)


def test_the_first_state_evaluated_for_ever_is_refused() -> None:
    """Its own loop shows the denoiser the first noise at every step; a replay shows it the state."""
    seen: list[torch.Tensor] = []

    def stale(own: Any, kwargs: dict[str, Any]) -> Any:
        seen.append(kwargs["hidden_states"])
        return own(**{**kwargs, "hidden_states": seen[0]})

    with pytest.raises(RuntimeError, match="makes the same prediction for two different states"):
        denoiser(planted(forward=stale)).self_check(PROMPTS)


def test_a_class_that_writes_into_its_latents_does_not_change_the_state() -> None:
    """Sana puts the given frame into the tensor that it was handed as `latents`."""
    tiny = conform.TINY["SanaImageToVideoPipeline"]
    made = Denoiser(tiny.fresh(), num_steps=STEPS, call=tiny.call)
    made.self_check(PROMPTS)
    x = made.initial_noise([torch.Generator().manual_seed(k) for k in range(2)])
    before = x.clone()
    for variant in ("direct", "inject"):
        with pytest.raises(RuntimeError, match=r"is not the one supplied|returned no tensor"):
            made.replay.predict(variant, x, made._own, 0, PROMPTS)
        assert torch.equal(x, before)


def test_a_video_and_its_sound_are_one_state() -> None:
    tiny = conform.TINY["LTX2Pipeline"]
    made = Denoiser(tiny.fresh(), num_steps=STEPS, call=tiny.call)
    made.self_check(PROMPTS)
    video, sound = 3 * 32 * 32, 20
    assert made.probe.latent_shape == (video + sound,)
    x = made.initial_noise([torch.Generator().manual_seed(k) for k in range(2)])
    v = made.velocity(x, 1, PROMPTS)
    for part in (slice(0, video), slice(video, None)):
        other = x.clone()
        other[:, part] += 0.5
        moved = made.velocity(other, 1, PROMPTS) - v
        assert bool(moved[:, :video].any())
        assert bool(moved[:, video:].any())
    # What rewards see is made of the video's part alone.
    images = made.decode(x, PROMPTS)
    assert images.shape == (2, 5, 3, 32, 32)
    other = x.clone()
    other[:, video:] += 0.5
    assert torch.equal(made.decode(other, PROMPTS), images)


def test_one_video_without_a_batch_dimension_is_a_video() -> None:
    require("Cosmos3OmniPipeline")
    tiny = conform.TINY["Cosmos3OmniPipeline"]
    made = Denoiser(tiny.fresh(), num_steps=STEPS, call=tiny.call)
    made.self_check(PROMPTS)
    x = made.initial_noise([torch.Generator().manual_seed(k) for k in range(2)])
    found = made.decode(x, PROMPTS)
    assert found.shape == (2, 5, 3, 32, 32)
    assert torch.equal(found[1:], made.decode(x[1:], PROMPTS[1:]))
    with pytest.raises(RuntimeError, match="returned 3 images or videos for 2 prompts"):
        stacked(torch.zeros(3, 3, 8, 8), 2)


def test_a_timestep_that_is_always_the_same_is_refused() -> None:
    def frozen(own: Any, kwargs: dict[str, Any]) -> Any:
        return own(**{**kwargs, "timestep": torch.full_like(kwargs["timestep"], 500.0)})

    with pytest.raises(RuntimeError, match=r"(?s)the same prediction at the noise levels 1 and 0\.75.*timestep"):
        denoiser(planted(forward=frozen)).self_check(PROMPTS)


class CountsItsSteps(StableDiffusion3Pipeline):
    """Gives its denoiser timesteps of its own, by the number of the step and not by the noise level."""

    def __call__(self, *args: Any, num_inference_steps: int, **kwargs: Any) -> Any:
        own, calls = self.transformer.forward, []

        def forward(**given: Any) -> Any:
            level = 1000.0 * (1 - len(calls) / num_inference_steps)
            calls.append(level)
            return own(**{**given, "timestep": torch.full_like(given["timestep"], level)})

        self.transformer.__dict__["forward"] = forward
        try:
            kwargs["num_inference_steps"] = num_inference_steps
            return StableDiffusion3Pipeline.__call__.__wrapped__(self, *args, **kwargs)
        finally:
            self.transformer.__dict__["forward"] = own


def test_a_timestep_that_counts_steps_rules_out_every_one_step_call() -> None:
    pipe = TINY["sd3"]()
    pipe.__class__ = CountsItsSteps
    with pytest.raises(RuntimeError, match="max error"):
        denoiser(pipe, variant="direct").self_check(PROMPTS)
    with pytest.raises(RuntimeError, match="max error"):
        denoiser(pipe, variant="slice").self_check(PROMPTS)


def test_conditioning_drawn_anew_at_each_call_is_refused() -> None:
    pipe = TINY["sd3"]()
    own = pipe.encode_prompt

    def drawn(**kwargs: Any) -> Any:
        embeddings, *others = own(**kwargs)
        return (embeddings + 0.1 * torch.randn_like(embeddings), *others)

    pipe.__dict__["encode_prompt"] = drawn
    with pytest.raises(RuntimeError, match=r"randomness that does not come from the `generator`"):
        denoiser(pipe).self_check(PROMPTS)


class DrawsFromTheGenerator(StableDiffusion3Pipeline):
    """Draws conditioning after the noise, from the same generators: with `latents=` the draw is another one."""

    def __call__(self, *args: Any, generator: Any, **kwargs: Any) -> Any:
        own = self.transformer.forward
        drawn: list[torch.Tensor] = []

        def forward(**given: Any) -> Any:
            if not drawn:
                drawn.append(torch.stack([torch.randn(32, generator=g) for g in generator]))
            pooled = given["pooled_projections"] + torch.cat([drawn[0]] * 2)
            return own(**{**given, "pooled_projections": pooled})

        self.transformer.__dict__["forward"] = forward
        try:
            return StableDiffusion3Pipeline.__call__.__wrapped__(self, *args, generator=generator, **kwargs)
        finally:
            self.transformer.__dict__["forward"] = own


def test_conditioning_drawn_after_the_noise_is_kept_by_injecting() -> None:
    pipe = TINY["sd3"]()
    pipe.__class__ = DrawsFromTheGenerator
    assert denoiser(pipe).self_check(PROMPTS) == "inject"


class Pastes(StableDiffusion3Pipeline):
    """Puts half of every state back to zero after each step, as inpainting pipelines do with the known part."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def paste(pipe: Any, index: int, timestep: Any, state: dict[str, Any]) -> dict[str, Any]:
            latents = state["latents"].clone()
            latents[..., :4] = 0.0
            return {"latents": latents}

        kwargs.pop("callback_on_step_end", None)
        return StableDiffusion3Pipeline.__call__.__wrapped__(self, *args, callback_on_step_end=paste, **kwargs)


def test_a_state_changed_between_steps_is_refused() -> None:
    pipe = TINY["sd3"]()
    pipe.__class__ = Pastes
    with pytest.raises(RuntimeError, match="Pastes changes the state between two steps"):
        denoiser(pipe).self_check(PROMPTS)


class PastesInPlace(StableDiffusion3Pipeline):
    """Writes into the tensor that a step returned."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def paste(pipe: Any, index: int, timestep: Any, state: dict[str, Any]) -> dict[str, Any]:
            state["latents"][..., :4] = 0.0
            return {}

        kwargs.pop("callback_on_step_end", None)
        return StableDiffusion3Pipeline.__call__.__wrapped__(self, *args, callback_on_step_end=paste, **kwargs)


def test_a_state_changed_in_place_between_steps_is_refused() -> None:
    pipe = TINY["sd3"]()
    pipe.__class__ = PastesInPlace
    with pytest.raises(RuntimeError, match="PastesInPlace changes the state between two steps"):
        denoiser(pipe).self_check(PROMPTS)


def test_predictions_that_are_not_finite_are_not_called_inpainting() -> None:
    pipe = TINY["sd3"]()
    with torch.no_grad():
        next(iter(pipe.transformer.proj_out.parameters())).fill_(math.inf)
    with pytest.raises(RuntimeError, match="predicts numbers that are not finite"):
        denoiser(pipe).self_check(PROMPTS)


def test_rows_that_see_each_other_fail_the_velocity_check(tmp_path: Path) -> None:
    def mixed(own: Any, kwargs: dict[str, Any]) -> Any:
        (prediction,) = own(**kwargs)
        return (prediction + 0.1 * prediction.mean(0, keepdim=True),)

    with pytest.raises(Failure, match="depends on the state of another row"):
        checks.velocity(subject(planted(forward=mixed), tmp_path))


@pytest.mark.parametrize("class_name", ["OmniGenPipeline", "QwenImage21Pipeline"])
def test_rows_that_see_the_padding_of_longer_prompts_fail_the_velocity_check(
    class_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(class_name)
    seen: list[CheckOutcome] = []
    monkeypatch.setattr(conform, "CHECKS", {"probe": checks.probe, "velocity": checks.velocity})
    assert conform.check_tiny(class_name, seen.append).passed
    monkeypatch.delitem(ADAPTERS, class_name)
    assert not conform.check_tiny(class_name, seen.append).passed
    assert "depends on the prompt of another row" in seen[-1].detail


@pytest.mark.parametrize("class_name", ["StableDiffusion3ControlNetPipeline", "CogView4ControlPipeline"])
def test_what_a_picture_becomes_does_not_depend_on_its_place(class_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[CheckOutcome] = []
    monkeypatch.setattr(conform, "CHECKS", {"probe": checks.probe, "velocity": checks.velocity})
    assert conform.check_tiny(class_name, seen.append).passed, seen[-1]


def test_a_prompt_without_effect_fails_the_velocity_check(tmp_path: Path) -> None:
    def deaf(own: Any, kwargs: dict[str, Any]) -> Any:
        names = ("encoder_hidden_states", "pooled_projections")
        return own(**{**kwargs, **{name: torch.zeros_like(kwargs[name]) for name in names}})

    with pytest.raises(Failure, match="does not depend on the prompt"):
        checks.velocity(subject(planted(forward=deaf), tmp_path))


def test_a_block_without_gradient_fails_the_gradient_check(tmp_path: Path) -> None:
    """Like the experts of HiDream-Image at inference: they change the output, and get no gradient."""
    pipe = TINY["sd3"]()
    feed_forward = pipe.transformer.transformer_blocks[0].ff
    own = feed_forward.forward
    feed_forward.forward = torch.no_grad()(own)
    with pytest.raises(Failure, match=r"transformer_blocks\.0\.ff.* have an effect but no gradient"):
        checks.gradient(subject(pipe, tmp_path))


def test_a_gradient_cut_on_one_of_two_ways_fails_the_gradient_check(tmp_path: Path) -> None:
    def partly(own: Any, kwargs: dict[str, Any]) -> Any:
        with torch.no_grad():
            (first,) = own(**kwargs)
        (second,) = own(**kwargs)
        return (0.5 * (first + second),)

    with pytest.raises(Failure, match="the gradient is not the slope"):
        checks.gradient(subject(planted(forward=partly), tmp_path))


def test_predictions_of_zero_are_no_reason_to_refuse() -> None:
    """A model before any training may have zeros in its last layer."""
    pipe = TINY["sd3"]()
    with torch.no_grad():
        pipe.transformer.proj_out.weight.zero_()
        pipe.transformer.proj_out.bias.zero_()
    assert denoiser(pipe).self_check(PROMPTS) == "direct"
