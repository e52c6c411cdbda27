"""Two processes give the run of one, uneven work included; a run goes on with another number; failures end all."""

import json
import math
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file

from flowgrpo.configs.load import dump_recipe, load_recipe
from flowgrpo.configs.schema import Recipe
from flowgrpo.pipelines.experience import part_of
from flowgrpo.rewards.runner import RewardBatch
from flowgrpo.training.credit.pooling import pooled
from flowgrpo.training.data import PromptRow
from flowgrpo.training.distributed import processes
from flowgrpo.training.distributed.failures import FailedTogether
from flowgrpo.training.distributed.processes import Processes
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.joined_rollouts import joint_record
from flowgrpo.training.recipe_launches import check_ranks
from flowgrpo.training.reporting.records import joint_update
from tests.training import ranks

T = TypeVar("T")
ITERATIONS = 2
REWARDS = """
import os
from flowgrpo.rewards import Scores

def level(images, **columns):
    # A sum in float32 depends, by rounding, on the number of images in the call.
    means = images.double().mean(dim=(1, 2, 3)).tolist()
    return Scores(means, answers=[f"{1000 * mean:.0f}" for mean in means])

def contrast(images, **columns):
    return images.double().flatten(1).std(dim=1).tolist()

def lacks_in_one_process(images, **columns):
    if os.environ.get("RANK") == "1":
        import no_such_package
    return [0.5 * k for k in range(len(images))]
"""

# -- real processes ------------------------------------------------------------------------------------------------


@dataclass
class Runs:
    """The same recipes run by one process, and by two."""

    one: dict[str, Path] = field(default_factory=dict)
    two: dict[str, Path] = field(default_factory=dict)
    logs: Path = Path()


def recipes(small: list[str], folder: Path) -> dict[str, Recipe]:
    """Three prompts for two processes, in batches of a group, so that one process computes on the same batches.

    With a small `eps` a step of Adam is the sign of the gradient, and a rounding of one near 0 would be a whole step.
    """
    rewards = folder / "rewards.py"
    rewards.write_text(REWARDS)
    shared = [
        *small,
        "rollout={prompts: 3, group: 3, batch: 3, decode_batch: 3}",
        f"rewards=[{{name: '{rewards}:level'}}, {{name: '{rewards}:contrast', weight: 0.5}}]",
        f"evaluate={{every: 2, prompts: 3, seeds: 3, rewards: [{{name: '{rewards}:level'}}]}}",
        "sampler.plan.shared_noise=false",
        f"run={{iterations: {ITERATIONS}, checkpoint_every: 1, keep: 9, sample_every: 1, seed: 0}}",
    ]
    optimizer = "optimizer={updates: 2, eps: 0.01, learning_rate: 0.5, weight_decay: 0.0, ema: {decay: 0.5, every: 1}}"
    once = optimizer.replace("updates: 2", "updates: 1")
    reading = [
        "advantage.scale=batch", "extensions=[{name: uncertainty, reward: level, alpha: 0.8}, "
        "{name: shaping, reward: contrast}, {name: curriculum, mix: 0.2, diversity: {reward: level}}]",
    ]  # fmt: skip
    budget = "rollout={prompts: 3, group: 3, batch: 3, decode_batch: 3, budget: {choice: variance, rounds: 2, most: 4}}"
    sized = folder / "sized.jsonl"
    sizes = [(32, 64), None, (64, 64), (64, 32), (48, 48)]
    with sized.open("w") as file:
        for k in range(7):
            size = sizes[k % 5]
            own = {} if size is None else {"height": size[0], "width": size[1]}
            file.write(json.dumps({"prompt": f"a red star {k}", **own}) + "\n")
    of_sizes = [f"data.train={sized}", f"data.heldout={sized}", "optimizer.learning_rate=50.0"]
    return {
        "sizes": load_recipe("mixgrpo_flash_guard", [*shared, optimizer, *of_sizes]),
        "batch": load_recipe("mixgrpo_flash_guard", [*shared, optimizer, *reading]),
        "rounds": load_recipe("mixgrpo_flash_guard", [*shared, once, budget, "advantage=cumulative"]),
        "broken": load_recipe(
            "mixgrpo_flash_guard", [*shared, f"rewards=[{{name: '{rewards}:lacks_in_one_process'}}]"]
        ),
    }


