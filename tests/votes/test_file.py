"""Reading every vote of a file, or none. Appending and reading what can be read is tested with the gallery."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowgrpo.votes.file import read_votes, read_whole
from tests.rewards.votes_on_disk import vote_on

GREY = np.full((8, 8, 3), 90, dtype=np.uint8)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for number in range(3):
        vote_on(tmp_path, number, f"prompt {number}", (GREY, GREY + 10), "left")
    return tmp_path


def test_votes_know_their_lines_which_are_no_part_of_them(run: Path) -> None:
    path = run / "votes.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "", *lines[1:]]) + "\n")
    votes = read_whole(path)
    assert [vote.line for vote in votes] == [1, 3, 4]
    assert votes == read_votes(path)[0]
    assert "line" not in json.loads(lines[0])
    assert votes[0] == vote_on(run, 0, "prompt 0", (GREY, GREY + 10), "left")


def changed(line: str, **changes: Any) -> str:
    row = json.loads(line)
    for key, value in changes.items():
        if key in row["left"]:
            row["left"][key] = value
        else:
            row[key] = value
    return json.dumps(row)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (None, r"line 2 is cut short, or is not a JSON object; take the line out"),
        ({"choice": "both"}, r"line 2 is not a choice between two samples"),
        ({"seed": 7}, r"line 2 is not a vote: seed is 7"),
        ({"image": "samples/../../x.png"}, r"line 2: `image` '\.\./\.\./x\.png' leads outside"),
        ({"image": "/etc/x.png"}, r"line 2: the image '/etc/x\.png' is not in samples/"),
        ({"image": "samples/x.txt"}, r"line 2: `image` 'x\.txt' is not one of"),
        ({"completion": "words"}, r"line 2: a side must have either an image or a completion"),
    ],
)
def test_a_line_that_is_no_vote_is_named(run: Path, changes: dict[str, Any] | None, message: str) -> None:
    path = run / "votes.jsonl"
    lines = path.read_text().splitlines()
    if changes is None:
        lines[1] = lines[1][:-20]
    else:
        row = json.loads(changed(lines[1], **changes))
        if "completion" in changes:
            row["left"]["completion"] = row.pop("completion")
        lines[1] = json.dumps(row)
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=message) as raised:
        read_whole(path)
    assert str(raised.value).startswith(str(path))
    assert [len(read_votes(path)[0]), read_votes(path)[1]] == [2, 1]


def test_a_field_that_is_missing_is_named(run: Path) -> None:
    path = run / "votes.jsonl"
    row = json.loads(path.read_text().splitlines()[0])
    del row["right"]["sha256"]
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=r"line 1 is not a vote: it has no 'sha256'"):
        read_whole(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert read_votes(tmp_path / "votes.jsonl") == ([], 0)
    with pytest.raises(ValueError, match=r"there is no file .*votes\.jsonl; vote with `flowgrpo gallery RUN --vote`"):
        read_whole(tmp_path / "votes.jsonl")
