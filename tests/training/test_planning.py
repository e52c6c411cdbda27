"""From a recipe to plans and costs: windows, Flash tables, and counts in closed form."""

import math
from typing import Any

import pytest

from flowgrpo.configs.load import load_image_recipe
from flowgrpo.configs.schema import Recipe
from flowgrpo.samplers.schedules import shifted_sigmas
from flowgrpo.samplers.windows import progressive
from flowgrpo.training.planning import Nfe, clip_bounds, forecast, nfe_of, planner, step_ranges, steps_to_train

KINDS = ("progressive", "random", "decay", "exp_decay", "frozen", "all")


def recipe(**sections: Any) -> Recipe:
    return Recipe.model_validate({"rewards": [{"name": "gold"}], **sections})


def windowed(**window: Any) -> Recipe:
    return recipe(sampler={"steps": 10, "plan": {"window": window}})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flash", [None, 0.4])
def test_the_last_step_is_never_trained(kind: str, flash: float | None):
    options = {"all": {}, "frozen": {"size": 3}}.get(kind, {"size": 3, "interval": 2})
    chain = {"flash_ratio": flash, "window": {"name": kind, **options}}
    made = recipe(sampler={"steps": 10, "plan": chain}, rollout={"group": 3})
    plan_for = planner(made, shifted_sigmas(10, 3.0))
    reached = set()
    for iteration in range(60):
        plan = plan_for(iteration)
        window = plan.trained_steps
        reached.add(window)
        assert window == tuple(range(window[0], window[0] + (9 if kind == "all" else 3)))
        assert window[-1] < plan.num_steps - 1
        assert plan.sigmas[-1] == 0.0
    assert len(reached) == (1 if kind in ("frozen", "all") else 7)


def test_the_window_is_the_schedules_for_every_iteration():
    made = windowed(size=2, stride=2, interval=3, start=1, stop=6)
    plan_for = planner(made, shifted_sigmas(10))
    expected = [tuple(progressive(i, 10, 0, size=2, stride=2, interval=3, start=1, stop=6)) for i in range(20)]
    assert [plan_for(i).trained_steps for i in range(20)] == expected
    assert [plan_for(i).trained_steps[0] for i in range(10)] == [1, 1, 1, 3, 3, 3, 4, 4, 4, 1]


def test_random_windows_follow_the_runs_seed():
    def windows(seed: int) -> list[tuple[int, ...]]:
        chain = {"window": {"name": "random", "size": 2, "interval": 1}}
        made = recipe(sampler={"plan": chain}, run={"seed": seed}, rollout={"group": 2})
        plan_for = planner(made, shifted_sigmas(10))
        return [plan_for(i).trained_steps for i in range(30)]

    assert windows(1) == windows(1)
    assert windows(1) != windows(2)


@pytest.mark.parametrize(
    ("window", "steps"),
    [
        ({"name": "random", "size": 1, "interval": 1, "stop": 4}, range(4)),
        ({"name": "progressive", "size": 2, "interval": 5, "start": 1}, range(1, 4)),
        ({"name": "frozen", "size": 2, "start": 1}, range(1, 3)),
        ({"name": "all"}, range(4)),
    ],
)
def test_the_steps_that_some_iteration_may_train(window: dict[str, Any], steps: range):
    made = recipe(sampler={"steps": 5, "plan": {"window": window}}, run={"iterations": 200})
    assert steps_to_train(made) == steps
    drawn = {step for k in range(200) for step in planner(made, [1 - k / 5 for k in range(6)])(k).trained_steps}
    assert drawn == set(steps)
    assert steps_to_train(load_image_recipe("diffusion_nft")) is None


def test_only_the_window_is_stochastic():
    plan = planner(windowed(size=4, start=2, name="frozen"), shifted_sigmas(10))(0)
    assert [step.kernel.name for step in plan.steps] == ["ode"] * 2 + ["flow_sde"] * 4 + ["ode"] * 4


