"""Evaluation outside a run, and sampling of images with plain diffusers pipelines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from ..configs.schema import AnyRecipe, Recipe, TextRecipe
from ..core.addressing import address
from ..pipelines.capture import PipelineCall, Prompt, kin
from ..rewards.runner import RewardSet
from .checking import read_data, reward_specs
from .conditioning import take_pictures
from .data import columns_of
from .loading import DTYPES, call_arguments, load_pipeline, model_folder, quiet_libraries
from .processes import launched
from .records import sample_records
from .run_folder import save_image
from .samples import EVALUATION_SEED
from .text_inference import iterations_done, new_index, open_language_model, task_of, write_completions
from .text_policy import complete


def open_model(model: str, dtype: torch.dtype = torch.float32, *, base: bool = False) -> tuple[Any, dict[str, Any]]:
    """A plain pipeline and its call arguments: of a run folder its base with the trained weights, else the model.

    With `base` the model of a run before its training.

    Raises:
        ValueError: the run has no trained weights yet, or `base` of what is no run.
    """
    quiet_libraries()
    run = Path(model)
    if not (run / "config.yaml").is_file():
        if base:
            raise ValueError(f"{model} is no run, so there is nothing before its training; leave out --base")
        folder = model_folder(model)
        return load_pipeline(folder, dtype), call_arguments(folder, {})
    settings = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["model"]
    source = model_folder(settings["path"])
    call = call_arguments(source, settings["call"])
    if base:
        return load_pipeline(source, dtype), call
    if (run / "lora").is_dir():
        pipe = load_pipeline(source, dtype)
        pipe.load_lora_weights(run / "lora")
        return pipe, call
    if (run / "pipeline").is_dir():
        return load_pipeline(str(run / "pipeline"), dtype), call
    raise ValueError(f"{run} has no trained weights yet; finish it with `flowgrpo resume {run}`")


@torch.no_grad()
def generate(
    pipe: Any, call: dict[str, Any], prompts: Sequence[str], keys: Sequence[int], steps: int, batch: int = 32
) -> torch.Tensor:
    """Images [N, 3, H, W] in [0, 1] by the pipeline's own call, each from its own seed, with its prompt's pictures.

    The pipeline is moved to the accelerator, if there is one.
    """
    pipe.to(launched().device)
    found: dict[int, torch.Tensor] = {}
    for first in range(0, len(prompts), batch):
        for rows in kin(prompts[first : first + batch], "all"):
            numbers = [first + row for row in rows]
            one, texts = prompts[numbers[0]], [str(prompts[k]) for k in numbers]
            generators = [torch.Generator().manual_seed(keys[k]) for k in numbers]
            own = {**call, **(one.call if isinstance(one, Prompt) else {})}
            made = pipe(prompt=texts, num_inference_steps=steps, generator=generators, output_type="pt", **own)
            found |= zip(numbers, (made.images if hasattr(made, "images") else made.frames).float().cpu())
    return torch.stack([found[k] for k in range(len(prompts))])


def sample_images(
    model: str,
    prompts: Sequence[str],
    out: Path,
    *,
    steps: int,
    seed: int,
    count: int,
    noise: int | None = None,
    base: bool = False,
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
        base: of a run, the model before training.

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
    pipe, call = open_model(model, base=base)
    texts = [text for text in prompts for _ in range(count)]
    keys = [address(seed + k, p) for p in range(len(prompts)) for k in range(count)]
    if noise is not None:
        keys = [noise] * len(prompts)
    images = generate(pipe, call, texts, keys, steps)
    out.mkdir(parents=True, exist_ok=True)
    for path, image in zip(paths, images):
        save_image(path, image)
    return paths


def evaluate_model(
    model: str, recipe: AnyRecipe, *, out: Path | None = None, base: bool = False
) -> dict[str, tuple[float, float, int]]:
    """Mean, standard error and count of each evaluation reward on the held-out prompts.

    Args:
        model: a run folder, a model folder, a hub id or an embedded model.
        recipe: whose held-out prompts, rewards and lengths are taken; of images or of text.
        out: folder for the completions with their rewards, as `samples/index.jsonl` of a run has them; text only.
        base: of a run, the model before training.

    Raises:
        ValueError: the recipe is of another task than the model, a file exists, or the run has no weights yet.
    """
    made = task_of(model)
    if made not in (recipe.task, None):
        raise ValueError(f"{model} makes {made}, and {recipe.name} is a recipe of {recipe.task}; name one of {made}")
    if out is not None and not isinstance(recipe, TextRecipe):
        raise ValueError("--out keeps the completions of a recipe of text; leave it out for images")
    index = None if out is None else new_index(out)
    data = read_data(recipe)
    rewards = RewardSet(reward_specs(recipe.evaluate.rewards or recipe.rewards))
    seeds = recipe.evaluate.seeds
    samples: torch.Tensor | list[str]
    if isinstance(recipe, Recipe):
        pipe, call = open_model(model, DTYPES[recipe.model.dtype], base=base)
        call |= call_arguments("", recipe.model.call)
        take_pictures(data, recipe, call, PipelineCall(pipe, call).parameters)
    rows = [row for row in data.heldout for _ in range(seeds)]
    if isinstance(recipe, Recipe):
        keys = [address(address(EVALUATION_SEED, 2, row.id), 0, s) for row in data.heldout for s in range(seeds)]
        samples = generate(
            pipe, call, [row.prompt for row in rows], keys, recipe.evaluate.steps or recipe.sampler.steps,
        )  # fmt: skip
    else:
        found = complete(
            open_language_model(model, recipe, base=base), data.heldout,
            [address(EVALUATION_SEED, 2, row.id) for row in data.heldout], seeds, recipe.generation,
            temperature=recipe.evaluate.temperature, batch=recipe.evaluate.batch or recipe.rollout.batch,
        )  # fmt: skip
        samples = found.samples
    scores = rewards.score(samples, [row.text for row in rows], columns_of(rows), [row.id for row in rows])
    if index is not None:
        done = 0 if base else iterations_done(model)
        write_completions(index, "eval", done, sample_records(data.heldout, found, scores), found.samples)
    results = {}
    for k, name in enumerate(scores.names):
        values = scores.values[:, k]
        values = values[~values.isnan()]
        error = float(values.std() / math.sqrt(len(values))) if len(values) > 1 else math.nan
        results[name] = (float(values.mean()), error, len(values))
    return results
