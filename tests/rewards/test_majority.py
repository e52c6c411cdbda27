"""Votes of a group, counted by hand."""

import math

import pytest

from flowgrpo.rewards import RewardSet, RewardSpec
from flowgrpo.rewards.text.majority import Majority, clusters


def test_equal_answers_vote_together_in_their_own_group():
    completions = ["0.5", "7", "1/2", "8", r"\boxed{7}", "", "50%", "7"]
    groups = [0, 1, 0, 1, 0, 1, 0, 1]
    batch = RewardSet([RewardSpec("majority")]).score(completions, ["p"] * 8, groups=groups)
    assert batch.values[:, 0].tolist() == [1, 1, 1, 0, 0, 0, 1, 1]
    assert batch.sub_scores["majority"]["votes"] == [0.75, 0.5, 0.75, 0.25, 0.25, 0, 0.75, 0.5]
    assert batch.notes["majority"][4:6] == ["answer: 7", "no answer"]


def test_a_tie_has_several_right_answers_in_any_order():
    reward = Majority()
    assert reward(["1", "2", "1", "2", "3"], [""] * 5, [0] * 5).values == [1, 1, 1, 1, 0]
    assert reward(["3", "2", "1", "2", "1"], [""] * 5, [0] * 5).values == [0, 1, 1, 1, 1]
    assert reward(["1", "2", "3"], [""] * 3, [0] * 3).values == [1, 1, 1]


def test_a_group_without_a_majority_gets_nan():
    values = Majority(least=0.5)(
        ["1", "1", "2", "", "5", "6", "7", "", ""], [""] * 9, [0, 0, 0, 0, 1, 1, 1, 2, 2]
    ).values
    assert values[:4] == [1, 1, 0, 0]
    assert all(map(math.isnan, values[4:]))
    assert all(map(math.isnan, Majority()(["", ""], [""] * 2, [0, 0]).values))


def test_the_rule_of_extraction_is_that_of_answer():
    assert Majority("last_number")(["is 3", "so 3", "4"], [""] * 3, [0] * 3).values == [1, 1, 0]


def test_the_share_of_the_group_is_the_value():
    """EMPO: the mean over a group is the sum of squared shares, and grows as the entropy of the answers falls."""
    scores = Majority(share=True)(["0.5", "7", "1/2", "", "50%", "7", "7", "7"], [""] * 8, [0, 1, 0, 0, 0, 1, 1, 1])
    assert scores.values == [0.75, 1, 0.75, 0, 0.75, 1, 1, 1]
    undecided = Majority(share=True, least=0.6)(["1", "1", "2", "3"], [""] * 4, [0] * 4).values
    assert all(map(math.isnan, undecided))


def test_answers_of_common_words_are_one_cluster_in_any_order():
    """ "the red house" and "a red house" share 2 of 4 words, "a red house" and "a red barn" too; the ends share 1."""
    texts = ["a red house", "the red house", "a red barn", "a blue sea"]
    assert clusters(sorted(texts), 0.5) == dict.fromkeys(texts[:3], "a red barn") | {"a blue sea": "a blue sea"}
    assert clusters(sorted(texts), 0.51) == {text: text for text in texts}
    reward = Majority(share=True, alike=0.5)
    scores = reward([*texts, "3", "3.0"], [""] * 6, [0] * 6)
    assert scores.values == [pytest.approx(value) for value in (3 / 6, 3 / 6, 3 / 6, 1 / 6, 2 / 6, 2 / 6)]
    assert scores.answers == ["a red barn", "a red barn", "a red barn", "a blue sea", "3", "3"]
    again = reward(["3.0", *texts[::-1], "3"], [""] * 6, [0] * 6)
    assert again.values == [pytest.approx(value) for value in (2 / 6, 1 / 6, 3 / 6, 3 / 6, 3 / 6, 2 / 6)]
    # Each group has clusters of its own: without the link, the ends are not alike.
    assert reward(texts[:3], [""] * 3, [0, 1, 1]).values == [1, 0.5, 0.5]


@pytest.mark.parametrize(
    "options", [{"extract": "first"}, {"least": 1.5}, {"least": True}, {"share": 1}, {"alike": -1}]
)
def test_wrong_options_are_named(options):
    with pytest.raises(ValueError, match=rf"majority: {next(iter(options))} is {next(iter(options.values()))!r}"):
        Majority(**options)


def test_groups_are_needed():
    with pytest.raises(ValueError, match="compares whole groups"):
        RewardSet([RewardSpec("majority")]).score(["1"], ["p"])


@pytest.mark.parametrize(("least", "votes", "size"), [(0.28, 7, 25), (0.14, 7, 50), (0.56, 14, 25)])
def test_a_share_that_is_just_enough_is_enough(least: float, votes: int, size: int) -> None:
    texts = ["1"] * votes + [f"{k}" for k in range(2, size - votes + 2)]
    assert Majority(least=least)(texts, [""] * size, [0] * size).values[0] == 1
    assert math.isnan(Majority(least=least + 0.01)(texts, [""] * size, [0] * size).values[0])
