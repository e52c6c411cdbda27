"""From a given picture or video to the state of a pipeline's loop whose image it is.

Between the last state of the loop and the input of its VAE's decoder, a pipeline unpacks tokens, and divides and shifts
channels. Each pipeline has its own code for this, and few have code for the way back. In nearly all of them, every
number of the decoder's input is one number of the state, times a factor, plus a shift. A few probes find these places,
factors and shifts. So the way back from what the VAE encodes is known for any such pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from ..weights.borrowing import replaced
from .pipeline_error import PipelineError
from .recorder import LoopStopped

_TOLERANCE = 16.0
"""Largest error of the found way, in units of the rounding of the largest number."""


@dataclass(frozen=True)
class LatentMap:
    """The way from the N numbers of a state to the N numbers of the decoder's input: z = factor x[place] + shift.

    Attributes:
        shape: of the decoder's input, without the batch dimension.
        state: shape of the state, without the batch dimension.
        place: [N] int64, for each number of the decoder's input, the number of the state that it comes from.
        factor, shift: [N] float32.
        height, width: of the image that the decoder makes, in pixels.
        frames: of the video that the decoder makes; None for an image.
    """

    shape: tuple[int, ...]
    state: tuple[int, ...]
    place: Tensor
    factor: Tensor
    shift: Tensor
    height: int
    width: int
    frames: int | None

    def back(self, z: Tensor) -> Tensor:
        """States [B, *state] in float32 whose decoder's input is z [B, *shape]."""
        rows = (z.flatten(1).float() - self.shift.to(z.device)) / self.factor.to(z.device)
        found = torch.empty_like(rows)
        found[:, self.place.to(z.device)] = rows
        return found.view(len(z), *self.state)


