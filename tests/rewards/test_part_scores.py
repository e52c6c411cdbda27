"""Scores of the parts of completions: what a reward may return, and how the scores reach the caller."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from flowgrpo.rewards import Reward, RewardBatch, RewardError, RewardSet, RewardSpec, Scores
from flowgrpo.rewards.score_batches import join_scores
from flowgrpo.rewards.serving import wire
from tests.rewards.served import Served

NAN = math.nan
CUT = [["a", "bb"], ["c"], ["dd", "e", ""]]
TEXTS = ["".join(own) for own in CUT]


def lengths(completions: list[str], parts: list[list[str]]) -> Scores:
    """The length of each part; no score for an empty part, and none for a completion that is a single part."""
    scores = [None if len(own) == 1 else [float(len(text)) or None for text in own] for own in parts]
    return Scores([float(len(text)) for text in completions], parts=scores)


def set_of(*functions: Callable[..., Any]) -> RewardSet:
    return RewardSet([Reward(function, function.__name__) for function in functions])


def silent(completions: list[str]) -> list[float]:
    return [0.0] * len(completions)


def test_they_reach_their_rows_beside_other_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "batch_size", 2, raising=False)
    batch = set_of(silent, lengths).score(TEXTS, ["p"] * 3, {"parts": CUT})
    assert str(batch.parts) == str({"lengths": [[1.0, 2.0], None, [2.0, 1.0, NAN]]})
    assert batch.values.tolist() == [[0.0, 3.0], [0.0, 1.0], [0.0, 3.0]]
    assert [batch.record(row).get("parts") for row in range(3)] == [
        {"lengths": [1.0, 2.0]}, None, {"lengths": [2.0, 1.0, None]},
    ]  # fmt: skip


@pytest.mark.parametrize("made", [lambda rows: torch.tensor(rows), np.array, tuple])
def test_arrays_will_do(made: Callable[[Any], Any]) -> None:
    def pairs(completions: list[str]) -> Scores:
        return Scores([0.0, 0.0], parts=made([[0.5, 1.0], [2.0, 0.25]]))

    assert set_of(pairs).score(["x", "y"], ["p"] * 2).parts == {"pairs": [[0.5, 1.0], [2.0, 0.25]]}


@pytest.mark.parametrize(
    ("given", "message", "index"),
    [
        ([[1.0, 1.0]], "1 entries as `parts` of 2 samples", None),
        (3, "a int as `parts` of 2 samples", None),
        ([[1.0, 1.0], 0.5], r"0.5 \(float\) as `parts` of row 1 of the call; a list of floats, or None", 1),
        ([[1.0], [1.0]], "1 scores for the 2 parts of row 0 of the call", 0),
        ([[1.0, "x"], [1.0]], r"of a part, returned 'x' \(str\) in row 0", 0),
        ([[1.0, 1.0], [math.inf]], "an infinite score of a part in row 1", 1),
    ],
)
def test_what_are_no_scores_of_the_parts_stops_the_run(given: Any, message: str, index: int | None) -> None:
    def odd(completions: list[str], parts: list[list[str]]) -> Scores:
        return Scores([1.0] * 2, parts=given)

    with pytest.raises(RewardError, match=message) as caught:
        set_of(odd).score(TEXTS[:2], ["p"] * 2, {"parts": CUT[:2]})
    assert caught.value.index == index


def test_a_reward_of_parts_needs_a_cut() -> None:
    with pytest.raises(ValueError, match=r"'lengths' scores the `parts`.*parts: \{cut: lines\}"):
        set_of(lengths).score(TEXTS, ["p"] * 3)


def test_they_travel() -> None:
    scores = Scores(torch.ones(3), {}, [], parts=[[0.5, NAN], None, []])
    sent = wire.unpack_scores(wire.pack_scores(scores)).parts
    assert sent == [[0.5, None], None, []]
    assert not wire.unpack_scores(b'{"values": [1], "sub_scores": {}, "notes": []}').parts


def test_a_served_reward_gives_them() -> None:
    server = Served("equations")
    try:
        away = RewardSet([RewardSpec("remote", options={"url": server.url})])
        texts = ["1+1=2\nso", "1+1=3", "2+2=4\n2+2=5"]
        columns = {"parts": [text.splitlines(keepends=True) for text in texts], "answer": [None, "3", "5"]}
        want = str({"equations": [[1.0, NAN], [0.0], [1.0, 0.0]]})
        assert str(away.score(texts, ["p"] * 3, columns).parts) == want
        away.rewards[0].function.limits = wire.WireLimits(most_samples=2)
        assert str(away.score(texts, ["p"] * 3, columns).parts) == want
    finally:
        server.close()


def test_those_of_several_rounds_follow_each_other() -> None:
    def batch(**parts: list[list[float] | None]) -> RewardBatch:
        return RewardBatch(torch.zeros(2, 1), ("r",), torch.ones(1), {}, {}, {}, parts=parts)

    joined = join_scores([batch(r=[[1.0], None]), batch(), batch(r=[[2.0, 3.0], [4.0]])])
    assert joined.parts == {"r": [[1.0], None, None, None, [2.0, 3.0], [4.0]]}
