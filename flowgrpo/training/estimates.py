"""Memory and time that a recipe should need, from shapes alone; the method is in docs/estimates.md."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ..configs.layers import prompts_of_file
from ..configs.schema import LoraConfig, ModelConfig, Recipe
from ..configs.soundness import FORWARD_FORMS
from ..pipelines.architectures import FAMILIES, architecture_of, built, latent_shape
from ..pipelines.footprint import Footprint, decoding, footprint
from ..pipelines.weights import TrainedWeights
from .data import read_prompts
from .objectives import compares_with_base
from .planning import Forecast, forecast, search_passes
from .processes import Processes
from .session import DTYPES, call_arguments, kept_prompts, lora_spec, model_folder

GIB = 2**30
UTILISATION = 0.35
ROWS = 2
"""Of the evaluation that is counted."""
UNKNOWN_PROMPTS = 10_000


@dataclass(frozen=True)
class Gpu:
    """A card: what it is called, its dense bfloat16 peak in 10¹² FLOP/s by its maker, and its memory in GiB."""

    label: str
    tflops: float
    gib: float


GPUS = {
    "h100": Gpu("H100 SXM", 989.4, 80.0),
    "h200": Gpu("H200 SXM", 989.4, 141.0),
    "a100": Gpu("A100 80 GB", 312.0, 80.0),
    "l40s": Gpu("L40S", 362.05, 48.0),
    "4090": Gpu("RTX 4090", 165.2, 24.0),
}


@dataclass(frozen=True)
class Model:
    """A recipe's pipeline in numbers.

    Attributes:
        denoiser, vae, encoders: bytes of their weights and buffers.
        trained: numbers that are trained.
        elements: numbers in a latent.
        state_bytes: bytes of one number of a state.
        prompt_bytes: bytes of what a text encoder makes of a prompt.
        branches: evaluations of the denoiser for one state.
        rows: of them, those in one call.
        evaluation: cost of one of them.
        decode_flops, decode_bytes: of one latent.
    """

    denoiser: int
    vae: int
    encoders: int
    trained: int
    elements: int
    state_bytes: int
    prompt_bytes: int
    branches: int
    rows: int
    evaluation: Footprint
    decode_flops: float
    decode_bytes: int


@dataclass(frozen=True)
class Estimate:
    """What a run should need, on each of several equal GPUs.

    Attributes:
        gpu, gpus, utilisation: what was assumed.
        resting: what stays in memory during an iteration, in bytes.
        passing: what comes and goes, one of them at a time, in bytes.
        start: bytes while the prompts are encoded, before the first iteration.
        waiting: what is in host memory for this GPU, in bytes.
        flops: of an iteration, by part, on the GPU with the most to do.
        evaluation: FLOPs of an evaluation on the held-out prompts.
        iterations, evaluations: how many there are of each.
        prompts_known: whether the number of prompts is that of the file or of the published one.
    """

    gpu: Gpu
    gpus: int
    utilisation: float
    resting: dict[str, int]
    passing: dict[str, int]
    start: int
    waiting: dict[str, int]
    flops: dict[str, float]
    evaluation: float
    iterations: int
    evaluations: int
    prompts_known: bool

    @property
    def peak(self) -> int:
        """Most bytes at once."""
        return max(self.start, sum(self.resting.values()) + max(self.passing.values()))

    def seconds(self, flops: float) -> float:
        """Time for so many FLOPs."""
        return flops / (self.gpu.tflops * 1e12 * self.utilisation)

    @property
    def iteration_seconds(self) -> float:
        """Time of an iteration, without rewards and without an evaluation."""
        return self.seconds(sum(self.flops.values()))

    @property
    def run_seconds(self) -> float:
        """Time of the whole run, evaluations with it."""
        return self.iterations * self.iteration_seconds + self.evaluations * self.seconds(self.evaluation)


def estimate(
    recipe: Recipe, gpu: str = "h100", gpus: int = 1, utilisation: float = UTILISATION, prompts: int | None = None
) -> Estimate:
    """Memory and time of a recipe, without its weights.

    Args:
        recipe: of images or videos.
        gpu: a key of `GPUS`.
        gpus: how many share the prompts.
        utilisation: share of the card's peak that is reached, in (0, 1].
        prompts: training prompts to count at most, where the file is not there.

    Raises:
        ValueError: an unknown card, a share out of range, or a pipeline whose shapes are not known.
    """
    if gpu not in GPUS:
        raise ValueError(f"no figures for the GPU {gpu!r}; use one of {', '.join(GPUS)}")
    if not 0 < utilisation <= 1 or gpus < 1:
        raise ValueError(f"utilisation is {utilisation} and gpus {gpus}; use a share in (0, 1] and at least 1 GPU")
    if gpus > recipe.rollout.prompts:
        raise ValueError(
            f"rollout.prompts is {recipe.rollout.prompts} on {gpus} GPUs, and all samples of a prompt are made by one; "
            "use fewer GPUs, or more prompts"
        )
    model, expected = model_of(recipe.model), forecast(recipe)
    share = math.ceil(recipe.rollout.prompts / gpus)
    train, known = _prompt_count(recipe.data.train, prompts)
    heldout, heldout_known = _prompt_count(recipe.data.heldout) if recipe.data.heldout else (0, True)
    heldout = min(heldout, recipe.evaluate.prompts or heldout)
    cached = _cached_prompts(recipe, train, heldout, gpus) * model.prompt_bytes
    resting = _resting(recipe, model, expected, share, gpus) | {"prompt embeddings": cached}
    waiting = {name: resting.pop(name) for name in _waiting(recipe)}
    trained = 4 * model.trained if recipe.model.train == "lora" else 0
    evaluated = math.ceil(heldout / gpus) * recipe.evaluate.seeds
    steps = recipe.evaluate.steps or recipe.sampler.steps
    return Estimate(
        gpu=GPUS[gpu],
        gpus=gpus,
        utilisation=utilisation,
        resting=resting,
        passing=_passing(recipe, model),
        start=model.denoiser + resting.get("VAE", 0) + model.encoders + trained + cached,
        waiting=waiting,
        flops=_flops(recipe, model, expected, share, _turns(recipe, gpus)),
        evaluation=evaluated * (steps * model.branches * model.evaluation.forward + model.decode_flops),
        iterations=recipe.run.iterations,
        evaluations=math.ceil(recipe.run.iterations / recipe.evaluate.every) + 1 if heldout else 0,
        prompts_known=known and heldout_known,
    )


def model_of(config: ModelConfig) -> Model:
    """The numbers of a recipe's pipeline, from its configurations.

    Raises:
        ValueError: as `architecture_of`.
    """
    path = model_folder(config.path)
    architecture, call = architecture_of(path), call_arguments(path, config.call)
    family = FAMILIES[architecture.denoiser[0]]
    dtype = DTYPES[config.dtype]
    latent = latent_shape(architecture, call)
    branches = family.branches(call)
    adapter = config.lora.model_dump_json() if config.train == "lora" else None
    denoiser = _denoiser(path, config.dtype, adapter, latent, family.tokens(call), config.quantize is not None)
    vae, decode_flops, decode_bytes = _decoder(path, config.dtype, latent)
    return Model(
        denoiser=architecture.experts * denoiser.bytes,
        vae=vae,
        encoders=sum(architecture.encoders.values()) * dtype.itemsize,
        trained=architecture.experts * denoiser.trained,
        elements=math.prod(latent),
        state_bytes=4 if family.float32 else dtype.itemsize,
        prompt_bytes=(1 if family.negative else branches) * denoiser.prompt * dtype.itemsize,
        branches=branches,
        rows=branches if family.together else 1,
        evaluation=denoiser.evaluation,
        decode_flops=decode_flops,
        decode_bytes=decode_bytes,
    )


@dataclass(frozen=True)
class _Denoiser:
    """Bytes of its weights, numbers trained, numbers in a prompt's embeddings, and what an evaluation costs."""

    bytes: int
    trained: int
    prompt: int
    evaluation: Footprint


