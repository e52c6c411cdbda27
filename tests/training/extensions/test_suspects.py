"""Images that the trained reward overrates are marked for a penalty, and their share follows the overrating."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.rewards.score_batches import RewardBatch
from flowgrpo.training.credit.pooling import Batch, Pooled
from flowgrpo.training.extensions import EXTENSIONS
from flowgrpo.training.extensions.extension import Rewards
from flowgrpo.training.joined_rollouts import JoinedRollouts
from tests.parts.own_parts import IMAGES, same_when_resumed

TRAINED, LIGHT = [4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]
TWO = "rewards=[{name: jpeg_compressibility}, {name: paint, weight: 0}]"
GATED = [
    TWO, "penalties=[{name: gated_kl, weight: 0.01}]", "extensions=[{name: suspects, light: [paint], share: 0.2}]",
]  # fmt: skip


def suspects(**options: Any) -> Any:
    entries = load_recipe("flow_grpo", [TWO]).rewards
    rewards = Rewards(entries, [entry.known_as for entry in entries])
    return EXTENSIONS["suspects"](light=["paint"], rewards=rewards, **options)  # type: ignore[call-arg]


def pooled(mine: list[int], outcomes: list[bool] | None = None) -> Pooled:
    values = torch.tensor([TRAINED, LIGHT]).T
    scores = RewardBatch(values, ("jpeg_compressibility", "paint"), torch.tensor([1.0, 0.0]), {}, {}, {})
    return Pooled(
        scores, [0] * 4, torch.zeros(4, dtype=torch.long), torch.tensor(outcomes or [True] * 4), None, None, None, mine
    )


class Marked:
    """An experience of chains, whose nodes are their leaves."""

    def __init__(self) -> None:
        self.marks: dict[str, torch.Tensor] = {}

    def node_advantages(self, leaf: torch.Tensor) -> torch.Tensor:
        return leaf

    def mark(self, name: str, values: torch.Tensor) -> None:
        self.marks[name] = values


def marks_of(mine: list[int], extension: Any) -> list[float]:
    experience = Marked()
    advantages = torch.randn(len(mine))
    batch = Batch([0], [], experience, SimpleNamespace())  # type: ignore[arg-type]
    assert extension.advantages_made(advantages, pooled(mine), batch) is advantages
    found: list[float] = experience.marks["suspect"].tolist()
    return found


def test_the_suspects_of_all_processes_share_the_weight_of_all_images() -> None:
    # Two of four images are not underrated, with 0.75 and 0.25; the first of them is above the quantile.
    assert marks_of([0, 1, 2, 3], suspects()) == [4.0, 0.0, 0.0, 0.0]
    # The mark of an image does not depend on the process that has it.
    assert marks_of([2, 0], suspects()) == [0.0, 4.0]
    assert marks_of([1, 3], suspects()) == [0.0, 0.0]


class Chains(Marked):
    """A rollout of some prompts with one chain each, whose nodes are twice as many as its leaves."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.prompt_of_sample = list(range(count))

    def kept(self, chosen: torch.Tensor) -> torch.Tensor:
        return chosen.repeat_interleave(2)


class Joined(JoinedRollouts):
    kinds = groups = siblings = None  # type: ignore[assignment]


def test_each_of_several_rollouts_gets_the_marks_of_its_nodes() -> None:
    rounds = Chains(1), Chains(2)
    Joined(rounds, ((0,), (0, 1))).mark("suspect", torch.arange(6.0))  # type: ignore[arg-type]
    assert [one.marks["suspect"].tolist() for one in rounds] == [[0.0, 1.0], [2.0, 3.0, 4.0, 5.0]]


def test_a_preview_is_not_ranked() -> None:
    assert torch.tensor([False, True, True, True]).equal(
        suspects().overrated(pooled([0, 1, 2, 3], [False, True, True, True])).isfinite()
    )


def test_the_share_follows_the_largest_and_the_smallest_mean_of_the_window() -> None:
    extension = suspects(share=0.1, least=0.09, most=0.12, rate=0.1, window=2)
    # No mean is known at first; then a larger, a middle one, a smaller, and the same as the smallest.
    for mean, share in (
        (0.5, 0.1),
        (0.6, 0.11),
        (0.55, 0.11),
        (0.5, 0.099),
        (0.5, 0.099),
        (0.6, 0.1089),
        (0.7, 0.1198),
    ):
        extension.follow(mean)
        assert extension.portion == pytest.approx(share, abs=1e-4)
    extension.follow(0.9)
    assert extension.portion == 0.12
    assert extension.means == [0.7, 0.9]
    for mean in (0.3, 0.2, 0.1, 0.05):
        extension.follow(mean)
    assert extension.portion == 0.09


@pytest.mark.slow
def test_a_gated_run_resumes_to_the_last_bit(tmp_path: Path) -> None:
    words = [word for word in IMAGES if not word.startswith(("rewards", "extensions", "penalties"))]
    same_when_resumed("flow_grpo", [*words, *GATED], tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    records = [line for line in lines if "loss" in line]
    assert all(0 <= line["suspects/marked"] < 0.5 for line in records)
    assert any(line["suspects/marked"] > 0 for line in records)
    assert records[0]["suspects/share"] == 0.2
    assert any(line["gated_kl"] > 0 for line in records)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["extensions=[]"], "penalty gated_kl is for suspect images, and nothing says which images are suspect; add "),
        (["penalties=[{name: kl, weight: 0.1}]"], "marks images for penalty gated_kl, which is missing; add "),
        (["extensions.suspects.light=[gold]"], "asks reward 'gold'; the rewards are jpeg_compressibility, paint"),
        (["extensions.suspects.light=[jpeg_compressibility]"], "with itself; leave jpeg_compressibility out of light"),
        (["extensions.suspects.reward=paint", "extensions.suspects.light=[jpeg_compressibility]"],
         "and paint has weight 0, so nothing optimises it; name a reward with another weight as `reward`"),
        (["extensions.suspects.share=0.5"], "share is 0.5, and it moves between least 0.02 and most 0.2; use a share"),
        (["extensions=[{name: suspects, light: [paint]}, {name: suspects, light: [paint]}]"],
         "suspects 2 times; write it once"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_with_what_to_write(words: list[str], said: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe("flow_grpo", [*GATED, *words])
    assert said in str(error.value)


def test_text_has_no_suspects() -> None:
    with pytest.raises(RecipeError, match="marks images for a penalty of images"):
        load_recipe("text", ["extensions=[{name: suspects, light: [answer]}]"])
