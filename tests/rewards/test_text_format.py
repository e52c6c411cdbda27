"""Patterns and tags, with patterns that would never end."""

import pytest

from flowgrpo.rewards import RewardSet, RewardSpec
from flowgrpo.rewards.text.text_format import LONGEST_TEXT, TextFormat

GOOD = "<think>2+2</think>\n<answer>4</answer>"


@pytest.mark.parametrize(
    ("text", "tags", "order", "partial", "strict"),
    [
        (GOOD, 1, 1, 1, 1),
        ("say " + GOOD + " end", 1, 1, 1, 1),
        ("<answer>4</answer><think>2</think>", 1, 0, 0.5, 0),
        ("<think>2<answer>4</answer></think>", 1, 0, 0.5, 0),
        ("<think>2</think>4", 0.5, 0, 0.25, 0),
        ("<think>2</think><answer>4</answer><answer>5</answer>", 0.5, 0, 0.25, 0),
        ("</think>2<think><answer>4</answer>", 0.5, 0, 0.25, 0),
        ("", 0, 0, 0, 0),
    ],
)
def test_tags(text: str, tags: float, order: float, partial: float, strict: float) -> None:
    scores = TextFormat(tags=["think", "answer"], partial=True)([text], [""])
    assert (scores.sub_scores, scores.values) == ({"tags": [tags], "order": [order]}, [partial])
    assert TextFormat(tags=["think", "answer"])([text], [""]).values == [strict]


def test_one_tag_has_no_order_to_miss() -> None:
    assert TextFormat(tags=["a"], partial=True)(["<a></a>", "<a>"], ["", ""]).values == [1, 0]


@pytest.mark.slow
def test_pattern_and_tags_through_the_runner() -> None:
    options = {"pattern": r"<think>.*</think>\s*<answer>\d+</answer>", "tags": ["answer"], "partial": True}
    rewards = RewardSet([RewardSpec("text_format", options=options)])
    batch = rewards.score([f"\n{GOOD} ", f"so {GOOD}", "<think>\n</think><answer>4"], ["p"] * 3)
    assert batch.sub_scores["text_format"] == {"pattern": [1, 0, 0], "tags": [1, 1, 0], "order": [1, 1, 0]}
    torch_values = batch.values[:, 0].double().tolist()
    assert torch_values == pytest.approx([1, 2 / 3, 0], abs=1e-7)
    rewards.close()


def test_sections_refer_to_each_other() -> None:
    """Two of three references are made in the first; a section that is there twice refers to nothing."""
    asked = {"think": ["facts"], "answer": ["think", "facts"]}
    reward = TextFormat(tags=["facts", "think", "answer"], references=asked, partial=True)
    first = "<facts>[think]</facts><think>by [facts]</think><answer>7, see [facts]</answer>"
    twice = "<facts>a</facts><think>[facts]</think><think></think><answer>[think] [facts]</answer>"
    scores = reward([first, twice, "[facts]"], [""] * 3)
    assert scores.sub_scores["references"] == pytest.approx([2 / 3, 2 / 3, 0])
    assert scores.values == pytest.approx([(1 + 1 + 2 / 3) / 3, (2 / 3 + 0 + 2 / 3) / 3, 0])
    strict = TextFormat(tags=["a", "b"], references={"b": ["a"]}, reference="see {tag}:")
    assert strict(["<a></a><b>see a: 1</b>", "<a></a><b>[a]</b>"], ["", ""]).values == [1, 0]


@pytest.mark.slow
def test_a_pattern_that_backtracks_for_ever_is_given_up() -> None:
    reward = TextFormat(pattern="(a+)+b", seconds=0.5)
    scores = reward(["a" * 50, "aab", "x" * (LONGEST_TEXT + 1)], [""] * 3)
    assert scores.values == [0, 1, 0]
    assert scores.notes[0] == "the pattern was given up: it took longer than 0.5 s"
    assert scores.notes[1:] == ["", "100001 characters are too long for the pattern"]
    reward.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give `pattern`, a regular expression, or `tags`"),
        ({"pattern": "(a"}, "pattern '\\(a' is not a regular expression: missing \\)"),
        ({"pattern": 3}, "pattern 3 is not a regular expression"),
        ({"tags": "think"}, "tags is 'think'; give different names"),
        ({"tags": ["<think>"]}, "without brackets"),
        ({"tags": ["a", "a"]}, "give different names"),
        ({"tags": ["a"], "seconds": 0}, "seconds is 0; give a number above 0"),
        ({"tags": ["a"], "partial": "yes"}, "partial is 'yes'; give true or false"),
        ({"tags": ["a", "b"], "references": {"b": ["c"]}}, "the tags are a, b"),
        ({"tags": ["a", "b"], "references": {"b": "a"}}, "give for a tag the other tags"),
        ({"tags": ["a"], "references": {"a": ["a"]}}, "the other tags"),
        ({"pattern": "x", "references": {"a": ["b"]}}, "the tags are none"),
        ({"tags": ["a"], "reference": "see above"}, "write {tag} for the name"),
    ],
)
def test_wrong_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextFormat(**options)
