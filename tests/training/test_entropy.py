"""A bonus of entropy that follows a set-point, in runs of text."""

from pathlib import Path

import pytest
import torch

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.training.session import Session
from tests.training.test_text import gradient, numbers, task_of
from tests.training.text_runs import trainer_of

BONUS = "objective.entropy={target: 50.0, value: 0.02, rate: 0.001, high: 0.1}"


def test_the_bonus_follows_its_target(small_text: list[str], tmp_path: Path) -> None:
    """No policy has 50 nats: the coefficient rises by the rate times the missing entropy, up to its limit."""
    trainer = trainer_of(small_text, tmp_path / "run", BONUS)
    first, second, third = (trainer.iterate(k) for k in range(3))
    assert first["ratio/first_error"] == 0.0
    assert first["entropy_bonus"] == 0.02
    assert first["penalty"] == pytest.approx(-0.02 * first["exact_entropy"])
    assert second["entropy_bonus"] == pytest.approx(0.02 + 0.001 * (50 - first["exact_entropy"]))
    assert third["entropy_bonus"] == 0.1


def test_the_bonus_is_the_gradient_of_the_entropy(small_text: list[str], tmp_path: Path) -> None:
    """With advantages of 0 all that is left is minus the coefficient times the mean entropy of the tokens."""
    trainer = trainer_of(small_text, tmp_path / "run", BONUS)
    rows, e = trainer.collect(0)
    found = gradient(trainer, e, torch.zeros(len(rows) * 4))
    policy = task_of(trainer).policy
    entropy = policy.statistics(e, list(range(12)), entropy=True).entropy
    assert entropy is not None
    (-0.02 * entropy.sum() / e.lengths.sum()).backward()
    for name, parameter in trainer.task.weights.named_parameters().items():
        if parameter.grad is not None:
            assert torch.allclose(found[name], parameter.grad, atol=1e-7), name
    assert max(float(g.abs().max()) for g in found.values()) > 1e-4


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_the_same_bonus(small_text: list[str], tmp_path: Path) -> None:
    lines = [*small_text, BONUS, "optimizer.epochs=2"]
    whole = trainer_of(lines, tmp_path / "whole")
    whole.train()
    part = trainer_of(lines, tmp_path / "part")
    for k in range(2):
        part.run.log(part.evaluations.make(k) | part.iterate(k) if k == 0 else part.iterate(k))
        part.next_iteration = k + 1
        part.keeper.write(part.next_iteration)
    again = Session(part.recipe, part.run).trainer(Silent())
    again.resume()
    task, other = task_of(again), task_of(part)
    assert task.controls.entropy is not None
    assert other.controls.entropy is not None
    assert task.controls.entropy.value == other.controls.entropy.value > 0.02
    again.train()
    mine, theirs = numbers(tmp_path / "part"), numbers(tmp_path / "whole")
    assert [line.get("entropy_bonus") for line in mine] == [line.get("entropy_bonus") for line in theirs]
    assert mine[2:] == theirs[2:]


@pytest.mark.parametrize(
    ("base", "lines", "message"),
    [
        ("mixgrpo_flash_guard", ["objective.entropy={target: 0.5}"], "objective transition has no option 'entropy'"),
        ("text", ["objective.entropy={target: 0.5, value: 0.2}"], "value is 0.2, above `high`, 0.1"),
        (
            "text", ["objective={name: answers, entropy: {target: 0.5}}"],
            "'entropy' is an option of text objective tokens",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_steered_is_refused(base: str, lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe(base, lines)
