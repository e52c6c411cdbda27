"""Recipes that quantise or compile the denoiser: whole runs, with ratios of exactly 1 before an update."""

import functools
import json
from pathlib import Path

import pytest
import torch

from flowgrpo.bench.measures import Silent, flow_task
from flowgrpo.configs.load import load_image_recipe
from flowgrpo.pipelines.acceleration import compile_blocks
from flowgrpo.training import session
from flowgrpo.training.model_paths import load_pipeline


def _run(words: list[str], folder: Path) -> list[dict]:
    trainer = session.start(load_image_recipe("mixgrpo_flash_guard", words), folder).trainer(Silent())
    trainer.train()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _exact(records: list[dict]) -> bool:
    stepped = [stats for record in records for stats in record.get("steps", {}).values()]
    return bool(stepped) and all(stats["log_ratio_mean"] == 0 == stats["log_ratio_var"] for stats in stepped)


LIBRARIES = {"float8": "torchao.utils", "int8": "torchao.utils", "nf4": "bitsandbytes"}


@pytest.mark.parametrize("kind", LIBRARIES)
def test_a_quantised_base_trains_and_its_lora_loads_on_the_plain_pipeline(
    kind: str, small: list[str], tmp_path: Path, random_pipeline: Path
) -> None:
    library = pytest.importorskip(LIBRARIES[kind])
    words = [*small, "model.dtype=bfloat16", f"model.quantize={kind}", "run.iterations=2"]
    trainer = session.start(load_image_recipe("mixgrpo_flash_guard", words), tmp_path / "run").trainer(Silent())
    transformer = flow_task(trainer).policy.denoiser.pipe.transformer
    weight = transformer.transformer_blocks[0].attn.to_q.base_layer.weight
    assert isinstance(weight, library.nn.Params4bit if kind == "nf4" else library.TorchAOBaseTensor)
    assert not weight.requires_grad
    trainer.train()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert _exact([json.loads(line) for line in lines])
    pipe = load_pipeline(str(random_pipeline), torch.float32)
    pipe.load_lora_weights(tmp_path / "run" / "lora")
    assert pipe.get_active_adapters() == ["default_0"]


def test_a_compiled_run_has_exact_ratios_and_nearly_the_rewards_of_a_plain_one(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The default compiler takes a minute here; what the run needs of it is in tests/pipelines/test_acceleration.py.
    monkeypatch.setattr(session, "compile_blocks", functools.partial(compile_blocks, backend="aot_eager"))
    plain = _run([*small, "run.iterations=2"], tmp_path / "plain")
    compiled = _run([*small, "run.iterations=2", "model.compile=true"], tmp_path / "compiled")
    assert _exact(compiled)
    assert [r["reward/total"] for r in compiled[:2]] == pytest.approx([r["reward/total"] for r in plain[:2]], abs=1e-3)


def test_a_backend_of_another_model_is_refused_before_anything_is_sampled(small: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.attention|choice of backend"):
        _run([*small, "model.attention=sage"], tmp_path / "run")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.quantize=float8"], "dtype: bfloat16"),
        (["model.quantize=float8", "model.dtype=bfloat16", "model.train=full"], "train: lora"),
        (["model.quantize=int4"], "nf4"),
    ],
)
def test_quantised_weights_are_frozen_and_computed_in_bfloat16(words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_image_recipe("mixgrpo_flash_guard", words)
