"""Groups with several budgets of tokens."""

import math
from pathlib import Path

import pytest

from flowgrpo.configs.load import load_recipe
from flowgrpo.training.text.forms.subgroups import subgroups
from tests.training.forms.scripted import Scripted, judged_by, marked
from tests.training.judging import credited
from tests.training.text_runs import trainer_of


def test_each_budget_has_a_subgroup() -> None:
    writer = Scripted({0: ["abcdefgh", "xy$"]}, group=4, max_tokens=8, prompts=2)
    found = subgroups(writer, budgets=[0.5, 1.0], opening="t{budget}:")
    assert [marked(one) for one in found] == ["t4:ABCDEFGH", "t4:XY$", "t8:ABCDEFGH", "t8:XY$"] * 2
    assert [one.origin["budget"] for one in found] == [4, 4, 8, 8] * 2
    assert [sum(one.own) for one in found] == [8, 3] * 4
    cut = subgroups(writer, budgets=[0.5, 1.0], opening="t{budget}:", cut=True)
    assert [marked(one) for one in cut[:4]] == ["t4:ABCD", "t4:XY$", "t8:ABCDEFGH", "t8:XY$"]
    bare = subgroups(writer, budgets=[0.25, 0.5, 1.0], opening="")
    assert [one.origin["budget"] for one in bare[:4]] == [2, 2, 4, 8]
    twice = subgroups(writer, budgets=[0.25, 0.5, 0.5, 1.0], opening="")
    assert [one.origin["budget"] for one in twice[:4]] == [2, 4, 4, 8]


def test_completions_are_compared_by_budget() -> None:
    """Of 8 tokens: budget 4 is worth at most cos(pi/4), and 8 tokens are worth 0 minus the distances."""
    writer = Scripted({0: ["abcdefgh", "wxy$"]}, group=4, max_tokens=8)
    e, scores = judged_by(subgroups(writer, budgets=[0.5, 1.0], opening="t:"), writer, [1.0, 1.0, 1.0, 0.0])
    whole = credited(e, scores, {"name": "subgroups", "scale": "none"})
    worth = [-0.125, math.sqrt(0.5), 0.0, 0.0]
    mean = sum(worth) / 4
    assert whole.tolist() == pytest.approx([one - mean for one in worth], abs=1e-6)
    within = credited(e, scores, {"name": "subgroups", "scale": "none", "between": 0.0, "price": 0.0})
    half = math.sqrt(0.5) / 2
    assert within.tolist() == pytest.approx([-half, half, 0.0, 0.0], abs=1e-6)


def test_a_run(small_text: list[str], tmp_path: Path) -> None:
    lines = ["rollout.form={name: subgroups, budgets: [0.5, 1.0]}", "credit=subgroups", "advantage=null"]
    record = trainer_of(small_text, tmp_path / "run", *lines, "rollout.tokens=2000").iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert record["grad_norm"] > 0


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["rollout.form=subgroups", "rollout.group=3"], "4 budgets, and rollout.group is 3"),
        (["rollout.form={name: subgroups, budgets: [0.5]}"], "budgets"),
        (["rollout.form={name: subgroups, budgets: [0.5, 1.5]}"], "budgets"),
    ],
)
def test_what_does_not_fit_is_refused(lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe("text", lines)
