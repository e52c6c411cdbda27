"""A scenes pipeline with random weights, and recipes small enough for a test."""

import json
from pathlib import Path

import pytest
import torch

from flowgrpo.configs.load import load_recipe
from flowgrpo.configs.schema import Recipe
from flowgrpo.pipelines.scenes import CALL, BuildSettings, build_pipeline, build_vae


@pytest.fixture(scope="session")
def random_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "pipeline"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        vae = build_vae()
    vae.register_to_config(scaling_factor=1.0, shift_factor=0.0)
    pipeline = build_pipeline(vae, folder, BuildSettings())
    # Half the layers and a quarter of the width: most of a short run's time is spent in the denoiser.
    less = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "caption_projection_dim": 32}
    pipeline.register_modules(transformer=type(pipeline.transformer).from_config(pipeline.transformer.config, **less))
    pipeline.save_pretrained(folder)
    (folder / "flowgrpo.json").write_text(json.dumps({"call": CALL}))
    return folder


@pytest.fixture(scope="session")
def small(random_pipeline: Path) -> list[str]:
    """Overrides that make the default recipe run in seconds on the random pipeline."""
    return [
        f"model.path={random_pipeline}",
        "model.release_text_encoders=false",
        "sampler.steps=4",
        "sampler.plan.window={name: progressive, size: 2, stride: 1, interval: 1, start: 0, stop: 3}",
        "rollout={prompts: 2, group: 3, batch: 6, decode_batch: 6}",
        "rewards=[{name: gold, options: {dense: true}, label: dense}, {name: jpeg_compressibility, weight: 0.1}]",
        "evaluate.every=2",
        "evaluate.prompts=3",
        "run={iterations: 4, checkpoint_every: 1, sample_every: 2, seed: 0}",
    ]


@pytest.fixture
def recipe(small: list[str]) -> Recipe:
    return load_recipe("default", small)
