"""Write trained weights as folders that plain diffusers loads."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .adapter_state import adapter_state, set_adapter_state
from .json_files import read_json_object
from .pipeline_folders import from_hub, is_part, parts_of, safetensors_faults

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

__all__ = [
    "left_out",
    "load_lora",
    "local_folder",
    "new_folder",
    "put_adapter",
    "save_adapter",
    "save_lora",
    "save_modules",
    "save_pipeline",
    "untrained_parts",
]

ADAPTER_FILE = "adapter_model.safetensors"  # peft's name
PEFT_PREFIX = "base_model.model."
_LORA_STEM = "pytorch_lora_weights"
_INDEX, _OUR_NOTE = "model_index.json", "flowgrpo.json"


def local_folder(path: str) -> str:
    """The folder of a pipeline: the path itself, or for a hub id its local snapshot, which is downloaded if needed.

    Raises:
        ValueError: the hub id cannot be read.
    """
    if Path(path).is_dir():
        return path
    from diffusers import DiffusionPipeline

    with from_hub(path):
        return str(DiffusionPipeline.download(path))


def left_out(path: str) -> dict[str, None]:
    """Components that a pipeline folder leaves out, as arguments of `from_pretrained`; empty for a hub id."""
    index = Path(path) / _INDEX
    parts = read_json_object(index) if index.is_file() else {}
    return {name: None for name, value in parts.items() if value == [None, None]}


@contextmanager
def new_folder(folder: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder beside `folder`; if the block ends without an error, it is renamed to `folder`.

    Args:
        folder: to create; missing parents are created.
        overwrite: replace an existing folder, which stays in place until the new folder is complete.

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
        # The new folder is inside the temporary folder, because mkdtemp gives mode 0700 and the result must have the
        # user's default mode.
        fresh = workplace / "new"
        fresh.mkdir()
        yield fresh
        _flush(fresh)
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
    """Write each module's adapter, with the writer of the pipeline's class if it has a writer.

    The first module's file is `pytorch_lora_weights.safetensors`. The files of further modules have the module's name
    added. There are no sub-folders, because diffusers' loader looks there only if the folder itself has no file of that
    name.
    """
    writer = getattr(type(pipe), "save_lora_weights", None)
    for number, (name, module) in enumerate(modules.items()):
        file = f"{_LORA_STEM}_{name}.safetensors" if number else f"{_LORA_STEM}.safetensors"
        if writer is None:
            module.save_lora_adapter(folder, adapter_name=adapter, weight_name=file)
            continue
        config = module.peft_config[adapter]
        # Only fields that determine the function: the whole config has fields that other versions of peft refuse.
        metadata = {
            "r": config.r,
            "lora_alpha": config.lora_alpha,
            "target_modules": sorted(config.target_modules),
            "bias": config.bias,
            # Usually empty, but older versions of diffusers load nothing without this field.
            "rank_pattern": dict(config.rank_pattern),
        }
        kind = "unet" if name == "unet" else "transformer"
        layers = _on_cpu(adapter_state(module, adapter))
        given: dict[str, Any] = {f"{kind}_lora_layers": layers, f"{kind}_lora_adapter_metadata": metadata}
        writer(folder, weight_name=file, **given)


def load_lora(modules: Mapping[str, nn.Module], adapter: str, folder: Path) -> None:
    """Copy the files of `save_lora` into the adapters of the modules, in the precision of the adapters.

    Raises:
        ValueError: as in `put_adapter`.
    """
    for number, (name, module) in enumerate(modules.items()):
        file = folder / (f"{_LORA_STEM}_{name}.safetensors" if number else f"{_LORA_STEM}.safetensors")
        put_adapter(module, adapter, file, "unet." if name == "unet" else "transformer.")


def save_adapter(model: Any, adapter: str, folder: Path) -> None:
    """Write the adapter of a model of transformers, for `PeftModel.from_pretrained`.

    Args:
        model: a model of transformers.
        adapter: name of the adapter.
        folder: existing folder to write in.
    """
    config = model.peft_config[adapter]
    config.base_model_name_or_path = model.name_or_path
    if type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        config.task_type = "CAUSAL_LM"  # peft's auto class finds the model's class by it
    tensors = _on_cpu(adapter_state(model, adapter))
    save_file(
        {f"{PEFT_PREFIX}{name}": tensor for name, tensor in tensors.items()},
        folder / ADAPTER_FILE,
        metadata={"format": "pt"},
    )
    config.save_pretrained(folder)


def put_adapter(module: nn.Module, adapter: str, file: Path, prefix: str) -> None:
    """Copy the tensors of a file into an adapter of the same layers and rank.

    Args:
        module: the module with the adapter.
        adapter: name of the adapter.
        file: a safetensors file.
        prefix: removed from names in the file that begin with it.

    Raises:
        ValueError: the file is missing or damaged, or its layers or its rank differ from the adapter.
    """
    if not file.is_file():
        raise ValueError(f"{file} is missing; give a folder that a run has written")
    for fault in safetensors_faults(file):
        raise ValueError(f"{fault}, or name a checkpoint of the run with --checkpoint")
    state = {key.removeprefix(prefix): value for key, value in load_file(file).items()}
    wanted = adapter_state(module, adapter)
    shapes, given = ({key: list(value.shape) for key, value in one.items()} for one in (wanted, state))
    if odd := sorted(key for key in shapes.keys() | given.keys() if shapes.get(key) != given.get(key)):
        raise ValueError(
            f"{file} is not the adapter that model.lora describes: {odd[0]} is {given.get(odd[0], 'missing')} in the "
            f"file, and {shapes.get(odd[0], 'nothing')} in the adapter; use the recipe of the run that wrote the file"
        )
    set_adapter_state(module, adapter, state)


def save_pipeline(
    pipe: DiffusionPipeline,
    modules: Mapping[str, nn.Module],
    folder: Path,
    *,
    had: Mapping[str, type],
    source: str | Path | None = None,
    kept: Path | None = None,
) -> None:
    """Write a complete pipeline folder with the trained modules in it.

    Args:
        pipe: the pipeline.
        modules: component name -> trained module.
        folder: existing empty folder to write in.
        had: class of each component that the pipeline had when training began.
        source: folder from which the pipeline was loaded. Every untrained component is copied from there, and a
            component that is left out there stays left out. Without a source, untrained components come from the
            pipeline.
        kept: folder of `save_modules`, from which the trained modules are copied. Without it, they are written as they
            are now. It needs a source.

    Raises:
        ValueError: `source` is not a complete pipeline folder, or there is no source and components were released.
    """
    if source is None:
        gone = [name for name, kind in had.items() if name not in modules and type(getattr(pipe, name)) is not kind]
        if gone:
            raise ValueError(
                f"{', '.join(gone)} of this {type(pipe).__name__} have been released, and without them the saved "
                "pipeline could not be loaded; write TrainedWeights.full(pipe, source=FOLDER) with the folder from "
                "which the pipeline was loaded"
            )
        pipe.save_pretrained(folder)
        return
    source = Path(source)
    names = untrained_parts(source, set(modules), type(pipe))
    # A file beside the index may hold the pipeline's own class, and our note has the recommended call. Repositories may
    # have further large files; these stay behind.
    for file in (source / _INDEX, source / _OUR_NOTE, *sorted(source.glob("*.py"))):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    if kept is None:
        save_modules(modules, folder)
    copies = dict.fromkeys(names, source) | ({} if kept is None else dict.fromkeys(modules, kept))
    for name, place in copies.items():
        # `copyfile` copies neither the modes of the source, which may be read-only, nor the links of a download cache.
        shutil.copytree(place / name, folder / name, copy_function=shutil.copyfile)


def save_modules(modules: Mapping[str, nn.Module], folder: Path) -> None:
    """Write trained modules, each into a folder of its name."""
    for name, module in modules.items():
        module.save_pretrained(folder / name)


def untrained_parts(source: Path, trained: set[str], kind: type) -> list[str]:
    """Names of the components that a pipeline folder lists, but for the trained ones.

    Raises:
        ValueError: the folder is not a complete pipeline folder, or it does not list a trained component.
    """
    index = source / _INDEX
    if not index.is_file():
        raise ValueError(f"{source} has no model_index.json; give a local pipeline folder as `source`")
    entries = {name for name, entry in parts_of(read_json_object(index), kind).items() if is_part(entry)}
    if odd := trained - entries:
        raise ValueError(
            f"{index} lists no {', '.join(sorted(odd))}; give the folder from which the pipeline was loaded"
        )
    kept = sorted(entries - trained)
    if absent := [name for name in kept if not (source / name).is_dir()]:
        raise ValueError(
            f"{source} lacks {', '.join(absent)}, which its model_index.json lists; complete the folder first"
        )
    return kept


def _flush(folder: Path) -> None:
    """Write every file to disk before the folder gets its name."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as handle:
                try:
                    os.fsync(handle.fileno())
                except OSError as error:
                    # Python's message names no file, but a user who must free space needs to know on which disk.
                    raise OSError(error.errno, error.strerror, str(file)) from error


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
