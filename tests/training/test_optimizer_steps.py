"""The learning rate follows the steps of the optimizer, and the settings of AdamW follow the recipe."""

from __future__ import annotations

import pytest
import torch

from flowgrpo.training.updating import TAKEN, Optimizer, learning_rate, steps_taken
from tests.training.test_fused import Weights, optimizer

LINEAR = ("optimizer.warmup=0", "optimizer.schedule=linear", "optimizer.half=null", "run.iterations=8")


def rates(one: Optimizer, steps: range, moved: list[int]) -> list[float]:
    """The learning rates of steps, in which only the weights with these numbers have a gradient."""
    found = []
    for k in steps:
        for number in moved if k % 2 == 0 else []:
            one.parameters[number].grad = torch.ones_like(one.parameters[number])
        one.step()
        found.append(one._inner.param_groups[0]["lr"])
    return found


def test_steps_of_other_weights_and_without_gradients_count() -> None:
    """Two denoisers share an optimizer: the second one trains after the first, and some steps train neither."""
    one = optimizer(Weights(), *LINEAR)
    found = [*rates(one, range(4), [0]), *rates(one, range(4, 8), [1])]
    assert found == pytest.approx([learning_rate(one.recipe, k) for k in range(8)])
    assert found[-1] == pytest.approx(found[0] / 8)


def test_a_state_goes_on_with_its_steps_and_with_the_settings_of_the_recipe() -> None:
    one = optimizer(Weights(), *LINEAR)
    rates(one, range(3), [0, 1])
    state = one.state_dict()
    other = optimizer(Weights(), *LINEAR, "optimizer.weight_decay=0.5", "optimizer.eps=0.001")
    other.load_state_dict(state)
    group = other._inner.param_groups[0]
    assert (group["weight_decay"], group["eps"]) == (0.5, 0.001)
    assert rates(other, range(4, 5), [0]) == pytest.approx([learning_rate(one.recipe, 3)])
    moments = other._inner.state[other.parameters[0]]
    assert float(moments["step"]) == 3


def test_a_state_of_an_older_checkpoint_has_the_most_steps_of_a_weight() -> None:
    one = optimizer(Weights(), *LINEAR)
    rates(one, range(2), [0])
    rates(one, range(2, 6), [1])
    state = one.state_dict()
    assert state.pop(TAKEN) == 6
    assert steps_taken(state) == 2
    assert steps_taken({"state": {}}) == 0
