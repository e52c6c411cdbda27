"""A reward fails in one of several processes, or in all: no iteration before is lost, and `resume` goes on from there.

Each case fails in the third iteration, or in the evaluation before it, and is resumed with a reward that is well.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from flowgrpo.bench.interruption import contents
from flowgrpo.configs.load import dump_recipe, load_recipe
from flowgrpo.training.folder.run_folder import RunFolder
from tests.training import ranks

pytestmark = pytest.mark.slow
# As the launcher of accelerate sets it.
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}

# The process fails that FAIL_RANK names, or all, from the call FAIL_CALL of the reward FAIL_IN on.
REWARDS = """
import os
calls = {"train": 0, "eval": 0}

def score(where, completions):
    calls[where] += 1
    late = calls[where] >= int(os.environ.get("FAIL_CALL", "0"))
    if os.environ.get("FAIL_IN") == where and os.environ["FAIL_RANK"] in ("all", os.environ["RANK"]) and late:
        raise RuntimeError("the server said no")
    return [text.count("9") - 0.1 * len(text) for text in completions]

def nines(completions, **columns):
    return score("train", completions)

def shown(completions, **columns):
    return score("eval", completions)

def level(images, **columns):
    score("train", [""] * len(images))
    return images.flatten(1).mean(1).tolist()
"""
# Where a reward fails, in which process, and in which call of it. In rounds there are two calls in an iteration.
CASES = {
    "one": ("train", "1", 3),
    "first": ("train", "0", 3),
    "all": ("train", "all", 3),
    "eval": ("eval", "1", 3),
    "rounds": ("train", "1", 5),
    "rounds-late": ("train", "1", 6),
}


@pytest.fixture(scope="module")
def folder(random_language_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("failing")
    reward = folder / "reward.py"
    reward.write_text(REWARDS)
    words = [
        f"model.path={random_language_folder}", f"rewards=[{{name: '{reward}:nines'}}]", "model.train=lora",
        "rollout={prompts: 3, group: 2, batch: 4, tokens: 60}", "generation.max_tokens=4",
        f"evaluate={{every: 1, prompts: 3, rewards: [{{name: '{reward}:shown'}}]}}", "extensions=[curriculum]",
        "optimizer.learning_rate=0.01", "run={iterations: 4, checkpoint_every: 100, sample_every: 1}",
    ]  # fmt: skip
    in_rounds = ["rollout.budget={choice: variance, rounds: 2, most: 3}"]
    jobs: list[dict[str, Any]] = [
        {"words": ["train", "text", *words, "--out", str(folder / "whole")], "log": "whole"},
        {"words": ["train", "text", *words, *in_rounds, "--out", str(folder / "whole-rounds")], "log": "whole-rounds"},
    ]
    for case, (where, rank, call) in CASES.items():
        run, more = str(folder / case), in_rounds if case.startswith("rounds") else []
        environment = {"FAIL_IN": where, "FAIL_RANK": rank, "FAIL_CALL": str(call)}
        jobs.append({"words": ["train", "text", *words, *more, "--out", run], "log": f"{case}-broken",
                     "environment": environment})  # fmt: skip
        jobs.append({"words": ["resume", run], "log": f"{case}-resumed"})
    ranks.run_all([{**job, "count": 2, "log": str(folder / job["log"])} for job in jobs], patience=900)
    return folder


def printed(folder: Path, log: str, rank: int) -> str:
    return (folder / f"{log}-{rank}.txt").read_text()


@pytest.mark.parametrize("case", CASES)
def test_no_iteration_is_lost_and_no_process_waits(folder: Path, case: str) -> None:
    where, rank, _ = CASES[case]
    name = "nines" if where == "train" else "shown"
    told = [printed(folder, f"{case}-broken", k) for k in (0, 1)]
    assert json.loads((folder / f"{case}-broken.json").read_text()) == [1, 1], told
    for k, text in enumerate(told):
        own = rank in ("all", str(k))
        start = "error: " if own else f"error: process {rank} of 2 failed, so this one ends as well: "
        assert f"{start}reward '{name}' failed on " in text
        assert f"go on with `flowgrpo resume {folder / case}`" in text
        assert "Traceback" not in text
    assert json.loads((folder / f"{case}-resumed.json").read_text()) == [0, 0]
    assert "resumed before iteration 2" in printed(folder, f"{case}-resumed", 0)
    names = [path.name for path in RunFolder(folder / case).list_checkpoints()]
    assert names == ["iter-000002", "iter-000004"]


@pytest.mark.parametrize("case", CASES)
def test_the_resumed_run_has_the_numbers_of_a_run_without_the_failure(folder: Path, case: str) -> None:
    whole = "whole-rounds" if case.startswith("rounds") else "whole"
    assert contents(folder / case) == contents(folder / whole)


EXTENSION = """
import os
from flowgrpo.training.extensions.extension import Extension

