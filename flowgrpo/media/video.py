"""Videos as files that browsers play: H.264 in `.mp4`, VP9 in `.webm`, by the package av; WebP and GIF by Pillow."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL import Image

RATE = 16.0
"""Frames a second where nothing else is known: Wan makes videos of this rate, HunyuanVideo of 15."""
SLOWEST, FASTEST = 0.1, 240.0
"""Smallest and largest number of frames a second."""
SHOWN = 256
"""A video whose longer side has fewer pixels is enlarged by a whole factor, at most to this size."""
ENCODERS: dict[str, tuple[str, dict[str, str]]] = {
    ".mp4": ("libx264", {"crf": "16", "preset": "medium", "movflags": "+faststart"}),
    ".webm": ("libvpx-vp9", {"crf": "24", "deadline": "good", "cpu-used": "3", "row-mt": "1"}),
}
PICTURES = {".webp": "WEBP", ".gif": "GIF"}
SUFFIXES = (*ENCODERS, *PICTURES)
_BT709 = 1  # the number of this standard in headers of videos, for primaries, transfer and matrix alike
_LIMITED = 1  # the number of the range 16 to 235, in which videos hold their colours


def can_encode() -> bool:
    """Whether `.mp4` and `.webm` can be written here."""
    return find_spec("av") is not None


def check_video(path: Path) -> None:
    """Check the name of a video before anything is made.

    Raises:
        ValueError: the suffix is none of SUFFIXES, or the file exists.
        ImportError: the suffix needs the package av, which is not there.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path} is not named as a video; name it {path.with_suffix('.mp4')}, or one of {_listed()}")
    if path.exists():
        raise ValueError(f"{path} exists; name a new file, or remove it first")
    if path.suffix.lower() in ENCODERS and not can_encode():
        raise ImportError(
            f"{path.suffix} needs the package av; install it with `pip install '.[video]'`, or name the file "
            f"{path.with_suffix('.webp')}"
        )


def check_rate(rate: float, option: str) -> None:
    """Raise ValueError if a number of frames a second, given by an option of a command, is out of range."""
    if not SLOWEST <= rate <= FASTEST:
        raise ValueError(f"{option} is {rate}; give frames a second from {SLOWEST:g} to {FASTEST:g}")


def rate_of(call: Any) -> float:
    """Frames a second that the arguments of a pipeline's call ask for (`frame_rate` or `fps`), or RATE."""
    given = [call.get(name) for name in ("frame_rate", "fps")] if isinstance(call, dict) else []
    known = [value for value in given if isinstance(value, int | float) and not isinstance(value, bool)]
    return next((float(value) for value in known if SLOWEST <= value <= FASTEST), RATE)


def frames_of(strip: Image.Image, count: int) -> list[Image.Image]:
    """The frames of a video that stand side by side in a picture.

    Raises:
        ValueError: the width of the picture cannot be divided by `count`.
    """
    width, left_over = divmod(strip.width, max(count, 1))
    if count < 1 or left_over or not width:
        raise ValueError(f"a picture of {strip.width} pixels width cannot hold {count} frames of equal width")
    return [strip.crop((at * width, 0, (at + 1) * width, strip.height)) for at in range(count)]


def write_video(path: Path, frames: Sequence[Image.Image], rate: float) -> None:
    """Write a video that repeats for ever where the format can say so.

    Args:
        path: its suffix, one of SUFFIXES, is the format.
        frames: at least one, all of one size. See `SHOWN` for small ones. In `.mp4` and `.webm`, the last row or column
            stands twice if their number is odd.
        rate: frames a second.

    Raises:
        ValueError: there is no frame, the frames differ in size, or the suffix is unknown.
        ImportError: the suffix needs the package av.
        OSError: the file cannot be written. No part of a file is left.
    """
    if not frames or any(frame.size != frames[0].size for frame in frames):
        raise ValueError(f"{path}: a video needs frames of one size, at least one; these are {_sizes(frames)}")
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{path} is not named as a video; use one of {_listed()}")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp{suffix}")
    shown = [enlarged(frame.convert("RGB")) for frame in frames]
    try:
        if suffix in ENCODERS:
            _encode(temporary, shown, rate)
        else:
            rest: dict[str, Any] = {"lossless": True} if suffix == ".webp" else {}
            shown[0].save(
                temporary, PICTURES[suffix], save_all=True, append_images=shown[1:], duration=round(1000 / rate),
                loop=0, **rest,
            )  # fmt: skip
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def enlarged(frame: Image.Image) -> Image.Image:
    """The frame, if it is small with every pixel as a square of pixels, so that its edges stay sharp everywhere."""
    factor = max(1, SHOWN // max(frame.size))
    return frame.resize((frame.width * factor, frame.height * factor), Image.Resampling.NEAREST)


def _encode(path: Path, frames: Sequence[Image.Image], rate: float) -> None:
    import av

    codec, options = ENCODERS[path.suffix]
    width, height = (side + side % 2 for side in frames[0].size)
    muxer = {key: value for key, value in options.items() if key == "movflags"}
    with av.open(str(path), "w", options=muxer) as container:
        stream: Any = container.add_stream(codec, rate=Fraction(rate).limit_denominator(1000))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.bit_rate = 0  # the quality decides, not the size
        stream.options = {key: value for key, value in options.items() if key not in muxer}
        context = stream.codec_context
        context.colorspace = context.color_primaries = context.color_trc = _BT709
        context.color_range = _LIMITED
        for frame in frames:
            picture: Any = av.VideoFrame.from_image(_even(frame, width, height))
            picture = picture.reformat(format="yuv420p", dst_colorspace="ITU709", dst_color_range="MPEG")
            container.mux(stream.encode(picture))
        container.mux(stream.encode(None))


def _even(frame: Image.Image, width: int, height: int) -> Image.Image:
    """The frame with its last column and row repeated, up to a size that is at most one pixel larger."""
    if frame.size == (width, height):
        return frame
    whole = Image.new("RGB", (width, height))
    for left, top in ((1, 1), (1, 0), (0, 1), (0, 0)):
        whole.paste(frame, (left * (width - frame.width), top * (height - frame.height)))
    return whole


def _sizes(frames: Sequence[Image.Image]) -> str:
    return ", ".join(sorted({f"{frame.width} × {frame.height}" for frame in frames})) or "none"


def _listed() -> str:
    return re.sub(r", (\S+)$", r" or \1", ", ".join(SUFFIXES))
