"""Models that predict noise, in the coordinates of flow matching: by hand, and against DDIM of diffusers."""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    CogVideoXDPMScheduler,
    DDIMScheduler,
    DDPMScheduler,
    EulerDiscreteScheduler,
    LCMScheduler,
    PNDMScheduler,
    StableDiffusionPipeline,
)

from flowgrpo.core.addressing import address
from flowgrpo.pipelines.conformance.conform import TINY, check
from flowgrpo.pipelines.conformance.subject import Subject
from flowgrpo.pipelines.denoiser import Denoiser
from flowgrpo.pipelines.noise_prediction import ExplodingProcess, NoiseProcess, state_norm
from flowgrpo.pipelines.policy import FlowPolicy
from flowgrpo.pipelines.recorder import Recorder
from flowgrpo.samplers.kernels import Kernel, step
from flowgrpo.samplers.moves import draw_noise
from flowgrpo.samplers.plans import ode_plan
from flowgrpo.weights.precision import in_dtype
from flowgrpo.weights.trained import TrainedWeights, trainable_modules

PROMPTS = ["a photo of two red circles", "a star"]
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
NAMES = ("StableDiffusionPipeline", "StableDiffusionPipeline, v-prediction", "StableDiffusionXLPipeline",
         "PixArtSigmaPipeline", "CogVideoXPipeline")  # fmt: skip
# a = .8, b = .6: sigma is .6 / 1.4.
SIGMA = 3 / 7


def scheduler(**settings: Any) -> DDIMScheduler:
    return DDIMScheduler(**{"clip_sample": False, **BETAS, **settings})


def own(name: str, **settings: Any) -> Any:
    """A tiny pipeline with the DDIM scheduler that its own solver is exchanged for, ending at the data."""
    pipe = TINY[name].fresh()
    if not type(pipe.scheduler).__name__.endswith("DDIMScheduler"):
        known = {key: value for key, value in pipe.scheduler.config.items() if key in DDIMScheduler().config}
        pipe.scheduler = DDIMScheduler(**{**known, "clip_sample": False})
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, set_alpha_to_one=True, **settings)
    return pipe


def test_coordinates_by_hand() -> None:
    """x0 = 1 and n = 2: z = .8 + 1.2 = 2, x = 2 / 1.4, the velocity is 1, the v-prediction .8·2 - .6·1 = 1."""
    assert state_norm(SIGMA) == pytest.approx(1 / 1.4)
    assert state_norm(0.0) == state_norm(1.0) == 1.0
    x = torch.tensor([[2 / 1.4]])
    for kind, predicted in (("epsilon", 2.0), ("v_prediction", 1.0), ("sample", 1.0)):
        process = NoiseProcess(scheduler(prediction_type=kind))
        assert process.entered(x, SIGMA).item() == pytest.approx(2.0)
        assert process.velocity(torch.tensor([[predicted]]), x, SIGMA).item() == pytest.approx(1.0, rel=1e-6)
    # At pure noise x is the noise, v is -x0, and the velocity x - x0.
    end = NoiseProcess(scheduler(prediction_type="v_prediction")).velocity(torch.tensor(-3.0), torch.tensor(2.0), 1.0)
    assert end.item() == -1.0


