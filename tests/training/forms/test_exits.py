"""Thoughts that are cut and closed: early exits, answers at several budgets, and separate budgets."""

from pathlib import Path

import pytest
import torch

from flowgrpo.configs.load import load_recipe
from flowgrpo.training.text.forms.exits import anytime, elastic, exits
from tests.training.forms.scripted import Scripted, judged_by, marked, text_of
from tests.training.judging import credited
from tests.training.test_text import task_of
from tests.training.text_runs import trainer_of


def test_exits_of_one_completion() -> None:
    """The thoughts are `abcd`; three exits are at all places before the words that close them."""
    writer = Scripted({0: ["abcdwX$"], 1: ["r$", "s$", "t$"]}, group=4)
    found = exits(writer, closing="w", learned=False)
    assert [marked(one) for one in found] == ["AwR$", "ABwS$", "ABCwT$", "ABCDWX$"]
    assert [one.origin["exit"] for one in found] == [1, 2, 3, 7]
    assert all(one.ended for one in found)
    learned = exits(writer, closing="w")
    assert [marked(one) for one in learned] == ["AWR$", "ABWS$", "ABCWT$", "ABCDWX$"]
    assert learned[1].log_probs == [-0.01, -0.01, -0.5, -0.01, -0.01]


def test_places_of_exits_are_drawn_by_prompt_and_iteration() -> None:
    writer = Scripted({0: ["abcdefgh"], 1: ["r$"]}, group=3, prompts=2)
    places = [one.origin["exit"] for one in exits(writer, closing="w")]
    assert places == [one.origin["exit"] for one in exits(writer, closing="w")]
    for mine in (places[:2], places[3:5]):
        assert 1 <= mine[0] < mine[1] <= 7
    assert places[2] == places[5] == 8
    drawn = set()
    for key in range(20):
        writer.keys = [key, key + 100]
        drawn.add(tuple(one.origin["exit"] for one in exits(writer, closing="w")))
    assert len(drawn) > 10


def test_short_thoughts_have_fewer_exits() -> None:
    writer = Scripted({0: ["ab$", "$"], 1: ["r$"]}, group=4, prompts=2)
    found = exits(writer, closing="w")
    assert [text_of(one.ids) for one in found] == ["awr$", "ab$", "$"]


def test_the_first_correct_exit_is_best() -> None:
    """Rewards 0, 1, 1/2, 1/4 of mean 7/16."""
    writer = Scripted({0: ["abcdwX$"], 1: ["r$"]}, group=4)
    e, scores = judged_by(exits(writer, closing="w"), writer, [0.0, 1.0, 1.0, 1.0])
    assert credited(e, scores, "exits").tolist() == pytest.approx([-7 / 16, 9 / 16, 1 / 16, -3 / 16])


def test_answers_at_each_budget() -> None:
    """Budgets of 2, 4 and 6 tokens: thoughts that are closed after 3, that never end, and that end after 2."""
    writer = Scripted({0: ["abcwX$", "pqrstu", "yz$"], 1: ["k$", "l$", "m$", "n$"]}, group=3, max_tokens=6)
    found = anytime(writer, budgets=3, closing="w")
    assert [marked(one) for one in found] == [
        "ABwK$", "abwL$", "abCWM$", "abcwN$",
        "PQwK$", "pqwL$", "pqRSwM$", "pqrswN$", "pqrsTUwK$", "pqrstuwL$",
        "YZ$",
    ]  # fmt: skip
    assert [one.origin["budget"] for one in found] == [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 0]
    assert [one.origin["thought"] for one in found] == [2, 2, 4, 4, 2, 2, 4, 4, 6, 6, 3]
    assert all(any(one.own) for one in found)


def test_thoughts_and_answers_have_their_own_advantages() -> None:
    """Answers are worth 1/2, 1, 1 at the three budgets of the first thoughts, and 0 at the budgets of the second.

    Returns of the first are 5/6 and 2/3; V2 is 5/12 and 1/3, and V1 of the second stretch is 1/2 of 2/3.
    """
    writer = Scripted({0: ["abcwX$", "yz$"], 1: ["k$"]}, group=2, max_tokens=6)
    e, scores = judged_by(anytime(writer, budgets=3, closing="w"), writer, [1.0, 0.0, 1.0, 1.0, 0.0])
    found = credited(e, scores, "anytime")
    first, second = 5 / 12, 1 / 3
    assert found[0, :5].tolist() == pytest.approx([first, first, 0.5, 0.5, 0.5])
    assert found[1, 2:5].tolist() == pytest.approx([-0.5, -0.5, -0.5])
    assert found[2].tolist() == pytest.approx([second] * 4 + [0.0, 0.0])
    assert found[4].tolist() == pytest.approx([-first] * 3 + [0.0] * 3)


