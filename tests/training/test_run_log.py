"""`run.log`: every line that a run prints, with the time, and the warnings beside them."""

import io
import logging
import re
import warnings
from pathlib import Path

import pytest
from rich.console import Console

from flowgrpo.training.folder.run_log import RunLog
from flowgrpo.training.reporting.progress import ConsoleReporter

STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d{4} ")


def lines_of(folder: Path) -> list[str]:
    lines = (folder / "run.log").read_text(encoding="utf-8").splitlines()
    assert all(STAMP.match(line) for line in lines)
    return [STAMP.sub("", line) for line in lines]


def test_the_log_holds_what_was_printed_before_the_folder_was_there_and_after(tmp_path: Path):
    output = io.StringIO()
    with RunLog() as log:
        reporter = ConsoleReporter(Console(file=output, width=40), log=log)
        reporter.say("run folder [somewhere]")
        log.open(tmp_path)
        reporter.say("note: " + "a long line " * 10)
        reporter.say("ein Bär ×12")
    assert lines_of(tmp_path) == [line.rstrip() for line in output.getvalue().splitlines()]


def test_warnings_of_python_and_of_libraries_are_in_the_log_and_still_shown(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
):
    with RunLog() as log:
        log.open(tmp_path)
        warnings.warn("the sky falls", UserWarning, stacklevel=1)
        logging.getLogger("diffusers.models").error("no such layer")
        logging.getLogger("somebody").warning("beware of %s", "dogs")
        logging.getLogger("somebody").info("nothing")
    warnings.warn("afterwards", UserWarning, stacklevel=1)
    logging.getLogger("somebody").warning("afterwards")
    first, *rest = lines_of(tmp_path)
    assert first.startswith(f"UserWarning: the sky falls ({__file__}:")
    assert rest == ["error: diffusers.models: no such layer", "warning: somebody: beware of dogs"]
    assert [str(warning.message) for warning in recwarn] == ["the sky falls", "afterwards"]


def test_a_resumed_run_goes_on_in_its_log_also_after_a_line_that_was_cut(tmp_path: Path):
    for text in ("first", "second"):
        with RunLog() as log:
            log.open(tmp_path)
            log.write(text)
    with (tmp_path / "run.log").open("a") as file:
        file.write("2026-01-01 10:00:00+0000 a li")
    with RunLog() as log:
        log.open(tmp_path)
        log.write("third")
    assert lines_of(tmp_path) == ["first", "second", "a li", "third"]


def test_what_ended_a_run_is_in_its_log(tmp_path: Path):
    def ended_by(error: BaseException) -> None:
        with RunLog() as log:
            log.open(tmp_path)
            raise error

    with pytest.raises(ValueError, match="batch"):
        ended_by(ValueError("batch is 3;\nuse 4"))
    lines = lines_of(tmp_path)
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-2:] == ["ValueError: batch is 3;", "use 4"]
    with pytest.raises(KeyboardInterrupt):
        ended_by(KeyboardInterrupt())
    assert lines_of(tmp_path)[-1] == "interrupted"


def test_other_processes_write_nothing(tmp_path: Path):
    with RunLog(active=False) as log:
        log.open(tmp_path)
        log.write("a line")
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_cannot_be_written_is_said_once_and_does_not_stop_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "run.log").mkdir()
    with RunLog() as log:
        log.open(tmp_path)
        log.write("one")
        log.write("two")
    errors = capsys.readouterr().err
    assert errors.count("is no longer written, and the run goes on") == 1
