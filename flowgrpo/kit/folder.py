"""A folder of pictures with prompts: from a metadata file, the index of a run, or the file names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from ..rewards.pixels import check_cut, check_depth, load_frames, load_picture
from ..training.data import PromptRow, read_prompts
from .material import Material, groups_of

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
METADATA = ("metadata.jsonl", "metadata.csv", "index.jsonl")
FILE_KEYS = ("file_name", "file", "image", "path")
VIDEOS = (".mp4", ".webm", ".mov", ".mkv", ".avi", ".m4v")
MOVING = ("GIF", "WEBP", "PNG")
"""Formats of pictures that may hold a whole video, as Pillow names them."""
AS_STRIP = (
    "save the frames of a video side by side in one picture, and give their number in a column `frames` of the list "
    "that names the picture (docs/reward_kit.md, Videos)"
)


@dataclass(frozen=True)
class LabelledPicture:
    """A file, its prompt and columns, its size as (height, width) in pixels, and whether parts are transparent.

    The `frames` of a video stand side by side in the file; `size` is the size of a frame.
    """

    path: Path
    prompt: str
    columns: dict[str, Any]
    size: tuple[int, int]
    transparent: bool
    frames: int = 1


def read_folder(folder: Path, metadata: Path | None = None) -> list[LabelledPicture]:
    """All pictures of a folder and of the folders in it, sorted by name; only the headers of the files are read.

    Names that begin with a dot are left out: other systems and programs keep files of their own under them.

    The prompts come from `metadata`, or else from `metadata.jsonl`, `metadata.csv` or `index.jsonl` in the folder. This
    is a prompt file with a column `file_name` (or `file`, `image`, `path`): a path relative to the prompt file. Where a
    column `frames` is 2 or more, the file is a video. The other columns go to the rewards. If there is no such file, a
    picture's file name is its prompt: `a_red_circle-3.png` is "a red circle".

    Raises:
        ValueError: the folder does not exist or holds no picture; the metadata names a file that does not exist; a
            file is no picture, has more than 8 bits for each colour, or cannot be cut into its frames.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give one with pictures ({', '.join(ENDINGS)})")
    if metadata is None:
        metadata = next((folder / name for name in METADATA if (folder / name).is_file()), None)
    if metadata is not None:
        return _listed(metadata)
    shown = [path for path in sorted(folder.rglob("*")) if not hidden(path.relative_to(folder))]
    paths = [path for path in shown if path.suffix.lower() in ENDINGS and path.is_file()]
    if not paths:
        video = next((path for path in shown if path.suffix.lower() in VIDEOS), None)
        instead = "" if video is None else f"; {video} is a video: {AS_STRIP}"
        raise ValueError(f"{folder} holds no picture ({', '.join(ENDINGS)}){instead}")
    return [picture_of(path, prompt_of(path), {}) for path in paths]


def hidden(path: Path) -> bool:
    """Whether a name in a relative path begins with a dot."""
    return any(part.startswith(".") for part in path.parts)


def prompt_of(path: Path) -> str:
    """A file's name as a prompt: without ending and number, `_` and `-` as spaces."""
    words = re.sub(r"[_\-\s]+", " ", path.stem).strip()
    return re.sub(r"(\s*\(?\d+\)?)+$", "", words) or words


