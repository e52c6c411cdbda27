"""Favourites of the page as choices: which samples are compared, and what the choices can be used for."""

import json
from pathlib import Path
from typing import Any

import pytest

from flowgrpo.cli.app import app
from flowgrpo.gallery.favourites import write_favourites
from flowgrpo.gallery.vote_dataset import write_preferences
from flowgrpo.rewards.models.voted import read_voted
from flowgrpo.votes.file import read_whole
from flowgrpo.votes.preferences import read_preferences
from tests.gallery.folders import picture, record, write_run, written


def marked(run: Path, *marks: dict[str, Any]) -> Path:
    """A file as the page saves it."""
    file = run.parent / "marks.json"
    runs = [{"id": "x", "name": "n", "folder": run.name, "marks": list(marks)}]
    file.write_text(json.dumps({"flowgrpo": "marks", "version": 1, "runs": runs}))
    return file


def mark(prompt: int, seed: int, favourite: bool = True) -> dict[str, Any]:
    place = {"phase": "eval", "prompt": f"prompt {prompt}", "seed": str(seed), "sample": 0, "iteration": None}
    return {**place, "favourite": favourite, "note": "", "time": ""}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three prompts with three seeds, at 0 and 10."""
    records = [
        record(at, prompt, seed, 0.5, sample=3 * prompt + seed)
        for at in (0, 10) for prompt in range(3) for seed in range(3)
    ]  # fmt: skip
    return write_run(tmp_path / "run", records)


def names(file: Path) -> list[tuple[str, str]]:
    """The pictures that were chosen, and what they were preferred to."""
    return [(Path(one.chosen).name, Path(one.rejected).name) for one in read_preferences(file)]


def test_a_favourite_is_preferred_to_the_others_of_its_prompt(run: Path) -> None:
    """Prompt 0 has one favourite of three, prompt 1 has two, and prompt 2 has a note and no favourite."""
    marks = marked(run, mark(0, 1), mark(1, 0), mark(1, 2), mark(2, 0, favourite=False))
    file = run.parent / "deep" / "favourites.jsonl"
    assert write_favourites([run], marks, file) == 4
    assert names(file) == [
        ("eval-0-1-1.png", "eval-0-0-0.png"), ("eval-0-1-1.png", "eval-0-2-2.png"),
        ("eval-1-0-3.png", "eval-1-1-4.png"), ("eval-1-2-5.png", "eval-1-1-4.png"),
    ]  # fmt: skip
    votes = read_whole(file)
    assert [vote.choice for vote in votes] == ["left", "right", "left", "right"]
    assert {vote.session for vote in votes} == {"favourites"}
    assert [vote.seed for vote in votes] == ["0, 1", "1, 2", "0, 1", "1, 2"]
    # A card of evaluations shows the last one, 10.
    assert {(vote.left.iteration, vote.right.iteration, vote.left.folder) for vote in votes} == {(10, 10, "../run")}


def test_training_samples_of_different_iterations_are_not_compared(tmp_path: Path) -> None:
    """The prompt was looked at in iterations 3 and 4, with two samples each, and has a favourite in 3 alone."""
    records = [record(at, 0, 7, 0.5, phase="train", sample=number) for at in (3, 4) for number in (2, 5)]
    run = write_run(tmp_path / "run", records)
    place = {"phase": "train", "prompt": "prompt 0", "seed": "7"}
    marks = [{**place, "iteration": at, "sample": 1, "favourite": at == 3, "note": "seen"} for at in (3, 4)]
    file = tmp_path / "favourites.jsonl"
    assert write_favourites([run], marked(run, *marks), file) == 1
    assert [(vote.left.iteration, vote.left.sample, vote.right.sample) for vote in read_whole(file)] == [(3, 5, 2)]


def test_equal_samples_are_not_compared(run: Path) -> None:
    for seed in (0, 1):
        picture(run / "samples" / "iter-000010" / f"eval-0-{seed}-{seed}.png")
    file = run / "favourites.jsonl"
    assert write_favourites([run], marked(run, mark(0, 1)), file) == 1
    assert names(file) == [("eval-0-1-1.png", "eval-0-2-2.png")]


def test_what_cannot_be_written_as_choices(run: Path, tmp_path: Path) -> None:
    marks = marked(run, *(mark(0, seed) for seed in range(3)), mark(1, 0, favourite=False))
    with pytest.raises(ValueError, match="has no favourite beside another sample of its prompt"):
        write_favourites([run], marks, run / "favourites.jsonl")
    assert not (run / "favourites.jsonl").exists()
    # Without numbers of samples, a file of votes cannot tell the two samples apart.
    alike = write_run(tmp_path / "alike", [record(0, 0, seed, 0.5) for seed in range(2)])
    with pytest.raises(ValueError, match="has no favourite beside another sample of its prompt"):
        write_favourites([alike], marked(alike, mark(0, 0)), run / "favourites.jsonl")
    (run / "votes.jsonl").write_text("mine")
    with pytest.raises(ValueError, match=r"votes\.jsonl exists; name a new file"):
        write_favourites([run], marked(run, mark(0, 0)), run / "votes.jsonl")
    assert (run / "votes.jsonl").read_text() == "mine"


def test_rewards_and_exports_read_the_choices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [record(0, prompt, seed, 0.5, sample=2 * prompt + seed) for prompt in range(5) for seed in range(2)]
    run = write_run(tmp_path / "run", records)
    file, out = tmp_path / "favourites.jsonl", tmp_path / "preferences"
    words = ["--favourites", str(marked(run, *(mark(prompt, prompt % 2) for prompt in range(5))))]
    words += ["--votes", str(file), "--vote-dataset", str(out), "--report"]
    app(["gallery", str(run), *words], standalone_mode=False)
    said = capsys.readouterr().out
    assert f"5 choices of favourites over samples beside them: {file}" in said
    assert "5 votes are between samples of one evaluation" in said
    assert not (run / "gallery").exists()
    assert len((out / "metadata.jsonl").read_text().splitlines()) == 5
    assert {count.first + count.second for count in read_voted([file], least=5).pairs.values()} == {1}


def test_favourite_completions_become_choices_between_texts(tmp_path: Path) -> None:
    texts = [written(0, 0, f"text {number}", sample=number) | {"seed": number} for number in range(2)]
    run = write_run(tmp_path / "texts", texts)
    file = tmp_path / "favourites.jsonl"
    write_favourites([run], marked(run, mark(0, 1)), file)
    assert [(one.chosen, one.rejected) for one in read_preferences(file)] == [("text 1", "text 0")]
    out, _ = write_preferences([run], file, tmp_path / "pairs")
    assert json.loads((out / "data.jsonl").read_text())["chosen"] == "text 1"
