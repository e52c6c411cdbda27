"""Pipelines whose guidance is in a component of its own, a guider."""

from typing import Any

import diffusers
import pytest
import torch

from flowgrpo.pipelines.conformance.conform import TINY
from flowgrpo.pipelines.conformance.videos import hunyuan_video15_parts
from flowgrpo.pipelines.denoiser import Denoiser

pytestmark = pytest.mark.slow

PROMPTS = ["a red circle", "a blue square"]
STEPS = 4


def checked(name: str, **changes: Any) -> tuple[str, list[int]]:
    """The way of evaluation of a tiny pipeline with other components, and the calls of its denoiser in each step."""
    tiny = TINY[name]
    pipe = tiny.fresh()
    pipe.register_modules(**changes)
    if tiny.adjust is not None:
        tiny.adjust(pipe)
    denoiser = Denoiser(pipe, num_steps=STEPS, call=dict(tiny.call))
    variant = denoiser.self_check(PROMPTS)
    x, counts, calls = torch.randn(2, *denoiser.probe.latent_shape), list[int](), list[int]()
    pipe.transformer.register_forward_pre_hook(lambda module, args: calls.append(1))
    for step in range(STEPS):
        calls.clear()
        denoiser.velocity(x, step, PROMPTS)
        counts.append(len(calls))
    return variant, counts


@pytest.mark.parametrize("name", ["HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline"])
@pytest.mark.parametrize(
    ("settings", "variant", "calls"),
    [
        ({}, "direct", [2, 2, 2, 2]),
        ({"guidance_scale": 1.0}, "direct", [1, 1, 1, 1]),
        ({"enabled": False}, "direct", [1, 1, 1, 1]),
        ({"stop": 0.5}, "fast_forward", [2, 2, 1, 1]),
        ({"start": 0.5}, "fast_forward", [1, 1, 2, 2]),
    ],
)
def test_a_guider_decides_in_each_step_whether_it_guides(
    name: str, settings: dict[str, Any], variant: str, calls: list[int]
) -> None:
    """The self-check compares with the pipeline's own loop, in which some steps are not guided."""
    guider = diffusers.ClassifierFreeGuidance(**{"guidance_scale": 4.0, **settings})
    assert checked(name, guider=guider) == (variant, calls)


def test_a_guider_of_hunyuan_image_may_stop_early() -> None:
    """Its second guider is for prompts with a text to be written."""
    settings = {"guidance_scale": 3.0, "adaptive_projected_guidance_momentum": None, "stop": 0.5}
    guiders = {name: diffusers.AdaptiveProjectedMixGuidance(**settings) for name in ("guider", "ocr_guider")}
    assert checked("HunyuanImagePipeline", **guiders) == ("fast_forward", [2, 2, 1, 1])


def test_a_model_that_sees_the_next_noise_level_is_evaluated_in_its_whole_loop() -> None:
    transformer = hunyuan_video15_parts(task_type="i2v", image_embed_dim=16, use_meanflow=True)["transformer"]
    found = checked("HunyuanVideo15ImageToVideoPipeline", transformer=transformer)
    assert found == ("fast_forward", [2, 2, 2, 2])
