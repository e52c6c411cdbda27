"""The check that a pipeline can train on given pictures or videos."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ...weights.borrowing import replaced
from ..latents import encoded
from ..pipeline_error import PipelineError
from .subject import Failure, NotApplicable, Subject

_ROUNDING = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Largest error, relative to the largest number, of a few operations in a type."""


@torch.no_grad()
def given(subject: Subject) -> str:
    """The state of a given picture or video enters the decoder as what the VAE has encoded."""
    denoiser = subject.known
    if denoiser.sampling_rate is not None:
        raise NotApplicable("makes sounds, and pictures are given")
    record = subject.record(seed=9)
    frames = record.images.shape[1] if record.images.ndim == 5 else 1
    height, width = record.images.shape[-2:]
    shape = (len(record.prompts), frames, height + 8, width, 3)
    noise = np.random.default_rng(9).integers(0, 256, shape, dtype=np.uint8)
    samples = [[Image.fromarray(frame) for frame in one] for one in noise]
    try:
        state, images = denoiser.encode(samples, record.prompts, subject.device)
    except PipelineError as error:
        raise NotApplicable(str(error)) from None
    reached: list[Tensor] = []
    decoding = denoiser.pipe.vae.decode

    def decode(z: Tensor, *args: Any, **kwargs: Any) -> Any:
        reached.append(z)
        return decoding(z, *args, **kwargs)

    def entering(x: Tensor) -> Tensor:
        reached.clear()
        with replaced(denoiser.pipe.vae, decode=decode):
            denoiser.decode(x, record.prompts)
        return torch.cat(reached).float()

    z = entering(state)
    expected = encoded(denoiser.pipe, images.to(subject.device), z.ndim - 2).float()
    # The known part of an inpainted picture stays as it is, whatever picture is given.
    free = z != entering(state + 1.0)
    if not bool(free.any()):
        raise Failure("no number that enters the decoder depends on the state")
    worst = float((z - expected)[free].abs().max() / expected.abs().max())
    # A state may be in float32 where the VAE computes in 16 bits.
    if not worst <= max(_ROUNDING[denoiser.probe.dtype], _ROUNDING[denoiser.pipe.vae.dtype]):
        raise Failure(f"what enters the decoder differs from what the VAE has encoded by {worst:.2g} of the largest")
    size = f"{height}×{width}" if frames == 1 else f"{frames}×{height}×{width}"
    return f"{size} pixels to state {list(state.shape[1:])}, error {worst:.1g} of the largest number"
