"""The columns of a row of pairs that say what was asked: the prompt, its pictures and its size.

Pairs by scores and pairs by votes are one format, so both are written with this.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..votes.lines import IMAGE_SUFFIXES
from .page_files import copy_by_content

SIDES = ("height", "width")
"""Columns that a recipe reads by these names, as it does `image`."""
PICTURES = IMAGE_SUFFIXES | {".bmp", ".tif", ".tiff"}
"""Endings of pictures of prompts. Pages show the last three by their copies only."""
_DIGITS = 24  # of the content's hash, in the name of a run's copy of a picture
FROM_HERE = "call the command from the folder in which the samples were made, where the paths of pictures start"


class PromptColumns:
    """Writes what was asked into rows, with copies of the pictures.

    Args:
        place: the folder of the rows.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._small: set[Path] = set()
        self._unknown: set[Path] = set()

    def of(
        self, prompt: str, messages: Sequence[dict[str, str]], values: Mapping[str, Any], copies: Sequence[Path]
    ) -> dict[str, Any]:
        """Return `prompt`, a conversation if it was one; and `image`, `height` and `width`, where the prompt has them.

        Args:
            prompt: the prompt, or the message of a conversation that was answered.
            messages: the conversation; empty for a plain prompt.
            values: the other columns of the prompt file.
            copies: the copies of the prompt's pictures that a run keeps beside its samples.

        Raises:
            ValueError: a picture of the prompt is missing.
        """
        row: dict[str, Any] = {"prompt": list(messages) or prompt}
        if pictures := self._pictures(prompt, values.get("image"), copies):
            paths = [copy_by_content(picture, digest_of(picture), self._place) for picture in pictures]
            row["image"] = paths if isinstance(values.get("image"), list) or len(paths) > 1 else paths[0]
        return row | {side: values[side] for side in SIDES if side in values}

    def notes(self) -> list[str]:
        """Lines on the pictures that may not be the files that the prompts name."""
        found = []
        if self._small:
            found.append(
                f"{len(self._small)} pictures of prompts were taken from the copies of the run, of at most 512 pixels, "
                f"because their files are not where the prompts name them, or have changed; {FROM_HERE}"
            )
        if self._unknown:
            found.append(
                f"{len(self._unknown)} pictures of prompts are the files that the prompts name now; the run has no "
                "copies that would show whether they have changed"
            )
        return found

    def _pictures(self, prompt: str, named: Any, copies: Sequence[Path]) -> list[Path]:
        """The files of the pictures: those that the column names, if they are the run's; else the run's copies."""
        files = [Path(str(one)) for one in (named if isinstance(named, list) else [named]) if one]
        if copies and len(files) in (0, len(copies)):
            where: list[Path | None] = [*files] or [None] * len(copies)
            return [self._one(prompt, file, copy) for file, copy in zip(where, copies)]
        if not copies and not all(file.suffix.lower() in PICTURES for file in files):
            return []  # a column of this name that holds something else, and stays among the others
        if missing := [file for file in files if not file.is_file()]:
            raise ValueError(f"the picture {missing[0]} of the prompt {prompt!r:.80} is missing; {FROM_HERE}")
        self._unknown |= {*files}
        return files

    def _one(self, prompt: str, file: Path | None, copy: Path) -> Path:
        # Paths start where the run was started. From another folder they may lead to nothing, or to another picture.
        if file is not None and file.is_file() and digest_of(file)[:_DIGITS] == copy.stem:
            return file
        if not copy.is_file():
            raise ValueError(f"the picture {file or copy} of the prompt {prompt!r:.80} is missing; {FROM_HERE}")
        self._small.add(copy)
        return copy


def digest_of(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    return hashlib.sha256(file.read_bytes()).hexdigest()
