"""A greedy completion as the baseline of the samples of its prompt."""

from pathlib import Path

import pytest
import torch

from flowgrpo.configs.load import load_recipe
from flowgrpo.training.text.forms.greedy import greedy
from tests.training.forms.scripted import Scripted, judged_by, text_of
from tests.training.judging import credited
from tests.training.test_text import task_of
from tests.training.text_runs import trainer_of

LINES = ["rollout.form=greedy", "credit=greedy", "advantage=null"]


def test_the_greedy_reward_is_the_baseline() -> None:
    writer = Scripted({0: ["a$", "b$"], 1: ["g$"]}, group=2, prompts=2)
    found = greedy(writer)
    assert writer.temperatures == [None, 0.0]
    assert [text_of(one.ids) for one in found] == ["a$", "b$", "a$", "b$", "g$", "g$"]
    assert [one.counts for one in found] == [True] * 4 + [False] * 2
    # In the order of the prompts: two samples and the greedy completion of each.
    e, scores = judged_by(found, writer, [1.0, 0.0, 0.75, 0.5, 0.0, 0.0])
    advantages = credited(e, scores, "greedy")
    assert advantages[e.outcomes].tolist() == [0.25, -0.75, 0.5, 0.0]


def test_a_run_with_groups_of_one(small_text: list[str], tmp_path: Path) -> None:
    trainer = trainer_of(small_text, tmp_path / "run", *LINES, "rollout.group=1")
    record = trainer.iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert record["grad_norm"] > 0


def test_the_likeliest_tokens_are_taken(small_text: list[str], tmp_path: Path) -> None:
    """No sample of a prompt begins with a likelier token than the greedy completion."""
    trainer = trainer_of(small_text, tmp_path / "run", *LINES)
    _, e = trainer.collect(0)
    likeliest = {e.prompt_of_sample[row]: row for row, origin in enumerate(e.origins()) if origin}
    assert len(likeliest) == 3
    with torch.no_grad():
        first = task_of(trainer).policy.log_probs(e, range(len(e.samples)))[0][:, 0]
    for row, prompt in enumerate(e.prompt_of_sample):
        assert float(first[row]) <= float(first[likeliest[prompt]]) + 1e-6
    assert len({e.sampled.ids[row][0] for row in range(len(e.samples))}) > 3


def test_other_forms_are_refused() -> None:
    with pytest.raises(ValueError, match=r"use rollout\.form greedy"):
        load_recipe("text", ["credit=greedy", "advantage=null"])
    with pytest.raises(ValueError, match="write advantage: null"):
        load_recipe("text", ["credit=greedy", "rollout.form=greedy"])
