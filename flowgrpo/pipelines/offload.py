"""Parts of a pipeline that wait in host memory, and are on the accelerator only while they are used.

The denoiser works most of the time; the autoencoder is asked once a rollout, and text encoders once a prompt.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .placement import compute_on

KINDS = {"vae": "vae", "text_encoders": "text_encoder"}
"""What may be offloaded -> how the names of such components begin."""
_OF_PIPELINE: weakref.WeakKeyDictionary[Any, Offload] = weakref.WeakKeyDictionary()


def move(part: nn.Module, device: torch.device) -> None:
    """Bring the weights of a part to a device. The only way in which anything here is moved."""
    part.to(device)


class Offload:
    """The parts of one pipeline that wait in host memory.

    Args:
        parts: kind -> modules. They are expected in host memory.
        device: where they are used.
    """

    def __init__(self, parts: dict[str, list[nn.Module]], device: torch.device) -> None:
        self.device, self._parts = device, parts
        self._depth, self._there = dict.fromkeys(parts, 0), dict.fromkeys(parts, False)

    @contextmanager
    def needed(self, kind: str, *, when_called: bool = False) -> Iterator[None]:
        """Within the block parts of a kind are on the device; after the outermost such block they are not.

        With `when_called` they are fetched by the first call of theirs, if there is one. A kind that does not wait is
        left where it is.
        """
        if kind not in self._parts:
            yield
            return
        self._depth[kind] += 1
        try:
            if not when_called:
                self._bring(kind, True)
            yield
        finally:
            self._depth[kind] -= 1
            if not self._depth[kind]:
                self._bring(kind, False)

    def waits(self, kind: str) -> bool:
        """Whether parts of a kind wait in host memory."""
        return kind in self._parts

    def around(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that uses parts of a kind, with them on the device, and with its tensors there."""
        if kind not in self._parts:
            return function

        @functools.wraps(function)
        def with_parts(*args: Any, **kwargs: Any) -> Any:
            with self.needed(kind):
                return function(*map(self._here, args), **{name: self._here(value) for name, value in kwargs.items()})

        return with_parts

    def _here(self, value: Any) -> Any:
        # Where its weights wait is no place for a pipeline to put a part's inputs, but some ask.
        return value.to(self.device) if isinstance(value, Tensor) else value

    def _bring(self, kind: str, there: bool) -> None:
        if self._there[kind] == there:
            return
        self._there[kind] = there
        for part in self._parts[kind]:
            move(part, self.device if there else torch.device("cpu"))


_NOTHING = Offload({}, torch.device("cpu"))


def offload_of(pipe: Any) -> Offload:
    """What waits of a pipeline; nothing unless `place` was told so."""
    return _OF_PIPELINE.get(pipe, _NOTHING)


def place(pipe: Any, device: torch.device, kinds: Sequence[str] = ()) -> None:
    """Move a pipeline, as it is loaded into host memory, to the device that it computes on, some parts for use only.

    Args:
        pipe: the pipeline.
        device: for everything else.
        kinds: of `KINDS`, which stay in host memory while they are not used.

    Raises:
        ValueError: the pipeline has no part of such a kind.
    """
    if not kinds:
        pipe.to(device)
        return
    modules = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    waiting = {kind: [part for name, part in modules.items() if name.startswith(KINDS[kind])] for kind in kinds}
    for kind, parts in waiting.items():
        if not parts:
            raise ValueError(
                f"model.offload names {kind}, and {type(pipe).__name__} has no {KINDS[kind]}; leave it out (it has "
                f"{', '.join(modules)})"
            )
    if pipe not in _OF_PIPELINE:
        _OF_PIPELINE[pipe] = offload = Offload(waiting, device)
        for part in waiting.get("vae", []):
            for name in ("encode", "decode"):
                if hasattr(part, name):
                    part.__dict__[name] = offload.around("vae", getattr(part, name))
        # The first part that diffusers finds may be one that waits.
        compute_on(pipe, device)
    away = {id(part) for parts in waiting.values() for part in parts}
    for part in modules.values():
        if id(part) not in away:
            part.to(device)
