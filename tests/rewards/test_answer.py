"""The reward `answer` through the runner, as a run calls it."""

import math

import pytest

from flowgrpo.rewards import RewardError, RewardSet, RewardSpec
from flowgrpo.rewards.text.answer import Answer


def test_values_sub_scores_and_notes() -> None:
    rewards = RewardSet([RewardSpec("answer")])
    batch = rewards.score(
        ["12", "so 12", r"so \boxed{12.0}", "", "Paris", "1,000"],
        ["p"] * 6,
        {"answer": ["12", "12", 12, "12", ["Rome", "paris."], 1000.0]},
    )
    assert batch.values[:, 0].tolist() == [1, 0, 1, 0, 1, 1]
    assert batch.sub_scores == {"answer": {"found": [1, 1, 1, 0, 1, 1]}}
    assert batch.notes["answer"][2:4] == ["answer: 12.0", "no answer"]


def test_a_sample_without_a_reference_gets_nan() -> None:
    scores = Answer(partial=True)(["1", "1"], ["p", "p"], [None, "1"])
    assert math.isnan(scores.values[0])
    assert math.isnan(scores.sub_scores["exact"][0])
    assert scores.values[1] == 1


def test_partial_credit_is_that_of_the_nearest_accepted_answer() -> None:
    scores = Answer(partial=True)(["124", "1/2", "", "x"], [""] * 4, ["123", 0.5, "12", ["xyz", "y"]])
    assert scores.values == [2 / 3, 1, 0, 1 / 3]
    assert scores.sub_scores["exact"] == [0, 1, 0, 0]


def test_extraction_rules() -> None:
    text = ["I get 5, then 7"]
    assert Answer("last_number")(text, [""], ["7"]).values == [1]
    assert Answer("marked")(text, [""], ["7"]).values == [0]
    assert Answer()(text, [""], ["i get 5,  then 7"]).values == [1]


def test_a_reference_may_be_a_worked_solution() -> None:
    assert Answer()(["3"], [""], [r"Add them up: \boxed{3}"]).values == [1]


def test_long_answers_are_shortened_in_the_notes() -> None:
    assert Answer()(["9" * 1000], [""], ["1"]).notes == ["answer: " + "9" * 200 + "..."]


@pytest.mark.parametrize("reference", ["", [], {"a": 1}, True, ["1", None]])
def test_a_reference_of_another_kind_stops_the_run(reference: object) -> None:
    with pytest.raises(RewardError, match=r"the column `answer` has"):
        RewardSet([RewardSpec("answer")]).score(["1"], ["p"], {"answer": [reference]})


def test_the_column_is_needed() -> None:
    with pytest.raises(ValueError, match=r"takes `answer`, which the prompts do not have"):
        RewardSet([RewardSpec("answer")]).score(["1"], ["p"], {"answers": ["1"]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extract": "last_numbers"}, r"extract is 'last_numbers'; did you mean 'last_number'\? Write one of whole"),
        ({"partial": 1}, "partial is 1; give true or false"),
        ({"part": True}, "no option 'part'; did you mean 'partial'"),
    ],
)
def test_wrong_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardSet([RewardSpec("answer", options=options)])
