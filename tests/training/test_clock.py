"""Seconds by part, on a clock that is set by hand."""

from types import SimpleNamespace

import pytest
import torch

from flowgrpo.training.reporting import clock as clock_module
from flowgrpo.training.reporting.clock import Clock

PARTS = ("denoiser", "decode", "reward", "optimizer", "rest")


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    hand = SimpleNamespace(now=100.0)
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(perf_counter=lambda: hand.now))
    return hand


def test_an_inner_part_counts_alone_and_the_uncovered_is_rest(time: SimpleNamespace):
    clock = Clock(torch.device("cpu"), PARTS)
    time.now += 1
    with clock.part("reward"):
        time.now += 2
        with clock.part("decode"):
            time.now += 4
        time.now += 8
        with clock.part("reward"):
            time.now += 16
    time.now += 32
    taken = clock.lap()
    assert taken == {"denoiser": 0, "decode": 4, "reward": 26, "optimizer": 0, "rest": 33}
    assert sum(taken.values()) == 63
    assert tuple(taken) == PARTS


def test_a_lap_begins_at_nothing_even_within_a_part(time: SimpleNamespace):
    clock = Clock(torch.device("cpu"), PARTS)
    with clock.part("denoiser"):
        time.now += 3
        assert clock.lap()["denoiser"] == 3
        time.now += 5
    time.now += 7
    taken = clock.lap()
    assert (taken["denoiser"], taken["rest"]) == (5, 7)
    assert sum(clock.lap().values()) == 0


def test_who_watches_a_clock_is_told_what_runs_and_how_much_of_it_is_done(time: SimpleNamespace):
    clock, told = Clock(torch.device("cpu"), PARTS), list[object]()
    clock.count(1, 2)
    clock.watcher, clock.counter = told.append, lambda done, total: told.append((done, total))
    with clock.part("denoiser", "update 1/2"):
        clock.count(3, 4)
        with clock.part("decode"):
            time.now += 1
        time.now += 2
    assert told == ["update 1/2", (3, 4), "decode", "update 1/2", "rest"]
    taken = clock.lap()
    assert (taken["denoiser"], taken["decode"]) == (2, 1)


def test_a_part_ends_when_it_fails(time: SimpleNamespace):
    clock = Clock(torch.device("cpu"), PARTS)

    def work() -> None:
        with clock.part("optimizer"):
            time.now += 2
            raise RuntimeError

    with pytest.raises(RuntimeError):
        work()
    time.now += 3
    taken = clock.lap()
    assert (taken["optimizer"], taken["rest"]) == (2, 3)
