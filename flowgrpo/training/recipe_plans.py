"""The check of the plans of a recipe: whether they fit its objective, and which of their options have no effect."""

from __future__ import annotations

import math
from dataclasses import replace

from ..configs.schema import Recipe
from ..parts.choice import options_model
from ..parts.traits import noises_again, trained
from ..samplers.transitions import edge_bounds
from .images.critic import check_guide
from .planning import Planned, forecast, levels_of, planner, scouting_plan, setting_of

CHECKED_PLANS = 50
"""The check makes the plans of this many iterations."""
COMPARED_PLANS = 2000
"""Runs of more iterations are not searched for options of the plan that have no effect. The batches of trained states
are counted in this many iterations."""


def check_plans(recipe: Planned) -> None:
    """Make the plans of the first iterations, and check that the plans fit the objective and the guide."""
    forecast(recipe, most=CHECKED_PLANS)
    plan_for, wanted = planner(recipe, levels_of(recipe)), trained(recipe)
    plans = [plan_for(k) for k in range(min(recipe.run.iterations, CHECKED_PLANS))]
    windows = {(plan.counts().trained_steps, plan.num_steps) for plan in plans}
    plan = plans[0]
    if isinstance(recipe, Recipe) and recipe.sampler.guide is not None:
        check_guide(plan)
    if isinstance(recipe, Recipe) and recipe.rollout.scouts is not None:
        scouting_plan(recipe, plan)
    check_edges(recipe)
    if isinstance(recipe, Recipe) and (recipe.sampler.sigmas or recipe.sampler.shift is not None):
        _check_own_table(recipe.model.variant)
    if not noises_again(recipe) and not plan.trained_steps:
        raise ValueError(
            f"sampler.plan {recipe.sampler.plan.name} trains no step, and objective {recipe.objective.name} needs one"
        )
    if wanted == "gradients" and recipe.objective.get("at") == "image" and recipe.objective.get("through"):
        for steps, count in windows:
            _check_suffix(list(steps), count)
    for steps, count in windows if recipe.objective.get("renoised") else ():
        if list(steps) != [count - 1]:
            raise ValueError(
                f"objective.renoised noises finished images to the level of the last step, and the window {list(steps)}"
                f" is not the last of {count} steps alone; use sampler.plan.window {{name: last, size: 1}}, or"
                " leave renoised out"
            )
    if wanted == "steps" and plan.neighbours:
        raise ValueError(
            f"sampler.plan {recipe.sampler.plan.name} trains deterministic steps; use objective neighbour, "
            "directed, reward_gradient, reward_targets or visited, or another plan"
        )


def _check_suffix(steps: list[int], count: int) -> None:
    """Check that the gradient of a finished image meets trained steps alone on its way to each of them."""
    if steps != list(range(count - len(steps), count)):
        raise ValueError(
            f"objective reward_gradient goes through the steps that follow a trained step, and the window {steps} does "
            f"not end with the last of {count} steps; use sampler.plan.window {{name: last, size: {len(steps)}}}, or "
            "objective.through false"
        )


def _check_own_table(variant: str) -> None:
    # This imports pipelines, which a recipe without levels of its own does not need here.
    from ..pipelines.callers import OWN_TABLE

    if variant in OWN_TABLE:
        raise ValueError(
            f"model.variant {variant} works with the pipeline's own noise levels only; leave sampler.sigmas and "
            "sampler.shift out, or use variant auto"
        )


def check_edges(recipe: Planned, ranks: int = 1) -> None:
    """Check that each rollout of a run has as many batches of trained states as updates that take whole batches.

    Args:
        recipe: what to do. Nothing is checked if its updates take whole prompts.
        ranks: number of processes, each with a share of the prompts.

    Raises:
        ValueError: a rollout has fewer batches in some process.
    """
    if recipe.optimizer.cut != "edges":
        return
    rollout, plan_for = recipe.rollout, planner(recipe, levels_of(recipe))
    plans = (plan_for(iteration) for iteration in range(min(recipe.run.iterations, COMPARED_PLANS)))
    for states in dict.fromkeys(tuple(plan.main_states[i] for i in plan.trained_steps) for plan in plans):
        batches = [math.ceil(each * (rollout.prompts // ranks) / rollout.batch) for each in states]
        edge_bounds([1] * sum(batches), recipe.optimizer.updates)


def idle_plan_options(recipe: Planned) -> list[str]:
    """A sentence for each option of the plan that changes no step of the run.

    Another choice, such as the number of steps, may take the effect of an option away. So the option is reported, and
    not refused.
    """
    count = recipe.run.iterations
    if count > COMPARED_PLANS:
        return []
    chosen, setting = recipe.sampler.plan, setting_of(recipe, levels_of(recipe))
    made, found = chosen.make(), []
    for option, known in options_model(chosen.kind, chosen.name).model_fields.items():
        if known.is_required() or known.default is not None or chosen[option] is None:
            continue
        without = replace(chosen, options={**chosen.options, option: None}).make()
        if all(made(setting, k) == without(setting, k) for k in range(count)):
            found.append(f"sampler.plan.{option} changes no step of the {count} iterations")
    return found
