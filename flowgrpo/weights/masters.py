"""Float32 copies of weights in half precision. The optimizer moves the copies; the model computes with rounded ones.

An update of 1e-4 relative size vanishes in a weight of bfloat16, so a trained weight needs float32. A pipeline casts
its states to the dtype of its denoiser, so the denoiser itself stays as plain diffusers would load it. This is the
mixed precision of Micikevicius et al. (1710.03740, section 3.1). Gradients are summed in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from .loss_scale import LossScale


class Masters:
    """One float32 parameter for each trained parameter of a model.

    A float32 parameter of the model is its own master. The gradient of any other parameter is added to the master's
    gradient as soon as a backward pass has made it, and is then dropped.

    Args:
        parameters: name -> parameter of the model.
        scale: gives the factor of the loss, by which gradients are divided in float32.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], scale: LossScale | None = None) -> None:
        self.named = {name: _master(parameter) for name, parameter in parameters.items()}
        self._pairs = [(p, self.named[name]) for name, p in parameters.items() if self.named[name] is not p]
        for parameter, master in self._pairs:
            parameter.register_post_accumulate_grad_hook(partial(_hand_over, master, scale))

    def write(self) -> None:
        """Round the masters into the parameters of the model. Call `write` whenever the masters have changed."""
        for parameter, master in self._pairs:
            # Through `data`: a graph may still need the parameters, which an average or the reference replaces for a
            # while.
            parameter.data.copy_(master.data)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within this context the parameters of the model are their masters, so that files can be written and read.

        Afterwards the parameters have their type again. They have the values of the masters, rounded.
        """
        rounded = [parameter.data for parameter, _ in self._pairs]
        for parameter, master in self._pairs:
            parameter.data = master.data
        try:
            yield
        finally:
            for (parameter, _), data in zip(self._pairs, rounded, strict=True):
                parameter.data = data
            self.write()


def _master(parameter: nn.Parameter) -> nn.Parameter:
    return parameter if parameter.dtype == torch.float32 else nn.Parameter(parameter.detach().float())


def _hand_over(master: nn.Parameter, scale: LossScale | None, parameter: Tensor) -> None:
    gradient = parameter.grad
    parameter.grad = None
    if gradient is None:
        return
    if scale is not None and scale.factor != 1.0:
        gradient = gradient.float() / scale.factor
    if master.grad is None:
        master.grad = gradient.float()
    else:
        master.grad += gradient
