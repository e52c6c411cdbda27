"""A linear layer with a LoRA whose last product adds to the layer's output."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn

__all__ = ["AddingLora", "add_in_place"]


class AddingLora(Linear):
    """A layer of peft that calculates the same, `x·Wᵀ + b + (alpha / rank)·(x·Aᵀ)·Bᵀ` (Hu et al. 2021, eq. 3), faster.

    peft multiplies the last product by the scale, and then adds it to the output of the base layer. Each of the two
    reads and writes a whole output. On small models and on fast cards they take longer than the products of A and B.
    Here the product with B adds to the output as it is made. In 16 bits the sum is rounded once, and not three times.

    In any state that a run of ours does not have, such as several adapters or autocast, the layer does what peft does.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The output of the layer.

        Args:
            x: [..., in], of any type that the base layer takes.
            args: further arguments, as peft has them.
            kwargs: further arguments, as peft has them.

        Returns:
            [..., out]. While B is zero, or the adapter is disabled, it equals the output of the base layer to the last
            bit.
        """
        name = self._alone(x)
        if name is None or args or kwargs:
            return self._as_peft(x, *args, **kwargs)
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        # torch multiplies a contiguous tensor of three dimensions as one matrix, so the output has the same bits. Other
        # tensors it may multiply otherwise, so they keep their shape.
        rows = x.view(-1, x.shape[-1]) if x.dim() == 3 and x.is_contiguous() else x
        out: Tensor = self.base_layer(rows)
        if out.dtype != x.dtype:  # under autocast
            return self._as_peft(x)
        low = nn.functional.linear(self.lora_dropout[name](rows), a).reshape(-1, len(a))
        if out.dim() == 2:
            out.addmm_(low, b.t(), alpha=self.scaling[name])
        else:
            out = torch.addmm(out.reshape(-1, len(b)), low, b.t(), alpha=self.scaling[name])
        return out.view(*x.shape[:-1], len(b))

    def _as_peft(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = super().forward(x, *args, **kwargs)
        return result

    def _alone(self, x: Tensor) -> str | None:
        """Name of the adapter, if it is the only one and everything has one type; None if peft has to do it."""
        names = self.active_adapters
        if self.disable_adapters or self.merged or len(names) != 1 or names[0] not in self.lora_A:
            return None
        weights = self.lora_A[names[0]].weight, self.base_layer.weight
        return names[0] if all(weight.dtype == x.dtype for weight in weights) else None


def add_in_place(layer: nn.Module) -> None:
    """Make a layer of peft an `AddingLora`, if it is a plain linear layer: not quantised, and not sharded."""
    if type(layer) is Linear:
        base = layer.get_base_layer()
        if type(base) is nn.Linear and type(base.weight) is nn.Parameter:
            layer.__class__ = AddingLora
