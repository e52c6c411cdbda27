"""The schema of a recipe of a masked language model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ..parts.choice import Choice, Of, part_field
from ..parts.needs import unmet
from ..parts.section import Section
from .base_recipe import BaseRecipe
from .rollouts import MaskedRolloutConfig, rollout_faults
from .sections import HeldOutConfig, TextDataConfig, named_once
from .text_recipe import TextModelConfig


class MaskedModelConfig(TextModelConfig):
    """The masked language model that is trained."""

    path: str = Field(
        "arithmetic:masked", description="`arithmetic:masked` (embedded), a transformers folder, or a hub id."
    )
    block: int | None = Field(
        None, ge=1, description="Tokens of a block, for a model that writes block after block, such as SDAR."
    )


class MaskedGenerationConfig(Section):
    """The completions of a masked language model."""

    tokens: int = Field(256, ge=1, description="Positions of a completion; the text ends at the first end token.")
    stop_at_end: bool = Field(
        False, description="A completion is finished once its text is: what follows the end is not written or trained."
    )
    temperature: float = Field(1.0, gt=0, description="Logits are divided by it, in sampling and in scoring.")
    max_prompt_tokens: int = Field(2048, ge=1, description="A longer prompt is refused before the run.")
    long_prompts: Literal["refuse", "drop"] = Field(
        "refuse", description="`drop` leaves longer training prompts out, and a note says how many."
    )


def _states_begin_alike(recipe: Any, section: MaskedSamplerConfig) -> list[str]:
    """Rules for plans whose options mean nothing where every state begins as a row of masks."""
    plan, group, faults = section.plan, recipe.rollout.group, []
    if plan.get("shared_noise") is False:
        faults.append(
            "sampler.plan.shared_noise is false, and every sample begins as the same masks, which would be evaluated "
            "once for each; leave it out"
        )
    for option in ("spread", "before"):
        if plan.get(option) is not None:
            faults.append(f"sampler.plan.{option} is about noise in latents, and tokens have none; leave it out")
    if plan.name == "ode":
        faults.append(
            "sampler.plan ode has no step with randomness, so all completions of a prompt would be equal; use window, "
            "with stochastic all, or branch"
        )
    if plan.name == "spine" and group > 1:
        faults.append(
            f"sampler.plan spine has one line without randomness, and rollout.group {group} would repeat it; write "
            "rollout.group: 1, and set the number of branches with sampler.plan.width"
        )
    return faults


class MaskedSamplerConfig(Section):
    """How a rollout goes from masks to text."""

    needs = (_states_begin_alike,)

    steps: int = Field(8, ge=1, le=10_000, description="Steps of unmasking, at most one for each token.")
    schedule: Literal["linear", "cosine"] = Field(
        "linear", description="Tokens that a step reveals: `linear` as many in each, `cosine` few at first (MaskGIT)."
    )
    order: Annotated[Choice, Of("order", "confidence")] = part_field(
        "confidence", "Which positions a step reveals first."
    )
    plan: Annotated[Choice, Of("plan", "window")] = part_field(
        "window", "What each step does, and which steps are trained."
    )


class MaskedEvaluateConfig(HeldOutConfig):
    """Evaluation of completions of a masked language model."""

    temperature: float = Field(0.0, ge=0, description="0 always takes the likeliest tokens.")
    steps: int | None = Field(None, ge=1, description="Steps of unmasking; by default as many as in the rollout.")


class MaskedRecipe(BaseRecipe):
    """A whole run of a masked language model."""

    task: Literal["masked"]
    model: MaskedModelConfig = MaskedModelConfig()
    data: TextDataConfig = TextDataConfig()
    generation: MaskedGenerationConfig = MaskedGenerationConfig()
    sampler: MaskedSamplerConfig = MaskedSamplerConfig()
    rollout: MaskedRolloutConfig = MaskedRolloutConfig()
    objective: Annotated[Choice, Of("masked objective", "trajectory")] = part_field(
        "trajectory", "What an update computes from a rollout."
    )
    penalties: list[Annotated[Choice, Of("token penalty")]] = Field(
        default_factory=list, description="Each is added to the loss of tokens, times its `weight`."
    )
    evaluate: MaskedEvaluateConfig = MaskedEvaluateConfig()

    @field_validator("penalties")
    @classmethod
    def _each_once(cls, penalties: list[Choice]) -> list[Choice]:
        return named_once(penalties)

    @model_validator(mode="after")
    def _geometry(self) -> MaskedRecipe:
        faults = [*unmet(self), *rollout_faults(self.rollout, self.optimizer.updates)]
        for key, steps in (("sampler.steps", self.sampler.steps), ("evaluate.steps", self.evaluate.steps)):
            if steps is not None and steps > self.generation.tokens:
                faults.append(
                    f"{key} is {steps} and generation.tokens {self.generation.tokens}: a step reveals at least one "
                    f"token; use at most {self.generation.tokens} steps, or more tokens"
                )
        if faults:
            raise ValueError("\n".join(faults))
        return self
