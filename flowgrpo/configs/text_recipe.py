"""The schema of a recipe of text."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ..parts.choice import Choice, Of, part_field
from ..parts.needs import unmet
from ..parts.section import Section
from .base_recipe import BaseRecipe
from .rollouts import TextRolloutConfig, rollout_faults
from .sections import HeldOutConfig, LoraConfig, TextDataConfig, check_quantized, check_teachers_named
from .shown_pictures import pictures_are_shown


class ChatConfig(Section):
    """How prompts go through the chat template of a language model."""

    system: str | None = Field(None, description="System message; only for models with a chat template.")
    chat: bool | None = Field(None, description="Use the chat template; by default if the tokenizer has one.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Values for further variables of the chat template, such as `{enable_thinking: false}`.",
    )

    @model_validator(mode="after")
    def _template_is_used(self) -> ChatConfig:
        if self.chat is False and (self.system is not None or self.chat_template_kwargs):
            raise ValueError(
                "chat is false, and system and chat_template_kwargs need the chat template; leave them out"
            )
        return self


class TextModelConfig(ChatConfig):
    """A model of transformers that is trained."""

    path: str
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Type of the weights.")
    train: Literal["lora", "full"] = "lora"
    lora: LoraConfig = LoraConfig()
    gradient_checkpointing: bool = False
    attention: Literal["eager", "sdpa", "flash_attention_2"] | None = Field(
        None, description="Attention implementation of transformers; by default transformers chooses."
    )
    quantize: Literal["float8", "int8", "nf4"] | None = Field(
        None,
        description="LoRA: keep the frozen linear weights, without the output layer, in 8 bits, through torchao, or "
        "in 4 bits with `nf4` (QLoRA), through bitsandbytes.",
    )

    @model_validator(mode="after")
    def _start_is_trained(self) -> TextModelConfig:
        self.lora.check_trained(self.train)
        check_quantized(self.quantize, self.train, self.dtype)
        if self.quantize is not None and self.path == "arithmetic:untrained":
            raise ValueError(
                "quantize keeps the weights of a trained model in fewer bits, and arithmetic:untrained draws new "
                "weights; leave quantize out"
            )
        return self


def _teach(recipe: Any, model: LanguageModelConfig) -> list[str]:
    if not model.teachers or recipe.objective.name == "distilled":
        return []
    return [
        f"only objective distilled learns from model.teachers, and objective is {recipe.objective.short}; write "
        "objective: distilled, or leave model.teachers out"
    ]


class LanguageTeacherConfig(Section):
    """Another language model, frozen, from which objective `distilled` learns."""

    name: str | None = Field(
        None,
        min_length=1,
        description="With several teachers, what column `teacher` of a prompt says if this is its teacher.",
    )
    path: str = Field(
        min_length=1,
        description="A model with the same tokenizer: `arithmetic` (embedded), a transformers folder, a hub id, or a "
        "finished run that trained all weights.",
    )


class LanguageModelConfig(TextModelConfig):
    """The causal language model that is trained."""

    needs = (pictures_are_shown, _teach)

    path: str = Field(
        "arithmetic",
        description="`arithmetic` (embedded), `arithmetic:untrained`, a transformers folder, or a hub id.",
    )
    pictures: bool = Field(
        False, description="Show the model the pictures in column `image` of the prompts; for a model that sees."
    )
    shared_prefix: bool = Field(
        True, description="Encode the prompt of a group once, and score equal completions of it once."
    )
    teachers: list[LanguageTeacherConfig] = Field(
        default_factory=list,
        description="Objective `distilled`: frozen models that teach. Of several, each prompt names its own, in column "
        "`teacher`. By default the model teaches itself.",
    )

    @field_validator("teachers")
    @classmethod
    def _names_differ(cls, teachers: list[LanguageTeacherConfig]) -> list[LanguageTeacherConfig]:
        check_teachers_named([teacher.name for teacher in teachers])
        return teachers


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
    def _weights_for_the_engine(self) -> TextRecipe:
        if self.model.quantize is not None and self.generation.engine == "vllm":
            raise ValueError(
                f"generation.engine vllm gets whole weights, and model.quantize {self.model.quantize} keeps them in "
                "fewer bits; write generation.engine: transformers, or leave model.quantize out"
            )
        return self

    @model_validator(mode="after")
    def _geometry(self) -> TextRecipe:
        if faults := [*unmet(self), *rollout_faults(self.rollout, self.optimizer.updates)]:
            raise ValueError("\n".join(faults))
        return self
