"""The page of standard runs agrees with the recipes and estimates."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = (DOCS / "standard_runs.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def runs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_standard_runs", DOCS / "make_standard_runs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def section(title: str) -> str:
    return PAGE.split(f"+{title}+gpus8`", 1)[1].split("\n## ", 1)[0]


@pytest.mark.slow
def test_every_run_has_its_table_with_the_counts_of_its_plan(runs: ModuleType):
    assert len(runs.RUNS) >= 8
    for model, task in runs.RUNS:
        table = section(f"{model}+{task}")
        for method in runs.METHODS:
            start = " | ".join(["", f"`{method}`", *runs.counts(f"{method}+{model}+{task}"), ""]).strip()
            assert start in table, "run `python docs/make_standard_runs.py`"


@pytest.mark.every
def test_the_page_is_what_its_script_writes(runs: ModuleType):
    assert runs.page() == PAGE, "run `python docs/make_standard_runs.py`"


def test_rows_are_what_the_estimates_say(runs: ModuleType):
    """Only one model is checked, because the whole page takes a minute; the test above checks it."""
    for method in ("flow_grpo", "mixgrpo_flash", "branchgrpo"):
        line = runs.row(method, f"{method}+sd35_medium+ocr", runs.SIZES)
        assert line in section("sd35_medium+ocr"), "run `python docs/make_standard_runs.py`"
