"""Scores move among the samples of a group: every group keeps its scores, and their order says nothing."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowgrpo.configs.load import load_recipe
from flowgrpo.rewards.score_batches import RewardBatch
from flowgrpo.training.credit.pooling import Batch
from flowgrpo.training.extensions import EXTENSIONS
from tests.training.text_runs import trainer_of

Shuffle = EXTENSIONS["shuffle"]


def shuffled(places: list[int], sizes: list[int], iteration: int = 0, seed: int = 0, hidden: Any = ()) -> Batch:
    """Batch of a prompt with `sizes[k]` samples at `places[k]`; the scores of a sample are its place and number."""
    owner = [p for p, size in enumerate(sizes) for _ in range(size)]
    values = torch.tensor([[100.0 * places[p], k] for p, size in enumerate(sizes) for k in range(size)])
    outcomes = torch.tensor([row not in hidden for row in range(len(owner))])
    experience = SimpleNamespace(prompt_of_sample=owner, groups=torch.tensor(owner), outcomes=outcomes)
    notes = {"mine": [f"{p}-{k}" for p, size in enumerate(sizes) for k in range(size)]}
    scores = RewardBatch(values, ("place", "number"), torch.ones(2), {}, notes, {})
    extension = Shuffle(recipe=SimpleNamespace(run=SimpleNamespace(seed=seed)))  # type: ignore[call-arg]
    extension.iteration = iteration
    return extension.samples_scored(Batch(places, [], experience, scores))


def test_all_scores_of_a_sample_move_together_within_their_group() -> None:
    batch = shuffled([0, 3], [5, 4])
    place, number = batch.scores.values.unbind(1)
    assert place.tolist() == [0] * 5 + [300] * 4
    assert sorted(number[:5].tolist()) == [0, 1, 2, 3, 4]
    assert sorted(number[5:].tolist()) == [0, 1, 2, 3]
    assert batch.scores.notes["mine"][:5] == [f"0-{k:.0f}" for k in number[:5]]
    assert number.tolist() != [0, 1, 2, 3, 4, 0, 1, 2, 3]


def test_every_order_is_equally_likely() -> None:
    orders = Counter(tuple(shuffled([1], [3], iteration).scores.values[:, 1].tolist()) for iteration in range(1200))
    # 200 of each are expected; the standard error of a count is 13.
    assert len(orders) == 6
    assert all(130 < count < 270 for count in orders.values())


def test_the_order_depends_on_seed_iteration_and_place_alone() -> None:
    def numbers(*arguments: Any) -> list[float]:
        found: list[float] = shuffled(*arguments).scores.values[:, 1].tolist()
        return found

    together = numbers([0, 1], [9, 9])
    # Another process has the second prompt alone.
    assert numbers([1], [9]) == together[9:]
    assert together[:9] != together[9:]
    assert numbers([0], [9], 1) != numbers([0], [9], 0) != numbers([0], [9], 0, 1)


def test_what_is_no_result_keeps_its_score() -> None:
    found = {tuple(shuffled([0], [4], k, hidden={1}).scores.values[:, 1].tolist()) for k in range(50)}
    assert {order[1] for order in found} == {1}
    assert len(found) == 6


def test_a_run_compares_samples_by_moved_scores(small_text: list[str], tmp_path: Path) -> None:
    words = ["rewards=[{name: digit_share}]", "advantage={name: group, scale: none}", "rollout.group=8"]
    plain = trainer_of(small_text, tmp_path / "plain", *words)
    control = trainer_of(small_text, tmp_path / "control", *words, "extensions=[shuffle]")
    first, second = plain.iterate(0), control.iterate(0)
    assert second["reward/total"] == pytest.approx(first["reward/total"], abs=1e-6)
    assert second["grad_norm"] != first["grad_norm"]
    assert second["ratio/first_error"] == 0.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["extensions=[shuffle, shuffle]"], "shuffle 2 times; write it once"),
        (["extensions=[shuffle]", "parts={cut: lines}"], "`parts` scores their parts; leave one out"),
        (
            ["extensions=[shuffle]", "data.templates=['{prompt}', 'Now: {prompt}']"],
            "moves scores among the samples of a prompt, and data.templates samples a prompt in several rounds",
        ),
    ],
)
def test_what_it_cannot_be_combined_with(words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("{", r"\{")):
        load_recipe("text", ["rewards=[{name: answer}]", *words])
