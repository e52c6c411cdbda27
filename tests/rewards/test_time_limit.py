"""A reward that hangs is given up after its time: named with the seconds, the prompt and the sample, which is kept."""

import json
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest
import torch

from flowgrpo.kit.entries import parse_reward
from flowgrpo.kit.material import Material
from flowgrpo.kit.trial import Trial
from flowgrpo.rewards import Reward, RewardError, RewardSet, RewardSpec
from flowgrpo.rewards import time_limit as module
from flowgrpo.rewards.given_up import still_hanging
from flowgrpo.rewards.registry import build
from flowgrpo.rewards.time_limit import TimedOut, TimeLimit, has_ended
from flowgrpo.training.collecting import OverlappedScoring

PROMPTS = ["a", "b", "c", "d", "e", "f", "g", "h"]
SOON = 60.0


class Hangs:
    """Scores 1, and waits for an event that no test sets where it meets one of the `bad` prompts."""

    def __init__(self, *bad: str, lock: bool = False, **attributes: Any) -> None:
        self.bad, self.release = set(bad), threading.Event()
        self.lock = threading.Lock() if lock else None
        self.hanging: set[threading.Thread] = set()
        self.calls: list[list[str]] = []
        self.__dict__.update(attributes)

    def __call__(self, prompts: list[str], groups: Any = None) -> list[float]:
        self.calls.append(prompts)
        me = threading.current_thread()
        if self.lock is not None and not self.lock.acquire(blocking=False):
            self.hanging.add(me)
            self.release.wait()
        if self.bad & set(prompts):
            self.hanging.add(me)
            self.release.wait()
        if self.lock is not None:
            self.lock.release()
        return [1.0] * len(prompts)


@pytest.fixture
def hangs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Hangs]]:
    """Makes rewards that hang. The time limit of a call passes as soon as the call hangs, and not before."""
    made: list[Hangs] = []

    def make(*bad: str, **more: Any) -> Hangs:
        made.append(Hangs(*bad, **more))
        return made[-1]

    def ended(future: Future[Any], seconds: float, thread: threading.Thread) -> bool:
        while not wait([future], timeout=0.005).done:
            if any(thread in reward.hanging for reward in made):
                return False
        return True

    monkeypatch.setattr(module, "has_ended", ended)
    yield make
    for reward in made:
        reward.release.set()
        for thread in reward.hanging:
            thread.join(SOON)
    assert not still_hanging()


def limited(function: Callable[..., Any], seconds: float = 30.0, name: str = "slow") -> Reward:
    return Reward(function, name, limit=TimeLimit(seconds, name))


def failure(*rewards: Reward, **options: Any) -> RewardError:
    with pytest.raises(RewardError) as caught:
        RewardSet(list(rewards), **options).score(PROMPTS, PROMPTS, groups=[0, 0, 0, 0, 1, 1, 1, 1])
    return caught.value


@pytest.mark.parametrize("bad", PROMPTS)
def test_the_sample_that_hangs_is_found_and_kept(bad: str, hangs: Callable[..., Hangs], tmp_path: Path) -> None:
    error = failure(limited(hangs(bad)), quarantine=tmp_path)
    row = PROMPTS.index(bad)
    assert str(error).startswith(
        f"reward 'slow' failed on sample {row} (prompt '{bad}'): TimedOut: it took longer than its time_limit of 30 s; "
        f"it is at {__file__}:"
    )
    assert (error.index, error.saved) == (row, tmp_path / "slow-0000")
    assert [path.name for path in error.saved.iterdir()] == [f"sample-{row:04d}.json"]
    assert "time_limit of 30 s" in json.loads((error.saved / f"sample-{row:04d}.json").read_text())["error"]


def test_where_no_single_sample_hangs_the_call_is_named(hangs: Callable[..., Hangs], tmp_path: Path) -> None:
    """All calls hang; or a hanging call keeps a lock that all other calls wait for; or several calls must meet."""
    for reward in (hangs(*PROMPTS), hangs("c", lock=True), hangs("a", whole_group=True), hangs("a", remote=True)):
        error = failure(limited(reward), quarantine=tmp_path, retries=3, sleep=pytest.fail)
        assert (error.index, error.prompt) == (None, "a")
        assert "a call with samples 0 to 7 (the first prompt is 'a')" in str(error)
        assert error.indices == list(range(8))
        assert len(list((error.saved or tmp_path).iterdir())) == 8
    assert len(reward.calls) == 1, "a call that hangs was repeated"


def test_narrowing_down_takes_one_more_time_limit_at_most(hangs: Callable[..., Hangs]) -> None:
    """Samples that hang by themselves alone, in the last place: of 8, each half of 8, 4 and 2, and one more."""
    given: list[float] = []
    reward = limited(hangs("h"), 70.0)
    made = Reward.with_limit

    def noted(self: Reward, seconds: float) -> Reward:
        given.append(seconds)
        return made(self, seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reward, "with_limit", noted)
        assert failure(reward).index == 7
    assert given == [10.0] * 7


def test_a_reward_that_was_given_up_is_neither_called_nor_closed_again(hangs: Callable[..., Hangs]) -> None:
    closed: list[str] = []
    function = hangs("a", close=lambda: closed.append("closed"), whole_group=True)
    rewards = RewardSet([limited(function)])
    for _ in range(2):
        with pytest.raises(RewardError, match="time_limit of 30 s"):
            rewards.score(["x", "y"], ["a", "b"], groups=[0, 0])
    rewards.close()
    assert (len(function.calls), closed) == (1, [])
    assert still_hanging()


