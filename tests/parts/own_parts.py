"""A run with a part from the user's own file: planned, trained, interrupted, resumed, and read back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from flowgrpo.bench.interruption import contents
from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.configs.schema import AnyRecipe
from flowgrpo.training.checking import check
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.session import Session, start

Command = Callable[..., tuple[int, str, str]]

IMAGES = [
    "rewards=[{name: jpeg_compressibility}]", "rollout={prompts: 2, group: 4, batch: 4}", "sampler.steps=4",
    "data.heldout=null", "optimizer={updates: 2, learning_rate: 1.0e-3}",
    "run={iterations: 3, checkpoint_every: 1, sample_every: 2}",
]  # fmt: skip

TEXT = [
    "rollout={prompts: 2, group: 4, batch: 8, tokens: 1000}", "data.heldout=null",
    "optimizer={updates: 2, learning_rate: 1.0e-3}", "run={iterations: 3, checkpoint_every: 1, sample_every: 2}",
]  # fmt: skip


class Interrupted(Exception):
    """Ends a run between two iterations."""


class StopAfter(Silent):
    """Interrupts a run after iteration 1 is logged, and before a checkpoint has it."""

    def iteration(self, record: dict) -> None:
        """Raise after the second iteration."""
        if record["iteration"] == 1:
            raise Interrupted


def write_part(folder: Path, code: str) -> Path:
    """The file of a user, of at most 30 lines."""
    assert len(code.strip().splitlines()) <= 30
    file = folder / "mine.py"
    file.write_text(code, encoding="utf-8")
    return file


def same_when_resumed(source: str, words: Sequence[str], folder: Path) -> AnyRecipe:
    """Check a recipe as `plan` does, run it whole and interrupted, and compare to the last bit.

    The interrupted run goes on from its own config.yaml.

    Returns:
        The recipe as the run's folder has it.
    """
    recipe = load_recipe(source, words)
    check(recipe).require()
    start(recipe, folder / "whole").trainer(Silent()).train()
    with pytest.raises(Interrupted):
        start(recipe, folder / "run").trainer(StopAfter()).train()
    again = load_recipe(folder / "run" / "config.yaml")
    assert again == recipe
    trainer = Session(again, RunFolder.open(folder / "run")).trainer(Silent())
    trainer.resume()
    assert trainer.next_iteration == 1
    trainer.train()
    assert contents(folder / "run") == contents(folder / "whole")
    return again
