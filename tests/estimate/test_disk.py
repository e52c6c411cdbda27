"""The room that a run takes on its disk, compared with its estimate."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_image_recipe
from flowgrpo.estimate.disk import on_disk
from flowgrpo.estimate.models import model_of
from flowgrpo.training.session import start

SMALL = [
    "run.iterations=3", "run.checkpoint_every=1", "rollout.prompts=2", "rollout.group=4", "evaluate.prompts=2",
    "evaluate.quick=null", "evaluate.every=3", "sampler.steps=3",
]  # fmt: skip
LORA = ["model.train=lora", "optimizer.learning_rate=1e-3"]


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "result"),
    [([], "pipeline"), ([*LORA, "optimizer.ema=null"], "lora"), (["model.dtype=bfloat16", "reference={}"], "pipeline")],
)
def test_a_run_takes_the_room_of_its_estimate(words: list[str], result: str, tmp_path: Path) -> None:
    recipe = load_image_recipe("default", [*SMALL, "run.keep=2", *words])
    found = on_disk(recipe, model_of(recipe.model), 2)
    assert set(found) == {"checkpoints", "best", result}
    start(recipe, tmp_path / "run").trainer(Silent()).train()
    checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert len(checkpoints) == 2
    # A third checkpoint is there while the oldest is not yet dropped, and two copies of the best weights.
    # The names of tensors count for a few per cent in the small files of a LoRA.
    assert found["checkpoints"] == pytest.approx(1.5 * sum(map(size, checkpoints)), rel=0.05)
    assert found["best"] == pytest.approx(2 * size(tmp_path / "run" / "best"), rel=0.05)
    written = size(tmp_path / "run" / result)
    assert found[result] == pytest.approx(written, rel=0.05)


@pytest.mark.parametrize(
    ("words", "times"),
    [
        (["run.iterations=1"], 1),
        (["run.iterations=9", "run.checkpoint_every=9"], 1),
        (["run.iterations=9", "run.checkpoint_every=8"], 2),
        (["run.iterations=9", "run.checkpoint_every=3"], 3),
        (["run.iterations=9", "run.checkpoint_every=3", "run.keep=1"], 2),
        (["run.iterations=90", "run.checkpoint_every=3", "run.keep=4"], 5),
        (["run.iterations=9", "run.checkpoint_every=9", "run.checkpoint_minutes=5"], 3),
    ],
)
def test_as_many_checkpoints_as_there_are_at_once(words: list[str], times: int) -> None:
    recipe = load_image_recipe("default", ["run.checkpoint_minutes=null", *words])
    model = model_of(recipe.model)
    # Weights, two moments, and the average that is saved and samples.
    assert on_disk(recipe, model, 2)["checkpoints"] == times * 16 * model.trained
    lagging = load_image_recipe("default", ["run.checkpoint_minutes=null", *words, "objective.old.decay=0.9"])
    assert on_disk(lagging, model, 2)["checkpoints"] == times * 20 * model.trained


def test_without_held_out_prompts_nothing_is_best() -> None:
    recipe = load_image_recipe("default")
    assert on_disk(recipe, model_of(recipe.model), 0)["best"] == 0
