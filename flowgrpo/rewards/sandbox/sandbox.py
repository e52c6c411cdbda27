"""Code that a model wrote, in boxes that the Linux kernel holds, and judged from outside.

A completion is a function or a program that is asked. It never judges itself:

- A program gets input and gives output. The output is compared here, in the process of the training.
- A function is asked by the judge. The judge runs the tests in a box of its own, without any code of the completion.
  Arguments and answers cross between the two boxes as plain data, see `values.py` and `judging.py`.

`launcher.py` forks the boxes. `kernel.py` has their walls:

- namespaces: a box has its own processes, folders in memory, network without any interface, and messages. It sees the
  standard library and the shared libraries of the system, and no other file. It is an ordinary user without rights;
- Landlock: no file but those, whatever is mounted;
- seccomp: no other process, program, socket, signal to others, or change of its own walls;
- limits on CPU time, memory, open files, size of files, and the wall-clock limit of the supervisor.

Namespaces hold alone, and so do Landlock and seccomp together. If the system has neither, `Sandbox` refuses. Nothing of
a box remains when it ends, because its folder is in memory and its processes are in a namespace.
"""

from __future__ import annotations

import ast
import contextlib
import json
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

MEGABYTE = 1 << 20
START_SECONDS, GRACE_SECONDS = 60.0, 30.0
OUT_OF_TIME = "out of time"
LONGEST_NOTE = 400
# The folder is imported as a package with another name. So the process needs neither site-packages nor this package.
_BOOT = """
import sys, types
del sys.path[0]
package = sys.modules["_flowgrpo_box"] = types.ModuleType("_flowgrpo_box")
package.__path__ = [sys.argv[1]]
from _flowgrpo_box.launcher import main
inlet, absent = int(sys.argv[2]), sys.argv[3:]
sys.argv[:] = ["solution.py"]
main(inlet, absent)
"""


