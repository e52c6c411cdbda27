"""States of training in an unfinished build, so that an interruption loses a few minutes and not hours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..training.folder.files import write_atomically

EVERY = 50
"""Optimizer steps between two states."""


class TrainingStates:
    """A folder with the last state of each stage of training.

    Args:
        folder: an existing folder; None keeps no state.
        settings: plain values that decide the training; a state with other settings is refused.
    """

    def __init__(self, folder: Path | None, settings: Mapping[str, Any]) -> None:
        self._folder, self._settings = folder, dict(settings)

    def load(self, stage: str) -> dict[str, Any] | None:
        """The last state of a stage, or None.

        Raises:
            ValueError: the file cannot be read, or its settings differ.
        """
        if self._folder is None or not (file := self._folder / f"{stage}.pt").is_file():
            return None
        instead = f"remove it, so that this stage begins anew: {file}"
        try:
            kept = torch.load(file, weights_only=True)
            settings, state = kept["settings"], kept["state"]
        except Exception as error:  # torch.load has no error of its own for a damaged file
            raise ValueError(f"the state of an interrupted build cannot be read ({error}); {instead}") from error
        if settings != self._settings:
            raise ValueError(f"the state of an interrupted build has other settings, of another version; {instead}")
        return dict(state)

    def save(self, stage: str, state: Mapping[str, Any]) -> None:
        """Replace the state of a stage.

        Raises:
            OSError: the file could not be written; the state before is unchanged.
        """
        if self._folder is None:
            return
        kept = {"settings": self._settings, "state": dict(state)}
        write_atomically(self._folder / f"{stage}.pt", lambda temporary: torch.save(kept, temporary))
