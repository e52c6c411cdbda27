"""Plain diffusers loads what was saved, and nothing is overwritten or half-written."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, WanPipeline
from torch import nn

from flowgrpo.pipelines.saving import new_folder
from flowgrpo.pipelines.weights import TrainedWeights, trainable_modules
from tests.pipelines.trained import KEYS, SPEC, output, perturb
from tests.tiny_pipelines import TINY


def two_experts() -> WanPipeline:
    wan = TINY["wan"]()
    other = copy.deepcopy(wan.transformer)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    return WanPipeline(**{**wan.components, "transformer_2": other}, boundary_ratio=0.9)


@pytest.mark.parametrize("key", KEYS)
def test_plain_diffusers_loads_the_saved_lora(key: str, tmp_path: Path) -> None:
    pipe = TINY[key]()
    original = output(pipe, key)
    weights = TrainedWeights.lora(pipe, SPEC, seed=0)
    perturb(weights)
    weights.save(tmp_path / "lora")
    assert [path.name for path in tmp_path.rglob("*.*")] == ["pytorch_lora_weights.safetensors"]

    fresh = TINY[key]()
    fresh.load_lora_weights(tmp_path / "lora")
    expected = output(pipe, key)
    assert (expected - original).abs().max() > 1e-2
    torch.testing.assert_close(output(fresh, key), expected, rtol=1e-6, atol=1e-6)


def test_both_experts_train_save_and_load(tmp_path: Path) -> None:
    pipe = two_experts()
    names = ("transformer", "transformer_2")
    assert tuple(trainable_modules(pipe)) == names
    weights = TrainedWeights.lora(pipe, SPEC, seed=0)
    perturb(weights)
    expected = {name: output(pipe, "wan", name) for name in names}
    weights.save(tmp_path / "lora")

    fresh = two_experts()
    fresh.load_lora_weights(tmp_path / "lora")
    second = "pytorch_lora_weights_transformer_2.safetensors"
    fresh.load_lora_weights(tmp_path / "lora", weight_name=second, load_into_transformer_2=True)
    for name in names:
        torch.testing.assert_close(output(fresh, "wan", name), expected[name], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(expected["transformer"], expected["transformer_2"])


def test_a_pipeline_class_without_lora_files_still_saves_its_adapter(tmp_path: Path) -> None:
    class Plain(DiffusionPipeline):
        def __init__(self, transformer: nn.Module) -> None:
            super().__init__()
            self.register_modules(transformer=transformer)

    pipe = Plain(TINY["sana"]().transformer)
    weights = TrainedWeights.lora(pipe, SPEC, seed=0)
    perturb(weights)
    weights.save(tmp_path / "lora")
    fresh = Plain(TINY["sana"]().transformer)
    file = "pytorch_lora_weights.safetensors"
    fresh.transformer.load_lora_adapter(tmp_path / "lora", weight_name=file, prefix=None)
    torch.testing.assert_close(output(fresh, "sana"), output(pipe, "sana"), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("key", KEYS)
def test_plain_diffusers_loads_the_saved_full_weights(key: str, tmp_path: Path) -> None:
    pipe = TINY[key]()
    original = output(pipe, key)
    weights = TrainedWeights.full(pipe)
    perturb(weights)
    weights.save(tmp_path / "full")
    fresh = type(pipe).from_pretrained(tmp_path / "full")
    assert torch.equal(output(fresh, key), output(pipe, key))
    assert not torch.equal(output(pipe, key), original)


def test_full_weights_of_a_pipeline_that_released_its_text_encoders(tmp_path: Path) -> None:
    pipe = TINY["sd3"]()
    pipe.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "single_file_checkpoint.safetensors").write_bytes(b"large")
    weights = TrainedWeights.full(pipe)
    perturb(weights)
    # Optional and required components alike.
    pipe.text_encoder = pipe.text_encoder_2 = pipe.text_encoder_3 = None

    weights.save(tmp_path / "alone")
    assert [path.name for path in (tmp_path / "alone").iterdir()] == ["transformer"]
    module = type(pipe.transformer).from_pretrained(tmp_path / "alone", subfolder="transformer")
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), pipe.transformer.parameters()))

    weights.save(tmp_path / "whole", source=tmp_path / "base")
    assert not (tmp_path / "whole" / "single_file_checkpoint.safetensors").exists()
    fresh, base = type(pipe).from_pretrained(tmp_path / "whole"), TINY["sd3"]()
    assert torch.equal(output(fresh, "sd3"), output(pipe, "sd3"))
    for name in ("text_encoder", "text_encoder_2", "text_encoder_3", "vae"):
        loaded, untrained = getattr(fresh, name).state_dict(), getattr(base, name).state_dict()
        assert all(torch.equal(loaded[key], tensor) for key, tensor in untrained.items())

    with pytest.raises(ValueError, match=r"alone has no model_index\.json"):
        weights.save(tmp_path / "other", source=tmp_path / "alone")
    (tmp_path / "base" / "vae").rename(tmp_path / "base" / "moved")
    with pytest.raises(ValueError, match="lacks vae"):
        weights.save(tmp_path / "other", source=tmp_path / "base")
    assert not (tmp_path / "other").exists()


def test_saving_never_overwrites_unasked_and_never_half_writes(tmp_path: Path) -> None:
    weights = TrainedWeights.lora(TINY["sana"](), SPEC, seed=0)
    folder = tmp_path / "deep" / "lora"
    weights.save(folder)
    file = folder / "pytorch_lora_weights.safetensors"
    old = file.read_bytes()
    perturb(weights)
    with pytest.raises(ValueError, match="overwrite=True"):
        weights.save(folder)
    assert file.read_bytes() == old
    with pytest.raises(FileNotFoundError), new_folder(folder, overwrite=True) as target:
        (target / "half").write_bytes(old + (target / "missing").read_bytes())
    assert file.read_bytes() == old
    (folder / "stale").write_text("of the old save")
    weights.save(folder, overwrite=True)
    assert file.read_bytes() != old
    assert [path.name for path in folder.iterdir()] == [file.name]
    assert [path.name for path in folder.parent.iterdir()] == ["lora"]
    with pytest.raises(ValueError, match="is a file"):
        weights.save(file, overwrite=True)