def find_map(pipe: Any, state: Sequence[int], dtype: torch.dtype, decode: Callable[[Tensor], Any]) -> LatentMap:
    """Find the way from the state to the decoder's input by probes.

    All zeros and all ones show shifts and signs. For each bit of a number's place, a probe is positive where the bit is
    set and negative elsewhere, of random sizes. Factors and shifts are fitted to all probes, so that the rounding of 16
    bits averages out. One more probe, of normal numbers, checks the result.

    Args:
        pipe: the pipeline.
        state: shape of a state, without the batch dimension.
        dtype: of a state.
        decode: decodes states [1, *state] as the pipeline does, and returns images [1, 3, H, W], or videos
            [1, F, 3, H, W].

    Raises:
        PipelineError: the pipeline has no VAE, or its way to the decoder is of another kind.
    """
    name, vae = type(pipe).__name__, getattr(pipe, "vae", None)
    if vae is None or not hasattr(vae, "encode"):
        raise PipelineError(f"{name} has no VAE that encodes pictures, so it cannot train on given images")

    def entering(x: Tensor) -> Tensor:
        seen: list[Tensor] = []

        def capture(z: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.append(z.detach().float().cpu())
            raise LoopStopped

        kept = vae.dtype
        with replaced(vae, decode=capture):
            decode(x.view(1, *state).to(dtype))
        if vae.dtype != kept:
            # A pipeline that decodes in float32 casts its VAE back after decoding, and the call ended before.
            nn.Module.to(vae, kept)
        if not seen:
            raise PipelineError(f"{name} makes images without its VAE's `decode`, so it cannot train on given images")
        return seen[0]

    count = int(np.prod(state))
    places = torch.arange(count)
    bits = [(places >> k & 1) for k in range(max(count - 1, 1).bit_length())]
    zero, one = entering(torch.zeros(count)), entering(torch.ones(count))
    if zero.numel() != count:
        raise PipelineError(
            f"{name} has states of {count} numbers, and its VAE decodes {zero.numel()}: it adds or drops numbers on "
            "the way, so it cannot train on given images"
        )
    sign = (one - zero).flatten().sign()
    probes = [torch.zeros(count), torch.ones(count)]
    seen = [zero.flatten(), one.flatten()]
    place = torch.zeros(count, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    for k, bit in enumerate(bits):
        sizes = 0.5 + torch.rand(count, generator=generator)
        probes.append(((2.0 * bit - 1.0) * sizes).to(dtype).float())
        seen.append(entering(probes[-1]).flatten())
        place |= ((seen[-1] - seen[0]) * sign > 0).long() << k
    if not bool((sign != 0).all()) or not torch.equal(place.sort().values, places):
        raise _of_another_kind(name)
    factor, shift = _fitted_lines([probe[place] for probe in probes], seen)
    check = torch.randn(count, generator=generator).to(dtype)
    reached, expected = entering(check).flatten().double(), factor * check[place].double() + shift
    rounding = max(torch.finfo(one).eps for one in (dtype, vae.dtype))
    if float((reached - expected).abs().max()) > _TOLERANCE * rounding * float(reached.abs().max()):
        raise _of_another_kind(name)
    images = decode(torch.zeros(1, *state, dtype=dtype))
    height, width = images.shape[-2:]
    frames = images.shape[1] if images.ndim == 5 else None
    return LatentMap(tuple(zero.shape[1:]), tuple(state), place, factor.float(), shift.float(), height, width, frames)


def _fitted_lines(x: Sequence[Tensor], z: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Slope and intercept [N] in float64 of the lines that fit z over x best, each a list of [N] in float32."""
    # A video has millions of numbers, so sums are made probe by probe.
    nothing = torch.zeros_like(x[0], dtype=torch.float64)
    x_mean, z_mean = sum(x, nothing) / len(x), sum(z, nothing) / len(z)
    both, square = nothing.clone(), nothing.clone()
    for one, other in zip(x, z):
        both += (one - x_mean) * (other - z_mean)
        square += (one - x_mean).square()
    factor = both / square
    return factor, z_mean - factor * x_mean


def _of_another_kind(name: str) -> PipelineError:
    return PipelineError(
        f"{name} does more than to move, scale and shift each number of a state on the way to its VAE, so the state of "
        "a given picture cannot be found, "
        "and it cannot train on given images"
    )


def encode(pipe: Any, found: LatentMap, images: Tensor) -> Tensor:
    """States [B, *state] in float32 of pictures [B, 3, H, W] in [0, 1], or of videos [B, F, 3, H, W], on their device.

    Raises:
        PipelineError: the VAE encodes to another shape than its decoder takes.
    """
    z = encoded(pipe, images, len(found.shape) - 1)
    if tuple(z.shape[1:]) != found.shape:
        raise PipelineError(
            f"the VAE of {type(pipe).__name__} encodes a sample to {tuple(z.shape[1:])}, and its decoder takes "
            f"{found.shape}, so it cannot train on given images"
        )
    return found.back(z)


@torch.no_grad()
def encoded(pipe: Any, images: Tensor, axes: int) -> Tensor:
    """What the VAE encodes pictures [B, 3, H, W] in [0, 1], or videos [B, F, 3, H, W], to.

    Where it is a distribution, this is its mode.

    Args:
        pipe: the pipeline.
        images: the pictures or videos.
        axes: 3 if the VAE takes videos, with an axis of frames; 2 for pictures.
    """
    processor = getattr(pipe, "image_processor", None) or getattr(pipe, "video_processor", None)
    normal = getattr(getattr(processor, "config", None), "do_normalize", True)
    pixels = 2.0 * images - 1.0 if normal else images
    if axes == 3:
        pixels = pixels.transpose(1, 2) if pixels.ndim == 5 else pixels[:, :, None]
    if getattr(pipe.vae.config, "in_channels", 3) == 4:
        # The fourth channel is opacity.
        pixels = torch.cat([pixels, torch.ones_like(pixels[:, :1])], dim=1)
    with _in_full_range(pipe.vae) as dtype:
        return _latents(pipe.vae.encode(pixels.to(dtype)))


@contextmanager
def _in_full_range(vae: Any) -> Iterator[torch.dtype]:
    """Within the block, a VAE that overflows in float16 computes in float32; gives the dtype of its input."""
    dtype = vae.dtype
    raised = dtype == torch.float16 and bool(getattr(vae.config, "force_upcast", False))
    if raised:
        # The own `to` of diffusers' models warns about parts that they keep in float32, and here all are.
        nn.Module.to(vae, torch.float32)
    try:
        yield vae.dtype
    finally:
        if raised:
            nn.Module.to(vae, dtype)


def _latents(encoded: Any) -> Tensor:
    if hasattr(encoded, "latent_dist"):
        found: Tensor = encoded.latent_dist.mode()
        return found
    for name in ("latents", "latent"):
        if hasattr(encoded, name):
            found = getattr(encoded, name)
            return found
    raise PipelineError(f"a VAE encodes to {type(encoded).__name__}, which has no latents that are known here")


def fitted(frames: Sequence[Image.Image], found: LatentMap) -> Tensor:
    """A picture as [3, H, W] in [0, 1], or the frames of a video as [F, 3, H, W].

    A frame is scaled until it covers the size of the pipeline's images, and cut to the size around its middle.

    Raises:
        ValueError: there are not as many frames as the pipeline makes.
    """
    if len(frames) != (found.frames or 1):
        made = "pictures" if found.frames is None else f"videos of {found.frames} frames (model.call.num_frames)"
        given = "a picture" if len(frames) == 1 else f"a video of {len(frames)} frames"
        raise ValueError(f"the pipeline makes {made}, and the data give {given}; give samples of the pipeline's kind")
    cut = [ImageOps.fit(one, (found.width, found.height), method=Image.Resampling.LANCZOS) for one in frames]
    stacked = torch.stack([torch.from_numpy(np.asarray(one, dtype=np.float32) / 255.0).permute(2, 0, 1) for one in cut])
    return stacked[0] if found.frames is None else stacked
