"""Attempts to win a reward of `code` without a solution, or to do harm; run as a program, it makes them and reports.

Every attempt is a module. If it finds a way out, it sets `won`, and only then its `f` is right. Words in capitals
between two @ are places outside that the attempt aims at. The program uses the standard library only, so that any user
with any interpreter can run it: `python sandbox_attacks.py REPOSITORY [ABSENT WALL ...]`.
"""

# ruff: noqa: E501
import glob
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SECONDS, MARGIN = 1.0, 10.0
LEAVING_SECONDS = 15.0
RIGHT = "def f(x):\n    return x * x"
TESTS = (
    "assert f(2) == 4",
    "assert 9 == f(-3) != 8",
    "assert f(5) in (25,) and isinstance(f(5), int) and abs(f(4) - 16) < 1 and type(f(6)) is int",
    "import math\nassert math.isclose(f(3), 9) and f(7) >= 49 and not f(7) < 49",
    "def check(g):\n    assert all(g(x) == x * x for x in range(4, 9)) and len(set(map(g, [5, 6]))) == 2\ncheck(f)",
    "assert all(map(lambda x: f(x) == x * x, range(4, 9))) and list(map(f, [4])) in ([16], [])",
    "assert [f(x) for x in (1, 2)] == [1, 4] and sorted([f(2), f(1)]) == [1, 4] and str(f(8)) == '64'",
)
LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
ALWAYS = "class A:\n    __eq__ = __le__ = __ge__ = __lt__ = __gt__ = __ne__ = __contains__ = lambda *_: True\n"
CHILD = "import os, time\nif os.fork() == 0:\n    os.setsid()\n"
STAY = "    if os.fork() == 0:\n        time.sleep(60)\n        open('@OUT@/late', 'w')\n    os._exit(0)\n"
SEND = "import json, socket, struct\ns = socket.socket(fileno=os.dup(3)) if 0 else socket.socket(fileno=3)\n"
RAW = (
    "import json, os, struct\ndef raw(m):\n    d = m if isinstance(m, bytes) else json.dumps(m).encode()\n"
    "    os.write(3, struct.pack('<I', len(d)) + d)\n"
)

