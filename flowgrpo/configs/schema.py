"""The schema of a recipe. YAML keys, dotted command-line overrides and these fields are the same names."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from .part_soundness import part_faults
from .rollouts import RolloutConfig, TextRolloutConfig, rollout_faults
from .section import OptionNumber, Section
from .sections import (
    AdvantageConfig,
    BalanceConfig,
    DataConfig,
    EmaConfig,
    EntropyConfig,
    HeldOutConfig,
    LoraConfig,
    OptimizerConfig,
    RewardConfig,
    RunConfig,
    SurrogateName,
    VarianceConfig,
    distinct_labels,
)
from .soundness import credit_faults, objective_faults, sampler_faults, shared_faults, text_faults


class ModelConfig(Section):
    """What is trained."""

    path: str = Field("scenes", description="`scenes` (embedded), a diffusers pipeline folder, or a hub id.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Of the frozen weights and states.")
    train: Literal["lora", "full"] = "lora"
    lora: LoraConfig = LoraConfig()
    call: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the pipeline's own call.")
    variant: Literal["auto", "direct", "inject", "slice", "fast_forward", "relay"] = "auto"
    gradient_checkpointing: bool = False
    release_text_encoders: bool = Field(True, description="Free the text encoders once all prompts are encoded.")
    offload: list[Literal["vae", "text_encoders"]] = Field(
        default_factory=list,
        description="Parts that wait in host memory and are on the accelerator while they are used only.",
    )
    attention: str | None = Field(
        None, min_length=1, description="Attention backend of diffusers (native, flash, …); its own choice if left out."
    )
    compile: bool = Field(False, description="`torch.compile` the denoiser's repeated blocks.")
    quantize: Literal["float8", "int8"] | None = Field(
        None, description="LoRA: the frozen denoiser's linear weights in 8 bits, through torchao."
    )

    @model_validator(mode="after")
    def _frozen(self) -> ModelConfig:
        if self.quantize is not None and self.train == "full":
            raise ValueError("quantize keeps the weights frozen, and train: full trains them; use train: lora")
        if self.quantize is not None and self.dtype != "bfloat16":
            raise ValueError(f"quantize computes in bfloat16, and dtype is {self.dtype}; write dtype: bfloat16")
        if "text_encoders" in self.offload and self.release_text_encoders:
            raise ValueError(
                "release_text_encoders frees the text encoders once all prompts are encoded, and offload keeps them; "
                "write release_text_encoders: false, or leave text_encoders out of offload"
            )
        return self


class WindowConfig(Section):
    """MixGRPO's window of trained steps."""

    kind: Literal["progressive", "random", "subset", "decay", "exp_decay", "frozen", "all"] = Field(
        "progressive", description="How it moves; `subset` draws single steps, `all` is every step but the last."
    )
    size: int = Field(4, ge=1)
    stride: int = Field(1, ge=0)
    interval: int = Field(25, ge=1, description="Iterations at one position.")
    start: int = Field(0, ge=0)
    stop: int | None = Field(None, ge=1, description="One past the last step a window may hold.")


class GuideConfig(Section):
    """Euphonium's drift: the critic's gradient in the noise of the stochastic steps."""

    scale: float = Field(0.1, gt=0, description="Root mean square of what is added to the standard normal noise.")
    start: int = Field(0, ge=0, description="First step that is guided.")


