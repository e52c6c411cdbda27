"""The keys of a recipe that every task has."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from ..parts.choice import Choice, Of, part_field
from ..parts.section import Section
from .reward_sections import RewardConfig, distinct_labels, one_counts
from .sections import DataConfig, OptimizerConfig, RunConfig


class BaseRecipe(Section):
    """The keys that recipes of all tasks share."""

    name: str = "unnamed"
    paper: str = ""
    data: DataConfig = DataConfig()
    rewards: list[RewardConfig] = Field(min_length=1)
    combine: Annotated[Choice, Of("combination", "sum")] = part_field("sum", "How several rewards become one.")
    advantage: Annotated[Choice, Of("advantage", "group")] | None = part_field(
        "group", "How a sample is compared with others; `null` if the credit compares by itself."
    )
    credit: Annotated[Choice, Of("credit", "leaf")] = part_field("leaf", "The advantage of every step or token.")
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
    run: RunConfig = RunConfig()

    @field_validator("rewards")
    @classmethod
    def _labels_differ(cls, rewards: list[RewardConfig]) -> list[RewardConfig]:
        return one_counts(distinct_labels(rewards))
