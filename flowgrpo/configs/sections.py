"""Sections that recipes of images and recipes of text share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ..parts.choice import Choice
from ..parts.needs import unused
from ..parts.section import Section
from ..parts.traits import OF_EDGES, trained
from .reward_sections import RewardConfig, distinct_labels
from .rollouts import rounds_need


class LoraConfig(Section):
    """Low-rank adapters on the denoiser's attention (all matching linear layers)."""

    rank: int = Field(32, ge=1, description="Rank of the update.")
    alpha: float = Field(64.0, gt=0, description="Scale; the update is B A times alpha / rank.")
    targets: list[str] | None = Field(
        None,
        min_length=1,
        description="Linear layers, by the ends of their names, or by their whole names after `^`; by default the "
        "attention projections. `[all-linear]` are all linear layers.",
    )
    init: Literal["gaussian", "default"] = "gaussian"
    start: str | None = Field(
        None,
        min_length=1,
        description="A LoRA to begin with: a `.safetensors` file of diffusers, peft, ComfyUI, kohya's scripts and "
        "others, a folder with such a file, or a finished run. `rank`, `alpha` and `targets` are the LoRA's own. "
        "Penalties compare with the model with this LoRA.",
    )
    compute: Literal["base", "float32"] = Field(
        "base",
        description="Type in which the adapter is multiplied: with `base` bfloat16 if `model.dtype` is bfloat16, as "
        "under autocast, else float32. Its trained numbers, their gradients and files are in float32 either way.",
    )

    @model_validator(mode="after")
    def _start_has_its_numbers(self) -> LoraConfig:
        if self.start is not None and self.init != "gaussian":
            raise ValueError(f"init is {self.init}, and start brings all numbers; leave one of them out")
        return self

    def check_trained(self, train: str) -> None:
        """Raise ValueError if the LoRA begins from another, and `train` of the model says that all weights train."""
        if train == "full" and self.start is not None:
            raise ValueError(
                f"lora.start is {self.start}, and train: full trains no LoRA; write train: lora, or fuse the LoRA into "
                "the model with plain diffusers and give the new folder as path"
            )


def check_quantized(kind: str | None, train: str, dtype: str) -> None:
    """Check that weights in fewer bits are frozen, and computed in bfloat16.

    Raises:
        ValueError: they are trained, or computed in another type.
    """
    if kind is not None and train == "full":
        raise ValueError("quantize needs frozen weights, and train: full trains them; use train: lora")
    if kind is not None and dtype != "bfloat16":
        raise ValueError(f"quantize computes in bfloat16, and dtype is {dtype}; write dtype: bfloat16")


def check_teachers_named(names: list[str | None]) -> None:
    """Check that prompts can tell teachers apart by their names. A single teacher need not have one.

    Raises:
        ValueError: one of several teachers has no name, or two have the same.
    """
    if len(names) > 1 and None in names:
        raise ValueError(
            f"{len(names)} teachers, and number {names.index(None)} has no name; give each a name, which column "
            "`teacher` of the prompts says"
        )
    if repeated := sorted({str(name) for name in names if names.count(name) > 1}):
        raise ValueError(f"two teachers are called {', '.join(repeated)}; give one of them another name")


PROMPT = "{prompt}"
WORLDS = ("scenes", "arithmetic")
"""The embedded worlds. Each has the prompts `WORLD:train`, `WORLD:heldout` and `WORLD:test`."""
SPLITS = ("heldout", "test", "train")


Side = Annotated[int, Field(ge=1)]
"""A height or a width, in pixels."""
Bucket = Annotated[tuple[Side, Side], Field(strict=False)]  # YAML has lists, not tuples
"""A height and a width."""


def _buckets_of_images(recipe: Any, section: DataConfig) -> list[str]:
    if section.buckets and recipe.task != "images":
        return [f"data.buckets are sizes of images, and this is a recipe of task {recipe.task}; leave it out"]
    return []


class DataConfig(Section):
    """Prompts: a file (.txt with a prompt per line, .jsonl, .json, .csv, .tsv, .parquet) or a data set of `datasets`.

    A data set is a folder, or `hub:owner/name`. What is read of it follows a `?`, as in
    `hub:owner/name?split=test&config=main&revision=v1&column=caption`. Rewards get the columns other than the prompt.
    """

    needs = (*rounds_need("data.templates", "templates"), _buckets_of_images)

    train: str = Field("scenes:train", description="A file, a data set, `scenes:train` or `arithmetic:train`.")
    heldout: str | None = Field(
        "scenes:heldout",
        description="A file, a data set, `scenes:heldout` or `arithmetic:heldout`. A recipe that names a model and "
        "training prompts of its own has no default.",
    )
    test: str | None = Field(
        None,
        description="Prompts that no run reads, for `flowgrpo evaluate RUN --split test`: a file, a data set, "
        "`scenes:test` or `arithmetic:test`. By default, the test prompts of the embedded world of `heldout`.",
    )
    templates: list[str] = Field(
        default_factory=list,
        description="Prompt augmentation by texts with `{prompt}` in them. A prompt is sampled with each template, all "
        "its samples are one group, and rewards see only the prompt. Evaluations use the prompt without a template.",
    )

    buckets: list[Bucket] = Field(
        default_factory=list,
        description="Images: sizes, each as height and width, to which the sizes of prompts are rounded. A prompt gets "
        "the size with the nearest aspect ratio. Prompts have sizes if their file has columns `height` and `width`.",
    )

    @field_validator("templates")
    @classmethod
    def _hold_the_prompt(cls, templates: list[str]) -> list[str]:
        wrong = [template for template in templates if template.count(PROMPT) != 1]
        if wrong:
            raise ValueError(f"the template {wrong[0]!r} must hold {PROMPT} once, where the prompt goes")
        return templates

    def source(self, split: str) -> str | None:
        """The prompts of one of `SPLITS`; None if the recipe has none.

        Without `test`, the test prompts are those of the embedded world of `heldout`; without `heldout`, those of the
        world of `train`.
        """
        if split != "test" or self.test is not None:
            found: str | None = getattr(self, split)
            return found
        world, colon, _ = (self.train if self.heldout is None else self.heldout).partition(":")
        return f"{world}:test" if colon and world in WORLDS else None


class TextDataConfig(DataConfig):
    """Prompts of a language model: as for images, but what is left out is of the embedded problems."""

    train: str = Field("arithmetic:train", description="A file, a data set, or `arithmetic:train`.")
    heldout: str | None = Field(
        "arithmetic:heldout",
        description="A file, a data set, or `arithmetic:heldout`. A recipe that names a model and training prompts of "
        "its own has no default.",
    )


def named_once(entries: list[Choice]) -> list[Choice]:
    """The parts of a list, of which no two may have one name, because overrides and metrics use the names.

    Raises:
        ValueError: if two entries have one name.
    """
    names = [entry.short for entry in entries]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if any("source" in entry.options for entry in entries if entry.short in repeated):
        raise ValueError(f"has {', '.join(repeated)} more than once; write it once, with one source that has all")
    if repeated:
        raise ValueError(f"has {', '.join(repeated)} more than once; write it once, with the sum of the weights")
    return entries


class BalanceConfig(Section):
    """BAPO's search for the bounds of surrogate `bapo`: they widen until good samples have their share of the gradient.

    The upper bound moves first. The ratio of an image is the ratio of one element of its latent and stays close to 1.
    So for images, give bounds that are equally close, such as `lower: [0.9999, 1.0]`.
    """

    target: float = Field(
        0.5, gt=0, lt=1, description="Least share of the gradient from samples with an advantage above 0 (ρ₀)."
    )
    lower: tuple[float, float] = Field((0.6, 0.9), strict=False, description="First and last lower bound.")
    upper: tuple[float, float] = Field((1.2, 3.0), strict=False, description="First and last upper bound.")
    lower_step: float = Field(0.02, gt=0, description="How far the lower bound moves at a time.")
    upper_step: float = Field(0.05, gt=0, description="How far the upper bound moves at a time.")


class EntropyConfig(Section):
    """An entropy bonus. With a target, its coefficient grows while entropy is below the target (AEPO, 2510.08141)."""

    target: float | None = Field(
        None, ge=0, description="Target of the entropy, in nats per token; without it the coefficient stays at `value`."
    )
    value: float = Field(0.0, ge=0, description="First value of the coefficient.")
    rate: float = Field(0.01, gt=0, description="Change of the coefficient per nat of error and iteration.")
    high: float = Field(0.1, gt=0, description="Largest value of the coefficient.")

    @model_validator(mode="after")
    def _starts_below_its_highest(self) -> EntropyConfig:
        if self.target is not None and self.value > self.high:
            raise ValueError(f"value is {self.value:g}, above `high`, {self.high:g}; use a value of at most `high`")
        return self

    @model_validator(mode="after")
    def _does_something(self) -> EntropyConfig:
        if self.target is None and self.value == 0:
            raise ValueError(
                "entropy has neither a target nor a value, so there is no bonus; write value, such as value: 0.01, for "
                "a coefficient that stays, or target, for one that follows the entropy"
            )
        if self.target is None and (faults := unused(self, ["rate", "high"], "without a target nothing moves")):
            raise ValueError("; ".join(faults))
        return self


class VarianceConfig(Section):
    """Dual ascent on the price of the ratio's variance in surrogate `r2vpo` (R²VPO, 2601.03320).

    The ratio of an image is the ratio of one element of its latent and stays close to 1. So its variance is small: for
    images, give a small target and a large rate.
    """

    target: float = Field(0.01, gt=0, description="Target of the mean of (ratio − 1)².")
    value: float = Field(1.0, ge=0, description="First value of the price.")
    rate: float = Field(1.0, gt=0, description="Change of the price per unit of error and iteration.")
    high: float | None = Field(None, gt=0, description="Largest price; by default there is no limit.")


class EmaConfig(Section):
    """Average of the trained weights, used for evaluation and for the saved result."""

    decay: float = Field(0.9, ge=0, lt=1, description="Largest share that the old average keeps; 0 copies the weights.")
    every: int = Field(1, ge=1, description="Optimizer steps between updates of the average.")
    rise: float | None = Field(
        None,
        gt=0,
        description="Growth of the share per optimizer step, from `first`. By default, the share at step s is "
        "(1 + s) / (10 + s).",
    )
    first: float = Field(0.0, ge=0, lt=1, description="With `rise`, the share before it grows.")
    after: int = Field(0, ge=0, description="With `rise`, optimizer steps before the share grows.")

    @model_validator(mode="after")
    def _of_a_rise(self) -> EmaConfig:
        for name in ("first", "after"):
            if self.rise is None and getattr(self, name):
                raise ValueError(
                    f"{name} says how the share grows with rise, and rise is left out; add rise, such as rise: 0.005, "
                    f"or leave {name} out"
                )
        if self.first > self.decay:
            raise ValueError(
                f"first is {self.first:g} and decay, the largest share, is {self.decay:g}; use a first of at most "
                f"{self.decay:g}"
            )
        return self


Decay = Annotated[float, Field(ge=0, lt=1)]
"""Share of the past that a running mean keeps."""


def _cut_where_edges_are(recipe: Any, section: OptimizerConfig) -> list[str]:
    if section.cut != "edges":
        return []
    if recipe.task == "text":
        return [
            "optimizer.cut edges deals out the trained states of a denoising, and a causal language model has none; "
            "use optimizer.cut prompts"
        ]
    if trained(recipe) not in OF_EDGES:
        objective = "trajectory" if recipe.task == "masked" else "transition"
        return [
            "optimizer.cut edges deals out the trained states of a denoising, and nothing here trains them; use "
            f"optimizer.cut prompts, or objective {objective}"
        ]
    return []


def _half_where_the_rate_never_ends(recipe: Any, section: OptimizerConfig) -> list[str]:
    if section.schedule == "inverse" and section.half is None:
        return ["optimizer.schedule inverse does not say how fast the rate falls; add half, such as half: 40"]
    if section.schedule != "inverse" and section.half is not None:
        return [
            f"optimizer.half says how fast the rate falls with schedule: inverse, and schedule is {section.schedule}; "
            "leave half out"
        ]
    return []


