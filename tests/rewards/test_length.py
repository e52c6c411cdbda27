"""Length budgets against the formulas of their papers, worked out by hand."""

import math
from pathlib import Path

import pytest

from flowgrpo.rewards import RewardError, RewardSet, RewardSpec
from flowgrpo.rewards.text.length import Length


def texts(*lengths: int, right: str = "") -> list[str]:
    """Completions of given lengths whose answer is the given one."""
    mark = f"<answer>{right}</answer>" if right else ""
    return ["." * (length - len(mark)) + mark for length in lengths]


def score(completions: list[str], groups: list[int] | None = None, **options):
    rewards = RewardSet([RewardSpec("length", options=options)])
    count = len(completions)
    return rewards.score(completions, ["p"] * count, {"answer": ["1"] * count}, groups or [0] * count)


def test_linear_is_the_overlong_punishment_of_dapo() -> None:
    scores = Length(100, buffer=20)(texts(0, 80, 81, 90, 99, 100, 101), [""] * 7)
    assert scores.values == [0, 0, -1 / 20, -1 / 2, -19 / 20, -1, -1]
    assert scores.sub_scores == {"length": [0, 80, 81, 90, 99, 100, 101]}
    assert Length(100)(texts(100, 101), [""] * 2).values == [0, -1]


def test_linear_needs_no_groups_and_no_columns() -> None:
    batch = RewardSet([RewardSpec("length", options={"limit": 2})]).score(["a", "abc"], ["p", "p"])
    assert batch.values[:, 0].tolist() == [0, -1]


def test_words_and_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import CharDelimiterSplit
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = CharDelimiterSplit("-")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path)
    completions = [" a-b c\n", ""]
    assert Length(9, unit="words")(completions, ["", ""]).sub_scores["length"] == [2, 0]
    assert Length(9, unit="characters")(completions, ["", ""]).sub_scores["length"] == [7, 0]
    by_tokens = Length(1, unit="tokens", tokenizer=str(tmp_path))(["a-b-a", "a"], ["", ""])
    assert (by_tokens.sub_scores["length"], by_tokens.values) == ([3, 1], [-1, 0])


def test_cosine_at_its_ends_and_in_the_middle() -> None:
    completions = [*texts(50, 75, 100, right="1"), *texts(0, 50, 75, 100)]
    batch = score(completions, limit=100, mode="cosine", correct="answer", right=[2, 1], wrong=[-10, 0], exceeded=-7)
    quarter = (1 - math.sqrt(0.5)) / 2  # (1 + cos(3 pi / 4)) / 2
    expected = [1.5, 1 + quarter, -7, -10, -5, -10 * quarter, -7]
    assert batch.values[:, 0].tolist() == pytest.approx(expected, abs=1e-6)
    assert batch.sub_scores["length"]["correct"] == [1, 1, 1, 0, 0, 0, 0]


def test_cosine_has_the_published_values_if_none_are_given() -> None:
    batch = score([*texts(50, right="1"), *texts(0, 100)], limit=100, mode="cosine", correct="answer")
    assert batch.values[:, 0].tolist() == [1.5, -10, -10]


def test_relative_compares_with_the_right_completions_of_the_group() -> None:
    # Group 0: 30 and 50 are right, mean 40, deviation 10. Group 1: only 60 is right, deviation 0.
    completions = [*texts(30, 60, 50, right="1"), *texts(90, 10)]
    batch = score(completions, [0, 1, 0, 0, 1], mode="relative", correct="answer", alpha=0.5)
    low, high = 1 / (1 + math.e), 1 / (1 + 1 / math.e)
    assert batch.values[:, 0].tolist() == pytest.approx([-low / 2, -0.25, -high / 2, 0, 0], abs=1e-7)


def test_the_length_counts_only_where_enough_of_the_group_is_right() -> None:
    # Two of three are right in group 0, all in group 1.
    completions = [*texts(200, right="1"), *texts(200, right="1"), *texts(200), *texts(200, 30, right="1")]
    groups = [0, 1, 0, 0, 1]
    options = {"limit": 100, "correct": "answer"}
    assert score(completions, groups, tau=1, **options).values[:, 0].tolist() == [0, -1, 0, 0, 0]
    assert score(completions, groups, tau=0.3, **options).values[:, 0].tolist() == [-1, -1, -1, -1, 0]
    gated = score(completions, groups, tau=1.0, mode="cosine", wrong=[-1, 0], exceeded=-2, **options)
    assert gated.values[[0, 1, 2, 3], 0].tolist() == [1, -2, 0, 1]
    assert gated.sub_scores["length"]["counted"] == [0, 1, 0, 0, 1]
    relative = score(completions, groups, tau=1, mode="relative", correct="answer", alpha=1)
    assert relative.values[[0, 2, 3], 0].tolist() == [0, 0, 0]
    assert relative.values[1, 0].item() == pytest.approx(-1 / (1 + 1 / math.e))


