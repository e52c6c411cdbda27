"""Picture files that are given to pipelines."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
A_FILE = f"the path of a file that ends with {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}"
_ORIENTATION = 0x0112
_ADDRESS = re.compile(r"(?:^|/)(https?|ftp|s3|gs|hf|file):/+(.*)", re.DOTALL)
_LARGEST, _STEP = 65_535, 257
"""The largest value of 16 bits, and how many of them are one value of 8 bits."""


@dataclass(frozen=True)
class Picture:
    """A picture in a file.

    Attributes:
        path: of the file.
        place: where the path was written, for messages.
        start: where a relative path starts, for messages.
    """

    path: Path
    place: str = field(default="", compare=False)
    start: str = field(default="the working directory", compare=False)

    @cached_property
    def size(self) -> tuple[int, int]:
        """Width and height, read from the header of the file.

        Raises:
            ValueError: the file does not exist or is not a picture.
        """
        with self._opened() as image:
            # If the header of a PNG file has no EXIF, getexif() decodes the whole file.
            turned = "exif" in image.info and image.getexif().get(_ORIENTATION, 1) >= 5
            return (image.height, image.width) if turned else image.size

    def read(self) -> Image.Image:
        """The picture in RGB, turned as the orientation in its EXIF data says.

        Raises:
            ValueError: the file does not exist, is not a picture, is damaged, or has values that are not of 8 or 16
                bits.
        """
        with self._opened() as image:
            try:
                turned = ImageOps.exif_transpose(image)
                turned.load()
            except (OSError, SyntaxError, ValueError) as error:
                raise ValueError(f"{self._named()} is damaged: {error}") from None
            return self._in_bytes(turned).convert("RGB")

    def digest(self) -> str:
        """The SHA-256 of the file, in hexadecimal digits.

        Raises:
            ValueError: the file cannot be read.
        """
        try:
            return hashlib.sha256(self.path.read_bytes()).hexdigest()
        except OSError as error:
            raise ValueError(f"{self._named()} cannot be read: {error.strerror or error}") from None

    def _in_bytes(self, image: Image.Image) -> Image.Image:
        """The picture with 8 bits a value; Pillow would cut off what is above 255."""
        if image.mode != "F" and not image.mode.startswith("I"):
            return image
        values = np.asarray(image)
        if image.mode == "F" or (values.size and not 0 <= values.min() <= values.max() <= _LARGEST):
            raise ValueError(
                f"{self._named()} has values from {values.min():g} to {values.max():g}; save it with 8 or 16 bits a "
                "value"
            )
        return Image.fromarray((values.astype(np.int64) // _STEP).astype(np.uint8))

    def _opened(self) -> Image.Image:
        try:
            return Image.open(self.path)
        except FileNotFoundError:
            if found := _ADDRESS.search(self.path.as_posix()):
                # A path has one slash where the address had two.
                address = f"{found[1]}://{found[2]}"
                raise ValueError(
                    f"{self.place}{': ' if self.place else ''}the picture {address:.80} is an address, which is not "
                    "taken; download the picture, and write the path of its file"
                ) from None
            raise ValueError(f"{self._named()} does not exist; paths start at {self.start}") from None
        except UnidentifiedImageError:
            raise ValueError(f"{self._named()} is not a picture that can be read; use PNG, JPEG or WebP") from None
        except (OSError, Image.DecompressionBombError) as error:
            raise ValueError(f"{self._named()} cannot be read: {getattr(error, 'strerror', None) or error}") from None

    def _named(self) -> str:
        return f"{self.place}: the picture {self.path}" if self.place else f"the picture {self.path}"
