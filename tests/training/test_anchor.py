"""A reference that becomes the policy as soon as the policy is far from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.training.anchor import Anchor
from flowgrpo.weights.averages import Ema
from tests.parts.own_parts import IMAGES, same_when_resumed

KL = "penalties=[{name: llds, weight: 0.1}, {name: kl, weight: 0.1}, {name: w2, weight: 0.1}]"


class OneWeight:
    """Trained weights with a single number."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.zeros(1))

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return {"weight": self.weight}

    def write(self) -> None:
        """Nothing holds a copy."""

    def steps(self, average: Ema, count: int) -> list[bool]:
        """Whether each of some optimizer steps, which raise the weight by 1, moved the average."""
        found = []
        for _ in range(count):
            self.weight.data += 1.0
            found.append(average.step())
        return found


def value(average: Ema) -> float:
    return float(average.state_dict()["average"]["weight"])


def test_the_steps_between_two_copies_are_counted_from_the_last_one() -> None:
    weights = OneWeight()
    average = Ema(weights, decay=0.0, every=3)
    assert weights.steps(average, 4) == [False, False, True, False]
    assert value(average) == 3.0
    average.begin_anew()
    assert value(average) == 4.0
    state = average.state_dict()
    assert weights.steps(average, 4) == [False, False, True, False]
    # A run that goes on counts from the same step.
    again = OneWeight()
    again.weight.data += 4.0
    resumed = Ema(again, decay=0.0, every=3)
    resumed.load_state_dict(state)
    assert again.steps(resumed, 4) == [False, False, True, False]
    assert value(resumed) == value(average) == 7.0


def test_a_checkpoint_from_before_counts_from_the_first_step() -> None:
    weights = OneWeight()
    average = Ema(weights, decay=0.0, every=3)
    average.load_state_dict({"steps": 4, "average": {"weight": torch.ones(1)}})
    assert weights.steps(average, 2) == [False, True]


def test_the_first_penalty_that_compares_decides() -> None:
    recipe = load_recipe("flow_grpo", [KL, "reference={decay: 0, every: 100, above: 0.5}"])
    weights = OneWeight()
    anchor = Anchor(weights, recipe, recipe.reference)  # type: ignore[arg-type, union-attr]
    weights.steps(anchor, 2)
    assert anchor.settle({"llds": 9.0, "kl": 0.5, "w2": 9.0}) == {"reference/moved": 0.0}
    assert value(anchor) == 0.0
    assert anchor.settle({"llds": 0.0, "kl": 0.6, "w2": 0.0}) == {"reference/moved": 1.0}
    assert value(anchor) == 2.0


def test_without_a_bound_nothing_is_decided_or_told() -> None:
    recipe = load_recipe("flow_grpo", [KL, "reference={decay: 0.5, every: 2}"])
    anchor = Anchor(OneWeight(), recipe, recipe.reference)  # type: ignore[arg-type, union-attr]
    assert anchor.settle({"kl": 100.0}) == {}


@pytest.mark.slow
def test_a_run_moves_its_reference_and_resumes_to_the_last_bit(tmp_path: Path) -> None:
    moving = "reference={decay: 0, every: 100, above: 1.0e-9}"
    same_when_resumed("flow_grpo", [*IMAGES, "penalties=[{name: kl, weight: 0.1}]", moving], tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    records = [line for line in lines if "loss" in line]
    # The reference moves after the update, so the first step of the next iteration has no distance to it.
    assert [line["reference/moved"] for line in records] == [1.0, 1.0, 1.0]
    assert all(line["kl"] > 1e-9 for line in records)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["reference={above: 0.1}"], "decay 0.9 keeps a share of the old reference; write decay: 0, or leave"),
        (["reference={decay: 0, above: 0.1}", "penalties=[{name: stepwise, weight: 0.1}]", "objective=forward"],
         "no penalty compares with the reference; add a penalty such as kl, or leave above out"),
        (["reference={decay: 0, above: 0}"], "greater than 0"),
    ],
)  # fmt: skip
def test_a_bound_that_cannot_work_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe("flow_grpo", words)
    assert said in str(error.value)
