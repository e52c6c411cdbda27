"""Libraries are loaded without a search for garbage."""

import gc
import sys
from types import ModuleType

import pytest

from flowgrpo.cli.loading import MANY, loading


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the collector was on at each `gc.freeze`, which does nothing here: it would keep garbage of tests."""
    found: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: found.append(gc.isenabled()))
    return found


def load(patch: pytest.MonkeyPatch, name: str, count: int) -> None:
    for number in range(count):
        patch.setitem(sys.modules, f"{name}_{number}", ModuleType(name))


def test_garbage_is_looked_for_again_after_the_block(frozen: list[bool]) -> None:
    with loading():
        assert not gc.isenabled()
        with loading():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), loading():
        raise ImportError
    assert gc.isenabled()
    assert frozen == []


def test_libraries_are_set_aside_and_a_few_modules_are_not(frozen: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    with loading():
        load(monkeypatch, "few", MANY - 1)
    assert frozen == []
    with loading():
        load(monkeypatch, "many", MANY)
    assert frozen == [False]
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off(frozen: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    gc.disable()
    try:
        with loading():
            load(monkeypatch, "others", MANY)
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert frozen == []
