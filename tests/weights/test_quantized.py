"""Frozen linear weights in fewer bits: which layers, how many bytes, what they compute, and what is missing."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowgrpo.weights.quantized import computes_in, linear_layers, loading_arguments, quantize, saved_bytes


class Router(nn.Linear):
    pass


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = nn.ModuleDict({"a": nn.Linear(96, 33), "b": nn.Linear(34, 60, bias=False), "router": Router(64, 8)})
        made["time"] = nn.Linear(7, 5)
    made.to(dtype)["time"].float()
    return made.requires_grad_(False)


@pytest.fixture
def packed() -> nn.Module:
    pytest.importorskip("bitsandbytes")
    made = model()
    quantize(made, "nf4")
    return made.to("cpu")


def unpacked(layer: Any) -> Tensor:
    """The weights that a packed layer computes with."""
    import bitsandbytes

    found: Tensor = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return found


def test_plain_linear_layers_in_16_bits_are_packed_and_no_others(packed: nn.Module) -> None:
    assert [type(part).__name__ for part in packed.values()] == ["Linear4bit", "Linear4bit", "Router", "Linear"]
    assert [computes_in(part) for part in packed.values()] == [torch.bfloat16] * 3 + [torch.float32]
    some = model()
    quantize(some, "nf4", ["b"])
    assert [type(part).__name__ for part in some.values()] == ["Linear", "Linear4bit", "Router", "Linear"]


def test_with_repeated_blocks_the_layers_around_them_stay_whole() -> None:
    """A few layers before and after the blocks see and make everything."""
    made = nn.Module()
    made.embed, made.out = nn.Linear(4, 4), nn.Linear(4, 4)
    made.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(2)])
    made.to(torch.bfloat16)
    assert [name for name, _ in linear_layers(made, "nf4")] == ["blocks.0.0", "blocks.1.0"]
    assert [name for name, _ in linear_layers(made, "nf4", ["out"])] == ["out"]
    assert len(list(linear_layers(made, "int8"))) == 4


def test_a_packed_layer_is_near_the_plain_one(packed: nn.Module) -> None:
    """A wrong table or a wrong scale would be off by far more than 16 levels are."""
    plain = model()["b"].weight
    error = (unpacked(packed["b"]) - plain).float().abs().mean()
    assert 0.05 < error / plain.float().abs().mean() < 0.12


def test_calls_with_and_without_gradients_agree_and_gradients_pass(packed: nn.Module) -> None:
    """On some CPUs the library packs weights anew in the first call without gradients, and then gives none."""
    layer, x = packed.eval()["a"], torch.randn(5, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        before = layer(x)
    x.requires_grad_()
    after = layer(x)
    assert torch.equal(before, after)
    after.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(after) @ unpacked(layer))
    assert layer.weight.grad is None


def test_packing_is_the_same_again_and_a_copy_computes_the_same(packed: nn.Module) -> None:
    again = model()
    quantize(again, "nf4")
    again.to("cpu")
    x = torch.ones(2, 96, dtype=torch.bfloat16)
    assert torch.equal(again["a"](x), packed["a"](x))
    assert torch.equal(copy.deepcopy(packed)["a"](x), packed["a"](x))


def test_the_bytes_of_packed_weights(packed: nn.Module) -> None:
    """Half a byte a weight, a byte for 64 weights, and four bytes for 256 of these."""
    whole = 2 * (96 * 33 + 34 * 60)
    states = [packed[name].weight.quant_state for name in ("a", "b")]
    held = [t for s, n in zip(states, "ab") for t in (packed[n].weight, s.absmax, s.state2.absmax)]
    assert whole - saved_bytes(model(), "nf4") == sum(t.numel() * t.element_size() for t in held)
    assert sum(t.numel() * t.element_size() for t in held) == 96 * 33 // 2 + 50 + 4 + 34 * 30 + 32 + 4


def test_bytes_of_8_bits() -> None:
    """A byte a weight and four bytes a row."""
    assert saved_bytes(model(), "int8") == 96 * 33 + 34 * 60 - 4 * (33 + 60)
    assert saved_bytes(model().to("meta"), "float8", ["b"]) == 34 * 60 - 4 * 60


@pytest.mark.parametrize(
    ("kind", "missing", "said"),
    [
        ("float8", "torchao.quantization", "model.quantize float8 needs torchao .* pip install 'torchao>=0.15'"),
        ("nf4", "bitsandbytes", "model.quantize nf4 needs bitsandbytes .* pip install 'bitsandbytes>=0.50'"),
    ],
)
def test_a_missing_library_is_told(kind: Any, missing: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    for act in (loading_arguments, lambda kind: quantize(model(), kind)):
        with pytest.raises(ValueError, match=said):
            act(kind)
