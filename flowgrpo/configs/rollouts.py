"""Sections of a recipe on how much is sampled in an iteration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field, model_validator

from ..parts.choice import choices
from ..parts.needs import Need, unused
from ..parts.section import Section
from ..parts.traits import offering, saying


def _chains(key: str, option: str | None) -> Callable[[Any, Any], list[str]]:
    """A rule of what samples a prompt in several rounds: rounds are put together chain by chain.

    Args:
        key: of the recipe that asks for rounds.
        option: of the section, without which there are none; None where the section alone asks for them.
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
    """What sampling a prompt in several rounds needs, for the section that asks for it, see `_chains`."""
    return (
        Need("optimizer.updates", (1,), "samples in rounds, which are one optimizer step", unless=option),
        Need("credit", ("leaf",), "compares samples of several rounds", unless=option),
        _chains(key, option),
    )


class BudgetConfig(Section):
    """Groups of unequal sizes: several rounds of `rollout.group` samples, more of them where they teach more.

    Every prompt has the first round. Statistics are of all samples of a prompt.
    """

    needs = rounds_need("rollout.budget")

    choice: Literal["until", "knapsack", "interval", "variance"] = Field(
        "until",
        description="`until`: rounds until a group has successes and failures enough (Reinforce-Ada, 2510.04996); or "
        "the rounds after the first shared by what one more is worth: `knapsack` by success rates (Knapsack RL, "
        "2509.25849), `interval` by uncertainty of the mean (XRPO, 2510.06672), `variance` by Neyman's rule.",
    )
    rounds: int = Field(4, ge=2, description="`until`: at most, of a prompt; else on average.")
    most: int | None = Field(
        None, ge=2, description="All but `until`: rounds of a prompt at most; no limit if left out."
    )
    positives: int = Field(1, ge=0, description="`until`: successes wanted.")
    negatives: int = Field(1, ge=0, description="`until`: failures wanted.")
    success: float = Field(0.5, description="`until`, `knapsack`: the least reward of a success.")
    bonus: float = Field(0.0, ge=0, description="`interval`: weight of a prompt's being sampled little.")

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


class RolloutConfig(Section):
    """How much is sampled in an iteration."""

    prompts: int = Field(8, ge=1, description="Prompts per iteration, over all ranks.")
    group: int = Field(12, ge=1, description="Images per prompt.")
    batch: int = Field(32, ge=1, description="States in one call of the denoiser, in sampling and in training.")
    decode_batch: int = Field(32, ge=1)
    chunk: int | None = Field(
        None,
        ge=1,
        description="Prompts sampled and decoded at a time; rewards that run elsewhere score them while the next are "
        "sampled. All of a process at once if left out.",
    )
    store: Literal["device", "host"] = Field(
        "device", description="Where states wait between sampling and training; `host` is page-locked for CUDA."
    )
    budget: BudgetConfig | None = Field(None, description="Equal groups if left out.")


class TextRolloutConfig(Section):
    """How much is sampled in an iteration."""

    prompts: int = Field(8, ge=1, description="Prompts per iteration, over all ranks.")
    group: int = Field(8, ge=1, description="Completions per prompt.")
    batch: int = Field(64, ge=1, description="Completions sampled at once.")
    tokens: int = Field(16_384, ge=1, description="Tokens scored at once, padding included; a group is not cut.")
    budget: BudgetConfig | None = Field(None, description="Equal groups if left out.")


def rollout_faults(rollout: RolloutConfig | TextRolloutConfig, updates: int) -> list[str]:
    """What of an iteration is not in whole groups."""
    faults = []
    if updates > rollout.prompts:
        faults.append(
            f"optimizer.updates is {updates} with {rollout.prompts} prompts per iteration: an update needs whole "
            f"groups; use at most {rollout.prompts} updates or more rollout.prompts"
        )
    chunk = rollout.chunk if isinstance(rollout, RolloutConfig) else None
    if chunk is not None and chunk > rollout.prompts:
        faults.append(
            f"rollout.chunk is {chunk} with {rollout.prompts} prompts per iteration; use at most {rollout.prompts}, "
            "or leave it out to sample all at once"
        )
    return faults
