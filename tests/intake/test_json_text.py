"""JSON of a stranger is read within bounds: depth, lines and files."""

import json
import os
from pathlib import Path

import pytest

from flowgrpo.intake import json_text
from flowgrpo.intake.json_text import DEEPEST, lines_of, parse_json


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


def test_json_of_ordinary_depth_is_read():
    # The innermost list is empty, so `DEEPEST` levels lie within the outermost list.
    for text in ('{"a": [1, 2.5, null, "[[["]}', nested(DEEPEST + 1), json.dumps(["[" * 500]), json.dumps([[]] * 500)):
        assert parse_json(text) == parse_json(text.encode()) == json.loads(text)


@pytest.mark.parametrize("levels", [DEEPEST + 2, 500, 100_000])
def test_deeper_json_is_refused(levels: int):
    with pytest.raises(ValueError, match=f"more than {DEEPEST} levels"):
        parse_json(nested(levels))


def test_a_number_of_thousands_of_digits_is_refused():
    with pytest.raises(ValueError, match="digits"):
        parse_json("1" * 5000)


def test_lines_keep_their_ends_and_a_line_that_is_too_long_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(json_text, "LONGEST_LINE", 8)
    file = tmp_path / "lines.jsonl"
    file.write_text("one\n1234567\n12345678\n" + "x" * 100 + "\ntwo\ncut")
    assert list(lines_of(file)) == ["one\n", "1234567\n", "", "", "two\n", "cut"]


def test_a_file_with_a_hole_of_terabytes_is_refused_at_once(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    file.write_text("{}\n")
    os.truncate(file, json_text.LARGEST_FILE + 1)
    with pytest.raises(ValueError, match=r"metrics.jsonl has 4 GiB.*move it away"):
        next(lines_of(file))
