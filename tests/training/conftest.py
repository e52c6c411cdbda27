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
    build_pipeline(vae, folder, BuildSettings()).save_pretrained(folder)
    (folder / "flowgrpo.json").write_text(json.dumps({"call": CALL}))
    return folder


@pytest.fixture(scope="session")
def small(random_pipeline: Path) -> list[str]:
    """Overrides that make the default recipe run in seconds on the random pipeline."""
    return [
        f"model.path={random_pipeline}",
        "model.release_text_encoders=false",
        "sampler.steps=4",
        "sampler.window={kind: progressive, size: 2, stride: 1, interval: 1, start: 0, stop: 3}",
        "rollout={prompts: 2, group: 3, batch: 6, decode_batch: 6}",
        "rewards=[{name: gold, options: {dense: true}, label: dense}, {name: jpeg_compressibility, weight: 0.1}]",
        "evaluate.every=2",
        "evaluate.prompts=3",
        "run={iterations: 4, checkpoint_every: 1, sample_every: 2, seed: 0}",
    ]


@pytest.fixture
def recipe(small: list[str]) -> Recipe:
    return load_recipe("default", small)


@pytest.fixture
def small_text(random_language_folder: Path, tmp_path: Path) -> list[str]:
    """Overrides that make the recipe for text run in seconds on the random language model."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def nines(completions, prompts, **columns):\n"
        "    return [text.count('9') - 0.1 * len(text) for text in completions]\n"
    )
    return [
        f"model.path={random_language_folder}", f"rewards=[{{name: '{reward}:nines'}}]",
        "rollout={prompts: 3, group: 4, batch: 8, tokens: 60}", "generation.max_tokens=6", "model.train=lora",
        "evaluate={every: 2, prompts: 5}", "run={iterations: 4, checkpoint_every: 1, sample_every: 2}",
        "optimizer.learning_rate=0.01",
    ]  # fmt: skip