def test_flash_takes_fewer_steps_after_the_window_and_the_same_before():
    def flash(ratio: float) -> Recipe:
        chain = {"flash_ratio": ratio, "window": {"size": 2, "start": 2, "name": "frozen"}}
        return recipe(sampler={"steps": 10, "plan": chain}, rollout={"group": 2})

    sigmas = shifted_sigmas(10, 3.0)
    plan = planner(flash(0.5), sigmas)(0)
    # last = 3, n_post = int((10 - 3) / 2) = 3: last + n_post evaluations.
    assert plan.num_steps == 6
    assert plan.sigmas[:5] == sigmas[:5]
    # Two strides of three steps each, even in step index.
    assert plan.sigmas[5] == pytest.approx(sigmas[7])
    assert planner(flash(1.0), sigmas)(0).sigmas == sigmas


@pytest.mark.parametrize("start", [0, 3, 5])
@pytest.mark.parametrize("shared", [True, False])
def test_costs_of_a_window_in_closed_form(start: int, shared: bool):
    steps, size, group, prompts = 10, 4, 6, 5
    made = recipe(
        sampler={
            "steps": steps,
            "plan": {"shared_noise": shared, "window": {"name": "frozen", "size": size, "start": start}},
        },
        rollout={"group": group, "prompts": prompts},
        run={"iterations": 7},
    )
    expected = forecast(made)
    (counts,) = expected.counts
    before = start + 1 if shared else group * (start + 1)  # states up to the first stochastic step, it included
    assert counts.evaluations == before + group * (steps - start - 1)
    assert counts.chain_evaluations == group * steps
    assert counts.leaves == group
    assert counts.edges == (start if shared else group * start) + group * (steps - start)
    assert counts.trained_edges == group * size
    assert counts.trained_states == (1 if shared else group) + group * (size - 1)
    assert counts.trained_steps == tuple(range(start, start + size))
    assert expected.windows == [7]
    assert expected.images == prompts * group


def test_iterations_are_counted_by_window():
    chain = {"window": {"size": 4, "interval": 10, "stop": 6}}
    made = recipe(sampler={"plan": chain}, rollout={"group": 2}, run={"iterations": 200})
    expected = forecast(made)
    assert [counts.trained_steps[0] for counts in expected.counts] == [0, 1, 2]
    assert expected.windows == [70, 70, 60]


def test_costs_of_a_tree_that_splits():
    made = recipe(
        sampler={"steps": 4, "plan": {"name": "branch", "splits": [0, 2], "width": 3, "spread": 0.5}},
        rollout={"prompts": 2, "group": 9},
    )
    expected = forecast(made)
    (counts,) = expected.counts
    assert counts.leaves == 9
    assert counts.evaluations == 1 + 3 + 3 + 9
    assert counts.edges == 3 + 3 + 9 + 9
    assert counts.trained_steps == (0, 1, 2)
    assert counts.trained_edges == 3 + 3 + 9
    assert counts.trained_states == 1 + 3 + 3
    assert expected.images == 18


def test_costs_of_a_spine_with_branches():
    spine = {"name": "spine", "splits": [0, 2], "width": 5}
    made = recipe(sampler={"plan": spine, "steps": 4}, rollout={"prompts": 3, "group": 2})
    expected = forecast(made)
    (counts,) = expected.counts
    assert counts.leaves == 2 * 2 * 5
    assert counts.trained_edges == 20
    assert counts.trained_states == 2 * 2
    # Per root: the main line is evaluated at steps 0, 1, 2; five branches at 1, 2, 3 and five more at 3.
    assert counts.evaluations == 2 * (3 + 5 * 3 + 5)
    assert expected.images == 60


def test_the_pipelines_own_table_decides_where_it_is_known():
    made = windowed(size=4)
    assert forecast(made).counts[0].chain_evaluations == 10 * made.rollout.group
    longer = shifted_sigmas(20, 3.0)
    assert forecast(made, longer).counts[0].chain_evaluations == 20 * made.rollout.group
    sigmas = [1.0, 0.9, 0.7, 0.4, 0.2, 0.0]
    listed = recipe(sampler={"sigmas": sigmas, "plan": {"window": {"size": 2}}})
    assert forecast(listed).counts[0].chain_evaluations == 5 * made.rollout.group