class SamplerConfig(Section):
    """How a rollout walks from noise to image."""

    plan: Literal["window", "branch", "spine", "ode"] = "window"
    steps: int = Field(10, ge=2, le=10_000)
    sigmas: list[float] | None = Field(None, min_length=3, description="Noise levels; the pipeline's own if left out.")
    kernel: Literal["flow_sde", "dance_sde", "wan_sde", "cps", "sage", "ddim"] = "flow_sde"
    eta: float | None = Field(None, ge=0)
    shared_noise: bool = Field(True, description="The samples of a prompt start from one noise.")
    solver: Literal["euler", "dpmpp_2m"] = "euler"
    window: WindowConfig = Field(WindowConfig(), description="Trained steps of `window`, `branch` and `ode`.")
    stochastic: Literal["window", "all"] | None = Field(
        None, description="Stochastic steps; `window` for a window and `all` for a tree if left out."
    )
    pruned: WindowConfig | None = Field(None, description="Steps left out of training: BranchGRPO's depth pruning.")
    probe: int | None = Field(
        None, ge=0, description="`window`: finish each state without noise too, in this stride; 0 is one step."
    )
    flash_ratio: float | None = Field(None, gt=0, le=1, description="MixGRPO-Flash: share of steps kept after it.")
    splits: list[int] = Field(default_factory=list, description="Steps that split (`branch`) or branch (`spine`).")
    width: int = Field(2, ge=2, description="`branch`: children at a split; `spine`: branches at a step.")
    completions: list[int] = Field([1], min_length=1, description="`spine`: strides in which a branch is finished.")
    spread: float | None = Field(None, gt=0, description="`branch`, `ode`: share of own noise among siblings.")
    guide: GuideConfig | None = Field(None, description="A drift towards what the critic values; none if left out.")

    @field_validator("sigmas")
    @classmethod
    def _fall(cls, sigmas: list[float] | None) -> list[float] | None:
        if sigmas is not None and any(not high > low for high, low in pairwise(sigmas)):
            raise ValueError(f"noise levels must fall from step to step, and here they are {sigmas}")
        return sigmas


class CriticConfig(Section):
    """A small network that predicts the reward of a noisy latent."""

    learning_rate: float = Field(1e-3, gt=0)
    passes: int = Field(2, ge=1, description="Passes over the states of a rollout.")
    warmup: int = Field(10, ge=0, description="Iterations before it has any influence.")
    width: int = Field(64, ge=4, description="Channels.")


class ObjectiveConfig(Section):
    """Ratio, surrogate, step weight and penalties, or a loss of the forward process."""

    form: Literal["transition", "neighbour", "diffusion_nft", "awm", "dgpo", "flow_dpo"] = Field(
        "transition", description="Ratio of a step's transition, of a choice among neighbours, or a forward process."
    )
    form_options: dict[str, OptionNumber] = Field(default_factory=dict, description="Hyper-parameters of the form.")
    times: int | None = Field(None, ge=1, description="Forward process: noise levels per image; all if left out.")
    ratio: Literal["gaussian", "guard", "cps_released"] = "guard"
    surrogate: SurrogateName = "clip"
    options: dict[str, OptionNumber] = Field(default_factory=dict, description="Hyper-parameters of the surrogate.")
    clip_nats: float | None = Field(None, gt=0, description="Clip in nats of a whole latent: low = high = nats / D.")
    balance: BalanceConfig | None = Field(
        None, description="Surrogate `bapo`: search its bounds at each optimizer step; fixed if left out."
    )
    variance: VarianceConfig | None = Field(
        None,
        description="Surrogate `r2vpo`: move its `lam` until the ratio's variance is at a target; fixed if left out.",
    )
    trust_nats: float | None = Field(
        None, gt=0, description="Flow-DPPO: steps that moved further and still move away are left out."
    )
    weight: Literal["none", "guard", "noise", "equalise"] = Field(
        "guard", description="Of a step: 1/|J|, s over its mean, or s/|J| over its median."
    )
    kl: float = Field(0.0, ge=0, description="β of the exact Gaussian KL to the reference.")
    w2: float = Field(0.0, ge=0, description="Of the squared 2-Wasserstein distance of a step to the reference's.")
    stepwise: float = Field(0.0, ge=0, description="Of the KL to the policy that sampled.")
    distil: float = Field(0.0, ge=0, description="Of the KL to the guided step.")
    llds: float = Field(
        0.0,
        ge=0,
        description="Of LLDS (2512.04220), what the log-density of a sampled step has fallen since sampling.",
    )
    llds_rows: Literal["all", "good"] = Field("all", description="`llds`: only where the advantage is above 0.")
    anchor: EmaConfig | None = Field(None, description="The reference moves after the weights; the base if left out.")
    old: EmaConfig | None = Field(None, description="The sampling policy follows the weights; it is them if left out.")

    @model_validator(mode="before")
    @classmethod
    def _steps_have_no_entropy(cls, given: Any) -> Any:
        if isinstance(given, dict) and "entropy" in given:
            raise ValueError(
                "the entropy of a Gaussian step follows from its standard deviation alone, which is the sampler's and "
                "not trained; leave `entropy` out, and set sampler.eta for more noise"
            )
        return given


