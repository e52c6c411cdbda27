"""Code that a model wrote, run with limits, in a separate process, folder and environment.

The sandbox protects against accidents, and against rewards that are won by cheating. It is not a security boundary: the
guards are in the process that they guard, and code that is written to break out of CPython can break out. If a model
might try this, run the whole training in a container or virtual machine without secrets and without network.

The sandbox consists of:

- an interpreter without site-packages, with a clean environment, in a temporary folder that is removed afterwards;
- a separate session, so that everything that the code has started is killed at the wall-clock limit;
- limits of the system on CPU time, address space, file size, open files and core dumps. The number of processes is not
  limited, because that limit counts all processes of the user and has no effect for root;
- an audit hook that refuses new processes, sockets, ctypes, signals to other processes, files outside the folder and
  the standard library, more than 100 written files, and access to the frames and objects of the test harness.

The code cannot pass a test by printing something or by ending early. Every test has its own verdict, which is written
to a separate file together with a secret. A missing verdict counts as failed. Assertions of the form
`assert EXPRESSION == LITERAL` are compared outside the process. The literal is never sent into the process, so neither
a forged verdict nor an object that is equal to everything passes the test. All other assertions are decided inside the
process, and code that reads the memory of the process could forge them. The output of a program is compared outside the
process too.

The sandbox runs on Linux. It does not import torch.
"""

from __future__ import annotations

import ast
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from .sandbox_child import LONGEST_MESSAGE, plain

CHILD = Path(__file__).with_name("sandbox_child.py")
MEGABYTE = 1 << 20
OPEN_FILES = 64


@dataclass(frozen=True)
class Limits:
    """The limits of one run.

    Attributes:
        seconds: wall-clock time. The limit on CPU time is a whole number of seconds and slightly larger.
        memory_mb: megabytes of address space.
        file_mb: megabytes of each file that the code writes, and of its output.
    """

    seconds: float = 5.0
    memory_mb: int = 512
    file_mb: int = 4


@dataclass(frozen=True)
class Execution:
    """How the tests of one sample went.

    Attributes:
        passed: for each test, whether it passed.
        note: the first problem, or an empty text.
    """

    passed: tuple[bool, ...]
    note: str


@dataclass(frozen=True)
class ProgramStep:
    """A piece of a test: `kind` is "value" (compared with `expected` outside the process), "run" or "setup"."""

    kind: str
    source: str
    expected: str = ""


@lru_cache(maxsize=1024)
def steps_of(tests: tuple[str, ...]) -> tuple[ProgramStep, ...]:
    """Split test texts into steps.

    Every assertion at the top level of a text is a test, and the statements between the assertions are setup. A text
    without an assertion at its top level is one test.

    Raises:
        ValueError: a text is not valid Python.
    """
    steps: list[ProgramStep] = []
    for text in tests:
        try:
            body = ast.parse(text).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"the test {text!r:.200} is not valid Python: {error}") from None
        if any(isinstance(statement, ast.Assert) for statement in body):
            steps += [_step(statement) for statement in body]
        else:
            steps.append(ProgramStep("run", text))
    return tuple(steps)


def run_tests(code: str, tests: Sequence[str], limits: Limits) -> Execution:
    """Load code as a module and run tests on it, one after another in one process.

    Args:
        code: Python code.
        tests: texts with assertions, see `steps_of`.
        limits: limits of the whole run.

    Returns:
        The outcome, with a verdict for every test.

    Raises:
        ValueError: a test is not valid Python.
    """
    steps = steps_of(tuple(tests))
    asked = [number for number, step in enumerate(steps) if step.kind != "setup"]
    job = {"code": code, "steps": [{"kind": step.kind, "source": step.source} for step in steps]}
    records, ending, _ = _run(job, None, limits)
    passed, problems = {}, []
    for record in records:
        number = record.get("step")
        if "error" in record:
            where = "" if number is None else "a statement before a test: "
            where = f"test {asked.index(number) + 1}: " if number in asked else where
            problems.append(f"{where}{record['error']}"[: 2 * LONGEST_MESSAGE])
        elif number in asked:
            step = steps[number]
            passed[number] = record.get("value") == step.expected if step.kind == "value" else "passed" in record
            if not passed[number]:
                problems.append(f"test {asked.index(number) + 1}: wrong value")
    if not any("end" in record or "step" not in record for record in records):
        problems.append(ending or "it ended before its tests")
    return Execution(tuple(passed.get(number, False) for number in asked), problems[0] if problems else "")


