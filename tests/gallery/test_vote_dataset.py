"""`flowgrpo gallery --vote-dataset`: the rows have the whole prompt, as the rows of `flowgrpo pairs` have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowgrpo.gallery.scored_pairs import write_scored_pairs
from flowgrpo.gallery.vote_dataset import write_preferences
from flowgrpo.pipelines.pictures import Picture
from flowgrpo.training.data import PromptRow, read_prompts
from flowgrpo.training.folder.prompt_pictures import PromptPictures
from flowgrpo.votes.file import read_votes
from tests.gallery.folders import picture, record, write_run, written
from tests.gallery.voting import booth

TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "name an animal"},
    {"role": "assistant", "content": "a cat"},
    {"role": "user", "content": "another"},
]
ASKED = ("prompt", "image", "height", "width", "column_skill", "column_image")


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def talking(folder: Path) -> Path:
    """A run of completions for a conversation, with a choice of the later one."""
    rows = [written(at, 0, f"answer {at}", prompt="another", messages=TALK, columns={"n": 3}) for at in (0, 10)]
    run = write_run(folder, rows)
    one = booth([run], run / "votes.jsonl")
    one.choose(0, "left" if one.ballots[0].left.source.iteration == 10 else "right")
    return run


def editing(home: Path) -> Path:
    """A run of images that edits pictures of a size of their own, with a choice of the later image."""
    picture(home / "own/cup.png", (1, 2, 3), (600, 400))
    (home / "made/samples").mkdir(parents=True)
    copies = PromptPictures(home / "made/samples").of(PromptRow(0, "", pictures=Picture(home / "own/cup.png")))
    columns = {"image": "own/cup.png", "height": 48, "width": 64, "skill": "counting"}
    run = write_run(
        home / "run", [record(at, 1, 0, at / 10, sample=at, columns=columns, pictures=copies) for at in (0, 10)]
    )
    (home / "made/samples/prompts").rename(run / "samples/prompts")
    one = booth([run], run / "votes.jsonl")
    one.choose(0, "left" if one.ballots[0].left.source.iteration == 10 else "right")
    return run


def older(votes: Path) -> None:
    """Take out of the votes what an earlier version did not write."""
    rows = [{k: v for k, v in row.items() if k not in ("messages", "pictures")} for row in rows_of(votes)]
    votes.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("old", [False, True])
def test_a_conversation_is_the_prompt(tmp_path: Path, old: bool) -> None:
    run = talking(tmp_path / "run")
    if old:
        older(run / "votes.jsonl")
    _, notes = write_preferences([run], run / "votes.jsonl", tmp_path / "pairs")
    [row] = rows_of(tmp_path / "pairs/data.jsonl")
    assert notes == []
    assert (row["prompt"], row["chosen"], row["rejected"]) == (TALK, "answer 10", "answer 0")
    assert row["column_n"] == 3  # a number stays one
    [read] = read_prompts(str(tmp_path / "pairs/data.jsonl"))
    assert read.messages == tuple(TALK)


@pytest.mark.parametrize("old", [False, True])
def test_pictures_and_size_are_those_of_scored_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    run = editing(tmp_path)
    if old:
        older(run / "votes.jsonl")
    monkeypatch.chdir(tmp_path)
    _, notes = write_preferences([run], run / "votes.jsonl", tmp_path / "voted")
    [voted] = rows_of(tmp_path / "voted/metadata.jsonl")
    assert notes == []
    assert (voted["height"], voted["width"]) == (48, 64)
    assert (tmp_path / "voted" / voted["image"]).read_bytes() == (tmp_path / "own/cup.png").read_bytes()

    # The same samples, made at once, are a pair by scores; what was asked is written alike.
    index = run / "samples/index.jsonl"
    index.write_text(index.read_text().replace('"iteration": 10', '"iteration": 0'))
    write_scored_pairs(run, tmp_path / "scored", None, 0.0)
    [scored] = rows_of(tmp_path / "scored/metadata.jsonl")
    assert {key: voted[key] for key in ASKED} == {key: scored[key] for key in ASKED}
    assert set(scored) - set(voted) == {"chosen_score", "rejected_score"}


def test_from_another_folder_the_copies_are_taken_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = editing(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    _, notes = write_preferences([run], run / "votes.jsonl", tmp_path / "pairs")
    [row] = rows_of(tmp_path / "pairs/metadata.jsonl")
    assert row["image"].endswith(".webp")
    assert [note.split(" of ")[0] for note in notes] == ["1 pictures"]
    for copy in (run / "samples/prompts").iterdir():
        copy.unlink()
    with pytest.raises(ValueError, match=r"the picture own/cup\.png of the prompt 'prompt 1' is missing; call"):
        write_preferences([run], run / "votes.jsonl", tmp_path / "more")
    assert not (tmp_path / "more").exists()


def test_an_old_choice_whose_sample_is_gone_is_left_out_and_told(tmp_path: Path) -> None:
    run = talking(tmp_path / "run")
    votes = run / "votes.jsonl"
    older(votes)
    index = run / "samples/index.jsonl"
    index.write_text(index.read_text().replace("answer ", "other "))
    with pytest.raises(ValueError, match=r"an earlier version made its 1 choices on these runs.*vote again"):
        write_preferences([run], votes, tmp_path / "pairs")
    one = booth([run], votes)
    one.choose(0, "left")
    row = rows_of(votes)[0]
    # Of one pair of samples only the last choice would count.
    row["left"]["sample"] = 5
    votes.write_text("".join(json.dumps(line) + "\n" for line in (row, rows_of(votes)[1])))
    _, notes = write_preferences([run], votes, tmp_path / "pairs")
    assert len(rows_of(tmp_path / "pairs/data.jsonl")) == 1
    [note] = notes
    assert note.startswith("left out: 1 preferences of an earlier version")


@pytest.mark.parametrize(
    "change",
    [
        {"pictures": "samples/a.png"}, {"pictures": ["samples/../../a.png"]}, {"pictures": ["a.png"]},
        {"messages": [{"role": "user"}]}, {"messages": "hello"},
    ],
)  # fmt: skip
def test_a_line_with_other_fields_is_no_vote(tmp_path: Path, change: dict[str, Any]) -> None:
    votes = talking(tmp_path / "run") / "votes.jsonl"
    [row] = rows_of(votes)
    with votes.open("a") as file:
        file.write(json.dumps(row | change) + "\n")
    found, skipped = read_votes(votes)
    assert (len(found), skipped) == (1, 1)
    assert found[0].messages == tuple(TALK)
