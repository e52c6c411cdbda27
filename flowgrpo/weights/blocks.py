"""The repeated blocks of a denoiser."""

from __future__ import annotations

from torch import nn

__all__ = ["repeated_blocks"]


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The blocks of the classes that the model names; if it names none, the members of its lists of modules."""
    named = set(getattr(module, "_repeated_blocks", None) or ())
    found = [part for part in module.modules() if type(part).__name__ in named]
    lists = [child for child in module.children() if isinstance(child, nn.ModuleList) and len(child) > 1]
    return found or [block for stack in lists for block in stack]
