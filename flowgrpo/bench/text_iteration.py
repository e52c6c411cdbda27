"""`flowgrpo bench iteration` for a recipe of text, of a causal language model or of a masked one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from ..configs.schema import MaskedRecipe, TextRecipe
from ..estimate.language import estimate_text, scoring_flops
from ..estimate.masked import estimate_masked
from ..text.masked_model import MaskedLanguageModel
from ..text.model import LanguageModel
from ..training.checking import check
from ..training.data import PromptRow
from ..training.folder.run_folder import RunFolder, write_text
from ..training.model_paths import DTYPES, language_folder, masked_folder
from ..training.planning import forecast
from ..training.session import Session
from ..training.trainer import Trainer
from .measures import Report, Silent
from .random_language_model import numbers, random_language_model, random_masked_model
from .timed_iterations import TimedIterations, checked_but_for_the_model, estimated_peaks, where


def text_iteration(recipe: TextRecipe, folder: Path, report: Report, repeats: int) -> dict[str, Any]:
    """`iteration` for a recipe of text.

    The model has the class and sizes of `model.path`: a folder, a hub id whose configuration is on this machine, or a
    known model id. The weights are neither read nor downloaded. The prompts are rows of random tokens, and all have the
    length of the recipe's longest prompt, as in `flowgrpo plan`. Almost all completions have `generation.max_tokens`
    tokens, because random weights hardly ever choose the end token. The reward is the share of digits in the text. So
    the prompts and rewards of the recipe need not exist, and rewards are not measured.

    Raises:
        ValueError: the shapes of the model are unknown, or another engine than transformers is asked for.
    """
    if recipe.generation.engine != "transformers":
        raise ValueError(
            f"generation.engine is {recipe.generation.engine}, which reads real weights; write "
            "generation.engine=transformers"
        )
    device = Accelerator().device
    # The estimate of memory is the same for every card.
    expected = estimate_text(recipe, _rows(recipe))
    model = recipe.model
    language = random_language_model(
        language_folder(model.path), DTYPES[model.dtype], device, attention=model.attention, seed=recipe.run.seed
    )
    trainer, counted = _trainer(recipe, folder, language, expected.prompt, report, device)
    timed = TimedIterations.of(trainer, device, repeats)
    completions = recipe.rollout.prompts * recipe.rollout.group
    tokens = sum(r["tokens"] for r in timed.records) / repeats
    length = f"{tokens / completions:.0f} tokens after prompts of {expected.prompt:,}"
    timed.tell_times(report, f"{completions} completions of {length}")
    spent = {"sampling": timed.mean("sampling"), "training": timed.training}
    rate = scoring_flops(recipe, expected.prompt) * completions * recipe.optimizer.epochs / spent["training"]
    speeds = {"training": f", {rate / 1e12:.3g} TFLOP/s{timed.share_of_peak(rate)}"}
    for name, seconds in spent.items():
        report(f"{name}: {seconds:.2f} s, {tokens / seconds:,.0f} sampled tokens per second{speeds.get(name, '')}")
    peaks = estimated_peaks(expected.resting, expected.passing)
    timed.tell_memory(report, peaks)
    return {
        **timed.figures(recipe, peaks), "generation": recipe.generation.model_dump(mode="json"),
        "class": type(language.model).__name__, "parameters": counted, "completions": completions,
        "prompt_tokens": expected.prompt, "tokens": [r["tokens"] for r in timed.records], "part_seconds": spent,
        "tokens_per_second": {name: tokens / seconds for name, seconds in spent.items()},
        "tflops": {"training": rate / 1e12},
    }  # fmt: skip


def masked_iteration(recipe: MaskedRecipe, folder: Path, report: Report, repeats: int) -> dict[str, Any]:
    """`iteration` for a recipe of a masked model; model, prompts and reward are as in `text_iteration`.

    Raises:
        ValueError: the shapes of the model are unknown.
    """
    device = Accelerator().device
    expected, model = estimate_masked(recipe, _rows(recipe)), recipe.model
    language = random_masked_model(
        masked_folder(model.path), DTYPES[model.dtype], device, attention=model.attention, block=model.block,
        seed=recipe.run.seed,
    )  # fmt: skip
    trainer, counted = _trainer(recipe, folder, language, expected.prompt, report, device)
    timed = TimedIterations.of(trainer, device, repeats)
    completions, length = forecast(recipe).images, recipe.generation.tokens
    timed.tell_times(report, f"{completions} completions of {length} tokens after prompts of {expected.prompt:,}")
    spent = {"sampling": timed.mean("sampling"), "training": timed.training}
    states = sum(r["evaluations"] for r in timed.records) / repeats
    report(f"sampling: {spent['sampling']:.2f} s, {states / spent['sampling']:,.3g} states per second")
    report(f"training: {spent['training']:.2f} s")
    peaks = estimated_peaks(expected.resting, expected.passing)
    timed.tell_memory(report, peaks)
    return {
        **timed.figures(recipe, peaks), "generation": recipe.generation.model_dump(mode="json"),
        "sampler": recipe.sampler.model_dump(mode="json"), "class": type(language.model).__name__,
        "parameters": counted, "completions": completions, "prompt_tokens": expected.prompt,
        "states": [r["evaluations"] for r in timed.records], "part_seconds": spent,
    }  # fmt: skip


def _trainer(
    recipe: TextRecipe | MaskedRecipe, folder: Path, language: LanguageModel | MaskedLanguageModel, prompt: int,
    report: Report, device: torch.device,
) -> tuple[Trainer, int]:  # fmt: skip
    """The trainer of a recipe with a given model and random prompts, and how many weights it has."""
    prompts = folder.with_name("prompts.txt")
    write_text(prompts, "\n".join(numbers(recipe.rollout.prompts, prompt, len(language.tokenizer))) + "\n")
    recipe = _measured(recipe, prompts)
    session = Session(recipe, RunFolder.create(folder, ""), checked_but_for_the_model(recipe), language)
    trainer = session.trainer(Silent())
    counted = sum(p.numel() for part in trainer.task.weights.modules.values() for p in part.parameters())
    report(f"{type(language.model).__name__}, {counted / 1e9:.3g} billion parameters, on {where(device)}")
    return trainer, counted


def _rows(recipe: TextRecipe | MaskedRecipe) -> Sequence[PromptRow]:
    """The training prompts of a recipe, if they are on this machine."""
    data = check(recipe, fetches=False).data
    return [] if data is None else data.train.rows


def _measured(recipe: TextRecipe | MaskedRecipe, prompts: Path) -> TextRecipe | MaskedRecipe:
    """The recipe with random prompts and a reward without data, and with completions that count at any length."""
    data = recipe.model_dump()
    data["data"] |= {"train": str(prompts), "heldout": None, "test": None, "templates": []}
    data["model"] |= {"chat": False, "system": None, "chat_template_kwargs": {}}
    if isinstance(recipe, TextRecipe):
        data["generation"] |= {"stop": []}
    data["evaluate"]["rewards"] = None
    data |= {"rewards": [{"name": "digit_share"}], "extensions": []}
    if recipe.objective.get("drop_truncated"):
        data["objective"]["drop_truncated"] = False
    return type(recipe).model_validate(data)