@dataclass(frozen=True)
class Limits:
    """The limits of one run.

    Attributes:
        seconds: wall-clock time.
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
    """A piece of a test: `kind` is "value" (a comparison with `==`), "run" or "setup"."""

    kind: str
    source: str


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


class Sandbox:
    """Runs completions in boxes. Several threads may use it; its process starts with the first use.

    Args:
        unsafe: whether to run completions even if the system cannot hold them.
        absent: walls to leave out. This is for tests.
    """

    def __init__(self, unsafe: bool = False, absent: Sequence[str] = ()) -> None:
        self.unsafe, self.absent = unsafe, tuple(absent)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._inlet: socket.socket | None = None
        self._walls: dict[str, str] = {}

    def walls(self) -> dict[str, str]:
        """Return for every wall why it does not stand, or an empty text if it stands. The first call tries them.

        Raises:
            RuntimeError: the process that starts boxes cannot be started.
        """
        with self._lock:
            self._started()
            return dict(self._walls)

    def check(self) -> None:
        """Refuse to work if the system cannot hold a completion.

        Raises:
            ValueError: neither namespaces, nor Landlock and seccomp together, are there.
        """
        walls = self.walls()
        if self.unsafe or not walls["namespaces"] or not (walls["landlock"] or walls["seccomp"]):
            return
        reasons = "; ".join(f"{wall}: {why}" for wall, why in walls.items() if why)
        raise ValueError(
            f"the system cannot hold the code that a model writes ({reasons}). Allow user namespaces (sysctl "
            "kernel.unprivileged_userns_clone=1, user.max_user_namespaces above 0, "
            "kernel.apparmor_restrict_unprivileged_userns=0; in a container, give it a seccomp profile that allows "
            "unshare and mount), or use a kernel with Landlock (5.13 or newer) and seccomp. If the training runs in a "
            "virtual machine or container without secrets and without network, you may write `unsafe: true`"
        )

    def close(self) -> None:
        """End the process and all boxes. A later use starts a new one."""
        with self._lock:
            self._stop()

    def tests(self, code: str, tests: Sequence[str], limits: Limits) -> Execution:
        """Load code as a module in one box, and let the judge ask it from another one.

        Args:
            code: Python code.
            tests: texts with assertions, see `steps_of`.
            limits: limits of the whole run.

        Returns:
            The outcome, with a verdict for every test.

        Raises:
            ValueError: a test is not valid Python.
            RuntimeError: the boxes cannot be made.
        """
        steps = steps_of(tuple(tests))
        one, other = socket.socketpair()
        with one, other:
            solution = self._start("solution", code, limits, one)
            judge = self._start("judge", [vars(step) for step in steps], limits, other)
        with solution, judge:
            verdict = _reply(judge, limits)
            # The completion has time until the judge has ended. If it has ended before, its own end says why.
            with contextlib.suppress(OSError):
                solution.shutdown(socket.SHUT_WR)
            ending = _ending(_reply(solution, limits), limits)
        if verdict["late"]:
            ending = f"{OUT_OF_TIME} after {limits.seconds:g} s"
        return _execution(steps, verdict["output"], ending)

    def cases(self, code: str, cases: Sequence[Mapping[str, str]], limits: Limits) -> Execution:
        """Run code as a program once for every case, and compare its output.

        White space at the ends of lines and empty lines at the end do not count. The program must end with the exit
        code 0. After a case that runs out of time, the remaining cases are not run and count as failed.

        Args:
            code: Python code.
            cases: mappings with `input`, which the program reads, and `output`, which it should print.
            limits: limits of every single case.
        """
        passed, note = [], ""
        for number, case in enumerate(cases):
            with self._start("program", code, limits, given=case["input"]) as program:
                reply = _reply(program, limits)
            ending = _ending(reply, limits)
            same = _lines(reply["output"]) == _lines(case["output"])
            passed.append(same and not ending)
            note = note or ("" if passed[-1] else f"case {number + 1}: {ending or 'wrong output'}")
            if reply["late"]:
                break
        return Execution((*passed, *[False] * (len(cases) - len(passed))), note)

    def _start(
        self, role: str, work: Any, limits: Limits, channel: socket.socket | None = None, given: str = ""
    ) -> socket.socket:
        """Start a box and return the socket to its supervisor."""
        request = {
            "role": role,
            "work": work,
            "input": given,
            "seconds": limits.seconds,
            "memory": limits.memory_mb * MEGABYTE,
            "file_size": limits.file_mb * MEGABYTE,
        }
        data = json.dumps(request).encode()
        ours, theirs = socket.socketpair()
        numbers = [theirs.fileno(), *([channel.fileno()] if channel else [])]
        with theirs:
            for last in (False, True):
                with self._lock:
                    try:
                        socket.send_fds(self._started(), [b"."], numbers)
                        break
                    except OSError as error:
                        self._stop()
                        if last:
                            raise RuntimeError(f"the process that starts boxes has ended: {error}") from None
        ours.settimeout(GRACE_SECONDS)
        # If the supervisor has died, the missing report says so.
        with contextlib.suppress(OSError):
            ours.sendall(struct.pack("<I", len(data)) + data)
        return ours

    def _started(self) -> socket.socket:
        if self._process is not None and self._process.poll() is not None:
            self._stop()
        if self._inlet is None:
            ours, theirs = socket.socketpair()
            here = str(Path(__file__).parent)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, *("-s", "-S", "-B", "-c", _BOOT), here, str(theirs.fileno()), *self.absent],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    cwd="/",
                    env={"HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "TMPDIR": "/tmp"},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            self._inlet = ours
            ours.settimeout(START_SECONDS)
            try:
                self._walls = json.loads(_line(ours))
            except (OSError, ValueError) as error:
                self._process.kill()
                said = self._process.communicate()[1].decode(errors="replace").strip().rpartition("\n")[2]
                self._stop()
                raise RuntimeError(f"the process that starts boxes could not be started: {said or error}") from None
            assert self._process.stderr is not None
            self._process.stderr.close()
        return self._inlet

    def _stop(self) -> None:
        inlet, process = self._inlet, self._process
        self._inlet = self._process = None
        if inlet is not None:
            inlet.close()
        if process is not None:
            # The launcher ends when its socket closes. It is killed in case it does not listen.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)
            process.kill()
            process.wait()

    def __getstate__(self) -> dict[str, Any]:
        return {"unsafe": self.unsafe, "absent": self.absent}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Sandbox.__init__(self, **state)

    def __del__(self) -> None:
        # At the end of the interpreter, the modules that closing needs may be gone. The launcher ends with its socket.
        if getattr(self, "_process", None) is not None and sys is not None and not sys.is_finalizing():
            self._stop()


def _reply(control: socket.socket, limits: Limits) -> dict[str, Any]:
    """Return what the supervisor of a box reports.

    Raises:
        RuntimeError: the box could not be made, or its supervisor has died. Neither is the fault of a completion.
    """
    control.settimeout(limits.seconds + GRACE_SECONDS)
    try:
        data = b"".join(iter(lambda: control.recv(1 << 16), b""))
        reply = json.loads(data)
    except (OSError, ValueError) as error:
        raise RuntimeError(f"a box of code has ended without a report: {error}") from None
    if reply["problem"]:
        raise RuntimeError(f"a box of code could not be made: {reply['problem']}")
    return reply


def _ending(reply: Mapping[str, Any], limits: Limits) -> str:
    """Return how a box ended; an empty text if it ended by itself with the exit code 0."""
    code = reply["code"]
    if reply["late"]:
        return f"{OUT_OF_TIME} after {limits.seconds:g} s"
    if reply["notes"]:
        return reply["notes"][:LONGEST_NOTE]
    return f"it was killed by signal {-code}" if code < 0 else f"it ended with exit code {code}" if code else ""


def _execution(steps: Sequence[ProgramStep], verdicts: str, ending: str) -> Execution:
    asked = [number for number, step in enumerate(steps) if step.kind != "setup"]
    passed, problems, ended = {}, [], False
    # A judge that was killed may have left half a line.
    for record in map(json.loads, verdicts.split("\n")[:-1]):
        number = record.get("step")
        ended |= "end" in record or number is None
        if "error" in record:
            where = "" if number is None else "a statement before a test: "
            where = f"test {asked.index(number) + 1}: " if number in asked else where
            problems.append(f"{where}{record['error']}"[:LONGEST_NOTE])
        elif number in asked:
            passed[number] = record["passed"]
            if not record["passed"]:
                problems.append(f"test {asked.index(number) + 1}: wrong value")
    if not ended:
        problems.append(ending or "it ended before its tests")
    return Execution(tuple(passed.get(number, False) for number in asked), problems[0] if problems else "")


def _step(statement: ast.stmt) -> ProgramStep:
    if not isinstance(statement, ast.Assert):
        return ProgramStep("setup", ast.unparse(statement))
    test = statement.test
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        return ProgramStep("value", ast.unparse(test))
    return ProgramStep("run", ast.unparse(statement))


def _line(stream: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        part = stream.recv(1 << 16)
        if not part:
            break
        data += part
    return data


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines
