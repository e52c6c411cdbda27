"""Parts that wait in host memory: when they are moved, and that nothing else changes."""

from typing import Any

import pytest
import torch
from torch import nn

from flowgrpo.pipelines import placement as offload
from flowgrpo.pipelines.placement import Offload, Placement, compute_on, offload_of, place
from tests.pipelines.test_placement import Pipe

GPU, HOST = torch.device("meta"), torch.device("cpu")
Moves = list[tuple[nn.Module, str]]


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Moves:
    """The moves of a part are recorded, and not made."""
    found: Moves = []
    monkeypatch.setattr(offload, "move", lambda part, device: found.append((part, device.type)))
    return found


@pytest.fixture
def vae() -> nn.Module:
    return nn.Linear(2, 2)


@pytest.fixture
def waiting(vae: nn.Module) -> Offload:
    return Offload({"vae": [vae]}, GPU)


def test_a_part_is_there_for_the_outermost_block(waiting: Offload, vae: nn.Module, moves: Moves) -> None:
    with waiting.needed("vae"):
        assert moves == [(vae, "meta")]
        with waiting.needed("vae"), waiting.needed("vae", when_called=True):
            pass
        assert moves == [(vae, "meta")]
    assert moves == [(vae, "meta"), (vae, "cpu")]


def test_a_part_that_is_not_called_is_not_fetched(waiting: Offload, vae: nn.Module, moves: Moves) -> None:
    decode = waiting.around("vae", lambda: len(moves))
    with waiting.needed("vae", when_called=True):
        pass
    assert moves == []
    with waiting.needed("vae", when_called=True):
        assert [decode(), decode()] == [1, 1]
    assert moves == [(vae, "meta"), (vae, "cpu")]


def test_a_part_goes_home_after_an_error(waiting: Offload, vae: nn.Module, moves: Moves) -> None:
    def fails() -> None:
        with waiting.needed("vae"):
            raise KeyError("no")

    with pytest.raises(KeyError):
        fails()
    assert moves == [(vae, "meta"), (vae, "cpu")]


def test_tensors_are_brought_to_where_the_part_is_used(waiting: Offload, moves: Moves) -> None:
    seen = waiting.around("vae", lambda x, *, y, n: (x.device.type, y.device.type, n))
    assert seen(torch.zeros(1), y=torch.zeros(2), n=3) == ("meta", "meta", 3)


def test_what_does_not_wait_is_left_alone(waiting: Offload, moves: Moves) -> None:
    def encode() -> int:
        return 1

    assert waiting.around("text_encoders", encode) is encode
    with waiting.needed("text_encoders"):
        pass
    assert moves == []
    assert (waiting.waits("vae"), waiting.waits("text_encoders")) == (True, False)


class Autoencoder(nn.Linear):
    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


class Whole(Pipe):
    """Remembers what it was asked to move to."""

    def __init__(self) -> None:
        super().__init__()
        self.vae, self.asked = Autoencoder(2, 2), []

    def to(self, device: Any) -> None:
        self.asked.append(device)

    @property
    def device(self) -> torch.device:
        raise AssertionError("the first part is one that waits")


def test_placing_moves_all_but_what_waits(moves: Moves) -> None:
    pipe = Whole()
    place(pipe, GPU, ["vae"])
    assert {name: next(getattr(pipe, name).parameters()).device.type for name in ("transformer", "vae")} == {
        "transformer": "meta", "vae": "cpu",
    }  # fmt: skip
    assert next(pipe.text_encoder.parameters()).device.type == "meta"
    assert (moves, pipe.asked) == ([], [])
    pipe.vae.decode = offload_of(pipe).around("vae", lambda x: moves.append(x.device.type))
    pipe.vae.decode(torch.zeros(1, 2))
    assert moves == [(pipe.vae, "meta"), "meta", (pipe.vae, "cpu")]


def test_the_vae_is_fetched_by_its_own_calls_and_once_however_often_it_is_placed(moves: Moves) -> None:
    pipe = Whole()
    place(pipe, HOST, ["vae"])
    place(pipe, HOST, ["vae"])
    x = torch.ones(1, 2)
    assert torch.equal(pipe.vae.decode(x), pipe.vae(x))
    assert [part for part, _ in moves] == [pipe.vae, pipe.vae]


def test_a_pipeline_without_waiting_parts_is_moved_as_ever(moves: Moves) -> None:
    pipe = Whole()
    place(pipe, GPU)
    assert pipe.asked == [GPU]
    assert "decode" not in pipe.vae.__dict__
    assert not offload_of(pipe).waits("vae")


def test_a_pipeline_without_such_a_part_is_refused() -> None:
    pipe = Whole()
    pipe.text_encoder = None
    with pytest.raises(ValueError, match=r"names text_encoders, but Whole has no text_encoder; .*transformer, vae"):
        place(pipe, HOST, ["vae", "text_encoders"])


def test_a_pipeline_computes_where_it_was_placed_though_its_first_part_waits() -> None:
    pipe = Whole()
    compute_on(pipe, GPU)
    placement = Placement(pipe)
    with placement.remembered():
        assert (pipe._execution_device, pipe.device) == (GPU, GPU)
    assert pipe.looked == 0
    with pytest.raises(AssertionError, match="first part"):
        _ = pipe.device