def chosen(pictures: list[LabelledPicture], most: int) -> list[LabelledPicture]:
    """At most `most` pictures: evenly spaced prompts, each with all of its pictures, so that groups stay together."""
    if len(pictures) <= most:
        return pictures
    members: dict[str, list[LabelledPicture]] = {}
    for picture in pictures:
        members.setdefault(picture.prompt, []).append(picture)
    each = len(pictures) / len(members)
    wanted = max(1, min(len(members), round(most / each)))
    prompts = list(members)
    some = [prompts[k * len(prompts) // wanted] for k in range(wanted)]
    return [picture for prompt in some for picture in members[prompt]][:most]


def materials(pictures: list[LabelledPicture], most: int = 64) -> Iterator[Material]:
    """The pictures as material, in parts of about `most` pictures of one size and length; a prompt is not divided.

    Parts of the most frequent size come first.
    """
    by_size: dict[tuple[int, int, int], list[LabelledPicture]] = {}
    for picture in pictures:
        by_size.setdefault((*picture.size, picture.frames), []).append(picture)
    for (height, width, frames), same in sorted(by_size.items(), key=lambda item: -len(item[1])):
        ids, how = groups_of([picture.prompt for picture in same])
        rows = sorted(range(len(same)), key=lambda row: ids[row])
        start = 0
        while start < len(rows):
            end = min(start + most, len(rows))
            while how.endswith("prompts") and end < len(rows) and ids[rows[end]] == ids[rows[end - 1]]:
                end += 1
            part = [same[row] for row in rows[start:end]]
            names = dict.fromkeys(name for picture in part for name in picture.columns)
            yield Material(
                torch.stack([load(picture) for picture in part]),
                [picture.prompt for picture in part],
                {name: [picture.columns.get(name) for picture in part] for name in names},
                [ids[row] for row in rows[start:end]],
                [str(picture.path) for picture in part],
                f"{len(part)} {'pictures' if frames == 1 else f'videos of {frames} frames'} of {width}×{height}, {how}",
            )
            start = end


def _listed(metadata: Path) -> list[LabelledPicture]:
    return [listed_picture(metadata, row) for row in read_prompts(str(metadata))]


def listed_picture(metadata: Path, row: PromptRow) -> LabelledPicture:
    """The picture that a row of a prompt file names.

    Raises:
        ValueError: the row names no file, there is no such file, or it is no picture; or the number of its frames is
            wrong.
    """
    key = file_key(row.columns)
    if key is None:
        raise ValueError(
            f"{metadata}: prompt {row.id + 1} names no file; give a column `file_name` (it has "
            f"{', '.join(['prompt', *row.columns])})"
        )
    path = metadata.parent / row.columns[key]
    if not path.is_file():
        raise ValueError(f"{metadata}: prompt {row.id + 1}: there is no file {path}")
    try:
        return picture_of(path, row.text, inner_columns(row, key), _frames_in(row))
    except ValueError as error:
        raise ValueError(f"{row.place or metadata}: {error}") from None


def file_key(columns: Mapping[str, Any]) -> str | None:
    """The column that names the file of a sample; None if there is none."""
    return next((key for key in FILE_KEYS if isinstance(columns.get(key), str)), None)


def _frames_in(row: PromptRow) -> int:
    given = row.columns.get("frames")
    if given is None or given == "":
        return 1
    # A table without types, such as CSV, has numbers as text.
    frames = int(given) if isinstance(given, str) and given.isdecimal() else given
    if type(frames) is not int or frames < 1:
        raise ValueError(
            f"`frames` is {given!r}; write how many frames of a video stand side by side in the picture, or give the "
            "column another name if it means something else"
        )
    return frames


def inner_columns(row: PromptRow, sample: str) -> dict[str, Any]:
    """The columns of a row that rewards get, without the column `sample`.

    The index of a run keeps the columns of the prompt file under one key.
    """
    inner = row.columns.get("columns")
    return dict(inner) if isinstance(inner, dict) else {k: v for k, v in row.columns.items() if k != sample}


def load(picture: LabelledPicture) -> Tensor:
    """The picture [3, H, W], or the video [F, 3, H, W], in [0, 1]."""
    return load_picture(picture.path) if picture.frames == 1 else load_frames(picture.path, picture.frames)


def picture_of(path: Path, prompt: str, columns: dict[str, Any], frames: int = 1) -> LabelledPicture:
    """A file as a picture to score, or as a video whose frames stand side by side.

    Raises:
        ValueError: the file is not a picture, moves, has more than 8 bits for each colour, or cannot be cut into its
            frames.
    """
    try:
        with Image.open(path) as image:
            check_depth(path, image)
            # Two pictures in a .jpg of a phone, or pages of a .tiff, are no video: their first picture is scored.
            if image.format in MOVING and getattr(image, "n_frames", 1) > 1:
                raise ValueError(f"{path} is a video of {image.n_frames} frames; {AS_STRIP}")
            turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
            width, height = reversed(image.size) if turned else image.size
            check_cut(path, width, frames)
            return LabelledPicture(
                path, prompt, columns, (height, width // frames), image.has_transparency_data, frames
            )
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        if path.suffix.lower() in VIDEOS:
            raise ValueError(f"{path} is a video; {AS_STRIP}") from None
        raise ValueError(f"{path} is not a picture: {error}") from None
