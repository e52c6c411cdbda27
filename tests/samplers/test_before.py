"""What papers do around the window: another solver before it, a shifted table, updates that share the edges."""

from __future__ import annotations

import pytest
import torch

from flowgrpo.configs.load import RecipeError, load_image_recipe
from flowgrpo.samplers.kernels import Kernel
from flowgrpo.samplers.plans import spine_plan
from flowgrpo.samplers.rollout import RolloutRunner
from flowgrpo.samplers.schedules import shifted_sigmas
from flowgrpo.samplers.solvers import called
from flowgrpo.samplers.transitions import edge_bounds
from flowgrpo.training.planning import levels_of, planner

LATER = 60  # By this iteration the window of mixgrpo_flash has left the first steps.


def solvers(*words: str) -> list[str]:
    recipe = load_image_recipe("mixgrpo_flash", list(words))
    plan = planner(recipe, levels_of(recipe))(LATER)
    assert plan.trained_steps == (3, 4, 5, 6)
    return [called(step.solver) for step in plan.steps]


def test_flash_takes_steps_of_euler_before_its_window():
    assert solvers()[:3] == ["euler"] * 3
    assert set(solvers()[7:]) == {"dpmpp_2m"}


def test_without_it_the_solver_is_one():
    assert set(solvers("sampler.plan.before=null")) == {"dpmpp_2m"}


def test_it_needs_deterministic_steps():
    recipe = load_image_recipe("dance_grpo", ["sampler.plan.before=euler"])
    with pytest.raises(ValueError, match="before is the solver of the deterministic steps before the window"):
        planner(recipe, levels_of(recipe))(0)


@pytest.mark.parametrize(
    ("counts", "updates", "bounds"),
    [
        ([12, 24, 48, 96, 96, 96, 96, 96, 96], 4, [0, 4, 6, 7, 9]),
        ([1, 1, 1, 1], 2, [0, 2, 4]),
        ([5, 5], 1, [0, 2]),
        # Every update has a batch, even if one batch has most of the edges.
        ([10, 1, 1], 3, [0, 1, 2, 3]),
        ([1, 1, 10], 3, [0, 1, 2, 3]),
    ],
)
def test_updates_have_about_as_many_edges_each(counts: list[int], updates: int, bounds: list[int]):
    assert edge_bounds(counts, updates) == bounds


def test_more_updates_than_batches_are_refused():
    with pytest.raises(ValueError, match=r"updates is 4 with optimizer\.cut edges, and a rollout has 3 batches"):
        edge_bounds([1, 1, 1], 4)


def test_a_shift_is_the_table_of_rollouts_and_evaluations():
    recipe = load_image_recipe("dance_grpo", ["sampler.shift=3.0", "sampler.steps=4", "evaluate.steps=2"])
    own = (1.0, 0.5, 0.0)
    # 3 t / (1 + 2 t) at t = 1, 3/4, 1/2, 1/4, 0.
    assert levels_of(recipe, own) == pytest.approx((1.0, 0.9, 0.75, 0.5, 0.0))
    assert levels_of(recipe, own, evaluation=True) == pytest.approx((1.0, 0.75, 0.0))
    plain = load_image_recipe("dance_grpo", ["sampler.steps=4", "evaluate.steps=2"])
    assert levels_of(plain, own) == levels_of(plain, own, evaluation=True) == own
    assert levels_of(plain) == shifted_sigmas(4)


def test_two_tables_are_refused():
    with pytest.raises(RecipeError, match="leave one of them out"):
        load_image_recipe("dance_grpo", ["sampler.shift=3.0", "sampler.sigmas=[1.0, 0.5, 0.0]"])


def test_strides_may_begin_later():
    """Of 6 steps, a branch at step 1 that takes one step first goes on from level 3: to 4, 5, 6, or to 5 and 6."""
    sigmas = shifted_sigmas(6)
    plan = spine_plan(sigmas, [1], Kernel("flow_sde", 0.7), branches=2, completions=(1, 2), lead=1)
    reached: dict[int, list[float]] = {}

    def velocity(x: torch.Tensor, i: int, rows: list[int]) -> torch.Tensor:
        reached.setdefault(i, []).append(len(x))
        return 0.1 * x

    rollout = RolloutRunner(velocity, plan, (2,), dtype=torch.float32, device="cpu", batch=64).run([7])
    assert {i: sum(counts) for i, counts in reached.items()} == {0: 1, 1: 1, 2: 2, 3: 2, 4: 2, 5: 4}
    assert plan.counts().evaluations == rollout.evaluations == 12
    assert sorted(rollout.stride[rollout.leaf].tolist()) == [1, 1, 2, 2]


def test_a_lead_is_not_negative():
    with pytest.raises(ValueError, match="lead is -1"):
        spine_plan(shifted_sigmas(6), [1], Kernel("flow_sde", 0.7), branches=2, lead=-1)


def test_a_lead_needs_strides():
    recipe = load_image_recipe("tempflow_grpo", ["sampler.plan.lead=1"])
    with pytest.raises(ValueError, match="lead is 1 and all strides"):
        planner(recipe, levels_of(recipe))(0)
