"""LoRAs of other tools in the names of diffusers, by the conversions of diffusers, and a check of what they give.

Tools name the layers of a model as its first release did. kohya's scripts write `lora_unet_...lora_down.weight` and
`.alpha`, and ComfyUI and ai-toolkit write `diffusion_model....lora_A.weight`. Each pipeline class of diffusers converts
the names that it knows (`lora_state_dict`). A conversion may leave out what it does not know, with a warning at most.
So the squared size of all changes of weights, the sum of |scale B A|², is compared before and after: a conversion may
cut B into pieces by rows, and the sum stays.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .json_files import read_json_object
from .pipeline_folders import INDEX, from_hub, named_pipeline, pipeline_class

__all__ = ["BasePipeline", "LoraPair", "UnreadBase", "alpha_of", "converted", "is_foreign", "refuse_others"]

_SIDE = re.compile(
    r"(?P<layer>.+?)\.(?:lora_|lora\.|lora_linear_layer\.)?(?P<side>down|up|A|B)(?:\.default)?\.weight", re.DOTALL
)
_TOOLS = re.compile(r"(?:model\.)?diffusion_model\.|lora_unet_|lora_te")
"""Beginnings of names that only other tools write."""
_RELEASED = re.compile(r"(?:base_model\.model\.)?(?:double|single)_blocks\.")
"""Beginnings of names of layers as FLUX.1 was released. Some models of diffusers have such names too."""
_KINDS = {
    "lokr_": "a LoKr (Kronecker products)",
    "hada_": "a LoHa (Hadamard products)",
    "dora_scale": "a DoRA",
    "lora_magnitude_vector": "a DoRA",
    "oft_": "an OFT",
    "oft_blocks": "an OFT",
    "boft_": "a BOFT",
    "ia3_": "an IA3",
    ".diff": "a LoRA with whole differences of weights beside it",
    "lora_mid": "a LoRA of convolutions with a middle product (LoCon)",
    "lora_B.bias": "a LoRA with biases",
    "lora_embedding": "a LoRA of embeddings",
}
"""Parts of names that only files of other adapters have."""
_ENDLESS = re.compile(r"\d{5}")
"""Some conversions count up to the greatest number in a name."""
_SAME = 1e-4
"""How far the squared size of all changes may move by rounding, as a share."""


@dataclass(frozen=True)
class BasePipeline:
    """Of which pipeline a LoRA is; it is looked at only if a file has the names of another tool.

    Attributes:
        path: folder of the pipeline, or its hub id.
        chosen: name of a pipeline class in place of the class that the folder names.
        fetches: whether the index of a hub id may be downloaded.
    """

    path: str
    chosen: str | None = None
    fetches: bool = True


class UnreadBase(ValueError):
    """The pipeline is on the hub, and its class is not known on this machine."""


@dataclass(frozen=True)
class LoraPair:
    """The LoRA of one layer: its weight changes by scale B A.

    Attributes:
        a: [rank, in].
        b: [out, rank].
        alpha: the scale is alpha / rank.
    """

    a: Tensor
    b: Tensor
    alpha: float

    @property
    def rank(self) -> int:
        """The inner dimension."""
        return self.a.shape[0]

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / self.rank

    def squared(self) -> float:
        """|scale B A|²."""
        a, b = self.a.flatten(1).double(), self.b.flatten(1).double()
        return self.scale**2 * float(((b.T @ b) * (a @ a.T)).sum())


def is_foreign(key: str) -> bool:
    """Whether a name of a tensor may be of another tool than diffusers and peft."""
    return _of_a_tool(key) or _RELEASED.match(key) is not None


def _of_a_tool(key: str) -> bool:
    side = _SIDE.fullmatch(key)
    plain = key.endswith((".lora_A.weight", ".lora_B.weight"))
    return _TOOLS.match(key) is not None or (side is not None and not plain)


def refuse_others(file: Path, keys: list[str]) -> None:
    """Refuse adapters that are no LoRAs, by the names of their tensors.

    Raises:
        ValueError: a name is of another adapter.
    """
    for key in keys:
        kind = next((kind for part, kind in _KINDS.items() if part in key), None)
        if kind is not None:
            raise ValueError(
                f"{file} is {kind} (it has {key!r}), and a run trains a plain LoRA of linear layers; use a plain LoRA, "
                "or merge the file into its model with the tool that wrote it, and give the merged model as model.path"
            )


def converted(file: Path, state: dict[str, Tensor], base: BasePipeline | None) -> dict[str, Tensor]:
    """The tensors of a LoRA of another tool, named as by diffusers, in float32.

    Args:
        file: for messages.
        state: its tensors.
        base: of which pipeline the LoRA is; None for a language model.

    Returns:
        `transformer.LAYER.lora_A.weight` and so on. `transformer.LAYER.alpha` is there where the conversion has not
        multiplied the scale into the numbers.

    Raises:
        UnreadBase: the class of the pipeline is not known on this machine.
        ValueError: no conversion of diffusers takes the file, or a conversion leaves out a part of it.
    """
    if base is None:
        raise ValueError(
            f"{file} has {next(iter(state))!r}, which is no name of a LoRA of a language model; give a LoRA that "
            "`save_pretrained` of peft has written"
        )
    kind, settings = _reader(file, base)
    name = getattr(kind, "__name__", "a class of its own")
    reads: Any = getattr(kind, "lora_state_dict", None)
    if reads is None:
        raise ValueError(
            f"{file} has names of another tool, and diffusers converts none for {base.path} ({name}); {_SAVE}"
        )
    if endless := next(filter(_ENDLESS.search, state), None):
        raise ValueError(f"{file} has {endless!r:.200}, with a number that no layer has; get the file again")
    given = _squared(file, state)
    if not math.isfinite(given):
        raise ValueError(f"{file} has numbers that are not finite; get the file again")
    # In float32, because in 16 bits a scale that is no power of two would round the numbers. Copies, because some
    # conversions change tensors in place.
    copies = {key: value.to(torch.float32, copy=True) for key, value in state.items()}
    try:
        read: Any = reads(_with_alphas(copies), **settings)
    except Exception as error:  # a conversion raises whatever a name leads it to
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"{file} has names that the conversion of diffusers for {name} does not take ({said:.200}); use a LoRA "
            f"of this model, or {_SAVE}"
        ) from None
    found, alphas = read if isinstance(read, tuple) else (read, None)
    after = _as_peft(found) | _alphas(alphas or {})
    if unknown := [key for key in after if _of_a_tool(key)]:
        raise ValueError(
            f"{file} has {unknown[0]!r}, and diffusers has no conversion of such names for {name}; {_SAVE}"
        )
    got = _squared(file, after)
    if not abs(given - got) <= _SAME * given:
        raise ValueError(
            f"{file}: the conversion of diffusers for {name} leaves out a part of it or counts a part twice (the "
            f"squared size of all changes is {given:.6g} before and {got:.6g} after); use a LoRA of this model, or "
            f"{_SAVE}"
        )
    return after


_SAVE = "load it with its own tool, and save it in the names of diffusers"


def _reader(file: Path, base: BasePipeline) -> tuple[type | None, dict[str, Any]]:
    """The class of a pipeline, and what its conversion of names must be told."""
    folder = Path(base.path)
    if folder.is_dir():
        kind = pipeline_class(folder, base.chosen)
        unet = folder / "unet" / "config.json"
        config = read_json_object(unet) if unet.is_file() else None
    else:
        kind, config = _hub_reader(file, base)
    return kind, {} if config is None else {"unet_config": SimpleNamespace(**config)}


def _hub_reader(file: Path, base: BasePipeline) -> tuple[type | None, dict[str, Any] | None]:
    from diffusers import DiffusionPipeline, UNet2DConditionModel

    only = {"local_files_only": not base.fetches}
    try:
        with from_hub(base.path):
            index: Any = DiffusionPipeline.load_config(base.path, **only)
            config: Any = (
                UNet2DConditionModel.load_config(base.path, subfolder="unet", **only) if "unet" in index else None
            )
    except ValueError as error:
        raise UnreadBase(
            f"{file} has names of another tool, which the class of the pipeline converts, and {error}"
        ) from None
    name = base.chosen or index.get("_class_name")
    if not isinstance(name, str):
        return None, config
    return named_pipeline(name, f"{base.path}: {INDEX}: _class_name is "), config


def _as_peft(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names with `lora_A` and `lora_B`, as diffusers makes them when a module takes a LoRA."""
    from diffusers.utils import convert_unet_state_dict_to_peft

    old = {key: value for key, value in found.items() if ".lora_A." not in key and ".lora_B." not in key}
    old = {key: value for key, value in old.items() if not key.endswith(".alpha")}
    kept = {key: value for key, value in found.items() if key not in old}
    return kept | (convert_unet_state_dict_to_peft(old) if old else {})


