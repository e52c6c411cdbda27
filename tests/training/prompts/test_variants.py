"""Variants of prompts: what is drawn, what is calculated, and which templates are refused."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from flowgrpo.configs.load import load_recipe
from flowgrpo.rewards.text.answer import Answer
from flowgrpo.training.data import PromptRow
from flowgrpo.training.prompts.variants_of_prompts import variant_of
from tests.training.text_runs import trainer_of

SUM = {"variables": {"a": [1, 99], "b": [1, 99]}, "answer": "a + b"}


def test_every_draw_has_its_own_answer() -> None:
    row = PromptRow(4, r"{a}+{b}= \frac{1}{c}", {**SUM, "level": 2})
    seen = set()
    for seed in range(20):
        found = variant_of(row, "answer", np.random.default_rng(seed))
        values = found.columns["variables"]
        assert found.text == rf"{values['a']}+{values['b']}= \frac{{1}}{{c}}"
        assert found.columns["answer"] == str(values["a"] + values["b"])
        assert (found.id, found.columns["level"]) == (4, 2)
        assert Answer()([found.columns["answer"]], [""], [found.columns["answer"]]).values == [1]
        seen.add(found.text)
    assert len(seen) > 15
    assert variant_of(row, "answer", np.random.default_rng(3)) == variant_of(row, "answer", np.random.default_rng(3))


def test_draws_meet_the_condition_and_stay_in_their_range() -> None:
    columns = {"variables": {"a": [1, 4], "b": [1, 4], "c": ["red", "blue"]}, "where": "a > b and c == 'red'"}
    row = PromptRow(0, "{c}", {**columns, "answer": "a / b"}, ({"role": "user", "content": "{a} {b} {c}"},))
    found = [variant_of(row, "answer", np.random.default_rng(seed)) for seed in range(60)]
    pairs = {(one.columns["variables"]["a"], one.columns["variables"]["b"]) for one in found}
    assert pairs == {(2, 1), (3, 1), (4, 1), (3, 2), (4, 2), (4, 3)}
    assert {one.text for one in found} == {"red"}
    assert {one.columns["answer"] for one in found} == {"2", "3", "4", "3/2", "4/3"}
    assert found[0].messages is not None
    assert found[0].messages[0]["content"].endswith(" red")
    plain = PromptRow(1, "{a}", {"answer": "3"})
    assert variant_of(plain, "answer", np.random.default_rng(0)) is plain


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"variables": {"a": [9, 1]}}, "two rising whole numbers"),
        ({"variables": {"a": []}}, "a list of texts"),
        ({"variables": {"a": [True, 2]}}, "two rising whole numbers"),
        ({"variables": {"a": ["red", 2]}}, "a list of texts"),
        ({"variables": {"a": "red"}}, "a list of texts"),
        ({"variables": {"a b": [1, 2]}}, "write a name"),
        ({"variables": [1, 2]}, "give a range or a list of texts for each name"),
        ({"variables": {"a": [1, 2]}, "where": "a > 2"}, "no draw of 1000 meets `where`"),
        ({"variables": {"a": [1, 2]}, "answer": "b"}, "no variable 'b'"),
    ],
)
def test_wrong_templates_are_named(columns: dict[str, object], said: str) -> None:
    row = PromptRow(0, "{a}", columns, place="file.jsonl, line 3")
    with pytest.raises(ValueError, match=f"file.jsonl, line 3: .*{said}"):
        variant_of(row, "answer", np.random.default_rng(0))


def test_a_run_sees_new_variants_at_every_visit(small_text: list[str], tmp_path: Path) -> None:
    file = tmp_path / "templates.jsonl"
    templates = [{"prompt": f"{{a}}{sign}{{b}}=", **SUM, "answer": f"a {sign} b"} for sign in "+-"]
    templates.append({"prompt": "{b}+{b}=", **SUM, "answer": "2 * b"})
    file.write_text("".join(json.dumps(template) + "\n" for template in templates))
    lines = [f"data.train={file}", "extensions=[variants]", "rewards=[{name: answer}, {name: digit_share}]"]
    trainer = trainer_of(small_text, tmp_path / "run", *lines)
    first, second = trainer.collector.rows(0), trainer.collector.rows(1)
    assert {row.text for row in first}.isdisjoint({row.text for row in second})
    for row in (*first, *second):
        left, sign, right = re.fullmatch(r"(\d+)([+-])(\d+)=", row.text).groups()  # type: ignore[union-attr]
        assert row.columns["answer"] == str(int(left) + int(sign + right))
    assert trainer.collector.rows(0) == first
    other = trainer_of(small_text, tmp_path / "other", *lines, "run.seed=1")
    assert {row.text for row in other.collector.rows(0)} != {row.text for row in first}
    _, experience = trainer.collect(0)
    assert [trainer.task.policy.language.decode(ids) for ids in experience.prompts] == [row.text for row in first]
    assert trainer.iterate(0)["ratio/first_error"] == 0.0


def test_faults_are_named(small_text: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="put variants last"):
        load_recipe("text", ["extensions=[variants, curriculum]"])
    with pytest.raises(ValueError, match="extension replay keeps completions of a prompt"):
        load_recipe("text", ["extensions=[replay, variants]"])
    with pytest.raises(ValueError, match="release_text_encoders is True; set it to false"):
        load_recipe("mixgrpo_flash_guard", ["extensions=[variants]", "model.release_text_encoders=true"])
    load_recipe("text", ["extensions=[curriculum, variants]"])
    trainer = trainer_of(small_text, tmp_path / "run", "extensions=[variants]")
    with pytest.raises(ValueError, match="found no training prompt with a column `variables`"):
        trainer.collector.rows(0)
