"""A rollout in chunks: two processes give the run of one that samples at once; a killed run goes on to the last bit."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flowgrpo.bench.interruption import contents
from flowgrpo.configs.load import dump_recipe, load_recipe
from tests.training import test_sharding
from tests.training.test_processes import Runs, lines, printed, require_equal, run_all, shortened, statuses

REWARDS = """
import os
import signal
import threading

calls = []

def level(images, **columns):
    return images.mean(dim=(1, 2, 3)).tolist()

def far(images, prompts, groups, **columns):
    calls.append(len(images))
    print(f"far: call {len(calls)} of {len(images)} in {threading.current_thread().name}", flush=True)
    rank = int(os.environ["RANK"])
    if len(calls) == by_rank("KILLED_AT")[rank]:
        os.kill(os.getpid(), signal.SIGKILL)
    if 0 < by_rank("REFUSED_FROM")[rank] <= len(calls):
        raise RuntimeError(f"the server said no to {prompts[0]}")
    return images.flatten(1).std(dim=1).tolist()

far.remote = True

def by_rank(name):
    return [int(number) for number in os.environ.get(name, "0,0").split(",")]
"""
KILLED = {"one": "5,0", "two": "4,2"}
"""Calls of the second iteration, by rank: of three chunks in one process; of two and of one in two."""


def overrides(small: list[str], rewards: Path, chunk: int | None, **rollout: str) -> list[str]:
    """Three prompts of three images, in batches of a group; see `test_processes.recipes` on `eps`."""
    sizes = {"prompts": 3, "group": 3, "batch": 3, "decode_batch": 3, "chunk": chunk or "null", **rollout}
    return [
        *small, "sampler.plan.shared_noise=false",
        f"rollout={{{', '.join(f'{key}: {value}' for key, value in sizes.items())}}}",
        f"rewards=[{{name: '{rewards}:level'}}, {{name: '{rewards}:far', weight: 0.5}}]",
        f"evaluate={{every: 2, prompts: 3, seeds: 3, rewards: [{{name: '{rewards}:level'}}]}}",
        "optimizer={eps: 0.01, learning_rate: 0.5, weight_decay: 0.0, updates: 1, ema: {decay: 0.5, every: 1}}",
        "run={iterations: 2, checkpoint_every: 1, keep: 9, sample_every: 1, seed: 0}",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def runs(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """`one` of them in one process at once, `two` in two chunk by chunk; `KIND`, and `KIND-alone` in one by chunks."""
    folder = tmp_path_factory.mktemp("chunks")
    rewards = folder / "rewards.py"
    rewards.write_text(REWARDS)
    found, jobs = Runs(logs=folder), list[dict[str, Any]]()
    budget = "{choice: variance, rounds: 2, most: 4}"
    kinds: dict[str, tuple[list[str], dict[str, str]]] = {
        "updates": (["optimizer.updates=2", "advantage.scale=batch"], {}),
        "rounds": (["advantage=cumulative"], {"budget": budget}),
        "shards": (["model.train=full"], {}),
    }

    def job(name: str, words: list[str], count: int, **environment: str) -> None:
        jobs.append({"words": words, "log": name, "count": count, "environment": environment})

    def train(name: str, source: str, count: int, **environment: str) -> Path:
        job(name, ["train", str(folder / f"{source}.yaml"), "--out", str(folder / name)], count, **environment)
        return folder / name

    for kind, (more, rollout) in kinds.items():
        for name, chunk in ((kind, 1), (f"{kind}-whole", None)):
            recipe = load_recipe("mixgrpo_flash_guard", [*overrides(small, rewards, chunk, **rollout), *more])
            (folder / f"{name}.yaml").write_text(dump_recipe(recipe))
        found.one[kind] = train(f"{kind}-one", f"{kind}-whole", 1)
        found.two[kind] = train(f"{kind}-two", kind, 2, **(test_sharding.FSDP if kind == "shards" else {}))
    for count, name in ((1, "one"), (2, "two")):
        getattr(found, name)["killed"] = train(f"killed-{name}", "updates", count, KILLED_AT=KILLED[name])
    found.two["refused"] = train("refused-two", "updates", 2, REFUSED_FROM="0,2")
    run_all(jobs, folder)
    jobs.clear()
    found.one["fewer"] = Path(shutil.copytree(found.two["killed"], folder / "fewer"))
    for kind in ("updates", "rounds"):
        found.one[f"{kind}-alone"] = shortened(found.two[kind], folder / f"{kind}-alone", 1)
        job(f"{kind}-alone", ["resume", str(found.one[f"{kind}-alone"])], 1)
    job("resumed-one", ["resume", str(found.one["killed"])], 1)
    job("resumed-two", ["resume", str(found.two["killed"])], 2)
    job("fewer", ["resume", str(found.one["fewer"])], 1)
    run_all(jobs, folder)
    return found


def calls(runs: Runs, name: str, rank: int) -> list[tuple[int, str]]:
    """How many images each call of the remote reward had, and in which thread it was made."""
    said = [line for line in printed(runs, name, rank).splitlines() if line.startswith("far: ")]
    parts = [line.split(" of ")[1].split(" in ") for line in said]
    return [(int(count), thread) for count, thread in parts]


def require_ended(runs: Runs, name: str, expected: list[int]) -> None:
    told = "\n".join(printed(runs, name, rank) for rank in range(len(expected)))
    assert statuses(runs, name) == expected, told


@pytest.mark.parametrize("kind", ["updates", "rounds"])
def test_two_processes_in_chunks_give_the_run_of_one_at_once(runs: Runs, kind: str) -> None:
    require_ended(runs, f"{kind}-two", [0, 0])
    require_equal(runs.two[kind], runs.one[kind])
    first, expected = (lines(run, "samples/index.jsonl") for run in (runs.two[kind], runs.one[kind]))
    early = [record for record in first if record["iteration"] == 0]
    # Before the first update not even gradients have been added: the same bits.
    assert early == [record for record in expected if record["iteration"] == 0]
    for record in early:
        path = Path("samples") / record["image"]
        assert (runs.two[kind] / path).read_bytes() == (runs.one[kind] / path).read_bytes()


def test_processes_that_share_weights_sample_unequal_numbers_of_chunks(runs: Runs) -> None:
    """While one samples its second chunk the other has none, and takes part in what gathers the weights."""
    require_ended(runs, "shards-two", [0, 0])
    test_sharding.require_equal(runs.two["shards"], runs.one["shards"])
    assert [len(calls(runs, "shards-two", rank)) for rank in (0, 1)] == [4, 2]


def test_each_process_has_its_own_chunks_scored_in_a_thread(runs: Runs) -> None:
    """Three prompts: the first process has two, the second one; without chunks all nine images are one call."""
    assert calls(runs, "updates-two", 0) == [(3, "rewards ahead")] * 4
    assert calls(runs, "updates-two", 1) == [(3, "rewards ahead")] * 2
    assert calls(runs, "updates-one", 0) == [(9, "MainThread")] * 2


def test_processes_ask_for_unequal_numbers_of_rounds(runs: Runs) -> None:
    """Two rounds a prompt on average and four at most are six groups an iteration, however they fall to processes."""
    shares = [len(calls(runs, "rounds-two", rank)) for rank in (0, 1)]
    assert sum(shares) == 2 * 6
    assert [record["samples"] for record in lines(runs.two["rounds"], "metrics.jsonl")[:2]] == [18, 18]


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_run_killed_between_chunks_goes_on_to_the_last_bit(runs: Runs, name: str) -> None:
    """By SIGKILL, while a chunk of the second iteration is scored."""
    count = 1 if name == "one" else 2
    require_ended(runs, f"killed-{name}", [-9] * count)
    require_ended(runs, f"resumed-{name}", [0] * count)
    assert "resumed before iteration 1" in printed(runs, f"resumed-{name}", 0)
    killed = getattr(runs, name)["killed"]
    # The run of one process was not made in chunks, and it is equal bit for bit.
    assert contents(killed) == contents(getattr(runs, name)["updates"])


def test_a_run_killed_in_two_processes_goes_on_in_one(runs: Runs) -> None:
    require_ended(runs, "fewer", [0])
    assert "resumed before iteration 1" in printed(runs, "fewer", 0)
    require_equal(runs.one["fewer"], runs.two["updates"])
    assert calls(runs, "fewer", 0) == [(3, "rewards ahead")] * 3


@pytest.mark.parametrize("kind", ["updates", "rounds"])
def test_a_run_of_two_processes_goes_on_in_one(runs: Runs, kind: str) -> None:
    require_ended(runs, f"{kind}-alone", [0])
    require_equal(runs.one[f"{kind}-alone"], runs.one[kind])


def test_a_chunk_that_is_refused_in_one_process_ends_both(runs: Runs) -> None:
    """The second process's chunk of the second iteration: what was done before is kept."""
    require_ended(runs, "refused-two", [1, 1])
    assert "error: reward 'far' failed" in printed(runs, "refused-two", 1)
    assert "process 1 of 2 failed, so this one ends as well" in printed(runs, "refused-two", 0)
    assert "the server said no" in printed(runs, "refused-two", 0)
    assert json.loads((runs.two["refused"] / "metrics.jsonl").read_text())["iteration"] == 0
