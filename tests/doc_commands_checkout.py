"""A copy of the checkout, for commands that would change or check the checkout itself."""

import os
import pty
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.doc_commands_read import ROOT

PARTS = ("flowgrpo", "tests", "docs", "Makefile", "LICENSE", "pyproject.toml", "mkdocs.yml", ".pre-commit-config.yaml")
# A layer that imports no other layer; it is enough to try the checks of style and types on.
CUT = ("flowgrpo/__init__.py", "flowgrpo/py.typed", "flowgrpo/core", "Makefile", "pyproject.toml")
# With these options pip asks no package index, and writes only to the prefix.
OFFLINE = (
    "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed", "--disable-pip-version-check",
)  # fmt: skip
# Of a module that does not import torch: each of the processes that run tests would take seconds for it.
ONE_TEST = "tests/intake/test_expressions.py --noconftest"
PATIENCE = 600


@dataclass(frozen=True)
class Checkout:
    """The copy.

    Attributes:
        folder: folder of the whole copy.
        cut: folder of a second copy with only one layer of the package, for commands that take long on the whole copy.
    """

    folder: Path
    cut: Path

    def run(self, *words: str, cut: bool = False, status: int = 0, **variables: str) -> str:
        """Run a program in the copy, with the copy's package; returns what the program printed."""
        where = self.cut if cut else self.folder
        done = subprocess.run(
            words, cwd=where, env=environment(where, variables), capture_output=True, text=True, check=False
        )
        said = done.stdout + done.stderr
        assert done.returncode == status, f"`{' '.join(words)}` ended with {done.returncode}\n{said}"
        return said

    def rewrites(self, *words: str, **variables: str) -> list[str]:
        """Run a program that writes pages again; returns the names of the pages that it wrote.

        Raises:
            AssertionError: a page has changed.
        """
        before = {page: (page.read_bytes(), page.stat().st_mtime_ns) for page in self.folder.glob("docs/**/*.md")}
        self.run(*words, **variables)
        written = [page for page, (_, when) in before.items() if page.stat().st_mtime_ns != when]
        changed = [page.name for page in written if page.read_bytes() != before[page][0]]
        assert not changed, f"`{' '.join(words)}` changes {', '.join(changed)}; run it and look at what it wrote"
        return sorted(page.name for page in written)

    def answer(self, *words: str, **variables: str) -> None:
        """Run a program that asks questions, on a new terminal; every answer is Enter, which takes the proposal."""
        ours, its = pty.openpty()
        process = subprocess.Popen(
            words, cwd=self.folder, env=environment(self.folder, variables), stdin=its, stdout=its, stderr=its
        )
        os.close(its)
        os.set_blocking(ours, False)
        said, end = b"", time.monotonic() + PATIENCE
        try:
            while process.poll() is None:
                assert time.monotonic() < end, f"`{' '.join(words)}` still asks\n{said.decode(errors='replace')}"
                # A menu discards what was typed before it appeared, so Enter is typed again.
                os.write(ours, b"\r")
                time.sleep(0.1)
                said += _read(ours)
        finally:
            process.kill()
            process.wait()
            os.close(ours)
        assert process.returncode == 0, said.decode(errors="replace")


def make_checkout(folder: Path) -> Checkout:
    """Copy the files of the repository, without the files that programs leave behind."""
    whole, cut = folder / "whole", folder / "cut"
    for name in (*PARTS, *(page.name for page in ROOT.glob("*.md"))):
        _copy(name, whole)
    for name in CUT:
        _copy(name, cut)
    return Checkout(whole, cut)


def install(words: list[str], cwd: Path, prefix: Path) -> Path:
    """Run `pip install` into a prefix; returns the folder with the installed packages."""
    pip = [sys.executable, "-m", "pip", "install", *OFFLINE, "--prefix", str(prefix), *words]
    done = subprocess.run(pip, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(prefix.glob("**/*.dist-info")).parent


def environment(folder: Path, variables: dict[str, str]) -> dict[str, str]:
    """The environment variables of a reader: the variables of this process, with the package of the folder."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    own = {"PATH": path, "PYTHONPATH": str(folder), "PYTHON": sys.executable}
    # A copy keeps its bytecode: without it each process compiles the whole package. The repository stays clean.
    own["PYTHONDONTWRITEBYTECODE"] = "1" if folder == ROOT else ""
    return {**os.environ, **own, **variables}


def _copy(name: str, folder: Path) -> None:
    source, target = ROOT / name, folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


def _read(end: int) -> bytes:
    """What was printed on a terminal since the last call."""
    try:
        return os.read(end, 65_536)
    except (BlockingIOError, OSError):
        return b""
