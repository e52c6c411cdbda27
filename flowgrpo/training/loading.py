"""Models by the path a recipe gives: the embedded ones, folders and hub ids."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Collection, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from ..pipelines.acceleration import Quantized, quantization
from ..pipelines.pictures import ENDINGS, Picture
from ..pipelines.saving import left_out

UNTRAINED = "arithmetic:untrained"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def embedded_pipeline() -> Path:
    """The folder of the embedded scenes pipeline.

    Raises:
        ValueError: this installation lacks it.
    """
    folder = Path(str(resources.files("flowgrpo.scenes") / "pipeline"))
    if not (folder / "model_index.json").is_file():
        raise ValueError("the embedded pipeline is not installed; build it with `flowgrpo build scenes --out FOLDER`")
    return folder


def model_folder(path: str) -> str:
    """Resolve `scenes`, a folder or a hub id.

    Raises:
        ValueError: it looks like a path but there is no pipeline there.
    """
    if path == "scenes":
        return str(embedded_pipeline())
    folder = Path(path)
    if folder.is_dir() and not (folder / "model_index.json").is_file():
        raise ValueError(
            f"model.path {path!r} holds no model_index.json; give the folder of a whole diffusers pipeline"
        )
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    if not folder.is_dir() and looks_local:
        raise ValueError(
            f"model.path {path!r} is not a folder; give a pipeline folder, a hub id (owner/name) or scenes"
        )
    return path


def language_folder(path: str) -> str:
    """Resolve `arithmetic`, `arithmetic:untrained`, a folder or a hub id.

    Raises:
        ValueError: it looks like a path but there is no model there.
    """
    if path in ("arithmetic", UNTRAINED):
        folder = Path(str(resources.files("flowgrpo.text") / "arithmetic"))
        if not (folder / "config.json").is_file():
            raise ValueError(
                "the embedded language model is not installed; build it with `flowgrpo build arithmetic --out FOLDER`"
            )
        return str(folder)
    folder = Path(path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"model.path {path!r} holds no config.json; give the folder of a transformers model")
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    if not folder.is_dir() and looks_local:
        raise ValueError(
            f"model.path {path!r} is not a folder; give a model folder, a hub id (owner/name) or arithmetic"
        )
    return path


def call_arguments(path: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the pipeline's call: those its folder recommends (`flowgrpo.json`), then the recipe's.

    The name of a picture file stands for the picture.

    Raises:
        ValueError: a picture that cannot be read.
    """
    note = Path(path) / "flowgrpo.json"
    recommended = json.loads(note.read_text(encoding="utf-8"))["call"] if note.is_file() else {}
    found = {**recommended, **given}
    for name, value in given.items():
        if isinstance(value, str) and "prompt" not in name and Path(value).suffix.lower() in ENDINGS:
            found[name] = Picture(Path(value), f"model.call.{name}").read()
    return found


def load_pipeline(
    path: str, dtype: torch.dtype, quantize: Quantized | None = None, float32: Collection[str] = ()
) -> Any:
    """Load a diffusers pipeline in `dtype`, its denoisers' linear weights in 8 bits if asked for.

    Components its folder leaves out are passed as None, as diffusers asks. Those that `float32` names stay in that.
    """
    from diffusers import DiffusionPipeline

    fewer = {} if quantize is None else {"quantization_config": quantization(quantize)}
    kept = {} if dtype is torch.float32 else dict.fromkeys(float32, torch.float32)
    kinds: Any = {**kept, "default": dtype} if kept else dtype
    pipe = DiffusionPipeline.from_pretrained(path, torch_dtype=kinds, **left_out(path), **fewer)
    pipe.set_progress_bar_config(disable=True)
    vae = getattr(pipe, "vae", None)
    if isinstance(vae, torch.nn.Module) and not any(p.ndim == 5 for p in vae.parameters()):
        vae.to(memory_format=torch.channels_last)  # decodes in two thirds of the time
    return pipe


def quiet_libraries() -> None:
    """Keep libraries from writing over the progress of a run."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # diffusers renames the argument; older versions that are supported know only this name.
    warnings.filterwarnings("ignore", message=".*torch_dtype.*", category=FutureWarning)
    import diffusers.utils.logging
    import transformers.utils.logging

    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("peft").setLevel(logging.ERROR)
