"""One of several processes has a signal: all stop at the same place, and go on from there bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest

from flowgrpo.bench.interruption import contents
from flowgrpo.training.folder.run_folder import RunFolder
from tests.training import ranks

pytestmark = pytest.mark.slow
CASES = ["train", "eval", "train-away", "eval-away"]

# The second process has a signal in its second call of the reward that SIGNAL_IN names. If AWAY is set, the call fails
# from then on, as with a server that is away, so that the reward waits and is called again.
REWARDS = """
import os, signal
calls = {"train": 0, "eval": 0}

def score(where, completions):
    calls[where] += 1
    if os.environ.get("SIGNAL_IN") == where and os.environ["RANK"] == "1" and calls[where] >= 2:
        if calls[where] == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        if os.environ.get("AWAY"):
            raise ConnectionError("the server is away")
    return [text.count("9") - 0.1 * len(text) for text in completions]

def nines(completions, **columns):
    return score("train", completions)

def shown(completions, **columns):
    return score("eval", completions)

nines.remote = shown.remote = True
"""


@pytest.fixture(scope="module")
def folder(random_language_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopping")
    reward = folder / "reward.py"
    reward.write_text(REWARDS)
    words = [
        f"model.path={random_language_folder}", f"rewards=[{{name: '{reward}:nines'}}]", "model.train=lora",
        "rollout={prompts: 3, group: 2, batch: 4, tokens: 60}", "generation.max_tokens=4", "optimizer.updates=2",
        f"evaluate={{every: 1, prompts: 3, rewards: [{{name: '{reward}:shown'}}]}}", "extensions=[curriculum]",
        "optimizer.learning_rate=0.01", "run={iterations: 3, checkpoint_every: 100, sample_every: 1}",
    ]  # fmt: skip
    jobs: list[dict[str, Any]] = [{"words": ["train", "text", *words, "--out", str(folder / "whole")], "log": "whole"}]
    for case in CASES:
        run, where = str(folder / case), case.removesuffix("-away")
        environment = {"SIGNAL_IN": where} | ({"AWAY": "1"} if case != where else {})
        jobs.append({"words": ["train", "text", *words, "--out", run], "log": f"{case}-broken",
                     "environment": environment})  # fmt: skip
        jobs.append({"words": ["resume", run], "log": f"{case}-resumed"})
    ranks.run_all([{**job, "count": 2, "log": str(folder / job["log"])} for job in jobs], patience=600)
    return folder


def printed(folder: Path, log: str) -> str:
    return "".join((folder / f"{log}-{rank}.txt").read_text() for rank in (0, 1))


@pytest.mark.parametrize("where", CASES)
def test_a_signal_to_one_ends_all_and_nothing_is_lost(folder: Path, where: str) -> None:
    told = printed(folder, f"{where}-broken")
    assert json.loads((folder / f"{where}-broken.json").read_text()) == [143, 143], told
    assert f"stopped by SIGTERM; go on with `flowgrpo resume {folder / where}`" in told
    assert "Traceback" not in told
    assert json.loads((folder / f"{where}-resumed.json").read_text()) == [0, 0]
    # In the second iteration no weights had moved, so this iteration is done again.
    assert "resumed before iteration 1" in printed(folder, f"{where}-resumed")
    assert contents(folder / where) == contents(folder / "whole")
    assert [path.name for path in RunFolder(folder / where).list_checkpoints()] == ["iter-000001", "iter-000003"]
