"""Training of the learned scorer of scenes from scratch, on drawn scenes and their prompts.

The training is contrastive, as in Radford et al. (2103.00020). The scorer learns what distinguishes a prompt from the
other prompts of a batch. It learns nothing about the quality of a drawing.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from .draw import SIZE, Thing
from .gold import holds
from .proxy_scorer import CONFIG, TOKENS, VOCABULARY, WEIGHTS, WordTokenizer, build_model
from .scene_prompts import RELATIONS, Item, Meaning, all_prompts, meaning, sample_scenes

FULL_STEPS = 800
BATCH = 256
PREPROCESS = {"size": SIZE, "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "resize_mode": "squash"}

_POOL = 24_000
_LEARNING_RATE = 2e-3


def architecture(vocabulary: int) -> dict[str, Any]:
    """The scorer's architecture in open_clip's form; the scorer has about 280,000 parameters."""
    vision = {"image_size": SIZE, "patch_size": 8, "width": 64, "layers": 3, "head_width": 16, "pool_type": "avg"}
    text = {"context_length": TOKENS, "vocab_size": vocabulary, "width": 64, "heads": 4, "layers": 2}
    return {"embed_dim": 64, "vision_cfg": vision, "text_cfg": text}


def shown(things: Sequence[Thing]) -> set[Meaning]:
    """The meanings of all prompts of the world that a scene satisfies."""
    if len({thing.shape for thing in things}) == 1:
        colours = {thing.colour for thing in things}
        possible = (None, *colours) if len(colours) == 1 else (None,)
        return {meaning([Item(things[0].shape, len(things), colour)]) for colour in possible}
    if len(things) != 2:
        return set()
    one, two = things
    pairs = [(Item(one.shape), Item(two.shape)), (Item(one.shape, 1, one.colour), Item(two.shape, 1, two.colour))]
    pairs += [(Item(one.shape, relation=r, other=1), Item(two.shape)) for r in RELATIONS if holds(r, one, two)]
    return {meaning(pair) for pair in pairs}


@dataclass(frozen=True)
class DrawnScenes:
    """N scenes with one prompt each, and the M meanings that the prompts of the world have.

    Attributes:
        pictures: uint8 [N, 3, 64, 64].
        texts: N prompts.
        asked: index of each prompt's meaning, int64 [N], in [0, M).
        fits: whether each scene satisfies each meaning, bool [N, M].
    """

    pictures: Tensor
    texts: list[str]
    asked: Tensor
    fits: Tensor


def draw_scenes(count: int, rng: np.random.Generator) -> DrawnScenes:
    """Draw `count` scenes that show what their prompts ask for, with equal shares of the skills."""
    index = {key: k for k, key in enumerate(dict.fromkeys(meaning(p.items) for p in all_prompts()))}
    pictures = np.empty((count, SIZE, SIZE, 3), dtype=np.uint8)
    asked, fits = torch.empty(count, dtype=torch.long), torch.zeros(count, len(index), dtype=torch.bool)
    texts = []
    for k, (prompt, things, picture) in enumerate(sample_scenes(count, rng)):
        pictures[k] = picture
        texts.append(prompt.text)
        asked[k] = index[meaning(prompt.items)]
        fits[k, [index[key] for key in shown(things) if key in index]] = True
    return DrawnScenes(torch.from_numpy(pictures).permute(0, 3, 1, 2), texts, asked, fits)


def contrastive_loss(images: Tensor, texts: Tensor, scale: Tensor, also_true: Tensor) -> Tensor:
    """CLIP's symmetric cross-entropy, without false negatives.

    Args:
        images: normalised embeddings [B, D].
        texts: normalised embeddings [B, D] of the images' own prompts.
        scale: inverse temperature, scalar.
        also_true: bool [B, B], whether image i satisfies prompt j. These pairs are no negatives. The diagonal is
            ignored.

    Returns:
        The mean over images and prompts, scalar.
    """
    target = torch.arange(len(images))
    exempt = also_true & ~torch.eye(len(images), dtype=torch.bool)
    logits = (scale * images @ texts.T).masked_fill(exempt, -math.inf)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def train_proxy(folder: Path, *, seed: int, steps: int, report: Callable[[str], None]) -> None:
    """Train a scorer from scratch and write it to `folder`, which appears only when it is complete.

    The result is deterministic for a seed on one kind of machine. The global generator is not changed.

    Args:
        folder: a new or empty folder.
        seed: seed of weights, scenes and their order.
        steps: optimizer steps, `FULL_STEPS` for the shipped scorer.
        report: called with lines of progress.

    Raises:
        ValueError: the folder is not empty, or `steps` is not positive.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder; name a new folder")
    if steps < 1:
        raise ValueError(f"steps is {steps}; use 1 or more")
    tokenizer = WordTokenizer.of_scenes()
    config = architecture(len(tokenizer.vocabulary))
    model = build_model(config, seed).train()
    scenes = draw_scenes(min(_POOL, BATCH * steps), np.random.default_rng([seed, 7]))
    _fit(model, scenes, tokenizer(scenes.texts), torch.Generator().manual_seed(seed), steps, report)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    described = {"model_cfg": config, "preprocess_cfg": PREPROCESS}
    (partial / CONFIG).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    (partial / VOCABULARY).write_text(json.dumps(tokenizer.vocabulary, indent=0) + "\n", encoding="utf-8")
    save_file({key: value.half().contiguous() for key, value in model.state_dict().items()}, partial / WEIGHTS)
    os.replace(partial, folder)


def _fit(
    model: Any, scenes: DrawnScenes, ids: Tensor, generator: torch.Generator, steps: int, report: Callable[[str], None]
) -> None:
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=_LEARNING_RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, max(steps, 2), pct_start=0.1)
    for step in range(1, steps + 1):
        rows = torch.randint(len(ids), (BATCH,), generator=generator)
        pixels = scenes.pictures[rows].float().div(127.5).sub(1)
        pixels += 0.04 * torch.randn(pixels.shape, generator=generator)
        images, texts = model.encode_image(pixels, normalize=True), model.encode_text(ids[rows], normalize=True)
        also_true = scenes.fits[rows][:, scenes.asked[rows]]
        loss = contrastive_loss(images, texts, model.logit_scale.exp(), also_true)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0.0, math.log(100.0))
        if step % 100 == 0 or step == steps:
            report(f"scorer {step:>6}  loss {loss.item():.4f}")
