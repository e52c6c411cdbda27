"""The schema of a recipe. YAML keys, dotted command-line overrides and these fields are the same names."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Section(BaseModel):
    """Base of every section: unknown keys are refused and values are not silently converted between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), strict=True)


class LoraConfig(Section):
    """Low-rank adapters on the denoiser's attention (all matching linear layers)."""

    rank: int = Field(32, ge=1, description="Rank of the update.")
    alpha: float = Field(64.0, gt=0, description="Scale; the update is alpha / rank times B A.")
    targets: list[str] | None = Field(None, description="Linear layers; the attention projections if left out.")
    init: Literal["gaussian", "default"] = "gaussian"


class ModelConfig(Section):
    """What is trained."""

    path: str = Field("scenes", description="`scenes` (embedded), a diffusers pipeline folder, or a hub id.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Of the frozen weights and states.")
    train: Literal["lora", "full"] = "lora"
    lora: LoraConfig = LoraConfig()
    call: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the pipeline's own call.")
    variant: Literal["auto", "direct", "inject", "slice", "fast_forward"] = "auto"
    gradient_checkpointing: bool = False
    release_text_encoders: bool = Field(True, description="Free the text encoders once all prompts are encoded.")


class DataConfig(Section):
    """Prompt files: .txt (a prompt a line), .jsonl or .csv (a `prompt` column, other columns go to the rewards)."""

    train: str = Field("scenes:train", description="A file, or `scenes:train`.")
    heldout: str | None = Field("scenes:heldout", description="A file, or `scenes:heldout`.")


class WindowConfig(Section):
    """MixGRPO's window of trained steps."""

    kind: Literal["progressive", "random", "decay", "exp_decay", "frozen", "all"] = "progressive"
    size: int = Field(4, ge=1)
    stride: int = Field(1, ge=0)
    interval: int = Field(25, ge=1, description="Iterations at one position.")
    start: int = Field(0, ge=0)
    stop: int | None = Field(None, description="One past the last step a window may hold.")


class SamplerConfig(Section):
    """How a rollout walks from noise to image."""

    plan: Literal["window", "branch", "spine"] = "window"
    steps: int = Field(10, ge=2)
    sigmas: list[float] | None = Field(None, min_length=3, description="Noise levels; the pipeline's own if left out.")
    kernel: Literal["flow_sde", "dance_sde", "wan_sde", "cps", "sage"] = "flow_sde"
    eta: float | None = Field(None, ge=0)
    shared_noise: bool = Field(True, description="The samples of a prompt start from one noise.")
    solver: Literal["euler", "dpmpp_2m"] = "euler"
    window: WindowConfig = WindowConfig()
    flash_ratio: float | None = Field(None, gt=0, le=1, description="MixGRPO-Flash: share of steps kept after it.")
    splits: list[int] = Field(default_factory=list, description="Steps that split (`branch`) or branch (`spine`).")
    width: int = Field(2, ge=2, description="`branch`: children at a split; `spine`: branches at a step.")
    spread: float | None = Field(None, gt=0, description="`branch`: share of own noise among siblings.")


class RolloutConfig(Section):
    """How much is sampled in an iteration."""

    prompts: int = Field(8, ge=1, description="Prompts per iteration, over all ranks.")
    group: int = Field(12, ge=1, description="Images per prompt.")
    batch: int = Field(32, ge=1, description="States in one call of the denoiser, in sampling and in training.")
    decode_batch: int = Field(32, ge=1)


def _window_faults(window: WindowConfig, steps: int) -> list[str]:
    """Why a window does not fit in a schedule; its last step is never trained, so windows end before it."""
    if window.kind == "all":
        return []
    if window.stop is not None and window.stop > steps - 1:
        return [
            f"sampler.window.stop is {window.stop} in a schedule of {steps} steps whose last step is never trained; "
            f"use at most {steps - 1} or more sampler.steps"
        ]
    room = (steps - 1 if window.stop is None else window.stop) - window.start
    if window.size <= room:
        return []
    where = f"before its stop, {window.stop}" if window.stop is not None else "before the last, which is never trained"
    mend = f"a size of at most {room}" if room > 0 else "an earlier sampler.window.start"
    more = "more sampler.steps" if window.stop is None else "a later sampler.window.stop"
    return [
        f"sampler.window: {window.size} step(s) from step {window.start} do not fit in a schedule of {steps} {where}; "
        f"use {mend}, or {more}"
    ]


class RewardConfig(Section):
    """One reward: a registry name, an entry point, `file.py:name`, or `module:name`."""

    name: str
    weight: float = 1.0
    label: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)


def _distinct(rewards: list[RewardConfig]) -> list[RewardConfig]:
    labels = [r.label or r.name for r in rewards]
    repeated = sorted({label for label in labels if labels.count(label) > 1})
    if repeated:
        raise ValueError(f"two rewards are called {', '.join(repeated)}; give one a `label`")
    return rewards


class AdvantageConfig(Section):
    """(reward − baseline) / scale, within the images of one prompt."""

    how: Literal["sum", "gdpo"] = "sum"
    baseline: Literal["mean", "loo", "none"] = "mean"
    scale: Literal["group", "batch", "none"] = "group"
    eps: float = Field(1e-4, ge=0)
    ddof: Literal[0, 1] = 1
    clamp: float | None = Field(5.0, gt=0)
    credit: Literal["leaf", "depth"] = Field("leaf", description="`depth` standardises within depths of a tree.")


