"""Quick evaluations: a few held-out prompts between the evaluations of all, with the gain since the start."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.training.evaluating import evaluation_key
from flowgrpo.training.folder.changing import with_changes
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.prompts.chosen_prompts import places_of
from flowgrpo.training.reporting.clock import Clock
from flowgrpo.training.session import Session, start

NAMES = ("dense", "jpeg_compressibility")
FEW = places_of(6, 3, "spread")


@pytest.fixture
def words(small: list[str]) -> list[str]:
    rewards = "evaluate.rewards=[{name: gold, options: {dense: true}, label: dense}, {name: jpeg_compressibility}]"
    evaluate = ("evaluate.every=4", "evaluate.prompts=6", "evaluate.seeds=1", "evaluate.quick={every: 1, prompts: 3}")
    return [*small, rewards, *evaluate, "run.keep=9"]


@pytest.fixture
def finished(words: list[str], tmp_path: Path) -> Path:
    start(load_recipe("mixgrpo_flash_guard", words), tmp_path / "run").trainer(Silent()).train()
    return tmp_path / "run"


def metrics(run: Path) -> dict[int, dict[str, Any]]:
    return {r["iteration"]: r for r in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}


def quick(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name.startswith("quick")}


def rewound(run: Path) -> None:
    """Put a run back to its checkpoint before iteration 2."""
    for checkpoint in (run / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("iter-")) > 2:
            shutil.rmtree(checkpoint)
    RunFolder.open(run).rewind(2)


def go_on(run: Path, *changes: str) -> None:
    folder = RunFolder.open(run)
    trainer = Session(with_changes(folder, changes), folder).trainer(Silent())
    trainer.resume()
    assert trainer.next_iteration == 2
    trainer.train()


def test_a_few_prompts_are_scored_between_the_evaluations_of_all(finished: Path) -> None:
    records = metrics(finished)
    assert [k for k in records if "eval/dense" in records[k]] == [0, 4]
    assert [k for k in records if "quick/dense" in records[k]] == [0, 1, 2, 3, 4]
    assert quick(records[0]).keys() == {f"quick{e}/{name}" for e in ("", "_error") for name in NAMES}
    lines = [json.loads(line) for line in (finished / "samples" / "index.jsonl").read_text().splitlines()]
    saved = [line for line in lines if line["phase"] == "eval"]
    assert [line["iteration"] for line in saved] == [0] * 6 + [4] * 6
    for iteration in (0, 4):
        own = [line["rewards"]["dense"] for line in saved if line["iteration"] == iteration]
        assert records[iteration]["quick/dense"] == pytest.approx(sum(own[k] for k in FEW) / 3)
        assert records[iteration]["eval/dense"] == pytest.approx(sum(own) / 6)


def test_the_gain_is_the_mean_difference_by_prompt(finished: Path) -> None:
    records = metrics(finished)
    lines = [json.loads(line) for line in (finished / "samples" / "index.jsonl").read_text().splitlines()]
    sizes = [line["rewards"]["jpeg_compressibility"] for line in lines if line["phase"] == "eval"]
    differences = [after - before for before, after in zip([sizes[k] for k in FEW], [sizes[6 + k] for k in FEW])]
    mean = sum(differences) / 3
    error = (sum((d - mean) ** 2 for d in differences) / 2 / 3) ** 0.5
    assert mean != 0
    assert records[4]["quick_gain/jpeg_compressibility"] == pytest.approx(mean, rel=1e-3, abs=1e-6)
    assert records[4]["quick_gain_error/jpeg_compressibility"] == pytest.approx(error, rel=1e-3, abs=1e-6)


def test_a_resumed_run_has_the_same_gains(finished: Path) -> None:
    whole = metrics(finished)
    rewound(finished)
    go_on(finished)
    again = metrics(finished)
    assert {k: quick(r) for k, r in again.items()} == {k: quick(r) for k, r in whole.items()}


def test_scores_of_another_number_of_steps_are_no_gain(finished: Path) -> None:
    """The run goes on with more steps of an evaluation, is interrupted, and goes on again."""
    for changes in (["evaluate.steps=4"], []):
        rewound(finished)
        go_on(finished, *changes)
        assert [k for k, record in metrics(finished).items() if "quick_gain/dense" in record] == [1]
        assert "The first evaluation was after 4 iterations." in (finished / "lora" / "README.md").read_text()


def test_a_resumed_run_with_rarer_evaluations_has_its_gains(finished: Path) -> None:
    whole = metrics(finished)
    rewound(finished)
    go_on(finished, "evaluate.quick.every=2")
    again = metrics(finished)
    assert [k for k in again if "quick_gain/dense" in again[k]] == [1, 2, 4]
    assert quick(again[4]) == quick(whole[4])


def test_without_the_samples_of_the_start_there_is_no_gain(finished: Path) -> None:
    rewound(finished)
    (finished / "samples" / "index.jsonl").unlink()
    go_on(finished)
    records = metrics(finished)
    assert quick(records[3]).keys() == {f"quick{e}/{name}" for e in ("", "_error") for name in NAMES}


def test_an_evaluation_in_parts_is_the_evaluation_of_all_at_once(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many prompts there are, only some images are in the works; their batches stay the same."""
    changes = ("evaluate.prompts=7", "evaluate.seeds=2", "rollout={batch: 4, decode_batch: 4, prompts: 9, group: 3}")
    session = Session(load_recipe("mixgrpo_flash_guard", [*words, *changes]))
    rows, found, counts = session.data.heldout, [], []
    for at_once in (1000, 8, 1):
        monkeypatch.setattr("flowgrpo.training.images.evaluator.AT_ONCE", at_once)
        seen: list[tuple[int, int]] = []
        clock = Clock(session.task.device, session.task.clock_parts)
        clock.counter = lambda done, total, seen=seen: seen.append((done, total))
        found.append(session.task.evaluation(rows, [evaluation_key(row) for row in rows], clock))
        counts.append({pair for pair in seen if pair[1] == 14})
    for other in found[1:]:
        assert torch.equal(other.samples, found[0].samples)
        assert (other.origins(), other.prompt_of_sample) == (found[0].origins(), found[0].prompt_of_sample)
    # Decoding is counted over all images.
    assert counts[0] == counts[1] == counts[2] == {(done, 14) for done in (4, 8, 12, 14)}