def test_optimizer_steps_and_the_on_policy_one():
    made = recipe(optimizer={"updates": 4, "epochs": 2})
    assert forecast(made).optimizer_steps == 8
    assert forecast(made).on_policy_steps == 1


def test_clip_in_nats_and_as_a_mean():
    nats = recipe(objective={"surrogate": {"name": "clip_nats", "nats": 0.5}})
    assert clip_bounds(nats, 512) == (0.5 / 512, 0.5)
    assert clip_bounds(nats, None) == (None, 0.5)
    mean = recipe(objective={"surrogate": {"high": 1e-3}})
    assert clip_bounds(mean, 512) == (1e-3, pytest.approx(0.512))
    assert clip_bounds(mean, None) == (1e-3, None)
    assert clip_bounds(recipe(objective={"surrogate": "sapo"}), 512) == (None, None)
    # It bounds a weight, and no entry loses its gradient.
    assert clip_bounds(recipe(objective={"surrogate": {"name": "cispo", "high": 5.0}}), 512) == (None, None)
    assert clip_bounds(recipe(objective={"surrogate": {"high": float("inf")}}), 512)[1] is None


@pytest.mark.parametrize(
    ("sections", "elements", "part"),
    [
        ({"objective": {"surrogate": {"name": "clip_nats", "nats": 0.5}}}, 512, "strictly on-policy"),
        (
            {"objective": {"surrogate": {"name": "clip_nats", "nats": 0.5}}, "optimizer": {"updates": 2}},
            10**9,
            "below the resolution of float32",
        ),
        ({"objective": {"surrogate": {"high": 0.1}}, "optimizer": {"epochs": 2}}, 512, "hardly binds; surrogate clip_"),
        (
            {"objective": {"surrogate": {"name": "clip_nats", "nats": 9.0}}, "optimizer": {"epochs": 2}},
            512,
            "hardly binds; lower objective.surrogate.nats",
        ),
        ({"sampler": {"kernel": "cps"}}, None, "true density"),
        ({"model": {"reference_call": {"guidance_scale": 4.5}}}, None, "no part compares with the reference"),
        ({"objective": {"surrogate": {"name": "clip_nats", "nats": 0.5}}, "optimizer": {"updates": 2}}, 512, None),
    ],
)
def test_warnings_say_what_the_clip_does(sections: dict[str, Any], elements: int | None, part: str | None):
    said = forecast(recipe(**sections), elements=elements).warnings
    if part is None:
        assert said == []
    else:
        assert any(part in line for line in said), said


@pytest.mark.parametrize(
    ("steps", "text"), [((3,), "3"), ((0, 1, 2), "0–2"), ((0, 2), "0, 2"), ((0, 1, 4, 6, 7), "0–1, 4, 6–7")]
)
def test_step_numbers_are_drawn_together_only_where_they_are_neighbours(steps: tuple[int, ...], text: str) -> None:
    assert step_ranges(steps) == text


def test_a_window_says_what_is_trained_of_a_tree_and_pruning_what_is_not():
    def tree(**options: Any) -> Recipe:
        window = {"window": {"size": 4, "name": "frozen"}}
        plan = {"name": "branch", "splits": [0, 1], **window, **options}
        return recipe(sampler={"steps": 6, "plan": plan}, rollout={"group": 4})

    (counts,) = forecast(tree()).counts
    assert counts.trained_steps == (0, 1, 2, 3)
    pruned = {"size": 2, "start": 1, "name": "progressive", "interval": 1}
    steps = [c.trained_steps for c in forecast(tree(pruned=pruned)).counts]
    assert steps == [(0, 3), (0, 1), (0, 1, 2)]
    (mixed,) = forecast(tree(stochastic="window", window={"size": 1, "name": "frozen"})).counts
    assert mixed.trained_steps == (0, 1)