@cache
def _denoiser(
    path: str, dtype_name: str, adapter: str | None, latent: tuple[int, ...], tokens: int, quantized: bool
) -> _Denoiser:
    """The denoiser of a pipeline on `meta`, with a LoRA as JSON or, without one, all of its weights trained."""
    name, config = architecture_of(path).denoiser
    dtype = DTYPES[dtype_name] if adapter else torch.float32
    module = built(name, config, dtype)
    size, modules = _bytes(module) - (_saved_by_quantizing(module) if quantized else 0), {"transformer": module}
    pipe: Any = SimpleNamespace(components=modules)
    if adapter:
        spec = lora_spec(LoraConfig.model_validate_json(adapter))
        weights = TrainedWeights.lora(pipe, spec, seed=0, modules=modules)
    else:
        weights = TrainedWeights.full(pipe, modules=modules)
    settings: Any = module.config
    with torch.device("meta"):
        inputs = FAMILIES[name].inputs(settings, latent, tokens, ROWS)
        cast = {key: value.to(dtype) if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
        evaluation = footprint(module, cast, ROWS)
    texts = [inputs[key] for key in ("encoder_hidden_states", "pooled_projections") if key in inputs]
    trained = sum(parameter.numel() for parameter in weights.parameters())
    return _Denoiser(size, trained, sum(text[0].numel() for text in texts), evaluation)


def _saved_by_quantizing(module: nn.Module) -> int:
    """Bytes that linear weights in 8 bits with a float32 scale a row take less than the weights as they are."""
    linear = [part.weight for part in module.modules() if isinstance(part, nn.Linear)]
    return sum(w.numel() * (w.element_size() - 1) - 4 * len(w) for w in linear)


@cache
def _decoder(path: str, dtype_name: str, latent: tuple[int, ...]) -> tuple[int, float, int]:
    """Bytes of a VAE's weights, and FLOPs and most bytes alive of decoding one latent."""
    vae = built(*architecture_of(path).vae, DTYPES[dtype_name])
    return _bytes(vae), *decoding(vae, torch.empty(1, *latent, dtype=DTYPES[dtype_name], device="meta"))


def _bytes(module: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))


def _resting(recipe: Recipe, model: Model, expected: Forecast, share: int, gpus: int) -> dict[str, int]:
    """What stays in memory from one iteration to the next, and the states of a rollout."""
    settings, objective, lora = recipe.optimizer, recipe.objective, recipe.model.train == "lora"
    averages = sum(average is not None for average in (settings.ema, objective.anchor, objective.old))
    reference = 0 if lora or not compares_with_base(recipe) else 4 * model.trained
    largest = max(expected.counts, key=lambda counts: counts.trained_states)
    # Of a trained state x and the prediction there, in float32; of an edge and a leaf where it ends.
    states = largest.trained_states * (model.state_bytes + 4) + largest.trained_edges * model.state_bytes
    return {
        "denoiser": model.denoiser,
        "VAE": model.vae,
        "text encoders": 0 if recipe.model.release_text_encoders else model.encoders,
        "LoRA": 4 * model.trained if lora else 0,
        # Several processes add their gradients in one more tensor of the same size.
        "gradients": 4 * model.trained * (1 if gpus == 1 else 2),
        "optimizer": 8 * model.trained,
        "averages": 4 * model.trained * averages,
        "reference": reference,
        "rollout states": share * model.elements * (states + largest.leaves * model.state_bytes),
    }


def _waiting(recipe: Recipe) -> list[str]:
    """What of it is in host memory."""
    offload, store = recipe.model.offload, recipe.rollout.store
    asked = {"VAE": "vae" in offload, "text encoders": "text_encoders" in offload, "rollout states": store == "host"}
    return [name for name, waits in asked.items() if waits]


def _passing(recipe: Recipe, model: Model) -> dict[str, int]:
    """What an evaluation, a decoding and a gradient need beside that."""
    rollout, cost = recipe.rollout, model.evaluation
    if recipe.model.gradient_checkpointing:
        gradient, held = model.branches * cost.kept + model.rows * (cost.block + cost.working), cost.kept + cost.block
    else:
        gradient, held = model.branches * cost.saved + model.rows * cost.working, cost.saved
    # A compiled denoiser samples by its graph for training, which is let go after each call.
    graph = held if recipe.model.compile else 0
    waiting = _waiting(recipe)
    encoding = {"encoding": model.encoders} if "text encoders" in waiting else {}
    return {
        "sampling": rollout.batch * model.rows * (cost.working + graph),
        "decoding": rollout.decode_batch * model.decode_bytes + (model.vae if "VAE" in waiting else 0),
        "training": rollout.batch * gradient,
        **encoding,
    }


def _turns(recipe: Recipe, gpus: int) -> int:
    """Prompts trained one after the other in an iteration: in each optimizer step all wait for the busiest GPU."""
    total, updates = recipe.rollout.prompts, recipe.optimizer.updates
    bounds = []
    for rank in range(gpus):
        processes = Processes(rank, gpus)
        bounds.append((0, *processes.cuts(total, updates), len(processes.share(total))))
    return sum(max(own[k + 1] - own[k] for own in bounds) for k in range(updates))


