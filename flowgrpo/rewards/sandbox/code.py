"""Programs and functions, judged by their tests. The code runs in a box that the kernel holds, see `sandbox.py`."""

from __future__ import annotations

import logging
import math
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..options import check_flag, check_memory, check_seconds
from ..scores import Scores
from ..text.extraction import fenced
from .sandbox import Execution, Limits, Sandbox

MOST_WORKERS = 8
_log = logging.getLogger(__name__)


class Code:
    """Share of the tests that the Python code in a completion passes; the code runs in a box that the kernel holds.

    The code is the last fenced block of the completion, or the whole completion if there is no block. Two columns hold
    tests, and a sample may have both:

        tests   a text or a list of texts with assertions. Every assertion at the top level of a text is a test, and the
                statements between the assertions are run in order. A text without an assertion at its top level is one
                test. The code is loaded once as a module in one process. The tests run one after another in another
                process, and ask the first one: arguments and results cross as plain data.
        cases   a list of {input, output}. The code runs as a program that reads the input, and its output is compared
                with the given output. White space at the ends of lines and empty lines at the end do not count.

    If code cannot be loaded, runs out of time or memory, or dies, all tests that have not passed by then count as
    failed.

    The code runs in a box without files, network, other processes and rights. The judge runs in another box, without
    the code. So a completion cannot decide a test, whatever it defines or replaces. Arguments and results are numbers,
    texts, containers, dates, Decimal and Fraction, built-in types, and functions of the tests. An object of a class of
    the completion stays in its process: a test may call it and read its attributes, items, length, truth and text, but
    a test that compares such an object itself (`==`, `<`, `in`) fails. A list, dict or set that a function without a
    result changes in place is changed for the test too.

    The walls of the boxes are namespaces, Landlock and seccomp, see `walls`. Namespaces hold alone, and so do Landlock
    and seccomp together, but then the code cannot write files. A system with less is refused.

    Args:
        partial: if true, the value is the share of the tests that pass. If false, it is 1 if all tests pass, and 0
            otherwise.
        seconds: wall-clock time that the tests of a sample, or a single case, may take.
        memory_mb: how many megabytes of address space the code may take.
        workers: how many samples run at the same time; if absent, as many as there are processors, but at most 8.
        unsafe: if true, the code also runs on a system that cannot hold it. Say so only in a virtual machine or a
            container without secrets and without a network.

    Raises:
        ValueError: an option is wrong, or the system is not Linux, or the system cannot hold the code.
    """

    name = "code"

    def __init__(
        self,
        partial: bool = True,
        seconds: float = 5.0,
        memory_mb: int = 512,
        workers: int | None = None,
        unsafe: bool = False,
    ) -> None:
        check_flag(self.name, "partial", partial)
        check_flag(self.name, "unsafe", unsafe)
        check_seconds(self.name, seconds)
        check_memory(self.name, memory_mb)
        if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
            raise ValueError(f"code: workers is {workers!r}; give a whole number of 1 or more")
        if sys.platform != "linux":
            raise ValueError("code: its walls need Linux; leave this reward out, or train on Linux")
        self.partial, self.limits = partial, Limits(seconds, memory_mb)
        self.workers = workers or min(os.cpu_count() or 1, MOST_WORKERS)
        self.sandbox = Sandbox(unsafe)
        try:
            self.sandbox.check()
        except ValueError as error:
            raise ValueError(f"code: {error}") from None
        if any(self.sandbox.walls().values()):
            warnings.warn(f"code: {self.walls()}", stacklevel=2)
        else:
            _log.info("code: %s", self.walls())

    def __call__(
        self,
        completions: Sequence[str],
        prompts: Sequence[str],
        tests: Sequence[Any] | None = None,
        cases: Sequence[Any] | None = None,
    ) -> Scores:
        """Run the code of completions on their tests.

        Args:
            completions: B strings.
            prompts: B strings, not used.
            tests: B texts or lists of texts; None or empty for a sample without such tests.
            cases: B lists of {input, output}; None or empty for a sample without such cases.

        Returns:
            Scores with B values in [0, 1], NaN for a sample without tests. Sub-scores: `passed`, the share of the tests
            that pass; `all`, whether all tests pass. Notes say how many tests pass, and give the first problem.

        Raises:
            ValueError: the prompts have neither of the two columns, or a test is malformed.
        """
        if tests is None and cases is None:
            raise ValueError("code: the prompts have neither a column `tests` nor `cases`; give one of them")
        nothing = [None] * len(completions)
        jobs = [
            # Language models often begin with a space, and a program that begins with a space is a syntax error.
            (fenced(text).lstrip(), _tests(some), _cases(others))
            for text, some, others in zip(completions, tests or nothing, cases or nothing, strict=True)
        ]
        with ThreadPoolExecutor(self.workers) as pool:
            outcomes = list(pool.map(self._run, jobs))
        shares = [sum(done.passed) / len(done.passed) if done.passed else math.nan for done in outcomes]
        whole = [share if math.isnan(share) else float(share == 1) for share in shares]
        return Scores(
            shares if self.partial else whole, {"passed": shares, "all": whole}, [_note(done) for done in outcomes]
        )

    def walls(self) -> str:
        """Return a sentence that says which walls hold the code on this system, and why others do not stand."""
        walls = self.sandbox.walls()
        up = [wall for wall, why in walls.items() if not why] or ["nothing but limits of time and memory"]
        down = "".join(f"; without {wall}: {why}" for wall, why in walls.items() if why)
        return f"completions are held by {', '.join(up)}{down}"

    def close(self) -> None:
        """End the process that starts boxes, and all boxes."""
        self.sandbox.close()

    def _run(self, job: tuple[str, list[str], list[dict[str, str]]]) -> Execution:
        code, tests, cases = job
        first = self.sandbox.tests(code, tests, self.limits) if tests else Execution((), "")
        second = self.sandbox.cases(code, cases, self.limits) if cases else Execution((), "")
        return Execution((*first.passed, *second.passed), first.note or second.note)


def _note(outcome: Execution) -> str:
    if not outcome.passed:
        return ""
    count = f"{sum(outcome.passed)} of {len(outcome.passed)} passed"
    return f"{count}; {outcome.note}" if outcome.note else count


def _tests(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else list(value or [])
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError(
            f"code: the column `tests` has {value!r:.80}; give texts such as 'assert add(1, 2) == 3', or null"
        )
    return texts


def _cases(value: Any) -> list[dict[str, str]]:
    found = []
    for case in [value] if isinstance(value, Mapping) else list(value or []):
        fits = isinstance(case, Mapping) and all(isinstance(case.get(part), str) for part in ("input", "output"))
        if not fits:
            raise ValueError(
                f"code: the column `cases` has {case!r:.80}; give a list of objects with the texts `input` and "
                "`output`, or null"
            )
        found.append({"input": case["input"], "output": case["output"]})
    return found
