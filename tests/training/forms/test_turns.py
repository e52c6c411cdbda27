"""Turns with a tool: where a call ends, what is trained, where completions branch, and that evaluations have turns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.rewards.base import RewardSpec
from flowgrpo.rewards.runner import RewardSet
from flowgrpo.text.cutting import cut_completions
from flowgrpo.text.model import LanguageModel
from flowgrpo.training.credit.credits import Judged
from flowgrpo.training.credit.pooling import asked
from flowgrpo.training.credit.token_credits import parts
from flowgrpo.training.data import PromptRow
from flowgrpo.training.session import start
from flowgrpo.training.text.forms.tools import calculator
from flowgrpo.training.text.forms.turns import Talk, branches, entropy, turns
from flowgrpo.training.text.text_task import TextTask
from tests.parts.own_parts import write_part
from tests.training.forms.scripted_policy import scripted
from tests.training.text_runs import trainer_of

SUM = {"prompt": "12+30=", "answer": "42"}
MARKS: dict[str, Any] = {"begin": "c", "end": "=", "answer": " {answer} "}


@pytest.mark.parametrize(
    ("call", "value"),
    [
        ("2+3", "5"), ("2 - 3*4", "-10"), ("-2*-3-1", "5"), ("7=", "7"), ("", "42"), ("2+", "error"), ("a", "error"),
        ("1" * 31, "error"), ("0-5--5", "0"), ("007*2", "14"), ("2**3", "8"), ("(2 + 5) / 2", "7/2"), ("-7 // 2", "-4"),
        ("-7 % 4", "1"), ("0.5*3", "3/2"), ("2*3 < 7", "yes"), ("1/0", "error"), ("9**64", "error"), ("1e5", "error"),
        ("0x10", "error"), ("abs(1)", "error"), ("'a'", "error"), ("1_0", "error"), ("()", "error"), ("2(3)", "error"),
    ],
)  # fmt: skip
def test_the_calculator(call: str, value: str) -> None:
    assert calculator(call, PromptRow(0, "12+30=")) == value


def calling(before: str, number: int) -> str:
    """Two calls; the second has text after it that must go; then the answer."""
    return {"12+30=": "so c1+1=99", "12+30=so c1+1= 2 ": "c12+30=c", "12+30=so c1+1= 2 c12+30= 42 ": "is 42"}[before]


def test_the_tool_answers_within_the_completion_and_its_words_are_not_trained(language: LanguageModel) -> None:
    writer = scripted(language, [SUM], calling, group=1)
    [one] = turns(writer, **MARKS)
    assert writer.text(one) == "so c1+1= 2 c12+30= 42 is 42"
    words = "".join(" " if own else "t" for own in one.own)
    assert words == " " * 8 + "ttt" + " " * 7 + "tttt" + " " * 6
    assert [p == 0.0 for p in one.log_probs] == [not own for own in one.own]
    assert one.ended
    assert one.origin == {"calls": 2}
    [less] = turns(scripted(language, [SUM], calling, group=1), calls=1, **MARKS)
    assert writer.text(less) == "so c1+1= 2 c12+30=c"


def test_an_answer_without_room_is_left_out(language: LanguageModel) -> None:
    """The answer of the first call would be the tokens 9 to 11, and a token must follow."""
    for most, text in ((12, "so c1+1= 2 c"), (11, "so c1+1=99")):
        writer = scripted(language, [SUM], calling, group=1, max_tokens=most)
        [one] = turns(writer, **MARKS)
        assert writer.text(one) == text
        assert len(one.ids) <= most


def test_a_call_may_begin_where_the_turn_begins() -> None:
    talk = Talk(calculator, "", "=", "{answer}", 1)
    assert [talk.call(text) for text in ("1+1=2", "=", "1+1")] == ["1+1", "", None]
    talk = Talk(calculator, "c", "=", "{answer}", 1)
    assert [talk.call(text) for text in ("1=c2=3", "1=", "c1")] == ["2", None, None]


def branching(before: str, number: int) -> str:
    return ["c=", "no"][number % 2] if before == "12+30=" else ["42", "41", "40"][number % 3]


def chance(text: str) -> Sequence[float]:
    return [-3.0, -1.0, -1.0] if text in ("42", "41", "40") else [-1.0] * (len(text) + 1)


@pytest.mark.parametrize(("rise", "branched"), [(0.9, 2), (1.1, 0)])
def test_completions_branch_where_an_answer_makes_unsure(language: LanguageModel, rise: float, branched: int) -> None:
    """The first two tokens after the answer have mean -log p of 2, and the tokens of the first turn of 1."""
    writer = scripted(language, [SUM], branching, group=5, chance=chance)
    options: dict[str, Any] = {"first": 2, "tokens": 2, "rise": rise, "width": 2, **MARKS}
    found = branches(writer, **options)
    assert [writer.text(one) for one in found[:2]] == ["c= 42 42", "no"]
    assert sum("branched" in one.origin for one in found) == branched
    assert len(found) == 5
    if branched:
        assert [writer.text(one) for one in found[2:4]] == ["c= 42 42", "c= 42 41"]
        assert [one.origin for one in found[2:4]] == [{"calls": 1, "branched": 6}] * 2
        assert found[2].own == [True] * 2 + [False] * 4 + [True] * 3


def test_no_branches_in_evaluations_and_none_beyond_the_group(language: LanguageModel) -> None:
    options: dict[str, Any] = {"first": 1, "tokens": 1, "width": 9, **MARKS}
    writer = scripted(language, [SUM], branching, group=3, chance=chance)
    assert [writer.text(one) for one in branches(writer, **options)] == ["c= 42 42", "c= 42 42", "c= 42 41"]
    writer = scripted(language, [SUM], branching, group=2, chance=chance, iteration=None)
    assert [writer.text(one) for one in branches(writer, **options)] == ["c= 42 42", "no"]
    assert entropy([]) == 0.0


def test_a_turn_is_credited_with_its_own_calls_and_with_the_answer(language: LanguageModel) -> None:
    """MatchTIR: the right call gives its turn 1, and the right answer gives both turns 1/2 over the group's mean.

    With R = 1 + 1/2 and 1/2 for the turns of the first completion, and -1/2 for the turns of the second, the first
    turns have the mean 1/2, and the second turns 0.
    """
    lines = iter(["c1+1=", "c9=", "so 2", "so 9"])
    writer = scripted(language, [{"prompt": "x", "answer": "2", "calls": ["1+1"]}], lambda before, n: next(lines))
    found = writer.completions(turns(writer, **MARKS))
    assert found.samples == ["c1+1= 2 so 2", "c9= 9 so 9"]
    found = replace(found, parts=cut_completions(found.samples, found.sampled.ids, language.decode, r"= \d "))
    specs = [
        RewardSpec("tool_match", options={"begin": "c", "end": "="}),
        RewardSpec("answer", options={"extract": "last_number"}),
    ]
    scores = RewardSet(specs).score(*asked(writer.rows, found))
    assert scores.parts["tool_match"] == [[1.0, 0.0], [0.0, 0.0]]
    mine, other = parts(Judged(found, scores, None, task="text"), scale="none")
    assert mine.tolist() == [1.0] * 8 + [0.5] * 5
    assert other.tolist() == [-1.0] * 6 + [-0.5] * 5 + [0.0] * 2


MINE = """
def shout(call, row, *, mark: str = "9"):
    return call + row.columns["answer"][-1] + mark
