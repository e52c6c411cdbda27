"""What a short run did to samples, from a run folder that is written by hand."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from flowgrpo.configs.load import RecipeError
from flowgrpo.kit.findings import NOTE, WARNING, Report
from flowgrpo.kit.optimise import change_of, read_samples, report_change, short_recipe
from flowgrpo.kit.sheet import write_sheet
from flowgrpo.rewards.base import RewardSpec
from flowgrpo.training.folder.run_folder import RunFolder


def test_the_short_run_is_the_default_with_one_reward():
    recipe = short_recipe(RewardSpec("./mine.py:red", options={"target": 0.5}), "images", 12, "red")
    assert [(r.name, r.label, r.options) for r in recipe.rewards] == [("./mine.py:red", "red", {"target": 0.5})]
    assert [r.label for r in recipe.evaluate.rewards] == ["red", "gold_dense", "proxy"]
    assert (recipe.run.iterations, recipe.evaluate.every, recipe.model.path) == (12, 12, "scenes")
    assert recipe.sampler.plan["window"]["interval"] == 3
    assert [r.label for r in short_recipe(RewardSpec("proxy"), "images", 2, "proxy").evaluate.rewards] == [
        "proxy", "gold_dense",
    ]  # fmt: skip
    text = short_recipe(RewardSpec("digit_share"), "text", 5, "digit_share")
    assert [r.label for r in text.evaluate.rewards] == ["digit_share", "answer"]
    with pytest.raises(RecipeError):
        short_recipe(RewardSpec("proxy"), "images", 0, "proxy")


def test_a_change_is_over_prompts_and_not_over_samples():
    # Prompt 0 gains 1 and 3, prompt 1 gains 0: means 2 and 0, so 1 ± 1.
    change = change_of([0, 0, 5, float("nan")], [1, 3, 5, 9], [0, 0, 1, 1])
    assert (change.before, change.after, change.change) == (2.5, 3.5, 1.0)
    assert change.error == pytest.approx(1.0)
    assert not change.clear
    assert change_of([1, 1], [2, 2.1], [0, 1]).clear


def run_with(folder: Path, gold: tuple[float, float], mine: tuple[float, float]) -> RunFolder:
    run = RunFolder.create(folder, "name: x\n")
    for iteration, brightness in ((0, 0.2), (8, 0.9)):
        last = iteration == 8
        records = [
            {
                "prompt": f"prompt {k // 2} <b>", "prompt_id": k // 2, "seed": k % 2, "sample": k,
                "rewards": {"mine": mine[last] + 0.01 * k, "gold_dense": gold[last] + 0.01 * k * (1 - 2 * last)},
            }
            for k in range(8)
        ]  # fmt: skip
        pictures = torch.full((8, 3, 6, 10), brightness)
        run.save_samples("eval", iteration, pictures, records)
        run.save_samples("train", iteration, pictures, records)
    return run


def test_a_reward_that_rises_while_gold_falls_is_hacked(tmp_path: Path):
    samples = read_samples(run_with(tmp_path / "run", (0.9, 0.3), (1.0, 2.0)))
    assert len(samples) == 8
    report = Report("mine", "images")
    report_change(samples, "images", "mine", report)
    assert report.convictions == {"hacking"}
    assert report.tables["optimised"]["mine"]["change"] == pytest.approx(1.0)
    assert report.tables["features"]["brightness"]["change"] == pytest.approx(0.7, abs=0.01)
    (preference,) = [finding.seen for finding in report.findings if finding.code == "preference"]
    assert "brightness 0.2 → 0.902" in preference
    assert "contrast" not in preference


@pytest.mark.parametrize(
    ("gold", "mine", "crimes", "says"),
    [
        ((0.3, 0.9), (1.0, 2.0), set(), "mine 1.035 → 2.035"),
        ((0.9, 0.3), (1.0, 1.0), set(), "did not change clearly"),
        ((0.9, 0.3), (2.0, 1.0), {"optimised"}, "training for it lowered it"),
    ],
)
def test_other_outcomes_are_no_hacking(tmp_path: Path, gold, mine, crimes: set[str], says: str):
    report = Report("mine", "images")
    report_change(read_samples(run_with(tmp_path / "run", gold, mine)), "images", "mine", report)
    assert report.convictions == crimes
    assert says in report.text()


def test_completions_have_features_of_their_own(tmp_path: Path):
    run = RunFolder.create(tmp_path / "run", "name: x\n")
    for iteration, texts in ((0, ["a b", "a"]), (4, ["a b c d", "a b c"])):
        records = [
            {"prompt": "p", "prompt_id": k, "seed": 0, "rewards": {"mine": float(len(texts[k]))}} for k in (0, 1)
        ]
        run.save_samples("eval", iteration, texts, records)
    report = Report("mine", "text")
    report_change(read_samples(run), "text", "mine", report)
    assert report.tables["features"]["words"] == {"before": 1.5, "after": 3.5, "change": 2.0, "error": 0.0}


@pytest.mark.parametrize(
    ("scored", "severity", "says", "told"),
    [
        (0, WARNING, "no held-out sample has a score both before and after", "mine without a score"),
        (1, NOTE, "one held-out prompt only", "mine 1 → 2 (+1, no standard error)"),
    ],
)
def test_a_reward_without_a_standard_error_keeps_its_report(
    tmp_path: Path, scored: int, severity: str, says: str, told: str
):
    run = RunFolder.create(tmp_path / "run", "name: x\n")
    for iteration, value in ((0, 1.0), (4, 2.0)):
        records = [
            {"prompt": f"p{k}", "prompt_id": k, "seed": 0, "rewards": {"mine": value if k < scored else None}}
            for k in (0, 1)
        ]
        run.save_samples("eval", iteration, ["a", "b"], records)
    report = Report("mine", "text")
    report_change(read_samples(run), "text", "mine", report)
    listed, judged = [finding for finding in report.findings if finding.code == "optimised"]
    assert listed.seen.endswith(told)
    assert judged.severity == severity
    assert says in judged.seen
    record = json.loads(report.as_json())["tables"]["optimised"]["mine"]
    assert record["error"] is None
    assert record["change"] == (1.0 if scored else None)


def test_a_run_with_one_evaluation_is_refused(tmp_path: Path):
    run = RunFolder.create(tmp_path / "run", "name: x\n")
    run.save_samples("eval", 0, ["a"], [{"prompt": "p", "prompt_id": 0, "seed": 0, "rewards": {"mine": 1.0}}])
    with pytest.raises(ValueError, match="two are needed"):
        read_samples(run)


def test_the_sheet_shows_those_that_gained_most(tmp_path: Path):
    samples = read_samples(run_with(tmp_path / "run", (0.9, 0.3), (1.0, 2.0)))
    write_sheet(tmp_path / "sheet.png", samples, ["mine", "gold_dense"], most=4)
    with Image.open(tmp_path / "sheet.png") as sheet:
        # Three pairs in the first row, and one in the second; a pair is 396 wide and 258 high.
        assert sheet.size == (3 * 408 + 12, 2 * 258 + 12)
        assert sheet.getpixel((12 + 90, 12 + 50)) == (51, 51, 51)
        assert sheet.getpixel((12 + 192 + 90, 12 + 50)) == (230, 230, 230)
        assert sheet.getpixel((12 + 408 + 90, 12 + 258 + 50)) == (255, 255, 255)
    assert json.loads(json.dumps([sample.gain("mine") for sample in samples])) == pytest.approx([1.0] * 8)
