"""Sections of a recipe on how much is sampled in an iteration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ..parts.section import Section
from .sections import BudgetConfig


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
