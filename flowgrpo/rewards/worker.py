"""A function in a separate process, so that a call can be ended in whatever way it hangs.

On text that a model wrote, regular expressions, computer algebra, schemas and databases may never end, or may use up
all memory. No exception or signal handler can interrupt them. The process is started at the first call, serves one call
after another, and is killed when a call takes too long. This module imports nothing heavy: the process does not need
torch.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

START_SECONDS = 120.0
MEGABYTE = 1 << 20


class GaveUp(RuntimeError):
    """A call took too long, or the process died during it; the message says which."""


class Worker:
    """Calls one function in a separate process, one call at a time, from any thread.

    Args:
        target: `package.module:function`. Arguments and results are sent as JSON.
        memory_mb: how many megabytes of address space the process may take, if the system can limit it.
    """

    def __init__(self, target: str, memory_mb: int = 1024) -> None:
        self.target, self.memory_mb = target, memory_mb
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def __call__(self, *arguments: Any, seconds: float) -> Any:
        """Call the function and return its result.

        Args:
            arguments: values that JSON can represent.
            seconds: how long the call may take, in wall-clock time. The start of the process does not count.

        Raises:
            GaveUp: the call took longer, or the process died, for instance because memory ran out.
            ModuleNotFoundError: the function's module imports a package that is not installed.
            ValueError: the function raised a ValueError, because an argument that the user wrote is wrong.
            RuntimeError: the function raised something else.
        """
        with self._lock:
            if self._process is None:
                self._start()
            assert self._process is not None
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps(arguments).encode() + b"\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                self._stop()
                raise GaveUp("its process died") from None
            return self._answer(seconds)

    def close(self) -> None:
        """End the process. A later call starts a new one."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        # The interpreter is isolated (-I). Otherwise the folder of the script and the user's environment variables
        # would decide what is imported.
        code = (
            "import json, sys; job = json.loads(sys.stdin.buffer.readline()); sys.path[:] = job.pop('path'); "
            f"from {__name__} import serve; serve(**job)"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._lines = queue.SimpleQueue()
        threading.Thread(target=_read, args=(self._process.stdout, self._lines), daemon=True).start()
        job = {"path": sys.path, "target": self.target, "memory": self.memory_mb * MEGABYTE}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()
        try:
            self._answer(START_SECONDS)
        except GaveUp as error:
            # No call caused this, so it must not look like the failure of a call.
            raise RuntimeError(f"the process for {self.target} could not be started: {error}") from error

    def _answer(self, seconds: float) -> Any:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            self._stop()
            raise GaveUp(f"it took longer than {seconds:g} s") from None
        if not line.endswith(b"\n"):
            self._stop()
            raise GaveUp("its process died")
        reply = json.loads(line)
        if "missing" in reply:
            self._stop()
            raise ModuleNotFoundError(f"No module named {reply['missing']!r}", name=reply["missing"])
        if "wrong" in reply:
            raise ValueError(reply["wrong"])
        if "failed" in reply:
            raise RuntimeError(reply["failed"])
        if "gave_up" in reply:
            raise GaveUp(reply["gave_up"])
        return reply["result"]

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        # Closing flushes what was not sent yet, and the process is gone.
        with contextlib.suppress(BrokenPipeError):
            if process.stdin is not None:
                process.stdin.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"target": self.target, "memory_mb": self.memory_mb}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Worker.__init__(self, **state)

    def __del__(self) -> None:
        if getattr(self, "_process", None) is not None:
            self._stop()


def serve(target: str, memory: int) -> None:
    """Answer calls from standard input until it ends. This is the main function of a `Worker`'s process."""
    replies, sys.stdout = sys.stdout.buffer, sys.stderr
    module, _, name = target.partition(":")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        _reply(replies, {"missing": error.name})
        return
    except Exception as error:
        _reply(replies, {"failed": f"{module} cannot be imported: {type(error).__name__}: {error}"})
        return
    limit_memory(memory)
    _reply(replies, {"result": None})
    for line in sys.stdin.buffer:
        _reply(replies, _call(function, json.loads(line)))


def limit_memory(amount: int) -> None:
    """Limit this process to `amount` bytes of address space, if the system has such a limit."""
    try:
        import resource
    except ModuleNotFoundError:
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
    resource.setrlimit(resource.RLIMIT_AS, (amount, hard))


def _call(function: Callable[..., Any], arguments: list[Any]) -> dict[str, Any]:
    try:
        return {"result": function(*arguments)}
    except (MemoryError, RecursionError) as error:
        return {"gave_up": f"it ran into a {type(error).__name__}"}
    except ModuleNotFoundError as error:
        return {"missing": error.name}
    except ValueError as error:
        return {"wrong": str(error)}
    # Nobody presses Ctrl-C in this process, and `sys.exit` must not leave the call without an answer.
    except BaseException as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def _reply(replies: Any, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()


def _read(stream: Any, lines: queue.SimpleQueue[bytes]) -> None:
    while True:
        line = stream.readline()
        lines.put(line)
        if not line:
            stream.close()
            return
