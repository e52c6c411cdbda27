"""The adapter of a run as a file for ComfyUI or for kohya's scripts, by the conversion of diffusers.

Neither tool reads the metadata in which diffusers keeps alpha. A file without alpha is applied with a scale of 1. So
the scale alpha / rank is multiplied into B, and the file works with a scale of 1. Every weight keeps its value but for
the rounding of this product, and the product is exact if alpha / rank is a power of two.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from diffusers.utils import convert_state_dict_to_kohya
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..intake.json_text import parse_json

Tool = Literal["comfyui", "kohya"]
TOOLS: tuple[Tool, ...] = ("comfyui", "kohya")
NAME = "pytorch_lora_weights.safetensors"
_KNOWN = ("transformer.transformer_blocks.", "transformer.single_transformer_blocks.")
"""Beginnings of names that ComfyUI reads as they are: of Stable Diffusion 3, FLUX.1 and Qwen-Image."""


def write_for(tool: Tool, lora: Path, out: Path) -> str:
    """Write the adapter of a run for another tool.

    Args:
        tool: one of TOOLS. For a UNet both get the same file, in kohya's names with alpha = rank.
        lora: the folder that a run has written.
        out: a new `.safetensors` file.

    Returns:
        A sentence that says what the file is for, and what is not known.

    Raises:
        ValueError: the folder has no adapter, several adapters, or an adapter that the tool cannot read by any
            conversion of diffusers; or `out` exists or has another suffix.
    """
    if tool not in TOOLS:
        raise ValueError(f"no tool {tool!r}; use comfyui or kohya")
    if out.suffix != ".safetensors":
        raise ValueError(f"{out} is not named as safetensors; name it {out.with_suffix('.safetensors')}")
    if out.exists():
        raise ValueError(f"{out} exists; name a new file, or remove it first")
    tensors = _unscaled(_only_file(lora))
    if all(name.startswith("unet.") for name in tensors):
        tensors = convert_state_dict_to_kohya(tensors)
        said = "the names are kohya's, which ComfyUI, kohya's scripts and others read"
    elif tool == "kohya":
        raise ValueError(
            f"{lora} is the adapter of a transformer, and diffusers converts only adapters of UNets (Stable Diffusion "
            "1.5, SDXL) to kohya's names. For FLUX.1, write the file for comfyui; convert_flux_lora.py of kohya's "
            "sd-scripts reads it as the format of ai-toolkit"
        )
    elif all(name.startswith(_KNOWN) for name in tensors):
        said = (
            "ComfyUI reads these names for Stable Diffusion 3, FLUX.1 and Qwen-Image; if its log says `lora key not "
            "loaded`, it does not know them for your model"
        )
    else:
        odd = next(name for name in sorted(tensors) if not name.startswith(_KNOWN))
        raise ValueError(
            f"{lora} has {odd}, a name that ComfyUI does not read, and diffusers has no conversion for it; load the "
            "adapter with diffusers, or merge it into the model"
        )
    _save(tensors, out)
    return said


def _only_file(lora: Path) -> Path:
    found = sorted(lora.glob("pytorch_lora_weights*.safetensors"))
    if (lora / "adapter_model.safetensors").is_file():
        raise ValueError(
            f"{lora} is the adapter of a language model; ComfyUI and kohya's scripts read adapters of images"
        )
    if not found:
        raise ValueError(f"{lora} has no {NAME}; give the folder `lora` of a run that has trained a LoRA")
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ValueError(
            f"{lora} has several adapters ({names}), for a model with several transformers; no conversion of diffusers "
            "knows such a model"
        )
    return found[0]


def _unscaled(file: Path) -> dict[str, Tensor]:
    """The tensors of an adapter, with B times alpha / rank.

    Raises:
        ValueError: the file is no safetensors file, or its metadata is not what a run writes.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
    except SafetensorError as error:
        raise ValueError(f"{file} is no readable safetensors file ({error}); write it again") from None
    try:
        fields: Any = parse_json(metadata["lora_adapter_metadata"])
        (prefix,) = {name.partition(".")[0] for name in tensors}
        alpha, rank = float(fields[f"{prefix}.lora_alpha"]), int(fields[f"{prefix}.r"])
        uneven = fields.get(f"{prefix}.rank_pattern") or fields.get(f"{prefix}.alpha_pattern")
    except (KeyError, ValueError, TypeError, AttributeError):
        raise ValueError(
            f"{file} does not say its alpha and rank as the file of a run does, so its scale is unknown; give the "
            "folder `lora` of a run"
        ) from None
    if uneven or not 0 < alpha < float("inf") or rank < 1:
        raise ValueError(f"{file} says alpha {alpha}, rank {rank} and other values for some layers: {uneven}")
    scale = alpha / rank
    return {
        name: (tensor * scale if name.endswith(".lora_B.weight") else tensor).contiguous()
        for name, tensor in tensors.items()
    }


def _save(tensors: dict[str, Tensor], out: Path) -> None:
    """Write the file whole before it gets its name."""
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary, metadata={"format": "pt"})
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)


__all__ = ["TOOLS", "Tool", "write_for"]
