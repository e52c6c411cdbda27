"""Rewards for calls of tools: matching one with one by hand, parts, the factor of OTC, and options that are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from flowgrpo.rewards.base import RewardSpec
from flowgrpo.rewards.registry import build
from flowgrpo.rewards.runner import RewardSet
from flowgrpo.rewards.text.tool_calls import calls_in, likeness
from flowgrpo.rewards.text.tool_match import ToolMatch
from flowgrpo.rewards.text.tool_thrift import efficiency


def test_calls_are_read_between_their_marks() -> None:
    assert calls_in("a<tool>1\n+1</tool>2<tool>x") == ["1\n+1"]
    assert calls_in("1+1=2 3=", "", "=") == ["1+1", "2 3"]
    assert calls_in("c1=2=c3=", "c", "=") == ["1", "3"]


@pytest.mark.parametrize(
    ("call", "other", "alike"),
    [
        ("1 + 1", "1+1", 1.0),
        ("1+1", "1+2", 0.0),
        ('{"name": "f", "arguments": {"a": 1, "b": 2}}', '{"arguments": {"b": 2, "a": 1}, "name": "f"}', 1.0),
        ('{"name": "f", "arguments": {"a": 1, "b": 2}}', '{"name": "f", "arguments": {"a": 1, "c": 2}}', 2 / 3),
        ('{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "arguments": {"a": 1}}', 0.0),
        ('{"name": "f"}', '{"name": "f", "arguments": {}}', 1.0),
        ('{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": [2]}', 0.5),
        ('{"name": "f"}', "f", 0.0),
        ("[" * 10_000, "f", 0.0),
    ],
)
def test_how_alike_calls_are(call: str, other: str, alike: float) -> None:
    assert likeness(call, other) == pytest.approx(alike)


def call(**arguments: int) -> str:
    return '{"name": "f", "arguments": {' + ", ".join(f'"{k}": {v}' for k, v in arguments.items()) + "}}"


def test_the_matching_is_the_best_in_sum_and_not_greedy() -> None:
    """The first call is like both references (2/3 and 1), and the second only like the second reference (2/3)."""
    wanted = [call(a=1, b=1), call(a=1, c=1)]
    made = [call(a=1, c=1), call(a=1, c=2)]
    assert likeness(made[0], wanted[0]) == pytest.approx(2 / 3)
    assert likeness(made[1], wanted[0]) == pytest.approx(2 / 3)
    assert likeness(made[1], wanted[1]) == pytest.approx(3 / 4)
    # 1 + 2/3 is more than 2/3 + 3/4.
    assert ToolMatch().matched(made, wanted) == pytest.approx([1.0, 2 / 3])
    assert ToolMatch(unmatched=-0.5).matched(["x", *made, "x"], wanted) == pytest.approx([-0.5, 1.0, 2 / 3, -0.5])
    # Taking the best pair first would leave 0 for the other.
    assert ToolMatch().matched([call(a=1, b=1), call(a=1, b=2)], [call(a=1, b=1)]) == pytest.approx([1.0, 0.0])


def test_a_turn_has_the_score_of_its_calls() -> None:
    reward = ToolMatch("c", "=", unmatched=-0.25)
    parts = [["c1=", "c9=", "c2=c2= 5"], ["none"], ["c1="], ["3"]]
    scores = reward(["".join(own) for own in parts], [""] * 4, [["1", "2"], ["1"], None, []], parts)
    assert scores.parts == [[1.0, -0.25, 0.75], [0.0], None, [0.0]]
    assert scores.values[:2] == pytest.approx([1.5 / 4, 0.0])
    assert math.isnan(scores.values[2])
    assert scores.values[3] == 1.0
    assert scores.sub_scores == {"calls": [4.0, 0.0, 1.0, 0.0]}
    whole = reward(["c1=c9=c2=c2= 5"], [""], [["1", "2"]])
    assert whole.values == pytest.approx([1.5 / 4])
    assert whole.parts == ()


def test_the_factor_of_calls() -> None:
    assert efficiency(0, 0, 1.0) == 1.0
    assert efficiency(1, 0, 1.0) == pytest.approx(math.cos(math.pi / 3))  # 1/2
    assert efficiency(2, 0, 4.0) == pytest.approx(math.cos(math.pi / 4))
    assert efficiency(2, 2, 1.0) == pytest.approx(1.0)
    assert efficiency(3, 1, 1.0) == pytest.approx(math.sin(3 * math.pi / 4))
    assert efficiency(2, 1, 1.0) == pytest.approx(math.sqrt(3) / 2)
    found = [efficiency(m, 2, 1.0) for m in range(2, 9)]
    assert found == sorted(found, reverse=True)


def thrift(**options: Any) -> RewardSet:
    return RewardSet([build(RewardSpec("tool_thrift", options={"begin": "c", "end": "=", **options}))])


def test_right_completions_are_compared_within_their_group() -> None:
    """In group 0 one call is enough, and two get sin(2 pi / 3); the wrong one with no call is no measure."""
    texts = ["c=5", "c=c=5", "4", "5", "c=5", "x"]
    rewards = thrift(correct_options={"extract": "last_number"}, scale=2.0)
    scored = rewards.score(texts, [""] * 6, {"answer": ["5", "5", "5", "5", "5", None]}, [0, 0, 0, 1, 1, 1])
    assert scored.values[:5, 0].tolist() == pytest.approx([2.0, math.sqrt(3), 0.0, 2.0, 1.0])
    assert math.isnan(scored.values[5, 0])
    subs = scored.sub_scores["tool_thrift"]
    assert subs["calls"] == [1.0, 2.0, 0.0, 0.0, 1.0, 0.0]
    assert subs["correct"][:5] == [1.0, 1.0, 0.0, 1.0, 1.0]
    rewards.close()


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("tool_match", {"end": ""}, "tool_match: begin is '<tool>' and end ''"),
        ("tool_match", {"unmatched": 0.5}, "give a number of at most 0"),
        ("tool_thrift", {"begin": 3}, "tool_thrift: begin is 3"),
        ("tool_thrift", {"smooth": 0}, "smooth is 0; give a number above 0"),
        ("tool_thrift", {"scale": True}, "scale is True; give a number above 0"),
        ("tool_thrift", {"threshold": "high"}, "threshold is 'high'; give a number"),
        ("tool_thrift", {"correct": 5}, "correct is 5 and correct_options None; give the name of a reward"),
        ("tool_thrift", {"correct": "nothing"}, "the reward 'nothing' for `correct` cannot be made"),
    ],
)
def test_wrong_options_are_refused(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match="tool_") as caught:
        build(RewardSpec(name, options=options))
    assert said in str(caught.value)
    with pytest.raises(ValueError, match="give a list of texts, or null"):
        ToolMatch()(["a"], ["b"], ["c"])
