"""What a run tells a terminal while it loads, and while an iteration or an evaluation goes on."""

from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.training.session import start

IMAGES = [
    "run.iterations=1", "rollout.prompts=2", "rollout.group=4", "rollout.batch=4", "rollout.decode_batch=4",
    "evaluate.prompts=2", "evaluate.seeds=1", "evaluate.steps=2",
    "optimizer.updates=2", "sampler.plan.shared_noise=false", "sampler.plan.window.size=2",
]  # fmt: skip
TEXT = [
    "run.iterations=1", "rollout.prompts=4", "rollout.group=4", "rollout.batch=8", "evaluate.prompts=3",
    "optimizer.updates=2",
]  # fmt: skip


def told_by(recipe: str, words: list[str], folder: Path) -> tuple[list[str], list[str], list[Any]]:
    """What loading tells, what an evaluation and an iteration tell, and the last count of each of their parts."""
    loading: list[str] = []

    def doing(text: str, done: int = 0, total: int = 0) -> None:
        loading.append(text)

    trainer = start(load_recipe(recipe, words), folder, doing=doing).trainer(Silent())
    parts: list[str] = []
    counts: list[tuple[str, int, int]] = []
    trainer.clock.watcher = trainer.rewards.told = trainer.evaluation.told = parts.append
    trainer.clock.counter = lambda done, total: counts.append((parts[-1], done, total))
    trainer.train()
    last = [list(same)[-1] for _, same in groupby(counts, key=lambda count: (count[0], count[2]))]
    return [text for text, _ in groupby(loading)], [text for text, _ in groupby(parts)], last


@pytest.mark.slow
def test_a_run_of_images_tells_every_phase_with_its_counts(tmp_path: Path):
    prompts = tmp_path / "train.jsonl"
    lines = resources.files("flowgrpo.worlds.scenes").joinpath("data/train.jsonl").read_text().splitlines()
    prompts.write_text("\n".join(lines[:5]))
    words = [*IMAGES, f"data.train={prompts}", "model.release_text_encoders=true"]
    loading, parts, counts = told_by("mixgrpo_flash_guard", words, tmp_path / "run")
    assert loading == [
        "checking the recipe", "loading the rewards", "loading the pipeline", "preparing the pipeline",
        "encoding prompts", "checking that the pipeline's own loop is reproduced",
    ]  # fmt: skip
    # The evaluations make two images in two steps. The iteration makes eight images, each from a noise of its own, and
    # trains two steps of each. An update has the four images of one prompt, which are a batch.
    evaluation = [("denoiser", 4, 4), ("decode", 2, 2)]
    assert counts[:2] == counts[-2:] == evaluation
    states = counts[2][2]
    assert counts[2] == ("denoiser", states, states)
    assert states % 8 == 0
    assert counts[3] == ("decode", 8, 8)
    assert counts[4:-2] == [("update 1/2, batch", 2, 2), ("update 2/2, batch", 2, 2)]
    assert {"gold", "gold_dense", "optimizer"} <= set(parts)


@pytest.mark.slow
def test_a_run_of_text_tells_every_phase_with_its_counts(tmp_path: Path):
    loading, parts, counts = told_by("text", TEXT, tmp_path / "run")
    assert loading == ["checking the recipe", "loading the rewards", "loading the model"]
    held = [("sampling", 3, 3)]
    updates = [("update 1/2, batch", 1, 1), ("update 2/2, batch", 1, 1)]
    assert counts == [*held, ("sampling", 16, 16), *updates, *held]
    assert "answer" in parts
