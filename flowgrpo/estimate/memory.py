"""Estimates of the memory of a run, part by part; docs/estimates.md explains the method."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..configs.schema import AnyRecipe, Recipe
from ..parts.traits import keeps_base, noises_again
from ..training.distributed.context_groups import context_of
from ..training.images.images_beside import learned
from ..training.planning import Forecast, kept_predictions, renoised_states
from ..training.updating import one_average
from ..weights.adapter_files import StartAdapter
from .models import Model, teacher_source

BUCKET = 500_000_000
"""How many numbers DeepSpeed's tensor for adding gradients over processes has, even if there are fewer gradients."""

SHARDING = {"fsdp2": "weights in shards by FSDP2", "zero2": "the optimizer in parts by ZeRO-2"}
"""What may be distributed over several processes, by its name in `flowgrpo plan`."""


@dataclass(frozen=True)
class Shares:
    """Over how many processes something is distributed; 1 if each process has all of it.

    Attributes:
        name: a key of `SHARDING`; None if nothing is distributed.
        processes: number of processes of the run.
        weights: for full weights, their averages and their reference.
        optimizer: for gradients and moments.
        base: for the frozen weights of a LoRA.
    """

    name: str | None
    processes: int
    weights: int = 1
    optimizer: int = 1
    base: int = 1

    @classmethod
    def of(cls, recipe: AnyRecipe, processes: int, name: str | None) -> Shares:
        """The shares that the launcher would give: a single process has everything, and FSDP2 cuts no adapter.

        Raises:
            ValueError: the name is unknown.
        """
        if name is not None and name not in SHARDING:
            raise ValueError(f"sharding is {name!r}; use one of {', '.join(SHARDING)}, or leave it out")
        if name is None or processes == 1:
            return cls(None, processes)
        if name == "fsdp2" and recipe.model.train == "lora":
            return cls(name, processes, base=processes)
        return cls(name, processes, processes if name == "fsdp2" else 1, processes)


def _share(numbers: int, processes: int) -> int:
    """Bytes of this process's part of float32 numbers that are distributed over processes."""
    return 4 * math.ceil(numbers / processes)


def moments_of(recipe: AnyRecipe, numbers: int) -> int:
    """Bytes of AdamW's two averages of so many trained numbers, all in tensors of 4,096 or more."""
    return 2 * (4 * numbers if recipe.optimizer.type == "adamw" else numbers + 4 * math.ceil(numbers / 256))


def averages_of(recipe: AnyRecipe) -> int:
    """How many averages of the trained weights a run keeps."""
    saved, old = recipe.optimizer.ema, recipe.objective.get("old")
    compared = [recipe.objective.get(name) for name in ("compared", "ema")]
    reference = recipe.reference if isinstance(recipe, Recipe) else None
    asked = (saved, reference, *compared, None if one_average(saved, old) else old)
    return sum(average is not None for average in asked)


def at_rest(
    recipe: AnyRecipe, name: str, size: int, trained: int, rounded: int, reference: bool, shares: Shares
) -> dict[str, int]:
    """Bytes of a trained model, and of what belongs to its trained weights, by name.

    Args:
        recipe: says what is trained, and how.
        name: of the model.
        size: bytes of the model as it was loaded.
        trained: number of trained parameters.
        rounded: number of trained parameters that the model has in half precision.
        reference: whether the weights of the start are needed.
        shares: how trained weights and their optimizer are distributed.
    """
    lora = recipe.model.train == "lora"
    weights, part = _share(trained, shares.weights), _share(trained, shares.optimizer)
    gradients = part
    if shares.optimizer == 1 and shares.processes > 1:
        # A second tensor of the same size adds the gradients over processes.
        gradients *= 2
    # DeepSpeed makes its step on a copy of the process's part of the weights.
    copies = 1 if shares.name == "zero2" else 0
    sharded = shares.weights > 1
    own = 4 * trained - 2 * rounded
    return {
        name: size - own + weights if sharded else math.ceil(size / shares.base),
        "masters": 0 if sharded or lora else 4 * rounded,
        # An adapter that computes in 16 bits has its float32 masters and their rounded copies.
        "LoRA": weights + 2 * rounded if lora else 0,
        "gradients": gradients,
        "optimizer": moments_of(recipe, math.ceil(trained / shares.optimizer)) + copies * part,
        "averages": averages_of(recipe) * weights,
        "reference": 0 if lora or not reference else weights if sharded else own,
    }


def resting(recipe: Recipe, model: Model, expected: Forecast, share: int, shares: Shares) -> dict[str, int]:
    """Bytes that stay in use from one iteration to the next, and the bytes of a rollout's states, by name.

    Args:
        recipe: of images or videos.
        model: the recipe's pipeline.
        expected: counts of an iteration.
        share: number of prompts of a process.
        shares: how trained weights and their optimizer are distributed.
    """
    largest = max(expected.counts, key=lambda counts: counts.trained_states)
    # Each state is stored once, and each trained state has its prediction.
    predictions = largest.trained_states + largest.leaves * kept_predictions(recipe)
    states = largest.stored_states * model.state_bytes + math.ceil(predictions * model.prediction_bytes)
    scouts, at_a_time = recipe.rollout.scouts, min(recipe.rollout.chunk or share, share)
    # The states of scouts are gone before the states of the rollout come.
    before = 0 if scouts is None else at_a_time * scouts.group * model.state_bytes
    own = at_rest(recipe, "denoiser", model.denoiser, model.trained, model.rounded, keeps_base(recipe), shares)
    return {
        "denoiser": own.pop("denoiser"),
        "masters": own.pop("masters"),
        "VAE": model.vae,
        "text encoders": 0 if recipe.model.release_text_encoders else model.encoders,
        "image encoder": model.image_encoders,
        "other networks": model.others,
        **own,
        "teachers": teachers_of(recipe, model),
        "rollout states": model.elements * max(share * states, before),
    }


