"""Corrections for the difference between the engines that sample and train: weights and cuts by hand."""

import math

import pytest
import torch

from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.core.corrections import CORRECTIONS, auto, mask, truncate


def test_weights_by_hand() -> None:
    gap = torch.tensor([[0.0, 0.5, -1.0], [2.0, 0.5, 0.0]])
    token = [[1.0, 1.6487213, 0.3678794], [7.3890561, 1.6487213, 1.0]]
    for level, how, floor, wanted in (
        ("token", "truncate", 0.0, [[1.0, 1.6487213, 0.3678794], [2.0, 1.6487213, 1.0]]),
        ("token", "mask", 0.5, [[1.0, 1.6487213, 0.0], [0.0, 1.6487213, 1.0]]),
        ("sequence", "truncate", 0.0, [[0.6065307] * 3, [2.0] * 3]),
        ("sequence", "mask", 0.7, [[0.0] * 3, [0.0] * 3]),
        ("sequence", "mask", 0.6, [[0.6065307] * 3, [0.0] * 3]),
    ):
        options = {"level": level, "cap": 2.0} | ({"floor": floor} if how == "mask" else {})
        weight, cut = CORRECTIONS[how](gap, **options)
        assert torch.allclose(weight, torch.tensor(wanted)), (level, how)
        assert torch.equal(cut, (torch.tensor(wanted) == 0) | (torch.tensor(wanted) == 2)), (level, how)
    assert torch.allclose(truncate(gap, level="token", cap=9.0)[0], torch.tensor(token))
    asked = gap.clone().requires_grad_()
    assert not mask(asked)[0].requires_grad
    assert auto(gap, engine="transformers") is None
    assert torch.equal(auto(gap, engine="vllm")[0], truncate(gap)[0])
    assert auto(gap) is None
    assert CORRECTIONS["none"](gap) is None


def test_bounds_without_options_are_zero_and_two_and_a_ratio_stays_finite() -> None:
    gap = torch.tensor([[math.log(2.5), math.log(0.5), 50.0]])
    assert torch.allclose(truncate(gap)[0], torch.tensor([[2.0, 0.5, 2.0]]))
    assert torch.allclose(mask(gap)[0], torch.tensor([[0.0, 0.5, 0.0]]))
    assert torch.allclose(truncate(gap, cap=1e9)[0], torch.tensor([[2.5, 0.5, math.exp(20)]]))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_have_no_gradient(level: str) -> None:
    gap = torch.tensor([[0.5, -1.0]], requires_grad=True)
    assert not truncate(gap, level=level)[0].requires_grad


def test_a_floor_is_below_the_cap() -> None:
    words = "objective.correction={{name: mask, cap: 1.5, floor: {}}}".format
    load_recipe("text", [words(1.4)])
    with pytest.raises(RecipeError, match=r"floor 1\.6, which is not below cap 1.5"):
        load_recipe("text", [words(1.6)])
