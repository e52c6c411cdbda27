"""A run of a pipeline that predicts noise: from ratios of exactly 1 to a LoRA that plain diffusers loads."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.pipelines.conformance.conform import TINY
from flowgrpo.training.session import start


@pytest.mark.slow
def test_stable_diffusion_trains_with_ddim(tmp_path: Path) -> None:
    pipe = TINY["StableDiffusionPipeline"].fresh()
    pipe.save_pretrained(tmp_path / "model")
    recipe = load_recipe(
        "dance_grpo",
        [
            f"model.path={tmp_path / 'model'}", "model.call={height: 16, width: 16, guidance_scale: 5.0}",
            "sampler={kernel: {name: ddim, eta: 1.0}, steps: 5, plan: {window: {size: 2}}}",
            "rollout={prompts: 2, group: 4}", "rewards=[{name: jpeg_compressibility}]",
            "evaluate={every: 2, prompts: 1, steps: null}",
            "run={iterations: 2}", "optimizer={learning_rate: 0.01}",
        ],
    )  # fmt: skip
    start(recipe, tmp_path / "run").trainer(Silent()).train()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["ratio/first_error"] for line in lines[:2]] == [0.0, 0.0]
    assert all(line["grad_norm"] > 0.0 for line in lines[:2])

    def latents() -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        made: torch.Tensor = pipe("a star", height=16, width=16, num_inference_steps=3, generator=generator,
                                  output_type="latent")[0]  # fmt: skip
        return made

    assert isinstance(pipe, StableDiffusionPipeline)
    before = latents()
    pipe.load_lora_weights(tmp_path / "run" / "lora")
    assert not torch.equal(latents(), before)
