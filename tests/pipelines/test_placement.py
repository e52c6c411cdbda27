"""The device a pipeline computes on is looked up once, and again when a part is exchanged, moved or hooked."""

from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn

from flowgrpo.pipelines.placement import Placement


class Pipe:
    """Counts how often it looks for its device; its parts are as a diffusers pipeline has them."""

    def __init__(self) -> None:
        self.transformer = nn.Sequential(nn.Identity(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        self.vae = nn.Conv2d(1, 1, 1)
        self.text_encoder: Any = nn.Embedding(2, 2)
        self.looked = 0

    @property
    def components(self) -> dict[str, Any]:
        return {"transformer": self.transformer, "vae": self.vae, "text_encoder": self.text_encoder, "scheduler": 1}

    @property
    def _execution_device(self) -> torch.device:
        self.looked += 1
        return next(self.transformer.parameters()).device


@pytest.fixture
def pipe() -> Pipe:
    return Pipe()


def ask(placement: Placement, times: int = 2) -> list[torch.device]:
    found = []
    for _ in range(times):
        with placement.remembered():
            found.append(placement.pipe._execution_device)
    return found


def test_a_pipeline_that_stands_is_asked_once(pipe: Pipe) -> None:
    placement = Placement(pipe)
    assert ask(placement, 5) == [torch.device("cpu")] * 5
    assert pipe.looked == 1
    assert type(pipe) is Pipe
    assert pipe._execution_device == torch.device("cpu")
    assert pipe.looked == 2


def test_its_class_and_name_are_its_own_within_and_after_an_error(pipe: Pipe) -> None:
    placement = Placement(pipe)
    with pytest.raises(KeyError):
        fails_within(placement)
    assert type(pipe) is Pipe


def fails_within(placement: Placement) -> None:
    with placement.remembered():
        assert isinstance(placement.pipe, Pipe)
        assert type(placement.pipe) is not Pipe
        assert type(placement.pipe).__name__ == "Pipe"
        raise KeyError


def test_another_pipeline_of_the_class_is_not_touched(pipe: Pipe) -> None:
    other = Pipe()
    with Placement(pipe).remembered():
        assert other._execution_device == torch.device("cpu")
    assert other.looked == 1


def test_parts_that_move_or_are_exchanged_are_looked_at_again(pipe: Pipe) -> None:
    placement = Placement(pipe)
    ask(placement)
    pipe.transformer.to("meta")
    assert ask(placement) == [torch.device("meta")] * 2
    assert pipe.looked == 2
    pipe.vae = nn.Conv2d(1, 1, 1)
    ask(placement)
    assert pipe.looked == 3
    pipe.text_encoder = None
    ask(placement)
    assert pipe.looked == 4


@pytest.mark.parametrize("place", ["part", "first leaf", "last leaf, before"])
def test_a_pipeline_with_offloading_is_asked_every_time(pipe: Pipe, place: str) -> None:
    placement = Placement(pipe)
    if "before" not in place:
        ask(placement)
    leaves = [module for module in pipe.transformer.modules() if isinstance(module, nn.Linear)]
    within = {"part": pipe.transformer, "first leaf": leaves[0], "last leaf, before": leaves[1]}
    add_hook_to_module(within[place], AlignDevicesHook(execution_device="cpu"))
    before = pipe.looked
    ask(placement, 3)
    assert pipe.looked == before + 3


def test_group_offloading_of_diffusers_is_noticed() -> None:
    from diffusers.hooks import apply_group_offloading

    pipe = Pipe()
    placement = Placement(pipe)
    ask(placement)
    cpu = torch.device("cpu")
    apply_group_offloading(pipe.transformer, onload_device=cpu, offload_device=cpu, offload_type="leaf_level")
    before = pipe.looked
    ask(placement, 3)
    assert pipe.looked == before + 3
