"""Weights of tokens by a recipe's lines: tokens that good and bad answers share, answers that are left out."""

from pathlib import Path

import pytest
import torch

from flowgrpo.configs.load import load_recipe
from flowgrpo.text.sampling import Sampled
from flowgrpo.training.text.text_policy import Completions
from flowgrpo.training.text.token_objective import TokenObjective
from tests.training.test_text import task_of
from tests.training.text_runs import trainer_of

IDS = [[5, 6, 7, 3], [5, 8, 3], [9, 8, 4, 4], [5, 3]]
ADVANTAGES = torch.tensor([1.0, -1.0, 0.0, 2.0])


def objective_of(small: list[str], folder: Path, *more: str) -> TokenObjective:
    objective = trainer_of(small, folder, *more).objective
    assert isinstance(objective, TokenObjective)
    return objective


def answers() -> Completions:
    """Three of one prompt, the first good and the second bad, and a good one of another prompt."""
    return Completions([[4], [5]], Sampled(IDS, [[-1.0] * len(ids) for ids in IDS], [True] * 4), [""] * 4, [0, 0, 0, 1])


def test_shared_tokens_are_not_punished(small_text: list[str], tmp_path: Path) -> None:
    """The first and second answer begin with 5 and end with 3; no answer contradicts the other prompt's answer."""
    objective = objective_of(small_text, tmp_path / "run", "objective.conflict=3.0")
    found = objective._scored(answers(), [0, 1, 2, 3], ADVANTAGES, None).weight
    assert found is not None
    assert [row[: len(ids)] for row, ids in zip(found.tolist(), IDS)] == [
        [3, 1, 1, 3], [0, 1, 0], [1, 1, 1, 1], [1, 1],
    ]  # fmt: skip
    # A batch that holds a part of the group knows the rest of it.
    part = objective._scored(answers(), [1], ADVANTAGES, None).weight
    assert part is not None
    assert part.tolist() == [[0, 1, 0]]


def test_a_token_in_conflict_from_both_ends_counts_once(small_text: list[str], tmp_path: Path) -> None:
    objective = objective_of(small_text, tmp_path / "run", "objective.conflict=2.0")
    ids = [[5, 6], [5, 7]]
    same = Completions([[4]], Sampled(ids, [[-1.0] * 2] * 2, [True] * 2), [""] * 2, [0, 0])
    found = objective._scored(same, [0, 1], torch.tensor([1.0, -1.0]), None).weight
    assert found is not None
    assert found.tolist() == [[2, 1], [0, 1]]


def test_answers_that_are_not_confident_have_no_weight(small_text: list[str], tmp_path: Path) -> None:
    trainer = trainer_of(small_text, tmp_path / "plain")
    entropy = task_of(trainer).policy.statistics(answers(), [0, 1, 2, 3], entropy=True).entropy
    assert entropy is not None
    means = [float(row[: len(ids)].mean()) for row, ids in zip(entropy.detach(), IDS)]
    limit = sum(sorted(means)[1:3]) / 2
    objective = objective_of(small_text, tmp_path / "run", f"objective.confident={limit}")
    found = objective._scored(answers(), [0, 1, 2, 3], ADVANTAGES, None).weight
    assert found is not None
    assert found[:, 0].tolist() == [float(mean <= limit) for mean in means]
    assert found[:, 0].sum() == 2


def test_bad_answers_that_the_policy_has_left_have_no_weight(small_text: list[str], tmp_path: Path) -> None:
    """The answers say that they were sampled at a log-prob of -1 a token. The small model finds all less likely."""
    lines = ["optimizer.epochs=2", "objective.off_policy"]
    plain = objective_of(small_text, tmp_path / "plain")
    scored = plain._scored(answers(), [0, 1, 2, 3], ADVANTAGES, None)
    fall = -1.0 - scored.log_probs.detach()[1, : len(IDS[1])].mean().item()
    assert fall > 0
    for limit, kept in ((0.99 * fall, 0.0), (1.01 * fall, 1.0)):
        objective = objective_of(small_text, tmp_path / str(kept), lines[0], f"{lines[1]}={limit}")
        found = objective._scored(answers(), [0, 1, 2, 3], ADVANTAGES, None).weight
        assert found is not None
        assert found[:, 0].tolist() == [1.0, kept, 1.0, 1.0]


def test_the_log_probs_of_the_sampler_count_and_not_those_before_the_update(
    small_text: list[str], tmp_path: Path
) -> None:
    """With two updates the objective keeps log-probs of its own; the fall is still from those of the sampler."""
    objective = objective_of(small_text, tmp_path / "run", "optimizer.epochs=2", "objective.off_policy=0.5")
    for sampler, kept in ((-100.0, 1.0), (0.0, 0.0)):
        said = Completions(
            [[4]], Sampled(IDS[:2], [[sampler] * len(ids) for ids in IDS[:2]], [True] * 2), [""] * 2, [0, 0]
        )
        objective.prepare(said)
        found = objective._scored(said, [0, 1], ADVANTAGES[:2], None).weight
        assert found is not None
        assert found[:, 0].tolist() == [1.0, kept]


def test_both_are_weights_of_the_loss(small_text: list[str], tmp_path: Path) -> None:
    lines = ["objective.conflict=3.0", "objective.confident=9.0", "objective.correction=truncate", "optimizer.epochs=2"]
    trainer = trainer_of(small_text, tmp_path / "run", *lines, "rollout.group=24", "rollout.tokens=300")
    record = trainer.iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert record["correction_cut"] == 0.0
    assert record["weight"] != pytest.approx(1, abs=0.01)
    assert record["grad_norm"] > 0


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["objective.conflict=2.0", "credit=prefix"], "tells good answers from bad ones"),
        (["objective.off_policy=0.5"], "with off_policy. With one optimizer step .* use optimizer.updates or"),
        (["objective.off_policy=0.0", "optimizer.updates=2"], "off_policy.* greater than 0|above 0"),
        (["objective.conflict=0.5"], "greater than or equal to 1|at least 1"),
        (["objective={name: answers, confident: 0.5}"], "'confident' is an option of text objective tokens"),
    ],
)
def test_what_does_not_go_together_is_refused(lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe("text", lines)
