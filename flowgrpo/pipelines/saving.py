"""Folders that plain diffusers loads: writing trained weights as such, and what one leaves out."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peft import get_peft_model_state_dict
from torch import Tensor, nn

from .json_files import read_json_object

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

__all__ = ["left_out", "new_folder", "save_lora", "save_pipeline"]

_LORA_STEM = "pytorch_lora_weights"


def left_out(path: str) -> dict[str, None]:
    """Components that a pipeline folder leaves out, as diffusers asks for them on loading; none of a hub id."""
    index = Path(path) / "model_index.json"
    parts = read_json_object(index) if index.is_file() else {}
    return {name: None for name, value in parts.items() if value == [None, None]}


@contextmanager
def new_folder(folder: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Fill a temporary sibling folder; on leaving without an error it takes the name `folder`.

    Args:
        folder: to create; missing parents are created.
        overwrite: replace an existing folder, which stays in place until the new one is complete.

    Raises:
        ValueError: `folder` exists and `overwrite` is off, or it is a file.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; name a folder")
    if folder.exists() and not overwrite:
        raise ValueError(f"{folder} exists; name a new folder, or pass overwrite=True to replace it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    workplace = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        # A folder inside, because mkdtemp's own has mode 0700, and the result is to have the user's mode.
        fresh = workplace / "new"
        fresh.mkdir()
        yield fresh
        if folder.exists():
            old = workplace / "old"
            os.replace(folder, old)
            try:
                os.replace(fresh, folder)
            except OSError:
                os.replace(old, folder)
                raise
        else:
            os.replace(fresh, folder)
    finally:
        shutil.rmtree(workplace, ignore_errors=True)


def save_lora(pipe: DiffusionPipeline, modules: dict[str, nn.Module], adapter: str, folder: Path) -> None:
    """Write each module's adapter, through the pipeline class's own writer where it has one.

    The first module's file is `pytorch_lora_weights.safetensors`; a further module's has its name added.
    Not a sub-folder: diffusers' loader looks there only if the folder itself has no file of that name.
    """
    writer = getattr(type(pipe), "save_lora_weights", None)
    for number, (name, module) in enumerate(modules.items()):
        file = f"{_LORA_STEM}_{name}.safetensors" if number else f"{_LORA_STEM}.safetensors"
        if writer is None:
            module.save_lora_adapter(folder, adapter_name=adapter, weight_name=file)
            continue
        config = module.peft_config[adapter]
        # Only what fixes the function: peft's whole config holds fields that other versions of it refuse.
        metadata = {
            "r": config.r,
            "lora_alpha": config.lora_alpha,
            "target_modules": sorted(config.target_modules),
            "bias": config.bias,
        }
        kind = "unet" if name == "unet" else "transformer"
        layers = _on_cpu(get_peft_model_state_dict(module, adapter_name=adapter))
        given: dict[str, Any] = {f"{kind}_lora_layers": layers, f"{kind}_lora_adapter_metadata": metadata}
        writer(folder, weight_name=file, **given)


def save_pipeline(
    pipe: DiffusionPipeline,
    modules: dict[str, nn.Module],
    folder: Path,
    *,
    had: set[str],
    source: str | Path | None = None,
) -> None:
    """Write a pipeline folder with the trained modules in it.

    Args:
        pipe: the pipeline.
        modules: component name -> trained module.
        folder: existing empty folder to write in.
        had: names of the components the pipeline had when training began.
        source: pipeline folder to copy all untrained components from. Without it they come from the pipeline;
            if it has released any of them, only the trained modules are written.

    Raises:
        ValueError: `source` is not a folder with a `model_index.json` and the components listed there.
    """
    if source is not None:
        _copy_untrained(Path(source), folder, set(modules))
    elif not _released(pipe, had):
        pipe.save_pretrained(folder)
        return
    for name, module in modules.items():
        module.save_pretrained(folder / name)


def _released(pipe: DiffusionPipeline, had: set[str]) -> set[str]:
    """Components that are gone, though the pipeline once had them or cannot be loaded without them."""
    optional = set(getattr(type(pipe), "_optional_components", None) or ())
    absent = {name for name, part in pipe.components.items() if part is None}
    return {name for name in absent if name in had or name not in optional}


def _copy_untrained(source: Path, folder: Path, trained: set[str]) -> None:
    """Copy the index and the components it lists; model repositories also hold other, large files."""
    index = source / "model_index.json"
    if not index.is_file():
        raise ValueError(f"{source} has no model_index.json; give a local pipeline folder as `source`")
    entries = {
        name: entry
        for name, entry in json.loads(index.read_text()).items()
        if isinstance(entry, list) and len(entry) == 2 and entry[0] is not None
    }
    if absent := [name for name in entries if name not in trained and not (source / name).is_dir()]:
        raise ValueError(f"{source} lacks {', '.join(absent)}, listed in its model_index.json; complete it first")
    shutil.copy(index, folder / index.name)
    for name in entries:
        if name not in trained:
            shutil.copytree(source / name, folder / name)


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
