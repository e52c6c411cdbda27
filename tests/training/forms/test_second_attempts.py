"""Second attempts: which draft is shown, who is refined and trained where, and where a retry begins."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flowgrpo.configs.load import load_recipe
from flowgrpo.text.model import LanguageModel
from flowgrpo.training.text.forms.second_attempts import critiques, drafts, place_of_error, retries
from tests.training.forms.scripted_policy import in_other_contexts, scripted, texts
from tests.training.text_runs import trainer_of

SUM = {"prompt": "7+8=", "answer": "15"}
FREE = {"prompt": "x", "answer": None}


def test_the_first_of_the_best_drafts_joins_the_prompt(language: LanguageModel) -> None:
    def says(before: str, number: int) -> str:
        return "9" if before[0] == "d" else ["3", "a 15", "b 15"][number]

    writer = scripted(language, [SUM, FREE], says)
    found = drafts(writer, count=3, template="d {draft} {prompt}")
    assert texts(writer, found) == [(0, "d a 15 7+8=", "9")] * 2 + [(1, "d 3 x", "9")] * 2
    assert found[0].origin == {"draft": "a 15"}


def refining(before: str, number: int) -> str:
    """Wrong, right, wrong at first; a refinement of the second failure is right."""
    if before[0] != "7":
        return "15" if before.startswith("2 ") else "8"
    return ["1", "15", "2", "3"][number]


def test_the_best_refinement_of_a_failure_joins_the_group(language: LanguageModel) -> None:
    writer = scripted(language, [SUM, FREE], refining, group=4)
    options: dict[str, Any] = {"template": "{completion} not {answer} {prompt}"}
    alone = critiques(writer, **options)
    assert texts(writer, alone)[3:5] == [(0, "7+8=", "3"), (0, "7+8=", "15")]
    assert alone[-1].origin == {"completion": "2"}
    assert len(alone) == 4 + 1 + 4
    within = critiques(writer, alone=False, keep=2, **options)
    assert texts(writer, within)[4:6] == [(0, "2 not 15 7+8=", "15"), (0, "1 not 15 7+8=", "8")]


def test_the_place_of_an_error() -> None:
    assert place_of_error([5, 6, 7], [-1, -2, -3], [5, 6, 9, 9]) == 2
    assert place_of_error([5, 6, 7], [-1, -2, -3], [4]) == 0
    assert place_of_error([5, 6], [-1, -2], [5, 6, 7]) == 1
    assert place_of_error([5, 6, 7], [-1, -2, -3], [5, 6]) == 2
    assert place_of_error([5, 6, 7], [-1.0, -4.0, -3.0], None) == 1


def test_a_retry_keeps_what_was_right_and_only_the_rest_is_trained(language: LanguageModel) -> None:
    """The failure 1 2 9 differs from the success 1 2 15 in the fifth token."""

    def says(before: str, number: int) -> str:
        return {"7+8=": ["1 2 9", "1 2 15"][number % 2], "7+8=1 2 ": "6 15"}[before]

    writer = scripted(language, [SUM], says)
    failure, success, retry = retries(writer)
    assert [writer.text(one) for one in (failure, success, retry)] == ["1 2 9", "1 2 15", "1 2 6 15"]
    assert failure.own == [False] * 4 + [True] * 2
    assert all(success.own)
    assert retry.own == [False] * 4 + [True] * 5
    assert retry.origin == {"from": 4}
    assert retry.context == failure.context


def test_a_reflection_is_seen_and_not_trained(language: LanguageModel) -> None:
    def chance(text: str) -> Sequence[float]:
        return [-1, -5, -1, -1] if text == "1 2" else [-1.0] * (len(text) + 1)

    def says(before: str, number: int) -> str:
        return {"7+8=": "1 2", "why 1 2 7+8=": "carry", "1 2 carry 7+8=1": "5"}[before]

    writer = scripted(language, [SUM], says, group=1, chance=chance)
    reflect, template = "why {completion} {prompt}", "{completion} {reflection} {prompt}"
    failure, retry = retries(writer, reflect=reflect, template=template)
    assert texts(writer, [failure, retry]) == [(0, "7+8=", "1 2"), (0, "7+8=", "15")]
    assert failure.own == [False, True, True, True]
    assert retry.own == [False, True, True]
    assert retry.origin == {"completion": "1 2", "reflection": "carry", "from": 1}


@pytest.mark.parametrize(
    "form",
    [
        "{name: drafts, count: 2, template: '{draft} {prompt}'}",
        "{name: critiques, template: '{completion} {answer} {prompt}', alone: false, success: 9}",
        "{name: critiques, template: '{completion} {answer} {prompt}', success: 9}",
        "{name: retries, success: 9}",
        "{name: retries, reflect: '{prompt}{completion}', template: '{reflection}{prompt}', tokens: 2, success: 9}",
    ],
)
def test_the_ratio_is_one_before_the_first_update(form: str, small_text: list[str], tmp_path: Path) -> None:
    trainer = trainer_of(small_text, tmp_path / "run", f"rollout.form={form}")
    rows, found = trainer.collect(0)
    hinted = "drafts" in form or "alone" in form
    assert (in_other_contexts(rows, found).sum() >= len(rows)) == hinted
    assert len(found.samples) >= len(rows) * trainer.recipe.rollout.group
    assert trainer.iterate(0)["ratio/first_error"] == 0.0


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("{name: drafts, template: '{prompt}'}", "write {draft} into it"),
        ("{name: critiques, template: '{prompt}'}", "write {completion} into it"),
        ("{name: retries, reflect: '{prompt}{completion}'}", "write both, or leave both out"),
        ("{name: retries, reflect: '{prompt}', template: '{prompt}{reflection}'}", "write {completion} into it"),
    ],
)
def test_templates_that_do_not_fit_are_refused(form: str, said: str) -> None:
    with pytest.raises(ValueError, match="form") as caught:
        load_recipe("text", [f"rollout.form={form}"])
    assert said in str(caught.value)
