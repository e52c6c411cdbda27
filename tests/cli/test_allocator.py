"""A process keeps freed memory; each test starts a new process."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import resource, sys
import numpy as np
from flowgrpo.cli.allocator import keep_freed_memory

if "keep" in sys.argv:
    print(keep_freed_memory())

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [np.ones(2_000_000) for _ in range(4)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(min(faults() for _ in range(5)))
"""


def outcome(*arguments: str, **environment: str) -> list[str]:
    own = ("MALLOC_", "GLIBC_TUNABLES")
    given = {k: v for k, v in os.environ.items() if not k.startswith(own)} | environment
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], env=given, check=True, capture_output=True, text=True
    ).stdout.split()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library's allocator")
def test_blocks_that_were_freed_are_used_again_without_asking_the_system():
    kept, faults = outcome("keep")
    (before,) = outcome()
    assert kept == "True"
    # 64 MB are 15,625 pages of 4 KiB, or 32 of 2 MiB.
    assert int(faults) == 0
    assert int(before) > 16


def test_settings_of_the_user_stand():
    assert outcome("keep", MALLOC_ARENA_MAX="2")[0] == "False"
    assert outcome("keep", GLIBC_TUNABLES="glibc.malloc.check=0")[0] == "False"