class Late(Extension):
    def begin(self, task, processes, clock):
        if os.environ["RANK"] == os.environ["FAIL_RANK"]:
            raise RuntimeError("no room")
"""


def test_a_run_that_fails_when_the_model_is_loaded_leaves_its_folder_free(small: list[str], tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(EXTENSION)
    words = ["train", "mixgrpo_flash_guard", *small, "data.heldout=null", "--trust"]
    words.append(f"extensions=[{{name: '{tmp_path / 'late.py'}:Late'}}]")
    jobs = [
        {"words": [*words, "--out", str(tmp_path / f"run-{count}-{fails}")], "log": str(tmp_path / f"{count}-{fails}"),
         "count": count, "environment": {"FAIL_RANK": fails}}
        for count, fails in ((1, "0"), (2, "0"), (2, "1"))
    ]  # fmt: skip
    ranks.run_all(jobs, patience=300)
    assert json.loads((tmp_path / "1-0.json").read_text()) == [1]
    assert not (tmp_path / "run-1-0").exists()
    for fails in (0, 1):
        log, folder = f"2-{fails}", tmp_path / f"run-2-{fails}"
        assert json.loads((tmp_path / f"{log}.json").read_text()) == [1, 1]
        other = printed(tmp_path, log, 1 - fails)
        assert f"process {fails} of 2 failed, so this one ends as well: " in other
        assert "RuntimeError: no room" in other
        assert not folder.exists() or not any(folder.iterdir())


def test_weights_in_shards_are_written_too(small: list[str], tmp_path: Path) -> None:
    """The other process may still need this one for its samples when the reward fails here."""
    reward, source = tmp_path / "reward.py", tmp_path / "shards.yaml"
    reward.write_text(REWARDS)
    words = [
        *small, "rollout={prompts: 3, group: 4, batch: 2, decode_batch: 4}", "model.train=full",
        f"rewards=[{{name: '{reward}:level'}}]", "data.heldout=null",
        "run={iterations: 3, checkpoint_every: 100, sample_every: 1}",
    ]  # fmt: skip
    source.write_text(dump_recipe(load_recipe("mixgrpo_flash_guard", words)))
    fails = {"FAIL_IN": "train", "FAIL_RANK": "1", "FAIL_CALL": "3"}
    jobs: list[dict[str, Any]] = [
        {"words": ["train", str(source), "--out", str(tmp_path / "whole")], "log": "whole", "environment": FSDP},
        {"words": ["train", str(source), "--out", str(tmp_path / "run")], "log": "broken", "environment": FSDP | fails},
        {"words": ["resume", str(tmp_path / "run")], "log": "resumed", "environment": FSDP},
    ]
    ranks.run_all([{**job, "count": 2, "log": str(tmp_path / job["log"])} for job in jobs], patience=600)
    told = printed(tmp_path, "broken", 1)
    assert json.loads((tmp_path / "broken.json").read_text()) == [1, 1], told
    assert "error: reward 'level' failed on " in told
    assert "resumed before iteration 2" in printed(tmp_path, "resumed", 0)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
