"""Pictures in files, as pipelines are given them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
_ORIENTATION = 0x0112


@dataclass(frozen=True)
class Picture:
    """A picture in a file.

    Attributes:
        path: of the file.
        place: where it was named, for messages.
    """

    path: Path
    place: str = field(default="", compare=False)

    @cached_property
    def size(self) -> tuple[int, int]:
        """Width and height, from the head of the file.

        Raises:
            ValueError: there is no such file, or it is no picture.
        """
        with self._opened() as image:
            # Asked for EXIF that is not in its head, PNG decodes all of the file.
            turned = "exif" in image.info and image.getexif().get(_ORIENTATION, 1) >= 5
            return (image.height, image.width) if turned else image.size

    def read(self) -> Image.Image:
        """The picture in RGB, turned as its camera says.

        Raises:
            ValueError: there is no such file, it is no picture, or it is damaged.
        """
        with self._opened() as image:
            try:
                return ImageOps.exif_transpose(image).convert("RGB")
            except (OSError, SyntaxError, ValueError) as error:
                raise ValueError(f"{self._named()} is damaged: {error}") from None

    def _opened(self) -> Image.Image:
        try:
            return Image.open(self.path)
        except FileNotFoundError:
            raise ValueError(f"{self._named()} does not exist; paths start at the folder of the prompt file") from None
        except UnidentifiedImageError:
            raise ValueError(f"{self._named()} is no picture that can be read; use PNG, JPEG or WebP") from None
        except (OSError, Image.DecompressionBombError) as error:
            raise ValueError(f"{self._named()} cannot be read: {getattr(error, 'strerror', None) or error}") from None

    def _named(self) -> str:
        return f"{self.place}: the picture {self.path}" if self.place else f"the picture {self.path}"
