"""Noise tables and training windows."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgrpo.samplers.schedules import (
    WINDOW_KINDS,
    WindowSchedule,
    check_sigmas,
    compress_tail,
    shifted_sigmas,
)


@given(num_steps=st.integers(1, 200), shift=st.floats(0.05, 20.0))
def test_shifted_table_is_the_formula_and_is_valid(num_steps: int, shift: float) -> None:
    sigmas = shifted_sigmas(num_steps, shift)
    assert check_sigmas(sigmas) == sigmas
    assert (len(sigmas), sigmas[0], sigmas[-1]) == (num_steps + 1, 1.0, 0.0)
    for k, sigma in enumerate(sigmas):
        t = 1 - k / num_steps
        assert sigma == pytest.approx(shift * t / (1 + (shift - 1) * t), abs=1e-12)


def test_a_shift_of_one_is_linear_and_three_is_worked_by_hand() -> None:
    assert shifted_sigmas(4) == pytest.approx((1, 0.75, 0.5, 0.25, 0))
    assert shifted_sigmas(4, 3.0) == pytest.approx((1, 0.9, 0.75, 0.5, 0))


@pytest.mark.parametrize(
    ("sigmas", "reason"),
    [
        ((1.0,), "1 level"),
        ((), "0 level"),
        ((1.0, 0.5, 0.5, 0.0), r"sigmas\[2\] is 0.5, not below"),
        ((1.0, 0.5, 0.6, 0.0), r"sigmas\[2\] is 0.6, not below"),
        ((1000.0, 500.0, 0.0), r"sigmas\[0\] is 1000.0"),
        ((1.0, -0.1, 0.0), r"sigmas\[1\] is -0.1"),
        ((1.0, math.nan, 0.0), r"sigmas\[1\] is nan"),
        ((1.0, 0.5, 0.01), "ends at 0.01; append 0.0"),
    ],
)
def test_malformed_tables_are_refused_with_the_reason(sigmas, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_sigmas(sigmas)


def test_table_arguments_out_of_range() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        shifted_sigmas(0, 3.0)
    for shift in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="above 0"):
            shifted_sigmas(10, shift)
    for last in (-1, 10):
        with pytest.raises(ValueError, match="steps 0 to 9"):
            compress_tail(shifted_sigmas(10), last, 0.5)
    for ratio in (0.0, 1.1, math.nan):
        with pytest.raises(ValueError, match="share"):
            compress_tail(shifted_sigmas(10), 3, ratio)


tables = st.one_of(
    st.builds(shifted_sigmas, st.integers(1, 40), st.floats(0.2, 12.0)),
    st.lists(st.floats(0.001, 1.0), min_size=1, max_size=30, unique=True).map(
        lambda levels: (*sorted(levels, reverse=True), 0.0)
    ),
)


@given(table=tables, ratio=st.floats(0.01, 1.0), data=st.data())
def test_compressed_tail_keeps_the_head_and_ends_at_zero(table, ratio: float, data) -> None:
    num_steps = len(table) - 1
    last = data.draw(st.integers(0, num_steps - 1))
    compressed = compress_tail(table, last, ratio)
    assert check_sigmas(compressed) == compressed
    assert compressed[: last + 2] == tuple(table[: last + 2])
    remaining = num_steps - last
    assert len(compressed) - 1 == last + max(int(remaining * ratio), min(remaining, 2))
    assert compress_tail(table, last, 1.0) == pytest.approx(table, abs=1e-12)


@pytest.mark.parametrize(("ratio", "evaluations"), [(0.4, 11), (0.2, 7)])
@pytest.mark.parametrize("shift", [1.0, 3.0, 7.0])
def test_flash_table_is_the_published_one(ratio: float, evaluations: int, shift: float) -> None:
    """25 steps, window 0-3: evenly spaced times from ``t[4]`` to 0, shifted, as in MixGRPO-Flash."""
    compressed = compress_tail(shifted_sigmas(25, shift), 3, ratio)
    assert len(compressed) - 1 == evaluations
    points = int(22 * ratio)
    times = [(1 - 4 / 25) * (1 - k / (points - 1)) for k in range(points)]
    expected = [shift * t / (1 + (shift - 1) * t) for t in times]
    assert compressed[4:] == pytest.approx(expected, abs=1e-12)


def test_one_evaluation_left_still_ends_at_zero() -> None:
    """The released code ends at sigma > 0 here: its grid of one point never reaches 0."""
    sigmas = shifted_sigmas(25, 3.0)
    assert compress_tail(sigmas, 20, 0.2) == (*sigmas[:22], 0.0)
    assert compress_tail(sigmas, 23, 0.2) == sigmas
    assert compress_tail(sigmas, 24, 0.2) == sigmas


@st.composite
def schedules(draw, kinds=WINDOW_KINDS) -> WindowSchedule:
    num_steps = draw(st.integers(2, 30))
    stop = draw(st.one_of(st.none(), st.integers(1, num_steps - 1)))
    end = num_steps - 1 if stop is None else stop
    size = draw(st.integers(1, end))
    return WindowSchedule(
        kind=draw(st.sampled_from(kinds)),
        size=size,
        num_steps=num_steps,
        stride=draw(st.integers(0, 5)),
        interval=draw(st.integers(1, 30)),
        start=draw(st.integers(0, end - size)),
        stop=stop,
        seed=draw(st.integers(0, 2**31)),
        decay_rate=draw(st.floats(0.0, 2.0)),
        decay_from=draw(st.integers(0, 20)),
    )


@given(schedule=schedules(), iteration=st.integers(0, 10**6))
def test_windows_are_full_and_never_hold_the_last_step(schedule: WindowSchedule, iteration: int) -> None:
    window = schedule.window(iteration)
    assert len(window) == schedule.size
    gaps = {b - a for a, b in pairwise(window)}
    assert gaps <= {1} if schedule.kind != "subset" else all(gap > 0 for gap in gaps)
    assert window[0] >= schedule.start
    assert window[-1] <= schedule.num_steps - 2
    if schedule.stop is not None:
        assert window[-1] < schedule.stop
    assert WindowSchedule(**vars(schedule)).window(iteration) == window


@settings(max_examples=50)
@given(schedule=schedules(kinds=("progressive", "decay", "exp_decay")))
def test_sliding_windows_move_by_the_stride_and_begin_again(schedule: WindowSchedule) -> None:
    positions = schedule.positions()
    cycle = sum(schedule.stay(position) for position in positions)
    visited = [schedule.window(k)[0] for k in range(cycle)]
    assert visited == sorted(visited)
    assert tuple(dict.fromkeys(visited)) == positions
    assert [visited.count(position) for position in positions] == [schedule.stay(p) for p in positions]
    assert schedule.window(cycle)[0] == schedule.start
    gaps = [b - a for a, b in pairwise(positions)]
    assert all(gap == schedule.stride for gap in gaps[:-1])
    assert all(0 < gap <= schedule.stride for gap in gaps[-1:])
    if 0 < schedule.stride <= schedule.size:
        covered = {i for position in positions for i in range(position, position + schedule.size)}
        stop = schedule.num_steps - 1 if schedule.stop is None else schedule.stop
        assert covered == set(range(schedule.start, stop))


def test_published_progressive_schedule() -> None:
    """MixGRPO: 25 steps, window 4, stride 1, 25 iterations each; 300 iterations reach position 11."""
    schedule = WindowSchedule("progressive", size=4, num_steps=25, stride=1, interval=25)
    assert [schedule.window(k) for k in (0, 24, 25, 299)] == [range(4), range(4), range(1, 5), range(11, 15)]
    assert schedule.positions() == tuple(range(21))
    assert schedule.window(20 * 25) == range(20, 24)
    assert schedule.window(21 * 25) == range(4)


def test_windows_without_overlap_end_flush() -> None:
    schedule = WindowSchedule("progressive", size=4, num_steps=12, stride=4)
    assert [schedule.window(k).start for k in range(4)] == [0, 4, 7, 0]


def test_frozen_windows_stay() -> None:
    frozen = WindowSchedule("frozen", size=4, num_steps=25, stride=3, interval=2, start=2)
    still = WindowSchedule("progressive", size=4, num_steps=25, stride=0, interval=2, start=2)
    assert {schedule.window(k) for schedule in (frozen, still) for k in range(100)} == {range(2, 6)}


def test_decay_shortens_the_stay_to_a_quarter() -> None:
    schedule = WindowSchedule("decay", size=4, num_steps=25, interval=24)
    stays = [schedule.stay(position) for position in schedule.positions()]
    assert (stays[0], stays[10], stays[-1]) == (24, 15, 6)
    assert stays == sorted(stays, reverse=True)
    assert {WindowSchedule("decay", size=1, num_steps=9, interval=3).stay(p) for p in range(8)} == {3, 2, 1}


def test_exponential_decay_is_the_published_formula() -> None:
    schedule = WindowSchedule("exp_decay", size=4, num_steps=25, interval=25, decay_rate=0.1, decay_from=13)
    assert [schedule.stay(p) for p in (0, 13, 14, 20)] == [25, 25, 23, 13]
    steep = WindowSchedule("exp_decay", size=1, num_steps=25, interval=25, decay_rate=10.0, decay_from=0)
    assert steep.stay(20) == 1


def test_random_windows_are_addressed_uniform_and_held() -> None:
    schedule = WindowSchedule("random", size=3, num_steps=10, stop=5, seed=1)
    starts = [schedule.window(k).start for k in range(3000)]
    counts = [starts.count(position) for position in range(3)]
    assert sum(counts) == 3000
    assert min(counts) > 900
    assert starts[1234] == schedule.window(1234).start
    other = WindowSchedule("random", size=3, num_steps=10, stop=5, seed=2)
    assert [other.window(k).start for k in range(50)] != starts[:50]
    held = WindowSchedule("random", size=3, num_steps=10, stop=5, seed=1, interval=7)
    assert [held.window(k).start for k in range(70)] == [s for s in starts[:10] for _ in range(7)]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"kind": "sliding"}, "progressive, random"),
        ({"size": 0}, "size is 0; use at least 1"),
        ({"size": 10}, "does not fit before step 9"),
        ({"size": 12}, "does not fit before step 9"),
        ({"start": 8}, "does not fit before step 9"),
        ({"stride": -1}, "stride is -1; use at least 0"),
        ({"interval": 0}, "interval is 0; use at least 1"),
        ({"start": -1}, "start is -1; use at least 0"),
        ({"stop": 10}, "stop is 10 with 10 steps"),
        ({"decay_rate": -0.5}, "decay_rate is -0.5"),
        ({"num_steps": 1, "size": 1}, "does not fit before step 0"),
    ],
)
def test_impossible_windows_are_refused_with_the_reason(arguments, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        WindowSchedule(**{"kind": "progressive", "size": 2, "num_steps": 10, **arguments})


def test_iterations_are_counted_from_zero() -> None:
    with pytest.raises(ValueError, match="counted from 0"):
        WindowSchedule("progressive", size=2, num_steps=10).window(-1)
