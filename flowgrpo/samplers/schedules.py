"""Tables of noise levels.

A table has ``T + 1`` levels for ``T`` denoising steps. It decreases and ends at exactly 0.
"""

import math
from collections.abc import Sequence


def check_sigmas(sigmas: Sequence[float]) -> tuple[float, ...]:
    """The table as floats, checked.

    Raises:
        ValueError: if there are fewer than two levels, a level is outside [0, 1] or not finite, the levels do not
            strictly decrease, or the last level is not exactly 0.
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
        raise ValueError(
            f"sigmas ends at {levels[-1]}; append 0.0, because otherwise the last state is decoded with noise in it"
        )
    return levels


def shifted_sigmas(num_steps: int, shift: float = 1.0) -> tuple[float, ...]:
    """``shift t / (1 + (shift - 1) t)`` at ``t = 1, 1 - 1/T, ..., 0`` (DanceGRPO's table, arXiv:2505.07818).

    Args:
        num_steps: ``T``, at least 1.
        shift: shift of the table, above 0. 1 is the linear table; a larger shift spends more steps at high noise.

    Returns:
        ``T + 1`` levels from exactly 1 to exactly 0.

    Raises:
        ValueError: if an argument is out of range.
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
    """MixGRPO-Flash's table, which has fewer and longer steps after the trained window.

    Steps ``0 .. last`` keep their levels. The rest, from ``sigmas[last + 1]`` to 0, is cut into ``n_post - 1`` strides
    of equal length in step index, with ``n_post = int((T - last) ratio)``. So the rollout costs ``last + n_post``
    evaluations (arXiv:2507.21802). The released code ends at ``sigma > 0`` when ``n_post`` is 1; here ``n_post`` is at
    least 2 if any steps remain, and the table always ends at 0.

    Args:
        sigmas: ``T + 1`` levels, see `check_sigmas`.
        last: index of the last trained step, in ``0 .. T - 1``.
        ratio: share of the remaining evaluations to keep, in (0, 1]; 1 returns the table unchanged.

    Raises:
        ValueError: if the table is malformed or an argument is out of range.
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
