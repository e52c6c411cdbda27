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
FURTHER = (
    "mask_image", "control_image", "control_mask", "last_image", "image_reference", "reference_image", "target_image",
)  # fmt: skip
"""Columns of further pictures for the pipeline or for rewards, which a recipe reads by these names."""
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
        """Return `prompt`, a conversation if it was one; and `image`, the columns of further pictures, `height` and
        `width`, where the prompt has them.

        Args:
            prompt: the prompt, or the message of a conversation that was answered.
            messages: the conversation; empty for a plain prompt.
            values: the other columns of the prompt file.
            copies: the copies of the prompt's pictures that a run keeps beside its samples: first those of `image`,
                then the further ones in the order of `FURTHER`.

        Raises:
            ValueError: a picture of the prompt is missing.
        """
        row: dict[str, Any] = {"prompt": list(messages) or prompt}
        further = _further(values, copies)
        parts = {"image": copies[: len(copies) - len(further)] if copies else copies, **further}
        for name, own in parts.items():
            if pictures := self._pictures(prompt, values.get(name), own):
                paths = [copy_by_content(picture, digest_of(picture), self._place) for picture in pictures]
                row[name] = paths if isinstance(values.get(name), list) or len(paths) > 1 else paths[0]
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
        files = _files(named)
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


def _files(named: Any) -> list[Path]:
    return [Path(str(one)) for one in (named if isinstance(named, list) else [named]) if one]


def _further(values: Mapping[str, Any], copies: Sequence[Path]) -> dict[str, Sequence[Path]]:
    """The columns of further pictures that the pipeline was given, with the copy of each."""
    named = {name: Path(value) for name in FURTHER if isinstance(value := values.get(name), str) and value}
    if not copies:
        return dict.fromkeys(named, ())
    if len(_files(values.get("image"))) + len(named) == len(copies):
        return {name: [copy] for name, copy in zip(named, copies[len(copies) - len(named) :])}
    # The pipeline was not given all of these columns. Rewards may read the others.
    found = {name: digest_of(file)[:_DIGITS] for name, file in named.items() if file.is_file()}
    kept = {copy.stem: copy for copy in copies}
    return {name: [kept[digest]] for name, digest in found.items() if digest in kept}


def digest_of(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    return hashlib.sha256(file.read_bytes()).hexdigest()