def test_every_step_may_be_stochastic_where_few_are_trained():
    some = {"stochastic": "all", "window": {"name": "subset", "size": 2, "interval": 1}}
    plan_for = planner(recipe(sampler={"steps": 6, "plan": some}), shifted_sigmas(6))
    seen = set()
    for k in range(20):
        plan = plan_for(k)
        assert [step.kernel.name for step in plan.steps] == ["flow_sde"] * 5 + ["ode"]
        assert len(plan.trained_steps) == 2
        seen |= set(plan.trained_steps)
    assert seen == set(range(5))


# MixGRPO (2507.21802) compares whole iterations by evaluations for an image: (of the old policy, with gradients).
COMPARED = {
    "dance_grpo": (25, 14), "mixgrpo": (25, 4), "mixgrpo_flash": (16, 4), "mixgrpo_flash_star": (8, 4),
}  # fmt: skip


def published(name: str) -> Nfe:
    recipe = load_image_recipe(f"{name}@published")
    return nfe_of(recipe, forecast(recipe))


@pytest.mark.parametrize(("name", "counts"), COMPARED.items())
def test_published_forms_evaluate_as_often_as_in_the_comparison_of_mixgrpo(name: str, counts: tuple[int, int]):
    found = published(name)
    assert (found.old, found.theta) == pytest.approx(counts, rel=0.05)
    assert found.old_shared <= found.old
    assert found.theta_shared <= found.theta


def test_the_times_of_that_comparison_follow_from_the_counts():
    """Its five times an iteration, 291.3 to 83.3 s, are 3.74 s an evaluation and 14.13 s one with gradients."""
    seconds = {name: 3.74 * published(name).old + 14.13 * published(name).theta for name in COMPARED}
    shares = {name: time / seconds["dance_grpo"] for name, time in seconds.items()}
    expected = {"dance_grpo": 1.0, "mixgrpo": 0.51, "mixgrpo_flash": 0.39, "mixgrpo_flash_star": 0.29}
    assert shares == pytest.approx(expected, rel=0.05)


def test_published_trees_have_as_many_edges_an_image_as_branchgrpo_says():
    """BranchGRPO (2509.06040): 218 edges and 16 images. Depth pruning trains 138 edges, and Mix 34."""
    assert published("branchgrpo").old == 218 / 16 == pytest.approx(13.7, rel=0.05)
    assert published("branchgrpo_depth").theta == 138 / 16 == pytest.approx(8.6, rel=0.05)
    # The released width pruning (mode 1) trains as many.
    assert published("branchgrpo_width").theta == 138 / 16
    assert published("branchgrpo_mix").theta == 34 / 16 == pytest.approx(2.1, rel=0.05)


def test_the_times_of_branchgrpo_follow_from_the_counts():
    """DanceGRPO's times in its paper, 698 s with all of 20 steps and 469 s with 12, are 6.3 s and 28.6 s an evaluation.

    Here the last step is trained in none of the forms, so a share may be off by a tenth.
    """
    costs = {"all": 6.3 * 20 + 28.6 * 19, "most": 6.3 * 20 + 28.6 * 12}
    shares = {
        (name, baseline): (6.3 * published(name).old + 28.6 * published(name).theta) / costs[baseline]
        for name in ("branchgrpo", "branchgrpo_depth", "branchgrpo_mix")
        for baseline in costs
    }
    told = {
        ("branchgrpo", "all"): 0.71, ("branchgrpo_depth", "all"): 0.45, ("branchgrpo_mix", "all"): 0.21,
        ("branchgrpo", "most"): 1.05, ("branchgrpo_depth", "most"): 0.67, ("branchgrpo_mix", "most"): 0.32,
    }  # fmt: skip
    assert shares == pytest.approx(told, rel=0.11)


