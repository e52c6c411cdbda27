"""Videos of samples, beside the pictures with their frames side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from ..media.video import check_rate, check_video, rate_of, write_video
from ..training.folder.run_folder import pixels


class Animation:
    """The videos of a call of `flowgrpo sample`: one file for a sample, or a file for each of several samples.

    Args:
        path: for several samples, the name of each picture is added, as in `a-000-0.mp4`.
        pictures: the PNG files of the samples.
        rate: frames a second, or None for the rate of the pipeline's call.

    Raises:
        ValueError: a suffix is unknown, a file exists, or the rate is out of range.
        ImportError: the format needs a package that is not there.
    """

    def __init__(self, path: Path, pictures: Sequence[Path], rate: float | None = None) -> None:
        several = len(pictures) > 1
        self.files = [path.with_name(f"{path.stem}-{one.stem}{path.suffix}") if several else path for one in pictures]
        self.rate = rate
        if rate is not None:
            check_rate(rate, "--fps")
        for file in self.files:
            check_video(file)

    def write(self, samples: Mapping[int, Tensor], call: dict[str, Any], say: Callable[[str], None]) -> None:
        """Write the videos of some samples.

        Args:
            samples: number of a sample -> [F, 3, H, W] in [0, 1].
            call: arguments of the pipeline's call.
            say: called with the name of each file.

        Raises:
            ValueError: a sample is an image.
        """
        for number, sample in sorted(samples.items()):
            file = self.files[number]
            if sample.ndim != 4:
                raise ValueError(
                    "the model makes pictures that do not move, so there is no video of them; the pictures are "
                    "written, and --animation can be left out"
                )
            file.parent.mkdir(parents=True, exist_ok=True)
            frames = [Image.fromarray(pixels(frame)) for frame in torch.as_tensor(sample)]
            write_video(file, frames, self.rate or rate_of(call))
            say(f"video {file}")