def test_single_answers_are_compared_with_other_completions() -> None:
    writer = Scripted({0: ["abcd"], 1: ["k$"]}, group=2, max_tokens=4, prompts=2)
    found = anytime(writer, budgets=2, answers=1, closing="w")
    assert len(found) == 8
    e, scores = judged_by(found, writer, [1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    answers = credited(e, scores, "anytime")[:, -1]
    assert answers[[1, 3, 5, 7]].tolist() == [0.0] * 4
    assert credited(e, scores, "anytime")[[0, 2], 3].tolist() == [0.5, -0.5]


def test_thoughts_and_answer_have_separate_budgets() -> None:
    """Three tokens of thoughts and two of the answer: cut, closed by the policy early and late, and two that end."""
    writer = Scripted({0: ["abcdefgh", "abwXYZ", "abcwX", "ab$", "abc$"], 1: ["uvxy"]}, group=5)
    found = elastic(writer, thinking=3, answer=2, closing="w")
    assert [marked(one) for one in found] == ["ABCwUV", "ABWXU", "ABCWUV", "AB$", "ABC$"]
    assert [one.origin for one in found] == [{"thoughts": "cut"}, {}, {}, {}, {}]
    assert [one.ended for one in found] == [False, False, False, True, True]
    early = elastic(Scripted({0: ["wabcd"], 1: ["u$"]}), thinking=3, answer=1, closing="w")
    assert [text_of(one.ids) for one in early] == ["wa"]


def test_evaluations_have_the_same_budgets(small_text: list[str], tmp_path: Path) -> None:
    trainer = trainer_of(small_text, tmp_path / "run", "rollout.form={name: elastic, thinking: 2, closing: '=='}")
    task, rows = task_of(trainer), trainer.data.heldout[:3]
    e = task.evaluation(rows, [1, 2, 3], trainer.clock)
    assert any(origin for origin in e.origins())
    for row, origin in enumerate(e.origins()):
        if origin:
            assert e.samples[row][2:4] == "=="


@pytest.mark.parametrize(
    "lines",
    [
        [
            "rollout.form={name: exits, closing: '=', answer: 3}",
            "credit={name: exits, success: -0.5}",
            "advantage=null",
        ],
        ["rollout.form={name: anytime, budgets: 3, closing: '=', answer: 3}", "credit=anytime", "advantage=null"],
        ["rollout.form={name: elastic, closing: '=='}"],
        ["rollout.form=elastic"],
    ],
)
def test_a_run(small_text: list[str], tmp_path: Path, lines: list[str]) -> None:
    """Longer than generation.max_tokens because of the words of the form, and exactly on-policy."""
    record = trainer_of(small_text, tmp_path / "run", *lines, "rollout.tokens=2000").iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert record["grad_norm"] > 0
    assert record["sampler_gap"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["rollout.form=exits", "rollout.group=1", "advantage=null"], "a completion and its exits a group"),
        (["rollout.form=exits", "rollout.group=1", "advantage=null"], "rollout.group is 1; use at least 2"),
        (["rollout.form={name: anytime, budgets: 7}"], "at most as many budgets as tokens"),
        (["rollout.form={name: elastic, closing: ''}"], "closing"),
        (["credit=anytime", "advantage=null"], "use rollout.form anytime"),
        (["credit=exits", "advantage=null", "rollout.form=anytime"], "use rollout.form exits"),
        (["rollout.form=exits", "credit={name: exits, eps: 0.1}", "advantage=null"], "nothing is divided"),
    ],
)
def test_what_does_not_fit_is_refused(lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe("text", lines)


def test_the_closing_words_are_not_trained(small_text: list[str], tmp_path: Path) -> None:
    trainer = trainer_of(small_text, tmp_path / "run", "rollout.form={name: elastic, thinking: 2, closing: '=='}")
    _, e = trainer.collect(0)
    cut = [row for row, origin in enumerate(e.origins()) if origin]
    assert cut
    assert torch.equal(e.trained(cut)[:, :4], torch.tensor([[True, True, False, False]] * len(cut)))
