"""Tiny instances of pipeline classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from torch import nn

from ...weights.precision import in_dtype
from ..zeroed import Zeroed


def installed(version: str) -> bool:
    """Whether the installed diffusers is of a version, such as "0.38", or later."""
    return _numbers(diffusers.__version__) >= _numbers(version)


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True)
class Tiny:
    """A pipeline class at toy size: latents of about 8x8, random weights.

    Attributes:
        build: makes the pipeline, see `fresh`.
        call: keyword arguments that make a call small.
        steps: number of denoising steps of the checks.
        batch: number of prompts in one call.
        load: returns arguments of `from_pretrained`: parts that the saved folder does not hold.
        adjust: called with the loaded pipeline; makes small what no argument can (a fixed list of resolutions).
        notes: what a reader of the table should know.
        texts: the prompts, if the class does not take any text.
        since: the first version of diffusers that can run the instance, if an older one has the class and cannot.
    """

    build: Callable[[], Any]
    call: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 3
    batch: int = 2
    load: Callable[[], Mapping[str, Any]] = dict
    adjust: Callable[[Any], None] | None = None
    notes: str = ""
    texts: tuple[str, ...] = ()
    since: str = "0.0"

    def fresh(self) -> Any:
        """A new pipeline with the same weights each time; every denoiser parameter is moved off its initial value.

        New diffusers transformers have gates and output layers that are initialised to 0. With zeros there, whole
        branches would have no effect, and no check could see them.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            with Zeroed():
                pipe = self.build()
            modules = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
            with torch.no_grad():
                for name in sorted(modules):
                    if "transformer" in name or "unet" in name:
                        for parameter in modules[name].parameters():
                            parameter.add_(0.05 * torch.randn_like(parameter))
        for module in modules.values():
            module.eval()
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def loaded(self, folder: str | Path, dtype: torch.dtype = torch.float32) -> Any:
        """The pipeline in `dtype`, loaded from the folder to which it was saved."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            handed = {name: _cast(part, dtype) for name, part in self.load().items()}
        pipe = DiffusionPipeline.from_pretrained(folder, **in_dtype(dtype), **handed)
        pipe.set_progress_bar_config(disable=True)
        if self.adjust is not None:
            self.adjust(pipe)
        return pipe


def _cast(part: Any, dtype: torch.dtype) -> Any:
    return part.to(dtype) if isinstance(part, nn.Module) else part
