"""The schema of a recipe. YAML keys and dotted command-line overrides have the names of these fields."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ..parts.choice import Choice, Of, part_field
from ..parts.needs import SOMETHING, Need, asking, one_round, unmet
from ..parts.section import Section
from ..parts.traits import saying
from .reward_sections import RewardConfig, distinct_labels, one_counts
from .rollouts import MaskedRolloutConfig, RolloutConfig, TextRolloutConfig, rollout_faults
from .sections import (
    DataConfig,
    EmaConfig,
    HeldOutConfig,
    LoraConfig,
    OptimizerConfig,
    RunConfig,
    TextDataConfig,
    named_once,
)
from .shown_pictures import pictures_are_shown


class ModelConfig(Section):
    """The model that is trained."""

    path: str = Field("scenes", description="`scenes` (embedded), a diffusers pipeline folder, or a hub id.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Type of the weights and of the states."
    )
    train: Literal["lora", "full"] = "lora"
    lora: LoraConfig = LoraConfig()
    pipeline: str | None = Field(
        None,
        min_length=1,
        description="Class of diffusers that loads the folder (FluxInpaintPipeline, …); by default the class that "
        "the folder names.",
    )
    call: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the pipeline's own call.")
    variant: Literal["auto", "direct", "inject", "slice", "fast_forward", "relay"] = "auto"
    gradient_checkpointing: bool = False
    release_text_encoders: bool = Field(
        True, description="Free the text encoders once the prompts that the run draws are encoded."
    )
    offload: list[Literal["vae", "text_encoders"]] = Field(
        default_factory=list,
        description="Parts that wait in host memory, and are on the accelerator only while they are used.",
    )
    attention: str | None = Field(
        None,
        min_length=1,
        description="Attention backend of diffusers (native, flash, …); by default diffusers chooses.",
    )
    compile: bool = Field(False, description="`torch.compile` the denoiser's repeated blocks.")
    quantize: Literal["float8", "int8"] | None = Field(
        None, description="LoRA: keep the frozen denoiser's linear weights in 8 bits, through torchao."
    )

    @model_validator(mode="after")
    def _frozen(self) -> ModelConfig:
        self.lora.check_trained(self.train)
        if self.quantize is not None and self.train == "full":
            raise ValueError("quantize needs frozen weights, and train: full trains them; use train: lora")
        if self.quantize is not None and self.dtype != "bfloat16":
            raise ValueError(f"quantize computes in bfloat16, and dtype is {self.dtype}; write dtype: bfloat16")
        if "text_encoders" in self.offload and self.release_text_encoders:
            raise ValueError(
                "release_text_encoders frees the text encoders once the prompts of the run are encoded, and offload "
                "keeps them; write release_text_encoders: false, or leave text_encoders out of offload"
            )
        return self


class GuideConfig(Section):
    """Euphonium's drift: the critic's gradient is added to the noise of the stochastic steps."""

    needs = (Need("critic", (SOMETHING,), "follows the gradient of a critic"),)

    scale: float = Field(
        0.1, gt=0, description="Root mean square of the drift, which is added to the standard normal noise."
    )
    start: int = Field(0, ge=0, description="First step that is guided.")


class SamplerConfig(Section):
    """How a rollout goes from noise to image."""

    steps: int = Field(10, ge=2, le=10_000)
    sigmas: list[float] | None = Field(None, min_length=3, description="Noise levels; by default the pipeline's own.")
    shift: float | None = Field(
        None,
        gt=0,
        description="In place of the pipeline's own noise levels, s t / (1 + (s - 1) t) with this s, for T equal steps "
        "of t from 1 to 0. Evaluations use it too.",
    )
    kernel: Annotated[Choice, Of("kernel", "flow_sde")] = part_field("flow_sde", "Kernel of the stochastic steps.")
    solver: Annotated[Choice, Of("solver", "euler")] = part_field("euler", "Solver of the deterministic steps.")
    plan: Annotated[Choice, Of("plan", "window")] = part_field(
        "window", "What each step does, and which steps are trained."
    )
    guide: GuideConfig | None = Field(
        None, description="A drift towards states that the critic values; by default there is none."
    )

    @field_validator("sigmas")
    @classmethod
    def _fall(cls, sigmas: list[float] | None) -> list[float] | None:
        if sigmas is not None and any(not high > low for high, low in pairwise(sigmas)):
            raise ValueError(f"noise levels must fall from step to step, and here they are {sigmas}")
        return sigmas

    @model_validator(mode="after")
    def _one_table(self) -> SamplerConfig:
        if self.sigmas is not None and self.shift is not None:
            raise ValueError("sigmas is a whole table of noise levels, and shift makes one; leave one of them out")
        return self

    @property
    def rollout_steps(self) -> int:
        """Number of denoising steps of a rollout: the steps of `sigmas`, or else `steps`."""
        return len(self.sigmas) - 1 if self.sigmas else self.steps


def _critic_is_asked(recipe: Any, critic: CriticConfig) -> list[str]:
    if asking(recipe, "critic"):
        return []
    return ["nothing here uses the critic; set credit to critic or process, set sampler.guide, or leave critic out"]


class CriticConfig(Section):
    """A small network that predicts the reward of a noisy latent."""

    needs = (
        _critic_is_asked,
        one_round("the critic learns from one rollout"),
    )

    learning_rate: float = Field(1e-3, gt=0)
    passes: int = Field(2, ge=1, description="Passes over the states of a rollout.")
    warmup: int = Field(10, ge=0, description="Iterations before the critic has any influence.")
    width: int = Field(64, ge=4, description="Channels.")


class EvaluateConfig(HeldOutConfig):
    """Evaluation of images that are sampled without noise in the steps."""

    steps: int | None = Field(None, ge=1, description="Denoising steps; by default as many as in the rollout.")


class BaseRecipe(Section):
    """The keys that recipes of images and recipes of text share."""

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


def _is_compared_with(recipe: Any, reference: ReferenceConfig) -> list[str]:
    if saying(recipe, "compares"):
        return []
    return ["no part of this recipe compares with the reference; leave reference out, or add a penalty such as kl"]


class ReferenceConfig(EmaConfig):
    """Average of the trained weights with which penalties compare, in place of the base model."""

    needs = (_is_compared_with,)


class Recipe(BaseRecipe):
    """A whole run of images."""

    task: Literal["images"] = "images"
    model: ModelConfig = ModelConfig()
    sampler: SamplerConfig = SamplerConfig()
    rollout: RolloutConfig = RolloutConfig()
    critic: CriticConfig | None = Field(None, description="Only for a credit or a guide that uses a critic.")
    objective: Annotated[Choice, Of("objective", "transition")] = part_field(
        "transition", "What an update computes from a rollout."
    )
    penalties: list[Annotated[Choice, Of("penalty")]] = Field(
        default_factory=list, description="Each is added to the loss, times its `weight`."
    )
    reference: ReferenceConfig | None = Field(
        None, description="Penalties compare with an average of the trained weights; by default with the base model."
    )
    evaluate: EvaluateConfig = EvaluateConfig()

    @field_validator("penalties")
    @classmethod
    def _each_once(cls, penalties: list[Choice]) -> list[Choice]:
        return named_once(penalties)

    @model_validator(mode="before")
    @classmethod
    def _images_are_not_cut(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("parts") is not None:
            raise ValueError(
                "`parts` cuts completions, and this recipe makes images, whose parts are their denoising steps; leave "
                "`parts` out, or use task text"
            )
        return given

    @model_validator(mode="after")
    def _geometry(self) -> Recipe:
        updates = self.optimizer.updates if self.optimizer.cut == "prompts" else 1
        if faults := [*unmet(self), *rollout_faults(self.rollout, updates)]:
            raise ValueError("\n".join(faults))
        return self


class _ChatConfig(Section):
    """How prompts go through the chat template of a language model."""

    system: str | None = Field(None, description="System message; only for models with a chat template.")
    chat: bool | None = Field(None, description="Use the chat template; by default if the tokenizer has one.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Values for further variables of the chat template, such as `{enable_thinking: false}`.",
    )

    @model_validator(mode="after")
    def _template_is_used(self) -> _ChatConfig:
        if self.chat is False and (self.system is not None or self.chat_template_kwargs):
            raise ValueError(
                "chat is false, and system and chat_template_kwargs need the chat template; leave them out"
            )
        return self


class LanguageModelConfig(_ChatConfig):
    """The causal language model that is trained."""

    needs = (pictures_are_shown,)

    path: str = Field(
        "arithmetic",
        description="`arithmetic` (embedded), `arithmetic:untrained`, a transformers folder, or a hub id.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Type of the weights.")
    train: Literal["lora", "full"] = "lora"
    lora: LoraConfig = LoraConfig()
    gradient_checkpointing: bool = False
    attention: Literal["eager", "sdpa", "flash_attention_2"] | None = Field(
        None, description="Attention implementation of transformers; by default transformers chooses."
    )
    pictures: bool = Field(
        False, description="Show the model the pictures in column `image` of the prompts; for a model that sees."
    )
    shared_prefix: bool = Field(
        True, description="Encode the prompt of a group once, and score equal completions of it once."
    )

    @model_validator(mode="after")
    def _start_is_trained(self) -> LanguageModelConfig:
        self.lora.check_trained(self.train)
        return self


class GenerationConfig(Section):
    """How completions are sampled."""

    max_tokens: int = Field(256, ge=1, description="Tokens of the longest completion.")
    temperature: float = Field(1.0, gt=0, description="Logits are divided by it, in sampling and in scoring.")
    top_k: int | None = Field(
        None,
        ge=2,
        description="Sample only from this many likeliest tokens; by default from all. With 1, all completions of a "
        "group would be equal.",
    )
    top_p: float | None = Field(None, gt=0, le=1, description="Sample only from the likeliest tokens with this mass.")
    min_p: float | None = Field(
        None, gt=0, le=1, description="Sample only from tokens with this share of the likeliest token's probability."
    )
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, description="Texts that end a completion, as an end token does. They stay in it."
    )
    max_prompt_tokens: int = Field(2048, ge=1, description="A longer prompt is refused before the run.")
    long_prompts: Literal["refuse", "drop"] = Field(
        "refuse", description="`drop` leaves longer training prompts out, and a note says how many."
    )
    engine: Literal["transformers", "vllm"] = Field(
        "transformers", description="`vllm` samples with vLLM, which gets the trained weights before it samples."
    )
    engine_options: dict[str, Any] = Field(
        default_factory=dict, description="`vllm`: keyword arguments of its `LLM`, such as `gpu_memory_utilization`."
    )

    @model_validator(mode="after")
    def _options_of_the_engine(self) -> GenerationConfig:
        if self.engine_options and self.engine != "vllm":
            raise ValueError(
                f"engine_options belong to engine vllm, and engine is {self.engine}; write generation.engine: vllm, or "
                "leave engine_options out"
            )
        return self


class PartsConfig(Section):
    """How a completion is cut into parts, for ratios, credit and rewards. A blank part joins the part before it."""

    cut: Literal["lines", "sentences", "pattern"] = Field(
        "lines", description="`sentences` end at . ! ? or … before white space, at 。！？, and at the end of a line."
    )
    pattern: str | None = Field(
        None, description="`pattern`: a regular expression of Python; a part ends where a match ends."
    )

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return pattern

    @model_validator(mode="after")
    def _has_a_pattern(self) -> PartsConfig:
        if (self.cut == "pattern") != bool(self.pattern):
            raise ValueError(
                f"cut is {self.cut} and pattern {self.pattern!r}; give `pattern` with cut pattern, and only then"
            )
        return self


class TextEvaluateConfig(HeldOutConfig):
    """Evaluation of completions."""

    temperature: float = Field(0.0, ge=0, description="0 always takes the likeliest token.")
    batch: int | None = Field(None, ge=1, description="Completions sampled at once; by default rollout.batch.")


class TextRecipe(BaseRecipe):
    """A whole run of text."""

    task: Literal["text"]
    model: LanguageModelConfig = LanguageModelConfig()
    data: TextDataConfig = TextDataConfig()
    generation: GenerationConfig = GenerationConfig()
    parts: PartsConfig | None = Field(None, description="By default completions are not cut.")
    rollout: TextRolloutConfig = TextRolloutConfig()
    objective: Annotated[Choice, Of("text objective", "tokens")] = part_field(
        "tokens", "A loss of tokens, or of whole answers."
    )
    penalties: list[Annotated[Choice, Of("token penalty")]] = Field(
        default_factory=list, description="Each is added to the loss of tokens, times its `weight`."
    )
    evaluate: TextEvaluateConfig = TextEvaluateConfig()

    @model_validator(mode="after")
    def _geometry(self) -> TextRecipe:
        if faults := [*unmet(self), *rollout_faults(self.rollout, self.optimizer.updates)]:
            raise ValueError("\n".join(faults))
        return self


class MaskedModelConfig(_ChatConfig):
    """The masked language model that is trained."""

    path: str = Field(
        "arithmetic:masked", description="`arithmetic:masked` (embedded), a transformers folder, or a hub id."
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Type of the weights.")
    train: Literal["lora", "full"] = "lora"
    lora: LoraConfig = LoraConfig()
    gradient_checkpointing: bool = False
    attention: Literal["eager", "sdpa", "flash_attention_2"] | None = Field(
        None, description="Attention implementation of transformers; by default transformers chooses."
    )
    block: int | None = Field(
        None, ge=1, description="Tokens of a block, for a model that writes block after block, such as SDAR."
    )

    @model_validator(mode="after")
    def _start_is_trained(self) -> MaskedModelConfig:
        self.lora.check_trained(self.train)
        return self


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


AnyRecipe = Recipe | TextRecipe | MaskedRecipe
SCHEMAS: dict[str, type[AnyRecipe]] = {"images": Recipe, "text": TextRecipe, "masked": MaskedRecipe}
"""The schema of each task."""
