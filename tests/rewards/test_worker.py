"""Calls in a separate process: results, errors of each kind, and calls that must be given up."""

import pickle
from pathlib import Path

import pytest

from flowgrpo.rewards.worker import GaveUp, Worker

pytestmark = pytest.mark.slow

FUNCTIONS = """
import os


def echo(*values):
    print("to standard output")
    return list(values)


def act(what):
    if what == "value":
        raise ValueError("this column is wrong")
    if what == "key":
        raise KeyError("x")
    if what == "import":
        import no_such_package
    if what == "recursion":
        return act(what)
    if what == "memory":
        return len(bytearray(10**10))
    if what == "die":
        os._exit(3)
    while what == "loop":
        pass
    return os.getpid()
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "worker_functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    return "worker_functions"


def test_arguments_and_results_go_through_unharmed(functions: str) -> None:
    worker = Worker(f"{functions}:echo")
    values = ["é\n\u2028", None, 1.5, {"a": [True]}, "x" * 300_000]
    assert worker(*values, seconds=60) == values
    assert worker(seconds=60) == []
    worker.close()


def test_each_failure_has_its_error_and_the_next_call_works(functions: str) -> None:
    worker = Worker(f"{functions}:act", memory_mb=256)
    with pytest.raises(ValueError, match="this column is wrong"):
        worker("value", seconds=60)
    with pytest.raises(RuntimeError, match="KeyError: 'x'"):
        worker("key", seconds=60)
    first = worker("pid", seconds=60)
    for what, message in (("recursion", "RecursionError"), ("memory", "MemoryError")):
        with pytest.raises(GaveUp, match=message):
            worker(what, seconds=60)
    assert worker("pid", seconds=60) == first
    with pytest.raises(GaveUp, match=r"longer than 0\.5 s"):
        worker("loop", seconds=0.5)
    second = worker("pid", seconds=60)
    with pytest.raises(GaveUp, match="died"):
        worker("die", seconds=60)
    assert len({first, second, worker("pid", seconds=60)}) == 3
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        worker("import", seconds=60)
    worker.close()


def test_a_module_that_cannot_be_imported_is_no_failed_call(functions: str, tmp_path: Path) -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        Worker("no_such_module:f")(seconds=60)
    assert caught.value.name == "no_such_module"
    (tmp_path / "broken_functions.py").write_text("raise RuntimeError('no licence')")
    with pytest.raises(RuntimeError, match=r"broken_functions cannot be imported: RuntimeError: no licence"):
        Worker("broken_functions:f")(seconds=60)
    (tmp_path / "deadly_functions.py").write_text("import os; os._exit(1)")
    with pytest.raises(RuntimeError, match=r"could not be started: its process died"):
        Worker("deadly_functions:f")(seconds=60)


def test_a_used_worker_can_be_sent_to_another_process(functions: str) -> None:
    worker = Worker(f"{functions}:echo", memory_mb=300)
    worker(1, seconds=60)
    copy = pickle.loads(pickle.dumps(worker))
    assert (copy(2, seconds=60), copy.memory_mb) == ([2], 300)
    copy.close()
    worker.close()
