"""The adapter of a run for ComfyUI and kohya: names, strength, and what no library converts."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline
from safetensors.torch import load_file, save_file

from flowgrpo.pipelines.conformance.noise_predicting import NOISE_PREDICTING
from flowgrpo.weights.other_tools import NAME, write_for
from flowgrpo.weights.trained import TrainedWeights
from tests.pipelines.trained import SPEC, output, perturb
from tests.tiny_pipelines import TINY


def adapter(folder: Path, layers: tuple[str, ...], alpha: float = 8, rank: int = 2, **more: object) -> Path:
    """A folder as `save_lora` writes it."""
    folder.mkdir()
    prefix = layers[0].partition(".")[0]
    tensors = {f"{layer}.lora_A.weight": torch.ones(rank, 4) for layer in layers}
    tensors |= {f"{layer}.lora_B.weight": torch.full((6, rank), 0.5) for layer in layers}
    fields = {f"{prefix}.{key}": value for key, value in {"r": rank, "lora_alpha": alpha, **more}.items()}
    save_file(tensors, folder / NAME, metadata={"format": "pt", "lora_adapter_metadata": json.dumps(fields)})
    return folder


def test_the_scale_is_in_the_weights(tmp_path: Path) -> None:
    layer = "transformer.transformer_blocks.0.attn.to_q"
    said = write_for("comfyui", adapter(tmp_path / "lora", (layer,)), tmp_path / "new" / "a.safetensors")
    found = load_file(tmp_path / "new" / "a.safetensors")
    assert set(found) == {f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"}
    assert found[f"{layer}.lora_A.weight"].eq(1).all()
    assert found[f"{layer}.lora_B.weight"].eq(2).all()  # 0.5 · 8 / 2
    assert "lora key not loaded" in said
    assert len(list((tmp_path / "new").iterdir())) == 1


def test_a_unet_gets_kohyas_names_with_alpha_equal_to_the_rank(tmp_path: Path) -> None:
    lora = adapter(tmp_path / "lora", ("unet.down_blocks.0.attentions.0.to_q",))
    for tool in ("kohya", "comfyui"):
        write_for(tool, lora, tmp_path / f"{tool}.safetensors")  # type: ignore[arg-type]
        found = load_file(tmp_path / f"{tool}.safetensors")
        layer = "lora_unet_down_blocks_0_attentions_0_to_q"
        assert set(found) == {f"{layer}.lora_down.weight", f"{layer}.lora_up.weight", f"{layer}.alpha"}
        assert found[f"{layer}.alpha"] == 2
        assert found[f"{layer}.lora_up.weight"].eq(2).all()


def test_what_no_library_converts_is_said(tmp_path: Path) -> None:
    flux = adapter(tmp_path / "flux", ("transformer.single_transformer_blocks.0.attn.to_q",))
    with pytest.raises(ValueError, match=r"diffusers converts only adapters of UNets.*convert_flux_lora\.py"):
        write_for("kohya", flux, tmp_path / "a.safetensors")
    wan = adapter(tmp_path / "wan", ("transformer.blocks.0.attn1.to_q",))
    with pytest.raises(ValueError, match=r"transformer\.blocks\.0\.attn1\.to_q.*ComfyUI does not read"):
        write_for("comfyui", wan, tmp_path / "a.safetensors")
    save_file({"x": torch.ones(1)}, wan / "pytorch_lora_weights_transformer_2.safetensors")
    with pytest.raises(ValueError, match="several adapters"):
        write_for("comfyui", wan, tmp_path / "a.safetensors")
    assert not (tmp_path / "a.safetensors").exists()


def test_faulty_input_is_refused(tmp_path: Path) -> None:
    good = adapter(tmp_path / "lora", ("transformer.transformer_blocks.0.attn.to_q",))
    (tmp_path / "b.safetensors").write_text("mine")
    for out, says in (("a.bin", r"name it .*a\.safetensors"), ("b.safetensors", "exists")):
        with pytest.raises(ValueError, match=says):
            write_for("comfyui", good, tmp_path / out)
    assert (tmp_path / "b.safetensors").read_text() == "mine"
    with pytest.raises(ValueError, match="has no pytorch_lora_weights"):
        write_for("comfyui", tmp_path, tmp_path / "a.safetensors")
    uneven = adapter(tmp_path / "uneven", ("transformer.transformer_blocks.0.x",), rank_pattern={"x": 3})
    with pytest.raises(ValueError, match="other values for some layers"):
        write_for("comfyui", uneven, tmp_path / "a.safetensors")
    for content in (b"nothing", b""):
        (good / NAME).write_bytes(content)
        with pytest.raises(ValueError, match="no readable safetensors file"):
            write_for("comfyui", good, tmp_path / "a.safetensors")
    for metadata in ({}, {"lora_adapter_metadata": "["}, {"lora_adapter_metadata": '{"transformer.r": "x"}'}):
        save_file({"transformer.x.lora_A.weight": torch.ones(1, 2)}, good / NAME, metadata=metadata)
        with pytest.raises(ValueError, match="does not say its alpha and rank"):
            write_for("comfyui", good, tmp_path / "a.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("key", ["sd3", "flux", "qwenimage"])
def test_the_file_does_what_the_adapter_does_without_its_metadata(key: str, tmp_path: Path) -> None:
    pipe = TINY[key]()
    original = output(pipe, key)
    weights = TrainedWeights.lora(pipe, SPEC, seed=0)
    perturb(weights)
    weights.save(tmp_path / "lora")
    wanted = output(pipe, key)
    write_for("comfyui", tmp_path / "lora", tmp_path / "a.safetensors")
    fresh = TINY[key]()
    fresh.load_lora_weights(tmp_path / "a.safetensors")
    torch.testing.assert_close(output(fresh, key), wanted, rtol=1e-4, atol=1e-5)
    assert (wanted - original).abs().max() > 1e-3


@pytest.mark.slow
def test_the_file_of_kohya_does_what_the_adapter_does(tmp_path: Path) -> None:
    tiny = NOISE_PREDICTING["StableDiffusionPipeline"]
    torch.manual_seed(0)
    tiny.fresh().save_pretrained(tmp_path / "pipe")

    def predicted(pipe: StableDiffusionPipeline) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        size, channels = pipe.unet.config.sample_size, pipe.unet.config.in_channels
        states = torch.randn(1, channels, size, size, generator=generator)
        words = torch.randn(1, 4, pipe.unet.config.cross_attention_dim, generator=generator)
        with torch.no_grad():
            return pipe.unet(states, 3, encoder_hidden_states=words).sample

    pipe = StableDiffusionPipeline.from_pretrained(tmp_path / "pipe")
    original = predicted(pipe)
    weights = TrainedWeights.lora(pipe, SPEC, seed=0)
    perturb(weights)
    weights.save(tmp_path / "lora")
    wanted = predicted(pipe)
    write_for("kohya", tmp_path / "lora", tmp_path / "a.safetensors")
    fresh = StableDiffusionPipeline.from_pretrained(tmp_path / "pipe")
    fresh.load_lora_weights(tmp_path / "a.safetensors")
    torch.testing.assert_close(predicted(fresh), wanted, rtol=1e-4, atol=1e-5)
    assert (wanted - original).abs().max() > 1e-3
