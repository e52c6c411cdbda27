"""Attempts on the boxes of `code`: by root and an ordinary user, with all walls and with each wall absent in turn."""

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from flowgrpo.rewards.sandbox.code import Code
from flowgrpo.rewards.sandbox.judging import modules_and_tested
from flowgrpo.rewards.sandbox.kernel import WALLS
from flowgrpo.rewards.sandbox.sandbox import Limits, Sandbox
from flowgrpo.rewards.sandbox.syscalls import filter_code

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("sandbox_attacks.py")
NOBODY = "65534"
SQUARE = "def f(x):\n    return x * x"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox()
    try:
        made.check()
    except ValueError as error:
        pytest.skip(f"this system cannot hold a box: {error}")
    yield made
    made.close()


@lru_cache
def walls() -> dict[str, str]:
    return Sandbox().walls()


def command_of(user: str) -> list[str]:
    """Return the command that runs an interpreter as a user, or skip the test with the reason."""
    if user == "this user":
        return [sys.executable]
    if os.geteuid():
        pytest.skip("this user is an ordinary user already")
    if not shutil.which("setpriv"):
        pytest.skip("setpriv is not installed, so the attempts cannot be made as another user")
    prefix = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    check = (
        f"import subprocess, sys; assert sys.version_info >= (3, 10); open({str(PROGRAM)!r}); "
        "subprocess.run([sys.executable, '-c', ''], check=True)"
    )
    for interpreter in dict.fromkeys([sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"]):
        command = [*prefix, interpreter]
        if os.path.exists(interpreter) and not subprocess.run([*command, "-c", check], capture_output=True).returncode:
            return command
    pytest.skip("no interpreter of Python 3.10 or newer, or not the repository, can be read by the user nobody")


OTHERS = [pytest.param("nobody", wall, marks=pytest.mark.every) for wall in WALLS]


@pytest.mark.parametrize(
    ("user", "absent"), [("this user", ""), ("nobody", ""), *(("this user", wall) for wall in WALLS), *OTHERS]
)
def test_no_attempt_wins_and_none_does_harm(user: str, absent: str) -> None:
    left = {wall for wall in WALLS if not walls()[wall]} - {absent}
    if not ("namespaces" in left or left >= {"landlock", "seccomp"}):
        pytest.skip(f"the system has only {', '.join(left) or 'no walls'}, and refuses")
    run = subprocess.run(
        [*command_of(user), str(PROGRAM), str(REPOSITORY), absent], cwd="/", capture_output=True, text=True, timeout=600
    )
    assert not run.returncode, run.stderr
    report = json.loads(run.stdout)
    if user == "nobody" and any(report["walls"][wall] for wall in left):
        pytest.skip(f"nobody has other walls than root: {report['walls']}")
    assert {wall for wall, why in report["walls"].items() if not why} == left
    assert report["attempts"] > 60
    found = {kind: report[kind] for kind in ("won", "lost", "slow", "damage")}
    assert found == {"won": [], "lost": [], "slow": [], "damage": []}


@pytest.mark.parametrize("absent", [WALLS, ("namespaces", "landlock"), ("namespaces", "seccomp")])
def test_too_few_walls_are_refused(absent: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"namespaces: it was switched off.*unprivileged_userns.*unsafe: true"):
        Sandbox(absent=absent).check()
    Sandbox(unsafe=True, absent=absent).check()
    monkeypatch.setattr("flowgrpo.rewards.sandbox.code.Sandbox", lambda unsafe: Sandbox(unsafe, absent))
    with pytest.raises(ValueError, match="code: the system cannot hold the code that a model writes"):
        Code()
    with pytest.warns(UserWarning, match="without namespaces: it was switched off"):
        unsafe = Code(unsafe=True, seconds=60)
    assert unsafe([SQUARE, "def f(x): return 1"], [""] * 2, tests=["assert f(2) == 4"] * 2).values == [1, 0]
    unsafe.close()


HONEST = {
    "a method": ("class S:\n    def g(self, x):\n        return x + 1", "assert S().g(1) == 2"),
    "state": (
        "class S:\n    def __init__(self):\n        self.items = []\n"
        "    def push(self, x):\n        self.items.append(x)\n    def __len__(self):\n        return len(self.items)",
        "s = S()\ns.push(3)\ns.push([4])\nassert len(s) == 2 and s.items == [3, [4]] and s.items[1][0] == 4",
    ),
    "in place": ("def f(x):\n    x.sort()", "xs = [3, 1, 2]\nf(xs)\nassert xs == [1, 2, 3]"),
    "a function of the test": (
        "def f(g, xs):\n    return [g(x) for x in xs]",
        "assert f(lambda x: x + 1, [1, 2]) == [2, 3] and f(str, (1,)) == ['1'] and f(len, ['ab']) == [2]",
    ),
    "an exception": (
        "def f(x):\n    raise ValueError('no', x)",
        "try:\n    f(3)\nexcept ValueError as error:\n    assert error.args == ('no', 3)\nelse:\n    assert False",
    ),
    "an exception of its own": (
        "class E(KeyError):\n    def __init__(self, n):\n        super().__init__(n)\n        self.n = n\n"
        "def f(x):\n    raise E(x)",
        "try:\n    f(3)\n    assert False\nexcept E as error:\n    assert error.n == 3 and isinstance(error, KeyError)",
    ),
    "a generator": ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2] and sum(f(4)) == 6"),
    "a named tuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')",
        "p = P(1, 2)\nassert p == (1, 2) and p.x + p.y == 3 and isinstance(p, tuple)",
    ),
    "a counter": ("from collections import Counter\nf = Counter", "assert f('aab') == {'a': 2, 'b': 1}"),
    "arithmetic of a class": (
        "class V:\n    def __init__(self, x):\n        self.x = x\n"
        "    def __add__(self, o):\n        return V(self.x + o.x)\n"
        "    def __str__(self):\n        return f'<{self.x}>'",
        "v = V(1) + V(2)\nassert v.x == 3 and str(v) == '<3>' and f'{v}' == '<3>'",
    ),
    "a list with links": (
        "class N:\n    def __init__(self, v, next=None):\n        self.v, self.next = v, next\n"
        "def f(n):\n    return N(n.next.v, N(n.v))",
        "n = f(N(1, N(2)))\nvalues = []\nwhile n is not None:\n    values.append(n.v)\n    n = n.next\n"
        "assert values == [2, 1]",
    ),
    "a module of the completion": ("import math\ndef f(x):\n    return x / 3", "assert math.isclose(f(1), 1 / 3)"),
    "the name of a built-in function": ("def sum(a, b):\n    return a * b", "assert sum(2, 5) == 10"),
    "dates": (
        "import datetime\ndef f(d):\n    return d + datetime.timedelta(1)",
        "from datetime import date\nassert f(date(2020, 2, 28)) == date(2020, 2, 29)",
    ),
    "a context": (
        "class C:\n    v = 0\n    def __enter__(self):\n        self.v = 1\n        return self\n"
        "    def __exit__(self, *_):\n        self.v = 2",
        "c = C()\nwith c as d:\n    assert d.v == 1\nassert c.v == 2",
    ),
    "a decorator": ("def f(g):\n    return lambda *a: g(*a) * 2", "@f\ndef h(x):\n    return x + 1\nassert h(2) == 6"),
}


