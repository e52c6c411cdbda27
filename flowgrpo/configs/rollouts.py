"""Sections of a recipe that say how much is sampled in an iteration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ..parts.choice import Choice, Of, choices, part_field
from ..parts.needs import Need, one_round, unused
from ..parts.section import Section
from ..parts.traits import offering, rewarded, saying, trained


def _chains(key: str, option: str | None) -> Callable[[Any, Any], list[str]]:
    """A rule for sections that sample a prompt in several rounds, because rounds are joined chain by chain.

    Args:
        key: key of the recipe that asks for rounds.
        option: option of the section that asks for rounds; None if the section always asks for rounds.
    """

    def rule(recipe: Any, section: Section) -> list[str]:
        if option is not None and not getattr(section, option):
            return []
        branching = [part for _, part in choices(recipe) if offering(part, "branches")]
        faults = [
            f"{key} needs chains, and with {part.kind} {part.short} a state may become several images; use "
            "sampler.plan window or ode, without probe"
            for part in branching
        ]
        return faults + [
            f"{part.kind} {part.short} takes a whole group in a call, and {key} cuts it into rounds; leave one of "
            "them out"
            for part in saying(recipe, "whole_groups")
        ]

    return rule


def rounds_need(key: str, option: str | None = None) -> tuple[Any, ...]:
    """The needs of a section that samples a prompt in several rounds, see `_chains`."""
    return (
        Need("optimizer.updates", (1,), "samples in rounds, which are one optimizer step", unless=option),
        Need("credit", ("leaf",), "compares samples of several rounds", unless=option),
        _chains(key, option),
    )


class BudgetConfig(Section):
    """Groups of unequal sizes: several rounds of `rollout.group` samples, and more rounds for prompts that teach more.

    Every prompt has the first round. Statistics are over all samples of a prompt.
    """

    needs = rounds_need("rollout.budget")

    choice: Literal["until", "knapsack", "interval", "variance"] = Field(
        "until",
        description="`until` samples rounds until a group has enough successes and failures (Reinforce-Ada, "
        "2510.04996). The other choices share the rounds after the first by the value of one more round: `knapsack` by "
        "success rates (Knapsack RL, 2509.25849), `interval` by the uncertainty of the mean (XRPO, 2510.06672), "
        "`variance` by Neyman's rule.",
    )
    rounds: int = Field(
        4, ge=2, description="`until`: most rounds of a prompt; other choices: average rounds of a prompt."
    )
    most: int | None = Field(
        None, ge=2, description="All but `until`: most rounds of a prompt; by default there is no limit."
    )
    positives: int = Field(1, ge=0, description="`until`: number of successes that is enough.")
    negatives: int = Field(1, ge=0, description="`until`: number of failures that is enough.")
    success: float = Field(0.5, description="`until`, `knapsack`: the least reward of a success.")
    bonus: float = Field(0.0, ge=0, description="`interval`: weight of a bonus for prompts with few samples.")

    @model_validator(mode="after")
    def _of_its_choice(self) -> BudgetConfig:
        if self.choice != "until" and self.most is not None and self.most < self.rounds:
            raise ValueError(f"most is {self.most} with {self.rounds} rounds a prompt on average; use more")
        read = {"until": ("positives", "negatives", "success"), "knapsack": ("most", "success")}
        others = [
            option
            for option in ("most", "positives", "negatives", "success", "bonus")
            if option not in read.get(self.choice, ("most", "bonus") if self.choice == "interval" else ("most",))
        ]
        if faults := unused(self, others, f"choice {self.choice} does not read it"):
            raise ValueError("; ".join(faults))
        return self


def _seeds_decide(recipe: Any, section: ScoutsConfig) -> list[str]:
    """Faults of scouts that are no cheaper than the images, or whose seeds cannot be sampled again."""
    rollout, sampler, faults = recipe.rollout, recipe.sampler, []
    if section.group <= rollout.group:
        faults.append(
            f"rollout.scouts.group is {section.group} and rollout.group is {rollout.group}, so there is nothing to "
            f"choose; use at least {rollout.group + 1} scouts, or leave rollout.scouts out"
        )
    if section.steps >= sampler.rollout_steps:
        faults.append(
            f"rollout.scouts.steps is {section.steps}, and an image has {sampler.rollout_steps} steps, so a scout is "
            f"no cheaper; use at most {sampler.rollout_steps - 1}, or sample all images, and choose some of them with "
            "select"
        )
    plan = sampler.plan
    if offering(plan, "given"):
        faults.append(
            f"rollout.scouts chooses the seeds that are sampled, and sampler.plan {plan.short} samples nothing; leave "
            "rollout.scouts out"
        )
    elif offering(plan, "tree") or offering(plan, "branches"):
        faults.append(
            f"rollout.scouts chooses images by their seeds, and with sampler.plan {plan.short} several images have one "
            "seed here; use sampler.plan ode, or plan window with shared_noise: false and without probe"
        )
    if not rewarded(recipe):
        faults.append(
            f"rollout.scouts chooses by rewards, and objective {recipe.objective.name} does not learn from rewards; "
            "leave rollout.scouts out"
        )
    return faults


class ScoutsConfig(Section):
    """Cheap images of each prompt, of few steps. Rewards score them, and some of their seeds are sampled again with all
    steps; only the images of these seeds are trained (Sol-RL, 2604.06916).
    """

    needs = (one_round("rollout.scouts chooses among all scouts of a prompt"), _seeds_decide)

    group: int = Field(ge=2, description="Scouts per prompt. The seeds of `rollout.group` of them are sampled again.")
    steps: int = Field(ge=1, description="Denoising steps of a scout; fewer than an image of the rollout has.")
    keep: Literal["extremes", "widest", "best"] = Field(
        "extremes",
        description="Which seeds are sampled again, as in `select`: `extremes` takes the scouts with the best and the "
        "worst scores in equal parts, `widest` those with the greatest variance of scores, `best` the best ones.",
    )


class RolloutConfig(Section):
    """How much is sampled in an iteration."""

    prompts: int = Field(8, ge=1, description="Prompts per iteration, over all ranks.")
    group: int = Field(12, ge=1, description="Images per prompt.")
    batch: int = Field(32, ge=1, description="States in one call of the denoiser, in sampling and in training.")
    decode_batch: int = Field(32, ge=1)
    chunk: int | None = Field(
        None,
        ge=1,
        description="Prompts that are sampled and decoded at a time. Rewards that run elsewhere score them while the "
        "next prompts are sampled. By default a process samples all its prompts at once.",
    )
    store: Literal["device", "host"] = Field(
        "device", description="Where states wait between sampling and training; `host` is page-locked for CUDA."
    )
    budget: BudgetConfig | None = Field(None, description="By default all groups are equal in size.")
    scouts: ScoutsConfig | None = Field(
        None, description="Cheap images that choose which seeds are sampled; by default there are none."
    )


class TextRolloutConfig(Section):
    """How much is sampled in an iteration."""

    prompts: int = Field(8, ge=1, description="Prompts per iteration, over all ranks.")
    group: int = Field(8, ge=1, description="Completions per prompt.")
    batch: int = Field(64, ge=1, description="Completions sampled at once.")
    tokens: int = Field(
        16_384, ge=1, description="Tokens scored at once, padding included. A group is only split if it has more."
    )
    form: Annotated[Choice, Of("form", "plain")] = part_field("plain", "How the completions of a prompt come about.")
    budget: BudgetConfig | None = Field(None, description="By default all groups are equal in size.")


def _finished_blocks(recipe: Any, section: Section) -> list[str]:
    if not recipe.rollout.cache:
        return []
    if recipe.model.block is None:
        return [
            "rollout.cache keeps finished blocks, and model.block is left out; set model.block, or no rollout.cache"
        ]
    if trained(recipe) != "images":
        return [
            f"rollout.cache changes the rounding of the steps that objective {recipe.objective.short} trains, so their "
            "first ratio would not be 1; use objective estimated, as recipe trace_rl does, or leave rollout.cache out"
        ]
    return []


class MaskedRolloutConfig(Section):
    """How much is sampled in an iteration."""

    needs = (_finished_blocks,)

    prompts: int = Field(8, ge=1, description="Prompts per iteration, over all ranks.")
    group: int = Field(8, ge=1, description="Completions per prompt.")
    batch: int = Field(64, ge=1, description="States in one call of the model, in sampling and in training.")
    chunk: int | None = Field(
        None, ge=1, description="Prompts that are sampled at a time; by default a process samples all its prompts."
    )
    cache: bool = Field(
        False,
        description="Keep keys and values of finished blocks while sampling. For a model that writes block after block "
        "(`model.block`), and an objective that scores finished completions.",
    )
    budget: BudgetConfig | None = Field(None, description="By default all groups are equal in size.")


def rollout_faults(rollout: RolloutConfig | TextRolloutConfig | MaskedRolloutConfig, updates: int) -> list[str]:
    """Messages about parts of an iteration that would not be whole groups.

    Args:
        rollout: of the recipe.
        updates: number of parts that are cut by prompts.
    """
    faults = []
    if updates > rollout.prompts:
        faults.append(
            f"optimizer.updates is {updates} with {rollout.prompts} prompts per iteration: an update needs whole "
            f"groups; use at most {rollout.prompts} updates or more rollout.prompts"
        )
    chunk = None if isinstance(rollout, TextRolloutConfig) else rollout.chunk
    if chunk is not None and chunk > rollout.prompts:
        faults.append(
            f"rollout.chunk is {chunk} with {rollout.prompts} prompts per iteration; use at most {rollout.prompts}, "
            "or leave rollout.chunk out to sample all prompts at once"
        )
    return faults