ATTACKS = {
    # An answer that judges itself.
    "equal to everything": f"{ALWAYS}def f(x):\n    return A()",
    "equal int": "class A(int):\n    __eq__ = __ne__ = __hash__ = lambda *_: True\ndef f(x):\n    return A(0)",
    "equal float": "class A(float):\n    __eq__ = __sub__ = __rsub__ = lambda *_: 0\ndef f(x):\n    return A(0)",
    "equal str": "class A(str):\n    __eq__ = lambda *_: True\ndef f(x):\n    return A(x)",
    "equal list": "class A(list):\n    __eq__ = lambda *_: True\ndef f(x):\n    return A()",
    "difference 0": "class A:\n    __sub__ = __rsub__ = __abs__ = lambda *_: 0\ndef f(x):\n    return A()",
    "lying class": "class A:\n    __class__ = int\n    __index__ = __int__ = lambda s: 5\ndef f(x):\n    return A()",
    "metaclass": "class M(type):\n    __eq__ = __instancecheck__ = lambda *_: True\n"
    "class A(metaclass=M): pass\ndef f(x):\n    return A",
    "nan": "def f(x):\n    return float('nan')",
    "infinite": "def f(x):\n    return float('inf')",
    "true for 1": "def f(x):\n    return True",
    "text of the number": "def f(x):\n    return str(x * x)",
    "float of the number": "def f(x):\n    return 0.0",
    "an exception class": "def f(x):\n    raise type('AssertionError', (StopIteration,), {})",
    "an answer that ends": "def f(x):\n    raise SystemExit(0)",
    "ends an iteration of the test": "def f(x):\n    raise StopIteration",
    "ends an iteration by a class of its own": "class E(StopIteration): pass\ndef f(x):\n    raise E",
    "a generator": "def f(x):\n    yield x * x",
    "itself": "def f(x):\n    return f",
    "the argument's own method": "def f(x):\n    return x.__mul__",
    "eval as an answer": "def f(x):\n    return eval",
    # Names of the tests.
    "builtins in the module": "all = isinstance = len = abs = set = sorted = map = str = type = lambda *a: True\n"
    "def f(x):\n    return 0",
    "math in the module": "class math:\n    isclose = staticmethod(lambda *a: True)\ndef f(x):\n    return 0",
    "check in the module": "def check(g):\n    pass\ndef f(x):\n    return 0",
    "replaced builtins": "import builtins\nfor n in ('exec', 'eval', 'compile', 'len', 'print', 'all', 'isinstance', "
    "'abs', 'AssertionError'):\n    setattr(builtins, n, lambda *a, **k: True)\ndef f(x):\n    return 0",
    "replaced modules": "import sys\nfor n in list(sys.modules):\n    if n != 'sys':\n        sys.modules[n] = None\n"
    "def f(x):\n    return 0",
    "import hook": "import sys\nclass H:\n    @staticmethod\n    def find_spec(n, *a):\n        raise SystemExit(0)\n"
    "sys.meta_path.insert(0, H)\ndef f(x):\n    return 0",
    "patched json": "import json\njson.dumps = lambda *a: '{\"ok\": 4}'\ndef f(x):\n    return 0",
    "patched isclose": "import math\nmath.isclose = lambda *a: True\ndef f(x):\n    return 0",
    "trace": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\ndef f(x):\n    return 0",
    "audit hook": "import sys\ndef hook(*a):\n    raise RuntimeError\nsys.addaudithook(hook)\ndef f(x):\n    return 0",
    # Looking for tests and verdicts in memory, frames and descriptors.
    # They look for a test by its reversed text, which the attempt itself holds in one direction only.
    "frames": "import sys\nfr = sys._getframe()\nseen = ''\nwhile fr:\n    seen += repr(fr.f_locals) + repr(fr.f_globals)\n"
    "    fr = fr.f_back\nwon = '8 =! )3-(f' in seen[::-1]",
    "all objects": "import gc\nwon = any('8 =! )3-(f' in repr(o)[::-1] for o in gc.get_objects() "
    "if type(o) in (dict, list, tuple))",
    "own memory": "import ctypes\nbase = id(object()) & ~0xfffff\n"
    "won = b'8 =! )3-(f' in ctypes.string_at(base, 0x100000)[::-1]",
    "reading all descriptors": "import os\nwon = False\nfor n in range(4, 64):\n    try:\n        os.fstat(n)\n"
    "        won = True\n    except OSError:\n        pass",
    "writing all descriptors": 'import os\nfor n in range(1, 64):\n    for t in (b\'{"step": 0, "passed": true}\\n\', '
    "b'{\"end\": true}\\n'):\n        try:\n            os.write(n, t)\n        except OSError:\n            pass\ndef f(x):\n    return 0",
    "verdicts on stdout": "import json\nfor n in range(6):\n    print(json.dumps({'step': n, 'passed': True}))\n"
    "def f(x):\n    return 0",
    # Messages of its own to the judge.
    "forged answers": RAW
    + "raw({'loaded': True})\nfor _ in range(99):\n    raw({'ok': True})\ndef f(x):\n    return 0",
    "forged verdicts": RAW + "raw({'step': 0, 'passed': True})\nraw({'end': True})\ndef f(x):\n    return 0",
    "a length without a message": "import os\nos.write(3, b'\\xff\\xff\\xff\\x7f')\ndef f(x):\n    return 0",
    "not JSON": RAW + "raw(b'NaN' * 9)\ndef f(x):\n    return 0",
    "deep JSON": RAW + "raw({'loaded': True})\nraw(b'[' * 10**6)\ndef f(x):\n    return 0",
    "deep answer": "def f(x):\n    a = []\n    for _ in range(900):\n        a = [a]\n    return a",
    "long number as JSON": RAW
    + "raw({'loaded': True})\nraw(b'{\"ok\": ' + b'9' * 10**6 + b'}')\ndef f(x):\n    return 0",
    "object that says it is data": RAW + "raw({'loaded': True})\nfor _ in range(9):\n"
    "    raw({'ok': {'object': {'number': 0, 'name': 'int', 'data': {'object': {'number': 1, 'name': 'x'}}}}})\n"
    "def f(x):\n    return 0",
    "class of the judge": RAW + "raw({'loaded': True})\nfor n in ('Gone', 'eval', 'exit', '__import__'):\n"
    "    raw({'raise': {'name': n, 'arguments': ['x']}})\n    raw({'ok': {'builtin': n}})\ndef f(x):\n    return 0",
    "asking for functions of the judge": RAW + "raw({'loaded': True})\nfor n in (-1, 0, '__class__', None):\n"
    "    raw({'function': n, 'arguments': [], 'named': {}})\ndef f(x):\n    return 0",
    "other module's types": RAW + "raw({'loaded': True})\nraw({'ok': {'value': ['os', 'system', ['touch @OUT@/x']]}})\n"
    "raw({'ok': {'value': ['subprocess', 'Popen', [['touch', '@OUT@/x']]]}})\ndef f(x):\n    return 0",
    "an endless answer": "import itertools\ndef f(x):\n    return itertools.count()",
    "a large answer": "def f(x):\n    return 'x' * 10**8",
    "calls back for ever": "def f(x):\n    return 0\ndef g(k):\n    while True:\n        k()",
    "closes the channel": "import os\nos.close(3)\ndef f(x):\n    return 0",
    "closes everything": "import os\nos.closerange(0, 9)\ndef f(x):\n    return 0",
    # Ending.
    "_exit": "import os\nos._exit(0)",
    "exit in a call": "import os\ndef f(x):\n    os._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x):\n    return 0",
    "a thread that ends it": "import os, threading\nthreading.Timer(0.01, os._exit, [0]).start()\ndef f(x):\n    return 0",
    "stops itself": "import os, signal\nsignal.raise_signal(signal.SIGSTOP)",
    "crashes": "import ctypes\nctypes.string_at(0)",
    "aborts": "import os\nos.abort()",
    # Files.
    "reads a file": "won = 'token' in open('@SECRET@').read()",
    "reads by a descriptor of /": "import os\nd = os.open('/', os.O_RDONLY)\n"
    "won = 'token' in open(os.open('@SECRET@'[1:], 0, dir_fd=d)).read()",
    "climbs": "import os\nos.chdir('../' * 40)\nwon = 'token' in open('@SECRET@'[1:]).read()",
    "a link": "import os\nos.symlink('@SECRET@', 'x')\nwon = 'token' in open('x').read()",
    "a hard link": "import os\nos.link('@SECRET@', 'x')\nwon = 'token' in open('x').read()",
    "lists a folder": "import os\nwon = os.path.basename('@SECRET@') in os.listdir(os.path.dirname('@SECRET@'))",
    "reads /etc": "won = len(open('/etc/passwd').read()) > 0",
    "reads tests in the repository": "won = len(open('@SELF@').read()) > 0",
    "opens by ctypes": LIBC + "n = libc.open(b'@SECRET@', 0)\nwon = n >= 0 and b'token' in os.read(n, 99)",
    "escapes by chroot": LIBC + "os.mkdir('x')\nos.chroot('x')\nos.chdir('../' * 40)\nos.chroot('.')\n"
    "won = 'token' in open('@SECRET@').read()",
    "handle of a file": LIBC + "won = libc.syscall(304, -100, bytes(128), 0) >= 0",
    "writes a file": "import os\nopen('@OUT@/x', 'w').write('x')\nwon = True",
    "writes by ctypes": LIBC + "won = libc.open(b'@OUT@/x', 0o101, 0o666) >= 0",
    "makes a folder": "import os\nos.mkdir('@OUT@/x')\nwon = True",
    "renames": "import os\nos.rename('@SECRET@', '@OUT@/y')\nwon = True",
    "removes": "import os\nos.remove('@SECRET@')\nwon = True",
    "changes a mode": "import os\nos.chmod('@SECRET@', 0)\nwon = True",
    "changes a time": "import os\nos.utime('@SECRET@', (0, 0))\nwon = True",
    "cuts a file": "import os\nos.truncate('@SECRET@', 0)\nwon = True",
    "writes to the library": "import json\nopen(json.__file__, 'a').write('#')\nwon = True",
    "leaves a file in /tmp": "open('/tmp/@MARK@', 'w').write('x')\nopen('/dev/shm/@MARK@', 'w').write('x')",
    "mounts": LIBC + "libc.unshare(0x10020000)\nwon = libc.mount(b'proc', b'/tmp', b'proc', 0, None) == 0\n"
    "os.mkdir('/tmp/@MARK@')",
    "remounts for writing": LIBC + "won = libc.mount(None, b'/usr/lib', None, 32 | 4096, None) == 0",
    "a device": "import os, stat\nos.mknod('x', stat.S_IFBLK | 0o600, os.makedev(254, 0))\nopen('x', 'rb').read(1)\nwon = True",
    # Other processes.
    "memory of the parent": "won = len(open('/proc/@PID@/environ').read()) > 0",
    "its own proc": "won = len(open('/proc/self/status').read()) > 0",
    "reads a process": LIBC + "b = ctypes.create_string_buffer(8)\nclass V(ctypes.Structure):\n"
    "    _fields_ = [('a', ctypes.c_void_p), ('n', ctypes.c_size_t)]\n"
    "won = libc.process_vm_readv(@PID@, ctypes.byref(V(ctypes.addressof(b), 8)), 1, ctypes.byref(V(0x10000, 8)), 1, 0) > 0",
    "traces": LIBC + "won = libc.ptrace(16, @PID@, 0, 0) == 0",
    "kills the trainer": "import os\nos.kill(@PID@, 9)\nwon = True",
    "kills its parent": "import os\nos.kill(os.getppid(), 9)",
    "kills its group": "import os\nos.killpg(0, 9)",
    "kills everybody": "import os\nos.kill(-1, 9)",
    "signals by a pidfd": LIBC + "n = libc.syscall(434, @PID@, 0)\nwon = libc.syscall(424, n, 9, None, 0) == 0",
    "signals by a file": LIBC + "import fcntl\na, b = os.pipe()\nfcntl.fcntl(a, 8, @PID@)\nfcntl.fcntl(a, 10, 9)\n"
    "fcntl.fcntl(a, 4, 0o20000 | os.O_NONBLOCK)\nos.write(b, b'x')\nwon = True",
    "limits of the trainer": "import resource\nresource.prlimit(@PID@, resource.RLIMIT_NOFILE, (0, 0))\nwon = True",
    "priority of the user": "import os\nos.setpriority(os.PRIO_PROCESS, @PID@, 19)\nwon = True",
    "raises its limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nwon = True",
    "becomes root": "import os\nos.setuid(0)\nopen('@OUT@/x', 'w')\nwon = True",
    "a child that stays": CHILD + STAY,
    "many children that stay": "import os, time\nfor _ in range(9):\n    if os.fork() == 0:\n        os.setsid()\n"
    "        time.sleep(60)",
    "a program": "import subprocess\nsubprocess.Popen(['/bin/sh', '-c', 'sleep 60; touch @OUT@/x'], start_new_session=True)",
    "a program by exec": "import os\nos.execv('/bin/sh', ['sh', '-c', 'touch @OUT@/x'])",
    "io_uring": LIBC + "libc.syscall(425, 8, bytes(256))",
    "a keyring": LIBC + "libc.syscall(248, b'user', b'@MARK@', b'x', 1, -4)",
    "shared memory": LIBC + "libc.shmget(0x7e57, 4096, 0o1666)",
    # Network.
    "connects": "import socket\nsocket.create_connection(('127.0.0.1', @PORT@), 1)\nwon = True",
    "connects to a path": "import socket\nsocket.socket(socket.AF_UNIX).connect('@SOCKET@')\nwon = True",
    "connects to a name": "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0@MARK@')\nwon = True",
    "sends a datagram by a pair": "import socket\na, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
    "won = a.sendto(b'x', '@DATAGRAMS@') == 1",
    "listens": "import socket\ns = socket.create_server(('', @LISTEN@))\ns.settimeout(1)\nwon = bool(s.accept())",
    "listens at a name": "import socket\ns = socket.socket(socket.AF_UNIX)\ns.bind('\\0@MARK@-own')\ns.listen()\n"
    "s.settimeout(1)\nwon = bool(s.accept())",
    "netlink": "import socket\nsocket.socket(16, 3, 0).bind((0, 0))\nwon = len(socket.if_nameindex()) > 1",
    # More than its share.
    "fork bomb": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "thread bomb": "import threading, time\nthreading.stack_size(32768)\nwhile True:\n    try:\n"
    "        threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n    except Exception:\n        pass",
    "memory bomb": "a = []\nwhile True:\n    try:\n        a.append(bytearray(10**7))\n    except MemoryError:\n        pass",
    "memory in files": "import os\nfor n in range(99):\n    with open(f'{n}', 'wb') as file:\n"
    "        file.write(bytes(4 * 10**6))",
    "memory in nameless files": "import os\na = [os.memfd_create('x') for _ in range(40)]\n"
    "for n in a:\n    os.write(n, bytes(4 * 10**6))\n",
    "storm of folders": "import os, itertools\nfor n in itertools.count():\n    try:\n        os.mkdir(f'{n}')\n"
    "    except OSError:\n        pass",
    "deep folders": "import os\nwhile True:\n    os.mkdir('x')\n    os.chdir('x')",
    "endless output": "while True:\n    try:\n        print('x' * 10**6)\n    except OSError:\n        pass",
    "endless loop": "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n        pass",
    "sleeps": "import time\ndef f(x):\n    time.sleep(99)",
    "holds the interpreter": "def f(x):\n    return 10 ** 10 ** 10",
    "ignores signals": "import signal, time\nfor n in range(1, 65):\n    try:\n        signal.signal(n, signal.SIG_IGN)\n"
    "    except (OSError, ValueError):\n        pass\ntime.sleep(99)",
    "endless recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x):\n    return f(x)",
    "slow pattern": "import re\ndef f(x):\n    return re.match('(a+)+$', 'a' * 40 + 'b')",
}
BESIDE = {
    "a function": RIGHT,
    "a class": "class f:\n    def __new__(cls, x):\n        return x * x",
    "modules": "import math, random, re, heapq, collections, hashlib, decimal, asyncio\n"
    "async def g(x):\n    return x * x\ndef f(x):\n    return asyncio.run(g(x))",
}
# Programs, which are compared by what they print. The case is "3\n" -> "9".
PROGRAMS = {
    "reads what is expected": "import gc\nprint(next(o for o in gc.get_objects() if type(o) is str and o == '9'))",
    "forges the end": "import os\nos.write(3, b'')\nos._exit(0)",
    "prints the input": "print(input())",
    "prints after it is asked": "import atexit\natexit.register(print, '9 9')",
    "right, then fails": "print(9, flush=True)\nraise ValueError",
    "right, then a code": "print(9, flush=True)\nraise SystemExit(3)",
    "right, then dies": "import os\nprint(9, flush=True)\nos.abort()",
    "right, then sleeps": "import time\nprint(9, flush=True)\ntime.sleep(99)",
    "right and more": "print(9)\nprint('x' * 10**8)",
}