class ObjectiveConfig(Section):
    """Ratio, surrogate, step weight and penalty."""

    ratio: Literal["gaussian", "guard", "cps_released"] = "guard"
    surrogate: Literal["clip", "cispo", "sapo", "gmpo", "vespo", "dro", "reinforce"] = "clip"
    options: dict[str, float] = Field(default_factory=dict, description="Hyper-parameters of the surrogate.")
    clip_nats: float | None = Field(None, gt=0, description="Clip in nats of a whole latent: low = high = nats / D.")
    weight: Literal["none", "guard", "noise"] = Field("guard", description="Of a step: 1/|J|, or s over its mean.")
    kl: float = Field(0.0, ge=0, description="β of the exact Gaussian KL to the reference.")


class EmaConfig(Section):
    """Average of the trained weights, used for evaluation and for the saved result."""

    decay: float = Field(0.9, gt=0, lt=1)
    every: int = Field(1, ge=1, description="Optimizer steps between updates of the average.")


class OptimizerConfig(Section):
    """AdamW, and how a rollout is cut into optimizer steps."""

    learning_rate: float = Field(3e-4, gt=0)
    betas: tuple[float, float] = Field((0.9, 0.999), strict=False)  # YAML has lists, not tuples
    weight_decay: float = Field(1e-4, ge=0)
    eps: float = Field(1e-8, gt=0)
    max_grad_norm: float = Field(1.0, gt=0)
    warmup: int = Field(0, ge=0, description="Optimizer steps over which the learning rate rises.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="How the learning rate falls after the warm-up: to 0 after the last iteration."
    )
    updates: int = Field(1, ge=1, description="Optimizer steps per pass over a rollout; 1 is strictly on-policy.")
    epochs: int = Field(1, ge=1, description="Passes over a rollout.")
    ema: EmaConfig | None = EmaConfig()


class EvaluateConfig(Section):
    """Evaluation on held-out prompts with fixed seeds, deterministic sampling."""

    every: int = Field(50, ge=1, description="Iterations between evaluations; the first and last are always made.")
    prompts: int | None = Field(None, ge=1, description="The first so many held-out prompts; all if left out.")
    seeds: int = Field(1, ge=1, description="Images per prompt.")
    steps: int | None = Field(None, ge=1, description="Denoising steps; those of the rollout if left out.")
    rewards: list[RewardConfig] | None = Field(None, min_length=1, description="The training rewards if left out.")

    @field_validator("rewards")
    @classmethod
    def _labels_differ(cls, rewards: list[RewardConfig] | None) -> list[RewardConfig] | None:
        return rewards and _distinct(rewards)


class RunConfig(Section):
    """Length, seed and what is written."""

    iterations: int = Field(100, ge=1)
    seed: int = Field(0, ge=0)
    checkpoint_every: int = Field(25, ge=1)
    keep: int = Field(2, ge=1, description="Checkpoints kept.")
    sample_every: int = Field(25, ge=1, description="Iterations between saved training samples.")
    trackers: list[str] = Field(default_factory=list, description="accelerate's: tensorboard, wandb, …")


class Recipe(Section):
    """A whole run."""

    name: str = "unnamed"
    paper: str = ""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    sampler: SamplerConfig = SamplerConfig()
    rollout: RolloutConfig = RolloutConfig()
    rewards: list[RewardConfig] = Field(min_length=1)
    advantage: AdvantageConfig = AdvantageConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    run: RunConfig = RunConfig()

    @field_validator("rewards")
    @classmethod
    def _labels_differ(cls, rewards: list[RewardConfig]) -> list[RewardConfig]:
        return _distinct(rewards)

    @model_validator(mode="after")
    def _geometry(self) -> Recipe:
        sampler, rollout, optimizer = self.sampler, self.rollout, self.optimizer
        steps = len(sampler.sigmas) - 1 if sampler.sigmas else sampler.steps
        faults = []
        if sampler.plan == "window":
            if rollout.group < 2:
                faults.append(f"rollout.group is {rollout.group}: a group of one has no baseline; use 2 or more")
            faults.extend(_window_faults(sampler.window, steps))
        elif not sampler.splits or max(sampler.splits) >= steps or min(sampler.splits) < 0:
            faults.append(f"sampler.splits is {sampler.splits}; name steps between 0 and {steps - 1}")
        if optimizer.updates > rollout.prompts:
            faults.append(
                f"optimizer.updates is {optimizer.updates} with {rollout.prompts} prompts per iteration: an update "
                f"needs whole groups; use at most {rollout.prompts} updates or more rollout.prompts"
            )
        if self.objective.clip_nats is not None and self.objective.options:
            faults.append("objective.clip_nats and objective.options both set the clip; give one")
        if self.objective.clip_nats is not None and self.objective.surrogate not in ("clip", "gmpo"):
            faults.append(
                f"objective.clip_nats sets the bounds of a clip, which surrogate {self.objective.surrogate} does not "
                "have; leave it out or use surrogate clip"
            )
        if self.objective.ratio == "guard" and sampler.kernel == "cps" and self.objective.weight == "none":
            faults.append("objective.ratio guard with kernel cps needs objective.weight guard: scales differ by step")
        if self.objective.ratio == "cps_released" and sampler.kernel != "cps":
            faults.append(f"objective.ratio cps_released belongs to kernel cps, not {sampler.kernel}; use gaussian")
        if faults:
            raise ValueError("\n".join(faults))
        return self
