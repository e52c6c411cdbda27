"""Runs of language models, small enough for a test."""

from pathlib import Path

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.session import Session
from flowgrpo.training.trainer import Trainer


def trainer_of(small: list[str], folder: Path, *more: str) -> Trainer:
    recipe = load_recipe("text", [*small, *more])
    return Session(recipe, RunFolder.create(folder, "")).trainer(Silent())
