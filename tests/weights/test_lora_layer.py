"""Linear layers with a LoRA that adds in place: the sums of peft, with fewer passes over the output."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flowgrpo.weights.lora_layer import AddingLora, add_in_place

WIDE, OUT, RANK = 12, 20, 4


class Counted(TorchDispatchMode):
    """Counts the operations that make a tensor as large as an output."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.shape[-1:] == (OUT,) and not func.is_view:
            self.names.append(func.__name__.split(".")[0])
        return made


def layers(dtype: torch.dtype = torch.float64, bias: bool = True, alpha: float = 6, **config: Any) -> list[Any]:
    """The layer of peft, and the same layer made to add in place; B is not zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDE, OUT, bias=bias, dtype=dtype)).requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=RANK, lora_alpha=alpha, target_modules=["0"], **config), model)
    model.to(dtype)
    nn.init.normal_(model[0].lora_B["default"].weight)
    other = copy.deepcopy(model)
    add_in_place(other[0])
    assert type(other[0]) is AddingLora
    return [model[0], other[0]]


def inputs(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "a vector": drawn(WIDE),
        "rows": drawn(5, WIDE),
        "a batch": drawn(3, 5, WIDE),
        "a part of a batch": drawn(3, 7, WIDE)[:, :5],
        "four dimensions": drawn(2, 3, 5, WIDE),
        "nothing": drawn(0, 5, WIDE),
    }


@pytest.mark.parametrize("kind", list(inputs()))
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_peft(kind: str, bias: bool) -> None:
    found = []
    for layer in layers(bias=bias):
        x = inputs()[kind].requires_grad_()
        out = layer(x)
        (out * torch.arange(1.0, OUT + 1)).sin().sum().backward()
        with torch.no_grad():
            assert torch.equal(layer(x), out)  # so a ratio is exactly 1
        found.append([out, x.grad, layer.lora_A["default"].weight.grad, layer.lora_B["default"].weight.grad])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", list(inputs()))
def test_an_adapter_of_zeros_changes_no_bit(kind: str, dtype: torch.dtype) -> None:
    layer = layers(dtype)[1]
    nn.init.zeros_(layer.lora_B["default"].weight)
    x = inputs(dtype)[kind]
    expected = layer.base_layer(x)
    assert torch.equal(layer(x), expected)
    layer.enable_adapters(False)
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("gradients", [True, False])
def test_the_output_is_written_by_products_alone(gradients: bool) -> None:
    theirs, ours = layers()
    names = []
    for layer in (theirs, ours):
        with Counted() as counted, torch.set_grad_enabled(gradients):
            layer(inputs()["a batch"])
        names.append(counted.names)
    assert {"mul", "add"} <= set(names[0])
    assert names[1] == ["addmm", "addmm_"]


def test_in_16_bits_the_sum_is_rounded_once() -> None:
    exact, x = layers()[1], inputs()["a batch"]
    errors = []
    for layer in layers(torch.bfloat16):
        for own, other in zip(layer.parameters(), exact.parameters(), strict=True):
            other.data = own.data.double()
        expected = exact(x.bfloat16().double())
        errors.append((layer(x.bfloat16()).double() - expected).norm())
    assert errors[1] < errors[0]


@pytest.mark.parametrize("state", ["disabled", "merged", "autocast", "two adapters", "another type", "dropout"])
def test_in_other_states_it_does_what_peft_does(state: str) -> None:
    dtype = torch.bfloat16 if state == "another type" else torch.float32
    found = []
    for layer in layers(dtype, lora_dropout=0.5 if state == "dropout" else 0.0):
        x = inputs(torch.float32)["a batch"].to(dtype)
        if state == "disabled":
            layer.enable_adapters(False)
        elif state == "merged":
            layer.merge()
        elif state == "two adapters":
            inject_adapter_in_model(LoraConfig(r=RANK, target_modules=["0"]), nn.Sequential(layer), "other")
            nn.init.ones_(layer.lora_B["other"].weight)
            nn.init.ones_(layer.lora_A["other"].weight)
            layer.set_adapter(["default", "other"])
        elif state == "another type":
            layer.lora_A.float()
            layer.lora_B.float()
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=state == "autocast"):
            found.append(layer(x))
    assert found[0].dtype == found[1].dtype
    torch.testing.assert_close(found[1], found[0])
    if state != "dropout":
        assert torch.equal(found[1], found[0])


def test_only_plain_layers_change() -> None:
    class Own(nn.Linear):
        """A linear layer of somebody else's, as of a quantised model."""

    model = nn.Sequential(Own(WIDE, OUT), nn.Conv2d(3, 4, 1), nn.Embedding(5, 6))
    inject_adapter_in_model(LoraConfig(r=RANK, target_modules=["0", "1", "2"]), model)
    before = [type(part) for part in model]
    for part in model:
        add_in_place(part)
    assert before[0] is Linear
    assert [type(part) for part in model] == before