def _flops(recipe: Recipe, model: Model, expected: Forecast, share: int, turns: int) -> dict[str, float]:
    """Of an iteration on the busiest GPU, by part; where plans differ over the run, on average."""
    cost, iterations = model.evaluation, sum(expected.windows)

    def average(name: str) -> float:
        return sum(getattr(c, name) * uses for c, uses in zip(expected.counts, expected.windows)) / iterations

    objective, leaves, trained = recipe.objective, average("leaves"), average("trained_states")
    others = int(objective.kl > 0 or objective.w2 > 0)
    if objective.form in FORWARD_FORMS:
        trained = leaves * (objective.times or recipe.sampler.steps - 1)
        others = int(objective.kl > 0 or objective.form in ("dgpo", "flow_dpo")) + int(objective.old is not None)
    gradient = cost.forward + cost.backward + (cost.recompute if recipe.model.gradient_checkpointing else 0.0)
    passes = recipe.optimizer.epochs * (gradient + others * cost.forward) + search_passes(recipe) * cost.forward
    return {
        "sampling": share * model.branches * average("evaluations") * cost.forward,
        "decoding": share * leaves * model.decode_flops,
        "training": turns * model.branches * trained * passes,
    }


def _cached_prompts(recipe: Recipe, train: int, heldout: int, gpus: int) -> int:
    """Most prompts whose embeddings one GPU holds."""
    templates, share = max(len(recipe.data.templates), 1), math.ceil(heldout / gpus)
    most = kept_prompts(recipe, heldout)
    if recipe.model.release_text_encoders:
        return train * templates + heldout
    drawn = math.ceil(recipe.rollout.prompts / gpus) * recipe.run.iterations
    met = min(train, drawn) * templates + share
    return met if most is None else min(met, most)


@cache
def _prompt_count(source: str, most: int | None = None) -> tuple[int, bool]:
    """Prompts of a file, or of the published one of that name; and whether that is known."""
    try:
        return len(read_prompts(source)), True
    except ValueError:
        known = prompts_of_file(source)
        count = UNKNOWN_PROMPTS if known is None else known
        return (count if most is None else min(count, most)), known is not None


def table(found: Estimate) -> list[str]:
    """The lines of an estimate, aligned."""
    gib: Mapping[str, float] = {name: size / GIB for name, size in found.resting.items() if size >= 0.005 * GIB} | {
        f"{name} (one at a time)": size / GIB for name, size in found.passing.items()
    }
    width = max(len(name) for name in [*gib, "most at once", *(f"{name} (in host memory)" for name in found.waiting)])
    lines = [
        f"estimate for {found.gpus} × {found.gpu.label}, from shapes alone; rewards are not counted "
        "(docs/estimates.md)",
        "  memory of each GPU, in GiB:",
        *(f"    {name:<{width}}  {size:8.2f}" for name, size in gib.items()),
        f"    {'while encoding':<{width}}  {found.start / GIB:8.2f}",
        f"    {'most at once':<{width}}  {found.peak / GIB:8.2f}  of {found.gpu.gib:g}",
        *(f"    {f'{name} (in host memory)':<{width}}  {size / GIB:8.2f}" for name, size in found.waiting.items()),
        f"  time, at an assumed {found.utilisation:.0%} of {found.gpu.tflops:g} TFLOP/s:",
        *(f"    {name:<{width}}  {duration(found.seconds(flops)):>8}" for name, flops in found.flops.items()),
        f"    {'iteration':<{width}}  {duration(found.iteration_seconds):>8}",
        f"    {'evaluation':<{width}}  {duration(found.seconds(found.evaluation)):>8}",
        f"    {'run':<{width}}  {duration(found.run_seconds):>8}  {found.iterations} iterations, "
        f"{found.evaluations} evaluations",
    ]
    if found.peak > found.gpu.gib * GIB:
        lines.append("  note: that is more than the card has; a smaller rollout.batch or more GPUs help")
    if not found.prompts_known:
        lines.append(f"  note: a prompt file that is not there was counted as {UNKNOWN_PROMPTS:,} prompts")
    return lines


def duration(seconds: float) -> str:
    """A time in two or three figures: 0.42 s, 95 s, 12 min, 31 h, 12 d."""
    for limit, unit, size in ((1.0, "s", 1), (120.0, "s", 1), (7200.0, "min", 60), (172_800.0, "h", 3600)):
        if seconds < limit:
            number = seconds / size
            return f"{number:.2f} {unit}" if number < 1 else f"{number:.3g} {unit}"
    return f"{seconds / 86_400:.3g} d"
