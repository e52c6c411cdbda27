"""Advantages of segments, worked out by hand."""

import pytest
import torch

from flowgrpo.core.segment_credit import by_segment, gain_advantages, segment_advantages


def test_a_segment_gains_the_difference_of_values() -> None:
    found = segment_advantages([1.0, 0.0], [0.5, 0.5], [[2], []], [[0.25], []], [3, 2])
    assert found.tolist() == [[-0.25, -0.25, 0.75], [-0.5, -0.5, 0.0]]


def test_the_gains_add_up_to_the_reward_over_the_prompt() -> None:
    found = segment_advantages([0.7], [0.3], [[1, 2, 3]], [[0.9, 0.1, 0.6]], [4])
    assert float(found.sum()) == pytest.approx(0.4)


@pytest.mark.parametrize(("cuts", "values"), [([3], [0.5]), ([2, 1], [0.5, 0.5]), ([0], [0.5]), ([1], [])])
def test_cuts_outside_a_completion_are_refused(cuts: list[int], values: list[float]) -> None:
    with pytest.raises(ValueError, match="completion 0 has 3 tokens, cuts"):
        segment_advantages([1.0], [0.0], [cuts], [values], [3])


def test_no_completions() -> None:
    assert by_segment([], [], []).shape == (0, 0)


def test_later_gains_count_less() -> None:
    """The mean of the four rewards is 1/4: -0.05 and 0.75 in the first row, -0.45 and -0.25 in the second."""
    steps = torch.tensor([[0.2, 1.0], [-0.2, 0.0]])
    found = gain_advantages(steps, [0, 0], gamma=0.5, scale="none")
    assert found.flatten().tolist() == pytest.approx([0.325, 0.75, -0.575, -0.25])


def test_gains_are_divided_by_the_deviation_of_all_segments() -> None:
    """Of 1, 0, 1, 0 the deviation is 1/2. A group of other rewards does not change them."""
    steps = torch.tensor([[1.0, 0.0], [1.0, 0.0], [30.0, 10.0]])
    found = gain_advantages(steps, [0, 0, 1], eps=0.0, ddof=0)
    assert found.tolist() == [[0.0, -1.0], [0.0, -1.0], [0.0, -1.0]]


def test_a_shorter_row_has_no_later_segment() -> None:
    steps = torch.tensor([[0.6, torch.nan], [0.0, 0.3]])
    found = gain_advantages(steps, [0, 0], scale="none")
    assert found[0].tolist() == pytest.approx([0.3, 0.0])
    assert found[1].tolist() == pytest.approx([-0.3, 0.0])
