"""AdamW in one kernel, as a run on a GPU takes it: the same steps, the same state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowgrpo.configs.load import load_recipe
from flowgrpo.training import updating
from flowgrpo.training.distributed.processes import Processes
from flowgrpo.training.updating import Optimizer, has_fused


class Weights:
    """A weight and a bias whose gradients are given."""

    def __init__(self) -> None:
        self.layer = nn.Linear(3, 2)
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.copy_(torch.linspace(-1.0, 1.0, parameter.numel()).view_as(parameter))

    def parameters(self) -> list[nn.Parameter]:
        return list(self.layer.parameters())

    def write(self) -> None: ...


def optimizer(weights: Weights, *words: str) -> Optimizer:
    recipe = load_recipe("default", ["optimizer.warmup=2", "optimizer.learning_rate=0.1", *words])
    return Optimizer(recipe, weights, Processes.of_this_run())  # type: ignore[arg-type]


def stepped(one: Optimizer, steps: range) -> list[Tensor]:
    for k in steps:
        for parameter in one.parameters:
            parameter.grad = torch.full_like(parameter, 0.1).cumsum(0) * (1 + k % 3)
        one.step()
    return [parameter.detach().clone() for parameter in one.parameters]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updating, "has_fused", lambda parameters: True)


def inner(one: Optimizer) -> dict[str, Any]:
    return dict(one._inner.param_groups[0])


def test_weights_of_the_cpu_keep_the_plain_steps() -> None:
    assert not has_fused(Weights().parameters())
    assert not inner(optimizer(Weights()))["fused"]


@pytest.mark.usefixtures("fused")
def test_fused_steps_are_the_plain_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    one = optimizer(Weights())
    assert inner(one)["fused"]
    found = stepped(one, range(5))
    monkeypatch.undo()
    plain = optimizer(Weights())
    for got, wanted in zip(found, stepped(plain, range(5))):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    assert not torch.equal(found[0], Weights().parameters()[0])


@pytest.mark.usefixtures("fused")
def test_a_run_goes_on_from_a_saved_state() -> None:
    whole = stepped(optimizer(Weights()), range(6))
    weights = Weights()
    first = optimizer(weights)
    stepped(first, range(3))
    second = optimizer(weights)
    second.load_state_dict(first.state_dict())
    for got, wanted in zip(stepped(second, range(3, 6)), whole):
        assert torch.equal(got, wanted)
