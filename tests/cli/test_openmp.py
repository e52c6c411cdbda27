"""Threads of OpenMP: the command sets their number and their patience before the library is loaded that reads it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowgrpo.cli import openmp
from flowgrpo.cli.openmp import cores_of_quota, few_threads, sleep_soon

PROGRAM = """
import sys
from flowgrpo.cli.app import main

assert "torch" not in sys.modules
sys.argv = ["flowgrpo", "--help"]
try:
    main()
except SystemExit:
    pass
import torch
"""


@pytest.mark.parametrize(
    ("given", "made"), [({}, True), ({"OMP_WAIT_POLICY": "ACTIVE"}, False), ({"GOMP_SPINCOUNT": "7"}, False)]
)
def test_a_setting_of_the_environment_is_kept(given: dict[str, str], made: bool) -> None:
    environment = dict(given)
    assert sleep_soon(environment) == made
    assert environment == given | ({"GOMP_SPINCOUNT": "1000"} if made else {})


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="another OpenMP")
@pytest.mark.parametrize(("given", "tries"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_the_library_reads_the_setting(given: dict[str, str], tries: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE"} | given
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, capture_output=True, text=True)
    assert f"GOMP_SPINCOUNT = '{tries}'" in done.stderr


FIRST, SECOND = "5:cpu,cpuacct:{}", "0::{}"


@pytest.mark.parametrize(
    ("line", "group", "files", "cores"),
    [
        (SECOND, "/", {"cpu.max": "200000 100000"}, 2.0),
        (SECOND, "/", {"cpu.max": "max 100000"}, None),
        (SECOND, "/", {}, None),
        # The group of a service, and a quota of the group around it, which is smaller.
        (SECOND, "/a/b", {"a/b/cpu.max": "400000 100000", "a/cpu.max": "150000 100000"}, 1.5),
        (SECOND, "/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3.0),
        # A container that sees the name of its group from outside, and its files at the root.
        (FIRST, "/docker/3f", {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
        (FIRST, "/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        (SECOND, "/", {"cpu.max": "nonsense"}, None),
        (SECOND, "/", {"cpu.max": "1 0 2"}, None),
        ("4:memory:{}", "/", {"cpu.max": "200000 100000"}, None),
    ],
)
def test_the_quota_of_a_container(
    line: str, group: str, files: dict[str, str], cores: float | None, tmp_path: Path
) -> None:
    own = tmp_path / "cgroup"
    own.write_text(f"9:name=systemd:/x\n{line.format(group)}\n")
    for name, text in files.items():
        file = tmp_path / "mounts" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    assert cores_of_quota(own, tmp_path / "mounts") == cores


def test_without_control_groups(tmp_path: Path) -> None:
    assert cores_of_quota(tmp_path / "absent", tmp_path) is None


@pytest.mark.parametrize(
    ("given", "cores", "threads"),
    [
        ({}, 2.7, "2"),
        ({}, 0.4, "1"),
        ({}, 8.0, None),
        ({}, 16.0, None),
        ({}, None, None),
        ({"OMP_NUM_THREADS": "5"}, 2.0, "5"),
        ({"MKL_NUM_THREADS": "5"}, 2.0, None),
    ],
)
def test_threads_within_the_quota(
    given: dict[str, str], cores: float | None, threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = dict(given)
    monkeypatch.setattr(openmp, "cores_of_quota", lambda: cores)
    monkeypatch.setattr(openmp.os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    assert few_threads(environment) == (environment != given)
    assert environment.get("OMP_NUM_THREADS") == threads
