"""What is unsound in keys that read something of a reward beside its value: answers, signals, and states in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .schema import AnyRecipe, Recipe, TextRecipe
    from .sections import RewardConfig


def reward_place(rewards: Sequence[RewardConfig], asked: str) -> int | None:
    """Which entry of a recipe's rewards is meant: by its label, else its name, or of `FILE:NAME` the NAME alone."""
    labels = [reward.label or reward.name for reward in rewards]
    short = [reward.label or reward.name.rpartition(":")[2] for reward in rewards]
    for names in (labels, short):
        if names.count(asked) == 1:
            return names.index(asked)
    return None


def reading_faults(recipe: AnyRecipe) -> list[str]:
    """Of keys that name a reward, of the tracker's memory, and of the comparison by state."""
    advantage, curriculum = recipe.advantage, recipe.data.curriculum
    labels = [reward.label or reward.name for reward in recipe.rewards]
    named = {
        "advantage.stratum": advantage.stratum, "advantage.shaping": advantage.shaping,
        "advantage.uncertainty": advantage.uncertainty,
        "data.curriculum.diversity": None if curriculum is None else curriculum.diversity,
    }  # fmt: skip
    faults = [
        f"{key} asks reward {chosen.reward!r}; the rewards are {', '.join(labels)}"
        for key, chosen in named.items()
        if chosen is not None and reward_place(recipe.rewards, chosen.reward) is None
    ]
    if advantage.shaping is not None and advantage.credit != "leaf":
        faults.append("advantage.shaping bends the advantages of samples, not of steps; use advantage.credit leaf")
    faults += [*_stratum_faults(recipe), *_forget_faults(recipe)]
    if advantage.credit == "anchor":
        faults += _anchor_faults(recipe)
        faults += _text_anchor_faults(recipe) if recipe.task == "text" else _image_anchor_faults(recipe)
    return faults


def _stratum_faults(recipe: AnyRecipe) -> list[str]:
    """Of advantages among samples that are alike."""
    advantage, stratum = recipe.advantage, recipe.advantage.stratum
    if advantage.estimator != "stratified":
        return [] if stratum is None else ["advantage.stratum belongs to advantage.estimator stratified; leave it out"]
    if stratum is None:
        return ["advantage.estimator stratified compares samples that are alike; say in advantage.stratum which are"]
    if advantage.credit != "leaf":
        return ["advantage.estimator stratified compares samples, not steps; use advantage.credit leaf"]
    return []


def _forget_faults(recipe: AnyRecipe) -> list[str]:
    if recipe.advantage.forget == "fixed":
        return []
    faults = []
    if recipe.advantage.estimator != "tracked":
        faults.append(
            f"advantage.forget {recipe.advantage.forget} is of what advantage.estimator tracked remembers; leave it out"
        )
    if recipe.task == "images":
        faults.append(
            "advantage.forget divergence scores again what a prompt's last sample was made of: a completion's tokens "
            "can be kept for every prompt, the latents of an image cannot; use advantage.forget fixed"
        )
        return faults
    if recipe.rollout.budget is not None or recipe.data.templates:
        faults.append(
            "advantage.forget divergence scores one completion of a prompt again, and with rollout.budget or "
            "data.templates it is sampled in several rounds; leave one of them out"
        )
    if recipe.rollout.replay:
        faults.append(
            "advantage.forget divergence compares with the policy that last saw a prompt, and rollout.replay puts back "
            "what an older one wrote; leave one of them out"
        )
    return faults


def _anchor_faults(recipe: AnyRecipe) -> list[str]:
    advantage = recipe.advantage
    faults = []
    if (advantage.estimator, advantage.how) != ("group", "sum"):
        faults.append(
            "advantage.credit anchor compares the weighted sum of rewards by state as by group; use "
            "advantage.estimator group and how sum"
        )
    if advantage.scale == "batch":
        faults.append("advantage.credit anchor compares within states; use advantage.scale group or none")
    return faults


def _image_anchor_faults(recipe: Recipe) -> list[str]:
    sampler = recipe.sampler
    faults = []
    if sampler.plan != "branch" and not (sampler.plan == "window" and sampler.shared_noise):
        why = (
            "side branches are compared with those from the same state as it is; use credit leaf"
            if sampler.plan == "spine"
            else "here no two images share one; use sampler.plan branch, or plan window with shared_noise"
        )
        faults.append(f"advantage.credit anchor compares steps from one state, and {why}")
    if recipe.objective.form != "transition":
        faults.append("advantage.credit anchor needs trained transitions; use objective.form transition")
    return faults


def _text_anchor_faults(recipe: TextRecipe) -> list[str]:
    objective = recipe.objective
    faults = []
    if objective.conflict is not None:
        faults.append(
            "objective.conflict tells good answers from bad ones, and with advantage.credit anchor a token has an "
            "advantage of its own; leave one of them out"
        )
    if objective.form != "tokens":
        faults.append(f"advantage.credit anchor is of tokens; use objective.form tokens, not {objective.form}")
    return faults
