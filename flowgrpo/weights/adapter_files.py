"""A LoRA that exists, from which a run begins: what its files say, and its numbers in the adapters of a model.

The files are safetensors files of diffusers, of peft, or of a tool whose names diffusers converts
(`lora_conversion.py`). They have LoRAs of linear layers. Pickles are not read.

The adapters of a run have one rank and one scale. A layer of a lower rank gets the greatest rank of the file: the
further rows of A are those of a new adapter, and the further columns of B are zero, so the layer computes the same. If
layers have several scales, each is multiplied into its B, and the scale of the run is 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..intake.json_text import parse_json
from ..intake.links import check_links
from .adapter_state import adapter_state, set_adapter_state
from .json_files import read_json_object
from .lora_conversion import BasePipeline, LoraPair, alpha_of, converted, is_foreign, refuse_others

STEMS = ("pytorch_lora_weights", "adapter_model")
METADATA = "lora_adapter_metadata"
PREFIXES = ("base_model.model.", "transformer.", "unet.")
ENCODERS = ("text_encoder.", "text_encoder_2.", "text_encoder_3.")
"""Beginnings of names of the LoRAs of text encoders, which a run of images leaves out."""
_PART = re.compile(r"(.+)\.lora_([AB])\.weight")
_PLAIN = re.compile(r"\^?[\w.-]+")
_CHECKPOINT = re.compile(r"iter-(\d+)")
_SAVE = (
    "load it with its library, save it with `pipe.save_lora_weights` or peft's `save_pretrained`, and name the result"
)


@dataclass(frozen=True)
class StartAdapter:
    """An adapter in files.

    Attributes:
        files: one for each trained module, in the order of the modules.
        rank: greatest inner dimension of a layer.
        alpha: the update of a layer is B A times alpha / rank. If the layers of the files have several scales, it is
            the rank.
        layers: names of the adapted layers within their modules.
        numbers: how many numbers the adapters have, all with this rank.
        base: of which pipeline the LoRA is; None for a language model.
        left_out: the text encoders whose LoRAs the files hold too.
    """

    files: tuple[Path, ...]
    rank: int
    alpha: float
    layers: tuple[str, ...]
    numbers: int
    base: BasePipeline | None = None
    left_out: tuple[str, ...] = ()


class MissingAdapter(ValueError):
    """There is no file of the adapter."""


def read_start(path: str, base: BasePipeline | None = None) -> StartAdapter:
    """What the files of an adapter say.

    Args:
        path: a `.safetensors` file, a folder with one, or a finished run of a LoRA.
        base: of which pipeline the LoRA is; None for a language model.

    Raises:
        MissingAdapter: there is no file and no folder of this name.
        UnreadBase: the file has the names of another tool, and the class of the pipeline is not known here.
        ValueError: it is no LoRA of linear layers.
    """
    files = _files(Path(path))
    read = [_read(file, base) for file in files]
    pairs = [pair for one in read for pair in one.pairs.values()]
    rank = max(pair.rank for pair in pairs)
    ratios = {(pair.alpha, pair.rank) for pair in pairs}
    scales = {pair.scale for pair in pairs}
    if len(ratios) == 1:
        alpha = pairs[0].alpha
    else:
        alpha = scales.pop() * rank if len(scales) == 1 else float(rank)
    return StartAdapter(
        tuple(files),
        rank,
        alpha,
        tuple(sorted({layer for one in read for layer in one.pairs})),
        sum(rank * (pair.a.shape[1] + pair.b.shape[0]) for pair in pairs),
        base,
        tuple(sorted({name for one in read for name in one.left_out})),
    )


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


@dataclass(frozen=True)
class _File:
    """A file: the LoRA of each layer, and the text encoders whose LoRAs it holds too."""

    pairs: dict[str, LoraPair]
    left_out: frozenset[str]


def _read(file: Path, base: BasePipeline | None) -> _File:
    """The LoRAs of the layers of a denoiser or a language model; a file of diffusers is mapped, and not read yet."""
    try:
        with safe_open(file, framework="pt") as opened:
            noted = opened.metadata() or {}
            state = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - it is no mapping
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ValueError(f"{file} cannot be read ({error}); get the file again") from None
    refuse_others(file, list(state))
    if any(map(is_foreign, state)):
        state = converted(file, state, base)
        noted = {}
    encoders = () if base is None else ENCODERS
    left_out = frozenset(key.partition(".")[0] for key in state if key.startswith(encoders))
    state = {key: value for key, value in state.items() if not key.startswith(encoders)}
    prefix = _prefix(list(state))
    others = () if prefix else (*PREFIXES, "text_encoder")
    layers: dict[str, dict[str, Tensor]] = {}
    alphas: dict[str, Tensor] = {}
    odd = []
    for key, value in state.items():
        match = _PART.fullmatch(key.removeprefix(prefix))
        if match is not None and value.dim() == 2 and not key.startswith(others):
            layers.setdefault(match[1], {})[match[2]] = value
        elif key.endswith(".alpha"):
            alphas[key.removeprefix(prefix).removesuffix(".alpha")] = value
        else:
            odd.append(key)
    if not state and left_out:
        raise ValueError(
            f"{file} adapts {', '.join(sorted(left_out))} alone, and a run trains the denoiser; use a LoRA of the "
            "denoiser"
        )
    if odd or not layers or any(set(pair) != {"A", "B"} for pair in layers.values()):
        what = f"it has {odd[0]!r}{_shaped(state[odd[0]])}" if odd else "it lacks pairs of lora_A and lora_B"
        raise ValueError(
            f"{file} is not a LoRA of linear layers of one denoiser as diffusers and peft write it ({what}); {_SAVE}"
        )
    for name, pair in layers.items():
        if pair["A"].shape[0] != pair["B"].shape[1] or not pair["A"].numel():
            shapes = f"{list(pair['A'].shape)} and {list(pair['B'].shape)}"
            raise ValueError(f"{file}: A and B of {name} have the shapes {shapes}, and no rank; get the file again")
    said = _said(file, noted)
    return _File({name: _pair(file, name, pair, alphas.get(name), said) for name, pair in layers.items()}, left_out)


def _shaped(value: Tensor) -> str:
    return ", which is of a convolution" if value.dim() == 4 else ""


def _prefix(keys: list[str]) -> str:
    """What stands before the names of the layers in every key of a file."""
    return next((prefix for prefix in PREFIXES if keys and all(key.startswith(prefix) for key in keys)), "")


def _said(file: Path, noted: Mapping[str, str]) -> dict[str, Any]:
    """The settings of peft that a file or its `adapter_config.json` says, but for those of text encoders."""
    config = file.with_name("adapter_config.json")
    said: dict[str, Any] = {}
    if METADATA in noted:
        read = parse_json(noted[METADATA])
        own = (
            {key: value for key, value in read.items() if not key.startswith(ENCODERS)}
            if isinstance(read, dict)
            else {}
        )
        said = {str(key).rpartition(".")[2]: value for key, value in own.items()}
    elif file.stem == STEMS[1] and config.is_file():
        said = read_json_object(config)
    if unusual := [key for key in ("use_dora", "modules_to_save") if said.get(key)]:
        raise ValueError(f"{file} has {unusual[0]}, and a run trains a plain LoRA of linear layers; use a plain LoRA")
    return said


def _pair(file: Path, name: str, pair: Mapping[str, Tensor], alpha: Tensor | None, said: Mapping[str, Any]) -> LoraPair:
    """The LoRA of one layer, with the alpha that the file says beside it or in the settings of peft."""
    rank = pair["A"].shape[0]
    found: Any = said.get("lora_alpha") if alpha is None else alpha
    if alpha is None:
        found = _of_pattern(file, name, said.get("alpha_pattern") or {}, found)
    value = alpha_of(file, name, found, rank)
    return LoraPair(pair["A"], pair["B"], value * math.sqrt(rank) if said.get("use_rslora") else value)


def _of_pattern(file: Path, name: str, patterns: Any, default: Any) -> Any:
    """The alpha of a layer: what peft's `alpha_pattern` has for the end of its name, or the default."""
    if not isinstance(patterns, dict):
        raise ValueError(f"{file}: alpha_pattern is {patterns!r:.80}, which is no mapping; get the file again")
    for key, value in patterns.items():
        # A regular expression of a stranger could take for ever.
        if not _PLAIN.fullmatch(key):
            raise ValueError(
                f"{file}: alpha_pattern has {key!r:.80}, and only whole names of layers are read; use a plain LoRA"
            )
        if name == key.removeprefix("^") or (key[0] != "^" and name.endswith(f".{key}")):
            return value
    return default