"""
FORM = "{{name: {name}, tool: {{name: mine.py:shout, mark: '7'}}, begin: '', end: m, answer: '{{answer}}'{more}}}"


@pytest.mark.parametrize(("name", "more"), [("turns", ""), ("branches", ", first: 1, tokens: 1")])
def test_a_tool_of_ones_own_in_a_run_and_in_its_evaluation(
    name: str, more: str, small_text: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_part(tmp_path, MINE)
    form = FORM.format(name=name, more=more)
    trainer = trainer_of(small_text, tmp_path / "run", f"rollout.form={form}", "generation.max_tokens=10")
    rows, found = trainer.collect(0)
    assert found.own is not None
    told = [ids for ids, own in zip(found.sampled.ids, found.own) if not all(own)]
    assert told
    seven = trainer.task.policy.language.tokenizer.encode("7")[0]
    for ids, own in zip(found.sampled.ids, found.own):
        assert all(ids[t] == seven for t in range(len(ids) - 1) if not own[t] and own[t + 1])
    assert trainer.iterate(0)["ratio/first_error"] == 0.0
    task = trainer.task
    assert isinstance(task, TextTask)
    found = task.evaluation(rows, [1, 2, 3], trainer.clock)
    assert len(found.samples) == 3
    assert found.own is not None


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("{name: turns, end: ''}", "write the text that ends a call"),
        ("{name: turns, answer: x}", "write {answer} into it"),
        ("{name: turns, tool: saw}", "saw"),
    ],
)
def test_turns_without_an_end_or_a_tool_are_refused(form: str, said: str) -> None:
    with pytest.raises(ValueError, match="form") as caught:
        load_recipe("text", [f"rollout.form={form}"])
    assert said in str(caught.value)


def test_a_tool_answers_with_a_text(language: LanguageModel) -> None:
    with pytest.raises(ValueError, match="answered 3 to the call '1'; return a text"):
        Talk(lambda call, row: 3, "c", "=", "{answer}", 1).answered(  # type: ignore[arg-type,return-value]
            writer := scripted(language, [SUM], lambda before, n: "c1="), writer.write(writer.starts())[0], 0
        )


@pytest.mark.slow
def test_the_embedded_model_learns_to_use_the_calculator(tmp_path: Path) -> None:
    recipe = load_recipe("calculator", ["run.iterations=10", "run.checkpoint_every=10", "data.heldout=null"])
    start(recipe, tmp_path / "run").trainer(Silent()).train()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["reward/answer"] < 0.3
    assert lines[9]["reward/answer"] > 0.8
    assert all(line["ratio/first_error"] == 0.0 for line in lines[:10])
