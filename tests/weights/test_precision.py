"""Casting a pipeline gives the same weights as loading it in that format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from flowgrpo.weights.precision import dtype_argument, in_dtype
from flowgrpo.weights.trained import TrainedWeights, cast_base
from tests.pipelines.trained import SPEC, prediction
from tests.tiny_pipelines import TINY

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("version", "name"), [("0.37.1", "torch_dtype"), ("0.40.0.dev0", "dtype"), ("0.42.1", "dtype"), ("1.0.0", "dtype")]
)
def test_the_argument_of_the_installed_diffusers(monkeypatch: pytest.MonkeyPatch, version: str, name: str) -> None:
    monkeypatch.setattr("diffusers.__version__", version)
    assert dtype_argument() == name
    assert in_dtype(torch.float16) == {name: torch.float16}


@pytest.mark.parametrize("key", ["sd3", "qwenimage", "wan"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cast_base_equals_loading_in_that_dtype(key: str, dtype: torch.dtype, tmp_path: Path) -> None:
    pipe = TINY[key]()
    pipe.save_pretrained(tmp_path / "pipe")
    cast_base(pipe, dtype)
    loaded = type(pipe).from_pretrained(tmp_path / "pipe", **in_dtype(dtype))
    for name, part in loaded.components.items():
        if not isinstance(part, nn.Module):
            continue
        mine = dict(getattr(pipe, name).named_parameters()) | dict(getattr(pipe, name).named_buffers())
        theirs = dict(part.named_parameters()) | dict(part.named_buffers())
        assert {k: t.dtype for k, t in mine.items()} == {k: t.dtype for k, t in theirs.items()}, name
        assert all(torch.equal(mine[k], tensor) for k, tensor in theirs.items()), name
    kinds = {parameter.dtype for parameter in pipe.transformer.parameters()}
    # Wan declares its time embedding and modulation float32.
    assert kinds == ({dtype, torch.float32} if key == "wan" else {dtype})


def test_a_float32_adapter_on_a_bfloat16_base() -> None:
    pipe = TINY["wan"]()
    cast_base(pipe, torch.bfloat16, vae_float32=True)
    assert {parameter.dtype for parameter in pipe.vae.parameters()} == {torch.float32}
    assert {parameter.dtype for parameter in pipe.text_encoder.parameters()} == {torch.bfloat16}
    weights = TrainedWeights.lora(pipe, SPEC, seed=0)
    assert {parameter.dtype for parameter in weights.parameters()} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        prediction(pipe, "wan").float().square().sum().backward()
    gradients = [p.grad for name, p in weights.named_parameters().items() if ".lora_B." in name]
    assert all(g is not None and g.dtype is torch.float32 and g.any() for g in gradients)
    with pytest.raises(ValueError, match="before you add the adapter"):
        cast_base(pipe, torch.float32)
    with pytest.raises(ValueError, match=r"torch\.float64.*use torch\.float32"):
        cast_base(pipe, torch.float64)
