"""What the tests of trained weights share: the denoiser's own inputs and outputs in each tiny pipeline."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from flowgrpo.weights.trained import LoraSpec, TrainedWeights
from tests.tiny_pipelines import CALL, TINY

KEYS = sorted(TINY)
# alpha is no multiple of the rank, so a loader that loses it or takes the rank for it gives other outputs.
SPEC = LoraSpec(rank=3, alpha=7)


class _Seen(Exception):
    pass


@functools.cache
def denoiser_inputs(key: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the pipeline's first call of its transformer."""
    pipe = TINY[key]()
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args, kwargs))
        raise _Seen

    pipe.transformer.register_forward_pre_hook(record, with_kwargs=True)
    with pytest.raises(_Seen):
        pipe(
            prompt=["red circle", "two stars"],
            num_inference_steps=2,
            output_type="latent",
            generator=torch.Generator().manual_seed(1),
            **CALL[key],
        )
    return seen[0]


def prediction(pipe: DiffusionPipeline, key: str, name: str = "transformer") -> Tensor:
    args, kwargs = denoiser_inputs(key)
    return getattr(pipe, name)(*args, **{**kwargs, "return_dict": False})[0]


@torch.no_grad()
def output(pipe: DiffusionPipeline, key: str, name: str = "transformer") -> Tensor:
    return prediction(pipe, key, name)


@torch.no_grad()
def perturb(weights: TrainedWeights, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in weights.parameters():
        noise = 0.2 * torch.randn(parameter.shape, generator=generator)
        parameter.add_(noise.to(parameter.dtype))
    weights.write()
