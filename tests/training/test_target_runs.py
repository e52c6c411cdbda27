"""Runs whose rewards compare samples with the picture in column `target_image`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import flowgrpo
from flowgrpo.training.data import read_prompts, with_targets
from tests.conftest import Command

PICTURES = sorted((Path(flowgrpo.__file__).parent / "worlds" / "scenes" / "pairs" / "images").iterdir())[:3]
PROMPTS = ["a red circle", "a blue square", "two green stars"]
RECIPE = """
base: default
name: restore
data: {train: set/p.jsonl, heldout: set/h.jsonl, test: null}
run: {iterations: 1}
rollout: {prompts: 2, group: 4, batch: 8}
rewards: [{name: psnr, weight: 0.1}, {name: "mine.py:same"}]
evaluate: {rewards: [{name: ssim}], steps: 4}
"""
MINE = """
SEEN = []

def same(images, prompts, target_image):
    SEEN.extend(target_image)
    return [float(open(path, "rb").read(4) == b"\\x89PNG") for path in target_image]
"""


@pytest.fixture
def here(tmp_path: Path, command: Command) -> Path:
    (tmp_path / "set").mkdir()
    rows = [{"prompt": text, "target_image": f"{k}.png"} for k, text in enumerate(PROMPTS)]
    for k, source in enumerate(PICTURES):
        shutil.copy(source, tmp_path / "set" / f"{k}.png")
    (tmp_path / "set" / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "set" / "h.jsonl").write_text(json.dumps(rows[2]) + "\n")
    (tmp_path / "run.yaml").write_text(RECIPE)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


@pytest.mark.slow
def test_rewards_get_the_targets_of_a_pipeline_that_takes_no_picture(here: Path, command: Command) -> None:
    status, _, errors = command("train", "run.yaml", "--out", "run")
    assert status == 0, errors
    rows = [json.loads(line) for line in (here / "run/samples/index.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["phase"] == "train"]
    assert {row["rewards"]["same"] for row in trained} == {1.0}
    assert len({row["rewards"]["psnr"] for row in trained}) > 2
    assert {row["columns"]["target_image"] for row in rows} <= {f"set/{k}.png" for k in range(3)}
    assert all((here / "run/samples" / row["pictures"][0]).is_file() for row in rows)
    status, output, errors = command("evaluate", "run")
    assert status == 0, errors
    assert "ssim" in output


def test_a_target_that_is_missing_is_named_before_a_model_is_loaded(here: Path, command: Command) -> None:
    (here / "set/1.png").unlink()
    status, _, errors = command("plan", "run.yaml")
    assert status == 1
    assert "set/p.jsonl, line 2: the picture set/1.png does not exist; paths start at the folder of" in errors


def test_each_prompt_has_one_target_or_none_has_any(here: Path) -> None:
    file = here / "set/p.jsonl"
    file.write_text('{"prompt": "a", "target_image": ["0.png", "1.png"]}\n')
    with pytest.raises(ValueError, match=r"line 1: `target_image` is a list of 2 pictures; write the path of one"):
        with_targets(read_prompts(str(file)), str(file))
    file.write_text('{"prompt": "a", "target_image": "0.png"}\n{"prompt": "b"}\n')
    with pytest.raises(ValueError, match=r"line 2: `target_image` is None; write the path of a picture for every"):
        with_targets(read_prompts(str(file)), str(file))
    file.write_text('{"prompt": "a", "target_image_file_name": "0.png"}\n')
    (row,) = with_targets(read_prompts(str(file)), str(file))
    assert row.target is not None
    assert row.columns["target_image"] == str(here / "set/0.png")
    file.write_text('{"prompt": "a"}\n')
    (row,) = with_targets(read_prompts(str(file)), str(file))
    assert row.target is None
