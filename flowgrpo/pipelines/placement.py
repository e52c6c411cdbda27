"""The device on which a pipeline computes, and the parts that wait in host memory until they are used.

At each call, diffusers searches every module of every part for hooks that offload weights. With LoRA on four small
blocks the search takes 3 ms for each call, and tens of milliseconds on a large transformer. So the device is looked up
once, and looked up again only when a part changes.

The denoiser is used most of the time. The autoencoder is used once for each rollout, and text encoders once for each
prompt.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# Accelerate and diffusers set these attributes on modules whose weights they move while the pipeline computes.
_HOOKS = ("_hf_hook", "_diffusers_hook")


_COMPUTES_ON: weakref.WeakKeyDictionary[Any, torch.device] = weakref.WeakKeyDictionary()


def compute_on(pipe: Any, device: torch.device) -> None:
    """Let a pipeline compute on a device, wherever its parts wait."""
    _COMPUTES_ON[pipe] = device


def _hooked(module: nn.Module) -> bool:
    return any(name in module.__dict__ for name in _HOOKS)


class Placement:
    """Remembers the execution device of a pipeline until a part is replaced, moved or hooked.

    Args:
        pipe: any diffusers pipeline. Within `remembered` its class is a subclass whose `_execution_device` is the
            remembered device. Outside `remembered` the pipeline is untouched. The device of a pipeline with offloading
            hooks is looked up every time.
    """

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self._names = [name for name, part in pipe.components.items() if isinstance(part, nn.Module)]
        self._mark: tuple[Any, ...] | None = None
        self._device: torch.device | None = None
        own = type(pipe)
        answer = property(lambda _: self._device)
        self._class = type(own.__name__, (own,), {"_execution_device": answer})
        self._settled = type(own.__name__, (own,), {"_execution_device": answer, "device": answer})

    @contextmanager
    def remembered(self) -> Iterator[None]:
        """Within the block, the pipeline's execution device is the remembered device."""
        settled = _COMPUTES_ON.get(self.pipe)
        if settled is not None:
            self._device = settled
        elif (mark := self._standing()) is None:
            yield
            return
        elif mark != self._mark:
            if any(_hooked(module) for part in self._parts() for module in part.modules()):
                yield
                return
            self._mark, self._device = mark, self.pipe._execution_device
        own = self.pipe.__class__
        # The pipeline's own __setattr__ is bypassed, because it would look for a part of this name.
        object.__setattr__(self.pipe, "__class__", self._class if settled is None else self._settled)
        try:
            yield
        finally:
            object.__setattr__(self.pipe, "__class__", own)

    def _parts(self) -> list[nn.Module]:
        return [part for name in self._names if isinstance(part := getattr(self.pipe, name, None), nn.Module)]

    def _standing(self) -> tuple[Any, ...] | None:
        """A mark that changes when a part is replaced or moved; None if hooks move weights."""
        mark: list[Any] = []
        for part in self._parts():
            first = _owner(part)
            if _hooked(part) or _hooked(first):
                return None
            mark.append((weakref.ref(part), next((p.device for p in first.parameters(recurse=False)), None)))
        return tuple(mark)


def _owner(part: nn.Module) -> nn.Module:
    """The module that holds the first parameter. Some hooks are on such inner modules only, not on the part itself."""
    return next((m for m in part.modules() if next(m.parameters(recurse=False), None) is not None), part)


KINDS = {"vae": "vae", "text_encoders": "text_encoder"}
"""What may be offloaded -> the beginning of the names of these components."""
_OF_PIPELINE: weakref.WeakKeyDictionary[Any, Offload] = weakref.WeakKeyDictionary()


def move(part: nn.Module, device: torch.device) -> None:
    """Move the weights of a part to a device. Every move in this file goes through this function."""
    part.to(device)


class Offload:
    """The parts of one pipeline that wait in host memory.

    Args:
        parts: kind -> modules, which must be in host memory.
        device: where the modules are used.
    """

    def __init__(self, parts: dict[str, list[nn.Module]], device: torch.device) -> None:
        self.device, self._parts = device, parts
        self._depth, self._there = dict.fromkeys(parts, 0), dict.fromkeys(parts, False)

    @contextmanager
    def needed(self, kind: str, *, when_called: bool = False) -> Iterator[None]:
        """Within the block, parts of a kind are on the device. The outermost block moves them back at its end.

        With `when_called`, the parts are fetched at their first call, if there is a call. Parts of a kind that is not
        offloaded stay where they are.
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
        """The function, changed so that parts of a kind and its tensor arguments are on the device during each call."""
        if kind not in self._parts:
            return function

        @functools.wraps(function)
        def with_parts(*args: Any, **kwargs: Any) -> Any:
            with self.needed(kind):
                return function(*map(self._here, args), **{name: self._here(value) for name, value in kwargs.items()})

        return with_parts

    def _here(self, value: Any) -> Any:
        # Some pipelines move a part's inputs to the device of its weights, which is host memory while the part waits.
        return value.to(self.device) if isinstance(value, Tensor) else value

    def _bring(self, kind: str, there: bool) -> None:
        if self._there[kind] == there:
            return
        self._there[kind] = there
        for part in self._parts[kind]:
            move(part, self.device if there else torch.device("cpu"))


_NOTHING = Offload({}, torch.device("cpu"))


def offload_of(pipe: Any) -> Offload:
    """The parts of a pipeline that wait in host memory; none unless `place` was called with kinds."""
    return _OF_PIPELINE.get(pipe, _NOTHING)


def place(pipe: Any, device: torch.device, kinds: Sequence[str] = ()) -> None:
    """Move a pipeline from host memory to the device on which it computes; parts of some kinds only while in use.

    Args:
        pipe: the pipeline, in host memory.
        device: where the pipeline computes.
        kinds: keys of `KINDS`. Parts of these kinds stay in host memory while they are not used.

    Raises:
        ValueError: the pipeline has no part of one of the kinds.
    """
    if not kinds:
        pipe.to(device)
        return
    modules = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    waiting = {kind: [part for name, part in modules.items() if name.startswith(KINDS[kind])] for kind in kinds}
    for kind, parts in waiting.items():
        if not parts:
            raise ValueError(
                f"model.offload names {kind}, but {type(pipe).__name__} has no {KINDS[kind]}; leave {kind} out (the "
                f"pipeline has {', '.join(modules)})"
            )
    if pipe not in _OF_PIPELINE:
        _OF_PIPELINE[pipe] = offload = Offload(waiting, device)
        for part in waiting.get("vae", []):
            for name in ("encode", "decode"):
                if hasattr(part, name):
                    part.__dict__[name] = offload.around("vae", getattr(part, name))
        # Diffusers takes the device of the first part that it finds, and this part may be in host memory.
        compute_on(pipe, device)
    away = {id(part) for parts in waiting.values() for part in parts}
    for part in modules.values():
        if id(part) not in away:
            part.to(device)
