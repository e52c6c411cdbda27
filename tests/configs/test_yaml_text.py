"""The loader of YAML bounds what a stranger may write, and a document of an ordinary size is not refused."""

import copy
import re
from pathlib import Path

import pytest

import flowgrpo
from flowgrpo.configs.yaml_text import DEEPEST, LONGEST, parse_yaml, parse_yaml_value, read_text

CHAIN = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, DEEPEST + 2))
"""Each line is flat, and the last value is a list within fifty others."""
HOSTILE = {
    "brackets": ("x: " + "[" * 300 + "]" * 300, "levels deep; write fewer levels"),
    "keys": ("? " * 5000, "levels deep"),
    "dashes": ("- " * 5000, "levels deep"),
    "a chain of anchors": (CHAIN, "multiply to more than 50 levels; use fewer anchors"),
    "base 60": ("x: 1" + ":59" * 300_000, "a number of 900001 digits; quote it"),
    "a float of base 60": ("x: 1" + ":59" * 10_000 + ".5", "a number of 30003 digits; quote it"),
    "a float above the largest": ("x: 1" + ":9" * 190 + ".5", "is none"),
    "a whole number": ("x: " + "1" * 100_000, "a number of 100000 digits"),
    "hexadecimal": ("x: 0x" + "f" * 100_000, "a number of 100002 digits"),
    "too long": ("# " + "x" * LONGEST, "put long texts into files of their own"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_document_is_refused_with_its_name(name: str):
    text, said = HOSTILE[name]
    with pytest.raises(ValueError, match=rf"^run/config\.yaml.*{re.escape(said)}"):
        parse_yaml(text, "run/config.yaml")
    with pytest.raises(ValueError, match="; "):
        parse_yaml_value(text)


def test_text_that_begins_like_a_number_takes_no_quadratic_time():
    """With the square of its length, a million digits would take hours."""
    text = "1" * 500_000 + "x"
    assert parse_yaml(f"x: {text}", "file") == {"x": text}


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 0.001), ("1.e3", 1000.0), (".5E+2", 50.0), ("12e1", 120.0), ("1.5e", "1.5e"), ("e5", "e5"), ("1:30", 90)],
)
def test_numbers_are_read_as_before(text: str, value: object):
    assert parse_yaml_value(text) == value


def test_a_value_is_new_at_each_call():
    text = "[{a: 1}]"
    parse_yaml_value(text)[0]["a"] = 2
    assert parse_yaml_value(text) == [{"a": 1}]


def test_the_deepest_value_that_is_read_can_be_copied():
    value = parse_yaml("[" * DEEPEST + "x" + "]" * DEEPEST, "file")
    assert copy.deepcopy(value) == value


def test_a_file_that_is_too_long_is_not_read_whole(tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text("x" * (LONGEST + 1))
    with pytest.raises(ValueError, match=r"config.yaml has more than"):
        read_text(file)


def test_no_other_module_reads_yaml_by_itself():
    package = Path(flowgrpo.__file__).parent
    found = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(r"\byaml\.(\w*load\w*|parse|compose\w*)\(", path.read_text(encoding="utf-8"))
    ]
    assert found == ["configs/yaml_text.py"]
