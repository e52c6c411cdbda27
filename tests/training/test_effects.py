"""Every option of a recipe's parts changes a result, or is refused with a message that says what to write."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from flowgrpo.configs.load import RecipeError, load_image_recipe, load_recipe, recipe_names
from flowgrpo.configs.schema import Recipe
from flowgrpo.training.planning import levels_of, planner
from flowgrpo.training.recipe_plans import check_edges, check_plans, idle_plan_options
from tests.parts.other_values import options, others
from tests.training.score_paths import PATHS, advantages_of, recipe_of, values_of

ITERATIONS = (0, 1, 2, 5, 7, 26, 53)
SAME = {
    "sampler.plan.columns": "a plan does not know which images the data give",
    "sampler.plan.each": "a plan here belongs to no prompt, see tests/training/test_windows_of_prompts.py",
    "sampler.plan.stochastic": "where the window has all steps but the last, `all` and `window` are the same",
    "text/prefix credit.root": "all completions begin with the same token",
    "text/parts credit.later": "the second part of every completion has the same share of its score",
    "text/anchor credit.gamma": "all completions have as many tokens",
    "quantile advantage.omega": "of four samples none is below the quantile of 0.2",
    "text/quantile advantage.omega": "of four samples none is below the quantile of 0.2",
}
"""Options that change nothing here, and why this is no fault."""


def idle(keys: Iterator[tuple[str, Any, Any, tuple[Any, ...]]], changes: Any) -> list[str]:
    """The options of which no other value that is taken changes anything.

    Args:
        keys: of options, as `options` gives them.
        changes: whether `key=value` does; raises ValueError for a value that is refused.
    """
    found = []
    for key, value, annotation, beside in keys:
        said = []
        for other in others(value, annotation, beside):
            try:
                said.append(changes(f"{key}={json.dumps(other)}"))
            except ValueError:
                continue
            if said[-1]:
                break
        if said and not any(said):
            found.append(key)
    return found


def drawn(recipe: Recipe) -> list[Any]:
    """What the plans of some iterations do, in numbers and words."""
    plan_for = planner(recipe, levels_of(recipe))
    plans = [plan_for(iteration) for iteration in ITERATIONS]
    return [
        (plan.sigmas, plan.roots, plan.samples, plan.main_leaf, plan.root_spread, plan.neighbours,
         [plan.coefficients(i) for i in range(plan.num_steps)],
         [(s.children, s.side, s.strides, s.trained, s.solver, s.spread) for s in plan.steps])
        for plan in plans
    ]  # fmt: skip


@pytest.mark.parametrize("name", recipe_names("images"))
def test_every_option_of_a_plan_changes_the_plan(name: str) -> None:
    recipe = load_image_recipe(name)
    before = drawn(recipe)
    chosen = {f"sampler.{key}": getattr(recipe.sampler, key) for key in ("plan", "kernel", "solver")}
    keys = [option for key, choice in chosen.items() for option in options(choice, key)]
    keys.append(("rollout.group", recipe.rollout.group, int, ()))
    assert len(keys) > 2
    found = idle(iter(keys), lambda line: drawn(_checked(load_image_recipe(name, [line]))) != before)
    assert [key for key in found if key not in SAME] == []


def test_an_option_that_another_choice_has_left_without_effect_is_told_of() -> None:
    window = "sampler.plan.window={name: frozen, size: 1, start: 2}"
    recipe = load_image_recipe("mixgrpo_flash_guard", ["sampler.steps=4", window])
    assert idle_plan_options(recipe) == ["sampler.plan.flash_ratio changes no step of the 1000 iterations"]
    assert idle_plan_options(load_image_recipe("mixgrpo_flash_guard")) == []


BALANCED = ("objective.balance={}", "optimizer.updates=2")
PRICED = ("objective.variance={target: 0.1}", "optimizer.updates=2")


@pytest.mark.parametrize(
    ("recipe", "words", "said"),
    [
        ("diffusion_nft", ["sampler.kernel=cps"], [r"sampler\.kernel is cps", "plan ode draws noise", "flow_sde"]),
        ("mixgrpo_guard", ["objective.surrogate=bapo", "objective.balance={}"], ["balance", "updates or epochs"]),
        ("mixgrpo", ["objective.surrogate=clip", *BALANCED], ["bapo, not of clip", "leave it out"]),
        ("mixgrpo", ["objective.surrogate={name: bapo, lower: 0.5}", *BALANCED], ["lower is 0.5", "lower: 0.6"]),
        ("mixgrpo", ["objective.surrogate=clip", *PRICED], ["r2vpo, not of clip", "leave it out"]),
        ("mixgrpo", ["objective.surrogate={name: r2vpo, lam: 0.5}", *PRICED], ["lam is 0.5", "lam: 1.0"]),
        ("text", ["rollout.budget={most: 6}"], ["most is 6", "choice until"]),
        ("text", ["rollout.budget={bonus: 0.5}"], ["bonus is 0.5", "choice until"]),
        ("text", ["rollout.budget={choice: knapsack, positives: 2}"], ["positives is 2", "choice knapsack"]),
        ("text", ["rollout.budget={choice: variance, success: 0.7}"], ["success is 0.7", "choice variance"]),
        ("text", ["rollout.budget={choice: interval, most: 2}"], ["most is 2 with 4 rounds"]),
    ],
)  # fmt: skip
def test_an_option_that_can_have_no_effect_is_refused_by_its_reason(recipe: str, words: list[str], said: list[str]):
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe, words)
    assert [part for part in said if not re.search(part, str(error.value))] == []


MOVING = (
    "sampler.plan.splits=[0,3]", "sampler.plan.window={name: progressive, size: 1, start: 1, interval: 1}",
    "sampler.plan.stochastic=window", "optimizer.cut=edges", "run.iterations=5",
)  # fmt: skip


def test_batches_of_edges_are_counted_in_every_iteration_and_in_every_process() -> None:
    small = ("rollout={prompts: 2, group: 4}", "sampler.steps=6")
    recipe = load_recipe("branchgrpo", [*small, *MOVING, "optimizer.updates=2"])
    trained = {planner(recipe, levels_of(recipe))(k).trained_steps for k in range(5)}
    assert len(trained) > 1  # the window of the first iteration has more steps than the later ones
    check_plans(recipe)
    with pytest.raises(ValueError, match=r"updates is 3 with optimizer\.cut edges, and a rollout has 2 batches"):
        check_plans(load_recipe("branchgrpo", [*small, *MOVING, "optimizer.updates=3"]))
    words = ["rollout={prompts: 2, group: 2, batch: 1}", "sampler.steps=3", "optimizer.cut=edges"]
    recipe = load_recipe("flow_grpo", [*words, "optimizer.updates=5"])
    check_edges(recipe)
    with pytest.raises(ValueError, match=r"updates is 5 with optimizer\.cut edges, and a rollout has 4 batches"):
        check_edges(recipe, ranks=2)


def test_a_tree_says_how_many_images_its_options_make() -> None:
    recipe = load_image_recipe("branchgrpo", ["rollout.group=8"])
    with pytest.raises(ValueError, match=r"rollout\.group is 8.*4 split.*width 2 has 16.*rollout\.group: 16"):
        planner(recipe, levels_of(recipe))(0)


def _checked(recipe: Recipe) -> Recipe:
    """A recipe in which no option of its plan is reported by `plan` as without effect."""
    if notes := idle_plan_options(recipe):
        raise ValueError(notes)
    return recipe


@pytest.mark.parametrize("name", PATHS)
def test_every_option_of_credit_changes_the_advantages(name: str) -> None:
    path = PATHS[name]
    weights = path.weights
    given = [values_of(path, 2, seed) for seed in range(path.visits)]
    recipe = recipe_of(path, weights)

    def found(*more: str) -> list[Any]:
        changed = replace(path, lines=(*path.lines, *more))
        return [advantages_of(changed, values, weights, *given[:-1]) for values in (given[-1], values_of(path, 2, 9))]

    before = found()
    keys = [option for key in ("combine", "advantage", "credit") for option in options(getattr(recipe, key), key)]
    silent = idle(iter(keys), lambda line: not _same(found(line), before))
    assert [key for key in silent if f"{name} {key}" not in SAME] == []


def _same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(these, those, strict=True))
