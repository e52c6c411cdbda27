"""Trained weights in half precision: the model computes in it, and the optimizer moves float32 masters."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from flowgrpo.weights.averages import Ema
from flowgrpo.weights.lora import LoraSpec
from flowgrpo.weights.masters import Masters
from flowgrpo.weights.precision import cast_base, in_dtype
from flowgrpo.weights.trained import TrainedWeights
from tests.pipelines.trained import denoiser_inputs, perturb
from tests.tiny_pipelines import TINY

pytestmark = pytest.mark.slow


@torch.no_grad()
def prediction(pipe: Any) -> Tensor:
    """The output of a transformer in half precision, on the inputs of its pipeline."""
    args, kwargs = tree_map_only(Tensor, _half, denoiser_inputs("sd3"))
    found: Tensor = pipe.transformer(*args, **{**kwargs, "return_dict": False})[0]
    return found


def _half(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def half_of(key: str = "sd3", **options: bool) -> TrainedWeights:
    pipe = TINY[key]()
    cast_base(pipe, torch.bfloat16)
    return TrainedWeights.full(pipe, **options)


def test_gradients_are_added_in_float32_and_dropped_from_the_model() -> None:
    """Three gradients of 1, 2⁻¹⁰ and 2⁻¹⁰: in bfloat16 their sum would be 1."""
    layer = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    masters = Masters(dict(layer.named_parameters()))
    for size in (1.0, 2.0**-10, 2.0**-10):
        layer(torch.full((1, 1), size, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.grad is None
    assert masters.named["weight"].grad is not None
    assert masters.named["weight"].grad.item() == 1.0 + 2.0**-9


def test_small_steps_add_up_where_half_precision_alone_would_lose_them() -> None:
    layer = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    layer.weight.data.fill_(1.0)
    masters = Masters(dict(layer.named_parameters()))
    for _ in range(100):
        masters.named["weight"].data += 1e-4
        masters.write()
    assert masters.named["weight"].item() == pytest.approx(1.01, abs=1e-5)
    assert layer.weight.item() == torch.tensor(1.01).bfloat16().item()
    alone = torch.ones((), dtype=torch.bfloat16)
    for _ in range(100):
        alone += 1e-4
    assert alone.item() == 1.0


def test_a_float32_model_and_parts_that_stay_in_float32_are_their_own_masters() -> None:
    plain = TrainedWeights.full(TINY["sd3"]())
    assert [*plain.parameters()] == [*plain.modules["transformer"].parameters()]
    half = half_of("wan")
    own = dict(half.modules["transformer"].named_parameters())
    kept = {name for name, parameter in own.items() if parameter.dtype == torch.float32}
    assert 0 < len(kept) < len(own)
    for name, master in half.named_parameters().items():
        parameter = own[name.removeprefix("transformer.")]
        assert (master is parameter) == (name.removeprefix("transformer.") in kept)
        assert master.dtype == torch.float32


def test_the_model_computes_as_plain_diffusers_does_in_half_precision() -> None:
    pipe = TINY["sd3"]()
    cast_base(pipe, torch.bfloat16)
    expected = prediction(copy.deepcopy(pipe))
    TrainedWeights.full(pipe)
    assert torch.equal(prediction(pipe), expected)


def test_averages_references_and_states_reach_the_model() -> None:
    weights = half_of(keep_reference=True)
    ema = Ema(weights, decay=0.5, every=1)
    base, state = prediction(weights.pipe), weights.state_dict()
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    for parameter in weights.parameters():
        parameter.data += 0.01
    weights.write()
    moved = prediction(weights.pipe)
    assert not torch.equal(moved, base)
    with ema.applied():
        assert torch.equal(prediction(weights.pipe), base)
        with weights.reference():
            assert torch.equal(prediction(weights.pipe), base)
    assert torch.equal(prediction(weights.pipe), moved)
    with weights.reference():
        assert torch.equal(prediction(weights.pipe), base)
    assert torch.equal(prediction(weights.pipe), moved)
    weights.load_state_dict(state)
    assert torch.equal(prediction(weights.pipe), base)


def test_what_is_saved_is_what_the_model_computes_with(tmp_path: Path) -> None:
    weights = half_of()
    for parameter in weights.parameters():
        parameter.data += 0.003
    weights.write()
    weights.save(tmp_path / "saved")
    loaded = type(weights.pipe).from_pretrained(tmp_path / "saved", **in_dtype(torch.bfloat16))
    assert torch.equal(prediction(loaded), prediction(weights.pipe))


def adapter_of(compute: str = "base", dtype: torch.dtype = torch.bfloat16) -> TrainedWeights:
    pipe = TINY["sd3"]()
    cast_base(pipe, dtype)
    return TrainedWeights.lora(pipe, LoraSpec(rank=4, alpha=8, compute=compute), seed=0)  # type: ignore[arg-type]


def test_an_adapter_computes_in_the_type_of_its_base_and_is_trained_in_float32() -> None:
    half, wide = adapter_of(), adapter_of("float32")
    for weights, dtype in (
        (half, torch.bfloat16),
        (wide, torch.float32),
        (adapter_of(dtype=torch.float32), torch.float32),
        (adapter_of(dtype=torch.float16), torch.float32),
    ):
        assert {p.dtype for p in weights.parameters()} == {torch.float32}
        assert {p.dtype for p in weights.modules["transformer"].parameters() if p.requires_grad} == {dtype}
    assert all(torch.equal(a, b) for a, b in zip(half.parameters(), wide.parameters(), strict=True))
    perturb(half)
    perturb(wide)
    loss = [prediction_with_gradient(weights.pipe).float().square().sum() for weights in (half, wide)]
    # Two ways of rounding the same function: bfloat16 has 8 bits.
    torch.testing.assert_close(loss[0], loss[1], rtol=0.05, atol=0)
    for value in loss:
        value.backward()
    for one, other in zip(half.parameters(), wide.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert one.grad.dtype == torch.float32
        assert (one.grad - other.grad).norm() <= 0.02 * other.grad.norm()


def prediction_with_gradient(pipe: Any) -> Tensor:
    args, kwargs = tree_map_only(Tensor, _half, denoiser_inputs("sd3"))
    found: Tensor = pipe.transformer(*args, **{**kwargs, "return_dict": False})[0]
    return found


def test_an_adapter_that_computes_in_16_bits_is_saved_and_loaded_in_float32(tmp_path: Path) -> None:
    weights = adapter_of()
    base = prediction(weights.pipe)
    perturb(weights)
    state, moved = weights.state_dict(), prediction(weights.pipe)
    weights.save(tmp_path / "lora")
    tensors = load_file(tmp_path / "lora" / "pytorch_lora_weights.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert {tuple(t.flatten().tolist()) for t in tensors.values()} == {
        tuple(t.flatten().tolist()) for t in state.values()
    }
    assert torch.equal(prediction(weights.pipe), moved)
    for other in (adapter_of(), adapter_of("float32")):
        other.load_lora(tmp_path / "lora")
        assert all(torch.equal(tensor, state[name]) for name, tensor in other.state_dict().items())
    again = adapter_of()
    again.load_lora(tmp_path / "lora")
    assert torch.equal(prediction(again.pipe), moved)
    with again.reference():
        assert torch.equal(prediction(again.pipe), base)
    assert not torch.equal(moved, base)


def test_an_unknown_type_of_the_arithmetic_is_refused() -> None:
    with pytest.raises(ValueError, match="compute is 'bfloat16'; use 'base' or 'float32'"):
        LoraSpec(compute="bfloat16")  # type: ignore[arg-type]
