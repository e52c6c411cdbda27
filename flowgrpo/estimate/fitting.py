"""Settings with which a run fits on its GPUs: smaller batches first, and what changes an optimizer step last."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..configs.load import with_keys
from ..configs.schema import Recipe
from ..parts.choice import value_at
from ..training.folder.changing import may_change
from ..training.model_paths import sample_noun
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
ROUNDED: Mapping[str, Mapping[str, Any]] = {
    "in bfloat16": {"model.dtype": "bfloat16"},
    "with a base in 8 bits": {"model.dtype": "bfloat16", "model.quantize": "int8"},
    "with a base in 4 bits": {"model.dtype": "bfloat16", "model.quantize": "nf4"},
}
"""What makes a frozen base smaller, and rounds its predictions, the least rounding first."""
EIGHT_BIT_AVERAGES: Mapping[str, Any] = {"optimizer.type": "adamw_8bit"}


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
        same = may_change("rollout.batch", recipe) or not any("rollout.batch=" in way.line for way in ways)
        how = (
            "and takes the same optimizer steps"
            if same
            else "and optimizer.cut: edges deals out other states to updates"
        )
        return [f"{much}; it fits, {how}, with", *_listed(ways)]
    if found.full:
        if found.sharding is None and (ways := _with(recipe, EIGHT_BIT_AVERAGES, estimated)):
            return [f"{much}; it fits with AdamW's averages in 8 bits, which rounds its steps, with", *_listed(ways)]
        rest = sum(found.resting.values()) / GIB
        shards = "" if found.sharding == "fsdp2" else "share them out among GPUs with --gpus N --sharding fsdp2, or "
        return [
            f"{much}, and smaller batches do not help: the weights and their copies take {rest:.0f} GiB; {shards}write "
            "model.train: lora and a learning rate for a LoRA"
        ]
    for how, settings in ROUNDED.items():
        kind = settings.get("model.quantize")
        if (found.sharding == "fsdp2" and kind) or (recipe.model.quantize is not None and kind != "nf4"):
            continue
        if ways := _with(recipe, settings, estimated):
            return [f"{much}; it fits {how}, which rounds its predictions, with", *_listed(ways)]
    cut = "share the frozen weights out among GPUs with --gpus N --sharding fsdp2, or "
    cut = "" if found.sharding == "fsdp2" or recipe.model.quantize is not None else cut
    least, noun = _least_batch(recipe), sample_noun(recipe)
    tried = "smaller batches do not help" if least == 1 else f"{least} {noun}s, a whole group, are the smallest batch"
    less = "" if least == 1 else ", a smaller rollout.group"
    size = "shorter" if noun == "sound" else "smaller"
    return [f"{much}, and {tried}; {cut}use a larger GPU, a smaller model{less} or {size} {noun}s"]


def _with(recipe: Recipe, settings: Mapping[str, Any], estimated: Callable[[Recipe], Estimate]) -> list[Way]:
    """Ways to make a run fit with settings that the recipe does not have yet; none if it has all of them."""
    new = {key: value for key, value in settings.items() if value_at(recipe, key) != value}
    ways = ways_to_fit(with_keys(recipe, new), estimated) if new else []
    return [Way((*map(_word, new.items()), *way.words), way.found) for way in ways]


def _least_batch(recipe: Recipe) -> int:
    """The smallest batch that the recipe takes; some losses need whole groups in a call."""
    for size in _sizes(recipe.rollout.batch, recipe.rollout.group):
        try:
            with_keys(recipe, {"rollout.batch": size})
        except ValueError:
            continue
        return size
    return recipe.rollout.batch


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

    The changed settings leave an optimizer step as it is. But with `optimizer.cut: edges` another batch gives other
    states to the updates. A batch is the recipe's own, or a group or a power of two below it. Only if smaller batches
    do not help, text encoders, states and autoencoder leave the card.

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
    waiting = recipe.model.offload
    own = {
        "model.release_text_encoders": recipe.model.release_text_encoders or "text_encoders" in waiting,
        "rollout.store": recipe.rollout.store, "model.offload": waiting,
    }  # fmt: skip
    whole = {
        key: list(dict.fromkeys([*waiting, *value])) if key == "model.offload" else value for key, value in more.items()
    }
    return {key: value for key, value in whole.items() if own[key] != value}


def _largest(recipe: Recipe, changes: Mapping[str, Any], estimated: Callable[[Recipe], Estimate]) -> Way | None:
    """The largest batches that fit with these changes; None if none fits."""
    own = {"rollout.batch": recipe.rollout.batch, "rollout.decode_batch": recipe.rollout.decode_batch}

    def largest(key: str, sizes: Sequence[int], others: Mapping[str, int]) -> tuple[int, Way] | None:
        found = None
        for size in sizes:
            new = {**changes, **{name: n for name, n in {**others, key: size}.items() if n != own[name]}}
            try:
                way = Way(tuple(map(_word, new.items())), estimated(with_keys(recipe, new)))
            except ValueError:
                # Some losses need whole groups in a call, so a larger batch may do.
                continue
            if way.found.peak > ROOM * way.found.gpu.gib * GIB:
                break
            found = size, way
        return found

    sizes = _sizes(recipe.rollout.batch, recipe.rollout.group)
    if (most := largest("rollout.batch", sizes, {"rollout.decode_batch": 1})) is None:
        return None
    both = largest("rollout.decode_batch", _sizes(recipe.rollout.decode_batch), {"rollout.batch": most[0]})
    return None if both is None else both[1]


def _sizes(own: int, *others: int) -> list[int]:
    """A batch, and the powers of two and other sizes below it, the smallest first."""
    powers = (2**power for power in range((own - 1).bit_length()))
    return sorted({*powers, *(size for size in others if size < own), own})


def _word(change: tuple[str, Any]) -> str:
    """An override as a shell takes it; some shells read brackets as a pattern."""
    key, value = change
    shown = (
        str(value).lower() if isinstance(value, bool) else f"[{', '.join(value)}]" if isinstance(value, list) else value
    )
    return shlex.quote(f"{key}={shown}")