def test_table_by_hand() -> None:
    """Betas of .19 and .19 leave 1 - ᾱ = .19 and 1 - .81² = .3439."""
    process = NoiseProcess(DDIMScheduler(trained_betas=[0.19, 0.19], num_train_timesteps=2, clip_sample=False))
    sigmas, timesteps = process.table({"num_inference_steps": 2})
    late, early = math.sqrt(0.3439), math.sqrt(0.19)
    assert sigmas.tolist() == pytest.approx([late / (0.81 + late), early / (0.9 + early), 0.0])
    assert timesteps.tolist() == [1, 0]
    between = (process.levels[0] + process.levels[1]) / 2
    assert process.timesteps_at(sigmas[:2]).tolist() == [1, 0]
    assert process.timesteps_at(torch.stack([between])).tolist() == pytest.approx([0.5])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_euler_is_ddim(name: str) -> None:
    """The deterministic plan ends at the pipeline's own latents, from the same noise, to rounding."""
    # Of timesteps that are not evenly spaced, DDIM of diffusers steps to others than the next one.
    pipe, tiny, steps = own(name, **({"timestep_spacing": "leading"} if "Pix" in name else {})), TINY[name], 5
    d = Denoiser(pipe, num_steps=steps, call=tiny.call)
    d.self_check(PROMPTS)
    policy = FlowPolicy(d, TrainedWeights(pipe, trainable_modules(pipe), "full"))
    found = policy.sample(PROMPTS, [3, 4], ode_plan(d.sigmas, samples=1)).x
    noise = draw_noise(d.probe.latent_shape, [address(key, 0, 0) for key in (3, 4)])
    assert torch.equal(d.initial_noise([torch.Generator().manual_seed(address(3, 0, 0))])[0], d.initial_std * noise[0])

    call = {key: [value] * 2 if key == "negative_prompt" else value for key, value in tiny.call.items()}
    expected = pipe(PROMPTS, latents=noise, num_inference_steps=steps, output_type="latent", **call)[0]
    assert expected.abs().max() > 0.5
    scale = float(expected.abs().max())
    torch.testing.assert_close(found / scale, expected.reshape(found.shape) / scale, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("eta", [0.0, 0.6, 1.0])
def test_the_kernel_takes_ddims_steps(kind: str, eta: float) -> None:
    reference = scheduler(prediction_type=kind, steps_offset=1)
    process = NoiseProcess(reference)
    sigmas, timesteps = process.table({"num_inference_steps": 10})
    reference.set_timesteps(10)
    table = sigmas.tolist()
    generator = torch.Generator().manual_seed(0)
    for i, t in enumerate(timesteps):
        x, predicted, noise = (torch.randn(2, 3, generator=generator) for _ in range(3))
        z = process.entered(x, table[i])
        expected = reference.step(predicted, t, z, eta=eta, variance_noise=noise).prev_sample
        taken = step(
            process.velocity(predicted, x, table[i]), x, Kernel("ddim", eta).coefficients(table, i), noise=noise
        )
        scale = float(expected.abs().max())
        torch.testing.assert_close(process.entered(taken.x_next, table[i + 1]) / scale, expected / scale,
                                   rtol=0, atol=1e-5)  # fmt: skip


@pytest.mark.slow
def test_every_solver_of_a_model_gives_the_same_velocity() -> None:
    name, found = "StableDiffusionPipeline", []
    for shipped in (
        PNDMScheduler(skip_prk_steps=True, steps_offset=1, **BETAS),
        EulerDiscreteScheduler(steps_offset=1, timestep_spacing="leading", **BETAS),
        DDPMScheduler(steps_offset=1, clip_sample=False, **BETAS),
        scheduler(steps_offset=1),
    ):
        pipe = TINY[name].fresh()
        pipe.scheduler = shipped
        d = Denoiser(pipe, num_steps=4, call=TINY[name].call)
        x = d.initial_noise([torch.Generator().manual_seed(k) for k in range(2)])
        with torch.no_grad():
            found.append((d.sigmas, d.velocity(x, 1, PROMPTS)))
    assert all(sigmas == found[0][0] and torch.equal(v, found[0][1]) for sigmas, v in found)


@pytest.mark.slow
def test_another_table_is_evaluated_between_the_timesteps_of_training() -> None:
    name = "StableDiffusionPipeline"
    d = Denoiser(TINY[name].fresh(), num_steps=4, call=TINY[name].call)
    x = d.initial_noise([torch.Generator().manual_seed(k) for k in range(2)])
    with torch.no_grad():
        own = d.velocity(x, 1, PROMPTS)
        d.bind((d.sigmas[0], d.sigmas[1], 0.25, 0.0))
        assert torch.equal(d.velocity(x, 1, PROMPTS), own)
        lower = d.velocity(x, 2, PROMPTS)
        d.bind((0.25 + 1e-6, 0.0))
        torch.testing.assert_close(d.velocity(x, 0, PROMPTS), lower, rtol=1e-3, atol=1e-3)
    assert d.initial_std == pytest.approx(math.hypot(0.75, 0.25), abs=1e-5)
    with pytest.raises(ValueError, match=r"begin at 1, and this model was trained up to 0\.9"):
        d.bind((1.0, 0.5, 0.0))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["StableDiffusionPipeline", "StableDiffusionXLPipeline"])
def test_in_16_bits_every_check_passes(name: str, tmp_path: Path) -> None:
    tiny = TINY[name]
    tiny.fresh().save_pretrained(tmp_path / "pipeline")

    def load(folder: str | Path) -> Any:
        return type(tiny.fresh()).from_pretrained(folder, **in_dtype(torch.bfloat16))

    subject = Subject(load, tmp_path / "pipeline", tiny.call, tiny.steps, tmp_path, dtype=torch.bfloat16, whole=False)
    result = check(subject, name, lambda outcome: None)
    assert result.passed, result.outcomes


