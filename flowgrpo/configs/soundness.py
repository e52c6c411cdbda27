"""What does not go together in a recipe and is no single part's need, said in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..parts.traits import saying
from .reward_soundness import reward_faults

if TYPE_CHECKING:
    from .schema import AnyRecipe, Recipe, TextRecipe


def image_faults(recipe: Recipe) -> list[str]:
    """Of a run of images."""
    plan, faults = recipe.sampler.plan, list[str]()
    if recipe.select and len(plan.get("completions", ())) > 1:
        faults.append("select chooses images, and a branch with several completions has several; use one")
    if plan.name != "branch" and any(chosen["among"] == "split" for chosen in recipe.select):
        faults.append("select with among split needs a tree; use sampler.plan branch, or among group")
    if recipe.reference is not None and not saying(recipe, "compares"):
        faults.append("reference moves what nothing compares with; leave it out, or add a penalty such as kl")
    return faults


def text_faults(recipe: TextRecipe) -> list[str]:
    """Of a run of text."""
    faults = []
    if any(chosen["among"] == "split" for chosen in recipe.select):
        faults.append("select with among split needs a tree; use group")
    if recipe.generation.engine_options and recipe.generation.engine != "vllm":
        faults.append("generation.engine_options belong to generation.engine vllm; leave them out")
    if recipe.generation.top_k == 1:
        faults.append("generation.top_k 1 always takes the likeliest token, so a group has one completion; use more")
    return faults


def shared_faults(recipe: AnyRecipe) -> list[str]:
    """Of what images and text have in common: budgets, and rewards that refer to others."""
    faults = reward_faults(recipe)
    budget = recipe.rollout.budget
    if budget is not None and budget.choice != "until" and budget.most is not None and budget.most < budget.rounds:
        faults.append(f"rollout.budget.most is {budget.most} with {budget.rounds} rounds a prompt on average; use more")
    if budget is not None or recipe.data.templates:
        faults += _round_faults(recipe, "rollout.budget" if budget is not None else "data.templates")
    return faults


def _round_faults(recipe: AnyRecipe, name: str) -> list[str]:
    """Of samples of a prompt in several rounds, which the key `name` asks for."""
    faults = []
    if recipe.optimizer.updates > 1:
        faults.append(f"{name} samples in rounds, which are one optimizer step; use optimizer.updates 1")
    if recipe.credit.name != "leaf":
        faults.append(f"{name} compares samples of several rounds; use credit leaf")
    if recipe.task == "images":
        if recipe.sampler.plan.name in ("branch", "spine") or recipe.sampler.plan.get("probe") is not None:
            faults.append(f"{name} needs chains; use sampler.plan window or ode, without probe")
        faults += [
            f"{part.kind} {part.short} takes a whole group in a call, and {name} cuts it into rounds; leave one of "
            "them out"
            for part in saying(recipe, "whole_groups")
        ]
    return faults
