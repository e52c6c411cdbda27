"""Prompts that two files have in common, counted by hand."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flowgrpo.cli.app import app
from flowgrpo.configs.load import load_recipe
from flowgrpo.training.checking import check
from flowgrpo.training.data import PromptRow
from flowgrpo.training.prompts import overlap
from flowgrpo.training.prompts.overlap import Overlap, overlap_of

LONG = "one two three four five six seven eight nine ten eleven twelve"  # 5 runs of 8 words


def rows(*texts: str) -> list[PromptRow]:
    return [PromptRow(k, text) for k, text in enumerate(texts)]


def test_same_and_close_prompts() -> None:
    """Of 5 runs, a changed last word leaves 4, the tenth leaves 2, and the sixth leaves none."""
    asked = rows(
        f" {LONG}  ",
        LONG.title(),
        LONG.replace("twelve", "x"),
        LONG.replace("ten", "x"),
        LONG.replace("six", "x"),
        "else",
    )
    assert overlap_of(asked, rows("else", LONG)) == Overlap(total=6, same=2, asked=6, known=2, close=2)
    # Runs count wherever they stand: two halves of a prompt may be known from two others.
    assert overlap_of(rows(LONG), rows(LONG + " x", "x")).close == 1


def test_a_short_prompt_is_one_run_and_signs_count() -> None:
    asked = rows("12+7=", "12 + 7 =", "12-7=", "What is RED?")
    assert overlap_of(asked, rows("12+7=", "what is red ?")) == Overlap(total=4, same=1, asked=4, known=2, close=2)
    assert overlap_of([PromptRow(0, "b", {}, ({"role": "user", "content": "b"},))], rows("b")).same == 0


def test_long_files_are_compared_at_equal_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "MOST_ASKED", 2)
    monkeypatch.setattr(overlap, "MOST_KNOWN", 3)
    asked, known = rows("A", "b", "C", "d", "E"), rows("a", "b", "c", "d", "e", "f", "g")
    # Compared are A and d with a, d and g; b and d are the same, found among all.
    assert overlap_of(asked, known) == Overlap(total=5, same=2, asked=2, known=3, close=1)


def test_plan_reports_a_file_and_notes_heldout_prompts_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, numbers in (("train", range(6)), ("heldout", range(4, 8)), ("tuned", range(1, 4))):
        lines = (json.dumps({"prompt": f"{k}+1=", "answer": str(k + 1)}) for k in numbers)
        Path(f"{name}.jsonl").write_text("\n".join(lines))
    words = ["text", "data={train: train.jsonl, heldout: heldout.jsonl}", "rollout.prompts=2"]
    note = "2 of 4 prompts of heldout.jsonl, the held-out prompts, are in data.train (train.jsonl) too; take them out"
    assert any(note in text for text in check(load_recipe(words[0], words[1:])).texts("note"))
    plain = CliRunner().invoke(app, ["plan", *words], catch_exceptions=False).output
    assert f"note: {note}" in plain
    assert "runs of 8 words" not in plain
    report = CliRunner().invoke(app, ["plan", *words, "--against", "tuned.jsonl"], catch_exceptions=False).output
    assert "training prompts: 3 of 6 prompts are in tuned.jsonl too\n" in report
    assert (
        "training prompts: 0 of 3 other prompts share at least half of their runs of 8 words with tuned.jsonl\n"
        in report
    )
    assert "held-out prompts: 0 of 4 prompts are in tuned.jsonl too\n" in report
    assert "held-out prompts: 2 of 4 prompts are in data.train too\n" in report
    wrong = CliRunner().invoke(app, ["plan", *words, "--against", "none.jsonl"])
    assert wrong.exit_code == 1
