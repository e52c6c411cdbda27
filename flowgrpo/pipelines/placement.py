"""Where a pipeline computes, looked up once while its parts stay where they are.

Diffusers looks through every module of every part at each call, for hooks that offload weights: with LoRA on four
small blocks that is 3 ms a call, on a large transformer tens.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# Set by accelerate and by diffusers on modules whose weights they move while the pipeline computes.
_HOOKS = ("_hf_hook", "_diffusers_hook")


_COMPUTES_ON: weakref.WeakKeyDictionary[Any, torch.device] = weakref.WeakKeyDictionary()


def compute_on(pipe: Any, device: torch.device) -> None:
    """Have a pipeline compute on a device, wherever its parts wait."""
    _COMPUTES_ON[pipe] = device


def _hooked(module: nn.Module) -> bool:
    return any(name in module.__dict__ for name in _HOOKS)


class Placement:
    """Remembers the device a pipeline answers, until a part is exchanged, moved or hooked.

    Args:
        pipe: any diffusers pipeline. Within `remembered` its class is a subclass whose `_execution_device` is the
            remembered one; without, it is untouched. A pipeline with offloading hooks is asked every time.
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
        """Within the block the pipeline answers from memory."""
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
        # Past the pipeline's own __setattr__, which would look for a part of this name.
        object.__setattr__(self.pipe, "__class__", self._class if settled is None else self._settled)
        try:
            yield
        finally:
            object.__setattr__(self.pipe, "__class__", own)

    def _parts(self) -> list[nn.Module]:
        return [part for name in self._names if isinstance(part := getattr(self.pipe, name, None), nn.Module)]

    def _standing(self) -> tuple[Any, ...] | None:
        """What tells the placement of the parts from another; None if weights are moved by hooks."""
        mark: list[Any] = []
        for part in self._parts():
            first = _owner(part)
            if _hooked(part) or _hooked(first):
                return None
            mark.append((weakref.ref(part), next((p.device for p in first.parameters(recurse=False)), None)))
        return tuple(mark)


def _owner(part: nn.Module) -> nn.Module:
    """The module that holds the first parameter: hooks on leaves leave the part itself alone."""
    return next((m for m in part.modules() if next(m.parameters(recurse=False), None) is not None), part)