def test_within_its_time_everything_is_as_without_a_limit() -> None:
    def brightness(images: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        if "bad" in prompts:
            raise KeyError("mark")
        return images.flatten(1).mean(1)

    images = torch.rand(3, 3, 4, 4)
    plain, timed = RewardSet([Reward(brightness, "x")]), RewardSet([limited(brightness, name="x")])
    assert torch.equal(plain.score(images, PROMPTS[:3]).values, timed.score(images, PROMPTS[:3]).values)
    messages = []
    for rewards in (plain, timed):
        with pytest.raises(RewardError, match="failed on sample 1") as caught:
            rewards.score(images, ["a", "bad", "b"])
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert not still_hanging()


def test_a_reward_is_made_called_and_closed_in_one_thread(tmp_path: Path) -> None:
    """A database may be used only where it was opened."""
    file = tmp_path / "database.py"
    file.write_text(
        "import sqlite3\n\nclass Database:\n"
        "    def __init__(self):\n        self.rows = sqlite3.connect(':memory:')\n"
        "    def __call__(self, prompts):\n"
        "        return [self.rows.execute('select 2').fetchone()[0] for _ in prompts]\n"
        "    def close(self):\n        self.rows.close()\n"
    )
    reward = build(RewardSpec(f"{file}:Database", time_limit=SOON))
    assert reward.score(["x"], ["a"]).values.tolist() == [2.0]
    assert reward.limit is not None
    thread = reward.limit.thread
    assert thread is not None
    assert thread is not threading.current_thread()
    reward.close()
    thread.join(SOON)
    assert not thread.is_alive()


def test_a_close_that_hangs_is_given_up(hangs: Callable[..., Hangs]) -> None:
    function = hangs()

    def close() -> None:
        function.hanging.add(threading.current_thread())
        function.release.wait()

    function.close = close  # type: ignore[attr-defined]
    with pytest.raises(RewardError, match=r"'slow' failed while it was closed: TimedOut: .*time_limit of 30 s"):
        limited(function).close()


@pytest.mark.parametrize("attributes", [{"remote": True}, {"device": "meta"}, {}])
def test_while_sampling_goes_on_it_is_given_up_as_well(attributes: dict[str, Any], hangs: Callable[..., Hangs]) -> None:
    reward = limited(hangs("a", **attributes))

    def rollout() -> None:
        with OverlappedScoring(RewardSet([reward]), torch.device("cpu")) as ahead:
            ahead.begin(PROMPTS[:4], PROMPTS[:4])
            ahead.begin(PROMPTS[4:], PROMPTS[4:])
            ahead.scores(PROMPTS, PROMPTS)

    with pytest.raises(RewardError, match="time_limit of 30 s"):
        rollout()


def test_the_clock_is_real() -> None:
    release = threading.Event()
    limit = TimeLimit(0.2, "slow")

    def forever() -> None:
        release.wait(SOON)

    with pytest.raises(TimedOut, match=r"time_limit of 0.2 s; it is at .*test_time_limit.py:\d+, in forever"):
        limit(forever)
    assert still_hanging()
    release.set()
    assert limit.thread is not None
    limit.close()
    limit.thread.join(SOON)
    assert not still_hanging()


def test_time_in_which_the_process_is_suspended_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three and a half seconds are four waits, however long each wait really takes."""
    asked: list[float] = []

    def waited(futures: Any, timeout: float) -> Any:
        asked.append(timeout)
        return wait(futures, timeout=0)

    monkeypatch.setattr(module, "wait", waited)
    assert not has_ended(Future(), 3.5, threading.current_thread())
    assert asked == [1.0, 1.0, 1.0, 0.5]


@pytest.mark.parametrize("seconds", [0, -1, math.inf, math.nan, True, "60"])
def test_a_limit_that_is_none_is_refused(seconds: Any) -> None:
    with pytest.raises(ValueError, match=r"reward 'gold': time_limit is .*; give seconds above 0, such as 60"):
        RewardSpec("gold", time_limit=seconds)


def test_rewards_of_a_command_line_have_limits_too(hangs: Callable[..., Hangs]) -> None:
    assert parse_reward("gold", {}, 5.0).time_limit == 5.0
    assert parse_reward("{name: gold, time_limit: 3}", {}, 5.0).time_limit == 3
    trial = Trial(parse_reward("answer", {}, 30.0), "text")
    function = hangs("2")
    trial.reward.function = lambda answer, **_: function(answer)
    with pytest.raises(RewardError, match=r"'answer' failed on sample 1 \(prompt 'b'\): TimedOut"):
        trial.score(Material(["1", "2"], ["a", "b"], {"answer": ["1", "2"]}, [0, 0], ["x", "y"], "two"))


KEEPS_THE_INTERPRETER = """
import re
from flowgrpo.rewards import Reward, RewardSet, time_limit
time_limit.GRACE_SECONDS = 1.0

def catastrophic(completions, prompts):
    return [float(bool(re.match("(a+)+$", text))) for text in completions]

print("before")
limit = time_limit.TimeLimit(0.5, "catastrophic")
RewardSet([Reward(catastrophic, "catastrophic", limit=limit)]).score(["a" * 64 + "b"], ["q"])
"""


@pytest.mark.slow
def test_a_call_that_keeps_the_interpreter_ends_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", KEEPS_THE_INTERPRETER], capture_output=True, text=True, timeout=5 * SOON, check=False
    )
    assert (done.returncode, done.stdout) == (1, "before\n")
    assert "Timeout (0:00:01." in done.stderr
    assert " in catastrophic" in done.stderr
