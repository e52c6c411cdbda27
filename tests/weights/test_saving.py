"""Plain diffusers loads what was saved, and nothing is overwritten or half-written."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusion3Pipeline, WanPipeline
from safetensors.torch import load_file
from torch import Tensor, nn

from flowgrpo.pipelines.prompt_cache import PromptCache
from flowgrpo.weights.lora_layer import add_in_place
from flowgrpo.weights.saving import local_folder, new_folder
from flowgrpo.weights.trained import TrainedWeights, trainable_modules
from tests.pipelines.trained import KEYS, SPEC, output, perturb
from tests.tiny_pipelines import CALL, TINY

pytestmark = pytest.mark.slow


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
    for part in (*pipe.components.values(), *fresh.components.values()):
        if isinstance(part, nn.Module):
            part.requires_grad_(False)  # torch chooses kernels by this difference
    trained = pixels(pipe, key)
    # peft rounds a product more often than the layers of a run do, so a pixel may be rounded to its neighbour.
    apart = (pixels(fresh, key) - trained).abs()
    assert apart.max() <= 1
    assert apart.count_nonzero() <= 0.01 * apart.numel()
    for layer in fresh.transformer.modules():
        add_in_place(layer)
    assert torch.equal(pixels(fresh, key), trained)


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


@torch.no_grad()
def pixels(pipe: Any, key: str) -> Tensor:
    """What a plain call makes, as it is shown."""
    generators = [torch.Generator().manual_seed(k) for k in range(2)]
    texts = ["a red circle", "two stars"]
    made = pipe(prompt=texts, num_inference_steps=3, generator=generators, output_type="pt", **CALL[key])[0]
    found = (torch.stack(list(made)).float().clamp(0, 1) * 255).round()
    assert float(found.max() - found.min()) > 5
    return found


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("key", KEYS)
def test_plain_diffusers_makes_the_same_pixels_from_the_saved_full_weights(
    key: str, released: bool, tmp_path: Path
) -> None:
    TINY[key]().save_pretrained(tmp_path / "base")
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "base")
    untrained = pixels(pipe, key)
    weights = TrainedWeights.full(pipe, source=tmp_path / "base" if released else None)
    perturb(weights)
    trained = pixels(pipe, key)
    if released:
        with PromptCache(pipe, CALL[key]) as cache:
            cache.encode(["a red circle"])
            cache.release()
            weights.save(tmp_path / "full")
    else:
        weights.save(tmp_path / "full")
    fresh = DiffusionPipeline.from_pretrained(tmp_path / "full")
    assert torch.equal(pixels(fresh, key), trained)
    assert not torch.equal(trained, untrained)
    assert {name: type(part) for name, part in fresh.components.items()} == {
        name: type(part) for name, part in pipe.components.items()
    }


def test_components_that_the_source_leaves_out_stay_left_out(tmp_path: Path) -> None:
    """As Stable Diffusion 3 without T5, the embedded model among them; its class does not call them optional."""
    base = TINY["sd3"]()
    StableDiffusion3Pipeline(**{**base.components, "text_encoder_3": None, "tokenizer_3": None}).save_pretrained(
        tmp_path / "base"
    )
    (tmp_path / "base" / "flowgrpo.json").write_text('{"call": {}}')
    (tmp_path / "base" / "single_file_checkpoint.safetensors").write_bytes(b"large")
    absent = {"text_encoder_3": None, "tokenizer_3": None}
    pipe = StableDiffusion3Pipeline.from_pretrained(tmp_path / "base", **absent)
    for source in (None, tmp_path / "base"):
        weights = TrainedWeights.full(pipe, source=source)
        perturb(weights)
        folder = tmp_path / f"full-{source is not None}"
        weights.save(folder)
        fresh = StableDiffusion3Pipeline.from_pretrained(folder, **absent)
        assert torch.equal(pixels(fresh, "sd3"), pixels(pipe, "sd3"))
    assert {path.name for path in folder.iterdir()} == {
        "flowgrpo.json", "model_index.json", "scheduler", "text_encoder", "text_encoder_2", "tokenizer",
        "tokenizer_2", "transformer", "vae",
    }  # fmt: skip


def files(folder: Path) -> dict[str, object]:
    """Contents by name; tensors as lists, because the order of the metadata before them is random."""
    tensors = {path: load_file(path) for path in folder.rglob("*.safetensors")}
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        if path not in tensors
        else {name: tensor.tolist() for name, tensor in tensors[path].items()}
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("case", ["two experts", "without a source", "lora"])
def test_weights_that_were_kept_are_saved_later_as_they_were(case: str, tmp_path: Path) -> None:
    two_experts().save_pretrained(tmp_path / "base")
    pipe = WanPipeline.from_pretrained(tmp_path / "base")
    if case == "lora":
        weights = TrainedWeights.lora(pipe, SPEC, seed=0)
    else:
        weights = TrainedWeights.full(pipe, source=tmp_path / "base" if case == "two experts" else None)
    for _ in range(2):  # the second time, what was kept the first time is replaced
        perturb(weights)
        weights.keep(tmp_path / "kept")
    weights.save(tmp_path / "at-once")
    if case == "two experts":
        assert {path.name for path in (tmp_path / "kept").iterdir()} == {"transformer", "transformer_2"}
    perturb(weights)
    weights.save_kept(tmp_path / "kept", tmp_path / "later")
    assert files(tmp_path / "later") == files(tmp_path / "at-once")


def test_weights_of_a_source_that_is_not_complete_are_not_even_kept(tmp_path: Path) -> None:
    TINY["sd3"]().save_pretrained(tmp_path / "base")
    weights = TrainedWeights.full(DiffusionPipeline.from_pretrained(tmp_path / "base"), source=tmp_path / "base")
    (tmp_path / "base" / "vae").rename(tmp_path / "base" / "moved")
    with pytest.raises(ValueError, match="lacks vae"):
        weights.keep(tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_what_cannot_be_made_complete_is_refused(tmp_path: Path) -> None:
    TINY["sd3"]().save_pretrained(tmp_path / "base")
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "base")
    weights = TrainedWeights.full(pipe)
    with PromptCache(pipe, CALL["sd3"]) as cache:
        cache.encode(["a star"])
        cache.release(["text_encoder_3"])
        with pytest.raises(ValueError, match=r"text_encoder_3 of this .* released.*source=FOLDER"):
            weights.save(tmp_path / "other")
    pipe.text_encoder = None
    with pytest.raises(ValueError, match=r"^text_encoder of this"):
        weights.save(tmp_path / "other")
    weights.source = tmp_path
    with pytest.raises(ValueError, match=r"has no model_index\.json"):
        weights.save(tmp_path / "other")
    weights.source = tmp_path / "base"
    (tmp_path / "base" / "vae").rename(tmp_path / "base" / "moved")
    with pytest.raises(ValueError, match="lacks vae"):
        weights.save(tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


def test_a_hub_id_is_the_snapshot_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "abc"
    TINY["sd3"]().save_pretrained(snapshot)
    (tmp_path / "models--owner--name" / "refs").mkdir()
    (tmp_path / "models--owner--name" / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert local_folder("owner/name") == str(snapshot)
    assert local_folder(str(tmp_path)) == str(tmp_path)
    with pytest.raises(ValueError, match="'owner/other' is not a local folder"):
        local_folder("owner/other")


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
