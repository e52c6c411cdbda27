"""Frozen linear weights in 8 or 4 bits.

Libraries do the work: torchao for 8 bits, and bitsandbytes for 4. The layers compute in bfloat16, and adapters are
trained on top of them (QLoRA, 2305.14314).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .blocks import repeated_blocks
from .pipeline_folders import DENOISERS

__all__ = ["Quantized", "bitsandbytes", "computes_in", "is_packed", "loading_arguments", "quantize", "saved_bytes"]

Quantized = Literal["float8", "int8", "nf4"]
_CONFIGS: Mapping[str, str] = {"float8": "Float8WeightOnlyConfig", "int8": "Int8WeightOnlyConfig"}
_BLOCK, _BLOCKS = 64, 256
"""Weights that have one scale in 4 bits, and scales that have one scale of their own."""


def loading_arguments(kind: Quantized | None) -> dict[str, Any]:
    """The arguments with which diffusers' `from_pretrained` puts linear weights of the denoisers into 8 bits.

    Args:
        kind: as for `quantize`. There are no arguments for None, nor for `nf4`, which `quantize` makes later.

    Raises:
        ValueError: the library is not installed, or is too old.
    """
    if kind == "nf4":
        bitsandbytes("model.quantize nf4", "model.quantize")
    if kind is None or kind == "nf4":
        return {}
    chosen = _torchao(kind)
    from diffusers import PipelineQuantizationConfig, TorchAoConfig

    mapping = {name: TorchAoConfig(chosen) for name in DENOISERS}
    return {"quantization_config": PipelineQuantizationConfig(quant_mapping=mapping)}


def quantize(module: nn.Module, kind: Quantized, names: Iterable[str] | None = None) -> None:
    """Put linear weights of a loaded model into fewer bits, in place. The model must have no adapters.

    With `nf4`, the weights wait in their type until the module is moved to a device with `to`, which may be the device
    that they are on. So a GPU does the work, layer by layer.

    Args:
        module: a denoiser or a language model. Linear layers that it keeps in float32 beside others in 16 bits stay as
            they are.
        kind: `float8` (e4m3, a scale per row), `int8` (symmetric, a scale per row), or `nf4`: 4-bit NormalFloat with a
            scale for 64 weights, and the scales in 8 bits (2305.14314, section 3, "double quantization").
        names: of the layers; None for all linear layers, and with `nf4` for those of the repeated blocks. The few
            layers before and after the blocks have few weights, and 4 bits cost most there.

    Raises:
        ValueError: the library is not installed, or is too old.
    """
    layers = dict(linear_layers(module, kind, names))
    if kind == "nf4":
        library = bitsandbytes("model.quantize nf4", "model.quantize")
        for name, layer in layers.items():
            parent, _, child = name.rpartition(".")
            setattr(module.get_submodule(parent), child, _in_four_bits(library, layer))
        return
    chosen = _torchao(kind)
    from torchao.quantization import quantize_

    quantize_(module, chosen, lambda layer, name: name in layers)


def linear_layers(
    module: nn.Module, kind: Quantized, names: Iterable[str] | None = None
) -> Iterator[tuple[str, nn.Linear]]:
    """The plain linear layers of a module that `quantize` takes, by name.

    Args:
        module: see `quantize`.
        kind: see `quantize`.
        names: see `quantize`. A layer of another kind is left out.
    """
    found = [(name, part) for name, part in module.named_modules() if type(part) is nn.Linear]
    if names is not None:
        wanted = set(names)
        found = [pair for pair in found if pair[0] in wanted]
    elif kind == "nf4" and (blocks := repeated_blocks(module)):
        within = {part for block in blocks for part in block.modules()}
        found = [pair for pair in found if pair[1] in within]
    # Some classes keep single layers in float32, and compute timesteps in their type.
    rounded = any(part.weight.dtype != torch.float32 for _, part in found)
    yield from (pair for pair in found if not rounded or pair[1].weight.dtype != torch.float32)


def is_packed(layer: nn.Module) -> bool:
    """Whether `quantize` has put two weights of the layer into a byte."""
    return type(layer).__name__ == "Linear4bit"


def computes_in(layer: nn.Module) -> torch.dtype:
    """The type in which a linear layer computes; packed weights have another type than the layer."""
    found: torch.dtype = layer.compute_dtype if is_packed(layer) else layer.weight.dtype  # type: ignore[assignment, union-attr]
    return found


def saved_bytes(module: nn.Module, kind: Quantized, names: Iterable[str] | None = None) -> int:
    """Bytes that `quantize` with the same arguments takes from a model, which may be on `meta`."""
    weights = [layer.weight for _, layer in linear_layers(module, kind, names)]
    return sum(w.numel() * w.element_size() - _bytes(w, kind) for w in weights)


def _bytes(weight: Tensor, kind: Quantized) -> int:
    if kind != "nf4":
        return weight.numel() + 4 * len(weight)
    scales = math.ceil(weight.numel() / _BLOCK)
    return math.ceil(weight.numel() / 2) + scales + 4 * math.ceil(scales / _BLOCKS)


def bitsandbytes(what: str, key: str) -> Any:
    """The library bitsandbytes.

    Args:
        what: what needs it, for the message.
        key: the key that may be left out.

    Raises:
        ValueError: it is not installed, or is too old.
    """
    # It speaks of faster kernels for inference on CPUs, which no run uses.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        import bitsandbytes

        torch.ops.bitsandbytes.gemm_4bit.default  # noqa: B018 - versions before 0.50 do not have it
    except (ImportError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"{what} needs bitsandbytes 0.50 or newer ({error}); pip install 'bitsandbytes>=0.50', or leave {key} out"
        ) from None
    return bitsandbytes


def _in_four_bits(library: Any, layer: nn.Linear) -> nn.Module:
    with torch.device("meta"):
        made = library.nn.Linear4bit(
            layer.in_features, layer.out_features, layer.bias is not None, compute_dtype=layer.weight.dtype,
            compress_statistics=True, quant_type="nf4",
        )  # fmt: skip
    made.weight = library.nn.Params4bit(
        layer.weight.detach(), requires_grad=False, compress_statistics=True, quant_type="nf4", blocksize=_BLOCK,
        module=made,
    )  # fmt: skip
    made.bias = layer.bias
    # On some CPUs the first call without gradients would pack the weights anew, for kernels that give no gradients.
    made.support_avx512bf16_for_cpu = False
    return made.train(layer.training)  # type: ignore[no-any-return]


def _torchao(kind: Quantized) -> Any:
    try:
        import torchao.quantization

        return getattr(torchao.quantization, _CONFIGS[kind])()
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"model.quantize {kind} needs torchao 0.15 or newer ({error}); pip install 'torchao>=0.15', or leave "
            "model.quantize out"
        ) from None
