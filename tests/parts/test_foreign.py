"""Whatever a reward raises counts as its failure: it does not end the process, and is not taken for a normal end."""

import asyncio
import json
import os
import threading
from pathlib import Path

import pytest
import torch

from flowgrpo.parts.foreign import Quit, contained
from flowgrpo.parts.plugins import load
from flowgrpo.rewards import Reward, RewardError, RewardSet, RewardSpec
from flowgrpo.rewards.inputs import Inputs
from flowgrpo.rewards.registry import build
from flowgrpo.rewards.within import score_within
from flowgrpo.rewards.worker import Worker

PROMPTS = ["a", "b", "c", "d"]


class Odd(BaseException):
    """An exception class as a careless author might write it."""


ENDS = [SystemExit(0), SystemExit("done"), GeneratorExit(), asyncio.CancelledError(), Odd("odd")]


@pytest.mark.parametrize("error", ENDS, ids=repr)
def test_what_is_no_exception_is_a_failure_with_its_sample_kept(error: BaseException, tmp_path: Path) -> None:
    def quits(completions: list[str], prompts: list[str]) -> list[float]:
        if "c" in prompts:
            raise error
        return [1.0] * len(prompts)

    with pytest.raises(RewardError, match=r"'quits' failed on sample 2 \(prompt 'c'\)") as caught:
        RewardSet([Reward(quits, "quits")], quarantine=tmp_path).score(PROMPTS, PROMPTS)
    assert isinstance(caught.value.__cause__, Quit)
    assert f"raised {error!r} at {__file__}:" in str(caught.value)
    facts = json.loads((tmp_path / "quits-0000" / "sample-0002.json").read_text())
    assert facts["completion"] == "c"


@pytest.mark.parametrize("error", ENDS, ids=repr)
def test_it_does_not_pass_through_another_reward_or_what_is_returned(error: BaseException) -> None:
    class Lazy:
        def __float__(self) -> float:
            raise error

    def quits(prompts: list[str]) -> list[float]:
        raise error

    with pytest.raises(RuntimeError, match=r"the judge 'quits' failed on prompt 'a': Quit"):
        score_within(Reward(quits, "quits"), Inputs(PROMPTS, PROMPTS, {}, None), "judge")
    with pytest.raises(RewardError, match="failed on sample 0"):
        RewardSet([Reward(lambda prompts: [Lazy() for _ in prompts], "lazy")]).score(PROMPTS, PROMPTS)


def test_ctrl_c_goes_on_and_what_looks_like_it_in_another_thread_does_not() -> None:
    def interrupted(prompts: list[str]) -> list[float]:
        raise KeyboardInterrupt

    rewards = RewardSet([Reward(interrupted, "interrupted")])
    with pytest.raises(KeyboardInterrupt):
        rewards.score(PROMPTS, PROMPTS)
    found: list[BaseException] = []

    def elsewhere() -> None:
        try:
            rewards.score(PROMPTS, PROMPTS)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert isinstance(found[0], RewardError)


def test_an_exception_and_a_result_pass_unchanged() -> None:
    problem = StopIteration(3)
    with pytest.raises(StopIteration) as caught, contained():
        raise problem
    assert caught.value is problem
    with contained():
        passed = True
    assert passed


def test_code_that_moves_to_another_folder_is_moved_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def moving(prompts: list[str]) -> list[float]:
        os.chdir("/")
        return [0.0] * len(prompts)

    RewardSet([Reward(moving, "moving")]).score(PROMPTS, PROMPTS)
    assert Path.cwd() == tmp_path


def test_a_change_for_a_moment_in_one_thread_is_not_made_lasting_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    moved, entered, left = threading.Event(), threading.Event(), threading.Event()

    def tidy() -> None:
        with contained():
            os.chdir("/")
            moved.set()
            assert entered.wait(60)
            os.chdir(tmp_path)
        left.set()

    thread = threading.Thread(target=tidy)
    thread.start()
    assert moved.wait(60)
    with contained():
        entered.set()
        assert left.wait(60)
    thread.join()
    assert Path.cwd() == tmp_path


def test_code_that_changes_the_default_dtype_changes_it_for_itself_only() -> None:
    def doubling(prompts: list[str]) -> list[float]:
        torch.set_default_dtype(torch.float64)
        return [0.0] * len(prompts)

    RewardSet([Reward(doubling, "doubling")]).score(PROMPTS, PROMPTS)
    assert torch.zeros(1).dtype == torch.float32


def test_files_and_constructors_that_exit_are_refused_with_their_line(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text("import sys\n\ndef score(prompts):\n    return [0.0]\n\nsys.exit()\n")
    with pytest.raises(ValueError, match=r"cannot be imported: script\.py, line 6: SystemExit"):
        RewardSet([RewardSpec(f"{file}:score")])
    file.write_text("class Loads:\n    def __init__(self):\n        raise SystemExit(0)\n")
    with pytest.raises(ValueError, match=r"cannot be made: .*it raised SystemExit\(0\) at .*script.py:3"):
        build(RewardSpec(f"{file}:Loads"))


def test_a_close_that_fails_names_its_reward() -> None:
    class Server:
        def __call__(self, prompts: list[str]) -> list[float]:
            return [0.0] * len(prompts)

        def close(self) -> None:
            raise SystemExit(0)

    with pytest.raises(
        RewardError, match=r"'server' failed while it was closed: Quit: it raised SystemExit\(0\)"
    ) as found:
        RewardSet([Reward(Server(), "server")]).close()
    assert (found.value.reward, found.value.indices, found.value.saved) == ("server", [], None)


@pytest.mark.slow
def test_a_worker_answers_although_its_function_exits() -> None:
    worker = Worker("sys:exit")
    try:
        for code in (0, 3):
            with pytest.raises(RuntimeError, match=f"SystemExit: {code}"):
                worker(code, seconds=60)
    finally:
        worker.close()


def test_a_file_may_import_modules_that_lie_beside_it(tmp_path: Path) -> None:
    (tmp_path / "helper_of_mine.py").write_text("SCORE = 3.0\n")
    (tmp_path / "own.py").write_text(
        "from helper_of_mine import SCORE\n\ndef reward(images, prompts):\n    return [SCORE] * len(images)\n"
    )
    found = load(f"{tmp_path / 'own.py'}:reward", "own", "reward")
    assert found([1, 2], ["a", "b"]) == [3.0, 3.0]
