"""Signals: a run soon ends where it can go on bit for bit, and a second signal ends it at once."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from flowgrpo.bench.interruption import contents
from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.configs.schema import AnyRecipe
from flowgrpo.rewards.base import RewardError
from flowgrpo.rewards.remote import Remote
from flowgrpo.rewards.waiting import pause
from flowgrpo.training.folder.keeping import SHARE
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.session import Session, start
from flowgrpo.training.stopping import ONCE, Abandoned, Stop, Stopped
from tests.rewards.served import Served

TERM, INT = signal.SIGTERM, signal.SIGINT


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# -- signals -------------------------------------------------------------------------------------------------------


def test_where_nothing_is_under_way_a_signal_ends_the_process_at_once() -> None:
    stop = Stop()
    with stop.listening(), pytest.raises(Stopped, match="SIGTERM") as stopped:
        os.kill(os.getpid(), TERM)
    assert stopped.value.number == TERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_within_a_deferred_block_it_is_noted_and_said(number: int) -> None:
    said: list[str] = []
    stop = Stop(said.append)
    with stop.listening(), stop.deferred():
        os.kill(os.getpid(), number)
        assert stop.number == number
    [line] = said
    assert line.startswith(signal.Signals(number).name)


def test_a_second_signal_ends_at_once_and_one_passed_on_twice_is_one() -> None:
    left: list[int] = []
    clock = Time()
    stop = Stop(leave=left.append, clock=clock)
    with stop.deferred():
        stop.heard(INT)
        clock.now = 0.9 * ONCE
        stop.heard(TERM)
        assert left == []
        clock.now = ONCE
        stop.heard(TERM)
    assert left == [128 + TERM]


def test_a_terminal_that_is_gone_keeps_nothing_from_ending() -> None:
    def fail(text: str) -> None:
        raise OSError("no terminal")

    stop = Stop(fail)
    with stop.deferred():
        stop.heard(signal.SIGHUP)
    assert stop.number == signal.SIGHUP


def test_what_was_ignored_stays_ignored_and_handlers_come_back() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = Stop()
        with stop.listening():
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.number == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(INT) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_evaluation_is_not_begun_after_a_signal_until_the_block_is_settled() -> None:
    stop, module = Stop(), nn.Identity()
    with stop.deferred():
        with stop.abandonable([module]):
            stop.settled()
            stop.heard(TERM)
            module(1)
        with pytest.raises(Abandoned), stop.abandonable([module]):
            raise AssertionError("not reached")
        with stop.abandonable([module], possible=False):
            module(1)
    module(1)
    assert not module._forward_pre_hooks


# -- runs ----------------------------------------------------------------------------------------------------------


class Run:
    """A run of which the `at`-th evaluation of the model is told a signal, from 1; evaluations are counted."""

    def __init__(self, recipe: AnyRecipe, folder: Path, at: int = 0) -> None:
        self.stop, self.count, self.after, self.stopped = Stop(), 0, 0, 0
        self.moved: list[int] = []  # evaluations before each optimizer step
        trainer = start(recipe, folder).trainer(Silent(), self.stop)
        step = trainer.optimizer.step

        def counted_step() -> object:
            self.moved.append(self.count)
            return step()

        trainer.optimizer.step = counted_step  # type: ignore[method-assign, assignment]

        def counted(*_: object) -> None:
            self.count += 1
            self.after += bool(self.stop.number)
            if self.count == at:
                self.stop.heard(TERM)

        for module in trainer.task.weights.modules.values():
            module.register_forward_hook(counted)
        try:
            trainer.train()
        except Stopped as stopped:
            self.stopped = stopped.number
        trainer.run.release()


def resumed(folder: Path, recipe: AnyRecipe) -> int:
    """Where the run went on."""
    trainer = Session(recipe, RunFolder.open(folder)).trainer(Silent())
    trainer.resume()
    begun = trainer.next_iteration
    trainer.train()
    return begun


def images(name: str, *more: str) -> Callable[[pytest.FixtureRequest], AnyRecipe]:
    return lambda request: load_recipe(name, [*request.getfixturevalue("small"), *SHORT, *more])


def windowless(name: str, *more: str) -> Callable[[pytest.FixtureRequest], AnyRecipe]:
    """A run whose plan trains no steps, and so has no window."""
    return lambda request: load_recipe(
        name,
        [
            *(word for word in request.getfixturevalue("small") if not word.startswith("sampler.plan.window")),
            *SHORT, *more,
        ],
    )  # fmt: skip


def text(*more: str) -> Callable[[pytest.FixtureRequest], AnyRecipe]:
    return lambda request: load_recipe("text", [*request.getfixturevalue("small_text"), *SHORT, *more])


SHORT = (
    "run={iterations: 2, checkpoint_every: 100, sample_every: 1}", "evaluate={every: 1, prompts: 1}",
    "evaluate.rewards=null",
)  # fmt: skip
RUNS = {
    "images": images("mixgrpo_flash_guard", "optimizer.updates=2"),
    "critic": images(
        "euphonium", "critic.warmup=1", "sampler.plan.window={name: random, size: 1, interval: 1, stop: 3}"
    ),
    "old policy": windowless("diffusion_nft", "objective.old={decay: 0.5, every: 1, rise: 0.2}"),
    "text": text("optimizer.updates=2", "optimizer.ema={decay: 0.5, every: 1}"),
    "memory": text("advantage=cumulative", "extensions=[{name: curriculum, mix: 0.2}]"),
    "guards": text(
        "evaluate.rewards=[{name: length, label: shown, options: {limit: 4}}]",
        "extensions=[{name: guard, reward: shown, fall: 1000}]",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_from_a_signal_anywhere_to_the_last_bit(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    recipe = RUNS[name](request)
    whole = Run(recipe, tmp_path / "whole")
    reference = contents(tmp_path / "whole")
    # In the second iteration: in its evaluation, in its rollout, in its update before the first optimizer step, and
    # when that is about to be taken, so that it is.
    steps = len(whole.moved) // 2
    begins, first, last = whole.moved[steps - 1], whole.moved[steps], whole.moved[2 * steps - 1]
    moments = {begins + 1, begins + (first - begins) // 2, first - 1, first}
    if name in ("critic", "old policy"):  # the same places, in longer runs
        moments = {first - 1}
    for number, at in enumerate(sorted(moments)):
        folder = tmp_path / f"broken-{number}"
        broken = Run(recipe, folder, at)
        assert broken.stopped == TERM
        moved = at == first
        # Nothing is evaluated after the signal, unless the weights have moved.
        assert broken.after == (last - at if moved else 0)
        assert not (folder / "lora").exists()
        assert resumed(folder, recipe) == (2 if moved else 1)
        assert contents(folder) == reference


@pytest.mark.slow
def test_a_signal_in_the_last_evaluation_ends_it(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    recipe = RUNS["text"](request)
    whole = Run(recipe, tmp_path / "whole")
    broken = Run(recipe, tmp_path / "broken", whole.count - 1)
    assert (broken.stopped, broken.after) == (TERM, 0)
    assert resumed(tmp_path / "broken", recipe) == 2
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")


@pytest.mark.slow
def test_a_signal_before_anything_was_trained_writes_nothing_to_go_on_from(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    recipe = RUNS["text"](request)
    assert Run(recipe, tmp_path / "run", 1).stopped == TERM
    assert RunFolder(tmp_path / "run").list_checkpoints() == []
    assert resumed(tmp_path / "run", recipe) == 0


@pytest.mark.slow
@pytest.mark.parametrize("where", ["rewards", "evaluate.rewards"])
def test_a_signal_ends_the_wait_for_a_reward_server_and_nothing_is_lost(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The server goes away in the second iteration; the signal comes when the run has begun to wait for it."""
    server = Served("digit_share")
    served = f"{where}=[{{name: remote, options: {{url: '{server.url}', patience: 300}}}}]"
    others = "evaluate.rewards=[{name: length, options: {limit: 4}}]"
    words = [*request.getfixturevalue("small_text"), *SHORT, others, served]
    Run(load_recipe("text", words), tmp_path / "whole")
    stop, slices, sends, send = Stop(), [], [], Remote._send

    def slept(seconds: float) -> None:
        slices.append(seconds)
        assert len(slices) < 5
        if len(slices) == 1:
            stop.heard(TERM)

    def sent(*arguments: Any) -> Any:
        sends.append(arguments)
        if len(sends) == 2:
            server.kill()
        return send(*arguments)

    monkeypatch.setattr(Remote, "sleep", staticmethod(lambda seconds: pause(seconds, slept)))
    monkeypatch.setattr(Remote, "_send", sent)
    recipe = load_recipe("text", words)
    trainer = start(recipe, tmp_path / "broken").trainer(Silent(), stop)
    with pytest.raises(Stopped) as stopped:
        trainer.train()
    assert (stopped.value.number, len(slices)) == (TERM, 1)
    trainer.run.release()
    again = Served("digit_share", port=server.port)
    assert resumed(tmp_path / "broken", recipe) == 1
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")
    again.close()