def test_a_sample_without_correctness_gets_nan_and_does_not_count() -> None:
    reward = Length(5, tau=1, correct="answer")
    scores = reward(["<answer>1</answer>"] * 2, ["", ""], [0, 0], answer=["1", None])
    assert scores.values[0] == -1
    assert math.isnan(scores.values[1])
    assert math.isnan(scores.sub_scores["counted"][1])


def test_order_and_grouping_do_not_matter() -> None:
    completions = [*texts(30, 60, 50, 80, right="1"), *texts(90, 10)]
    groups, order = [0, 1, 0, 1, 0, 1], [5, 3, 1, 0, 2, 4]
    options = {"mode": "relative", "correct": "answer", "tau": 0.5}
    straight = score(completions, groups, **options).values[order]
    mixed = score([completions[k] for k in order], [7 - groups[k] for k in order], **options).values
    assert straight.tolist() == mixed.tolist()


def test_a_reward_with_its_own_groups_and_options_can_tell_what_is_right() -> None:
    batch = score(["3", "so 3", "44"], mode="relative", correct="majority", correct_options={"extract": "last_number"})
    assert batch.sub_scores["length"]["correct"] == [1, 1, 0]
    assert batch.sub_scores["length"]["votes"] == pytest.approx([2 / 3, 2 / 3, 1 / 3])


def test_what_the_reward_within_needs_is_checked_first_and_its_failure_is_traced() -> None:
    rewards = RewardSet([RewardSpec("length", options={"limit": 9, "mode": "cosine", "correct": "answer"})])
    with pytest.raises(ValueError, match=r"'length' takes `answer`, which the prompts do not have"):
        rewards.score(["1"], ["p"])
    with pytest.raises(RewardError, match=r"sample 1 .*the reward `correct` 'answer' failed on prompt 'q'") as caught:
        rewards.score(["1", "2"], ["p", "q"], {"answer": ["1", ""]})
    assert caught.value.index == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "limit is None; give a length above 0"),
        ({"limit": 0}, "limit is 0; give"),
        ({"limit": math.nan}, "limit is nan; give"),
        ({"limit": 5, "mode": "cos"}, r"mode is 'cos'; did you mean 'cosine'\?"),
        ({"limit": 5, "unit": "word"}, r"unit is 'word'; did you mean 'words'\?"),
        ({"limit": 5, "buffer": 6}, "buffer is 6, more than the limit 5"),
        (
            {"limit": 5, "mode": "cosine", "correct": "answer", "buffer": 1},
            "buffer has an effect only with `mode: linear`",
        ),
        ({"limit": 5, "mode": "cosine"}, "`mode: cosine` needs to know .* `correct: answer`"),
        ({"limit": 5, "tau": 1}, "`mode: linear` with tau needs to know"),
        ({"limit": 5, "tau": 1.5, "correct": "answer"}, r"tau is 1.5; give a share in \(0, 1\]"),
        ({"limit": 5, "correct": "answer"}, "`correct` has no effect"),
        ({"limit": 5, "mode": "relative", "correct": "answer"}, "limit has no effect"),
        ({"limit": 5, "unit": "tokens"}, "`unit: tokens` and `tokenizer` go together"),
        ({"limit": 5, "unit": "tokens", "tokenizer": "no/such/folder/here"}, "no tokenizer could be loaded"),
        ({"limit": 5, "right": 1}, "right is 1; give two numbers"),
        ({"limit": 5, "threshold": "1"}, "threshold is '1'"),
        ({"limit": 5, "alpha": -1}, "alpha is -1"),
        ({"limit": 5, "exceeded": math.inf}, "exceeded is inf"),
        ({"limit": 5, "tau": 1, "correct": "answr"}, r"`correct` cannot be made: .*did you mean 'answer'"),
        ({"limit": 5, "alpha": 0.3}, "alpha has an effect only with `mode: relative`"),
        ({"limit": 5, "right": [3, 1]}, "right has an effect only with `mode: cosine`"),
        ({"limit": 5, "exceeded": -2}, "exceeded has an effect only with `mode: cosine`"),
        ({"limit": 5, "threshold": 0.5}, "threshold has an effect only with `correct`"),
        ({"limit": 5, "correct_options": {}}, "correct_options has an effect only with `correct`"),
        ({"limit": 5, "tau": 1, "correct": 3}, "correct is 3 and correct_options None"),
    ],
)
def test_wrong_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Length(**options)
