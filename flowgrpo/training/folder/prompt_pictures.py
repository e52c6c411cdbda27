"""Copies of the pictures of prompts, beside the samples that were made for them."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from ...pipelines.pictures import Picture
from ..prompts.prompt_rows import PromptRow
from .files import write_atomically

FOLDER = "prompts"
SIDE = 512
"""Longest side of a copy, in pixels."""
EXACT = 128
"""Pictures up to this size keep their exact pixels."""


class PromptPictures:
    """Writes the pictures of prompts as WebP, each once, named by the content of its file.

    A gallery then shows them, also on another machine and after the files of the prompts are gone.

    Args:
        samples: the folder of the samples of a run.
    """

    def __init__(self, samples: Path) -> None:
        self.samples = samples
        self._names: dict[Path, str] = {}

    def of(self, row: PromptRow) -> list[str]:
        """The copies of the pictures of a prompt, by their paths within the folder of samples, in their order.

        Raises:
            ValueError: a picture can no longer be read.
            OSError: a copy cannot be written.
        """
        return [self._copy(picture) for picture in (*row.shown, *row.conditions.values(), *filter(None, [row.target]))]

    def _copy(self, picture: Picture) -> str:
        if picture.path not in self._names:
            name = f"{FOLDER}/{picture.digest()[:24]}.webp"
            if not (self.samples / name).is_file():
                _write(self.samples / name, picture.read())
            self._names[picture.path] = name
        return self._names[picture.path]


def _write(path: Path, image: Image.Image) -> None:
    exact = max(image.size) <= EXACT
    image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, lambda file: image.save(file, "WEBP", lossless=exact, quality=90))
