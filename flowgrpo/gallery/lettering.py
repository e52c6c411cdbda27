"""A font for a text in any script. Pillow brings one font, and it has Latin letters only."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from PIL import ImageFont

_LOG = logging.getLogger(__name__)
MOST = 2000
"""Largest number of font files that are looked into; a look takes about a millisecond."""


def font_for(text: str, size: int, folders: Sequence[Path] | None = None) -> Any:
    """Pillow's own font if it has all letters of a text, else the installed font that lacks the fewest of them.

    Args:
        text: what is to be drawn.
        size: height of the letters in pixels.
        folders: where to look for fonts; by default where the system and matplotlib keep theirs.
    """
    own = ImageFont.load_default(size)
    letters = _letters(text)
    if not (lacking := _lacking(own, letters)):
        return own
    best, least = own, len(lacking)
    for file in _files(tuple(font_folders() if folders is None else folders)):
        try:
            font = ImageFont.truetype(str(file), size)
            found = len(_lacking(font, letters))
        except (OSError, ValueError):
            # A font of one bitmap size, or no font at all.
            continue
        if found < least:
            best, least = font, found
        if not least:
            break
    return best


def note_on(texts: Iterable[str]) -> None:
    """Log a note if some letters of the texts are in no font of this machine, and so are drawn as boxes."""
    lacking: set[str] = set()
    for text in texts:
        lacking |= _lacking(font_for(text, 12), _letters(text))
    if lacking:
        _LOG.warning(
            "no font of this machine has %s%s, so a box is drawn for each; install a font for this script, such as "
            "Noto Sans. The package matplotlib brings a font with Latin, Greek, Cyrillic, Hebrew and Arabic letters",
            " ".join(sorted(lacking)[:8]),
            " and others" if len(lacking) > 8 else "",
        )


def font_folders() -> list[Path]:
    """Folders with fonts, of the user and of the system, and matplotlib's if it is installed."""
    home = Path.home()
    if sys.platform == "win32":
        found = [Path(os.environ.get("WINDIR", "C:/Windows")) / "Fonts", home / "AppData/Local/Microsoft/Windows/Fonts"]
    elif sys.platform == "darwin":
        found = [home / "Library/Fonts", Path("/Library/Fonts"), Path("/System/Library/Fonts")]
    else:
        shared = os.environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share"
        found = [home / ".fonts", home / ".local/share/fonts", *(Path(one) / "fonts" for one in shared.split(":"))]
    spec = importlib.util.find_spec("matplotlib")
    if spec is not None and spec.origin:
        found.append(Path(spec.origin).parent / "mpl-data/fonts/ttf")
    return [folder for folder in found if folder.is_dir()]


@cache
def _files(folders: tuple[Path, ...]) -> tuple[Path, ...]:
    """The font files of some folders: upright fonts without serifs first."""
    found = [file for folder in folders for file in _below(folder)]
    return tuple(sorted(found[:MOST], key=_rank))


def _below(folder: Path) -> Iterator[Path]:
    for place, _, names in os.walk(folder):
        yield from (Path(place) / name for name in sorted(names) if _is_font(name))


def _is_font(name: str) -> bool:
    # A font of last resort has a box of its own for every script, so it seems to have all letters.
    return name.lower().endswith((".ttf", ".otf", ".ttc")) and not name.lower().startswith("lastresort")


def _rank(file: Path) -> tuple[bool, bool, str]:
    name = file.stem.lower()
    return (
        any(word in name for word in ("bold", "italic", "oblique", "black", "light", "mono")),
        "sans" not in name,
        name,
    )


def _letters(text: str) -> frozenset[str]:
    return frozenset(letter for letter in text if letter.isprintable() and not letter.isspace())


def _lacking(font: Any, letters: frozenset[str]) -> set[str]:
    """The letters that a font does not have: it draws them all as the same box."""
    box = bytes(font.getmask("\U0010ffff"))
    return {letter for letter in letters if bytes(font.getmask(letter)) == box}
