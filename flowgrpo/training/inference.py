"""Sampling and evaluation outside a run, with plain diffusers pipelines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from ..configs.schema import AnyRecipe, Recipe, TextRecipe
from ..core.addressing import address
from ..rewards.runner import RewardSet
from ..text.model import LanguageModel, load_language_model, reinitialise
from .data import columns_of
from .run_folder import save_image
from .session import (
    DTYPES,
    UNTRAINED,
    call_arguments,
    language_folder,
    load_pipeline,
    model_folder,
    quiet_libraries,
    read_data,
    reward_specs,
)
from .text_policy import complete
from .trainer import EVALUATION_SEED


def open_model(model: str, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Any]]:
    """A plain pipeline and its call arguments: of a run folder its base with the trained weights, else the model.

    Raises:
        ValueError: the run has no trained weights yet.
    """
    quiet_libraries()
    run = Path(model)
    if not (run / "config.yaml").is_file():
        folder = model_folder(model)
        return load_pipeline(folder, dtype), call_arguments(folder, {})
    settings = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["model"]
    base = model_folder(settings["path"])
    call = call_arguments(base, settings["call"])
    if (run / "lora").is_dir():
        pipe = load_pipeline(base, dtype)
        pipe.load_lora_weights(run / "lora")
        return pipe, call
    if (run / "pipeline").is_dir():
        return load_pipeline(str(run / "pipeline"), dtype), call
    raise ValueError(f"{run} has no trained weights yet; finish it with `flowgrpo resume {run}`")


@torch.no_grad()
def generate(
    pipe: Any, call: dict[str, Any], prompts: Sequence[str], keys: Sequence[int], steps: int, batch: int = 32
) -> torch.Tensor:
    """Images [N, 3, H, W] in [0, 1] by the pipeline's own call, each from its own seed."""
    parts = []
    for first in range(0, len(prompts), batch):
        texts, seeds = list(prompts[first : first + batch]), keys[first : first + batch]
        generators = [torch.Generator().manual_seed(key) for key in seeds]
        made = pipe(prompt=texts, num_inference_steps=steps, generator=generators, output_type="pt", **call)
        parts.append((made.images if hasattr(made, "images") else made.frames).float().cpu())
    return torch.cat(parts)


def sample_images(
    model: str, prompts: Sequence[str], out: Path, *, steps: int, seed: int, count: int, noise: int | None = None
) -> list[Path]:
    """Sample and write PNG files; existing files are not overwritten.

    Args:
        model: as `open_model`.
        prompts: texts.
        out: folder.
        steps: of denoising.
        seed: of the first image of a prompt; the next ones have the next seeds.
        count: images of a prompt.
        noise: seed of the generator of the initial noise itself, as `samples/index.jsonl` of a run has it.

    Raises:
        ValueError: a file of that name exists, or `noise` with several images of a prompt.
    """
    if noise is not None and count != 1:
        raise ValueError(f"--noise is of one image and --count is {count}; leave one of them out")
    first = seed if noise is None else noise
    paths = [out / f"{p:03d}-{first + k}.png" for p in range(len(prompts)) for k in range(count)]
    for path in paths:
        if path.exists():
            raise ValueError(f"{path} exists; name another folder with --out")
    pipe, call = open_model(model)
    texts = [text for text in prompts for _ in range(count)]
    keys = [address(seed + k, p) for p in range(len(prompts)) for k in range(count)]
    if noise is not None:
        keys = [noise] * len(prompts)
    images = generate(pipe, call, texts, keys, steps)
    out.mkdir(parents=True, exist_ok=True)
    for path, image in zip(paths, images):
        save_image(path, image)
    return paths


def evaluate_model(model: str, recipe: AnyRecipe) -> dict[str, tuple[float, float, int]]:
    """Mean, standard error and count of each evaluation reward on the held-out prompts.

    Args:
        model: a run folder, a model folder, a hub id or an embedded model.
        recipe: whose held-out prompts, rewards and lengths are taken; of images or of text.
    """
    data = read_data(recipe)
    rewards = RewardSet(reward_specs(recipe.evaluate.rewards or recipe.rewards))
    seeds = recipe.evaluate.seeds
    rows = [row for row in data.heldout for _ in range(seeds)]
    samples: torch.Tensor | list[str]
    if isinstance(recipe, Recipe):
        pipe, call = open_model(model, DTYPES[recipe.model.dtype])
        keys = [address(address(EVALUATION_SEED, 2, row.id), 0, s) for row in data.heldout for s in range(seeds)]
        samples = generate(
            pipe, {**call, **recipe.model.call}, [row.text for row in rows], keys,
            recipe.evaluate.steps or recipe.sampler.steps,
        )  # fmt: skip
    else:
        samples = complete(
            open_language_model(model, recipe), data.heldout,
            [address(EVALUATION_SEED, 2, row.id) for row in data.heldout], seeds, recipe.generation,
            temperature=recipe.evaluate.temperature, batch=recipe.evaluate.batch or recipe.rollout.batch,
        ).samples  # fmt: skip
    scores = rewards.score(samples, [row.text for row in rows], columns_of(rows), [row.id for row in rows])
    results = {}
    for k, name in enumerate(scores.names):
        values = scores.values[:, k]
        values = values[~values.isnan()]
        error = float(values.std() / math.sqrt(len(values))) if len(values) > 1 else math.nan
        results[name] = (float(values.mean()), error, len(values))
    return results


def open_language_model(model: str, recipe: TextRecipe) -> LanguageModel:
    """A language model for evaluation: of a run folder its base with the trained weights, else the model.

    Raises:
        ValueError: the run has no trained weights yet.
    """
    quiet_libraries()
    settings, run = recipe.model, Path(model)
    options: dict[str, Any] = {"dtype": DTYPES[settings.dtype], "chat": settings.chat, "system": settings.system}
    if not (run / "config.yaml").is_file():
        return load_language_model(language_folder(model), **options)
    if (run / "model").is_dir():
        return load_language_model(str(run / "model"), **options)
    if (run / "lora").is_dir():
        base = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        language = load_language_model(language_folder(base["model"]["path"]), **options)
        if base["model"]["path"] == UNTRAINED:
            reinitialise(language, base["run"]["seed"])
        language.model.load_adapter(str(run / "lora"))
        return language
    raise ValueError(f"{run} has no trained weights yet; finish it with `flowgrpo resume {run}`")
