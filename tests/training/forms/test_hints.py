"""Forms with hints: who gets one, which one, what stays of the group, and ratios that start at 1."""

from pathlib import Path
from typing import Any

import pytest

from flowgrpo.configs.load import load_recipe
from flowgrpo.text.model import LanguageModel
from flowgrpo.training.text.forms.hints import hints, rewritten, self_hints
from tests.training.forms.scripted_policy import in_other_contexts, scripted, texts
from tests.training.text_runs import trainer_of

EASY = {"prompt": "1+1=", "answer": "2", "solution": "two", "levels": ["a", "b"]}
HARD = {"prompt": "7+8=", "answer": "15", "solution": "fifteen", "levels": ["c", "d", "e"]}
UNKNOWN = {"prompt": "x", "answer": None, "solution": "y", "levels": ["z"]}


def says(before: str, number: int) -> str:
    """Right about 1+1, and about 7+8 with the hint `d`, or with four letters of `fifteen`."""
    if "1+1" in before:
        return "2"
    return "15" if "7+8" in before and ("d " in before or "fift" in before) else str(number)


def test_the_weakest_hint_that_helps_joins_groups_without_a_success(language: LanguageModel) -> None:
    writer = scripted(language, [EASY, HARD, UNKNOWN], says)
    found = hints(writer, column="levels", template="{hint} {prompt}")
    assert texts(writer, found) == [
        (0, "1+1=", "2"), (0, "1+1=", "2"), (1, "d 7+8=", "15"), (1, "d 7+8=", "15"), (2, "x", "0"), (2, "x", "1"),
    ]  # fmt: skip
    assert [one.origin for one in found if one.prompt == 1] == [{"hint": "d"}] * 2
    assert all(all(one.own) for one in found)


def test_one_success_is_enough_for_a_group_to_have_no_hints(language: LanguageModel) -> None:
    writer = scripted(language, [HARD], lambda before, n: "15" if n or before[0] == "c" else "9")
    found = hints(writer, column="levels", template="{hint} {prompt}")
    assert texts(writer, found) == [(0, "7+8=", "9"), (0, "7+8=", "15")]


def test_one_failure_is_replaced_and_only_after_the_exemption(language: LanguageModel) -> None:
    options: dict[str, Any] = {"column": "levels", "template": "{hint} {prompt}", "replace": 1, "tries": 3, "after": 5}
    writer = scripted(language, [HARD], says, iteration=5)
    assert texts(writer, hints(writer, **options)) == [(0, "7+8=", "0"), (0, "d 7+8=", "15")]
    writer = scripted(language, [HARD], says, iteration=4)
    assert texts(writer, hints(writer, **options)) == [(0, "7+8=", "0"), (0, "7+8=", "1")]


def test_shares_of_a_solution_grow_until_one_helps(language: LanguageModel) -> None:
    """Of the seven letters, a quarter is two, a half four."""
    writer = scripted(language, [HARD], says)
    found = hints(writer, shares=[0.75, 0.25, 0.5], template="{hint} {prompt}")
    assert texts(writer, found) == [(0, "fift 7+8=", "15")] * 2
    writer = scripted(language, [HARD], says)
    assert texts(writer, hints(writer, shares=[0.25], template="{hint} {prompt}")) == [
        (0, "7+8=", "0"), (0, "7+8=", "1"),
    ]  # fmt: skip


def test_a_column_that_is_no_hint_is_refused(language: LanguageModel) -> None:
    with pytest.raises(ValueError, match="line 0: form hints needs a column 'lesson'; there are answer, solution"):
        hints(scripted(language, [HARD], says), column="lesson")
    with pytest.raises(ValueError, match="write a text, or a list of texts"):
        hints(scripted(language, [{**HARD, "levels": 3}], says), column="levels")
    with pytest.raises(ValueError, match="takes shares of one text"):
        hints(scripted(language, [HARD], says), column="levels", shares=[0.5])
    with pytest.raises(ValueError, match=r"line 0: a template of rollout.form asks for \{other\}"):
        hints(scripted(language, [HARD], says), template="{other}{prompt}{hint}")


