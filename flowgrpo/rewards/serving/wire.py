"""The format of the requests and replies between the reward `remote` and a server. Nothing in them can be executed.

A request is

    8 bytes   length of the header, big-endian
    header    JSON: {"version", "serves", "prompts", "columns", "groups", "samples"}
    payload   the images, one after another

where `samples` says what the payload is:

    {"kind": "completions", "texts": [...]}                                    no payload
    {"kind": "images", "encoding": "float32", "shape": [B, 3, H, W]}           little-endian, bit for bit
    {"kind": "images", "encoding": "uint8", "shape": [B, 3, H, W]}             round(255 · value)
    {"kind": "images", "encoding": "png", "shape": ..., "sizes": [...]}        one file for each frame, rounded likewise

Videos have the shape [B, F, 3, H, W]. The header may end with spaces, so that the payload begins at a multiple of 8
bytes. A reply is JSON. Its numbers are exactly the float32 scores. If the reward has made images of completions, the
reply names these completions. It does not hold the images, which would be larger than everything else.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..base import Scores
from ..inputs import Inputs
from ..pixels import to_bytes
from .budget import pages

VERSION = 1
CONTENT_TYPE = "application/x-flowgrpo"
ENCODINGS = ("float32", "uint8", "png")
PREFIX_BYTES = 8
# What JSON takes when it is read. A character may become 4 bytes, and there are two copies beside the text itself.
# Every object has a bracket, a comma or a colon, and takes at most as many bytes as here.
BYTES_OF_CHARACTER, BYTES_OF_OBJECT = 8, 128
# A frame of a PNG file is unpacked to 4 bytes a pixel, and copied to 3.
BYTES_OF_PIXEL = 7
_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class WireLimits:
    """What a server accepts in one request.

    Attributes:
        most_bytes: largest number of bytes of a whole request, and of its images when they are unpacked: 4 bytes for
            each of the 3 values of a pixel.
        most_samples: largest number of images, videos or completions.
        most_frames: largest number of frames of a video.
        most_side: largest height and largest width, in pixels.
    """

    most_bytes: int = 512 << 20
    most_samples: int = 4096
    most_frames: int = 1024
    most_side: int = 8192

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{limit.name} is {value!r}; give a whole number of 1 or more")


def pack(inputs: Inputs, serves: str, encoding: str = "float32") -> bytes:
    """Return a request as bytes.

    Args:
        inputs: B samples with their prompts, columns and group ids; images in [0, 1].
        serves: fingerprint of the declaration that the server is expected to have.
        encoding: how images are encoded, see above.

    Raises:
        ValueError: a column contains something that JSON cannot represent.
    """
    for name, column in inputs.columns.items():
        for row, value in enumerate(column):
            if not _is_plain(value):
                raise ValueError(
                    f"the column {name!r} has a {type(value).__name__} in row {row} ({value!r:.60}), which cannot be "
                    "sent; use texts, numbers, true, false, null, and lists and objects of these"
                )
    samples, payload = _pack_samples(inputs.samples, encoding)
    header = {
        "version": VERSION, "serves": serves, "prompts": inputs.prompts, "columns": inputs.columns,
        "groups": inputs.groups, "samples": samples,
    }  # fmt: skip
    text = json.dumps(header).encode()
    # The server can use a payload in place if its numbers are at addresses that its processor can read.
    text += b" " * (-len(text) % PREFIX_BYTES)
    return b"".join([len(text).to_bytes(PREFIX_BYTES, "big"), text, *payload])


def unpack(
    body: bytes | bytearray | memoryview, limits: WireLimits, take: Callable[[int], object] = lambda size: None
) -> tuple[Inputs, str]:
    """Return the samples of a request, and the fingerprint that the request expects.

    Args:
        body: the request. The images may be a view of it.
        limits: what is accepted.
        take: function that is called with a number of bytes before they are allocated. It raises if they must not be.

    Raises:
        ValueError: the request is malformed or exceeds a limit; the message says which.
    """
    length = int.from_bytes(body[:PREFIX_BYTES], "big")
    if len(body) < PREFIX_BYTES or length > len(body) - PREFIX_BYTES:
        raise ValueError(f"the header should have {length} bytes, but the whole request has {len(body)}")
    take(length)
    text = bytes(memoryview(body)[PREFIX_BYTES : PREFIX_BYTES + length])
    take(_read_bytes(text))
    header = _read_json(text)
    payload = memoryview(body)[PREFIX_BYTES + length :]
    if header.get("version") != VERSION:
        raise ValueError(f"the request is of version {header.get('version')!r}; this server reads version {VERSION}")
    prompts = _texts(header.get("prompts"), "prompts")
    if len(prompts) > limits.most_samples:
        raise ValueError(f"{len(prompts)} samples are more than {limits.most_samples}; send fewer at a time")
    columns, groups = header.get("columns"), header.get("groups")
    if not isinstance(columns, dict) or not all(isinstance(column, list) for column in columns.values()):
        raise ValueError("`columns` is not an object of lists")
    if groups is not None and not (isinstance(groups, list) and all(type(group) is int for group in groups)):
        raise ValueError("`groups` is neither null nor a list of integers")
    samples = _unpack_samples(header.get("samples"), payload, limits, take)
    return Inputs(samples, prompts, columns, groups), str(header.get("serves"))


def pack_scores(scores: Scores) -> bytes:
    """Return a reply with the scores of B samples; NaN becomes null."""
    reply = {
        "values": _numbers(scores.values),
        "sub_scores": {name: _numbers(column) for name, column in scores.sub_scores.items()},
        "notes": list(scores.notes),
        "answers": list(scores.answers),
        "parts": [None if own is None else _numbers(own) for own in scores.parts],
        "rendered": {name: [made is not None for made in column] for name, column in scores.rendered.items()},
    }
    return json.dumps(reply, allow_nan=False).encode()


def unpack_scores(body: bytes) -> Scores:
    """Return the scores in a reply, not yet checked.

    Raises:
        ValueError: the reply is not a reply with scores.
    """
    reply = _read_json(body)
    if not (isinstance(reply.get("sub_scores"), dict) and isinstance(reply.get("notes"), list)):
        raise ValueError("the reply is not from a server of rewards")
    return Scores(
        reply.get("values"), reply["sub_scores"], reply["notes"], answers=reply.get("answers", ()),
        parts=reply.get("parts", ()), rendered=_made(reply.get("rendered", {})),
    )  # fmt: skip


def _made(given: Any) -> dict[str, list[list[Tensor] | None]]:
    if not isinstance(given, dict) or not all(isinstance(column, list) for column in given.values()):
        raise ValueError("the reply is not from a server of rewards")
    return {name: [[] if made else None for made in column] for name, column in given.items()}


def sample_bytes(samples: Tensor | list[str]) -> int:
    """Return the largest number of bytes that one sample takes in a request, without its prompt and columns."""
    if isinstance(samples, Tensor):
        return math.prod(samples.shape[1:]) * 4
    return max((len(json.dumps(text)) for text in samples), default=0)


def limits_as_json(limits: WireLimits) -> dict[str, int]:
    """Return the limits as JSON, for the server to send."""
    return asdict(limits)


def _pack_samples(samples: Tensor | list[str], encoding: str) -> tuple[dict[str, Any], list[bytes]]:
    if not isinstance(samples, Tensor):
        return {"kind": "completions", "texts": samples}, []
    about: dict[str, Any] = {"kind": "images", "encoding": encoding, "shape": list(samples.shape)}
    if encoding == "float32":
        return about, [samples.detach().float().cpu().contiguous().numpy().astype("<f4", copy=False).tobytes()]
    pixels = to_bytes(samples.detach()).cpu().contiguous()
    if encoding == "uint8":
        return about, [pixels.numpy().tobytes()]
    files = [png(frame) for frame in pixels.flatten(0, -4)]
    return {**about, "sizes": [len(file) for file in files]}, files


def png(pixels: Tensor) -> bytes:
    """Return an image [3, H, W] of uint8 as a PNG file."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels.movedim(0, -1).numpy())).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def _unpack_samples(
    about: Any, payload: memoryview, limits: WireLimits, take: Callable[[int], object]
) -> Tensor | list[str]:
    if not isinstance(about, dict) or about.get("kind") not in ("images", "completions"):
        raise ValueError("`samples` must have the kind images or completions")
    if about["kind"] == "completions":
        if len(payload):
            raise ValueError(f"{len(payload)} bytes follow the completions; they have no payload")
        return _texts(about.get("texts"), "texts")
    shape, encoding = _shape(about.get("shape"), limits), about.get("encoding")
    if encoding not in ENCODINGS:
        raise ValueError(f"the encoding is {encoding!r}; send one of {', '.join(ENCODINGS)}")
    if encoding == "png":
        return _unpack_files(about.get("sizes"), payload, shape, take)
    dtype = np.dtype("<f4" if encoding == "float32" else "u1")
    if len(payload) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(payload)} bytes do not fit the shape {shape} in {encoding}")
    array = np.frombuffer(payload, dtype=dtype).reshape(shape)
    if encoding == "uint8":
        take(4 * array.size)
        return torch.from_numpy(_floats(array)).div_(255)
    if not (array.flags.aligned and array.flags.writeable and array.dtype.isnative):
        take(array.nbytes)
        array = _floats(array)
    return torch.from_numpy(array)


