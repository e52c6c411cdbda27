"""Small copies of images, each written once and named by the content of its image."""

import base64
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from ..intake.json_text import parse_json
from ..media.video import frames_of
from .page_files import NO_ROOM, write_bytes, write_whole

CACHE = ".flowgrpo-thumbnails.json"
SIDE = 256  # pixels
LONGEST = 1024  # longest side of a strip in pixels; a strip is, for example, the frames of a video side by side
EXACT = 128  # images up to this size keep their exact pixels
COLOURS = 8  # images are compared by their mean colours in this many rows and columns
_FORMAT = "thumb-2"  # part of every name: change it when the same image would make another thumbnail


@dataclass(frozen=True)
class Thumbnail:
    """A thumbnail, and facts about its image. The thumbnail of a video shows the first frame."""

    name: str  # digest of the image: the file is `thumbs/NN/NNNN….webp`
    width: int  # of the image
    height: int
    colours: bytes  # COLOURS² RGB means of the image, row by row

    @property
    def file(self) -> str:
        """Its path within the gallery."""
        return f"thumbs/{self.name[:2]}/{self.name[2:]}.webp"


class Thumbnails:
    """The thumbnails in a gallery folder.

    The content of an image decides the name of its thumbnail. So equal images share a thumbnail, a moved or copied
    image needs no new thumbnail, and a changed image gets a new one. An image whose file size and time did not change
    is not read again.

    Args:
        out: the gallery folder.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        seen, known = _read_cache(out / CACHE)
        self._seen: dict[str, list[Any]] = seen  # path digest -> size, time, name
        self._known: dict[str, Thumbnail] = known  # by name
        self._fresh: dict[str, list[Any]] = {}

    def make(self, images: Iterable[Path], frames: Mapping[Path, int] | None = None) -> dict[Path, Thumbnail | None]:
        """Thumbnails of images that exist; None for a file that is no readable image.

        Args:
            images: paths.
            frames: for the images that are videos, how many frames stand side by side.

        Raises:
            OSError: the disk has no room for a thumbnail.
        """
        paths = list(dict.fromkeys(images))
        counts = [(frames or {}).get(path, 1) for path in paths]
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            return dict(zip(paths, pool.map(self._make, paths, counts)))

    def save(self) -> None:
        """Save what is known of the images of this build, for the next build."""
        names = sorted({entry[2] for entry in self._fresh.values()})
        known = {
            name: [found.width, found.height, base64.b64encode(found.colours).decode()]
            for name, found in ((name, self._known[name]) for name in names)
        }
        text = json.dumps(
            {"format": _FORMAT, "seen": dict(sorted(self._fresh.items())), "known": known}, separators=(",", ":")
        )
        write_bytes(self.out / CACHE, text.encode())

    def _make(self, path: Path, frames: int) -> Thumbnail | None:
        kind = _FORMAT if frames == 1 else f"{_FORMAT}, {frames} frames"
        try:
            stat = path.stat()
            key = os.fsencode(path.resolve()) + (b"" if frames == 1 else f" {frames}".encode())
            place = hashlib.sha256(key).hexdigest()[:16]
            entry = self._seen.get(place)
            if entry and entry[:2] == [stat.st_size, stat.st_mtime_ns] and entry[2] in self._known:
                name = entry[2]
            else:
                name = hashlib.sha256(kind.encode() + path.read_bytes()).hexdigest()[:24]
            thumbnail = self._from_cache(name) or self._draw(path, name, frames)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                raise
            return None
        self._fresh[place] = [stat.st_size, stat.st_mtime_ns, name]
        return thumbnail

    def _from_cache(self, name: str) -> Thumbnail | None:
        known = self._known.get(name)
        return known if known and (self.out / known.file).is_file() else None

    def _draw(self, path: Path, name: str, frames: int) -> Thumbnail:
        with Image.open(path) as opened:
            width, height = opened.size
            image = ImageOps.exif_transpose(opened)
            image = image.convert("RGBA" if image.has_transparency_data else "RGB")
        shown = image if frames == 1 or width % frames else frames_of(image, frames)[0]
        small = shown.resize(small_size(*shown.size), Image.Resampling.LANCZOS, reducing_gap=2.0)
        colours = image.convert("RGB").resize((COLOURS, COLOURS), Image.Resampling.BOX).tobytes()
        thumbnail = Thumbnail(name, width, height, colours)
        exact = max(shown.size) <= EXACT
        options: dict[str, Any] = {"lossless": True, "method": 2} if exact else {"quality": 82, "method": 2}
        if not (self.out / thumbnail.file).is_file():
            write_whole(self.out / thumbnail.file, lambda file: small.save(file, "WEBP", **options))
        self._known[name] = thumbnail
        return thumbnail


def small_size(width: int, height: int) -> tuple[int, int]:
    """Size of a thumbnail: within a square of SIDE; for a strip, up to SIDE / 2 high and up to LONGEST wide."""
    shorter, longer = sorted((width, height))
    scale = min(1.0, max(SIDE / longer, min(SIDE / 2 / shorter, LONGEST / longer)))
    return max(1, round(width * scale)), max(1, round(height * scale))


def _read_cache(path: Path) -> tuple[dict[str, list[Any]], dict[str, Thumbnail]]:
    """The cache of the last build; empty if the file is missing, damaged, or of another format."""
    try:
        cache = parse_json(path.read_text(encoding="utf-8"))
        if cache["format"] != _FORMAT:
            return {}, {}
        known = {
            name: Thumbnail(name, int(width), int(height), base64.b64decode(colours))
            for name, (width, height, colours) in cache["known"].items()
        }
        seen = {place: [size, time, str(name)] for place, (size, time, name) in cache["seen"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}, {}
    return seen, known
