"""A LoRA that is added into the weights is a whole model, which plain libraries load and which does the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.inference.evaluation import evaluate_model
from flowgrpo.inference.exporting import export_weights
from flowgrpo.inference.image_samples import model_images
from flowgrpo.inference.text_inference import open_weights, recipe_of
from flowgrpo.training.session import start
from flowgrpo.weights.trained import trainable_modules
from tests.conftest import Command
from tests.training.family_runs import load_as_the_kit_does, trained

pytestmark = pytest.mark.slow

LEFT_OUT: dict[str, Any] = {"text_encoder_3": None, "tokenizer_3": None}
RATE = "optimizer={learning_rate: 0.05, ema: {decay: 0.5, every: 1}}"


def without_adapters(folder: Path) -> bool:
    return not [file for file in folder.rglob("*") if "lora" in file.name or "adapter" in file.name]


@pytest.mark.parametrize("name", ["FluxPipeline", "WanPipeline, 2.2 with two experts", "StableDiffusionXLPipeline"])
def test_a_merged_pipeline_makes_the_images_of_the_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_as_the_kit_does(name, monkeypatch)
    run = trained(name, tmp_path, "lora", RATE)
    merged = tmp_path / "merged"
    export_weights(str(run), merged, merge=True)
    assert without_adapters(merged)
    own = load_recipe(run / "config.yaml")
    words = [
        f"model.call={dict(own.model.call)}", f"rollout.batch={own.rollout.batch}",
        f"rollout.decode_batch={own.rollout.decode_batch}", f"sampler.steps={own.sampler.steps}",
    ]  # fmt: skip
    prompts, noises = ["a red circle", "a blue star"], [3, 4]
    whole = model_images(str(merged), prompts, noises, words)
    torch.testing.assert_close(whole, model_images(str(run), prompts, noises), rtol=0, atol=2e-3)
    base = model_images(str(own.model.path), prompts, noises, words)
    assert (whole - base).abs().max() > 0.05
    card = (merged / "README.md").read_text()
    assert ", here added into the weights, computed in float32" in card
    assert "load_lora_weights" not in card


def test_plain_diffusers_loads_a_merged_pipeline_of_a_checkpoint(random_pipeline: Path, tmp_path: Path) -> None:
    words = [
        f"model.path={random_pipeline}", "rollout={prompts: 2, group: 2, batch: 4}", RATE, "sampler.steps=6",
        "run={iterations: 2, checkpoint_every: 1, keep: 3}", "data.heldout=null",
        "rewards=[{name: jpeg_compressibility}]", "evaluate={}", "model.lora.targets=[to_q, to_v]",
    ]  # fmt: skip
    run = tmp_path / "run"
    start(load_recipe("mixgrpo", words), run).trainer(Silent()).train()
    for number in ("1", "2"):
        export_weights(str(run), tmp_path / number, checkpoint=number, merge=True)
    export_weights(str(run), tmp_path / "last", merge=True)

    def weights(folder: Path) -> dict[str, torch.Tensor]:
        [(_, module)] = trainable_modules(DiffusionPipeline.from_pretrained(folder, **LEFT_OUT)).items()
        return {name: value.detach() for name, value in module.named_parameters()}

    base, one, two, last = (
        weights(folder) for folder in (random_pipeline, *(tmp_path / k for k in ("1", "2", "last")))
    )
    assert base.keys() == one.keys() == two.keys()
    changed = {name for name in base if not torch.equal(base[name], two[name])}
    assert changed
    assert all(name.endswith(("to_q.weight", "to_v.weight")) for name in changed)
    assert all(torch.equal(two[name], last[name]) for name in base)
    assert any(not torch.equal(one[name], two[name]) for name in base)


@pytest.mark.parametrize("task", ["text", "masked"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merged_language_model_gives_the_logits_of_the_run(
    task: str, dtype: str, small_text: list[str], tmp_path: Path
) -> None:
    small = small_text if task == "text" else ["rollout={prompts: 2, group: 2, batch: 8}", "run.iterations=1"]
    run, merged = tmp_path / "run", tmp_path / "merged"
    words = [*small, RATE, f"model.dtype={dtype}", "model.train=lora", "model.lora.compute=base"]
    start(load_recipe(task, words), run).trainer(Silent()).train()
    export_weights(str(run), merged, merge=True)
    assert without_adapters(merged)
    cls: Any = AutoModelForCausalLM if task == "text" else AutoModelForMaskedLM
    plain = cls.from_pretrained(merged, dtype=getattr(torch, dtype))
    ids = AutoTokenizer.from_pretrained(merged)("12+34=", return_tensors="pt").input_ids
    own = open_weights(str(run), recipe_of(str(run))).pipe.model
    with torch.no_grad():
        close = {"float32": 1e-4, "bfloat16": 0.1}[dtype]
        torch.testing.assert_close(plain(ids).logits, own(ids).logits, rtol=close, atol=close)
    found = evaluate_model(str(merged), load_recipe(run / "config.yaml"))
    assert found.keys() == evaluate_model(str(run), load_recipe(run / "config.yaml")).keys()


def test_the_command_merges_and_says_what_cannot_be_merged(
    small_text: list[str], tmp_path: Path, command: Command
) -> None:
    for train in ("lora", "full"):
        words = [*small_text, f"model.train={train}"]
        start(load_recipe("text", words), tmp_path / train).trainer(Silent()).train()
    status, output, errors = command("export", "lora", "--merge", "--out", "whole")
    assert (status, output, errors) == (0, "written to whole\n", "")
    assert (tmp_path / "whole" / "model.safetensors").is_file()
    status, _, errors = command("export", "full", "--merge", "--out", "again")
    assert status == 1
    assert "full has trained all weights, so there is no LoRA to merge; leave --merge out" in errors
    assert not (tmp_path / "again").exists()
