"""The share of a text that is digits, counted by hand."""

import pytest

from flowgrpo.rewards import RewardSet, RewardSpec


def test_share_of_the_characters_that_are_digits():
    batch = RewardSet([RewardSpec("digit_share")]).score(["", "12", "a1 2", "abc", "²٣1\n"], ["p"] * 5)
    assert batch.values[:, 0].tolist() == [0, 1, 0.5, 0, 0.25]


def test_it_has_no_options():
    with pytest.raises(ValueError, match="no option"):
        RewardSet([RewardSpec("digit_share", options={"base": 16})])