class Outside:
    """Places that attempts aim at, and the look afterwards whether one of them was reached."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="attacked-"))
        self.out = self.folder / "out"
        self.out.mkdir(mode=0o777)
        self.out.chmod(0o777)
        self.folder.chmod(0o755)
        self.secret = self.folder / "secret"
        self.secret.write_text("token")
        self.secret.chmod(0o666)
        self.before = os.stat(self.secret)
        self.mark = f"flowgrpo-attack-{os.getpid()}"
        self.sockets = [socket.create_server(("127.0.0.1", 0)), *(socket.socket(socket.AF_UNIX) for _ in range(2))]
        self.datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sockets[1].bind(str(self.folder / "s"))
        self.sockets[2].bind(f"\0{self.mark}")
        self.datagrams.bind(str(self.folder / "d"))
        for end in ("s", "d"):
            (self.folder / end).chmod(0o777)
        for end in self.sockets:
            end.listen()
        free = socket.create_server(("127.0.0.1", 0))
        self.port = free.getsockname()[1]
        free.close()
        self.over = threading.Event()
        threading.Thread(target=self.visit, daemon=True).start()

    def visit(self) -> None:
        """Connect to whatever listens for visitors from outside."""
        while not self.over.wait(0.05):
            for kind, place in ((socket.AF_INET, ("127.0.0.1", self.port)), (socket.AF_UNIX, f"\0{self.mark}-own")):
                try:
                    with socket.socket(kind) as visitor:
                        visitor.connect(place)
                except OSError:
                    pass

    def aim(self, code: str) -> str:
        """Write the places into an attempt."""
        places = {
            "SECRET": self.secret, "OUT": self.out, "PID": os.getpid(), "PORT": self.sockets[0].getsockname()[1],
            "SOCKET": self.folder / "s", "DATAGRAMS": self.folder / "d", "MARK": self.mark, "LISTEN": self.port,
            "SELF": os.path.abspath(__file__),
        }  # fmt: skip
        for word, place in places.items():
            code = code.replace(f"@{word}@", str(place))
        return code

    def damage(self) -> list[str]:
        """Return what has changed outside."""
        self.over.set()
        now = os.stat(self.secret)
        found = [f"{path} was made" for path in map(str, self.out.iterdir())]
        found += [
            f"{path} was left"
            for place in ("/tmp", "/dev/shm", "/var/tmp")
            for path in glob.glob(f"{place}/{self.mark}*")
        ]
        kept = ("st_mode", "st_mtime", "st_size", "st_nlink", "st_uid")
        found += [f"{name} of the secret" for name in kept if getattr(now, name) != getattr(self.before, name)]
        found += ["shared memory"] * (f"{0x7E57} " in Path("/proc/sysvipc/shm").read_text())
        found += ["priority of the trainer"] * (os.getpriority(os.PRIO_PROCESS, 0) != PRIORITY)
        shutil.rmtree(self.folder)
        return found


PRIORITY = os.getpriority(os.PRIO_PROCESS, 0)


def descendants(of: int) -> list[int]:
    """Return the processes that a process has started, and those that these have started."""
    parents: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents.setdefault(int(fields[1]), []).append(int(name))
    found, new = [], [of]
    while new:
        new = [child for one in new for child in parents.get(one, [])]
        found += new
    return found


def when_ended(processes: Callable[[], list[int]], own: int) -> list[int]:
    """Return the processes once only so many are left, or after a time in which any process can end.

    A supervisor closes its socket before the kernel takes it from the list of processes. What an attempt leaves behind
    stays for a minute.
    """
    until = time.monotonic() + LEAVING_SECONDS
    while len(found := processes()) > own and time.monotonic() < until:
        time.sleep(0.05)
    return found


def attack(absent: list[str]) -> dict:
    """Make all attempts, and report."""
    from flowgrpo.rewards.sandbox.sandbox import Limits, Sandbox

    outside, sandbox = Outside(), Sandbox(absent=absent)
    report: dict = {"walls": sandbox.walls(), "won": [], "lost": [], "slow": [], "damage": []}
    limits, patient = Limits(SECONDS, 256), Limits(60, 256)

    def attempt(name: str) -> None:
        code = outside.aim(ATTACKS[name])
        code = f"won = False\n{code}" + ("" if "def f(" in code else f"\n{RIGHT} if won else 0")
        start = time.monotonic()
        done = sandbox.tests(code, TESTS, limits)
        report["won"] += [f"{name}: {done}"] * any(done.passed)
        report["slow"] += [name] * (time.monotonic() - start > SECONDS + MARGIN)

    def program(name: str) -> None:
        done = sandbox.cases(PROGRAMS[name], [{"input": "3\n", "output": "9"}], limits)
        report["won"] += [f"{name}: {done}"] * any(done.passed)

    def beside(name: str) -> None:
        done = sandbox.tests(BESIDE[name], TESTS, patient)
        report["lost"] += [f"{name}: {done}"] * (not all(done.passed))

    with ThreadPoolExecutor(8) as pool:
        names = list(ATTACKS)
        jobs = [pool.submit(attempt, name) for name in names[::2]]
        jobs += [pool.submit(beside, name) for name in BESIDE]
        jobs += [pool.submit(attempt, name) for name in names[1::2]]
        jobs += [pool.submit(program, name) for name in PROGRAMS]
        jobs += [pool.submit(beside, name) for name in BESIDE]
        for job in jobs:
            job.result()
    launcher = sandbox._process.pid
    # The launcher is there, and with namespaces the first process of its namespace.
    own = 1 + (not sandbox.walls()["namespaces"])
    left = when_ended(lambda: [*descendants(launcher), launcher], own)
    report["damage"] += [f"{len(left)} processes are left"] * (len(left) != own)
    sandbox.close()
    outlives = when_ended(lambda: [number for number in left if os.path.exists(f"/proc/{number}")], 0)
    report["damage"] += [f"process {number} outlives" for number in outlives]
    report["damage"] += outside.damage()
    report["attempts"] = len(ATTACKS) + len(PROGRAMS)
    return report


if __name__ == "__main__":
    sys.path[0] = sys.argv[1]
    print(json.dumps(attack(sys.argv[2:])))
