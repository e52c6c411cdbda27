"""Short runs of the tiny pipelines of the conformance kit, one for each family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.pipelines.conformance.conform import TINY
from flowgrpo.pipelines.conformance.tiny import Tiny
from flowgrpo.training.session import start
from tests.tiny_pipelines import require

PROMPTS = ("a photo of two red circles", "a star", "a blue square above a green triangle")
REWARD = """
def level(prompts, images=None, sounds=None, **columns):
    made = sounds if images is None else images
    return made.flatten(1).mean(1) + made.flatten(1).std(1)
"""
OWN_LOADER = {name for name, tiny in TINY.items() if tiny.adjust is not None or tiny.load is not Tiny.load}


def load_as_the_kit_does(name: str, patch: pytest.MonkeyPatch) -> None:
    """Give sessions and commands the call of a tiny instance, and where its folder lacks a part the instance itself."""
    require(name)
    tiny = TINY[name]
    for module in ("training.recipe_models", "training.session", "inference.opening"):
        patch.setattr(f"flowgrpo.{module}.call_arguments", lambda folder, given: {**tiny.call, **given})
        if name in OWN_LOADER and module != "training.recipe_models":
            patch.setattr(f"flowgrpo.{module}.load_pipeline", lambda folder, dtype, *rest: tiny.loaded(folder, dtype))


def overrides(name: str, folder: Path, train: str) -> list[str]:
    """A recipe of two iterations that moves the weights far; batches are not filled by the five held-out images."""
    tiny = TINY[name]
    (folder / "prompts.txt").write_text("".join(f"{text}\n" for text in tiny.texts or PROMPTS))
    (folder / "reward.py").write_text(REWARD)
    tiny.fresh().save_pretrained(folder / "pipeline")
    # The check before a run reads the arguments of the recipe, such as a strength of 1. Pictures cannot stand there.
    call = json.dumps({key: value for key, value in tiny.call.items() if isinstance(value, int | float | str)})
    return [
        f"model={{path: {folder / 'pipeline'}, train: {train}, lora: {{rank: 2, alpha: 4}}, call: {call}}}",
        f"data={{train: {folder / 'prompts.txt'}, heldout: {folder / 'prompts.txt'}}}",
        f"sampler={{steps: {tiny.steps}, plan: {{window: all}}}}",
        "rollout={prompts: 2, group: 2, batch: 4, decode_batch: 2}",
        f"rewards=[{{name: '{folder / 'reward.py'}:level'}}]",
        "evaluate={every: 1, seeds: 2}",
        "optimizer={learning_rate: 0.02, ema: null}",
        "run={iterations: 2, checkpoint_every: 2, sample_every: 2}",
    ]  # fmt: skip


def trained(name: str, folder: Path, train: str = "lora", *changes: str) -> Path:
    """The folder of a finished run; `load_as_the_kit_does` must hold."""
    recipe = load_recipe("mixgrpo_flash_guard", [*overrides(name, folder, train), *changes])
    start(recipe, folder / "run").trainer(Silent()).train()
    return folder / "run"


def evaluations(run: Path, iteration: int) -> list[dict[str, Any]]:
    """Lines of the index of a run's samples that are of one evaluation."""
    lines = [json.loads(line) for line in (run / "samples" / "index.jsonl").read_text().splitlines()]
    return [line for line in lines if line["phase"] == "eval" and line["iteration"] == iteration]


def scores_of(run: Path, line: int = -1) -> dict[str, float]:
    """What an evaluation of a run gave, by reward; the last one, or that of a line of its metrics."""
    found = json.loads((run / "metrics.jsonl").read_text().splitlines()[line])
    return {key.removeprefix("eval/"): value for key, value in found.items() if key.startswith("eval/")}