def test_what_tests_need_works(sandbox: Sandbox) -> None:
    wrong = {
        name: done.note
        for name, (code, test) in HONEST.items()
        if (done := sandbox.tests(code, [test], Limits(60, 256))).passed != (True,)
    }
    assert wrong == {}


@pytest.mark.parametrize("test", ["assert f(1) == f(1)", "assert f(1) != 3", "assert 3 in f(1)", "assert not f(1) < 3",
    "assert f(1) - 3 == 0", "assert isinstance(3, f)", "assert f(1) in {3}", "assert 3 - f(1) == 0"])  # fmt: skip
def test_an_object_of_the_completion_is_never_compared(sandbox: Sandbox, test: str) -> None:
    code = (
        "class A:\n    __eq__ = __ne__ = __contains__ = __instancecheck__ = lambda *_: True\n"
        "    __lt__ = lambda *_: False\n    __sub__ = __rsub__ = lambda *_: 0\n    __hash__ = lambda s: 3\n"
        "f = lambda x: A()"
    )
    done = sandbox.tests(code, [test], Limits(60, 256))
    assert done.passed == (False,)
    assert "TypeError" in done.note


def test_an_argument_changes_only_if_the_function_has_no_result(sandbox: Sandbox) -> None:
    code = "def f(x):\n    x.clear()\n    return []"
    assert sandbox.tests(code, ["xs = [2, 1]\nassert f(xs) == sorted(xs)"], Limits(60, 256)).passed == (False,)


def test_names_that_tests_ask_for() -> None:
    assert modules_and_tested(["assert math.isclose(f(1), 2)"]) == ({"math"}, set())
    assert modules_and_tested(["assert copy(1) == copy.x"]) == (set(), set())
    assert modules_and_tested(["assert sum(1, 2) == 3"]) == (set(), {"sum"})
    assert modules_and_tested(["assert abs(sum(1, 2) - 3) < 1"]) == (set(), {"sum"})
    assert modules_and_tested(["assert all(f(x) == x for x in [1])"]) == (set(), set())
    assert modules_and_tested(["def check(f):\n    assert all(f(x) for x in [1])\ncheck(f)"]) == (set(), set())


def test_the_filter_fits_both_architectures() -> None:
    assert {len(filter_code(machine, 1)) % 8 for machine in ("x86_64", "aarch64")} == {0}
    with pytest.raises(OSError, match="riscv64"):
        filter_code("riscv64", 1)


def test_a_launcher_that_was_killed_is_replaced(sandbox: Sandbox) -> None:
    assert sandbox._process is not None
    sandbox._process.kill()
    sandbox._process.wait()
    assert sandbox.tests(SQUARE, ["assert f(2) == 4"], Limits(60, 256)).passed == (True,)


def test_what_the_program_of_attempts_can_see_fail() -> None:
    """The attempts win where nothing holds them, so their failure behind the walls says something."""
    if platform.machine() != "x86_64" or not hasattr(socket, "AF_UNIX"):
        pytest.skip("the attempts use numbers of calls of x86_64")
    free = Sandbox(unsafe=True, absent=WALLS)
    code = "won = len(open('/proc/self/status').read()) > 0\nf = lambda x: x * x if won else 0"
    assert free.tests(code, ["assert f(2) == 4"], Limits(60, 256)).passed == (True,)
    free.close()