def run_cases(code: str, cases: Sequence[Mapping[str, str]], limits: Limits) -> Execution:
    """Run code as a program once for every case, and compare its output.

    White space at the ends of lines and empty lines at the end do not count. The program must end with the exit code 0.
    After a case that runs out of time, the remaining cases are not run and count as failed.

    Args:
        code: Python code.
        cases: mappings with `input`, which the program reads, and `output`, which it should print.
        limits: limits of every single case.
    """
    passed, note = [], ""
    for number, case in enumerate(cases):
        records, ending, printed = _run({"code": code, "steps": []}, case["input"], limits)
        error = next((record["error"] for record in records if "error" in record), ending)
        same = _lines(printed.decode(errors="replace")) == _lines(case["output"])
        passed.append(same and not error)
        note = note or ("" if passed[-1] else f"case {number + 1}: {error or 'wrong output'}")
        if error.startswith(OUT_OF_TIME):
            break
    return Execution((*passed, *[False] * (len(cases) - len(passed))), note)


OUT_OF_TIME = "out of time"


def _run(job: dict[str, Any], stdin: str | None, limits: Limits) -> tuple[list[dict[str, Any]], str, bytes]:
    """Return the records that a run wrote with the secret, a note about how it ended, and its output."""
    secret = secrets.token_hex(16)
    job = {
        **job,
        "secret": secret,
        "limits": {
            "cpu_seconds": math.ceil(limits.seconds) + 1,
            "memory": limits.memory_mb * MEGABYTE,
            "file_size": limits.file_mb * MEGABYTE,
            "files": OPEN_FILES,
        },
    }
    # Files are used in place of pipes: a pipe can fill up and block either side, and the size limit holds only for
    # files.
    with (
        tempfile.TemporaryDirectory(prefix="flowgrpo-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as job_file,
        tempfile.TemporaryFile() as verdict_file,
        tempfile.TemporaryFile() as input_file,
        tempfile.TemporaryFile() as output_file,
    ):
        _fill(job_file, json.dumps(job).encode())
        _fill(input_file, (stdin or "").encode(errors="replace"))
        ending = _execute(folder, job_file, verdict_file, input_file, output_file, stdin is not None, limits.seconds)
        verdict_file.seek(0)
        output_file.seek(0)
        return list(_records(verdict_file.read(), secret)), ending, output_file.read()


def _execute(
    folder: str,
    job_file: BinaryIO,
    verdict_file: BinaryIO,
    input_file: BinaryIO,
    output_file: BinaryIO,
    prints: bool,
    seconds: float,
) -> str:
    """Run the child, and return how it ended; an empty text if it ended by itself with the exit code 0."""
    numbers = job_file.fileno(), verdict_file.fileno()
    process = subprocess.Popen(
        [sys.executable, "-s", "-S", "-B", str(CHILD), *map(str, numbers)],
        stdin=input_file,
        stdout=output_file if prints else subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={
            "HOME": folder,
            "LANG": "C.UTF-8",
            "PYTHONHASHSEED": "0",
            "PYTHONSAFEPATH": "1",
            "PYTHONUTF8": "1",
            "TMPDIR": folder,
        },
        pass_fds=numbers,
        start_new_session=True,
    )
    late = threading.Event()

    def stop() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(seconds, stop)
    timer.start()
    # The process stays a zombie until its whole process group is killed. So no other group can get the number of this
    # group in the meantime.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    timer.cancel()
    timer.join()
    os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    if late.is_set():
        return f"{OUT_OF_TIME} after {seconds:g} s"
    return f"it was killed by signal {-code}" if code < 0 else f"it ended with exit code {code}" if code else ""


def _records(data: bytes, secret: str) -> list[dict[str, Any]]:
    found = []
    for line in data.split(b"\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and record.pop("secret", None) == secret:
            found.append(record)
    return found


def _step(statement: ast.stmt) -> ProgramStep:
    if not isinstance(statement, ast.Assert):
        return ProgramStep("setup", ast.unparse(statement))
    test = statement.test
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        for asked, given in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
            try:
                return ProgramStep("value", ast.unparse(asked), json.dumps(plain(ast.literal_eval(given))))
            except (ValueError, TypeError):
                continue
    return ProgramStep("run", ast.unparse(statement))


def _fill(file: BinaryIO, data: bytes) -> None:
    file.write(data)
    file.flush()
    os.lseek(file.fileno(), 0, os.SEEK_SET)


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines
