"""The simulated device refuses what a real device refuses, and computes what the CPU computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.simulated import simulated_device

MIXED: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda x, here: x + here,
    "sum of the CPU in place": lambda x, here: here.add_(x[0, 0]),
    "choice from the CPU": lambda x, here: here[torch.tensor([0], device=x.device)],
    "joined numbers": lambda x, here: torch.stack([x[0, 0], torch.tensor(1.0)]),
    "matrices": lambda x, here: x @ here.T,
    "numpy": lambda x, here: x.numpy(),
    "generator": lambda x, here: torch.randn(3, device=x.device, generator=torch.Generator()),
    "generator in place": lambda x, here: x.normal_(generator=torch.Generator()),
}


@pytest.mark.parametrize("name", list(MIXED))
def test_mixtures_are_refused(name: str) -> None:
    with simulated_device() as other:
        x, here = torch.zeros(3, 4).to(other.device), torch.zeros(3, 4)
        with pytest.raises((RuntimeError, TypeError)):
            MIXED[name](x, here)


def test_what_comes_from_the_device_is_on_the_device() -> None:
    with simulated_device() as other:
        x = torch.ones(3, 4).to(other.device)
        found = [x + 1, x[torch.tensor([0])], x.T, torch.zeros_like(x), x.new_zeros(2), x.new_tensor(1.0)]
        found += [torch.arange(3, device=other.device), x * torch.tensor(2.0), torch.ones(2).to(x), x.double()]
        assert [one.device for one in found] == [other.device] * len(found)
        back = [x.cpu(), x.to("cpu"), torch.zeros_like(x, device="cpu"), torch.zeros(3)]
        assert [one.device.type for one in back] == ["cpu"] * 4


def test_gradients_and_steps_are_those_of_the_cpu() -> None:
    def moved(there: bool) -> Tensor:
        torch.manual_seed(0)
        layer, x = torch.nn.Linear(4, 2), torch.randn(3, 4)
        if there:
            layer, x = layer.to(other.device), x.to(other.device)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, foreach=False)
        for _ in range(3):
            layer(x).square().sum().backward()
            optimizer.step()
        assert (layer.weight.grad.device == other.device) == there
        return layer.weight.detach().cpu()

    with simulated_device() as other:
        assert torch.equal(moved(True), moved(False))