def shortened(run: Path, copy: Path, iterations: int) -> Path:
    """A copy of a finished run as it was with so many iterations done."""
    shutil.copytree(run, copy)
    for folder in RunFolder.open(copy).list_checkpoints():
        if int(folder.name.removeprefix("iter-")) > iterations:
            shutil.rmtree(folder)
    shutil.rmtree(copy / "lora")
    return copy


@pytest.fixture(scope="module")
def runs(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("processes")
    found, jobs = Runs(logs=folder), []
    for name, recipe in recipes(small, folder).items():
        source = folder / f"{name}.yaml"
        source.write_text(dump_recipe(recipe))
        found.two[name] = folder / f"{name}-two"
        jobs.append({"words": ["train", str(source), "--out", str(found.two[name])], "log": name, "count": 2})
        if name != "broken":
            found.one[name] = folder / f"{name}-one"
            jobs.append(
                {"words": ["train", str(source), "--out", str(found.one[name])], "log": f"{name}-one", "count": 1}
            )
    run_all(jobs, folder)
    found.two["resumed"] = shortened(found.one["batch"], folder / "resumed", 1)
    run_all([{"words": ["resume", str(found.two["resumed"])], "log": "resumed", "count": 2}], folder)
    return found


def run_all(jobs: Sequence[dict[str, Any]], folder: Path) -> None:
    """Each job in processes of its own, with its log in the folder."""
    ranks.run_all([{**job, "log": str(folder / str(job["log"]))} for job in jobs])


def statuses(runs: Runs, name: str) -> list[int]:
    found: list[int] = json.loads((runs.logs / f"{name}.json").read_text())
    return found


def printed(runs: Runs, name: str, rank: int) -> str:
    return (runs.logs / f"{name}-{rank}.txt").read_text()


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """The metrics of an iteration, without times, flat; NaN for null."""
    steps = record.get("steps", {})
    flat = {f"steps/{step}/{key}": value for step, found in steps.items() for key, value in found.items()}
    flat |= {k: v for k, v in record.items() if k != "steps" and not k.startswith("time/")}
    return {key: math.nan if value is None else value for key, value in flat.items()}


def require_equal(run: Path, other: Path) -> None:
    """The runs are equal, except for the order in which gradients were added."""
    for ours, theirs in zip(lines(run, "metrics.jsonl"), lines(other, "metrics.jsonl"), strict=True):
        found, expected = numbers(ours), numbers(theirs)
        # A mean of products with advantages, which are about 1 and add up to about 0.
        assert found.pop("loss", 0.0) == pytest.approx(expected.pop("loss", 0.0), rel=1e-3, abs=1e-5)
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-7, nan_ok=True)
    for ours, theirs in zip(lines(run, "samples/index.jsonl"), lines(other, "samples/index.jsonl"), strict=True):
        assert ours.pop("rewards") == pytest.approx(theirs.pop("rewards"), rel=1e-4)
        assert ours == theirs
    weights, expected = (load_file(r / "lora" / "pytorch_lora_weights.safetensors") for r in (run, other))
    moved = max(float(w.abs().max()) for name, w in expected.items() if "lora_B" in name)
    assert moved > 1e-3
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-4 * moved)


@pytest.mark.parametrize("name", ["batch", "rounds", "sizes"])
def test_two_processes_give_the_run_of_one(runs: Runs, name: str) -> None:
    assert statuses(runs, name) == [0, 0], printed(runs, name, 0) + printed(runs, name, 1)
    run, other = runs.two[name], runs.one[name]
    require_equal(run, other)
    # Before the first update not even gradients have been added: the same bits.
    first, expected = (numbers(lines(r, "metrics.jsonl")[0]) for r in (run, other))
    for key in ("eval/level", "reward/level", "reward/contrast", "degenerate_groups", "evaluations"):
        assert first[key] == expected[key]
    early = [record for record in lines(run, "samples/index.jsonl") if record["iteration"] == 0]
    theirs = [record for record in lines(other, "samples/index.jsonl") if record["iteration"] == 0]
    assert [record["rewards"] for record in early] == [record["rewards"] for record in theirs]
    assert len({record["prompt_id"] for record in early if record["phase"] == "train"}) == 3
    for record in early:
        path = Path("samples") / record["image"]
        assert (run / path).read_bytes() == (other / path).read_bytes()


