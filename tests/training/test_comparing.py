"""Advantages by the names that a recipe has for them: each compares samples, and a choice that cannot be is refused."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowgrpo.configs.load import load_recipe
from flowgrpo.configs.reward_sections import RewardConfig
from flowgrpo.core.baselines import virtual_maximum_advantages
from flowgrpo.parts.choice import chosen
from flowgrpo.rewards.runner import RewardBatch
from flowgrpo.training.credit.combining import combine
from flowgrpo.training.credit.comparing import ADVANTAGES, SAMPLES, compare

REWARDS, GROUPS = torch.tensor([0.0, 1, 0, 0]), torch.tensor([0, 0, 1, 1])
OPTIONS: dict[str, dict[str, Any]] = {"stratified": {"stratum": {"reward": "r"}}}


def test_whole_numbers_of_an_advantage_or_a_combination_are_numbers_like_others() -> None:
    samples = SimpleNamespace(groups=GROUPS, outcomes=torch.ones(4, dtype=torch.bool), log_probs=None)
    scores = RewardBatch(REWARDS[:, None], ("r",), torch.ones(1), {}, {}, {})
    signs = compare(lambda rewards, groups: (rewards > 0).long() * 2 - 1, scores, samples)
    assert (signs.dtype, signs.tolist()) == (torch.float32, [-1.0, 1.0, -1.0, -1.0])
    made = combine(scores, samples, [RewardConfig(name="r")], lambda given: given[:, 0].long())
    assert (made.values.dtype, made.values.tolist()) == (torch.float32, [[0.0], [1.0], [0.0], [0.0]])
    with pytest.raises(ValueError, match=r"a combination has to give one number a sample, .* it gave list"):
        combine(scores, samples, [RewardConfig(name="r")], lambda given: [1.0] * 4)  # type: ignore[arg-type,return-value]


def compared(name: str, **options: Any) -> torch.Tensor:
    """Advantages of two groups, where one sample alone has a reward."""
    everything = torch.ones(4, dtype=torch.bool)
    samples = SimpleNamespace(
        groups=GROUPS, outcomes=everything, lengths=torch.ones(4), prompts=GROUPS.tolist(), strata=GROUPS,
        divergence=None,
    )  # fmt: skip
    scores = RewardBatch(REWARDS[:, None], ("r",), torch.ones(1), {}, {}, {})
    return compare(chosen("advantage", {"name": name, **options}).make(), scores, samples)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_sample_with_a_reward_is_the_better_one(name: str) -> None:
    found = compared(name, **OPTIONS.get(name, {}))
    assert found.shape == (4,)
    assert found[0] < found[1]


def test_options_reach_the_function() -> None:
    found = compared("virtual_maximum", maximum=2.0, ddof=0)
    assert torch.equal(found, virtual_maximum_advantages(REWARDS, GROUPS, maximum=2.0, ddof=0))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("grpo", "there is no advantage 'grpo'; did you mean 'gdpo' or 'group'?"),
        ("{name: beta, eps: 1.0}", "advantage beta has no option 'eps'; it has none"),
        ("{name: quantile, level: 0.1}", "advantage quantile has no option 'level'"),
        ("{name: quantile, low: 0.9}", "advantage.low is 0.9 and advantage.high 0.8; use a low level below the high"),
        ("{name: group, scale: std}", "advantage.scale: Input should be 'group', 'batch' or 'none' (got 'std')"),
        ("{name: stratified, alpha: 1.5, stratum: {reward: gold_dense}}", "advantage.alpha: Input should be less than"),
    ],
)
def test_a_choice_that_cannot_be_is_refused_at_once(line: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        load_recipe("mixgrpo_guard", [f"advantage={line}"])


def test_an_advantage_is_given_what_it_asks_for_and_nothing_else() -> None:
    def mine(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        return rewards - groups

    samples = SimpleNamespace(groups=GROUPS, outcomes=torch.ones(4, dtype=torch.bool))
    scores = RewardBatch(REWARDS[:, None], ("r",), torch.ones(1), {}, {}, {})
    assert not set(SAMPLES) & set(vars(samples))
    assert compare(mine, scores, samples).tolist() == [0.0, 1.0, -1.0, -1.0]


def test_an_advantage_that_is_no_number_is_refused_only_where_there_is_a_reward() -> None:
    rewards = torch.tensor([0.0, 1, torch.nan, 0])
    samples = SimpleNamespace(groups=GROUPS, outcomes=torch.ones(4, dtype=torch.bool))
    scores = RewardBatch(rewards[:, None], ("r",), torch.ones(1), {}, {}, {})
    for found in (lambda given, groups: given, lambda given, groups: given.nan_to_num(torch.inf)):
        compare(found, scores, samples)
    with pytest.raises(ValueError, match=r"the advantage gave nan for 2 of 3 samples or steps that have rewards;"):
        compare(lambda given, groups: given / given, scores, samples)
