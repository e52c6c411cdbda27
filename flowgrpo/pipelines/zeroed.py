"""Random weights without chance: some classes leave a parameter as whatever its memory held."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Zeroed(TorchFunctionMode):
    """Within this context `torch.empty` gives zeros.

    A class that draws its weights draws the same ones as ever. A parameter that it does not draw, because published
    weights always take its place, is 0. Examples are the padding tokens of Z-Image in diffusers 0.37 and of Lumina.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("memory_format") is None:
            kwargs.pop("memory_format", None)
            func = torch.zeros
        return func(*args, **kwargs)
