"""Gradient checkpointing for models of transformers in evaluation mode.

The library's own checkpointing acts in training mode only, and a policy is never in training mode, because dropout
makes log-probs irreproducible.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["layers_of", "recompute"]


def layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The layers of a model: the members of its outermost lists of modules."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from layers_of(child)


def recompute(model: nn.Module, on: bool) -> None:
    """Let the backward pass compute the activations of each layer again, or keep them as before.

    Raises:
        ValueError: the model has no list of layers.
    """
    layers = list(layers_of(model))
    if on and not layers:
        raise ValueError(
            f"{type(model).__name__} has no list of layers whose activations could be computed again; turn "
            "model.gradient_checkpointing off"
        )
    for layer in layers:
        vars(layer).pop("forward", None)
        if on:
            layer.forward = _again(layer.forward)  # type: ignore[method-assign]


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Nothing in evaluation mode is random.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return checkpointed
