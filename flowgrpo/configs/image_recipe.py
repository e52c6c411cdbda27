"""The schema of a recipe of images or videos."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ..parts.choice import Choice, Of, part_field
from ..parts.needs import SOMETHING, Need, asking, one_round, unmet
from ..parts.section import Section
from ..parts.traits import measured_distance, saying
from .base_recipe import BaseRecipe
from .rollouts import RolloutConfig, rollout_faults
from .sections import PROMPT, EmaConfig, HeldOutConfig, LoraConfig, check_quantized, check_teachers_named, named_once


def _are_compared_with(recipe: Any, model: ModelConfig) -> list[str]:
    if not model.teachers or asking(recipe, "model.teachers"):
        return []
    return ["nothing here compares with model.teachers; add penalty taught, or leave model.teachers out"]


def _reference_is_there(recipe: Any, model: ModelConfig) -> list[str]:
    found = [k for k, teacher in enumerate(model.teachers) if teacher.weights == "reference"]
    if not found or recipe.reference is not None:
        return []
    return [
        f"model.teachers.{found[0]}.weights is reference, and the recipe has no section reference; write one, such as "
        "reference: {decay: 0.99}, or weights: start"
    ]


LORA_TEACHERS = (
    "a LoRA teaches beside a frozen model, and train: full trains the model itself; write train: lora, or fuse the "
    "LoRA into its model (`flowgrpo export RUN --merge --out FOLDER` does it for a run), and give the folder as the "
    "teacher's path"
)
"""Why a run of all weights has no LoRA as a teacher, and what to write instead."""


class TeacherConfig(Section):
    """A model with which penalty `taught` compares: the model of the run with another LoRA, another model with the same
    inputs and latents, or the model of the run itself with another call or another prompt.
    """

    name: str | None = Field(
        None,
        min_length=1,
        description="With several teachers, what column `teacher` of a prompt says if this is its teacher.",
    )
    lora: str | None = Field(
        None,
        min_length=1,
        description="A LoRA of the model: a `.safetensors` file or a folder as in `lora.start`, or a finished run. "
        "By default the teacher is the model that training begins from.",
    )
    path: str | None = Field(
        None,
        min_length=1,
        description="A whole model in place of a LoRA: a finished run, a diffusers pipeline folder, or a hub id. Its "
        "denoiser has the inputs and the latents of the model, and may have another size. Of a run of a LoRA, the "
        "LoRA is taken.",
    )
    call: dict[str, Any] = Field(
        default_factory=dict, description="Arguments that the teacher's call has in place of those in `model.call`."
    )
    weights: Literal["start", "reference", "present"] = Field(
        "start",
        description="Without `lora` and `path`, which weights of the trained model teach it: `start` has the weights "
        "that training begins from, `reference` the average of section `reference`, `present` the weights of now.",
    )
    template: str | None = Field(
        None,
        min_length=1,
        description="What the teacher reads in place of the prompt, such as `{prompt}, in watercolours` or "
        "`{detailed}`: `{prompt}` is the prompt, and another name in braces a column of the prompts.",
    )
    image: str | None = Field(
        None,
        min_length=1,
        description="Column of the prompts with the picture that the teacher's call gets as `image`, or with a list "
        "of them, in place of the prompt's own pictures.",
    )

    @field_validator("template")
    @classmethod
    def _says_more(cls, template: str | None) -> str | None:
        if template is not None and template.strip() == PROMPT:
            raise ValueError(
                f"{template} is what the model reads itself; write more into it, such as a column in braces, or leave "
                "template out"
            )
        return template

    @model_validator(mode="after")
    def _one_model(self) -> TeacherConfig:
        if self.lora is not None and self.path is not None:
            raise ValueError(
                f"lora {self.lora} and path {self.path} are two models, and a teacher is one; leave one of them out, "
                "or write two teachers"
            )
        if not self.is_own and self.weights != "start":
            raise ValueError(
                f"weights {self.weights} are the trained model's, and {self.lora or self.path} has weights of its own; "
                "leave one of them out"
            )
        if self.weights == "present" and not (self.knows_more or self.call):
            raise ValueError(
                "the present weights with the same prompt and the same call predict what the model predicts, and teach "
                "nothing; write a template, an image or a call, or leave weights out"
            )
        return self

    @property
    def is_own(self) -> bool:
        """Whether the teacher has weights of the trained model, of the start or later."""
        return self.lora is None and self.path is None

    @property
    def is_base(self) -> bool:
        """Whether the teacher is the model that training begins from, maybe with another call."""
        return self.is_own and self.weights == "start"

    @property
    def knows_more(self) -> bool:
        """Whether the teacher reads or sees something else than the model."""
        return self.template is not None or self.image is not None


class ModelConfig(Section):
    """The model that is trained."""

    needs = (_are_compared_with, _reference_is_there)

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
    reference_call: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments that the call of the reference has in place of those in `call`: with `guidance_scale`, "
        "penalties and losses compare with guided predictions.",
    )
    teachers: list[TeacherConfig] = Field(
        default_factory=list,
        description="Models with which penalty `taught` compares. Of several, each prompt names its own, in column "
        "`teacher`.",
    )
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
    context_parallel: int = Field(
        1,
        ge=1,
        description="Number of processes that evaluate one sample together, each with a part of its tokens.",
    )
    quantize: Literal["float8", "int8", "nf4"] | None = Field(
        None,
        description="LoRA: keep the frozen denoiser's linear weights in 8 bits, through torchao, or in 4 bits with "
        "`nf4` (QLoRA), through bitsandbytes.",
    )

    @field_validator("teachers")
    @classmethod
    def _names_differ(cls, teachers: list[TeacherConfig]) -> list[TeacherConfig]:
        check_teachers_named([teacher.name for teacher in teachers])
        return teachers

    @model_validator(mode="after")
    def _frozen(self) -> ModelConfig:
        self.lora.check_trained(self.train)
        for place, teacher in enumerate(self.teachers):
            if teacher.lora is not None and self.train == "full":
                raise ValueError(f"teachers.{place}.lora is {teacher.lora}, and {LORA_TEACHERS}")
        check_quantized(self.quantize, self.train, self.dtype)
        if self.compile and self.context_parallel > 1:
            raise ValueError(
                f"context_parallel is {self.context_parallel}, and blocks that share tokens among processes are not "
                "compiled; write compile: false"
            )
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
    call: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of evaluations' calls, in place of the same arguments in `model.call`, such as the "
        "guidance scale with which the model will be used, or a larger height and width.",
    )
    trained_share: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of the denoising steps that the trained weights make, rounded to whole steps. The model "
        "before training makes the last ones (MixGRPO's hybrid inference).",
    )


def _is_compared_with(recipe: Any, reference: ReferenceConfig) -> list[str]:
    if saying(recipe, "compares") or any(teacher.weights == "reference" for teacher in recipe.model.teachers):
        return []
    return ["no part of this recipe compares with the reference; leave reference out, or add a penalty such as kl"]


def _is_measured(recipe: Any, reference: ReferenceConfig) -> list[str]:
    if reference.above is None or measured_distance(recipe) is not None:
        return []
    return [
        "reference.above bounds what a penalty measures, and no penalty compares with the reference; add a penalty "
        "such as kl, or leave above out"
    ]


class ReferenceConfig(EmaConfig):
    """Average of the trained weights with which penalties compare, in place of the base model."""

    needs = (_is_compared_with, _is_measured)

    above: float | None = Field(
        None,
        gt=0,
        description="With `decay: 0`, the reference also becomes the policy after an iteration in which the first "
        "penalty that compares with it was more than this, on average (GARDO, 2512.24138). `every` then counts from "
        "there.",
    )

    @model_validator(mode="after")
    def _copies(self) -> ReferenceConfig:
        if self.above is not None and self.decay:
            raise ValueError(
                f"above lets the reference become the policy, and decay {self.decay:g} keeps a share of the old "
                "reference; write decay: 0, or leave above out"
            )
        return self


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

    @property
    def as_evaluated(self) -> Recipe:
        """The recipe with the call of its evaluations as `model.call`; the recipe itself if the two are the same."""
        changes = self.evaluate.call
        if not changes:
            return self
        model = self.model.model_copy(update={"call": {**self.model.call, **changes}})
        return self.model_copy(update={"model": model, "evaluate": self.evaluate.model_copy(update={"call": {}})})

    @property
    def other_calls(self) -> list[dict[str, Any]]:
        """What the calls of evaluations, the reference and the teachers change; without calls that change nothing."""
        found = [self.evaluate.call, self.model.reference_call, *(teacher.call for teacher in self.model.teachers)]
        return [call for k, call in enumerate(found) if call and call not in found[:k]]

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
