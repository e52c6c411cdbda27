"""The denoiser against the pipelines' own loops, on five real pipeline classes at toy size."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    StableDiffusion3Pipeline,
)

from flowgrpo.pipelines.callers import VARIANTS, stacked
from flowgrpo.pipelines.denoiser import Denoiser
from flowgrpo.pipelines.recorder import Recorder, Schedule
from tests.tiny_pipelines import CALL, TINY

pytestmark = pytest.mark.slow

KEYS = tuple(TINY)
DTYPES = (torch.float32, torch.bfloat16)
PROMPTS = ["a photo of two red circles", "a star"]
STEPS = 3

STATE_KEPT_IN_FLOAT32 = {"sana", "wan"}

# The text stream of the last joint block ends unread. Of what only feeds it, some is never computed with (no
# gradient at all), and its queries are attended with but their answers dropped (a gradient of zero).
LAST_QUERIES = {f"transformer_blocks.1.attn.{name}" for name in ("add_q_proj.weight", "add_q_proj.bias")}
LAST_QUERIES |= {"transformer_blocks.1.attn.norm_added_q.weight"}
LAST_TEXT = {f"transformer_blocks.1.attn.to_add_out.{name}" for name in ("weight", "bias")}
LAST_TEXT |= {f"transformer_blocks.1.txt_mlp.net.{k}.{name}" for k in ("0.proj", "2") for name in ("weight", "bias")}
NO_GRADIENT: dict[str, set[str]] = {"qwenimage": LAST_TEXT}
ZERO_GRADIENT: dict[str, set[str]] = {"qwenimage": LAST_QUERIES, "sd3": LAST_QUERIES}


@functools.cache
def tiny(key: str, dtype: torch.dtype = torch.float32) -> Any:
    return TINY[key]().to(dtype)


def denoiser(key: str, dtype: torch.dtype = torch.float32, **options: Any) -> Denoiser:
    return Denoiser(tiny(key, dtype), **{"num_steps": STEPS, "call": CALL[key], **options})


def own_call(pipe: DiffusionPipeline, key: str, steps: int = STEPS, **options: Any) -> torch.Tensor:
    call = dict(CALL[key])
    if "negative_prompt" in call:
        call["negative_prompt"] = [call["negative_prompt"]] * len(PROMPTS)
    images: torch.Tensor = pipe(prompt=PROMPTS, num_inference_steps=steps, return_dict=False, **{**call, **options})[0]
    return images


def noise(d: Denoiser, seed: int = 0) -> torch.Tensor:
    return d.initial_noise([torch.Generator().manual_seed(seed + k) for k in range(len(PROMPTS))])


def euler(d: Denoiser, x: torch.Tensor) -> torch.Tensor:
    """Euler's arithmetic in diffusers: the change in the model's dtype, the sum in float32, the state rounded."""
    sigmas = torch.tensor(d.sigmas, dtype=torch.float32)
    x = x.to(d.probe.dtype)
    with torch.no_grad():
        for i in range(len(sigmas) - 1):
            change = (sigmas[i + 1] - sigmas[i]) * d.velocity(x, i, PROMPTS).to(d.probe.dtype)
            x = (x.float() + change).to(d.probe.dtype)
    return x


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("variant", ["auto", *VARIANTS])
def test_every_variant_replays_the_own_loop_exactly(key: str, variant: str) -> None:
    d = denoiser(key, variant=variant)

    assert d.self_check(PROMPTS) == ("direct" if variant == "auto" else variant)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rollout_and_training_velocity_are_equal_to_the_last_bit(key: str, dtype: torch.dtype) -> None:
    d = denoiser(key, dtype)
    x = noise(d)
    with torch.no_grad():
        rolled_out = [d.velocity(x, i, PROMPTS) for i in range(STEPS)]
    trained = [d.velocity(x, i, PROMPTS) for i in range(STEPS)]

    assert d.probe.dtype == (torch.float32 if key in STATE_KEPT_IN_FLOAT32 else dtype)
    for without, with_grad in zip(rolled_out, trained):
        assert without.dtype == torch.float32
        assert not without.requires_grad
        assert with_grad.requires_grad
        assert torch.equal(without, with_grad)
    assert not torch.equal(rolled_out[0], rolled_out[-1])
    assert torch.equal(rolled_out[1], d.velocity(x.to(d.probe.dtype).double(), 1, PROMPTS))


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("variant", ["direct", "fast_forward"])
def test_gradient_reaches_every_parameter_in_use(key: str, variant: str) -> None:
    d = denoiser(key, variant=variant)
    d.pipe.transformer.zero_grad(set_to_none=True)
    d.velocity(noise(d), 1, PROMPTS).square().mean().backward()
    parameters = dict(d.pipe.transformer.named_parameters())
    missing = {name for name, p in parameters.items() if p.grad is None}
    zero = {name for name, p in parameters.items() if p.grad is not None and not p.grad.any()}
    d.pipe.transformer.zero_grad(set_to_none=True)

    assert len(parameters) > 20
    assert missing == NO_GRADIENT.get(key, set())
    assert zero == ZERO_GRADIENT.get(key, set())


@pytest.mark.parametrize("key", KEYS)
def test_gradient_is_the_slope_of_the_velocity(key: str) -> None:
    d = denoiser(key, variant="direct")
    x, direction = noise(d), noise(d, seed=7)
    leaf = x.clone().requires_grad_()
    d.velocity(leaf, 1, PROMPTS).square().sum().backward()
    assert leaf.grad is not None
    # Summed in 64 bits, because Sana is smooth over short distances only, and rounding would hide what is left.
    with torch.no_grad():
        ahead, behind = (d.velocity(x + h * direction, 1, PROMPTS).double().square().sum() for h in (1e-3, -1e-3))

    slope = (leaf.grad * direction).sum()
    torch.testing.assert_close(slope, ((ahead - behind) / 2e-3).float(), rtol=5e-2, atol=1e-2)
    d.pipe.transformer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_equals_the_own_images(key: str, dtype: torch.dtype) -> None:
    pipe, d = tiny(key, dtype), denoiser(key, dtype)
    final, expected = (
        own_call(pipe, key, generator=torch.Generator().manual_seed(0), output_type=output)
        for output in ("latent", "pt")
    )
    images = d.decode(final, PROMPTS)

    assert images.dtype == torch.float32
    assert not images.requires_grad
    assert torch.equal(images, expected.float())
    assert images.shape[-3] == 3
    assert images.ndim == (5 if key == "wan" else 4)
    assert 0 <= images.min() < images.max() <= 1


@pytest.mark.parametrize(("key", "dtype"), [*((key, torch.float32) for key in KEYS), ("sd3", torch.bfloat16)])
def test_euler_rollout_is_the_own_rollout(key: str, dtype: torch.dtype) -> None:
    pipe = copy.copy(tiny(key, dtype))
    if not isinstance(pipe.scheduler, FlowMatchEulerDiscreteScheduler):
        # Released with a multistep solver; Euler's own steps are what there is to compare with.
        pipe.__dict__["scheduler"] = FlowMatchEulerDiscreteScheduler(shift=3.0)
    d = Denoiser(pipe, num_steps=STEPS, call=CALL[key])
    x = noise(d)

    assert torch.equal(euler(d, x), own_call(pipe, key, latents=x.to(d.probe.dtype), output_type="latent"))


def test_inverted_tables_are_turned_round() -> None:
    pipe = copy.copy(tiny("sd3"))
    pipe.__dict__["scheduler"] = FlowMatchEulerDiscreteScheduler(shift=2.0, invert_sigmas=True)
    d = Denoiser(pipe, num_steps=STEPS, call=CALL["sd3"])
    x = noise(d)

    assert list(d.sigmas) == sorted(d.sigmas, reverse=True)
    assert d.sigmas[-1] == 0.0
    own = own_call(pipe, "sd3", latents=x, output_type="latent")
    torch.testing.assert_close(euler(d, x), own, rtol=1e-5, atol=1e-5)


def test_probe_reports_the_shipped_table() -> None:
    wan, flux = denoiser("wan"), denoiser("flux")

    assert wan.probe.latent_shape == (4, 2, 4, 4)
    assert flux.probe.latent_shape == (16, 16)
    for d in (wan, flux):
        scheduler = copy.deepcopy(d.pipe.scheduler)
        own_call(d.pipe, "wan" if d is wan else "flux", output_type="latent")
        assert d.probe.sigmas == tuple(d.pipe.scheduler.sigmas.tolist())
        assert d.probe.timesteps == tuple(float(t) for t in d.pipe.scheduler.timesteps)
        d.pipe.scheduler = scheduler
    # UniPC rounds its timesteps down to integers, so they are not 1000 sigma and have to be replayed as they are.
    assert all(t == int(1000 * s) for t, s in zip(wan.probe.timesteps, wan.sigmas))


@pytest.mark.parametrize("key", ["sd3", "wan"])
def test_bound_tables_keep_the_timesteps_of_their_sigmas(key: str) -> None:
    d = denoiser(key, num_steps=5, variant="direct")
    x, own = noise(d), d.sigmas
    with torch.no_grad():
        expected = d.velocity(x, 3, PROMPTS)
        d.bind([own[0], own[3], 0.0])
        assert torch.equal(d.velocity(x, 1, PROMPTS), expected)

        seen: list[torch.Tensor] = []
        handle = d.pipe.transformer.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["timestep"]), with_kwargs=True
        )
        between = (own[2] + own[3]) / 2
        d.bind([0.95, between, 0.0])
        d.velocity(x, 1, PROMPTS)
        handle.remove()
    assert all((t - 1000 * between).abs().max() <= (1.0 if key == "wan" else 1e-3) for t in seen)
    assert seen
    d.bind(own)
    with torch.no_grad():
        assert torch.equal(d.velocity(x, 3, PROMPTS), expected)


@pytest.mark.parametrize("sigmas", [[0.5, 0.7, 0.0], [1.0, 0.5], [1.0, 0.5, 0.5, 0.0], [1.5, 0.0], [0.0]])
def test_bind_refuses_what_is_no_table(sigmas: list[float]) -> None:
    with pytest.raises(ValueError, match="falling strictly from at most 1 to 0"):
        denoiser("sd3", sigmas=sigmas)


def test_initial_noise_of_a_sample_is_its_generators_alone() -> None:
    d = denoiser("qwenimage")
    both = noise(d)
    (second,) = d.initial_noise([torch.Generator().manual_seed(1)])

    assert both.shape == (2, 16, 16)
    assert both.dtype == torch.float32
    assert torch.equal(both[1], second)
    assert not torch.equal(both[0], both[1])
    many = d.initial_noise([torch.Generator().manual_seed(k) for k in range(64)])
    assert abs(many.mean()) < 0.03
    assert abs(many.std() - 1) < 0.03


class IgnoresLatents(StableDiffusion3Pipeline):
    def __call__(self, *args: Any, latents: Any = None, **kwargs: Any) -> Any:
        return StableDiffusion3Pipeline.__call__.__wrapped__(self, *args, **kwargs)


class RefusesFewSteps(StableDiffusion3Pipeline):
    def __call__(self, *args: Any, num_inference_steps: int, **kwargs: Any) -> Any:
        # As in a schedule made of four parts, each of this many steps.
        assert 1 / (num_inference_steps // 4) > 0
        kwargs["num_inference_steps"] = num_inference_steps
        return StableDiffusion3Pipeline.__call__.__wrapped__(self, *args, **kwargs)


def as_class(cls: type) -> Any:
    pipe = TINY["sd3"]()
    pipe.__class__ = cls
    return pipe


def test_ignored_latents_are_noticed_and_injected() -> None:
    pipe = as_class(IgnoresLatents)
    d = Denoiser(pipe, num_steps=STEPS, call=CALL["sd3"])
    plain = denoiser("sd3")
    x = noise(d)

    assert d.self_check(PROMPTS) == "inject"
    assert torch.equal(d.velocity(x, 1, PROMPTS), plain.velocity(x, 1, PROMPTS))
    assert torch.equal(d.decode(x, PROMPTS), plain.decode(x, PROMPTS))
    with pytest.raises(RuntimeError, match="not the one supplied"):
        Denoiser(pipe, num_steps=STEPS, call=CALL["sd3"], variant="direct").velocity(x, 1, PROMPTS)
    with pytest.raises(RuntimeError, match=r"(?s)IgnoresLatents cannot evaluate.*\n  direct: step 1: PipelineError"):
        Denoiser(pipe, num_steps=STEPS, call=CALL["sd3"], variant="direct").self_check(PROMPTS)


def test_dependence_on_the_number_of_steps_needs_slice() -> None:
    d = Denoiser(as_class(RefusesFewSteps), num_steps=4, call=CALL["sd3"])
    x = noise(d)

    assert d.self_check(PROMPTS) == "slice"
    assert torch.equal(d.decode(x, PROMPTS), denoiser("sd3").decode(x, PROMPTS))
    with pytest.raises(ValueError, match="only with the pipeline's own table"):
        d.bind([1.0, 0.5, 0.0])


class RefusesOneStep(StableDiffusion3Pipeline):
    def __call__(self, *args: Any, num_inference_steps: int, **kwargs: Any) -> Any:
        # As in Mochi's schedule, whose two halves each have this many steps.
        assert 1 / (num_inference_steps // 2) > 0
        kwargs["num_inference_steps"] = num_inference_steps
        return StableDiffusion3Pipeline.__call__.__wrapped__(self, *args, **kwargs)


def test_two_steps_where_one_is_refused_still_take_any_table() -> None:
    d = Denoiser(as_class(RefusesOneStep), num_steps=4, call=CALL["sd3"])
    x = noise(d)

    assert d.self_check(PROMPTS) == "relay"
    d.bind([1.0, 0.4, 0.0])
    plain = denoiser("sd3", num_steps=4, sigmas=[1.0, 0.4, 0.0], variant="direct")
    assert torch.equal(d.velocity(x, 1, PROMPTS), plain.velocity(x, 1, PROMPTS))
    assert torch.equal(d.decode(x, PROMPTS), plain.decode(x, PROMPTS))


def test_dependence_on_the_step_index_needs_fast_forward() -> None:
    # One layer is skipped in guidance at step 2 of 4, and at no other.
    skip = {"skip_guidance_layers": [0], "skip_layer_guidance_start": 0.3, "skip_layer_guidance_stop": 0.6}
    d = denoiser("sd3", num_steps=4, call={**CALL["sd3"], **skip})
    plain = denoiser("sd3", num_steps=4)
    x = noise(d)
    ours, theirs = ([each.velocity(x, i, PROMPTS) for i in range(4)] for each in (d, plain))

    assert d.variant == "fast_forward"
    assert [torch.equal(a, b) for a, b in zip(ours, theirs)] == [True, True, False, True]
    assert ours[2].requires_grad
    with pytest.raises(ValueError, match="only with the pipeline's own table"):
        denoiser("sd3", num_steps=4, call={**CALL["sd3"], **skip}, sigmas=[1.0, 0.5, 0.0]).self_check(PROMPTS)


def test_a_prediction_that_remembers_is_refused_by_name() -> None:
    pipe = TINY["sd3"]()
    calls: list[int] = []

    def remember(module: Any, args: Any, output: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        calls.append(0)
        return (output[0] + 0.01 * len(calls),)

    pipe.transformer.register_forward_hook(remember)
    with pytest.raises(RuntimeError, match="max error") as caught:
        Denoiser(pipe, num_steps=STEPS, call=CALL["sd3"]).self_check(PROMPTS)

    assert "StableDiffusion3Pipeline" in str(caught.value)
    assert all(f"\n  {variant}: step 0: max error" in str(caught.value) for variant in VARIANTS)


def test_the_pipeline_is_left_as_it_was() -> None:
    pipe = TINY["sd3"]()
    before, config = dict(pipe.__dict__), dict(pipe.config)
    table = pipe.scheduler.timesteps.clone()
    for variant in VARIANTS:
        d = Denoiser(pipe, num_steps=STEPS, call=CALL["sd3"], variant=variant)
        d.self_check(PROMPTS)
    pipe.transformer.context_embedder.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        d.velocity(noise(d), 1, PROMPTS)

    assert all(pipe.__dict__[name] is value for name, value in before.items())
    assert {"prepare_latents", "encode_prompt"}.isdisjoint(pipe.__dict__)
    assert "forward" not in pipe.transformer.__dict__
    assert dict(pipe.config) == config
    assert torch.equal(pipe.scheduler.timesteps, table)


def test_recorder_keeps_the_contract_of_a_scheduler() -> None:
    shipped = FlowMatchEulerDiscreteScheduler(shift=3.0, num_train_timesteps=500)
    recorder = Recorder(shipped)
    seen: list[torch.Tensor] = []
    sample, prediction = torch.zeros(1, 2, 4, dtype=torch.bfloat16), torch.ones(1, 2, 4)

    def hook(index: int, prediction: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        seen.append(prediction)
        return sample.float() + 1 / 3

    recorder.arm(hook, table=Schedule(torch.tensor([0.7, 0.0]), torch.tensor([123.0])))
    recorder.set_timesteps(sigmas=[1.0, 0.5], mu=0.3, novelty=1)
    as_tuple = recorder.step(prediction, 123.0, sample, return_dict=False, novelty=1)[0]
    as_output = recorder.step(prediction, 123.0, sample, per_token_timesteps=torch.ones(1, 2)).prev_sample

    assert recorder.timesteps.tolist() == [123.0]
    assert recorder.config.num_train_timesteps == 500
    # The next state is as wide as the prediction, and it is never narrower than the state.
    assert as_tuple.dtype == as_output.dtype == torch.float32
    assert recorder.step(prediction.bfloat16(), 123.0, sample).prev_sample.dtype == torch.bfloat16
    assert recorder.step(prediction.bfloat16(), 123.0, sample.float()).prev_sample.dtype == torch.float32
    assert torch.equal(seen[0], prediction)
    assert recorder.taken == 4
    assert copy.deepcopy(recorder) is recorder
    assert recorder.scale_model_input(sample, 1) is sample

    # Euler's own step, in the mode where sigma differs between tokens, goes x + (sigma - sigma') * model_output.
    shipped.set_timesteps(2)
    tokens = shipped.timesteps[0].expand(1, 2)
    stepped = shipped.step(prediction, shipped.timesteps[0], torch.zeros(1, 2, 4), per_token_timesteps=tokens)
    change = (shipped.sigmas[1] - shipped.sigmas[0]) * seen[1]
    torch.testing.assert_close(stepped.prev_sample, change)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"call": {"heigth": 16}}, "no argument 'heigth'.*did you mean 'height'"),
        ({"call": {"latents": None}}, "'latents'.*remove it"),
        ({"call": {"num_images_per_prompt": 2}}, "'num_images_per_prompt'.*remove it"),
        ({"call": {"sigmas": [1.0]}}, "before the shift"),
        ({"variant": "fastest"}, "'fastest'; use one of auto, direct"),
        ({"num_steps": 0}, "num_steps is 0"),
    ],
)
def test_arguments_that_do_not_fit_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        denoiser("sd3", **options)


def test_states_that_do_not_fit_are_named() -> None:
    d = denoiser("sd3", variant="direct")
    x = noise(d)
    with pytest.raises(ValueError, match=r"\[N, 4, 8, 8\], got torch.float32 \(2, 4, 4, 8\)"):
        d.velocity(x[:, :, :4], 0, PROMPTS)
    with pytest.raises(ValueError, match="2 states but there are 1 prompts"):
        d.velocity(x, 0, PROMPTS[:1])
    with pytest.raises(ValueError, match="give a list of texts"):
        d.velocity(x[:1], 0, "a star")
    with pytest.raises(ValueError, match="steps 0 to 2"):
        d.velocity(x, 3, PROMPTS)
    with pytest.raises(RuntimeError, match="not finite"):
        d.velocity(torch.full_like(x, torch.nan), 0, PROMPTS)


@pytest.mark.parametrize("video", [False, True])
def test_pictures_with_an_opacity_are_laid_on_white(video: bool) -> None:
    pixels = torch.tensor([[0.2, 0.4, 0.6, 0.0], [0.2, 0.4, 0.6, 0.5], [0.2, 0.4, 0.6, 1.0]])
    images = pixels[:, None, :, None, None] if video else pixels[:, :, None, None]
    found = stacked(images, 3)
    assert found.shape == ((3, 1, 3, 1, 1) if video else (3, 3, 1, 1))
    expected = torch.tensor([[1.0, 1.0, 1.0], [0.6, 0.7, 0.8], [0.2, 0.4, 0.6]])
    assert torch.allclose(found.reshape(3, 3), expected, atol=1e-7)
    assert torch.equal(stacked(list(images[..., :3, :, :]), 3), images[..., :3, :, :])
