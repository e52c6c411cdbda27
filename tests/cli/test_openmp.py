"""Threads that wait give their core away: the command sets this before the library is loaded that reads it."""

import os
import subprocess
import sys

import pytest

from flowgrpo.cli.openmp import sleep_soon

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
