"""Runs whose coefficients change: an iteration is that of a run with its values, and no interruption changes it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.training.folder.changing import with_changes
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.reporting.symptoms import symptoms_of
from flowgrpo.training.session import Session, start
from flowgrpo.training.trainer import Trainer
from tests.training.test_frozen_teacher import teacher  # noqa: F401

IMAGES = [
    "rollout={prompts: 2, group: 2, batch: 4}", "sampler.steps=4", "rewards=[{name: jpeg_compressibility}]",
    "data.heldout=null", "sampler.plan.window={name: all}", "optimizer={updates: 2, ema: null}",
    "run={checkpoint_every: 1, iterations: 4}",
]  # fmt: skip


def made(base: str, words: list[str], folder: Path, *more: str) -> Trainer:
    return Session(load_recipe(base, [*words, *more]), RunFolder.create(folder, "")).trainer(Silent())


def told(record: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in record.items() if not k.startswith(("time/", "schedule/"))}


def same_iteration(moving: Trainer, steady: Trainer, iteration: int) -> dict[str, Any]:
    """Check that an iteration of two untrained policies is the same to the last bit; returns what both report."""
    mine, theirs = moving.iterate(iteration), steady.iterate(iteration)
    assert told(mine) == told(theirs)
    pairs = zip(moving.task.weights.parameters(), steady.task.weights.parameters())
    assert all(torch.equal(one, other) for one, other in pairs)
    return mine


@pytest.mark.slow
def test_an_iteration_of_images_is_that_of_its_values(random_pipeline: Path, tmp_path: Path) -> None:
    """In iteration 2 of 4, noise, clip and KL are half way between their ends."""
    keys = {"sampler.kernel.eta": (0.7, 0.3), "objective.surrogate.nats": (8.0, 2.0), "penalties.kl.weight": (0.0, 1.0)}
    entries = [f"{{key: {key}, start: {start}, end: {end}, over: 4}}" for key, (start, end) in keys.items()]
    words = [f"model.path={random_pipeline}", *IMAGES, "penalties.kl.weight=0.1"]
    moving = made("flow_grpo", words, tmp_path / "moving", f"schedules=[{', '.join(entries)}]")
    half = [f"{key}={(start + end) / 2}" for key, (start, end) in keys.items()]
    record = same_iteration(moving, made("flow_grpo", words, tmp_path / "steady", *half), 2)
    assert {key: record[f"schedule/{key}"] for key in keys} == {key: sum(ends) / 2 for key, ends in keys.items()}
    assert record["penalty"] == pytest.approx(0.5 * record["kl"])
    other = made("flow_grpo", words, tmp_path / "other", *half[1:])
    assert other.iterate(2)["reward/total"] != record["reward/total"]


@pytest.mark.slow
def test_an_iteration_of_text_is_that_of_its_values(small_text: list[str], tmp_path: Path) -> None:
    """The outcome takes the place of the process, the bonus falls, and the clip opens."""
    two = "rewards=[{name: digit_share}, {name: length, label: process, options: {limit: 4, buffer: 4}}]"
    words = [*small_text, two, "objective={entropy: {value: 0.04}}", "optimizer.updates=3"]
    moving = made(
        "text", words, tmp_path / "moving",
        "schedules=[{key: rewards.digit_share.weight, start: 0, end: 1, over: 4}, {key: rewards.process.weight, "
        "start: 2, end: 0, over: 4}, {key: objective.entropy.value, end: 0, over: 4}, "
        "{key: objective.surrogate.high, start: 0.2, end: 0.4, over: 4}]",
    )  # fmt: skip
    steady = made(
        "text", words, tmp_path / "steady", "rewards.digit_share.weight=0.5", "rewards.process.weight=1.0",
        "objective.entropy.value=0.02", f"objective.surrogate.high={(0.2 + 0.4) / 2}",
    )  # fmt: skip
    record = same_iteration(moving, steady, 2)
    total = 0.5 * record["reward/digit_share"] + record["reward/process"]
    assert record["reward/total"] == pytest.approx(total, abs=1e-6)
    assert record["entropy_bonus"] == record["schedule/objective.entropy.value"] == 0.02
    last = moving.iterate(4)
    assert last["reward/total"] == pytest.approx(last["reward/digit_share"], abs=1e-6)
    assert last["entropy_bonus"] == 0.0


@pytest.mark.slow
def test_a_teacher_fades_and_is_loaded_once(small_text: list[str], teacher: Path, tmp_path: Path) -> None:  # noqa: F811
    taught = ["objective={name: distilled, both: true, weight: 0.4}", f"model.teachers=[{{path: {teacher}}}]"]
    fading = "schedules=[{key: objective.weight, end: 0.0, over: 2}]"
    trainer = made("text", [*small_text, *taught], tmp_path / "run", fading)
    first = trainer.objective._teachers  # type: ignore[attr-defined]
    records = [trainer.iterate(k) for k in range(3)]
    assert [record["schedule/objective.weight"] for record in records] == [0.4, 0.2, 0.0]
    again = trainer.objective._teachers  # type: ignore[attr-defined]
    assert all(again[name] is one for name, one in first.items())
    # Before the second iteration both runs have taken the same step.
    steady = made("text", [*small_text, *taught], tmp_path / "steady")
    assert told(steady.iterate(0)) == told(records[0])
    assert steady.iterate(1)["loss"] != records[1]["loss"]


def numbers(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


@pytest.mark.slow
def test_neither_an_interruption_nor_a_longer_run_changes_what_moves(small_text: list[str], tmp_path: Path) -> None:
    """A run of two iterations that is made four long has the numbers of a run of four."""
    words = [
        *small_text, "optimizer={updates: 2, schedule: constant}", "penalties=[{name: kl, weight: 0.1}]",
        "evaluate.every=100", "objective.entropy={value: 0.04}",
        "schedules=[{key: penalties.kl.weight, end: 0.0, over: 3, shape: cosine}, "
        "{key: objective.entropy.value, end: 0.01, over: 6}]",
    ]  # fmt: skip
    whole = made("text", words, tmp_path / "whole")
    whole.train()
    start(load_recipe("text", [*words, "run.iterations=2"]), tmp_path / "part").trainer(Silent()).train()
    folder = RunFolder.open(tmp_path / "part")
    again = Session(with_changes(folder, ["run.iterations=4"]), folder).trainer(Silent())
    again.resume()
    again.train()
    mine, theirs = numbers(tmp_path / "part"), numbers(tmp_path / "whole")
    moved = [line["schedule/penalties.kl.weight"] for line in theirs[:4]]
    assert moved == pytest.approx([0.1 * (1 + math.cos(math.pi * k / 3)) / 2 for k in range(4)])
    assert [{k: v for k, v in line.items() if "eval" not in k and "quick" not in k} for line in mine] == [
        {k: v for k, v in line.items() if "eval" not in k and "quick" not in k} for line in theirs
    ]


def test_a_reward_that_a_schedule_leads_to_nothing_may_fall() -> None:
    words = ["rewards=[{name: answer}, {name: digit_share}]", "run.iterations=9"]
    fading = "schedules=[{key: rewards.digit_share.weight, end: 0, over: %d}]"
    names = ["answer", "digit_share"]
    assert set(symptoms_of(load_recipe("text", [*words, fading % 9]), names, 9).signs) == {"answer"}
    assert set(symptoms_of(load_recipe("text", [*words, fading % 99]), names, 9).signs) == set(names)