def hinting(before: str, number: int) -> str:
    """Hints are `d` for the second completion that asks, and `c` for the others."""
    if before.startswith("help"):
        return "cd"[number % 2]
    return says(before, number)


def test_hints_of_the_policy_may_know_the_answer(language: LanguageModel) -> None:
    asked: list[str] = []

    def told(before: str, number: int) -> str:
        asked.extend([before] if before.startswith("help") else [])
        return hinting(before, number)

    options: dict[str, Any] = {"ask": "help {answer} {prompt}", "template": "{hint} {prompt}"}
    writer = scripted(language, [EASY, HARD], told)
    # The only hint of a prompt does not help, so the group stays.
    assert texts(writer, self_hints(writer, **options))[2:] == [(1, "7+8=", "0"), (1, "7+8=", "1")]
    assert asked == ["help 15 7+8="]
    each = self_hints(writer, each=True, **options)
    assert texts(writer, each)[2:] == [(1, "d 7+8=", "15"), (1, "c 7+8=", "0")]
    one = self_hints(writer, each=True, replace=2, **options)
    assert texts(writer, one)[2:] == texts(writer, each)[2:]


def test_a_plain_completion_stays_if_not_all_are_replaced(language: LanguageModel) -> None:
    writer = scripted(language, [HARD], lambda before, n: "d" if before[0] == "h" else says(before, n), group=3)
    found = self_hints(writer, ask="h {prompt}", template="{hint} {prompt}", replace=2)
    assert texts(writer, found) == [(0, "7+8=", "0"), (0, "d 7+8=", "15"), (0, "d 7+8=", "15")]


def rewriting(before: str, number: int) -> str:
    if before.startswith("easier"):
        return " 10+5="
    if before.startswith("other"):
        return " "
    return {"10+5=": "15", "7+8=": "9", "1+1=": ["2", "3"][number % 2]}[before]


def test_hard_prompts_are_rewritten_and_blank_forms_are_not_used(language: LanguageModel) -> None:
    writer = scripted(language, [EASY, HARD], rewriting)
    found = rewritten(writer, simplify="easier {prompt}", diversify="other {prompt}")
    assert texts(writer, found) == [
        (0, "1+1=", "2"), (0, "1+1=", "3"), (1, "10+5=", "15"), (1, "10+5=", "15"),
    ]  # fmt: skip
    asked: list[str] = []

    def listening(before: str, number: int) -> str:
        asked.append(before)
        return "2"

    # Half of the group is right about 1+1, so it is of medium difficulty, and without `diversify` it stays.
    writer = scripted(language, [{**EASY, "answer": "2"}, UNKNOWN], listening)
    rewritten(writer, simplify="easier {prompt}", medium=1.0)
    assert set(asked) == {"1+1=", "x"}


@pytest.mark.parametrize(
    "form",
    [
        "{name: hints, column: answer, shares: [0.5, 1.0], template: '{hint} {prompt}', tries: 5}",
        "{name: self_hints, ask: '{answer} {prompt}', template: '{hint} {prompt}', tokens: 3, each: true, replace: 3}",
        "{name: rewritten, simplify: 'a {prompt}', tokens: 4}",
    ],
)
def test_the_ratio_is_one_before_the_first_update(form: str, small_text: list[str], tmp_path: Path) -> None:
    trainer = trainer_of(small_text, tmp_path / "run", f"rollout.form={form}")
    trainer.task.score_with(in_other_contexts)
    rows, found = trainer.collect(0)
    assert in_other_contexts(rows, found).sum() >= len(rows)
    assert trainer.iterate(0)["ratio/first_error"] == 0.0


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("{name: hints, template: '{prompt}'}", "write {hint} into it"),
        ("{name: self_hints, ask: why}", "write {prompt} into it"),
        ("{name: rewritten, diversify: why}", "write {prompt} into it"),
    ],
)
def test_a_template_without_its_fields_is_refused(form: str, said: str) -> None:
    with pytest.raises(ValueError, match="form") as caught:
        load_recipe("text", [f"rollout.form={form}"])
    assert said in str(caught.value)
