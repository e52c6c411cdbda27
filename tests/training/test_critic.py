"""The critic learns a known reward, guides towards higher reward, and continues from a checkpoint bit for bit."""

import copy
import json
from pathlib import Path

import pytest
import torch

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.image_recipe import CriticConfig, GuideConfig
from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.pipelines.experience import Experience
from flowgrpo.samplers.kernels import Kernel
from flowgrpo.samplers.plans import window_plan
from flowgrpo.samplers.rollout import RolloutRunner
from flowgrpo.samplers.schedules import shifted_sigmas
from flowgrpo.training.images.critic import Critic
from flowgrpo.training.session import start

SHAPE = (4, 8, 8)
PLAN = window_plan(shifted_sigmas(5, 3.0), [1, 2], Kernel("flow_sde", 0.7), samples=8)


def feature(prompt: str) -> torch.Tensor:
    return torch.tensor([float(len(prompt)), 1.0])


def critic(**settings: float) -> Critic:
    return Critic(CriticConfig(warmup=0, **settings), SHAPE, feature, "a", seed=3)


def experience(seed: int, guide=None) -> tuple[Experience, torch.Tensor]:
    """Eight prompts whose reward is the mean of the image's first channel."""
    keys = [seed * 100 + k for k in range(8)]
    rollout = RolloutRunner(lambda x, i, p: -x, PLAN, SHAPE, guide=guide).run(keys)
    rewards = rollout.x[:, 0].mean((1, 2))
    return Experience(rollout, PLAN, ("a",) * 8, torch.zeros(len(rewards), 3, 1, 1), 1, tuple(keys)), rewards


def test_it_learns_to_expect_the_reward() -> None:
    c = critic(learning_rate=3e-3)
    errors = [c.fit(*experience(seed)) for seed in range(60)]
    # Of a variance of 1.
    assert sum(errors[-10:]) < 10 * 0.4
    e, rewards = experience(999)
    t = e.rollout.transitions[-1]
    expected = c.values(e, t.x, t.coefficients.sigma, t.prompt)
    assert torch.corrcoef(torch.stack([expected, rewards]))[0, 1] > 0.7


def test_its_guide_raises_the_reward_by_noise_of_the_size_it_was_told() -> None:
    c = critic(learning_rate=3e-3)
    for seed in range(60):
        c.fit(*experience(seed))
    guide = c.guide(GuideConfig(scale=0.5), ["a"] * 8, PLAN)
    (plain, before), (guided, after) = experience(7), experience(7, guide)
    assert after.mean() > before.mean()
    for t, p in zip(guided.rollout.transitions, plain.rollout.transitions):
        assert p.shift is None
        assert t.shift is not None
        torch.testing.assert_close(t.shift.flatten(1).square().mean(1).sqrt(), torch.full((len(t.shift),), 0.5))


def test_before_its_start_step_and_during_warm_up_it_does_not_guide() -> None:
    c = Critic(CriticConfig(warmup=1), SHAPE, feature, "a")
    assert c.guide(GuideConfig(), ["a"], PLAN) is None
    c.fit(*experience(0))
    guide = c.guide(GuideConfig(start=2), ["a"], PLAN)
    assert guide is not None
    x = torch.randn(1, *SHAPE)
    assert guide(x, x, 1, [0]).abs().max() == 0
    assert guide(x, x, 2, [0]).abs().max() > 0


@pytest.mark.slow
def test_rewards_are_measured_in_units_of_their_spread() -> None:
    c = critic()
    e, _ = experience(0)
    for _ in range(200):
        c.fit(e, torch.linspace(2.0, 4.0, 64))
    scaled = c.standardise(torch.linspace(2.0, 4.0, 64))
    torch.testing.assert_close(scaled.mean(), torch.tensor(0.0), atol=1e-3, rtol=0)
    torch.testing.assert_close(scaled.square().mean(), torch.tensor(1.0), atol=1e-2, rtol=0)


def test_missing_rewards_are_left_out() -> None:
    c = critic()
    e, rewards = experience(1)
    assert c.fit(e, rewards.index_fill(0, torch.arange(4), torch.nan)) > 0
    assert all(p.isfinite().all() for p in c.network.parameters())


def test_it_goes_on_from_its_state_to_the_bit() -> None:
    one = critic()
    one.fit(*experience(0))
    other = Critic(one.settings, SHAPE, feature, "a", seed=9)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for c in (one, other):
        c.fit(*experience(1))
    assert all(torch.equal(a, b) for a, b in zip(one.network.parameters(), other.network.parameters()))


def test_it_reads_packed_and_video_latents() -> None:
    for shape in ((16, 8), (4, 2, 6, 6)):
        c = Critic(CriticConfig(), shape, feature, "a")
        assert c._values(torch.randn(3, *shape), 0.5, ["a", "bb", "c"]).shape == (3,)


def test_it_learns_the_rewards_that_advantages_are_computed_from(small: list[str], tmp_path: Path) -> None:
    """A gate closes a reward for the critic, too: else a step would be compared with what is not optimised."""
    gated = "rewards=[{name: gold, label: main}, {name: jpeg_compressibility, gate: {reward: main, at_least: 2.0}}]"
    recipe = load_recipe(
        "ac_flow", [*small, gated, "sampler.plan.window={name: random, size: 1, interval: 1, stop: 3}"]
    )
    trainer = start(recipe, tmp_path / "run").trainer(Silent())
    learned: list[torch.Tensor] = []
    trainer.task.critic.fit = lambda experience, rewards: learned.append(rewards) or 0.0  # type: ignore[attr-defined]
    trainer.iterate(0)
    record = json.loads((tmp_path / "run" / "samples" / "index.jsonl").read_text().splitlines()[0])
    assert record["rewards"]["jpeg_compressibility"] != 0.0
    assert set(learned[0].tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize(
    "rounds", ["rollout.budget={choice: until, rounds: 2}", "data.templates=['{prompt}', 'so {prompt}']"]
)
def test_it_is_refused_where_a_prompt_has_several_rollouts(rounds: str) -> None:
    with pytest.raises(RecipeError, match=r"the critic learns from one rollout, and .* in several rounds"):
        load_recipe("euphonium", ["credit=leaf", rounds])
