"""A pipeline under check, and the possible results of a check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..capture import company
from ..denoiser import Denoiser
from ..selfcheck import Record, rollout

Status = Literal["pass", "fail", "not applicable"]
TEXTS = ("a photo of two red circles", "a star", "a blue square above a green triangle")


class NotApplicable(Exception):
    """Raised by a check that does not apply to the pipeline; the message is the reason."""


class Failure(Exception):
    """Raised by a check that found a fault; the message describes the fault."""


@dataclass(frozen=True)
class CheckOutcome:
    """The outcome of a check.

    Attributes:
        check: name of the check.
        status: `pass`, `fail` or `not applicable`.
        detail: what the check saw, in one line.
    """

    check: str
    status: Status
    detail: str


@dataclass
class Subject:
    """A pipeline under check.

    Attributes:
        load: loads the pipeline from a folder and returns a new instance.
        source: folder of the pipeline.
        call: keyword arguments of the pipeline's call.
        steps: number of denoising steps, at least 2.
        folder: an existing folder in which the checks write.
        batch: number of prompts in one call.
        texts: the prompts, any number of them.
        device: the device of the pipeline.
        dtype: of the weights as they are loaded.
        whole: whether every weight of the denoiser can get a gradient here, or only an adapter.
        pipe: the instance that the checks share.
        denoiser: made by the first check.
    """

    load: Callable[[str | Path], Any]
    source: str | Path
    call: Mapping[str, Any]
    steps: int
    folder: Path
    batch: int = 2
    texts: tuple[str, ...] = TEXTS
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    whole: bool = True
    pipe: Any = None
    denoiser: Denoiser | None = None

    def prompts(self, first: int = 0) -> list[str]:
        """`batch` texts, beginning with text number `first`; after the last text the first text follows."""
        return [self.texts[(first + k) % len(self.texts)] for k in range(self.batch)]

    def fresh(self, folder: str | Path | None = None) -> Any:
        """A new instance of the pipeline on the device, loaded from `folder` or from the pipeline's own folder."""
        pipe = self.load(folder or self.source).to(self.device)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def on(self, pipe: Any) -> Denoiser:
        """The denoiser of another instance, with the way of evaluation that the first check found."""
        made = Denoiser(pipe, num_steps=self.steps, call=self.call, variant=self.known.variant, example=self.texts[0])
        made.trust(self.known)
        return made

    @property
    def known(self) -> Denoiser:
        """The denoiser of the first check."""
        if self.denoiser is None:
            raise Failure("not run, because the probe failed")
        return self.denoiser

    def noise(self, seed: int = 0) -> Tensor:
        """[batch, *latent_shape] on the device."""
        generators = [torch.Generator().manual_seed(100 * seed + k) for k in range(self.batch)]
        return self.known.initial_noise(generators).to(self.device)

    def record(self, seed: int) -> Record:
        """A rollout in the pipeline's own loop, of as many prompts as one call holds."""
        prompts = company(self.prompts(), self.known.caller.adapter.together)
        return rollout(self.known.replay, self.known.probe.sigmas, prompts, seed)
