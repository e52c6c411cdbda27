"""Settings of GNU's OpenMP, with which torch computes on Linux: how many threads, and how long they try to go on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

__all__ = ["cores_of_quota", "few_threads", "sleep_soon"]

TRIES = 1000
_OWN, _MOUNTS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def sleep_soon(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Have a thread that waits for others try 1,000 times, and then give its core away.

    By default it tries for milliseconds. While another program has a core, the thread that is waited for does not run,
    and the tries only keep it from running. With two busy programs on two cores, an iteration of the default recipe
    took 50 s, and 3.2 s with 1,000 tries. Without other programs it took 1.46 s, and 1.51 s with 1,000 tries.

    No number changes. The library reads the setting when it is loaded, so this must come before torch is imported. If
    the environment has a setting of its own, nothing is changed.

    Returns:
        Whether the setting was made.
    """
    if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(environment):
        return False
    environment["GOMP_SPINCOUNT"] = str(TRIES)
    return True


def few_threads(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Have no more threads than the processor time of a container allows.

    torch starts a thread for each core of the machine. If a container may use the time of two cores of 64, the system
    stops all 64 threads as soon as they have used up that time, and they wait for each other.

    Sums are split over threads, so another number of threads changes the last bits of results. The library reads the
    setting when it is loaded, so this must come before torch is imported. If the environment has a setting of its own,
    nothing is changed.

    Returns:
        Whether the setting was made.
    """
    cores = cores_of_quota()
    if cores is None or {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & set(environment):
        return False
    threads = max(1, int(cores))
    if threads >= (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1):
        return False
    environment["OMP_NUM_THREADS"] = str(threads)
    return True


def cores_of_quota(own: Path = _OWN, mounts: Path = _MOUNTS) -> float | None:
    """The processor time that the control groups of this process allow, in cores; None without a quota.

    Args:
        own: lists the groups of this process.
        mounts: has the files of all groups. In a container, its own group is often the root here.
    """
    quotas: list[float] = []
    with suppress(OSError, ValueError):
        for line in own.read_text(encoding="utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers:
                quotas += _quotas(mounts, group, _of_second_version)
            elif "cpu" in controllers.split(","):
                quotas += _quotas(mounts / "cpu", group, _of_first_version)
    return min(quotas, default=None)


def _quotas(root: Path, group: str, read: Callable[[Path], float]) -> Iterator[float]:
    """The quotas of a group and of all groups around it."""
    inner = PurePosixPath(group.lstrip("/"))
    for folder in (inner, *inner.parents):
        with suppress(OSError, ValueError):
            if (cores := read(root / folder)) > 0:
                yield cores


def _of_second_version(folder: Path) -> float:
    quota, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
    return int(quota) / int(period)  # without a quota, the file has "max", which is no number


def _of_first_version(folder: Path) -> float:
    quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text(encoding="utf-8")) for name in ("quota", "period"))
    return quota / period  # without a quota, the file has -1