def test_only_the_first_process_says_where_the_run_is(runs: Runs) -> None:
    said = f"run folder {runs.two['batch']}"
    assert said in printed(runs, "batch", 0)
    assert said not in printed(runs, "batch", 1)


def test_a_run_of_one_process_goes_on_with_two(runs: Runs) -> None:
    assert statuses(runs, "resumed") == [0, 0], printed(runs, "resumed", 0) + printed(runs, "resumed", 1)
    assert "resumed before iteration 1" in printed(runs, "resumed", 0)
    assert "the run had one process until iter-000001, and goes on with 2" in printed(runs, "resumed", 0)
    require_equal(runs.two["resumed"], runs.one["batch"])


@pytest.mark.parametrize("name", ["batch", "rounds", "sizes"])
def test_a_run_of_two_processes_goes_on_with_one(runs: Runs, name: str, tmp_path: Path) -> None:
    run = RunFolder.open(shortened(runs.two[name], tmp_path / "run", 1))
    run_all([{"words": ["resume", str(run.path)], "log": f"{name}-alone", "count": 1}], runs.logs)
    assert statuses(runs, f"{name}-alone") == [0], printed(runs, f"{name}-alone", 0)
    assert "resumed before iteration 1" in printed(runs, f"{name}-alone", 0)
    assert "the run had 2 processes until iter-000001, and goes on with one" in printed(runs, f"{name}-alone", 0)
    require_equal(run.path, runs.one[name])


def test_a_failure_in_one_process_ends_the_other_with_its_message(runs: Runs) -> None:
    assert statuses(runs, "broken") == [1, 1]
    message = "reward 'lacks_in_one_process' needs the package 'no_such_package'"
    assert f"error: {message}" in printed(runs, "broken", 1)
    told = printed(runs, "broken", 0)
    assert f"process 1 of 2 failed, so this one ends as well: {message}" in told
    assert "Traceback" not in told
    assert not (runs.two["broken"] / "lora").exists()


def test_only_the_main_process_speaks(runs: Runs) -> None:
    assert f"held-out after {ITERATIONS} iterations" in printed(runs, "batch", 0)
    assert "held-out" not in printed(runs, "batch", 1)


def test_the_log_holds_what_the_main_process_said_and_a_resumed_run_goes_on_in_it(runs: Runs) -> None:
    def logged(name: str) -> list[str]:
        return [line.split(" ", 2)[2] for line in (runs.two[name] / "run.log").read_text(encoding="utf-8").splitlines()]

    # torch before 2.9 prints that gloo has connected.
    said = [line for line in printed(runs, "batch", 0).splitlines() if not line.startswith("[Gloo]")]
    assert [line for line in logged("batch") if "Warning: " not in line] == said
    said = [line for line in said if not line.startswith("note: optimizer.learning_rate is 0.5")]
    assert said[1].endswith(", 2 processes on cpu")
    whole = [line for line in logged("resumed") if "Warning: " not in line]
    again = [line for line in printed(runs, "resumed", 0).splitlines() if not line.startswith("[Gloo]")]
    assert "resumed before iteration 1" in again
    assert whole[-len(again) :] == again
    assert len(whole) > len(again)


# -- processes as threads ------------------------------------------------------------------------------------------


