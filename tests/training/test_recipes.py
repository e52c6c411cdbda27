"""Every recipe of the package runs on a small random pipeline, and starts from ratios of exactly 1."""

import json
from pathlib import Path

import pytest

from flowgrpo.configs.load import load_recipe, recipe_names
from flowgrpo.training.bench import Silent
from flowgrpo.training.session import start


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_trains_from_ratios_of_exactly_one(name: str, random_pipeline: Path, tmp_path: Path) -> None:
    overrides = [
        f"model.path={random_pipeline}",
        "rollout.prompts=2",
        "rewards=[{name: jpeg_compressibility}]",
        "evaluate={every: 1, prompts: 1}",
        "run.iterations=1",
    ]
    start(load_recipe(name, overrides), tmp_path / "run").trainer(Silent()).train()
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["ratio/first_error"] == 0.0
    assert first["degenerate_groups"] < 1.0
    assert first["grad_norm"] > 0.0
    assert (tmp_path / "run" / "lora" / "pytorch_lora_weights.safetensors").is_file()