@torch.no_grad()
def put_start(modules: Mapping[str, nn.Module], adapter: str, start: StartAdapter) -> None:
    """Copy an adapter into new adapters of modules, in their precision.

    Args:
        modules: the trained modules by name, with adapters of the same rank and layers, with B = 0.
        adapter: name of the adapters.
        start: the adapter in its files.

    Raises:
        ValueError: the number of files, a layer or a shape differs from the modules, or a number is not finite.
    """
    if len(start.files) != len(modules):
        raise ValueError(
            f"{start.files[0]} is one of {len(start.files)} files of a LoRA, and the model has {len(modules)} "
            f"denoisers ({', '.join(modules)}), each with a file of its own; name a folder that has "
            f"{', '.join(_named(modules))}"
        )
    for (name, module), file in zip(modules.items(), start.files):
        pairs = _read(file, start.base).pairs
        found = {key.removeprefix(PREFIXES[0]): value for key, value in adapter_state(module, adapter).items()}
        given = {
            f"{layer}.lora_{side}.weight": value
            for layer, pair in pairs.items()
            for side, value in (("A", pair.a), ("B", pair.b))
        }
        shapes = {key: _filled(key, value, start.rank) for key, value in given.items()}
        wanted = {key: list(value.shape) for key, value in found.items()}
        if odd := sorted(key for key in shapes.keys() | wanted.keys() if shapes.get(key) != wanted.get(key)):
            own = "missing" if odd[0] not in given else list(given[odd[0]].shape)
            raise ValueError(
                f"{file} does not fit {name} ({type(module).__name__}): {odd[0]} is {own} in "
                f"the file, and {wanted.get(odd[0], 'not there')} in the model; use a LoRA of this model, and leave "
                "model.lora.targets out"
            )
        state = {key: value.clone() for key, value in found.items()}
        for layer, pair in pairs.items():
            a, b = (state[f"{layer}.lora_{side}.weight"] for side in "AB")
            a[: pair.rank] = pair.a.to(a.dtype)
            # The product in float32, because a file in 16 bits would round it.
            factor = pair.scale / (start.alpha / start.rank)
            b[:, : pair.rank] = (pair.b if factor == 1 else pair.b.float() * factor).to(b.dtype)
            if not (a.isfinite().all() and b.isfinite().all()):
                raise ValueError(f"{file} has numbers of {layer} that are not finite; get the file again")
        set_adapter_state(module, adapter, state)


def _filled(key: str, value: Tensor, rank: int) -> list[int]:
    """The shape of A or B with the rank of the adapters."""
    rows, columns = value.shape
    return [rank, columns] if ".lora_A." in key else [rows, rank]


def _named(modules: Mapping[str, nn.Module]) -> list[str]:
    """The names of the files of modules, as `saving.py` writes them."""
    return [f"{STEMS[0]}{f'_{name}' if number else ''}.safetensors" for number, name in enumerate(modules)]
