"""Settings with which a run fits on its GPUs, and takes the same optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..configs.layers import merge
from ..configs.schema import Recipe
from .estimates import GIB, Estimate, duration

ROOM = 0.9
"""The largest share of a GPU's memory that is suggested; estimates of real runs were up to 12 % too low or too high."""
RECOMPUTED: Mapping[str, Any] = {"model.gradient_checkpointing": True}
AWAY: Sequence[Mapping[str, Any]] = (
    {"model.release_text_encoders": True},
    {"rollout.store": "host"},
    {"model.offload": ["vae"]},
)
"""What takes memory off the card, the least trouble first."""
EIGHT_BITS: Mapping[str, Any] = {"model.quantize": "int8"}


def crowded_lines(recipe: Recipe, found: Estimate, estimated: Callable[[Recipe], Estimate]) -> list[str]:
    """What to change if the GPU has too little memory; nothing if it has enough.

    Args:
        recipe: of images or videos.
        found: its estimate.
        estimated: gives the estimate of a changed recipe on the same GPUs.
    """
    if not found.crowded:
        return []
    much = "  note: this is more memory than the GPU has"
    if ways := ways_to_fit(recipe, estimated):
        return [f"{much}; it fits, and takes the same optimizer steps, with", *_listed(ways)]
    if found.full:
        rest = sum(found.resting.values()) / GIB
        shards = "" if found.sharding else "share them out among GPUs with --gpus N --sharding fsdp2, or "
        return [
            f"{much}, and smaller batches do not help: the weights and their copies take {rest:.0f} GiB; {shards}write "
            "model.train: lora and a learning rate for a LoRA"
        ]
    if recipe.model.quantize is None and recipe.model.dtype == "bfloat16":
        rounded = _changed(recipe, EIGHT_BITS)
        if ways := ways_to_fit(rounded, estimated):
            first = tuple(map(_word, EIGHT_BITS.items()))
            ways = [Way((*first, *way.words), way.found) for way in ways]
            return [f"{much}; it fits with a base in 8 bits, which rounds its predictions, with", *_listed(ways)]
    return [f"{much}, and smaller batches do not help; use a larger GPU, a smaller model or smaller images"]


def _listed(ways: Sequence[Way]) -> list[str]:
    return [f"    {'' if way is ways[0] else 'or '}{way.line}" for way in ways]


@dataclass(frozen=True)
class Way:
    """Settings with which a run fits.

    Attributes:
        words: overrides of the recipe, as a command takes them.
        found: the estimate with them.
    """

    words: tuple[str, ...]
    found: Estimate

    @property
    def line(self) -> str:
        """The overrides, and what the run needs with them."""
        needed, seconds = self.found.peak / GIB, self.found.iteration_seconds
        return f"{' '.join(self.words)}: {needed:.1f} GiB, {duration(seconds)} an iteration"


def ways_to_fit(recipe: Recipe, estimated: Callable[[Recipe], Estimate]) -> list[Way]:
    """At most two ways to make a run fit: one without more gradient checkpointing than the recipe has, and one with it.

    The changed settings leave an optimizer step as it is. A batch is the recipe's own or a power of two below it. Only
    if smaller batches do not help, text encoders, states and autoencoder leave the card.

    Args:
        recipe: of a run that does not fit.
        estimated: gives the estimate of a changed recipe.
    """
    moved: dict[str, Any] = {}
    for more in ({}, *AWAY):
        moved |= _new(recipe, more)
        changes = [moved] if recipe.model.gradient_checkpointing else [moved, {**moved, **RECOMPUTED}]
        if found := [way for each in changes if (way := _largest(recipe, each, estimated)) is not None]:
            return found
    return []


def _new(recipe: Recipe, more: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that change something, and that do not contradict the recipe."""
    if recipe.model.offload and ("model.offload" in more or "model.release_text_encoders" in more):
        return {}
    own = {"model.release_text_encoders": recipe.model.release_text_encoders, "rollout.store": recipe.rollout.store}
    return {key: value for key, value in more.items() if own.get(key) != value}


def _largest(recipe: Recipe, changes: Mapping[str, Any], estimated: Callable[[Recipe], Estimate]) -> Way | None:
    """The largest batches that fit with these changes; None if none fits."""

    def way(batch: int, decoded: int) -> Way | None:
        batches = {"rollout.batch": batch, "rollout.decode_batch": decoded}
        own = {"rollout.batch": recipe.rollout.batch, "rollout.decode_batch": recipe.rollout.decode_batch}
        new = {**changes, **{key: size for key, size in batches.items() if size != own[key]}}
        try:
            found = estimated(_changed(recipe, new))
        except ValueError:
            # Some losses need whole groups in a call.
            return None
        return Way(tuple(map(_word, new.items())), found) if found.peak <= ROOM * found.gpu.gib * GIB else None

    batch = next((size for size in _sizes(recipe.rollout.batch) if way(size, 1) is not None), None)
    if batch is None:
        return None
    ways = (way(batch, size) for size in _sizes(recipe.rollout.decode_batch))
    return next(found for found in ways if found is not None)


def _sizes(own: int) -> list[int]:
    """A batch and the powers of two below it, the largest first."""
    return [own, *(2**power for power in reversed(range((own - 1).bit_length())))]


def _changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return Recipe.model_validate(merge(recipe.model_dump(), sections))


def _word(change: tuple[str, Any]) -> str:
    key, value = change
    shown = str(value).lower() if isinstance(value, bool) else f"[{', '.join(value)}]" if value == ["vae"] else value
    return f"{key}={shown}"