def _floats(array: Any) -> Any:
    """Return a copy in float32."""
    copy = np.frombuffer(pages(4 * array.size), dtype=np.float32).reshape(array.shape)
    np.copyto(copy, array)
    return copy


def _unpack_files(sizes: Any, payload: memoryview, shape: list[int], take: Callable[[int], object]) -> Tensor:
    count, (height, width) = math.prod(shape[:-3]), shape[-2:]
    if not isinstance(sizes, list) or len(sizes) != count or not all(type(s) is int and s > 0 for s in sizes):
        raise ValueError(f"`sizes` must be {count} sizes in bytes, one for each frame")
    if sum(sizes) != len(payload):
        raise ValueError(f"the files should have {sum(sizes)} bytes, but {len(payload)} were received")
    take(4 * math.prod(shape) + BYTES_OF_PIXEL * height * width)
    frames, start = np.frombuffer(pages(4 * math.prod(shape)), dtype=np.float32).reshape(count, 3, height, width), 0
    for number, size in enumerate(sizes):
        frames[number] = _read_png(bytes(payload[start : start + size]), height, width, number)
        start += size
    return torch.from_numpy(frames).div_(255).reshape(shape)


def _read_png(file: bytes, height: int, width: int, number: int) -> Any:
    """Return a picture as an array [3, H, W] of bytes."""
    from PIL import Image, UnidentifiedImageError

    try:
        # The picture's size is at the beginning of the file. So a small file that unpacks to a huge picture is refused
        # before it is unpacked.
        with Image.open(io.BytesIO(file), formats=["PNG"]) as image:
            if image.size != (width, height) or image.mode != "RGB":
                raise ValueError(f"it is {image.mode} of {image.size[0]}×{image.size[1]}, not RGB of {width}×{height}")
            return np.asarray(image).transpose(2, 0, 1)
    except (OSError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError, ValueError) as error:
        raise ValueError(f"frame {number} is not a PNG file as declared: {error}") from None


