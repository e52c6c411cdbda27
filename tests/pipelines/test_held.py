"""The part of a state that a pipeline knows: what a mask keeps of a picture, and frames that are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3InpaintPipeline, StableDiffusion3Pipeline
from PIL import Image
from torch import Tensor

from flowgrpo.pipelines.capture import ConditionedPrompt
from flowgrpo.pipelines.conformance.conditioned import mask, picture
from flowgrpo.pipelines.conformance.conform import TINY
from flowgrpo.pipelines.denoiser import Denoiser
from flowgrpo.pipelines.held import Held
from flowgrpo.samplers.kernels import Kernel, step
from tests.tiny_pipelines import CALL
from tests.tiny_pipelines import TINY as PLAIN

PROMPTS = ["a photo of two red circles", "a star"]
SD3 = TINY["StableDiffusion3InpaintPipeline"]


def made(name: str, **changed: Any) -> Denoiser:
    tiny = TINY[name]
    found = Denoiser(tiny.fresh(), num_steps=tiny.steps, call={**tiny.call, **changed})
    found.self_check(PROMPTS)
    return found


def held_of(denoiser: Denoiser, prompt: str = PROMPTS[0]) -> Held:
    found = denoiser.replay.held.of([prompt])
    assert found is not None
    return found


@torch.no_grad()
def final(denoiser: Denoiser, kernel: Kernel, x: Tensor, seed: int = 0) -> Tensor:
    """The final states of chains with the steps of a kernel."""
    generator = torch.Generator().manual_seed(seed)
    for i in range(len(denoiser.sigmas) - 1):
        c = kernel.coefficients(denoiser.sigmas, i)
        noise = torch.randn(x.shape, generator=generator)
        x = step(denoiser.velocity(x, i, PROMPTS[: len(x)]), x, c, noise=noise).x_next
    return x


def known(part: Tensor, value: Tensor, **options: Any) -> Held:
    return Held(part, value, **options)


@pytest.mark.parametrize("name", ["cps", "ddim"])
def test_after_each_step_the_known_part_has_the_noise_of_the_next_level(name: str) -> None:
    """RePaint's Eq. 8a, for the kernels that keep the marginals of any step length."""
    sigmas, value = (1.0, 0.9, 0.6, 0.3, 0.1, 0.0), torch.tensor([2.0])
    held = known(torch.tensor([True]), value, noisy=True)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200_000, 1, generator=generator)
    kernel = Kernel(name, eta=0.7)
    for i in range(len(sigmas) - 1):
        velocity = held.towards(torch.full_like(x, 9.0), x, sigmas[i])
        noise = torch.randn(x.shape, generator=generator)
        x = step(velocity, x, kernel.coefficients(sigmas, i), noise=noise).x_next
        there = sigmas[i + 1]
        assert float(x.mean()) == pytest.approx((1.0 - there) * 2.0, abs=0.01)
        assert float(x.std()) == pytest.approx(there, abs=0.01)


def test_the_velocity_is_replaced_in_the_known_part_only() -> None:
    held = known(torch.tensor([True, False]), torch.tensor([1.0, 5.0]), noisy=False)
    velocity, x = torch.tensor([[3.0, 4.0]], requires_grad=True), torch.tensor([[0.5, 0.5]])
    found = held.towards(velocity, x, 0.5)
    assert found.tolist() == [[-1.0, 4.0]]
    found.sum().backward()
    assert velocity.grad is not None
    assert velocity.grad.tolist() == [[0.0, 1.0]]
    assert held.entered(x).tolist() == held.finished(x).tolist() == [[1.0, 0.5]]
    assert known(held.part, held.value, noisy=True).entered(x) is x