@pytest.mark.parametrize(
    ("shipped", "message"),
    [
        (scheduler(clip_sample=True), "has clip_sample"),
        (scheduler(thresholding=True), "has thresholding"),
        (LCMScheduler(clip_sample=False, **BETAS), "LCMScheduler .* differ from DDIM's"),
        (CogVideoXDPMScheduler(clip_sample=False, snr_shift_scale=3.0), "of its family"),
        (EulerDiscreteScheduler(prediction_type="sample", **BETAS), None),
    ],
)
def test_what_is_no_ddim_is_refused(shipped: Any, message: str | None) -> None:
    if message is None:
        assert Recorder(shipped).process is not None
        return
    with pytest.raises(ValueError, match=message):
        Recorder(shipped)


@pytest.mark.slow
def test_noise_is_not_predicted_from_pure_noise() -> None:
    pipe = own("StableDiffusionPipeline", rescale_betas_zero_snr=True, timestep_spacing="trailing")
    with pytest.raises(ValueError, match="begins at pure noise"):
        Denoiser(pipe, num_steps=3, call=TINY["StableDiffusionPipeline"].call)


def test_a_table_is_asked_for_by_its_length() -> None:
    process = NoiseProcess(scheduler())
    with pytest.raises(ValueError, match="takes num_inference_steps"):
        process.table({"num_inference_steps": 3, "timesteps": [1, 2, 3]})


@pytest.mark.slow
def test_the_pipelines_own_scheduler_is_left_alone() -> None:
    pipe = TINY["StableDiffusionPipeline"].fresh()
    before, scheduler_before = copy.deepcopy(dict(pipe.scheduler.config)), pipe.scheduler
    Denoiser(pipe, num_steps=3, call=TINY["StableDiffusionPipeline"].call).self_check(PROMPTS)
    assert pipe.scheduler is scheduler_before
    assert dict(pipe.scheduler.config) == before
    assert isinstance(pipe, StableDiffusionPipeline)


def test_a_state_of_edm_is_a_state_of_flow_matching() -> None:
    """`z = x0 + s n`, divided by `1 + s`; a step of Euler is the same in both coordinates."""
    process = ExplodingProcess(None)
    generator = torch.Generator().manual_seed(0)
    x0, n = (torch.randn(2, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    levels = [80.0, 3.0, 0.5, 0.002]
    for s, there in pairwise([*levels, 0.0]):
        sigma, sigma_next = s / (1.0 + s), there / (1.0 + there)
        x = (1.0 - sigma) * x0 + sigma * n
        assert torch.allclose(process.entered(x, sigma), x0 + s * n, rtol=1e-5, atol=1e-5)
        v = process.velocity(n, x, sigma)
        assert torch.allclose(v.double(), n - x0, atol=1e-3 if s == 80.0 else 1e-5)
        moved = (x0 + there * n) / (1.0 + there)
        assert torch.allclose(x + (sigma_next - sigma) * v.double(), moved, atol=1e-5)
        assert process.norm(sigma) == pytest.approx(1.0 / (1.0 + s))
        assert process.first_std(sigma) == pytest.approx(s)
    sigmas = torch.tensor([s / (1.0 + s) for s in levels])
    assert torch.allclose(process.levels_of(sigmas), torch.tensor(levels), rtol=1e-4)
    with pytest.raises(ValueError, match="the noise levels of this model are finite; begin below 1"):
        process.timesteps_at(torch.tensor([1.0, 0.5]))


@pytest.mark.slow
def test_a_model_of_edm_makes_its_own_pictures() -> None:
    """The pipeline leaves the noise of its last level in the picture, and a rollout ends at 0."""
    tiny = TINY["Cosmos2TextToImagePipeline"]
    pipe, prompts = tiny.fresh(), ["a star", "a circle"]
    denoiser = Denoiser(pipe, num_steps=6, call=tiny.call)
    denoiser.self_check(prompts)
    assert denoiser.sigmas[0] == pytest.approx(80 / 81)
    assert denoiser.initial_std == pytest.approx(80 / 81)
    generators = [torch.Generator().manual_seed(k) for k in range(2)]
    x = start = denoiser.initial_noise(generators)
    with torch.no_grad():
        for i, (sigma, there) in enumerate(pairwise(denoiser.sigmas)):
            x = x + (there - sigma) * denoiser.velocity(x, i, prompts)
    ours = denoiser.decode(x, prompts)
    call = {name: [value] * 2 if name == "negative_prompt" else value for name, value in tiny.call.items()}
    latents = start / denoiser.initial_std  # the pipeline multiplies what it is given by its first level
    plain = tiny.fresh()(prompt=prompts, latents=latents, num_inference_steps=6, output_type="pt", **call).images
    assert float((ours - plain).abs().max()) < 5e-3
    assert float((ours - plain).abs().max()) > 0.0
