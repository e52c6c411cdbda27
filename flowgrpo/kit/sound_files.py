"""Sounds that exist already, as WAV files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..media.sound import read_sound

ENDING = ".wav"


@dataclass(frozen=True)
class LabelledSound:
    """A WAV file with its prompt and columns.

    Attributes:
        path: the file.
        prompt: its prompt.
        columns: further columns, for rewards.
        rate: samples a second.
    """

    path: Path
    prompt: str
    columns: Mapping[str, Any]
    rate: int

    def load(self) -> Tensor:
        """[C, S] from -1 to 1."""
        return torch.from_numpy(read_sound(self.path)[0])


def sound_of(path: Path, prompt: str, columns: Mapping[str, Any]) -> LabelledSound:
    """A file as a sound to score.

    Raises:
        ValueError: there is no such file, or it is no WAV file of 16 bits.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    return LabelledSound(path, prompt, columns, read_sound(path)[1])