@pytest.mark.parametrize("name", ["branchgrpo", "branchgrpo_depth", "branchgrpo_width", "branchgrpo_mix"])
def test_published_updates_of_trees_have_96_edges_each(name: str):
    """The release makes an update from 12 edges of each of 8 processes."""
    recipe = load_image_recipe(f"{name}@published")
    edges = published(name).theta * recipe.rollout.prompts * recipe.rollout.group
    assert recipe.optimizer.updates == math.ceil(edges / 96)


def test_published_branches_leave_a_deterministic_line():
    """TempFlow-GRPO (2508.04324): 9 steps, 4 seeds, 6 branches. G²RPO (2510.01982): 8 steps, 12 branches, 2 strides."""
    tempflow, g2rpo = published("tempflow_grpo"), published("g2rpo")
    assert tempflow.theta_shared == 9 * 4 / (9 * 4 * 6)
    # Main line: 9 states for each seed. A branch at step i has 9 - i states of its own.
    assert tempflow.old_shared == (9 * 4 + 4 * 6 * sum(9 - i for i in range(9))) / (9 * 4 * 6)
    assert g2rpo.theta_shared == 8 / (8 * 12 * 2)
    # A branch at step i takes one step from level i + 1. From level i + 2 on it takes single steps and double steps,
    # which share their first state.
    finished = sum(1 + (14 - i) + math.ceil((14 - i) / 2) - 1 for i in range(8))
    assert g2rpo.old_shared == pytest.approx((8 + 12 * finished) / (8 * 12 * 2))


def test_published_neighbours_have_four_anchors_of_twelve():
    """Neighbor GRPO: 8 deterministic steps, 4 of them trained, for 4 of 12 samples."""
    found = published("neighbor_grpo")
    assert (found.old, found.theta) == pytest.approx((8, 4 * 4 / 12))


def test_previews_are_no_images():
    """TP-GRPO (2602.06422): each of 9 stochastic steps has a preview, the rest of the steps without noise."""
    found = published("tp_grpo")
    assert found.theta == 9
    # An image has 10 evaluations. The preview of step i has 10 - i, of which it shares the first with its image.
    assert found.old_shared == 10 + sum(9 - i for i in range(9))


def test_an_image_of_the_forward_process_is_evaluated_once_for_each_noise():
    found = published("awm")
    assert (found.old, found.theta, found.old_shared, found.theta_shared) == (14, 6, 14, 6)


@pytest.mark.parametrize(
    ("words", "shared"),
    [
        # Four of twelve images are kept, at three levels. One of the levels is pure noise.
        ([], (2 * 4 + 1) / 12),
        (["objective.times=2"], 2 * 4 / 12 - 2 / 3 * (4 - 1) / 12),
        (["objective.times=2", "objective.draw=ranges"], (4 + 1) / 12),
        (["objective.skip=1"], 2 * 4 / 12),
        (["objective.noise=image"], 3 * 4 / 12),
        (["sampler.sigmas=[0.9, 0.6, 0.4, 0.2, 0.0]"], 3 * 4 / 12),
    ],
)
def test_pure_noise_is_one_state_for_the_images_of_a_prompt(words: list[str], shared: float) -> None:
    recipe = load_image_recipe("default", words)
    found = nfe_of(recipe, forecast(recipe))
    assert found.theta_shared == pytest.approx(shared)
    levels = 2 if {"objective.times=2", "objective.skip=1"} & set(words) else 3
    assert found.theta == pytest.approx(levels * 4 / 12)


def test_images_that_are_left_out_are_no_evaluations_with_gradients() -> None:
    def theta(*words: str, name: str = "diffusion_nft") -> float:
        recipe = load_image_recipe(name, ["select=[{name: extremes, keep: 3}]", "rollout.group=12", *words])
        return nfe_of(recipe, forecast(recipe)).theta

    assert theta("objective.times=2") == 2 * 3 / 12
    # With several updates, and for a loss of whole groups, every image is evaluated.
    assert theta("objective.times=2", "optimizer.updates=2") == 2
    assert theta("objective.times=2", name="dgpo") == 2