class EvaluateConfig(HeldOutConfig):
    """Evaluation of images, sampled without noise in the steps."""

    steps: int | None = Field(None, ge=1, description="Denoising steps; those of the rollout if left out.")


class BaseRecipe(Section):
    """What a run of images and a run of text have in common."""

    name: str = "unnamed"
    paper: str = ""
    data: DataConfig = DataConfig()
    rewards: list[RewardConfig] = Field(min_length=1)
    advantage: AdvantageConfig = AdvantageConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    run: RunConfig = RunConfig()

    @field_validator("rewards")
    @classmethod
    def _labels_differ(cls, rewards: list[RewardConfig]) -> list[RewardConfig]:
        return distinct_labels(rewards)


class Recipe(BaseRecipe):
    """A whole run of images."""

    task: Literal["images"] = "images"
    model: ModelConfig = ModelConfig()
    sampler: SamplerConfig = SamplerConfig()
    rollout: RolloutConfig = RolloutConfig()
    critic: CriticConfig | None = Field(None, description="Only for a credit or a guide that asks one.")
    objective: ObjectiveConfig = ObjectiveConfig()
    evaluate: EvaluateConfig = EvaluateConfig()

    @model_validator(mode="before")
    @classmethod
    def _images_are_not_cut(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("parts") is not None:
            raise ValueError(
                "`parts` cuts completions, and this recipe makes images, whose parts are their denoising steps; leave "
                "it out, or use task text"
            )
        return given

    @model_validator(mode="after")
    def _geometry(self) -> Recipe:
        faults = [*sampler_faults(self), *credit_faults(self), *objective_faults(self), *shared_faults(self)]
        faults += rollout_faults(self.rollout, self.optimizer.updates)
        if faults:
            raise ValueError("\n".join(faults))
        return self


class LanguageModelConfig(Section):
    """The causal language model that is trained."""

    path: str = Field(
        "arithmetic",
        description="`arithmetic` (embedded), `arithmetic:untrained`, a transformers folder, or a hub id.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Of the frozen weights.")
    train: Literal["lora", "full"] = "lora"
    lora: LoraConfig = LoraConfig()
    gradient_checkpointing: bool = False
    attention: Literal["eager", "sdpa", "flash_attention_2"] | None = Field(
        None, description="Of transformers; its own choice if left out."
    )
    system: str | None = Field(None, description="System message; only for models with a chat template.")
    chat: bool | None = Field(None, description="Use the chat template; if left out, where the tokenizer has one.")
    shared_prefix: bool = Field(True, description="Score the prompt of a group once, in place of once a completion.")


class GenerationConfig(Section):
    """How completions are sampled."""

    max_tokens: int = Field(256, ge=1, description="Longest completion.")
    temperature: float = Field(1.0, gt=0, description="Logits are divided by it, in sampling and in scoring.")
    top_k: int | None = Field(None, ge=1, description="Only the likeliest so many tokens; all if left out.")
    top_p: float | None = Field(None, gt=0, le=1, description="Only the likeliest tokens of this mass.")
    max_prompt_tokens: int = Field(2048, ge=1, description="A longer prompt is refused before the run.")
    engine: Literal["transformers", "vllm"] = Field(
        "transformers", description="`vllm` samples with vLLM, given the trained weights before it does."
    )
    engine_options: dict[str, Any] = Field(
        default_factory=dict, description="`vllm`: keyword arguments of its `LLM`, as `gpu_memory_utilization`."
    )


class PartsConfig(Section):
    """How a completion is cut into parts, for ratios, credit and rewards. What is blank joins the part before."""

    cut: Literal["lines", "sentences", "pattern"] = Field(
        "lines", description="`sentences` end with . ! ? or … before white space, with 。！？, and with a line."
    )
    pattern: str | None = Field(
        None, description="`pattern`: a regular expression of Python; a part ends where a match of it ends."
    )

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"no regular expression: {error}") from None
        return pattern

    @model_validator(mode="after")
    def _has_a_pattern(self) -> PartsConfig:
        if (self.cut == "pattern") != bool(self.pattern):
            raise ValueError(f"cut is {self.cut} and pattern {self.pattern!r}; a pattern belongs to cut pattern alone")
        return self