class Threads:
    """As many `Processes` as asked for, each in a thread of its own, that gather through memory."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self._given = count, [[None] for _ in range(count)]
        self._barrier, self._own = threading.Barrier(count, timeout=20), threading.local()
        monkeypatch.setattr(processes, "gather_object", self._gather)
        monkeypatch.setattr(processes, "reduce", self._reduce)
        monkeypatch.setattr(torch.distributed, "all_reduce", self._add)

    def _gather(self, things: list[Any]) -> list[Any]:
        self._given[self._own.rank] = things
        self._barrier.wait()
        found = [thing for part in self._given for thing in part]
        self._barrier.wait()
        return found

    def _reduce(self, value: torch.Tensor, how: str) -> torch.Tensor:
        assert how == "sum"
        return torch.stack(self._gather([value])).sum(0)

    def _add(self, value: torch.Tensor) -> None:
        # A copy, because the others may read the value after it was changed here.
        value.copy_(self._reduce(value.clone(), "sum"))

    def run(self, work: Callable[[Processes], T]) -> list[T]:
        found: dict[int, T] = {}

        def entered(rank: int) -> None:
            self._own.rank = rank
            found[rank] = work(Processes(rank, self.count))

        threads = [threading.Thread(target=entered, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[rank] for rank in range(self.count)]


def test_processes_wait_longer_for_each_other_than_the_backend_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them may write weights of many gigabytes, or ask a slow reward."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(processes, "PartialState", lambda **given: asked.update(given))
    processes.launched()
    assert asked["timeout"] > 2 * torch.distributed.default_pg_timeout


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize(("total", "updates"), [(5, 1), (5, 3), (8, 2), (12, 5), (7, 7)])
def test_shares_are_even_and_parts_are_the_same_for_any_number(count: int, total: int, updates: int) -> None:
    parts: list[list[int]] = [[] for _ in range(updates)]
    sizes = []
    for rank in range(count):
        mine = Processes(rank, count)
        share, bounds = mine.share(total), (0, *mine.cuts(total, updates), len(mine.share(total)))
        sizes.append(len(share))
        for k, part in enumerate(parts):
            own = share[bounds[k] : bounds[k + 1]]
            part += own
            assert abs(len(own) - len(range(*part_of(total, updates, k))) / count) < 1
    assert max(sizes) - min(sizes) <= 1
    assert [sorted(part) for part in parts] == [list(range(*part_of(total, updates, k))) for k in range(updates)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_pooled_items_are_in_the_order_of_one_process(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = [f"{place}, round {k}" for k in range(2) for place in range(5)]

    def work(mine: Processes) -> tuple[list[str], list[str], list[str]]:
        # Round by round, and of the last place one more.
        places = [*mine.share(5), *mine.share(5)]
        items = [f"{place}, round {k // len(mine.share(5))}" for k, place in enumerate(places)]
        everything, where = mine.pool(items, places)
        return everything, items, [everything[k] for k in where]

    for everything, items, found in Threads(count, monkeypatch).run(work):
        assert everything == sorted(rounds)
        assert found == items


def test_a_process_without_items_pools_those_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Threads(3, monkeypatch).run(lambda mine: mine.pool([f"{k}" for k in mine.share(2)], mine.share(2)))
    assert found == [(["0", "1"], [0]), (["0", "1"], [1]), (["0", "1"], [])]


@dataclass
class Rollout:
    """What `pooled` reads of a rollout: two samples of each prompt, groups numbered by the process itself."""

    prompt_of_sample: list[int]
    lengths: torch.Tensor
    log_probs: torch.Tensor | None = None

    @property
    def groups(self) -> torch.Tensor:
        return 10 * torch.tensor(self.prompt_of_sample)

    @property
    def outcomes(self) -> torch.Tensor:
        return torch.tensor([k % 2 == 0 for k in range(len(self.prompt_of_sample))])


def test_pooled_samples_are_the_same_for_any_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = torch.tensor([[k / 7, -k] for k in range(6)])
    rewards[3, 0] = torch.nan

    def work(mine: Processes) -> Any:
        places = mine.share(3)
        rows = [PromptRow(40 + place, "p") for place in places]
        own = [2 * place + k for place in places for k in range(2)]
        scores = RewardBatch(rewards[own], ("a", "b"), torch.ones(2), {}, {}, {})
        rollout = Rollout([p for p in range(len(places)) for _ in range(2)], torch.tensor(own))
        found = pooled(mine, places, rows, rollout, scores)  # type: ignore[arg-type]
        assert torch.equal(found.scores.values[found.mine].nan_to_num(9.0), rewards[own].nan_to_num(9.0))
        return found

    [alone] = Threads(1, monkeypatch).run(work)
    for found in [alone, *Threads(2, monkeypatch).run(work)]:
        assert torch.equal(found.scores.values.nan_to_num(9.0), rewards.nan_to_num(9.0))
        assert found.prompts == [40, 40, 41, 41, 42, 42]
        assert found.groups.tolist() == [0, 0, 1, 1, 2, 2]
        assert found.outcomes.tolist() == [True, False] * 3
        assert found.lengths.tolist() == list(range(6))


def test_gradients_add_and_what_has_none_anywhere_stays_without(monkeypatch: pytest.MonkeyPatch) -> None:
    given: Sequence[Sequence[float | None]] = [[1.0, None, None], [2.0, 4.0, None]]

    def work(mine: Processes) -> list[list[float] | None]:
        parameters = [torch.zeros(2, requires_grad=True) for _ in range(3)]
        for parameter, value in zip(parameters, given[mine.rank]):
            parameter.grad = None if value is None else torch.full((2,), value)
        mine.add_gradients(parameters)
        return [None if p.grad is None else p.grad.tolist() for p in parameters]

    assert Threads(2, monkeypatch).run(work) == [[[3.0, 3.0], [4.0, 4.0], None]] * 2


# -- records of several rollouts -----------------------------------------------------------------------------------


def test_what_rollouts_record_is_added_or_weighed_by_samples() -> None:
    records = [{"tokens": 10.0, "length": 5.0, "rounds": 2.0}, {"tokens": 30.0, "length": 10.0, "samples": 1.0}]
    found = joint_record(records, [2, 3])
    assert found == pytest.approx({"tokens": 40.0, "length": 8.0, "rounds": 2.0, "samples": 1.0})
    assert joint_record(records[:1], [7]) == records[0]


def test_updates_add_and_keep_the_largest_error() -> None:
    parts = [
        (torch.full((1, 2, 4), 1.0), {"loss": torch.tensor([1.0, 2.0])}, torch.tensor(0.5)),
        (torch.full((1, 2, 4), 2.0), {"loss": torch.tensor([3.0, 4.0]), "kl": torch.ones(2)}, torch.tensor(0.25)),
    ]
    statistics, sums, error = joint_update(parts)
    assert statistics.unique().tolist() == [3.0]
    assert {name: value.tolist() for name, value in sums.items()} == {"loss": [4.0, 6.0], "kl": [1.0, 1.0]}
    assert float(error) == 0.5
    assert parts[0][1]["loss"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("ranks", "override", "words"),
    [
        (3, "rollout.prompts=2", "use 3 prompts or more, or fewer processes"),
        (2, "sampler.plan.probe=0", "compare the steps of all prompts"),
    ],
)
def test_what_cannot_be_shared_is_refused(ranks: int, override: str, words: str) -> None:
    name = "vgpo" if "probe" in override else "mixgrpo_flash_guard"
    recipe = load_recipe(name, [override])
    check_ranks(recipe, 1)
    with pytest.raises(ValueError, match=words):
        check_ranks(recipe, ranks)


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(0), FailedTogether("no", "ocr")])
def test_whatever_ends_a_process_is_told_to_the_others(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other processes would wait for a process that left by `sys.exit`, as for a process that failed."""

    class Store:
        def clone(self) -> "Store":
            return self

    class State:
        process_index, num_processes = 1, 2

    told: list[tuple[int, int, bool]] = []
    monkeypatch.setattr(processes, "launched", State)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", Store)
    monkeypatch.setattr(processes, "_watch", lambda *_: None)
    monkeypatch.setattr(processes, "_tell", lambda store, *more, known: told.append((*more, known)))
    with pytest.raises(type(error)), processes.ended_together():
        raise error
    assert told == [(1, 2, isinstance(error, FailedTogether))]


@pytest.mark.parametrize("error", [ValueError("use 3 prompts"), OSError(13, "Permission denied", "out"), KeyError("a")])
def test_the_note_of_a_failure_is_what_the_process_prints_itself(error: Exception) -> None:
    notes: dict[str, str] = {}

    class Store:
        def check(self, keys: list[str]) -> bool:
            return False

        def wait(self, *_: object) -> None: ...

        set = staticmethod(notes.__setitem__)

    try:
        raise error
    except Exception:
        processes._tell(Store(), 1, 2, known=False)
    begun = "process 1 of 2 failed, so this one ends as well"
    if isinstance(error, KeyError):
        # A fault of the code is looked for in the traceback.
        assert notes[processes._FAILED].startswith(f"{begun}. Its traceback:\nTraceback (most recent call last):\n")
    else:
        message = "out: Permission denied" if isinstance(error, OSError) else "use 3 prompts"
        assert notes[processes._FAILED] == f"{begun}: {message}"
