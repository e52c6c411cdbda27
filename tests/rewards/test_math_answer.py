"""Equality of formulas, by the package itself, and formulas that cannot be computed."""

import importlib.util
import math

import pytest

from flowgrpo.rewards import MissingDependency, RewardSet, RewardSpec
from flowgrpo.rewards.text.math_answer import MathAnswer

# The module shares one reward, because it starts a process.
pytestmark = pytest.mark.slow

EQUAL = [
    (r"\boxed{x^2-1}", "(x-1)(x+1)"),
    (r"\boxed{\frac{\sqrt{2}}{2}}", r"1/\sqrt{2}"),
    (r"\boxed{\{2, 1\}}", r"\{1, 2\}"),
    ("<answer>0.5</answer>", r"\frac{1}{2}"),
    ("$2\\cdot 3$", "6"),
]
UNEQUAL = [(r"\boxed{x^2+1}", "(x-1)(x+1)"), ("7", "6"), (r"\boxed{\frac{", "6"), ("", "6")]


@pytest.fixture(scope="module")
def reward():
    pytest.importorskip("math_verify")
    made = MathAnswer(seconds=30)
    yield made
    made.close()


def test_formulas(reward: MathAnswer) -> None:
    completions, answers = map(list, zip(*EQUAL, *UNEQUAL))
    scores = reward(completions, [""] * 9, answers)
    assert scores.values == [1] * 5 + [0] * 4
    assert scores.sub_scores["exact"] == [0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert scores.sub_scores["found"] == [1, 1, 1, 1, 1, 1, 1, 0, 0]


def test_no_reference_several_references_and_a_text(reward: MathAnswer) -> None:
    scores = reward(["4", "2+2", "Paris"], [""] * 3, [None, ["5", "4"], "paris"])
    assert math.isnan(scores.values[0])
    assert scores.values[1:] == [1, 1]


def test_what_cannot_be_computed_is_given_up() -> None:
    pytest.importorskip("math_verify")
    reward = MathAnswer(seconds=1)
    scores = reward(["9^{9^{9^{9^9}}}", "x" * 1001], [""] * 2, ["81", "x"])
    assert scores.values == [0, 0]
    assert scores.notes[0].endswith("; the comparison was given up: it took longer than 1 s")
    assert scores.notes[1].endswith("; 1001 characters are too long for a formula")
    reward.close()


def test_a_missing_package_is_named_before_anything_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"'math' needs .* pip install 'math-verify\[antlr4_13_2\]'"):
        RewardSet([RewardSpec("math")])


@pytest.mark.parametrize("options", [{"extract": "all"}, {"seconds": -1}, {"memory_mb": 1}])
def test_wrong_options_are_named(options: dict) -> None:
    with pytest.raises(ValueError, match=rf"math: {next(iter(options))} is {next(iter(options.values()))!r}"):
        MathAnswer(**options)
