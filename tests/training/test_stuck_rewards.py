"""Runs of the command whose reward hangs or exits: each ends by itself, with status 1 and one message, and is kept."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from flowgrpo.configs.load import dump_recipe, load_recipe
from tests.training import ranks

PATIENCE = 1500.0
REWARDS = """
import os, sys, threading

calls = 0

def level(images):
    return images.mean(dim=(1, 2, 3)).tolist()

def exits_later(images):
    global calls
    calls += 1
    if calls > 1:
        sys.exit()
    return level(images)

def wait():
    # Python's own end of a process would wait for such a thread.
    thread = threading.Thread(target=threading.Event().wait)
    thread.start()
    thread.join()

def hangs(images):
    wait()

def hangs_elsewhere(images):
    wait()

hangs_elsewhere.remote = True

def hangs_in_one_process(images):
    if os.environ.get("RANK") == "1":
        wait()
    return level(images)

def computes(completions, prompts):
    while True:
        pass
"""


@dataclass(frozen=True)
class Ended:
    """A command that has ended by itself, in one or several processes."""

    statuses: list[int]
    logs: list[str]
    run: Path

    @property
    def message(self) -> str:
        """The last line of the last process, which holds the error."""
        return self.logs[-1].strip().splitlines()[-1]

    @property
    def logged(self) -> list[int]:
        """Iterations in the metrics."""
        file = self.run / "metrics.jsonl"
        return [json.loads(line)["iteration"] for line in file.read_text().splitlines()] if file.exists() else []


def commands(small: list[str], folder: Path) -> dict[str, tuple[list[str], int]]:
    """Of each case the words of its command, and how many processes have it."""
    file = folder / "rewards.py"
    file.write_text(REWARDS)

    def recipe(name: str, reward: str, *more: str, seconds: int = 1) -> str:
        entries = [
            f"rewards=[{{name: '{file}:{reward}', time_limit: {seconds}}}]",
            f"evaluate.rewards=[{{name: '{file}:level'}}]",
        ]
        path = folder / f"{name}.yaml"
        path.write_text(dump_recipe(load_recipe("mixgrpo_flash_guard", [*small, *entries, "run.iterations=2", *more])))
        return str(path)

    def train(name: str, reward: str, *more: str, seconds: int = 1) -> list[str]:
        return ["train", recipe(name, reward, *more, seconds=seconds), "--out", str(folder / name)]

    own = f"evaluate.rewards=[{{name: '{file}:hangs', time_limit: 1}}]"
    entry = f"{{name: '{file}:computes', time_limit: 1}}"
    return {
        "exits": (train("exits", "exits_later", seconds=100), 1),
        "hangs": (train("hangs", "hangs"), 1),
        "elsewhere": (train("elsewhere", "hangs_elsewhere", "rollout.chunk=1"), 1),
        "processes": (train("processes", "hangs_in_one_process", seconds=5), 2),
        "evaluate": (["evaluate", "scenes", recipe("evaluate", "level", own)], 1),
        "check": (["rewards", "check", entry, "--prompts", "1", "--seeds", "2"], 1),
    }  # fmt: skip


@pytest.fixture(scope="module")
def ended(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    folder = tmp_path_factory.mktemp("stuck")
    jobs = [
        {"words": words, "log": str(folder / name), "count": count, "folder": str(folder)}
        for name, (words, count) in commands(small, folder).items()
    ]
    ranks.run_all(jobs, patience=PATIENCE)
    return {
        Path(job["log"]).name: Ended(
            json.loads(Path(f"{job['log']}.json").read_text()),
            [Path(f"{job['log']}-{rank}.txt").read_text() for rank in range(job["count"])],
            Path(job["log"]),
        )
        for job in jobs
    }


def test_a_reward_that_exits_ends_the_run_as_a_failure_with_its_results_so_far(ended: dict[str, Ended]) -> None:
    run = ended["exits"]
    assert run.statuses == [1]
    assert run.message.startswith("error: reward 'exits_later' failed on sample 0 (prompt '")
    assert "Quit: it raised SystemExit(" in run.message
    assert run.message.endswith(f"go on with `flowgrpo resume {run.run}`.")
    assert run.logged == [0]
    assert (run.run / "checkpoints" / "iter-000001" / "state.json").is_file()
    assert len(list((run.run / "failed" / "exits_later-0000").iterdir())) == 2


def test_a_reward_that_hangs_ends_the_run_with_the_sample_kept(ended: dict[str, Ended]) -> None:
    run = ended["hangs"]
    assert (run.statuses, run.logged) == ([1], [])
    assert "error: reward 'hangs' failed on a call with samples 0 to 5 (the first prompt is '" in run.message
    assert "it took longer than its time_limit of 1 s; it is at " in run.message
    assert "Traceback" not in run.logs[0]
    kept = sorted(path.name for path in (run.run / "failed" / "hangs-0000").iterdir())
    assert kept == [f"sample-{k:04d}.{kind}" for k in range(6) for kind in ("json", "png")]


def test_one_that_hangs_elsewhere_while_sampling_goes_on_does_too(ended: dict[str, Ended]) -> None:
    run = ended["elsewhere"]
    assert run.statuses == [1]
    assert "reward 'hangs_elsewhere' failed on a call with samples 0 to 2 (the first prompt is '" in run.message
    assert len(list((run.run / "failed" / "hangs_elsewhere-0000").glob("*.png"))) == 3


def test_of_several_processes_none_waits_for_the_one_that_hangs(ended: dict[str, Ended]) -> None:
    run = ended["processes"]
    assert run.statuses == [1, 1]
    assert "reward 'hangs_in_one_process' failed on " in run.message
    assert "process 1 of 2 failed, so this one ends as well" in run.logs[0]
    assert list((run.run / "failed").iterdir())


def test_evaluations_and_checks_end_as_well(ended: dict[str, Ended]) -> None:
    assert ended["evaluate"].statuses == ended["check"].statuses == [1]
    assert ended["evaluate"].message.startswith("error: reward 'hangs' failed on ")
    assert "time_limit of 1 s; it is at " in ended["evaluate"].message
    assert ended["check"].message.startswith("error: reward 'computes' failed on ")
    assert "time_limit of 1 s; it is at " in ended["check"].message