# -- checkpoints by the clock --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("minutes", "expected"), [("null", [4]), ("1.0", [2, 4]), ("0.5", [1, 2, 3, 4])])
def test_checkpoints_are_written_by_the_clock_and_change_no_number(
    request: pytest.FixtureRequest, tmp_path: Path, minutes: str, expected: list[int]
) -> None:
    """An iteration takes 30 s here."""
    words = [*request.getfixturevalue("small_text"), *SHORT, "run.keep=9", "run.iterations=4"]
    Run(load_recipe("text", words), tmp_path / "whole")
    timed = load_recipe("text", [*words, f"run.checkpoint_minutes={minutes}"])
    clock = Time()

    class Slow(Silent):
        def iteration(self, record: dict) -> None:
            clock.now += 30

    trainer = start(timed, tmp_path / "run").trainer(Slow())
    trainer.keeper._clock, trainer.keeper._last = clock, 0.0
    trainer.train()
    names = [path.name for path in trainer.run.list_checkpoints()]
    assert names == [f"iter-{iteration:06d}" for iteration in expected]
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


def test_checkpoints_that_take_long_are_written_less_often(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """However large a model is, the clock makes a run at most a twentieth longer."""
    keeper = start(RUNS["text"](request), tmp_path / "run").trainer(Silent()).keeper
    clock = Time()
    keeper._clock, keeper._last, keeper._took = clock, 0.0, 60.0
    clock.now = 10 * 60
    assert keeper.pause(1) == 0
    assert keeper.run.list_checkpoints() == []
    clock.now = SHARE * 60
    keeper.pause(1)
    assert [path.name for path in keeper.run.list_checkpoints()] == ["iter-000001"]


@pytest.mark.slow
def test_a_reward_that_fails_loses_no_iteration_before(small_text: list[str], tmp_path: Path) -> None:
    """The state before the iteration is written, so the run goes on to the numbers of a run without the failure."""
    reward = tmp_path / "reward.py"
    plain = "def nines(completions, prompts, **columns):\n    return [text.count('9') / 9 for text in completions]\n"
    words = [*small_text, "run={iterations: 4, checkpoint_every: 1000}", "evaluate.every=1000", "data.heldout=null"]
    recipe = load_recipe("text", [*words, f"rewards=[{{name: '{reward}:nines'}}]"])
    reward.write_text(plain)
    start(recipe, tmp_path / "whole").trainer(Silent()).train()
    reward.write_text(
        "calls = []\ndef nines(completions, prompts, **columns):\n    calls.append(1)\n"
        "    if len(calls) > 2:\n        raise RuntimeError('the server said no')\n"
        "    return [text.count('9') / 9 for text in completions]\n"
    )
    with pytest.raises(RewardError, match="the server said no"):
        start(recipe, tmp_path / "broken").trainer(Silent()).train()
    assert [path.name for path in (tmp_path / "broken" / "checkpoints").iterdir()] == ["iter-000002"]
    reward.write_text(plain)
    again = Session(recipe, RunFolder.open(tmp_path / "broken")).trainer(Silent())
    again.resume()
    assert again.next_iteration == 2
    again.train()
    one, two = (tmp_path / name / "lora" / "adapter_model.safetensors" for name in ("whole", "broken"))
    assert one.read_bytes() == two.read_bytes()
