"""Estimates for the U-Nets of Stable Diffusion and SDXL, from the folders of small pipelines and by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from flowgrpo.configs.image_recipe import ModelConfig
from flowgrpo.estimate.estimates import estimate
from flowgrpo.estimate.models import Model, model_of
from flowgrpo.pipelines.conformance.conform import TINY
from tests.estimate.test_estimates import recipe

pytestmark = pytest.mark.slow

CALL = {"height": 16, "width": 16, "guidance_scale": 5.0}
CLASSES = ["StableDiffusionPipeline", "StableDiffusionXLPipeline"]


def folder_of(name: str, tmp_path: Path) -> tuple[Any, Path]:
    pipe = TINY[name].fresh()
    pipe.save_pretrained(tmp_path / name)
    return pipe, tmp_path / name


def found(folder: Path, **call: Any) -> Model:
    lora: Any = {"rank": 4, "alpha": 8.0}
    return model_of(ModelConfig(path=str(folder), call={**CALL, **call}, lora=lora))


def numbers(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", CLASSES)
def test_numbers_are_those_of_the_pipeline(name: str, tmp_path: Path) -> None:
    pipe, folder = folder_of(name, tmp_path)
    model = found(folder)
    assert model.denoiser == 4 * numbers(pipe.unet)
    assert model.vae == 4 * numbers(pipe.vae)
    # A rank-4 pair for each projection of the attention: 4 · (in + out).
    layers = {key: part for key, part in pipe.unet.named_modules() if isinstance(part, nn.Linear)}
    adapted = [part for key, part in layers.items() if key.endswith(("to_q", "to_k", "to_v", "to_out.0"))]
    assert len(adapted) == {"StableDiffusionPipeline": 8 * 4, "StableDiffusionXLPipeline": 8 * (2 + 2 * 2 + 2)}[name]
    assert model.trained == sum(4 * (part.in_features + part.out_features) for part in adapted)
    scale = 2 ** (len(pipe.vae.config.block_out_channels) - 1)
    assert model.elements == math.prod((4, 16 // scale, 16 // scale))
    # Guided and unguided go through the network in one call of two rows.
    assert (model.branches, model.rows) == (2, 2)
    assert found(folder, guidance_scale=1.0).branches == 1


def test_prompts_are_77_tokens_and_of_sdxl_a_pooled_embedding(tmp_path: Path) -> None:
    for name, size in (("StableDiffusionPipeline", 77 * 16), ("StableDiffusionXLPipeline", 77 * 32 + 16)):
        assert found(folder_of(name, tmp_path)[1]).prompt_bytes == 2 * 4 * size


def test_training_holds_the_activations_of_both_predictions(tmp_path: Path) -> None:
    _, folder = folder_of("StableDiffusionPipeline", tmp_path)
    made = recipe(model={"path": str(folder), "call": CALL})
    cost, rollout = model_of(made.model).evaluation, made.rollout
    plain = estimate(made).passing
    assert plain["sampling"] == rollout.batch * 2 * cost.working
    assert plain["training"] == rollout.batch * 2 * (cost.saved + cost.working)
    less = estimate(recipe(model={"path": str(folder), "call": CALL, "gradient_checkpointing": True})).passing
    assert less["training"] == rollout.batch * 2 * (cost.kept + cost.block + cost.working) < plain["training"]


def test_a_unet_with_other_inputs_is_refused(tmp_path: Path) -> None:
    _, folder = folder_of("StableDiffusionPipeline", tmp_path)
    config = folder / "unet" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "class_embed_type": "timestep"}))
    with pytest.raises(ValueError, match=r"from the inputs of Stable Diffusion and SDXL .*class_embed_type 'timestep'"):
        found(folder)