class TextObjectiveConfig(Section):
    """Ratio level, surrogate, reduction and penalty, or a loss of whole answers."""

    form: Literal["tokens", "dpo", "simpo", "regression", "real"] = Field(
        "tokens",
        description="A surrogate of the tokens' ratio; or of whole answers of a group: the best against the worst (DPO "
        "2305.18290, SimPO 2405.14734), advantages predicted (Reg-GRPO 2506.07464), right told from wrong (REAL "
        "2602.05630).",
    )
    form_options: dict[str, OptionNumber] = Field(default_factory=dict, description="Hyper-parameters of the form.")
    surrogate: SurrogateName = "clip"
    options: dict[str, OptionNumber] = Field(default_factory=dict, description="Hyper-parameters of the surrogate.")
    balance: BalanceConfig | None = Field(
        None, description="Surrogate `bapo`: search its bounds at each optimizer step; fixed if left out."
    )
    variance: VarianceConfig | None = Field(
        None,
        description="Surrogate `r2vpo`: move its `lam` until the ratio's variance is at a target; fixed if left out.",
    )
    level: Literal["token", "part", "sequence"] = Field(
        "token", description="What has a ratio: the geometric mean of its tokens'."
    )
    reduce: Literal["token", "part", "sequence", "sum"] = Field(
        "token", description="Over tokens, row means, or row sums; `part`: row means in which each part counts once."
    )
    constant: bool = Field(False, description="`sum`: divide by rows × max_tokens (Dr. GRPO), not by rows.")
    kl: float = Field(0.0, ge=0, description="Of the KL to the reference.")
    kl_kind: Literal["k2", "k3+"] = Field("k2", description="Estimates whose gradient is right.")
    llds: float = Field(
        0.0,
        ge=0,
        description="Of LLDS (2512.04220), what tokens have lost of their log-prob in answers that became less likely.",
    )
    llds_rows: Literal["all", "good"] = Field("all", description="`llds`: only where the advantage is above 0.")
    entropy: EntropyConfig | None = Field(None, description="A bonus held at a target of entropy; none if left out.")
    conflict: float | None = Field(
        None,
        ge=1,
        description="Weight of a good answer's tokens that a bad answer of the prompt has in the same place, counted "
        "from the start or the end; the bad answer's have 0 (GTPO, 2508.03772). 2 in the paper; all are 1 if left out.",
    )
    confident: float | None = Field(
        None,
        gt=0,
        description="Train on answers whose mean entropy is at most so many nats (GTPO: 0.693); on all if left out.",
    )
    drop_truncated: bool = Field(False, description="Leave out completions that hit max_tokens (DAPO).")
    correction: Literal["auto", "none", "token", "sequence"] = Field(
        "auto",
        description="Weight by the ratio of training engine and sampler, of a token or of the whole answer; `auto` is "
        "`token` where another engine samples, and else `none`.",
    )
    correction_how: Literal["truncate", "mask"] = Field(
        "truncate", description="A ratio above the cap counts as the cap; or one outside floor and cap as 0."
    )
    correction_cap: float = Field(2.0, gt=0)
    correction_floor: float = Field(0.0, ge=0, description="`mask`: the smallest ratio that counts.")


class TextEvaluateConfig(HeldOutConfig):
    """Evaluation of completions."""

    temperature: float = Field(0.0, ge=0, description="0 takes the likeliest token.")
    batch: int | None = Field(None, ge=1, description="Completions sampled at once; rollout.batch if left out.")


class TextRecipe(BaseRecipe):
    """A whole run of text."""

    task: Literal["text"]
    model: LanguageModelConfig = LanguageModelConfig()
    data: DataConfig = DataConfig(train="arithmetic:train", heldout="arithmetic:heldout")
    generation: GenerationConfig = GenerationConfig()
    parts: PartsConfig | None = Field(None, description="Completions are not cut if left out.")
    rollout: TextRolloutConfig = TextRolloutConfig()
    objective: TextObjectiveConfig = TextObjectiveConfig()
    evaluate: TextEvaluateConfig = TextEvaluateConfig()

    @model_validator(mode="after")
    def _geometry(self) -> TextRecipe:
        faults = [
            *text_faults(self),
            *part_faults(self),
            *shared_faults(self),
            *rollout_faults(self.rollout, self.optimizer.updates),
        ]
        if faults:
            raise ValueError("\n".join(faults))
        return self


AnyRecipe = Recipe | TextRecipe
