"""What does not go together in a recipe whose ratios or credit are of the parts of completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .schema import TextRecipe
    from .sections import RewardConfig

PART_CREDITS = ("parts", "minimum")
COMBINED = ("gate", "noise", "unlikely", "at_least")


def part_faults(recipe: TextRecipe) -> list[str]:
    """Of the cut of completions and what is done with it."""
    objective, faults = recipe.objective, list[str]()
    asked = [f"objective.{name} part" for name in ("level", "reduce") if getattr(objective, name) == "part"]
    asked += ["objective.surrogate sspo"] if objective.surrogate == "sspo" else []
    if objective.form != "tokens":
        faults += [f"{name} belongs to objective.form tokens, not {objective.form}; leave it out" for name in asked]
    credit = recipe.advantage.credit
    asked += [f"advantage.credit {credit}"] if credit in PART_CREDITS else []
    if recipe.parts is None:
        faults += [
            f"{name} is of the parts of completions, and nothing says how they are cut; add a section such as "
            "parts: {cut: lines}"
            for name in asked
        ]
    if objective.level == "part" and objective.surrogate == "gmpo":
        faults.append("surrogate gmpo pools the row after its clip, and objective.level part pools before; use token")
    if objective.surrogate == "sspo":
        faults += _guided_faults(recipe)
    if credit in PART_CREDITS:
        faults += _credit_faults(recipe)
    return faults


def _guided_faults(recipe: TextRecipe) -> list[str]:
    """Of a clip that follows the entropy of parts."""
    faults = []
    if recipe.objective.level != "part":
        faults.append(
            f"surrogate sspo clips the ratios of parts, and objective.level is {recipe.objective.level}; use part"
        )
    if recipe.optimizer.updates * recipe.optimizer.epochs == 1:
        faults.append(
            "surrogate sspo only differs in its clip, which one optimizer step per rollout never meets; use "
            "optimizer.updates or epochs above 1, or surrogate clip"
        )
    return faults


def _credit_faults(recipe: TextRecipe) -> list[str]:
    """Of advantages by the scores of parts."""
    advantage, objective = recipe.advantage, recipe.objective
    name, faults = f"advantage.credit {advantage.credit}", list[str]()
    plain = (advantage.estimator, advantage.how, advantage.baseline)
    if plain != ("group", "sum", "mean") or advantage.scale == "batch":
        faults.append(
            f"{name} compares parts within a group; use advantage.estimator group, how sum, baseline mean, and scale "
            "group or none"
        )
    if advantage.degenerate == "skip":
        faults.append(
            f"advantage.degenerate skip leaves groups out by whole completions, and with {name} their parts may differ "
            "all the same; use keep"
        )
    if objective.form != "tokens":
        faults.append(f"{name} is of tokens; use objective.form tokens, not {objective.form}")
    if objective.conflict is not None:
        faults.append(
            f"objective.conflict tells good answers from bad ones, and with {name} a token has an advantage of its "
            "own; leave one of them out"
        )
    if recipe.rollout.replay:
        faults.append(f"rollout.replay remembers no scores of parts, which {name} asks for; leave one of them out")
    for reward in recipe.rewards:
        faults += _combined_faults(reward, name)
    return faults


def _combined_faults(reward: RewardConfig, name: str) -> list[str]:
    lines = [line for line in COMBINED if getattr(reward, line) is not None]
    return [
        f"reward {reward.label or reward.name} has `{line}`, which changes scores of whole completions, and {name} "
        "takes those of their parts as they are; leave one of them out"
        for line in lines
    ]
