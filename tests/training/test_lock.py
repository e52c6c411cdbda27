"""One writer for each run folder: a second process gets a message about the first, and a dead process blocks nobody."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowgrpo.training.folder import lock
from flowgrpo.training.folder.run_folder import RunFolder
from tests.conftest import Command

HOLDER = """
import sys
from pathlib import Path
from flowgrpo.training.folder.run_folder import RunFolder
run = RunFolder(Path(sys.argv[1]))
run.claim()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = RunFolder.create(tmp_path / "run", "name: test\n")
    made.release()
    return made


@pytest.fixture
def holder(run: RunFolder) -> Iterator[subprocess.Popen[str]]:
    """Another process that writes in the run folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_a_second_writer_is_told_who_the_first_is(run: RunFolder, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(ValueError, match=rf"is being written by process {holder.pid} on \S+ since 2.*UTC"):
        run.claim()


@pytest.mark.slow
def test_anybody_may_ask_whether_a_folder_is_held(
    run: RunFolder, holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert lock.held(run.path)
    assert lock.held(run.path)
    holder.kill()
    holder.wait()
    assert not lock.held(run.path)
    assert not lock.held(tmp_path)
    run.claim()


@pytest.mark.slow
def test_the_command_refuses_a_run_that_is_being_written(
    run: RunFolder, holder: subprocess.Popen[str], command: Command
) -> None:
    run.config.write_text("task: text\nmodel: {path: arithmetic}\nrewards: [{name: answer}]\n", encoding="utf-8")
    run.metrics.write_text('{"iteration": 0}\n', encoding="utf-8")
    status, _, errors = command("resume", str(run.path))
    assert status == 1
    assert f"error: {run.path} is being written by process {holder.pid} on " in errors
    assert run.metrics.read_text(encoding="utf-8") == '{"iteration": 0}\n'


@pytest.mark.slow
def test_a_killed_process_bars_nobody(run: RunFolder, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    run.claim()
    assert json.loads((run.path / lock.NAME).read_text(encoding="utf-8"))["process"] == os.getpid()


@pytest.mark.slow
def test_two_that_make_one_run_do_not_both(tmp_path: Path, holder: subprocess.Popen[str], run: RunFolder) -> None:
    """The first of two `train --out` has its lock, and has not written its config yet."""
    run.config.unlink()
    for folder in (run.samples, run.checkpoints):
        folder.rmdir()
    with pytest.raises(ValueError, match="is being written by process"):
        RunFolder.create(run.path, "name: other\n")


def test_claims_of_one_process_count(run: RunFolder) -> None:
    """The lock is released after the last step; by then a child process would hold it."""
    other = RunFolder.open(run.path)
    run.claim()
    other.claim()
    run.release()
    run.release()
    assert not _free(run.path)
    del other
    assert _free(run.path)


def _free(path: Path) -> bool:
    """Whether another process could claim the folder."""
    process = os.fork()
    if process == 0:
        try:
            lock.claim(path)
        except ValueError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_the_run_goes_on_and_says_so_once(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(lock, "_lock", fail)
    run.claim()
    run.claim()
    [note] = run.notes
    assert "has no locks" in note
    assert "start only one" in note


def test_a_lock_file_alone_is_no_run(tmp_path: Path) -> None:
    (tmp_path / lock.NAME).write_text("", encoding="utf-8")
    assert RunFolder.create(tmp_path, "x").config.read_text(encoding="utf-8") == "x"