def _alphas(alphas: Mapping[str, Any]) -> dict[str, Tensor]:
    """The alphas beside the tensors of a UNet, by layer. Those of attention have the name of a tensor in front."""
    found = {}
    for key, value in alphas.items():
        name, alpha = key.removesuffix(".alpha"), torch.as_tensor(value, dtype=torch.float32)
        renamed = _as_peft({name: alpha}) if name.endswith(".weight") else {name: alpha}
        found[f"{next(iter(renamed)).partition('.lora_A.')[0]}.alpha"] = alpha
    return found


def _with_alphas(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """kohya's names with alpha = rank where alpha is missing, which some conversions do not take for granted."""
    end = ".lora_down.weight"
    layers = {key.removesuffix(end): value for key, value in state.items() if key.endswith(end)}
    missing = {
        f"{layer}.alpha": torch.tensor(float(value.shape[0]))
        for layer, value in layers.items()
        if layer.startswith("lora_") and f"{layer}.alpha" not in state
    }
    return state | missing


def _squared(file: Path, state: Mapping[str, Tensor]) -> float:
    return sum(pair.squared() for pair in _pairs(file, state))


def _pairs(file: Path, state: Mapping[str, Tensor]) -> list[LoraPair]:
    sides: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        if (match := _SIDE.fullmatch(key)) is not None:
            sides.setdefault(match["layer"], {})["A" if match["side"] in ("down", "A") else "B"] = value
        elif not key.endswith(".alpha"):
            raise ValueError(f"{file} has {key!r}, which is no part of a LoRA; {_SAVE}")
    for layer, both in sides.items():
        if set(both) != {"A", "B"} or both["A"].dim() < 2 or both["B"].dim() < 2:
            raise ValueError(f"{file} lacks pairs of two matrices: see {layer}; get the file again")
    return [
        LoraPair(both["A"], both["B"], alpha_of(file, layer, state.get(f"{layer}.alpha"), both["A"].shape[0]))
        for layer, both in sides.items()
    ]


def alpha_of(file: Path, layer: str, said: Any, rank: int) -> float:
    """The alpha of a layer; the rank if the file does not say it, as in diffusers.

    Raises:
        ValueError: it is not a number above 0.
    """
    if said is None:
        return float(rank)
    if isinstance(said, Tensor):
        said = float(said.flatten()[0]) if said.numel() == 1 else f"{said.numel()} numbers"
    if not isinstance(said, int | float) or isinstance(said, bool) or not 0 < said < float("inf"):
        raise ValueError(
            f"{file}: lora_alpha of {layer} is {said!r}, which is not a number above 0; get the file again"
        )
    return float(said)
