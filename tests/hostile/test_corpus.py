"""Every input of the corpus gets a message that says what is wrong, where, and what to write; none a traceback."""

import shlex
from pathlib import Path

import pytest

from tests.conftest import Command
from tests.hostile.case import Case, cases, write_case

LONGEST = 3000
NEVER = ("Traceback", "stacktrace above", " object at 0x", "errno", "pydantic", "yaml.org")


@pytest.mark.parametrize("case", [pytest.param(case, id=f"{case.group}: {case.case}") for case in cases()])
def test_hostile_input(case: Case, command: Command, tmp_path: Path):
    write_case(case, tmp_path)
    status, output, errors = command(*shlex.split(case.run))
    said = errors if case.status else output + errors
    assert status == case.status, output + errors
    assert [word for word in case.says if word.lower() not in said.lower()] == [], said
    assert [word for word in NEVER if word.lower() in (output + errors).lower()] == []
    if case.status == 1:
        assert len(said) <= LONGEST
        assert errors.startswith("error: ")


def test_the_corpus_is_large_and_no_case_stands_in_it_twice():
    inputs = [(case.run, str(case.files), str(case.start)) for case in cases()]
    assert len(inputs) >= 300
    assert len(set(inputs)) == len(inputs)
