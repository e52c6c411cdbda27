"""Noise levels between the levels of the sampler, for losses of the forward process."""

from pathlib import Path

import pytest
import torch

from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.core.forward_process import levels_to_draw
from flowgrpo.pipelines.denoiser import Denoiser
from flowgrpo.training.losses.forward import ForwardObjective
from flowgrpo.training.losses.noise_levels import Density, NoiseLevel, draw_levels
from flowgrpo.training.planning import forecast, images_line, nfe_of
from flowgrpo.training.trainer import Trainer
from tests.training.test_objectives import FORWARD, gradient, trainer_of

SIGMAS = (1.0, 0.9, 0.7, 0.4, 0.0)


def drawn(steps: range, times: int | None, density: Density, seed: int) -> list[NoiseLevel]:
    return draw_levels(SIGMAS, steps, times, "between", density, torch.Generator().manual_seed(seed))


def place(level: NoiseLevel) -> float:
    """Where a level lies on the line through the sampler's levels, in steps."""
    above, below = SIGMAS[level.step], SIGMAS[level.step + 1]
    return level.step + (above - level.sigma) / (above - below)


def test_one_level_is_drawn_in_each_range_of_equal_probability() -> None:
    for density in ("uniform", "logit_normal", "falling"):
        places = torch.tensor([[place(level) for level in drawn(range(4), 3, density, seed)] for seed in range(600)])
        shares = places.double() / 4.0
        if density == "logit_normal":
            shares = torch.special.ndtr(shares.logit())
        elif density == "falling":
            shares = 1.0 - (1.0 - shares).square()
        low = torch.arange(3) / 3.0
        assert bool(((shares > low - 1e-5) & (shares < low + 1 / 3 + 1e-5)).all())
        # Within its range, a place is uniform: 600 places have a standard error of 0.012 ranges in their mean.
        within = (shares - low) * 3.0
        assert within.mean(0).tolist() == pytest.approx([0.5] * 3, abs=0.05)
        assert within.var(0).tolist() == pytest.approx([1 / 12] * 3, abs=0.015)


def test_levels_fall_and_are_above_zero() -> None:
    for seed in range(50):
        sigmas = [level.sigma for level in drawn(range(4), 40, "uniform", seed)]
        assert sigmas == sorted(sigmas, reverse=True)
        assert 0.0 < sigmas[-1] < sigmas[0] <= 1.0
        assert len({level.address for level in drawn(range(4), 40, "uniform", seed)}) == 40
    assert len(drawn(range(4), None, "uniform", 0)) == 4


def test_levels_keep_to_the_steps_that_may_be_drawn() -> None:
    assert levels_to_draw(4, between=True) == range(4)
    assert levels_to_draw(4, levels=3, skip=1, between=True) == range(1, 3)
    for seed in range(50):
        sigmas = [level.sigma for level in drawn(range(1, 3), 5, "logit_normal", seed)]
        assert 0.4 < sigmas[-1] < sigmas[0] < 0.9


def between(name: str, model: Path, folder: Path, *more: str) -> tuple[Trainer, ForwardObjective]:
    words = ("objective.draw=between", "objective.skip=0", "objective.times=5", *more)
    trainer = trainer_of(name, model, folder, *words)
    assert isinstance(trainer.objective, ForwardObjective)
    return trainer, trainer.objective


@pytest.mark.slow
def test_images_are_noised_and_evaluated_at_the_drawn_level(random_pipeline: Path, tmp_path: Path) -> None:
    trainer, objective = between("awm", random_pipeline, tmp_path / "run")
    _, e = trainer.collect(0)
    policy = trainer.task.policy
    plain = Denoiser(policy.denoiser.pipe, num_steps=4, call=policy.denoiser.caller.call)
    noises = []
    for batch in objective.batches(e, 0, None):
        sigma = batch.level.sigma
        assert sigma not in e.plan.sigmas
        x0, noise, x = objective._noised(e, batch)
        torch.testing.assert_close(x, (1 - sigma) * x0 + sigma * noise)
        plain.bind([sigma, 0.0])
        prompts = [e.prompts[p] for p in e.rollout.leaf_prompt[batch.leaves].tolist()]
        with torch.no_grad():
            assert torch.equal(objective._velocity(e, batch, x), plain.velocity(x, 0, prompts))
        noises.append(noise[0])
    assert len(noises) == 5
    # Two levels of one step have noises of their own.
    assert len({tuple(noise.flatten().tolist()) for noise in noises}) == 5
    # The next rollout has the sampler's own levels again.
    trainer.collect(1)
    assert policy.denoiser.sigmas == e.plan.sigmas


@pytest.mark.slow
@pytest.mark.parametrize("name", FORWARD)
def test_ratios_are_exactly_one_and_gradients_do_not_depend_on_the_size_of_calls(
    name: str, random_pipeline: Path, tmp_path: Path
) -> None:
    trainer, _ = between(name, random_pipeline, tmp_path / "run", "objective.density=logit_normal")
    _, e = trainer.collect(0)
    advantages = torch.linspace(-1, 1, len(e.rollout.parent))
    whole, outcomes = gradient(trainer, e, advantages)
    assert all(float(one.error) == 0.0 for one in outcomes)
    trainer.task.policy.batch = 3
    parts, _ = gradient(trainer, e, advantages)
    scale = max(float(g.abs().max()) for g in whole.values())
    assert scale > 0
    assert all(float((whole[n] - parts[n]).abs().max()) < 1e-4 * scale for n in whole)


@pytest.mark.slow
def test_several_updates_compare_with_the_policy_before_them(random_pipeline: Path, tmp_path: Path) -> None:
    more = ("optimizer.epochs=2", "optimizer.learning_rate=0.01")
    trainer, _ = between("awm", random_pipeline, tmp_path / "run", *more)
    _, e = trainer.collect(0)
    record = trainer.update(e, torch.linspace(-1, 1, len(e.rollout.parent)))
    assert record["ratio/first_error"] == 0.0
    assert record["log_ratio_sq"] > 0.0


@pytest.mark.slow
def test_a_pipeline_with_levels_of_its_own_says_how_to_draw(random_pipeline: Path, tmp_path: Path) -> None:
    trainer, _ = between("awm", random_pipeline, tmp_path / "run", "model.variant=slice")
    with pytest.raises(ValueError, match=r"only be evaluated at its own noise levels.* and draw: ranges"):
        trainer.iterate(0)


def test_the_plan_counts_levels_between() -> None:
    recipe = load_recipe("awm", ["objective.draw=between", "objective.times=12"])
    assert nfe_of(recipe, forecast(recipe)).theta == 12
    assert images_line(recipe).endswith("each at 12 noise levels between the levels of the sampler")
    # Pure noise is not drawn, so no two images of a prompt are one state.
    assert nfe_of(recipe, forecast(recipe)).theta_shared == 12


def test_a_density_belongs_to_levels_between() -> None:
    with pytest.raises(RecipeError, match=r"objective\.draw is ranges; add draw: between, or leave density out"):
        load_recipe("awm", ["objective.density=logit_normal"])
    load_recipe("awm", ["objective.density=logit_normal", "objective.draw=between", "objective.skip=0"])