@pytest.mark.slow
def test_steps_of_euler_make_the_picture_that_the_plain_pipeline_makes() -> None:
    denoiser = made("StableDiffusion3InpaintPipeline")
    generators = [torch.Generator().manual_seed(5 + k) for k in range(2)]
    noise = denoiser.initial_noise(generators)
    ours = denoiser.decode(final(denoiser, Kernel("ode"), noise), PROMPTS)

    pipe = SD3.fresh()
    call = {**SD3.call, "negative_prompt": [SD3.call["negative_prompt"]] * 2}
    conditioning = [torch.Generator().manual_seed(0) for _ in range(2)]
    plain = pipe(
        prompt=PROMPTS, latents=noise, num_inference_steps=SD3.steps, generator=conditioning, output_type="pt", **call
    ).images
    assert float((ours - plain).abs().max()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FluxInpaintPipeline", "StableDiffusionInpaintPipeline", "ZImageInpaintPipeline"])
def test_stochastic_chains_end_with_the_known_part(name: str) -> None:
    denoiser = made(name)
    held = held_of(denoiser)
    assert 0.4 < float(held.part.float().mean()) < 0.6
    x = denoiser.initial_noise([torch.Generator().manual_seed(k) for k in range(2)])
    one, two = (final(denoiser, Kernel("cps", eta=0.5), x, seed) for seed in (1, 2))
    for found in (one, two):
        assert torch.allclose(found[:, held.part], held.value[held.part].expand(2, -1).float(), atol=1e-4)
    assert not torch.allclose(one[:, ~held.part], two[:, ~held.part], atol=0.1)


@pytest.mark.slow
def test_prompts_have_masks_of_their_own() -> None:
    upper = Image.new("L", (16, 16))
    upper.paste(255, (0, 0, 16, 8))
    call = {name: value for name, value in SD3.call.items() if name not in ("image", "mask_image")}
    prompts = [
        ConditionedPrompt(PROMPTS[0], image=picture(), mask_image=mask()),
        ConditionedPrompt(PROMPTS[1], image=picture(phase=3), mask_image=upper),
    ]
    denoiser = Denoiser(SD3.fresh(), num_steps=SD3.steps, call=call, example=prompts[0])
    denoiser.self_check(prompts)
    parts = [held_of(denoiser, prompt).part for prompt in prompts]
    left, lower = torch.zeros(8, 8, dtype=torch.bool), torch.zeros(8, 8, dtype=torch.bool)
    left[:, :4], lower[4:] = True, True
    assert all(torch.equal(part, kept.expand(16, 8, 8)) for part, kept in zip(parts, (left, lower)))

    x = denoiser.initial_noise([torch.Generator().manual_seed(k) for k in range(2)])
    v = denoiser.velocity(x, 1, prompts)
    for k, (prompt, part) in enumerate(zip(prompts, parts)):
        towards = (x[k] - held_of(denoiser, prompt).value) / denoiser.sigmas[1]
        assert torch.equal(v[k][part], towards[part])
        assert torch.equal(v[k : k + 1], denoiser.velocity(x[k : k + 1], 1, [prompt]))


@pytest.mark.slow
def test_a_mask_that_keeps_everything_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"holds the whole state of the prompt 'a photo.*white is what is painted"):
        made("StableDiffusion3InpaintPipeline", mask_image=Image.new("L", (16, 16)))


@pytest.mark.slow
def test_steps_that_a_strength_leaves_out_are_explained() -> None:
    with pytest.raises(RuntimeError, match=r"took 2 scheduler steps instead of 3; if its call has a strength, set it"):
        made("StableDiffusion3InpaintPipeline", strength=0.6)


@pytest.mark.slow
def test_a_mask_that_keeps_nothing_holds_nothing() -> None:
    denoiser = made("StableDiffusion3InpaintPipeline", mask_image=Image.new("L", (16, 16), 255))
    assert not held_of(denoiser).part.any()


@pytest.mark.slow
def test_a_given_frame_is_held_clean() -> None:
    denoiser = made("LTXConditionPipeline, with a picture")
    held = held_of(denoiser)
    assert not held.noisy
    assert float(held.part.float().mean()) == pytest.approx(1 / 3)
    x = denoiser.initial_noise([torch.Generator().manual_seed(k) for k in range(2)])
    other = torch.where(held.part, x + 1.0, x)
    v, moved = denoiser.velocity(x, 1, PROMPTS), denoiser.velocity(other, 1, PROMPTS)
    assert torch.equal(v[:, ~held.part], moved[:, ~held.part])  # the denoiser sees the frame, and no noise on it
    frames = denoiser.decode(final(denoiser, Kernel("cps", eta=0.5), x), PROMPTS)
    again = denoiser.decode(final(denoiser, Kernel("cps", eta=0.5), x, 1), PROMPTS)
    assert not torch.equal(frames, again)


class BeginsHalfway(StableDiffusion3Pipeline):
    """Its first state is noise, halved in every other column, as with a condition of a strength between 0 and 1."""

    def __call__(self, *args: Any, condition: Any = None, **kwargs: Any) -> Any:
        return StableDiffusion3Pipeline.__call__.__wrapped__(self, *args, **kwargs)

    def prepare_latents(self, *args: Any, **kwargs: Any) -> Any:
        found = super().prepare_latents(*args, **kwargs).clone()
        if args[-1] is None:  # no latents are given
            found[..., ::2] *= 0.5
        return found


@pytest.mark.slow
def test_a_condition_that_leaves_less_noise_is_refused() -> None:
    pipe = PLAIN["sd3"]()
    pipe.__class__ = BeginsHalfway
    call = {**CALL["sd3"], "height": 32, "width": 32, "condition": object()}  # enough numbers to tell
    with pytest.raises(RuntimeError, match=r"does not begin at noise.*0\.6.* times the variance"):
        Denoiser(pipe, num_steps=3, call=call).self_check(PROMPTS)


@pytest.mark.slow
def test_a_picture_that_is_missing_is_named() -> None:
    pipe = StableDiffusion3InpaintPipeline(**SD3.fresh().components)
    call = {name: value for name, value in SD3.call.items() if name != "image"}
    with pytest.raises(RuntimeError, match=r"cannot be called: .*none is given for image"):
        Denoiser(pipe, num_steps=3, call=call)
