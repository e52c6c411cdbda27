"""What a run should have in memory by an estimate, part by part; the method is in docs/estimates.md."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..configs.schema import Recipe
from ..parts.traits import keeps_base
from ..training.planning import Forecast
from .models import Model

BUCKET = 500_000_000
"""Numbers of the tensor in which DeepSpeed adds gradients over processes, however few there are."""

SHARDING = {"fsdp2": "full weights in shards by FSDP2", "zero2": "the optimizer in parts by ZeRO-2"}
"""What several processes may share out, by the name that `flowgrpo plan` has for it."""


@dataclass(frozen=True)
class Shares:
    """Among how many processes something is shared out; 1 where each has it whole.

    Attributes:
        name: a key of `SHARDING`; None where nothing is shared out.
        processes: of the run.
        weights: trained weights, their averages and their reference.
        optimizer: gradients and moments.
    """

    name: str | None
    processes: int
    weights: int = 1
    optimizer: int = 1

    @classmethod
    def of(cls, recipe: Recipe, processes: int, name: str | None) -> Shares:
        """As the launcher would share it out: one process has everything, and FSDP2 leaves a LoRA whole.

        Raises:
            ValueError: an unknown name.
        """
        if name is not None and name not in SHARDING:
            raise ValueError(f"sharding is {name!r}; use one of {', '.join(SHARDING)}, or leave it out")
        if name is None or processes == 1 or (name == "fsdp2" and recipe.model.train == "lora"):
            return cls(None, processes)
        return cls(name, processes, processes if name == "fsdp2" else 1, processes)


def _share(numbers: int, processes: int) -> int:
    """Bytes of so many float32 numbers, or of this process's part of them."""
    return 4 * math.ceil(numbers / processes)


def resting(recipe: Recipe, model: Model, expected: Forecast, share: int, shares: Shares) -> dict[str, int]:
    """Bytes that stay from one iteration to the next, and those of the states of a rollout.

    Args:
        recipe: of images or videos.
        model: its pipeline.
        expected: counts of an iteration.
        share: prompts of a process.
        shares: how trained weights and their optimizer are shared out.
    """
    settings, objective, lora = recipe.optimizer, recipe.objective, recipe.model.train == "lora"
    averages = sum(average is not None for average in (settings.ema, recipe.reference, objective.get("old")))
    weights, part = _share(model.trained, shares.weights), _share(model.trained, shares.optimizer)
    gradients = part
    if shares.name is None and shares.processes > 1:
        # They are added in one more tensor of the same size.
        gradients *= 2
    # DeepSpeed steps on a copy of the part of the weights that a process moves.
    copies = 1 if shares.name == "zero2" else 0
    sharded = shares.weights > 1
    own = 4 * model.trained - 2 * model.rounded
    largest = max(expected.counts, key=lambda counts: counts.trained_states)
    # Of a trained state x and the prediction there, in float32; of an edge and a leaf where it ends.
    states = largest.trained_states * (model.state_bytes + 4) + largest.trained_edges * model.state_bytes
    return {
        "denoiser": model.denoiser - own + weights if sharded else model.denoiser,
        "masters": 0 if sharded else 4 * model.rounded,
        "VAE": model.vae,
        "text encoders": 0 if recipe.model.release_text_encoders else model.encoders,
        "LoRA": weights if lora else 0,
        "gradients": gradients,
        "optimizer": (2 + copies) * part,
        "averages": averages * weights,
        "reference": 0 if lora or not keeps_base(recipe) else weights if sharded else own,
        "rollout states": share * model.elements * (states + largest.leaves * model.state_bytes),
    }


def waiting(recipe: Recipe) -> list[str]:
    """What of `resting` is in host memory, by name."""
    offload, store = recipe.model.offload, recipe.rollout.store
    asked = {"VAE": "vae" in offload, "text encoders": "text_encoders" in offload, "rollout states": store == "host"}
    return [name for name, waits in asked.items() if waits]


def passing(recipe: Recipe, model: Model, shares: Shares) -> dict[str, int]:
    """Bytes that an evaluation, a decoding and a gradient need beside `resting`."""
    rollout, cost = recipe.rollout, model.evaluation
    if recipe.model.gradient_checkpointing:
        gradient, held = model.branches * cost.kept + model.rows * (cost.block + cost.working), cost.kept + cost.block
    else:
        gradient, held = model.branches * cost.saved + model.rows * cost.working, cost.saved
    # A compiled denoiser samples by its graph for training, which is let go after each call.
    graph = held if recipe.model.compile else 0
    away = waiting(recipe)
    encoding = {"encoding": model.encoders} if "text encoders" in away else {}
    gathered, whole = _gathered(model, shares)
    return {
        "sampling": rollout.batch * model.rows * (cost.working + graph) + gathered,
        "decoding": rollout.decode_batch * model.decode_bytes + (model.vae if "VAE" in away else 0),
        "training": rollout.batch * gradient + gathered + whole,
        **encoding,
    }


def _gathered(model: Model, shares: Shares) -> tuple[int, int]:
    """Bytes of weights that are whole during an evaluation, and of gradients that are during a backward pass."""
    if shares.name == "fsdp2":
        # The block in use and the next, which is gathered meanwhile. In a backward pass, the gradient of one block is
        # made while the gradient of the block before is added over processes, in float32.
        numbers = model.outside + 2 * model.block
        return (2 if model.rounded else 4) * numbers, 4 * numbers
    if shares.name == "zero2":
        return 0, 4 * (model.trained + BUCKET)
    return 0, 0
