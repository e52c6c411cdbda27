"""Noise tables."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowgrpo.samplers.schedules import check_sigmas, compress_tail, shifted_sigmas


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
