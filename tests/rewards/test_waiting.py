"""Waits for servers: they end as soon as nobody wants the answer, in whichever thread, and that is no failure."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from flowgrpo.rewards.base import RewardSpec
from flowgrpo.rewards.judges.judge_client import JudgeClient, Question
from flowgrpo.rewards.remote import Remote
from flowgrpo.rewards.runner import RewardSet
from flowgrpo.rewards.waiting import SLICE_SECONDS, Unwanted, pause, watched, within
from tests.rewards.served import Served
from tests.rewards.stub_server import FakeClock, StubServer, failed

IMAGE = torch.zeros(1, 3, 2, 2)


class Wish:
    """Whether answers are wanted; the slices of all waits are counted, and the first one ends the wish."""

    def __init__(self) -> None:
        self.over, self.slices = False, 0

    def look(self) -> None:
        if self.over:
            raise Unwanted

    def sleep(self, seconds: float) -> None:
        assert seconds <= SLICE_SECONDS <= 1
        self.over, self.slices = True, self.slices + 1

    def pause(self, seconds: float) -> None:
        pause(seconds, self.sleep)


@contextmanager
def unwanted(wish: Wish) -> Iterator[None]:
    with watched(wish.look), pytest.raises(Unwanted):
        yield


def test_a_pause_is_as_long_as_it_should_be_and_ends_after_a_slice() -> None:
    clock = FakeClock()
    pause(2.2, clock.sleep)
    assert clock.now == pytest.approx(2.2)
    assert max(clock.pauses) <= 1
    wish = Wish()
    with unwanted(wish):
        pause(300, wish.sleep)
    assert wish.slices == 1
    with unwanted(wish):
        pause(0, wish.sleep)
    wish.pause(1)  # nobody watches any more
    assert wish.slices == 3


def test_an_event_is_waited_for_in_slices() -> None:
    event, wish = threading.Event(), Wish()
    assert not within(event, 0.0)
    with unwanted(wish):
        wish.over = True
        within(event, 300)
    event.set()
    assert within(event, 0.0)


@pytest.mark.parametrize("limit", [None, 1000])
@pytest.mark.parametrize("where", ["patience", "repetition"])
def test_a_server_that_is_away_is_waited_for_no_longer(
    served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, where: str, limit: float | None
) -> None:
    """Both the wait of `remote` and the one before the call is repeated; with a time limit, in another thread."""
    wish, server = Wish(), served()
    monkeypatch.setattr(Remote, "sleep", staticmethod(wish.pause))
    patience = 300 if where == "patience" else 0.5
    spec = RewardSpec("remote", options={"url": server.url, "patience": patience}, time_limit=limit)
    rewards = RewardSet([spec], sleep=wish.pause)
    server.kill()
    with unwanted(wish):
        rewards.score(IMAGE, ["a"])
    assert wish.slices == 1
    rewards.close()


def test_a_server_that_does_not_answer_is_waited_for_no_longer(served: Callable[..., Served]) -> None:
    server, wish, asked, answer = served(), Wish(), threading.Event(), threading.Event()

    def hangs(images: Any) -> list[float]:
        wish.over = True
        asked.set()
        answer.wait(60)
        return [0.0] * len(images)

    rewards = RewardSet([RewardSpec("remote", options={"url": server.url})])
    server.reward.function = hangs
    with unwanted(wish):
        rewards.score(IMAGE, ["a"])
    assert asked.is_set()
    answer.set()


def test_a_judge_that_is_away_is_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    wish, server = Wish(), StubServer(lambda request, number: failed(503))
    monkeypatch.setattr(JudgeClient, "sleep", staticmethod(wish.pause))
    client = JudgeClient("judge", {"url": server.url, "model": "m", "patience": 300, "concurrency": 3}, max_tokens=4)
    with unwanted(wish):
        client.ask([Question(str(k)) for k in range(9)])
    assert 1 <= wish.slices <= 3
    client.close()
    server.stop()
