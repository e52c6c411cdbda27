"""Images that rewards made of completions, saved beside the samples of a run or an evaluation."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from .run_folder import pixels, sample_fields, save_image

Rendered = Mapping[str, Sequence[Sequence[Tensor] | None]]
"""As `RewardBatch.rendered`."""


def write_rendered(root: Path, stem: str, rendered: Rendered, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Write the images of some samples as PNG; returns the field `rendered` of each, or nothing if it has none.

    Equal images are written once: several rewards may share them, and completions may be equal.

    Args:
        root: the folder that the paths in the fields start from.
        stem: beginning of the paths, such as `iter-000020/eval`.
        rendered: the images.
        numbers: [B] the number of each sample, for the names of its files.

    Returns:
        B dicts. `rendered` is: reward -> list of objects with the path `image`, and of a video its number of `frames`.

    Raises:
        OSError: a file cannot be written.
    """
    known: dict[tuple[tuple[int, ...], bytes], dict[str, Any]] = {}
    count = Counter[int]()

    def written(image: Tensor, number: int) -> dict[str, Any]:
        key = tuple(image.shape), hashlib.sha256(pixels(image).tobytes()).digest()
        if key not in known:
            name = f"{stem}-{number:04d}-rendered-{count[number]}.png"
            count[number] += 1
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            save_image(root / name, image)
            known[key] = sample_fields(name, image)
        return known[key]

    fields = []
    for row, number in enumerate(numbers):
        made = {label: column[row] for label, column in rendered.items()}
        own = {
            label: [written(image, number) for image in images] for label, images in made.items() if images is not None
        }
        fields.append({"rendered": own} if own else {})
    return fields
