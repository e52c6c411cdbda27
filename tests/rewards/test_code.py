"""Code with tests: verdicts, attempts to fake them, and everything that a process can do wrong."""

import enum
import json
import math
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest

from flowgrpo.rewards import RewardError, RewardSet, RewardSpec
from flowgrpo.rewards.sandbox.code import Code
from flowgrpo.rewards.sandbox.sandbox import Limits, Sandbox, steps_of
from flowgrpo.rewards.sandbox.values import decode, encode

pytestmark = pytest.mark.slow

SANDBOX = Sandbox()
run_tests, run_cases = SANDBOX.tests, SANDBOX.cases
LIMITS = Limits(seconds=60, memory_mb=256)
SQUARE = "def f(x):\n    return x * x"
TESTS = ("assert f(2) == 4", "assert f(-3) == 9")
CASES = [{"input": "1 2\n", "output": "3"}, {"input": "5 6", "output": "11\n"}]


def test_kinds_of_tests() -> None:
    steps = steps_of(
        ("import math\nassert f(1) == [1.0, {'a': (2,)}], 'why'", "assert 3 == f(2)", "assert f(2) > 3", "check(f)")
    )
    assert [step.kind for step in steps] == ["setup", "value", "value", "run", "run"]
    assert (steps[1].source, steps[2].source) == ("f(1) == [1.0, {'a': (2,)}]", "3 == f(2)")


def test_values_cross_with_their_exact_types() -> None:
    def refuse(value: object) -> None:
        raise TypeError(value)

    values = [None, True, 1, 1.0, -0.0, math.inf, 10**4000, -(2**53), "a\ud800", b"\x00", bytearray(b"b"), 1j, {}, []]
    values += [(1, [2, {3}]), {(1, 2): {"a": frozenset({4})}}, range(1, 9, 2), Fraction(1, 3), Decimal("1.10")]
    values += [date(2020, 2, 29), datetime(2020, 1, 2, 3, 4, 5, 6), timedelta(-1, 5), deque([1, 2])]
    for value in values:
        again = decode(json.loads(json.dumps(encode(value, refuse))), lambda *_: None)
        assert again == value
        assert type(again) is type(value)
        assert repr(again)[:99] == repr(value)[:99]
    assert math.isnan(decode(encode(math.nan, refuse), lambda *_: None))
    for strange in (object(), [object()], enum.IntEnum("E", "A").A, type("T", (tuple,), {})(), len, int):
        with pytest.raises(TypeError):
            encode(strange, refuse)


def test_every_assertion_counts_and_what_fails_is_noted() -> None:
    good = run_tests(
        SQUARE, [*TESTS, "import math\nassert math.isclose(f(0.5), 0.25)", "def c(g):\n assert g(1) == 1\nc(f)"], LIMITS
    )
    assert (good.passed, good.note) == ((True,) * 4, "")
    some = run_tests("def f(x):\n    return x * x if x > 0 else 1 // 0", [*TESTS, "assert f(3) > 10"], LIMITS)
    assert (some.passed, some.note) == (
        (True, False, False),
        "test 2: ZeroDivisionError: integer division or modulo by zero",
    )
    assert run_tests("def f(x):\n    return 4", ["\n".join(TESTS)], LIMITS).note == "test 2: wrong value"
    setup = run_tests(SQUARE, ["import no_such\nassert f(1) == 1"], LIMITS)
    assert (setup.passed, setup.note[:21]) == ((True,), "a statement before a ")


@pytest.mark.parametrize("text", [f" {SQUARE}", f"\n \t{SQUARE}", f"So:\n```python\n  {SQUARE}\n```"])
def test_space_in_front_of_a_program_does_no_harm(text: str) -> None:
    assert Code(seconds=60)([text], [""], tests=[list(TESTS)]).values == [1.0]


def test_programs_are_compared_by_what_they_print() -> None:
    program = (
        "if __name__ == '__main__':\n    print(sum(map(int, input().split())), end=' \\n\\n')\n    raise SystemExit"
    )
    assert run_cases(program, CASES, LIMITS).passed == (True, True)
    wrong = run_cases("print(3)", CASES, LIMITS)
    assert (wrong.passed, wrong.note) == ((True, False), "case 2: wrong output")
    failing = run_cases("print(3)\nraise ValueError(3)", CASES[:1], LIMITS)
    assert (failing.passed, failing.note) == ((False,), "case 1: ValueError: 3")
    assert (
        run_cases("print(3)\nexit_code = 2\nraise SystemExit(2)", CASES[:1], LIMITS).note
        == "case 1: it ended with exit code 2"
    )


