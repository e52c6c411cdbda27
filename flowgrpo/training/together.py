"""Work that each process does on its own, and that all processes give up together: samples and their scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..rewards.base import RewardError
from .distributed.failures import FailedTogether, share_failure
from .folder.keeping import Keeper
from .stopping import Abandoned

T = TypeVar("T")


def together(keeper: Keeper, work: Callable[[], T], alone: bool = True) -> T:
    """The result of the work of this process. Every process must call it, before the first optimizer step.

    Args:
        keeper: of the run.
        work: the work of this process.
        alone: whether no process waits for another within the work; if not, it runs to its end. Then the work itself
            tells the others of a failed reward before they would wait for this process.

    Raises:
        Abandoned: a process has received a signal; all processes raise it.
        RewardError: a reward has failed, and there is no other process.
        FailedTogether: a reward has failed in a process; all processes raise it.
    """
    if keeper.processes.count == 1:
        return work()
    alone = alone and keeper.weights.shards is None and keeper.processes.groups == keeper.processes.count
    found: list[T] = []
    failed: RewardError | None = None
    try:
        with keeper.stop.abandonable(keeper.weights.modules.values(), alone):
            found.append(work())
    except Abandoned:
        pass
    except FailedTogether:
        raise
    except RewardError as error:
        failed = error
    if share_failure(keeper.processes, failed, keeper.stop.number) or not found:
        raise Abandoned
    return found[0]