def teachers_of(recipe: Recipe, model: Model) -> int:
    """Bytes of the weights of teachers. A LoRA that is not on this machine counts as one of the trained size."""
    config = recipe.model
    each = 2 if config.dtype == "bfloat16" and config.lora.compute == "base" else 4
    numbers = 0
    for teacher in config.teachers:
        source = teacher_source(teacher, config)
        if isinstance(source, StartAdapter):
            numbers += source.numbers
        elif teacher.lora is not None:
            numbers += model.trained
    return each * numbers + model.teachers


OF_UPDATE = "training", "decoding with gradients"
"""The phases of an iteration in which trained weights have gradients."""


def at_once(resting: Mapping[str, int], passing: Mapping[str, int]) -> dict[str, int]:
    """Bytes in use at once in each phase of `passing`. Only an update has gradients, and its steps free them."""
    rest = sum(resting.values())
    return {name: rest + size - (0 if name in OF_UPDATE else resting["gradients"]) for name, size in passing.items()}


def waiting(recipe: Recipe) -> list[str]:
    """Names of the parts of `resting` that are in host memory."""
    offload, store = recipe.model.offload, recipe.rollout.store
    asked = {"VAE": "vae" in offload, "text encoders": "text_encoders" in offload, "rollout states": store == "host"}
    return [name for name, waits in asked.items() if waits]


def passing(recipe: Recipe, model: Model, shares: Shares, shown: Model) -> dict[str, int]:
    """Bytes that sampling, decoding and training need in addition to `resting`, by name.

    Args:
        recipe: of the run.
        model: sizes and costs of its pipeline.
        shares: what the GPUs share.
        shown: sizes and costs of the pipeline as evaluations call it.
    """
    rollout, cost = recipe.rollout, model.evaluation
    # A mask is among what is kept for the gradient, and counts once.
    working = cost.working - cost.mask
    if recipe.model.gradient_checkpointing:
        kept, busy, held = cost.kept, model.rows * (cost.block + working), cost.kept + cost.block
    else:
        kept, busy, held = cost.saved, model.rows * working, cost.saved
    context = context_of(recipe)
    kept, busy, held = (math.ceil(size / context) for size in (kept, busy, held))
    # A teacher evaluates the states while what the gradient needs is kept.
    gradient = model.branches * kept + max(busy, model.teacher_working)
    away = waiting(recipe)
    encoding = {"encoding": model.encoders} if "text encoders" in away else {}
    # The image beside each prompt of a batch is one state more, whose activations are kept beside the batch's.
    beside = 0 if learned(recipe) is None else math.ceil(rollout.batch / rollout.group)
    gathered, whole = _gathered(model, shares, recipe.model.dtype)

    def sampling(one: Model) -> int:
        # A compiled denoiser also samples with its graph for training, and frees the graph's memory after each call.
        graph = held if recipe.model.compile else 0
        return rollout.batch * one.rows * (math.ceil(one.evaluation.working / context) + graph)

    return {
        "sampling": max(sampling(one) for one in (model, shown)) + gathered,
        "decoding": (1 if model.decoded_alone else rollout.decode_batch) * max(model.decode_bytes, shown.decode_bytes)
        + (model.vae if "VAE" in away else 0),
        **_differentiating(recipe, model, rollout.batch * gradient + beside * model.branches * held + gathered),
        "training": rollout.batch * gradient + beside * model.branches * held + gathered + whole,
        **encoding,
    }


def _differentiating(recipe: Recipe, model: Model, held: int) -> dict[str, int]:
    """Bytes of the graph of a decoder whose images rewards are differentiated at, apart from the graphs of rewards.

    At the prediction of a state, at a recovered image or at one that was noised again, the graph of the denoiser is
    `held` meanwhile.
    """
    if not model.decode_graph:
        return {}
    count = 1 if model.decoded_alone else recipe.rollout.decode_batch
    graph = count * (model.decode_graph + model.decode_bytes)
    meanwhile = recipe.objective.get("at") == "prediction" or noises_again(recipe) or renoised_states(recipe) > 1
    return {"decoding with gradients": graph + (held if meanwhile else 0)}


def _gathered(model: Model, shares: Shares, dtype: str) -> tuple[int, int]:
    """Bytes of weights that are whole during an evaluation, and of gradients that are whole in a backward pass."""
    if shares.name == "fsdp2":
        # While one block is in use, the next block is gathered. In a backward pass, while the gradient of one block is
        # computed, the gradient of the block before is added over processes, in float32.
        numbers = model.outside + 2 * model.block
        if shares.base > 1:
            return (4 if dtype == "float32" else 2) * numbers, 0
        return (2 if model.rounded else 4) * numbers, 4 * numbers
    if shares.name == "zero2":
        return 0, 4 * (model.trained + BUCKET)
    return 0, 0
