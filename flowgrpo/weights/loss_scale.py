"""Loss scaling for models in float16, whose gradients would otherwise be too small for the format.

A number of float16 below 6e-8 is 0, and below 6e-5 it has fewer digits. Gradients of a loss over an image of 65,536
numbers are that small, so Micikevicius et al. (1710.03740, section 3.2) multiply the loss by a factor and divide the
gradients of the weights by it, in float32. Here the factor is chosen anew for every backward pass, from the gradient in
what the model predicts. So no step is skipped, nothing is remembered from step to step, and a resumed run has the same
factors. The factor is a power of 2, which changes no digit.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_map

__all__ = ["LossScale"]

TARGET = 2.0**-4
"""Where the largest number of the gradient in the predictions is put, up to a factor of 2.

The gradient in the model's inner states may be a million times larger before it overflows, and a million times smaller
before it is 0.
"""
_FIRST, _STEP, _LAST = 12, 12, 72
"""Exponents of the factors that are tried: the first, the distance of the next, and the largest."""


class LossScale:
    """Scales the losses of modules that compute in float16.

    Args:
        modules: the trained modules, by name. A module is watched if it has a parameter in float16.
        parameters: the trained parameters that the modules compute with. A parameter in float32 divides its gradient by
            itself. Whoever takes the gradient of another parameter divides this gradient by `factor`.

    Attributes:
        factor: of the backward pass that runs now, else 1.
    """

    def __init__(self, modules: Mapping[str, nn.Module], parameters: Iterable[nn.Parameter]) -> None:
        self.factor = 1.0
        # Weak, because an evaluation whose loss is never asked for would keep its whole graph.
        self._predictions: list[weakref.ref[Any]] = []
        for module in modules.values():
            if in_float16(module):
                module.register_forward_hook(self._watch)
        for parameter in parameters:
            if parameter.dtype == torch.float32:
                parameter.register_hook(self._unscaled)

    @contextmanager
    def scaled(self, loss: Tensor) -> Iterator[Tensor]:
        """The loss times a factor that is chosen for it. Run the backward pass within this context."""
        self.factor = self._chosen(loss)
        try:
            yield loss * self.factor
        finally:
            self.factor = 1.0

    def _chosen(self, loss: Tensor) -> float:
        """A power of 2 that puts the loss's gradient in the predictions near `TARGET`; 1 if it has none."""
        alive = [mark for known in self._predictions if (mark := known()) is not None]
        predicted = [GradientEdge(mark, 0) for mark in alive]
        exponent, tried, seen = 0, _FIRST, set[int]()
        while tried not in seen and abs(tried) <= _LAST:
            seen.add(tried)
            largest = _largest(loss, predicted, 2.0**tried)
            if largest is None:
                break
            if largest and math.isfinite(largest):
                exponent = tried - math.floor(math.log2(largest / TARGET))
                if largest > TARGET / 64:
                    break
            # Numbers that float16 holds only coarsely are looked at again, enlarged.
            tried += _STEP if math.isfinite(largest) else -_STEP
        return 2.0**exponent

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_predictions": []}

    def _watch(self, module: nn.Module, args: Any, output: Any) -> Any:
        return tree_map(lambda leaf: self._marked(leaf) if isinstance(leaf, Tensor) else leaf, output)

    def _marked(self, prediction: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and prediction.requires_grad):
            return prediction
        marked: Tensor = _Mark.apply(prediction)
        self._predictions = [known for known in self._predictions if known() is not None]
        self._predictions.append(weakref.ref(marked.grad_fn))
        return marked

    def _unscaled(self, gradient: Tensor) -> Tensor:
        return gradient if self.factor == 1.0 else gradient / self.factor


class _Mark(torch.autograd.Function):
    """Changes nothing. Its node in the graph is known, and lives as long as the graph."""

    @staticmethod
    def forward(ctx: Any, prediction: Tensor) -> Tensor:
        # Not a view, which nobody could change in place.
        return prediction.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def in_float16(module: nn.Module) -> bool:
    """Whether a module computes in float16, at least in part."""
    return any(parameter.dtype == torch.float16 for parameter in module.parameters())


def _largest(loss: Tensor, predicted: list[GradientEdge], factor: float) -> float | None:
    """The largest number of the scaled loss's gradient in the predictions; None if the loss does not use any."""
    if not predicted:
        return None
    found = torch.autograd.grad(loss * factor, predicted, retain_graph=True, allow_unused=True)
    ends = [end.float() for gradient in found if gradient is not None for end in gradient.aminmax()]
    return float(torch.stack(ends).abs().amax()) if ends else None
