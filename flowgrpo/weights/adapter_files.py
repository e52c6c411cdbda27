"""A LoRA that exists, from which a run begins: what its files say, and its numbers in the adapters of a model.

The files are safetensors files of diffusers or peft, with `lora_A` and `lora_B` of linear layers, all of one rank and
one scale. Pickles are not read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from ..intake.json_text import parse_json
from ..intake.links import check_links
from .adapter_state import adapter_state, set_adapter_state
from .json_files import read_json_object

STEMS = ("pytorch_lora_weights", "adapter_model")
METADATA = "lora_adapter_metadata"
PREFIXES = ("base_model.model.", "transformer.", "unet.")
_PART = re.compile(r"(.+)\.lora_([AB])\.weight")
_CHECKPOINT = re.compile(r"iter-(\d+)")
_SAVE = (
    "load it with its library, save it with `pipe.save_lora_weights` or peft's `save_pretrained`, and name the result"
)


@dataclass(frozen=True)
class StartAdapter:
    """An adapter in files.

    Attributes:
        files: one for each trained module, in the order of the modules.
        rank: inner dimension of all layers.
        alpha: the update of a layer is B A times alpha / rank.
        layers: names of the adapted layers within their modules.
        numbers: how many numbers the files hold.
    """

    files: tuple[Path, ...]
    rank: int
    alpha: float
    layers: tuple[str, ...]
    numbers: int


class MissingAdapter(ValueError):
    """There is no file of the adapter."""


def read_start(path: str) -> StartAdapter:
    """What the files of an adapter say; their numbers are not read.

    Args:
        path: a `.safetensors` file, a folder with one, or a finished run of a LoRA.

    Raises:
        MissingAdapter: there is no file and no folder of this name.
        ValueError: it is no LoRA of diffusers or peft with one rank and one scale.
    """
    files = _files(Path(path))
    found = [_read(file) for file in files]
    scales = {(rank, alpha) for rank, alpha, *_ in found}
    if len(scales) > 1:
        raise ValueError(
            f"{path}: its files have the ranks and alphas {sorted(scales)}; use an adapter with one of each"
        )
    [(rank, alpha)] = scales
    layers = sorted({layer for *_, layers, _ in found for layer in layers})
    return StartAdapter(tuple(files), rank, alpha, tuple(layers), sum(numbers for *_, numbers in found))


def _files(path: Path) -> list[Path]:
    if path.is_file():
        if path.suffix != ".safetensors":
            raise ValueError(f"{path} is not a .safetensors file; {_SAVE}")
        return [path]
    if not path.is_dir():
        raise MissingAdapter(f"{path} does not exist; name a .safetensors file or a folder that holds a LoRA")
    check_links(path)
    if (number := _CHECKPOINT.fullmatch(path.name)) and path.parent.name == "checkpoints":
        raise ValueError(
            f"{path} is a checkpoint of a run, which holds no file of a LoRA. Write one with `flowgrpo export "
            f"{path.parent.parent} --checkpoint {int(number[1])} --out FOLDER`, and name its folder"
        )
    if (path / "config.yaml").is_file():
        if not (path / "lora").is_dir():
            whole = next((path / name for name in ("pipeline", "model") if (path / name).is_dir()), None)
            if whole is not None:
                raise ValueError(
                    f"{path} is a run that trained all weights; begin with its result: model.path: {whole}"
                )
            raise ValueError(
                f"{path} is a run without `lora`: it is not finished, or it trained all weights. Write a checkpoint "
                f"with `flowgrpo export {path} --checkpoint latest --out FOLDER`. Then give a LoRA as "
                "model.lora.start, and a whole model as model.path"
            )
        path = path / "lora"
    for stem in STEMS:
        found = sorted(path.glob(f"{stem}*.safetensors"), key=lambda file: (len(file.name), file.name))
        if found and found[0].stem == stem:
            return found
    names = " nor ".join(f"{stem}.safetensors" for stem in STEMS)
    raise ValueError(f"{path} holds neither {names}; name the .safetensors file itself")


def _read(file: Path) -> tuple[int, float, set[str], int]:
    """Rank, alpha and layers of a file, and how many numbers it holds."""
    try:
        with safe_open(file, framework="pt") as opened:
            keys = list(opened.keys())
            shapes = {key: opened.get_slice(key).get_shape() for key in keys}
            noted = opened.metadata() or {}
            alphas = {float(opened.get_tensor(key)) for key in keys if key.endswith(".alpha") and not shapes[key]}
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ValueError(f"{file} cannot be read ({error}); get the file again") from None
    prefix = _prefix(keys)
    others = () if prefix else (*PREFIXES, "text_encoder")
    layers: dict[str, dict[str, list[int]]] = {}
    odd = []
    for key in keys:
        match = _PART.fullmatch(key.removeprefix(prefix))
        if match is not None and len(shapes[key]) == 2 and not key.startswith(others):
            layers.setdefault(match[1], {})[match[2]] = shapes[key]
        elif not key.endswith(".alpha"):
            odd.append(key)
    if odd or not layers or any(set(pair) != {"A", "B"} for pair in layers.values()):
        what = f"it has {odd[0]!r}" if odd else "it lacks pairs of lora_A and lora_B"
        raise ValueError(
            f"{file} is not a LoRA of linear layers of one denoiser as diffusers and peft write it ({what}); {_SAVE}"
        )
    ranks = {pair["A"][0] for pair in layers.values()} | {pair["B"][1] for pair in layers.values()}
    if len(ranks) > 1:
        raise ValueError(
            f"{file}: its layers have the ranks {', '.join(map(str, sorted(ranks)))}; use a LoRA with one rank"
        )
    [rank] = ranks
    numbers = sum(math.prod(shape) for pair in layers.values() for shape in pair.values())
    return rank, _alpha(file, noted, alphas, rank), set(layers), numbers


def _prefix(keys: list[str]) -> str:
    """What stands before the names of the layers in every key of a file."""
    return next((prefix for prefix in PREFIXES if keys and all(key.startswith(prefix) for key in keys)), "")


def _alpha(file: Path, noted: Mapping[str, str], alphas: set[float], rank: int) -> float:
    """The alpha that a file or its `adapter_config.json` says; the rank if nothing says it, as in diffusers."""
    config = file.with_name("adapter_config.json")
    said: dict[str, Any] = {}
    if METADATA in noted:
        read = parse_json(noted[METADATA])
        said = {str(key).rpartition(".")[2]: value for key, value in read.items()} if isinstance(read, dict) else {}
    elif file.stem == STEMS[1] and config.is_file():
        said = read_json_object(config)
    unusual = [key for key in ("alpha_pattern", "use_rslora", "use_dora", "modules_to_save") if said.get(key)]
    if unusual or len(alphas) > 1:
        raise ValueError(
            f"{file} has {unusual[0] if unusual else 'several alphas'}, and an adapter here has one scale for all "
            "layers; use a plain LoRA"
        )
    alpha = said.get("lora_alpha", next(iter(alphas), rank))
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < float("inf"):
        raise ValueError(f"{file}: lora_alpha is {alpha!r}, which is not a number above 0; get the file again")
    return float(alpha)


def put_start(modules: Mapping[str, nn.Module], adapter: str, start: StartAdapter) -> None:
    """Copy an adapter into the adapters of modules, in their precision.

    Args:
        modules: the trained modules by name, with adapters of the same rank and layers.
        adapter: name of the adapters.
        start: the adapter in its files.

    Raises:
        ValueError: the number of files, a layer or a shape differs from the modules.
    """
    if len(start.files) != len(modules):
        raise ValueError(
            f"{start.files[0]} is one of {len(start.files)} files of a LoRA, and the model has {len(modules)} "
            f"denoisers ({', '.join(modules)}), each with a file of its own; name a folder that a run of this model "
            "has written"
        )
    for (name, module), file in zip(modules.items(), start.files):
        state = load_file(file)
        prefix = _prefix(list(state))
        state = {key.removeprefix(prefix): value for key, value in state.items() if not key.endswith(".alpha")}
        found = adapter_state(module, adapter)
        wanted = {key.removeprefix(PREFIXES[0]): list(value.shape) for key, value in found.items()}
        given = {key: list(value.shape) for key, value in state.items()}
        if odd := sorted(key for key in given.keys() | wanted.keys() if given.get(key) != wanted.get(key)):
            raise ValueError(
                f"{file} does not fit {name} ({type(module).__name__}): {odd[0]} is {given.get(odd[0], 'missing')} in "
                f"the file, and {wanted.get(odd[0], 'not there')} in the model; use a LoRA of this model, and leave "
                "model.lora.targets out"
            )
        set_adapter_state(module, adapter, state)
