"""Language models with a frozen base in 4 bits: exact ratios, resuming to the bit, inference, and merging."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.inference.evaluation import evaluate_model
from flowgrpo.inference.exporting import export_weights
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.session import Session, start
from flowgrpo.weights.adapters import adapter_layers
from flowgrpo.weights.quantized import is_packed

NF4 = (
    "model.dtype=bfloat16",
    "model.quantize=nf4",
    "penalties=[{name: kl, weight: 0.05}]",
    "optimizer.schedule=constant",
)


def lines(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in found]


@pytest.mark.slow
def test_a_language_model_in_4_bits_resumes_and_is_evaluated_and_merged(small_text: list[str], tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    words = [*small_text, *NF4]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    trainer = start(load_recipe("text", words), whole).trainer(Silent())
    model = trainer.task.weights.pipe.model
    adapted = [layer.get_base_layer() for layer in adapter_layers({"model": model})]
    assert adapted
    assert all(is_packed(layer) and layer.weight.dtype == torch.uint8 for layer in adapted)
    assert type(model.get_output_embeddings()) is torch.nn.Linear
    assert all(p.dtype == torch.float32 for p in trainer.task.weights.parameters())
    trainer.train()
    assert lines(whole)[0]["ratio/first_error"] == 0
    start(load_recipe("text", [*words, "run.iterations=2"]), broken).trainer(Silent()).train()
    for file in (broken / "lora").iterdir():
        file.unlink()
    (broken / "lora").rmdir()
    again = Session(load_recipe("text", words), RunFolder(broken)).trainer(Silent())
    again.resume()
    again.train()
    assert lines(whole) == lines(broken)
    one, two = (load_file(run / "lora" / "adapter_model.safetensors") for run in (whole, broken))
    assert all(torch.equal(one[name], two[name]) for name in one)
    found = evaluate_model(str(whole), load_recipe(whole / "config.yaml"))
    assert found["nines"][0] == pytest.approx(lines(whole)[-1]["eval/nines"])
    export_weights(str(whole), tmp_path / "merged", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert {p.dtype for p in merged.parameters()} <= {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float8", "int8"])
def test_a_language_model_in_8_bits_trains_from_a_ratio_of_1(kind: str, small_text: list[str], tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    words = [*small_text, *NF4, f"model.quantize={kind}", "run.iterations=1"]
    start(load_recipe("text", words), tmp_path / "run").trainer(Silent()).train()
    assert lines(tmp_path / "run")[0]["ratio/first_error"] == 0
    assert lines(tmp_path / "run")[0]["grad_norm"] > 0


@pytest.mark.slow
def test_a_masked_language_model_in_4_bits_trains(small_text: list[str], tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    words = [
        "rollout={prompts: 2, group: 8, batch: 8}",
        "evaluate.prompts=2",
        "run.iterations=1",
        "model.train=lora",
        *NF4[:2],
    ]
    trainer = Session(
        load_recipe("masked", [*words, "generation.tokens=8", "sampler.steps=4"]),
        RunFolder.create(tmp_path / "run", ""),
    ).trainer(Silent())
    assert any(map(is_packed, trainer.task.weights.pipe.model.modules()))
    trainer.train()
    [line, _] = lines(tmp_path / "run")
    assert line["ratio/first_error"] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.quantize=nf4"], "write dtype: bfloat16"),
        (["model.quantize=nf4", "model.dtype=bfloat16", "model.train=full"], "use train: lora"),
        (["model.quantize=nf4", "model.dtype=bfloat16", "model.path=arithmetic:untrained"], "leave quantize out"),
        (["model.quantize=nf4", "model.dtype=bfloat16", "generation.engine=vllm"], "generation.engine vllm gets whole"),
        (["model.quantize=int4", "model.dtype=bfloat16"], "nf4"),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load_recipe("text", ["model.train=lora", *words])
