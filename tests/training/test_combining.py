"""Corrected verdicts, gates and ensembles, from the lines of a recipe to the rewards that are learned from."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from flowgrpo.configs.load import load_recipe
from flowgrpo.configs.reward_sections import GateConfig, NoiseConfig, RewardConfig
from flowgrpo.parts.choice import chosen
from flowgrpo.rewards.runner import RewardBatch
from flowgrpo.training.credit.combining import combine


@dataclass(frozen=True)
class Samples:
    """Four samples of two prompts."""

    log_probs: Tensor | None = None
    groups: Tensor = field(default_factory=lambda: torch.tensor([0, 0, 1, 1]))
    outcomes: Tensor = field(default_factory=lambda: torch.ones(4, dtype=torch.bool))


def batch(*columns: list[float], weights: tuple[float, ...] | None = None) -> RewardBatch:
    names = tuple("abc"[: len(columns)])
    given = torch.tensor(weights or [1.0] * len(columns))
    return RewardBatch(torch.tensor(columns).T.contiguous(), names, given, {}, {}, {})


def combined(scores: RewardBatch, *rewards: RewardConfig, how: str = "sum") -> Tensor:
    return combine(scores, Samples(), rewards, chosen("combination", how).make()).values


def test_a_gate_opens_by_sample() -> None:
    scores = batch([1.0, 0.0, 1.0, 0.4], [3.0, 3.0, 5.0, 5.0])
    found = combined(scores, RewardConfig(name="a"), RewardConfig(name="b", gate=GateConfig(reward="a")))
    assert found.tolist() == [[1.0, 3.0], [0.0, 0.0], [1.0, 5.0], [pytest.approx(0.4), 0.0]]
    assert scores.values[1, 1] == 3.0


def test_a_gate_opens_by_group() -> None:
    scores = batch([1.0, 1.0, 1.0, 0.0], [3.0, 4.0, 5.0, 6.0])
    gate = GateConfig(reward="a", share=1.0)
    found = combined(scores, RewardConfig(name="a"), RewardConfig(name="b", gate=gate))
    assert found[:, 1].tolist() == [3.0, 4.0, 0.0, 0.0]


def test_samples_that_are_no_results_open_no_gate_and_are_not_ranked_among_results() -> None:
    """Of each prompt, the second sample is a preview, or the greedy completion beside the group."""
    samples = Samples(torch.tensor([-3.0, 0.0, -1.0, 0.0]), outcomes=torch.tensor([True, False, True, False]))
    kind = chosen("combination", "sum").make()
    gate = GateConfig(reward="a", share=1.0)
    rewards = [RewardConfig(name="a"), RewardConfig(name="b", gate=gate)]
    found = combine(batch([1.0, 0.0, 0.0, 1.0], [3.0, 4.0, 5.0, 6.0]), samples, rewards, kind).values
    assert (found[0, 1], found[2, 1]) == (3.0, 0.0)
    alone = combine(batch([1.0, 1.0, 1.0, 1.0]), samples, [RewardConfig(name="a", unlikely=0.5)], kind).values
    together = replace(samples, groups=torch.tensor([0, 1, 2, 3]), outcomes=torch.ones(4, dtype=torch.bool))
    assert (
        alone.tolist()
        == combine(batch([1.0, 1.0, 1.0, 1.0]), together, [RewardConfig(name="a", unlikely=0.5)], kind).values.tolist()
    )


def test_a_verifier_that_errs() -> None:
    noise = NoiseConfig(false_positive=0.1, false_negative=0.2)
    found = combined(batch([1.0, 0.0, 1.0, 0.0]), RewardConfig(name="a", noise=noise))
    assert found[:2, 0].tolist() == pytest.approx([0.9 / 0.7, -0.1 / 0.7])
    with pytest.raises(ValueError, match="reward a has `noise`, which is for verdicts of 0 and 1"):
        combined(batch([0.5, 0.0, 1.0, 0.0]), RewardConfig(name="a", noise=noise))


def test_a_gate_asks_what_the_reward_said() -> None:
    """Corrected verdicts are no scale on which 0.5 would mean anything."""
    noise = NoiseConfig(false_positive=0.6, false_negative=0.0)
    scores = batch([1.0, 0.0, 1.0, 0.0], [3.0, 3.0, 3.0, 3.0])
    gate = GateConfig(reward="a", at_least=1.0)
    found = combined(scores, RewardConfig(name="a", noise=noise), RewardConfig(name="b", gate=gate))
    assert found[:, 1].tolist() == [3.0, 0.0, 3.0, 0.0]


def test_what_is_compared_apart_is_silent_behind_a_closed_gate() -> None:
    scores = batch([1.0, 0.0, 0.5, 1.0], [3.0, 3.0, 5.0, 5.0])
    gate = GateConfig(reward="a", at_least=0.5, apart=True)
    found = combined(scores, RewardConfig(name="a"), RewardConfig(name="b", gate=gate))
    assert found[:, 1].nan_to_num(-9).tolist() == [3.0, -9.0, 5.0, 5.0]


@pytest.mark.parametrize(
    "line",
    [
        "advantage.scale=none",
        "advantage.baseline=loo",
        "advantage=gdpo",
        "credit=prefix",
        "advantage=anchored",
        "combine=worst",
    ],
)
def test_a_reward_apart_has_a_scale_of_its_own(line: str) -> None:
    rewards = "rewards=[{name: gold}, {name: jpeg_compressibility, gate: {reward: gold, apart: true}}]"
    key, value = line.split("=")
    said = rf"rewards\.1\.gate\.apart compares a reward by a scale of its own, and {key} is {value}; use {key} "
    with pytest.raises(ValueError, match=said):
        load_recipe("text", [rewards, "advantage.scale=group", line])


def test_a_likely_success_is_worth_less() -> None:
    """Of two samples the likelier loses beta / 2, the other nothing; failures stay, and so does what does not apply."""
    scores = batch([1.0, 2.0, 0.0, -1.0])
    log_probs = torch.tensor([-3.0, -7.0, -1.0, -2.0])
    rewards = [RewardConfig(name="a", unlikely=0.5)]
    found = combine(scores, Samples(log_probs), rewards).values
    assert found[:, 0].tolist() == [0.75, 2.0, 0.0, -1.0]
    # Rewards that do not ask stay as they are, and so does what is saved.
    assert combine(scores, Samples(), [RewardConfig(name="a")]).values.tolist() == scores.values.tolist()
    assert scores.values[:, 0].tolist() == [1.0, 2.0, 0.0, -1.0]


def test_ensembles() -> None:
    scores = batch([1.0, 0.0, 2.0, 4.0], [3.0, 0.5, 1.0, 4.0], weights=(1.0, 2.0))
    pair = RewardConfig(name="a"), RewardConfig(name="b", weight=2.0)
    assert combined(scores, *pair, how="worst").tolist() == [[1.0], [0.0], [2.0], [4.0]]
    # Mean less half the variance: of (1, 6) that is 3.5 - 0.5 * 6.25.
    assert float(combined(scores, *pair, how="agreement")[0]) == pytest.approx(3.5 - 0.5 * 6.25)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("rewards=[{name: jpeg_compressibility, gate: {reward: gold}}]", "asks for 'gold'"),
        ("rewards=[{name: gold, at_least: 0.5}]|extensions=[multipliers]", "every reward that counts has `at_least`"),
        ("rewards=[{name: gold, noise: {false_positive: 0.6, false_negative: 0.6}}]", "add up to 1 or more"),
        ("rollout.budget={rounds: 4, most: 2, choice: variance}", "most is 2 with 4 rounds"),
        ("rewards=[{name: gold, unlikely: 0.5}]", "depends on the size of their noise"),
        ("optimizer.updates=2|rollout.budget={}", "one optimizer step"),
        (
            "rewards=[{name: gold}, {name: ocr, gate: {reward: gold, apart: true, share: 0.5}}]",
            "which is for single samples",
        ),
        ("rewards=[{name: gold}, {name: ocr, weight: -1.0, gate: {reward: gold, apart: true}}]", "change the sign"),
        (
            "rewards=[{name: gold}, {name: ocr, gate: {reward: gold, apart: true}}, {name: proxy, gate: {reward: gold, "
            "apart: true}}]",
            "for one reward only, and ocr, proxy have it",
        ),
        (
            "rewards=[{name: gold}, {name: ocr, at_least: 0.5}, {name: proxy, gate: {reward: gold, apart: true}}]",
            "a scale of its own",
        ),
        ("advantage=tracked|credit=depth", "compares samples, not steps or tokens"),
    ],
)
def test_what_does_not_go_together_is_refused(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe("mixgrpo_flash_guard", line.split("|"))
