"""Processes that a measurement starts end with it, and a failure is told with its cause and what it left."""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flowgrpo.bench import kills, measures
from flowgrpo.bench.children import ChildFailed, refuse_failure, started, workplace
from flowgrpo.cli.app import app
from flowgrpo.configs.schema import Recipe
from tests.conftest import Command

WAITING = [sys.executable, "-c", "import signal; signal.pause()"]
DEAF = [
    sys.executable, "-c",
    "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.kill(os.getppid(), signal.SIGUSR1); "
    "signal.pause()",
]  # fmt: skip


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_failure_is_told_with_its_last_error(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("a warning\nerror: an old one\nerror: the reward failed; mend it\ngo on with `flowgrpo resume`\n")
    with pytest.raises(ChildFailed) as refused:
        refuse_failure(["flowgrpo", "train", "a b.yaml"], 1, log)
    assert str(refused.value) == (
        "`flowgrpo train 'a b.yaml'` ended with status 1:\n"
        "error: the reward failed; mend it\ngo on with `flowgrpo resume`"
    )
    refuse_failure(["flowgrpo"], 0, log)
    log.write_text("\n".join(f"line {k}" for k in range(20)))
    with pytest.raises(ChildFailed, match=r"was ended by SIGKILL:\nline 12\n(.*\n)*line 19$"):
        refuse_failure(["flowgrpo"], -signal.SIGKILL, log)
    log.write_text("")
    with pytest.raises(ChildFailed, match="it printed no error"):
        refuse_failure(["flowgrpo"], 3, log)


@pytest.mark.parametrize(("error", "stays"), [(ChildFailed("x"), True), (ValueError("x"), False), (None, False)])
def test_the_folder_stays_if_a_command_failed_in_it(error: Exception | None, stays: bool, temporary: Path) -> None:
    told = ""
    try:
        with workplace("name") as folder:
            (folder / "run").mkdir()
            if error is not None:
                raise error
    except ValueError as refused:
        told = str(refused)
    assert (f"kept in {folder}" in told) is stays
    assert folder.parent == temporary
    assert (folder / "run").is_dir() is stays


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_measurement_ends_its_process(
    number: signal.Signals, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children: list[Any] = []

    def measure(recipe: Recipe, folder: Path, report: Callable[[str], None]) -> dict[str, Any]:
        with started(WAITING, folder.with_name("log")) as process:
            children.append(process)
            os.kill(os.getpid(), number)
            process.wait()
        raise AssertionError("the signal was not heard")

    monkeypatch.setitem(measures.MEASUREMENTS, "prefix", measure)
    done = CliRunner().invoke(app, ["bench", "prefix"])
    assert done.exit_code == 128 + number
    assert f"stopped by {number.name}" in done.output
    assert [child.returncode for child in children] == [-signal.SIGTERM]
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_a_process_that_does_not_hear_the_signal_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowgrpo.bench.children.GRACE", 0.1)
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        with started(DEAF, tmp_path / "log") as process:
            # The process says that it ignores SIGTERM from now on.
            signal.sigwait({signal.SIGUSR1})
        assert process.returncode == -signal.SIGKILL
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.slow
def test_a_signal_ends_a_forked_process_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forked: list[int] = []

    def interrupted(process: int, options: int) -> tuple[int, int]:
        forked.append(process)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(kills, "_command", lambda *_: signal.pause())
    monkeypatch.setattr(os, "waitpid", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kills._forked(["train"], tmp_path / "log", None)
    with pytest.raises(ProcessLookupError):
        os.kill(forked[0], 0)


def test_failed_cases_of_kills_are_a_failure_of_the_command(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fault = {"how": "kill", "operation": "rename metrics.jsonl", "fault": "other bits"}
    figures = {"operations": {"rename": 2}, "cases": {"kill": 1, "raise": 1}, "failed": [fault]}
    monkeypatch.setattr("flowgrpo.bench.kills.kills", lambda *given: figures)
    status, _, errors = command("bench", "kills", "--out", str(tmp_path / "kills.json"))
    assert status == 1
    assert "1 of 2 cases failed. The first one is kill at rename metrics.jsonl: other bits" in " ".join(errors.split())
    assert json.loads((tmp_path / "kills.json").read_text()) == figures
    figures["failed"] = []
    assert command("bench", "kills")[0] == 0
