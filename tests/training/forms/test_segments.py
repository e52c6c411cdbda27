"""Completions that are continued from the ends of their segments, and what the segments gain by them."""

from pathlib import Path

import pytest
import torch

from flowgrpo.configs.load import load_recipe
from flowgrpo.training.text.forms.places import every_unlikely
from flowgrpo.training.text.forms.segments import segments
from tests.training.forms.scripted import Scripted, judged_by, text_of
from tests.training.judging import credited
from tests.training.text_runs import trainer_of

LINES = ["advantage=null", "credit=segments"]


def test_each_second_unlikely_token_ends_a_segment() -> None:
    assert every_unlikely([-1.0, -0.01, -1.0, -1.0, -0.01, -1.0], 2, 0.9) == [3]  # the end needs no value
    assert every_unlikely([-1.0] * 5, 2, 1.0) == [2, 4]
    assert every_unlikely([0.0] * 3, 1, 1.0) == [1, 2]
    assert every_unlikely([0.0] * 3, 1, 0.9) == []


def test_values_come_from_continuations() -> None:
    """`AbC$` is cut after A and after C. Values: prompt (1 + 0) / 2, after A (1 + 0) / 2, after C (1 + 1) / 2."""
    writer = Scripted({0: ["AbC$", "x$"], 1: ["1$", "2$", "3$", "4$"]}, group=2)
    found = segments(writer, samples=2, every=1)
    assert [text_of(one.ids) for one in found] == ["AbC$", "x$", "A1$", "A2$", "AbC3$", "AbC4$"]
    assert [one.counts for one in found] == [True, True, False, False, False, False]
    e, scores = judged_by(found, writer, [1.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    whole = credited(e, scores, "segments")
    assert whole.tolist() == [[0.0, 0.5, 0.5, 0.0, 0.0], [-0.5, -0.5, 0.0, 0.0, 0.0], *[[0.0] * 5] * 4]
    masked = credited(e, scores, {"name": "segments", "below": 0.9})
    assert masked[:2].tolist() == [[0.0, 0.0, 0.5, 0.0, 0.0], [0.0] * 5]


def test_prompts_do_not_mix() -> None:
    """Both prompts have a completion that is cut after A, of different values."""
    writer = Scripted({0: ["Ab$"], 1: ["1$", "2$", "3$", "4$"]}, group=2, prompts=2)
    found = segments(writer, samples=1, every=1)
    e, scores = judged_by(found, writer, [])
    value = {"1": 1.0, "2": 0.0, "3": 0.25, "4": 0.75}
    scores = judged_by(found, writer, [value.get(text[1], 0.0) for text in e.samples])[1]
    gained = credited(e, scores, "segments")[["token" not in one for one in e.origins()]]
    assert gained[:, 0].tolist() == [1.0, 0.0, 0.25, 0.75]
    assert gained[:, 1].tolist() == [-1.0, 0.0, -0.25, -0.75]


def test_a_run_by_tokens(small_text: list[str], tmp_path: Path) -> None:
    trainer = trainer_of(
        small_text, tmp_path / "run", *LINES, "rollout.form={name: segments, every: 2, below: 1.0, samples: 2}"
    )
    record = trainer.iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert record["grad_norm"] > 0
    _, e = trainer.collect(0)
    trained = {row for batch in trainer.objective.batches(e, 0, None) for row in batch}
    assert trained == {row for row, counts in enumerate(e.outcomes.tolist()) if counts}
    for row, origin in enumerate(e.origins()):
        if "token" in origin:
            peers = [k for k, owner in enumerate(e.prompt_of_sample) if owner == e.prompt_of_sample[row]]
            source = next(k for k in peers if "cuts" in e.origins()[k] and e.origins()[k]["number"] == origin["number"])
            assert e.sampled.ids[row][: origin["token"]] == e.sampled.ids[source][: origin["token"]]
            assert len(e.sampled.ids[row]) <= 6


def test_a_run_by_parts(small_text: list[str], tmp_path: Path) -> None:
    trainer = trainer_of(
        small_text, tmp_path / "run", *LINES, "rollout.form={name: segments, at: parts, samples: 2}",
        "parts={cut: pattern, pattern: '[0-9]'}",
    )  # fmt: skip
    _, e = trainer.collect(0)
    for row, origin in enumerate(e.origins()):
        for cut in origin.get("cuts", []):
            assert e.parts.ids[row][cut] == e.parts.ids[row][cut - 1] + 1
    assert sum(len(one.get("cuts", [])) for one in e.origins()) == sum(
        len(e.parts.texts[row]) - 1 for row, one in enumerate(e.origins()) if "cuts" in one
    )
    assert trainer.iterate(1)["ratio/first_error"] == 0.0


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["credit=segments", "advantage=null"], "rollout.form is plain; use rollout.form segments"),
        (["rollout.form=segments", "credit=segments"], "write advantage: null"),
        (["rollout.form={name: segments, at: parts}"], "or use at tokens"),
        (["rollout.form=segments", *LINES, "rollout.group=1"], "use 2 or more"),
        (["rollout.form={name: segments, at: parts, every: 2}", "parts={cut: lines}"], "no tokens are counted"),
    ],
)
def test_what_does_not_fit_is_refused(lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe("text", lines)


def test_values_are_means(small_text: list[str], tmp_path: Path) -> None:
    """In a run, the gains of a completion add up to its reward minus the mean of the group."""
    trainer = trainer_of(small_text, tmp_path / "run", *LINES, "rollout.form={name: segments, every: 1, below: 1.0}")
    rows, e = trainer.collect(0)
    scores = trainer.score(trainer.rewards, rows, e)
    found = trainer.advantages(scores, e, rows)
    whole = scores.values[:, 0]
    for row, one in enumerate(e.origins()):
        if "cuts" in one:
            mine = e.outcomes & (e.groups == e.groups[row])
            bounds = [0, *one["cuts"]]
            total = float(found[row, bounds].sum())
            assert total == pytest.approx(float(whole[row] - whole[mine].mean()), abs=1e-5)
    assert torch.equal(found[~e.outcomes], torch.zeros_like(found[~e.outcomes]))
