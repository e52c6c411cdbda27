"""Tables of noise levels, and the windows of steps that are sampled stochastically and trained.

A table has ``T + 1`` levels for ``T`` denoising steps: it decreases and ends at exactly 0. A window is a
range of steps. It is a function of the iteration alone, so that every rank, and a run resumed from a
checkpoint, agrees on it without communication.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass


def check_sigmas(sigmas: Sequence[float]) -> tuple[float, ...]:
    """The table as floats, after checking it.

    Raises:
        ValueError: fewer than two levels, a level outside [0, 1] or not finite, levels that do not strictly
            decrease, or a last level other than exactly 0.
    """
    levels = tuple(float(sigma) for sigma in sigmas)
    if len(levels) < 2:
        raise ValueError(f"sigmas has {len(levels)} level(s); a step needs two, such as (1.0, 0.0)")
    for i, sigma in enumerate(levels):
        if not 0.0 <= sigma <= 1.0:
            raise ValueError(f"sigmas[{i}] is {sigma}; noise levels lie in [0, 1]")
        if i > 0 and not sigma < levels[i - 1]:
            raise ValueError(f"sigmas[{i}] is {sigma}, not below {levels[i - 1]} before it; levels strictly decrease")
    if levels[-1] != 0.0:
        raise ValueError(f"sigmas ends at {levels[-1]}; append 0.0, or the last state is decoded with noise in it")
    return levels


def shifted_sigmas(num_steps: int, shift: float = 1.0) -> tuple[float, ...]:
    """``shift t / (1 + (shift - 1) t)`` at ``t = 1, 1 - 1/T, ..., 0`` (DanceGRPO's table, arXiv:2505.07818).

    Args:
        num_steps: ``T``, at least 1.
        shift: above 0; 1 is the linear table, more spends the steps at high noise.

    Returns:
        ``T + 1`` levels from exactly 1 to exactly 0.

    Raises:
        ValueError: an argument out of range.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps is {num_steps}; use at least 1")
    if not (math.isfinite(shift) and shift > 0.0):
        raise ValueError(f"shift is {shift}; use a number above 0 (1 for no shift)")
    times = (1.0 - k / num_steps for k in range(1, num_steps))
    return (1.0, *(shift * t / (1.0 + (shift - 1.0) * t) for t in times), 0.0)


def _interpolate(sigmas: tuple[float, ...], position: float) -> float:
    """The table at a fractional step index of at most ``T - 1``.

    A shifted table is ``1/sigma = a + b/t`` with ``t = 1 - index/T``. Linear interpolation of ``1/sigma`` in
    ``1/t`` is therefore exact for every shift, and monotone for any other table.
    """
    num_steps = len(sigmas) - 1
    k = math.floor(position)
    if position == k:
        return sigmas[k]
    t, left, right = (1.0 - index / num_steps for index in (position, k, k + 1))
    weight = (1.0 / t - 1.0 / left) / (1.0 / right - 1.0 / left)
    return 1.0 / ((1.0 - weight) / sigmas[k] + weight / sigmas[k + 1])


def compress_tail(sigmas: Sequence[float], last: int, ratio: float) -> tuple[float, ...]:
    """MixGRPO-Flash's table: the steps after the trained window are taken in fewer, longer strides.

    Steps ``0 .. last`` keep their levels. The rest, from ``sigmas[last + 1]`` to 0, is cut into
    ``n_post - 1`` strides even in step index, ``n_post = int((T - last) ratio)``, so the rollout costs
    ``last + n_post`` evaluations (arXiv:2507.21802). The released code ends at ``sigma > 0`` when ``n_post``
    is 1; here it is at least 2 while steps remain, and the table always ends at 0.

    Args:
        sigmas: ``T + 1`` levels, see `check_sigmas`.
        last: index of the last trained step, in ``0 .. T - 1``.
        ratio: share of the remaining evaluations to keep, in (0, 1]; 1 returns the table unchanged.

    Raises:
        ValueError: a malformed table or an argument out of range.
    """
    table = check_sigmas(sigmas)
    num_steps = len(table) - 1
    if not 0 <= last < num_steps:
        raise ValueError(f"last is {last}; a table of {num_steps} steps has steps 0 to {num_steps - 1}")
    if not 0.0 < ratio <= 1.0:
        raise ValueError(f"ratio is {ratio}; use a share above 0 and at most 1")
    first = last + 1
    if first == num_steps:
        return table
    strides = max(int((num_steps - last) * ratio), 2) - 1
    stride = (num_steps - first) / strides
    inner = (_interpolate(table, first + j * stride) for j in range(1, strides))
    return check_sigmas((*table[: first + 1], *inner, 0.0))


WINDOW_KINDS = ("progressive", "random", "subset", "decay", "exp_decay", "frozen")


@dataclass(frozen=True)
class WindowSchedule:
    """MixGRPO's sliding window (arXiv:2507.21802) as a function of the iteration.

    Every window holds exactly `size` steps in ``[start, stop)``, consecutive but for ``subset``, and never the last
    step of the schedule, whose transition is too narrow to be scored. Sliding kinds move from `start` by `stride`,
    end flush with `stop`, and begin again at `start`.

    Attributes:
        kind: ``progressive`` stays `interval` iterations at each position; ``decay`` shortens the stay
            linearly to ``interval // 4`` at the last position; ``exp_decay`` stays
            ``ceil(interval exp(-decay_rate max(0, position - decay_from)))``; ``random`` draws a position
            every `interval` iterations, ``subset`` single steps (DanceGRPO's share of steps, arXiv:2505.07818);
            ``frozen`` stays at `start`.
        size: steps in a window.
        num_steps: denoising steps ``T`` of the schedule.
        stride: steps between positions; below `size` windows overlap, 0 freezes them.
        interval: iterations at a position.
        start: first step a window may hold.
        stop: one past the last step it may hold, at most ``T - 1``, which None stands for.
        seed: of the random kind; draws are addressed by ``(seed, iteration // interval)``.
        decay_rate: of ``exp_decay``, per step.
        decay_from: position from which ``exp_decay`` shortens its stay.

    Raises:
        ValueError: an unknown kind or a window that does not fit.
    """

    kind: str
    size: int
    num_steps: int
    stride: int = 1
    interval: int = 1
    start: int = 0
    stop: int | None = None
    seed: int = 0
    decay_rate: float = 0.1
    decay_from: int = 13

    def __post_init__(self) -> None:
        if self.kind not in WINDOW_KINDS:
            raise ValueError(f"unknown window kind '{self.kind}'; use one of {', '.join(WINDOW_KINDS)}")
        for name, low in (("size", 1), ("stride", 0), ("interval", 1), ("start", 0)):
            value = getattr(self, name)
            if value < low:
                raise ValueError(f"window {name} is {value}; use at least {low}")
        if not self.decay_rate >= 0.0:
            raise ValueError(f"window decay_rate is {self.decay_rate}; use at least 0")
        if self._stop > self.num_steps - 1:
            raise ValueError(
                f"window stop is {self.stop} with {self.num_steps} steps; the last step is never trained, "
                f"use at most {self.num_steps - 1}"
            )
        if self.start + self.size > self._stop:
            raise ValueError(
                f"a window of {self.size} steps from step {self.start} does not fit before step {self._stop} "
                f"(of {self.num_steps}; the last is never trained); use a smaller size or an earlier start"
            )

    @property
    def _stop(self) -> int:
        return self.num_steps - 1 if self.stop is None else self.stop

    def positions(self) -> tuple[int, ...]:
        """First steps of the windows, in the order a sliding kind visits them."""
        final = self._stop - self.size
        if self.kind == "frozen" or self.stride == 0:
            return (self.start,)
        slid = tuple(range(self.start, final + 1, 1 if self.kind == "random" else self.stride))
        return slid if slid[-1] == final else (*slid, final)

    def stay(self, position: int) -> int:
        """Iterations spent at a position before moving on, at least 1."""
        if self.kind == "decay":
            share = (position - self.start) / max(self._stop - self.size - self.start, 1)
            shortest = max(self.interval // 4, 1)
            return int(self.interval - (self.interval - shortest) * share)
        if self.kind == "exp_decay":
            past = max(position - self.decay_from, 0)
            return max(math.ceil(self.interval * math.exp(-self.decay_rate * past)), 1)
        return self.interval

    def window(self, iteration: int) -> Sequence[int]:
        """The steps trained in an iteration, rising.

        Args:
            iteration: counted from 0.

        Raises:
            ValueError: a negative iteration.
        """
        if iteration < 0:
            raise ValueError(f"iteration is {iteration}; iterations are counted from 0")
        positions = self.positions()
        draw = random.Random(f"window/{self.seed}/{iteration // self.interval}")
        if self.kind == "subset":
            return sorted(draw.sample(range(self.start, self._stop), self.size))
        if self.kind == "random":
            position = positions[draw.randrange(len(positions))]
            return range(position, position + self.size)
        stays = [self.stay(position) for position in positions]
        remaining = iteration % sum(stays)
        visited = 0
        while remaining >= stays[visited]:
            remaining -= stays[visited]
            visited += 1
        return range(positions[visited], positions[visited] + self.size)