CHEATS = {
    "an object equal to everything": "class A:\n    __eq__ = lambda *_: True\ndef f(x):\n    return A()",
    "leaving": "import os\nos._exit(0)",
    "leaving politely": "raise SystemExit(0)",
    "printing verdicts": 'print(\'{"step": 0, "passed": true}\')\ndef f(x):\n    return 0',
    "writing verdicts": """
import os
for n in range(3, 20):
    try:
        os.write(n, b'\\n{"step": 0, "value": "4"}\\n{"step": 2, "passed": true}\\n')
    except OSError:
        pass
def f(x):
    return 0
""",
    "looking at frames": "import sys\nsecret = sys._getframe(1).f_locals",
    "looking at frames of an error": """
try:
    1 / 0
except ZeroDivisionError as error:
    secret = error.__traceback__.tb_frame.f_back
""",
    "looking at all objects": "import gc\nsecret = gc.get_objects()",
    "patching the built-in": """
import builtins, json
builtins.eval = lambda *_: 4
json.dumps = lambda *_: "[]"
def f(x):
    return 0
""",
}


@pytest.mark.parametrize("code", CHEATS.values(), ids=CHEATS)
def test_a_verdict_cannot_be_faked(code: str) -> None:
    done = run_tests(code, [*TESTS, "assert f(5) != 0"], LIMITS)
    assert done.passed == (False, False, False)
    assert done.note


REFUSED = {
    "fork": "import os\nos.fork()",
    "a fork bomb": "import os\nfor _ in range(10**6):\n    os.fork()",
    "a process": "import subprocess\nsubprocess.run(['ls'])",
    "a process of C": "import _posixsubprocess\n_posixsubprocess.fork_exec()",
    "another program": "import os\nos.execv('/bin/ls', ['ls'])",
    "a signal": "import os\nos.kill(os.getppid(), 9)",
    "a connection": "import socket\nsocket.create_connection(('127.0.0.1', 9), 1)",
    "a file elsewhere": "open('/etc/passwd').read()",
    "a file above": "open('../x', 'w')",
    "a folder elsewhere": "import os\nos.listdir('/')",
    "removing elsewhere": "import os\nos.remove('/tmp/no-such-file-of-flowgrpo')",
    "a link": "import os\nos.symlink('/etc/passwd', 'x')",
    "more memory": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "a big file": "with open('x', 'w') as file:\n    file.write('x' * 10**7)",
    "many files": "for k in range(1000):\n    open(f'{k}', 'w').close()",
    "memory": "x = [0] * 10**9",
    "a package": "import numpy",
    "no Python": "def f(x:",
    "deep nesting": "(" * 100_000,
}


@pytest.mark.parametrize("code", REFUSED.values(), ids=REFUSED)
def test_what_the_sandbox_refuses_scores_0(code: str) -> None:
    done = run_tests(f"{code}\n{SQUARE}", TESTS, LIMITS)
    assert done.passed == (False, False)
    assert done.note


def test_recursion_without_an_end_does_not_spread() -> None:
    done = run_tests(f"{SQUARE}\ndef g(x):\n    return g(x)", ["assert g(1) == 1", *TESTS], LIMITS)
    assert (done.passed, done.note[:22]) == ((False, True, True), "test 1: RecursionError")


ENDLESS = [
    "while True:\n    pass",
    "import time\ntime.sleep(1000)",
    "while True:\n    try:\n        while True: pass\n    except BaseException:\n        pass",
    "import os\nwhile True:\n    try:\n        os.fork()\n    except BaseException:\n        pass",
    "print_much = 'x' * 10**6\nwhile True:\n    print(print_much)",
]
WILD = "import sys\nsys.setrecursionlimit(10**9)\ndef g(x):\n    return g(x)\ng(1)"


def test_time_runs_out_by_the_clock() -> None:
    limits = Limits(seconds=2, memory_mb=256)
    with ThreadPoolExecutor(8) as pool:
        runs = [pool.submit(run_tests, code, TESTS, limits) for code in (*ENDLESS, WILD)]
        cases = pool.submit(run_cases, "while True:\n    pass", CASES, limits).result()
        outcomes = [run.result() for run in runs]
    assert [done.passed for done in outcomes] == [(False, False)] * 6
    assert [done.note for done in outcomes[:5]] == ["out of time after 2 s"] * 5
    assert (cases.passed, cases.note) == ((False, False), "case 1: out of time after 2 s")


