"""The page of what the kit finds has a row for every built-in reward and every bad one."""

import ast
import sys
from types import ModuleType

import pytest

from flowgrpo.kit.findings import FAULT, NOTE, WARNING, Finding, Report
from flowgrpo.rewards.registry import BUILTIN
from tests.test_docs import cells, script


@pytest.fixture(scope="module")
def table() -> ModuleType:
    return script("make_kit_table")


def test_every_built_in_reward_has_a_row(table: ModuleType):
    assert [name.strip("`") for name in cells(table.PAGE, "Built-in rewards", 0)] == list(BUILTIN)
    assert all(cells(table.PAGE, "Built-in rewards", 3))


def test_every_built_in_reward_has_an_instance(table: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(table.PAGE.parents[1]), *sys.path])
    assert list(script("kit_instances").makers()) == list(BUILTIN)


def test_every_bad_reward_has_a_row_with_the_finding_that_convicts_it(table: ModuleType):
    parsed = ast.parse(table.CULPRITS.read_text(encoding="utf-8")).body
    defined = {node.name for node in parsed if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"}
    names, codes, found = (cells(table.PAGE, "Bad rewards", column) for column in (0, 2, 4))
    assert {name.strip("`") for name in names} == defined == {*table.CRIMES, *table.BLAMELESS}
    for name, code, own in zip(names, codes, found, strict=True):
        crime = table.CRIMES.get(name.strip("`"), ("", ""))[1]
        assert code == (f"`{crime}`" if crime else "nothing"), name
        assert (f"`{crime}` " in own) if crime else own == "none", name


def test_what_random_weights_prefer_is_marked_and_the_contract_is_not(table: ModuleType):
    report = Report("mine", "images")
    report.add("resize", WARNING, "order")
    report.add("blank", FAULT, "NaN for a | b")
    report.add("dtype", WARNING, "it returns bfloat16")
    report.add("dtype", WARNING, "“bfloat16” keeps the order")
    report.add("prompt", NOTE, "no")
    report.add("cost", NOTE, "1 ms")
    marked = "`blank` fault, `resize` warning†, `dtype` warning, `dtype` warning†"
    assert table.cells(report, True) == ["1 fault, 3 warnings, 2 notes", marked, "`prompt`"]
    assert "†" not in " ".join(table.cells(report, False))
    assert table.sentences("mine", report, True) == [
        "- `mine`, `blank`: NaN for a \\| b", "- `mine`, `dtype`: it returns bfloat16",
    ]  # fmt: skip
    assert table.of_weights(Finding("noise", NOTE, ""))
