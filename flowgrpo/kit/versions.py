"""Versions of samples that look alike, and samples at the edge of what a model can make."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

Options = ParamSpec("Options")


def _by_frame(change: Callable[Concatenate[Tensor, Options], Tensor]) -> Callable[Concatenate[Tensor, Options], Tensor]:
    """A change of images [B, 3, H, W] that takes videos [B, F, 3, H, W] too, and changes each frame by itself."""

    @functools.wraps(change)
    def changed(images: Tensor, *args: Options.args, **kwargs: Options.kwargs) -> Tensor:
        found = change(images.reshape(-1, *images.shape[-3:]), *args, **kwargs)
        return found.reshape(*images.shape[:-3], *found.shape[-3:])

    return changed


@_by_frame
def resize(images: Tensor, height: int, width: int) -> Tensor:
    """Images [B, 3, H, W] at another size, bicubic with antialiasing, clamped to [0, 1]."""
    return F.interpolate(images, size=(height, width), mode="bicubic", antialias=True).clamp(0, 1)


def eight_bits(images: Tensor) -> Tensor:
    """Images as a PNG file keeps them."""
    return (images * 255).round() / 255


@_by_frame
def as_jpeg(images: Tensor, quality: int) -> Tensor:
    """Images [B, 3, H, W] as a JPEG file of this quality gives them back."""
    pixels = (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    decoded = []
    for picture in pixels:
        buffer = io.BytesIO()
        Image.fromarray(picture).save(buffer, format="JPEG", quality=quality)
        decoded.append(torch.from_numpy(np.array(Image.open(buffer))))
    return torch.stack(decoded).permute(0, 3, 1, 2).float() / 255


@_by_frame
def shifted(images: Tensor) -> Tensor:
    """Images moved by one pixel to the right and down; the border is repeated."""
    return F.pad(images, (1, 0, 1, 0), mode="replicate")[..., : images.shape[-2], : images.shape[-1]]


def grainy(images: Tensor) -> Tensor:
    """Images plus Gaussian noise with a standard deviation of 1/255, the same noise on every image."""
    noise = torch.randn(images.shape[1:], generator=torch.Generator().manual_seed(0))
    return (images + noise / 255).clamp(0, 1)


def scaled(factor: float) -> Callable[[Tensor], Tensor]:
    """A function that resizes images to `factor` times their size."""
    return lambda images: resize(images, *(max(1, round(side * factor)) for side in images.shape[-2:]))


NEAR: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "8 bits (PNG)": ("format", eight_bits),
    "JPEG, quality 95": ("format", lambda images: as_jpeg(images, 95)),
    "shift by one pixel": ("", shifted),
    "noise of 1/255": ("", grainy),
}
"""Versions that nobody could tell from the picture: name -> (code of the finding if it disturbs the order, change)."""

OTHER: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "JPEG, quality 75": ("", lambda images: as_jpeg(images, 75)),
    "bfloat16": ("dtype", lambda images: images.bfloat16().float()),
    "twice the size": ("resize", scaled(2.0)),
    "half the size": ("", scaled(0.5)),
}
"""Other versions; those without a code are only reported."""

NEAR_TEXT: dict[str, tuple[str, Callable[[list[str]], list[str]]]] = {
    "newline at the end": ("whitespace", lambda texts: [text + "\n" for text in texts]),
    "space in front": ("whitespace", lambda texts: [" " + text for text in texts]),
    "spaces at the end": ("whitespace", lambda texts: [text + "  " for text in texts]),
}
"""Versions of a completion that nobody could tell from the completion when reading it."""


def edge_pictures(image: Tensor) -> list[tuple[str, str, Tensor]]:
    """What a model can come to make in place of a picture or video: (code, name, picture or video).

    Args:
        image: a picture [3, H, W] or a video [F, 3, H, W]; the others get its shape.
    """
    height, width = image.shape[-2:]

    def whole(part: Tensor) -> Tensor:
        return part.expand(image.shape).clone()

    def plain(*colour: float) -> Tensor:
        return whole(torch.tensor(colour).view(3, 1, 1))

    rows, columns = torch.arange(height).view(-1, 1), torch.arange(width).view(1, -1)
    noise = torch.rand(image.shape, generator=torch.Generator().manual_seed(0))
    luma = (image * torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(-3, keepdim=True)
    hole = (rows - height / 2) ** 2 + (columns - width / 2) ** 2 < (min(height, width) / 4) ** 2
    return [
        ("blank", "all black", plain(0, 0, 0)),
        ("blank", "all white", plain(1, 1, 1)),
        ("blank", "all grey", plain(0.5, 0.5, 0.5)),
        ("blank", "all red", plain(1, 0, 0)),
        ("grey", "without colour", whole(luma.clamp(0, 1))),
        ("transparent", "transparent over white", torch.where(hole, image, torch.ones(()))),
        ("transparent", "transparent over black", torch.where(hole, image, torch.zeros(()))),
        ("extreme", "random pixels", noise),
        ("extreme", "chequered pixels", whole(((rows + columns) % 2).float())),
    ]


def edge_sizes(height: int, width: int) -> list[tuple[str, int, int]]:
    """Sizes that differ from the size of the pictures: (code, height, width)."""
    huge = min(2048, max(1024, 4 * max(height, width)))
    return [("tiny", 8, 8), ("oblong", height, 2 * width + 1), ("huge", huge, huge)]


def edge_prompts(prompt: str) -> list[tuple[str, str, str]]:
    """Prompts that are hard to take: (code, name, prompt)."""
    odd = '"' + "{}%s\\ <b>é漢字\u202eעברית 🟥👩‍🚀 'a'\t\n" + "\x07" + prompt
    return [
        ("no-prompt", "empty", ""),
        ("no-prompt", "one space", " "),
        ("long-prompt", "5000 words", " ".join([prompt] * (5000 // max(len(prompt.split()), 1)))),
        ("odd-prompt", "quotes, braces, other scripts, emoji, control characters", odd),
    ]


def edge_texts(text: str) -> list[tuple[str, str, str]]:
    """Completions that a model can write: (code, name, completion)."""
    return [
        ("blank", "empty", ""),
        ("blank", "white space", " \n\t \n"),
        ("huge", "100,000 characters", ((text or "x") * 100_000)[:100_000]),
        ("huge", "one word of 100,000 letters", "a" * 100_000),
        ("odd-text", "brackets that do not close", "\\boxed{" + "(" * 2000 + "[{<answer>"),
        ("odd-text", "other scripts, emoji, control characters", "é漢字\u202eעברית 🟥👩‍🚀\x00\x07" + text),
    ]


def beside(texts: Sequence[str], row: int, text: str) -> list[str]:
    """A copy of the texts with `text` at position `row`."""
    return [text if k == row else other for k, other in enumerate(texts)]