def test_a_loop_in_one_test_leaves_the_earlier_verdicts() -> None:
    code = "def f(x):\n    while x < 0:\n        pass\n    return x * x"
    done = run_tests(code, TESTS, Limits(seconds=6, memory_mb=256))
    assert (done.passed, done.note) == ((True, False), "out of time after 6 s")


def test_printing_without_an_end_fills_no_disk() -> None:
    done = run_cases("while True:\n    print('x' * 10**6)", CASES[:1], LIMITS)
    assert (done.passed, done.note) == ((False,), "case 1: OSError: [Errno 27] File too large")


def test_threads_do_not_hold_the_verdict_up() -> None:
    threads = """
import threading, time
for daemon in (True, False):
    threading.Thread(target=time.sleep, args=(1000,), daemon=daemon).start()
"""
    assert run_tests(f"{threads}\n{SQUARE}", TESTS, LIMITS).passed == (True, True)


def test_what_solutions_need_works() -> None:
    code = """
import asyncio, collections, dataclasses, enum, functools, heapq, itertools, logging, math, os, random, re, tempfile
import traceback, typing
from concurrent.futures import ThreadPoolExecutor

Point = collections.namedtuple("Point", "x y")
Colour = enum.Enum("Colour", "RED")

@dataclasses.dataclass
class Node:
    value: int

try:
    1 / 0
except ZeroDivisionError:
    assert "solution.py" in traceback.format_exc()
    logging.exception("as expected")
with tempfile.TemporaryDirectory() as folder:
    with open(os.path.join(folder, "x"), "w") as file:
        file.write("1")
    assert os.listdir(folder) == ["x"]
assert os.listdir() == [] and "HOME" in os.environ and len(os.environ) < 8
with ThreadPoolExecutor(2) as pool:
    assert list(pool.map(math.sqrt, [4])) == [2]

async def later(x):
    return x * x

def f(x):
    return asyncio.run(later(x))
"""
    done = run_tests(code, [*TESTS, "assert Point(1, 2) == (1, 2)"], LIMITS)
    assert (done.passed, done.note) == ((True, True, True), "")


def test_values_through_the_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    completions = [f"So:\n```python\n{SQUARE}\n```", "def f(x): return 4", "no code", SQUARE, "print(11)", SQUARE]
    tests = [list(TESTS), "\n".join(TESTS), list(TESTS), None, None, list(TESTS)]
    cases = [None, None, [], None, CASES, CASES]
    rewards = RewardSet([RewardSpec("code", options={"seconds": 60, "workers": 3})])
    batch = rewards.score(completions, ["p"] * 6, {"tests": tests, "cases": cases})
    assert batch.values[[0, 1, 2, 4, 5], 0].tolist() == [1, 0.5, 0, 0.5, 0.5]
    assert math.isnan(batch.values[3, 0])
    assert batch.sub_scores["code"]["all"][:3] == [1, 0, 0]
    assert batch.notes["code"][:2] == ["2 of 2 passed", "1 of 2 passed; test 2: wrong value"]
    assert batch.notes["code"][2] == "0 of 2 passed; SyntaxError: invalid syntax (solution.py, line 1)"
    strict = Code(partial=False, seconds=60)(completions[:2], ["p"] * 2, tests=tests[:2])
    assert (strict.values, strict.sub_scores["passed"]) == ([1, 0], [1, 0.5])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "neither a column `tests` nor `cases`"),
        ({"tests": [["assert f("]]}, "the test 'assert f\\(' is not valid Python"),
        ({"tests": [[3]]}, "the column `tests` has"),
        ({"tests": [[""]]}, "the column `tests` has"),
        ({"cases": [[{"input": "1"}]]}, "the texts `input` and `output`"),
        ({"cases": ["1"]}, "the texts `input` and `output`"),
    ],
)
def test_malformed_columns_stop_the_run(columns: dict, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        RewardSet([RewardSpec("code")]).score(["pass"], ["p"], columns)


@pytest.mark.parametrize("options", [{"partial": 1}, {"seconds": math.inf}, {"memory_mb": 10}, {"workers": 0}])
def test_wrong_options_are_named(options: dict) -> None:
    with pytest.raises(ValueError, match=rf"code: {next(iter(options))} is {next(iter(options.values()))!r}"):
        Code(**options)
