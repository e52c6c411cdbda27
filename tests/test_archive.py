"""The source archive has all files of the repository, so that the tests run in the unpacked archive."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from flowgrpo import __version__
from tests.test_layout import ROOT

pytestmark = pytest.mark.slow

# Links into the package, for readers of the repository.
LINKS = {"configs", "pipelines", "rewards", "samplers"}
BUILD = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def made(name: str) -> bool:
    """Whether a file of an archive is made when it is built."""
    return name in ("PKG-INFO", "setup.cfg") or name.startswith("flowgrpo.egg-info/")


def sources() -> set[str]:
    """The files of the repository: from git, or in an unpacked archive from the archive's own list."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        names = set(listed.split("\0")) - {""}
    else:
        names = set((ROOT / "flowgrpo.egg-info" / "SOURCES.txt").read_text(encoding="utf-8").split("\n")) - {""}
    return {name for name in names - LINKS if not made(name) and (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archive")
    for name in sources():
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / "source" / name)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)], cwd=folder / "source", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    with tarfile.open(folder / f"flowgrpo-{__version__}.tar.gz") as archive:
        archive.extractall(folder)
    return folder / f"flowgrpo-{__version__}"


def test_the_archive_holds_every_file_of_the_repository_and_no_other(unpacked: Path):
    found = {str(file.relative_to(unpacked)) for file in unpacked.rglob("*") if file.is_file()}
    assert {name for name in found if not made(name)} == sources()


def test_tests_run_in_the_unpacked_archive(unpacked: Path):
    own = {**os.environ, "PYTHONPATH": str(unpacked), "OMP_NUM_THREADS": "1"}
    tests = [
        "tests/test_layout.py",
        "tests/configs/test_schema.py",
        "tests/test_docs.py::test_relative_links_lead_somewhere",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests],
        cwd=unpacked, env=own, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
