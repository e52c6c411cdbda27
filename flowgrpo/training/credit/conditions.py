"""Needs that several advantages and credits have in common."""

from __future__ import annotations

from typing import Any

from ...parts.choice import Choice, value_at
from ...parts.needs import SOMETHING, STATED, Need, idle
from ...parts.traits import offering, rewarded, trained

PLAN, PROBE = "sampler.plan", "sampler.plan.probe"
"""Keys of recipes that belong to other parts."""

undivided = idle(
    "eps", "ddof", where=lambda choice: choice["scale"] == "none", why="with scale none, nothing is divided"
)  # fmt: skip
"""A need of the options of a standard deviation: they have an effect only if something is divided by it."""
compares_samples = Need("credit", ("leaf",), "compares samples, not steps or tokens")
asks_critic = Need("critic", (SOMETHING,), "asks a critic", task="images", mend="add a `critic` section")


def of_images(mend: str) -> Need:
    """A need of a rollout of denoising steps, for parts that read its states; `mend` says what to use for text."""
    return Need("task", ("images", "masked"), "reads the states of a denoising tree", mend=mend)


reads_previews = Need(
    PROBE, (STATED,), "compares states with the images they become without noise", task="images",
    mend="use sampler.plan window with sampler.plan.probe 1 (every level) or 0 (one step)",
)  # fmt: skip


def transitions(recipe: Any, choice: Choice) -> list[str]:
    """A need of images whose denoising steps are trained."""
    if recipe.task == "text" or trained(recipe) == "steps":
        return []
    return [f"credit {choice.short} needs trained transitions; use objective transition"]


def plan_offers(recipe: Any, what: str) -> bool:
    """Whether the plan of a recipe offers this trait, see `parts.traits.OFFERED`; text has no plan."""
    return recipe.task != "text" and offering(recipe.sampler.plan, what)


def one_tree(recipe: Any, choice: Choice) -> list[str]:
    """A need of images that have states in common: the plan makes a tree."""
    if recipe.task == "text" or plan_offers(recipe, "tree"):
        return []
    return [
        f"credit {choice.short} compares the states of one tree, which sampler.plan {recipe.sampler.plan.short} does "
        "not make here; use sampler.plan branch, or plan window with shared_noise, or mark a plan of your own by "
        '@offers("tree")'
    ]


def group_of_two(recipe: Any, choice: Choice) -> list[str]:
    """A need of groups in which a sample has another sample to compare with."""
    if recipe.task != "text" or recipe.rollout.group >= 2 or choice.get("baseline") == "none" or not rewarded(recipe):
        return []
    free = ", or advantage.baseline none" if "baseline" in choice.options else ""
    return [f"rollout.group is {recipe.rollout.group}: a group of one has no baseline; use 2 or more{free}"]


def works_on_samples(recipe: Any, choice: Choice) -> list[str]:
    """A need of an advantage of samples, for credits that hand it on to steps or tokens."""
    if recipe.advantage is not None:
        return []
    return [f"credit {choice.short} works on the advantages of samples, and advantage is null; write advantage: group"]


def compares_itself(recipe: Any, choice: Choice) -> list[str]:
    """A need of `advantage: null`, for credits that compare by themselves."""
    if recipe.advantage is None:
        return []
    return [
        f"credit {choice.short} compares by itself, with options of its own, and advantage is "
        f"{recipe.advantage.name}; write advantage: null"
    ]


def of_tokens(recipe: Any, choice: Choice) -> list[str]:
    """Needs of credits that give each token an advantage of its own."""
    if recipe.task == "images":
        return []
    faults = []
    if value_at(recipe, "objective.conflict") is not None:
        faults.append(
            f"objective.conflict tells good answers from bad ones, and with credit {choice.short} a token has an "
            "advantage of its own; leave one of them out"
        )
    if value_at(recipe, "objective") == "answers":
        faults.append(f"credit {choice.short} works on tokens; use objective tokens, not answers")
    return faults


_WHOLE = ("gate", "noise", "unlikely", "at_least")


def scores_of_parts(recipe: Any, choice: Choice) -> list[str]:
    """Needs of credits that take the scores of the parts of completions."""
    if recipe.task == "images":
        return []
    name, faults = f"credit {choice.short}", list[str]()
    if recipe.combine.name != "sum":
        faults.append(
            f"combine {recipe.combine.name} works on whole completions, and {name} works on their parts; use sum"
        )
    if recipe.parts is None:
        faults.append(
            f"{name} works on the parts of completions, and nothing says how they are cut; add a section such as "
            "parts: {cut: lines}"
        )
    if any(chosen.name == "varied" for chosen in recipe.select):
        faults.append(
            f"selection varied leaves out groups of equal rewards, and with {name} the parts of their completions may "
            "still differ; leave varied out of select"
        )
    for reward in recipe.rewards:
        faults += [
            f"reward {reward.label or reward.name} has `{line}`, which changes scores of whole completions, and {name} "
            "takes the scores of parts unchanged; leave one of them out"
            for line in _WHOLE
            if getattr(reward, line) is not None
        ]
    return faults
