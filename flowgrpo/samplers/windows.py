"""Windows: which steps of a schedule are trained in an iteration.

A window is a function of the iteration, the number of denoising steps and the run's seed. A window remembers nothing.
So all processes, and a run resumed from a checkpoint, get the same steps without communication. The last step of a
schedule is in no window, because its transition is too narrow to be scored.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from ..parts.ranges import Count, NotNegative, Whole

Window = Callable[[int, int, int], Sequence[int]]
"""`(iteration, num_steps, seed) -> steps`: a window with its options bound."""


def progressive(
    iteration: int,
    num_steps: int,
    seed: int,
    *,
    size: Count = 4,
    stride: Whole = 1,
    interval: Count = 25,
    start: Whole = 0,
    stop: Count | None = None,
) -> range:
    """A window that slides over the steps and then starts again (MixGRPO, arXiv:2507.21802).

    Args:
        iteration: counted from 0.
        num_steps: denoising steps ``T`` of the schedule.
        seed: seed of the run.
        size: Steps in the window.
        stride: Steps by which the window slides; 0 keeps it in place.
        interval: Iterations at one position.
        start: First step that the window may hold.
        stop: One past the last step that the window may hold; by default, it may hold all steps but the last.

    Raises:
        ValueError: if the window does not fit in the schedule.
    """
    return _slid(iteration, _positions(num_steps, size, stride, start, stop), size, lambda position: interval)


def decay(
    iteration: int,
    num_steps: int,
    seed: int,
    *,
    size: Count = 4,
    stride: Whole = 1,
    interval: Count = 25,
    start: Whole = 0,
    stop: Count | None = None,
) -> range:
    """A window that slides faster and faster: its stay shrinks linearly with its position (MixGRPO, arXiv:2507.21802).

    At the end of the schedule the stay would be a quarter of the first one.

    Args:
        iteration: counted from 0.
        num_steps: denoising steps ``T`` of the schedule.
        seed: seed of the run.
        size: Steps in the window.
        stride: Steps by which the window slides; 0 keeps it in place.
        interval: Iterations at the first position.
        start: First step that the window may hold.
        stop: One past the last step that the window may hold; by default, it may hold all steps but the last.

    Raises:
        ValueError: if the window does not fit in the schedule.
    """
    positions = _positions(num_steps, size, stride, start, stop)
    end, shortest = _stop(num_steps, stop), max(interval // 4, 1)

    def stay(position: int) -> int:
        share = position / end
        return int(interval * (1 - share) + shortest * share)

    return _slid(iteration, positions, size, stay)


def exp_decay(
    iteration: int,
    num_steps: int,
    seed: int,
    *,
    size: Count = 4,
    stride: Whole = 1,
    interval: Count = 25,
    start: Whole = 0,
    stop: Count | None = None,
    rate: NotNegative = 0.1,
    after: Whole = 13,
) -> range:
    """A window that slides ever faster: its stay is ``ceil(interval exp(-rate max(0, position - after)))`` (MixGRPO).

    Args:
        iteration: counted from 0.
        num_steps: denoising steps ``T`` of the schedule.
        seed: seed of the run.
        size: Steps in the window.
        stride: Steps by which the window slides; 0 keeps it in place.
        interval: Iterations at a position before the stay shrinks.
        start: First step that the window may hold.
        stop: One past the last step that the window may hold; by default, it may hold all steps but the last.
        rate: How fast the stay shrinks, per step.
        after: Position from which the stay shrinks.

    Raises:
        ValueError: if the window does not fit in the schedule.
    """

    def stay(position: int) -> int:
        return max(math.ceil(interval * math.exp(-rate * max(position - after, 0))), 1)

    return _slid(iteration, _positions(num_steps, size, stride, start, stop), size, stay)


def drawn(
    iteration: int,
    num_steps: int,
    seed: int,
    *,
    size: Count = 4,
    interval: Count = 25,
    start: Whole = 0,
    stop: Count | None = None,
) -> range:
    """A window at a random position, drawn anew every `interval` iterations (Flow-GRPO-Fast, arXiv:2505.05470).

    Args:
        iteration: counted from 0.
        num_steps: denoising steps ``T`` of the schedule.
        seed: seed of the run.
        size: Steps in the window.
        interval: Iterations at one position.
        start: First step that the window may hold.
        stop: One past the last step that the window may hold; by default, it may hold all steps but the last.

    Raises:
        ValueError: if the window does not fit in the schedule.
    """
    positions = _positions(num_steps, size, 1, start, stop)
    position = positions[_draw(iteration, seed, interval).randrange(len(positions))]
    return range(position, position + size)


def subset(
    iteration: int,
    num_steps: int,
    seed: int,
    *,
    size: Count = 4,
    interval: Count = 25,
    start: Whole = 0,
    stop: Count | None = None,
) -> list[int]:
    """Random single steps, adjacent or not, drawn anew every `interval` iterations (DanceGRPO, arXiv:2505.07818).

    Args:
        iteration: counted from 0.
        num_steps: denoising steps ``T`` of the schedule.
        seed: seed of the run.
        size: Number of steps.
        interval: Iterations with the same steps.
        start: First step that may be drawn.
        stop: One past the last step that may be drawn; by default, all steps but the last may be drawn.

    Raises:
        ValueError: if there are fewer than `size` steps to draw from.
    """
    _fits(num_steps, size, start, stop)
    return sorted(_draw(iteration, seed, interval).sample(range(start, _stop(num_steps, stop)), size))


def spaced(
    iteration: int,
    num_steps: int,
    seed: int,
    *,
    size: Count = 4,
    interval: Count = 25,
    start: Whole = 0,
    stop: Count | None = None,
) -> range:
    """Steps at equal distances from a random first one, drawn anew every `interval` iterations (DRTune, 2405.00760).

    The distance is the number of steps to draw from, divided by `size` and rounded down.

    Args:
        iteration: counted from 0.
        num_steps: denoising steps ``T`` of the schedule.
        seed: seed of the run.
        size: Number of steps.
        interval: Iterations with the same steps.
        start: First step that may be drawn.
        stop: One past the last step that may be drawn; by default, all steps but the last may be drawn.

    Raises:
        ValueError: if there are fewer than `size` steps to draw from.
    """
    _fits(num_steps, size, start, stop)
    room = _stop(num_steps, stop) - start
    distance = room // size
    first = start + _draw(iteration, seed, interval).randrange(room - distance * (size - 1))
    return range(first, first + distance * (size - 1) + 1, distance)


def frozen(iteration: int, num_steps: int, seed: int, *, size: Count = 4, start: Whole = 0) -> range:
    """A window that stays where it is (MixGRPO-Flash*, arXiv:2507.21802).

    Args:
        iteration: counted from 0.
        num_steps: denoising steps ``T`` of the schedule.
        seed: seed of the run.
        size: Steps in the window.
        start: First step of the window.

    Raises:
        ValueError: if the window does not fit in the schedule.
    """
    _fits(num_steps, size, start, None)
    return range(start, start + size)


def last(iteration: int, num_steps: int, seed: int, *, size: Count = 1) -> range:
    """The last steps that may be trained (DRaFT-K, arXiv:2309.17400).

    Args:
        iteration: counted from 0.
        num_steps: denoising steps ``T`` of the schedule.
        seed: seed of the run.
        size: Steps in the window.

    Raises:
        ValueError: if there are fewer steps.
    """
    _fits(num_steps, size, 0, None)
    return range(num_steps - 1 - size, num_steps - 1)


def whole(iteration: int, num_steps: int, seed: int) -> range:
    """Every step but the last (Flow-GRPO, arXiv:2505.05470)."""
    return range(num_steps - 1)


WINDOWS: dict[str, Callable[..., Sequence[int]]] = {
    "progressive": progressive,
    "random": drawn,
    "subset": subset,
    "spaced": spaced,
    "decay": decay,
    "exp_decay": exp_decay,
    "frozen": frozen,
    "last": last,
    "all": whole,
}
"""Windows, by the names that recipes use."""


def _stop(num_steps: int, stop: int | None) -> int:
    return num_steps - 1 if stop is None else stop


def _fits(num_steps: int, size: int, start: int, stop: int | None) -> None:
    """Refuse a window that does not fit in a schedule. The last step is never trained, so windows end before it."""
    if stop is not None and stop > num_steps - 1:
        raise ValueError(
            f"stop is {stop} in a schedule of {num_steps} steps whose last step is never trained; use at most "
            f"{num_steps - 1} or more sampler.steps"
        )
    if size < 1 or start < 0:
        raise ValueError(f"size is {size} and start {start}; use at least 1 and 0")
    room = _stop(num_steps, stop) - start
    if size > room:
        where = f"before its stop, {stop}" if stop is not None else "before the last step, which is never trained"
        mend = f"a size of at most {room}" if room > 0 else "an earlier start"
        more = "more sampler.steps" if stop is None else "a later stop"
        raise ValueError(
            f"{size} step(s) from step {start} do not fit in a schedule of {num_steps} {where}; use {mend}, or {more}"
        )


def _positions(num_steps: int, size: int, stride: int, start: int, stop: int | None) -> tuple[int, ...]:
    """First steps of a window, in the order of its positions; at the last position, the window ends at `stop`."""
    _fits(num_steps, size, start, stop)
    if stride == 0:
        return (start,)
    final = _stop(num_steps, stop) - size
    slid = tuple(range(start, final + 1, stride))
    return slid if slid[-1] == final else (*slid, final)


def _slid(iteration: int, positions: Sequence[int], size: int, stay: Callable[[int], int]) -> range:
    """The window of an iteration, if it stays `stay(position)` iterations at each position and then starts again."""
    stays = [stay(position) for position in positions]
    remaining = iteration % sum(stays)
    visited = 0
    while remaining >= stays[visited]:
        remaining -= stays[visited]
        visited += 1
    return range(positions[visited], positions[visited] + size)


def _draw(iteration: int, seed: int, interval: int) -> random.Random:
    return random.Random(f"window/{seed}/{iteration // interval}")
