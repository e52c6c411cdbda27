"""A reward that fails in one of several processes: all hear of it at the same place, so none waits in vain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...rewards.base import RewardError

if TYPE_CHECKING:
    from .processes import Processes


class FailedTogether(RewardError):
    """A reward has failed in one process or more, and all processes raise this error at the same place.

    So they can still write a checkpoint together. The `RewardError` of this process, if it has one, is `__cause__`.
    """


def share_failure(processes: Processes, own: RewardError | None = None, signal: int = 0) -> int:
    """Tell the other processes whether a reward has failed here. Every process must call it.

    Args:
        processes: of the run.
        own: the failure of this process.
        signal: number of a signal that this process has received.

    Returns:
        The number of a signal that any process has received, or 0. With a signal no failure is raised, because the
        run ends anyway, and the resumed run calls the reward again.

    Raises:
        RewardError: a reward has failed here, and there is no other process.
        FailedTogether: a reward has failed in any of several processes; all processes raise it.
    """
    if processes.count == 1 and own is not None:
        raise own
    told = processes.hear((signal, None if own is None else (own.reward, str(own))))
    if received := max(number for number, _ in told):
        return received
    if own is not None:
        raise FailedTogether(str(own), own.reward, own.index, own.indices, own.prompt, own.saved) from own
    for rank, (_, failure) in enumerate(told):
        if failure is not None:
            reward, text = failure
            raise FailedTogether(
                f"process {rank} of {processes.count} failed, so this one ends as well: {text}", reward
            )
    return 0