def _shape(shape: Any, limits: WireLimits) -> list[int]:
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("`shape` is not a list of sizes")
    if len(shape) not in (4, 5) or shape[-3] != 3 or 0 in shape[1:]:
        raise ValueError(f"images have shape {shape}; send [B, 3, H, W] or [B, F, 3, H, W]")
    if max(shape[-2:]) > limits.most_side:
        raise ValueError(f"{shape[-1]}×{shape[-2]} pixels are more than {limits.most_side} a side")
    if len(shape) == 5 and shape[1] > limits.most_frames:
        raise ValueError(f"{shape[1]} frames are more than {limits.most_frames}")
    # Compressed images may be much smaller than the unpacked ones.
    if 4 * math.prod(shape) > limits.most_bytes:
        raise ValueError(
            f"images of shape {shape} are too many for a limit of {limits.most_bytes} bytes: they are unpacked to "
            f"{4 * math.prod(shape)}; send fewer or smaller ones at a time"
        )
    return shape


def _read_bytes(text: bytes) -> int:
    """Return how many bytes a JSON text takes at most while it is read, and afterwards."""
    return BYTES_OF_CHARACTER * len(text) + BYTES_OF_OBJECT * sum(text.count(mark) for mark in b"[{,:")


def _read_json(text: bytes | bytearray) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is a JSON {type(value).__name__}, not an object")
    return value


def _texts(value: Any, name: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"`{name}` is not a list of texts")
    return value


def _is_plain(value: Any) -> bool:
    """Whether a value that is written as JSON and read again is the same."""
    if isinstance(value, list):
        return all(_is_plain(inner) for inner in value)
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_plain(inner) for name, inner in value.items())
    return type(value) in _PLAIN


def _numbers(values: Sequence[float] | Tensor) -> list[float | None]:
    numbers = values.tolist() if isinstance(values, Tensor) else list(values)
    return [None if math.isnan(number) else number for number in numbers]
