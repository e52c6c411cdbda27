"""The keys of a recipe that every task has."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from ..parts.choice import Choice, Of, part_field
from ..parts.section import Section
from ..parts.traits import differentiates, rewarded
from .coefficient_schedules import ScheduleConfig, schedule_faults
from .reward_sections import RewardConfig, distinct_labels, one_counts
from .sections import DataConfig, OptimizerConfig, RunConfig


def _has_advantages(recipe: Any, _: Section) -> list[str]:
    """What a transform of advantages needs from the rest of a recipe."""
    if recipe.transform is None:
        return []
    if not rewarded(recipe) or (recipe.task != "text" and differentiates(recipe)):
        return [
            f"transform {recipe.transform} changes advantages, and objective {recipe.objective.short} reads none; "
            "leave transform out"
        ]
    if recipe.transform == "exponential" and recipe.clamp is None:
        return [
            "transform exponential has no bound for bad samples, and clamp is null; write a bound, such as clamp: 5.0"
        ]
    return []


class BaseRecipe(Section):
    """The keys that recipes of all tasks share."""

    needs = (_has_advantages, schedule_faults)

    name: str = "unnamed"
    paper: str = ""
    data: DataConfig = DataConfig()
    rewards: list[RewardConfig] = Field(min_length=1)
    combine: Annotated[Choice, Of("combination", "sum")] = part_field("sum", "How several rewards become one.")
    advantage: Annotated[Choice, Of("advantage", "group")] | None = part_field(
        "group", "How a sample is compared with others; `null` if the credit compares by itself."
    )
    credit: Annotated[Choice, Of("credit", "leaf")] = part_field("leaf", "The advantage of every step or token.")
    transform: Literal["positive", "negative", "one", "sign", "exponential"] | None = Field(
        None,
        description="What an advantage A becomes before `clamp`: `positive` max(A, 0), `negative` min(A, 0), `one` 1 "
        "where A > 0 and 0 elsewhere, `sign` its sign (all four as in the code of DiffusionNFT), `exponential` "
        "-exp(-A) (DDRL, 2512.04332); by default A itself.",
    )
    clamp: float | None = Field(5.0, gt=0, description="Largest absolute advantage; `null` for no bound.")
    select: list[Annotated[Choice, Of("selection")]] = Field(
        default_factory=list,
        description="Samples that enter the gradient: the samples that every entry keeps, or all if there is no entry. "
        "All samples enter the statistics.",
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    extensions: list[Annotated[Choice, Of("extension")]] = Field(
        default_factory=list,
        description="Additions that only some runs need; a recipe with this key replaces the whole list.",
    )
    schedules: list[ScheduleConfig] = Field(
        default_factory=list, description="Coefficients that change over the run; by default none does."
    )
    run: RunConfig = RunConfig()

    @field_validator("rewards")
    @classmethod
    def _labels_differ(cls, rewards: list[RewardConfig]) -> list[RewardConfig]:
        return one_counts(distinct_labels(rewards))