class OptimizerConfig(Section):
    """AdamW, and how a rollout is cut into optimizer steps."""

    needs = (_cut_where_edges_are, _half_where_the_rate_never_ends)

    type: Literal["adamw", "adamw_8bit"] = Field(
        "adamw",
        description="`adamw_8bit` keeps AdamW's two averages in 8 bits, through bitsandbytes: 2.03 bytes for each "
        "trained number in place of 8. It rounds the steps a little.",
    )
    learning_rate: float = Field(3e-4, gt=0)
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), strict=False)  # YAML has lists, not tuples
    weight_decay: float = Field(1e-4, ge=0)
    eps: float = Field(1e-8, gt=0)
    max_grad_norm: float = Field(1.0, gt=0)
    warmup: int = Field(0, ge=0, description="Optimizer steps over which the learning rate rises.")
    schedule: Literal["constant", "linear", "cosine", "inverse"] = Field(
        "constant",
        description="How the learning rate falls after the warm-up. `linear` and `cosine` reach 0 after the last "
        "iteration. With `inverse`, the rate after s steps is divided by 1 + s / half, however long the run is. So a "
        "longer run begins as a shorter one.",
    )
    half: int | None = Field(
        None, ge=1, description="With schedule `inverse`: the optimizer steps after which the rate has halved."
    )
    updates: int = Field(1, ge=1, description="Optimizer steps per pass over a rollout; 1 is strictly on-policy.")
    cut: Literal["prompts", "edges"] = Field(
        "prompts",
        description="What an update gets: `prompts` gives it whole groups, `edges` gives it batches of trained states "
        "from all steps and groups, in a random order (BranchGRPO). With `edges` all updates have about as many "
        "trained edges. Each process deals out its own batches.",
    )
    epochs: int = Field(1, ge=1, description="Passes over a rollout.")
    ema: EmaConfig | None = EmaConfig()


class QuickConfig(Section):
    """Evaluations of a few held-out prompts, which show early what a run gains."""

    every: int = Field(10, ge=1, description="Iterations between quick evaluations.")
    prompts: int = Field(48, ge=1, description="How many held-out prompts; `evaluate.take` says which.")


class HeldOutConfig(Section):
    """Evaluation on held-out prompts with fixed seeds."""

    every: int = Field(
        50, ge=1, description="Iterations between evaluations. The first and the last evaluation are always made."
    )
    prompts: int | None = Field(None, ge=1, description="Evaluate only this many held-out prompts; by default all.")
    take: Literal["spread", "first"] = Field(
        "spread",
        description="Which held-out prompts are evaluated, if not all. `spread` takes one at random from each of many "
        "equal stretches of the file, and always the same ones. `first` takes the first ones.",
    )
    seeds: int = Field(1, ge=1, description="Samples per prompt.")
    quick: QuickConfig | None = Field(
        None,
        description="Also evaluate a few of the prompts, more often. Metrics `quick/NAME` have the means, and "
        "`quick_gain/NAME` the gain since the start of the run. The samples are not saved.",
    )
    rewards: list[RewardConfig] | None = Field(
        None, min_length=1, description="Rewards of evaluations; by default the training rewards."
    )
    results: Literal["last", "best"] = Field(
        "last",
        description="Which weights become the results of the run: `last`, or `best` for the weights with the highest "
        "mean of the first reward at an evaluation of all prompts, the start included; with the lowest mean if the "
        "weight of this reward is negative. Without held-out prompts, the last.",
    )

    @field_validator("rewards")
    @classmethod
    def _labels_differ(cls, rewards: list[RewardConfig] | None) -> list[RewardConfig] | None:
        for reward in rewards or ():
            if reward.bent:
                raise ValueError(
                    f"reward {reward.known_as} has `{reward.bent[0]}`, and evaluations record rewards as they are; "
                    "leave it out"
                )
        return rewards and distinct_labels(rewards)


class RunConfig(Section):
    """Length and seed of a run, and the files that it writes."""

    iterations: int = Field(100, ge=1, le=10_000_000)
    seed: int = Field(0, ge=0)
    checkpoint_every: int = Field(25, ge=1)
    checkpoint_minutes: float | None = Field(
        10.0,
        gt=0,
        allow_inf_nan=False,
        description="Largest time between checkpoints, in minutes; null for no limit of time.",
    )
    keep: int = Field(2, ge=1, description="Number of checkpoints that are kept.")
    sample_every: int = Field(25, ge=1, description="Iterations between saved training samples.")
    trackers: list[str] = Field(default_factory=list, description="Trackers of accelerate: tensorboard, wandb, …")
    fixed_order: bool = Field(
        False,
        description="On a GPU, sum in a fixed order where PyTorch has such a kernel, so that a resumed run equals an "
        "unbroken one. This is slower, above all for attention in float32. On a CPU it changes nothing.",
    )

    def saves_samples(self, iteration: int) -> bool:
        """Whether the training samples of an iteration are saved."""
        return iteration % self.sample_every == 0
