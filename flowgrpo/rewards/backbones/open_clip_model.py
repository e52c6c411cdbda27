"""Towers of any open_clip model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..base import nearest
from ..pixels import preprocess_images
from .model_loading import HUB, check_dtype, find_file, fixed_generator
from .sharing import Lease, borrow
from .towers import Towers

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pth")
_PREPROCESS = ("size", "mean", "std", "interpolation", "resize_mode", "fill_color")


def open_clip_towers(
    reward: str,
    model: str,
    pretrained: str | None = None,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    preprocess: Mapping[str, Any] | None = None,
    allow_random: bool = False,
) -> Lease[Towers]:
    """Return the towers of an open_clip model.

    Args:
        reward: name of the reward, for messages.
        model: an open_clip architecture ("ViT-L-14-quickgelu"), the path of a `.json` architecture file, a
            folder in open_clip's format (also written "local-dir:FOLDER"), or "hf-hub:ORG/NAME".
        pretrained: the path of a checkpoint, "hf-hub:ORG/NAME/FILE", or one of open_clip's tags for the architecture,
            which open_clip downloads. Leave it out for a folder or hub model, which has its own weights.
        device: where it runs.
        dtype: data type of the weights.
        preprocess: values that replace entries of the model's own preprocessing: size, mean, std, interpolation,
            resize_mode ("shortest", "longest" or "squash"), fill_color.
        allow_random: if there are no weights to load, use untrained weights (always the same ones).

    Raises:
        ValueError: there is no such model or checkpoint, or the weights do not fit the architecture.
    """
    unknown = sorted(set(preprocess or {}) - set(_PREPROCESS))
    if unknown:
        raise ValueError(f"{reward}: preprocess has no entry {unknown[0]!r}; its entries are {', '.join(_PREPROCESS)}")
    check_dtype(reward, dtype)
    name = _model_name(reward, model)
    if pretrained is not None:
        hub = pretrained.startswith(HUB)
        pretrained = str(find_file(reward, "pretrained", pretrained) if hub else Path(pretrained).expanduser())
    loads = _check_weights(reward, name, pretrained, allow_random)
    settings = json.dumps(dict(preprocess or {}), sort_keys=True)
    key = ("open_clip", name, pretrained, settings, dtype, str(torch.device(device)))
    return borrow(key, lambda: _load(reward, name, pretrained, device, dtype, dict(preprocess or {}), loads))


def _load(
    reward: str, name: str, pretrained: str | None, device: str, dtype: str, preprocess: dict[str, Any], loads: bool
) -> Towers:
    import open_clip

    try:
        with fixed_generator():
            model = open_clip.create_model(
                name,
                pretrained=pretrained,
                precision="fp32",
                device=device,
                pretrained_text=False,
                require_pretrained=loads,
                force_preprocess_cfg=preprocess,
            )
    except ModuleNotFoundError:
        raise
    except Exception as error:
        raise ValueError(f"{reward}: {pretrained or name} cannot be loaded as {name!r}: {error}") from error
    kind = check_dtype(reward, dtype)
    model.to(kind).eval().requires_grad_(False)
    tokenizer = open_clip.get_tokenizer(name)
    config = dict(model.visual.preprocess_cfg)
    bias = getattr(model, "logit_bias", None)
    return Towers(
        model,
        lambda images: preprocess_images(images, config).to(kind),
        model.encode_image,
        lambda texts: model.encode_text(tokenizer(list(texts)).to(device)),
        scale=float(model.logit_scale.float().exp()),
        bias=0.0 if bias is None else float(bias),
        device=device,
    )


def _model_name(reward: str, model: str) -> str:
    """Return open_clip's name for an architecture, an architecture file or a folder.

    Raises:
        ValueError: there is no such architecture, file or folder.
    """
    import open_clip

    if model.startswith("hf-hub:"):
        return model
    if model.endswith(".json"):
        return _add_architecture(reward, Path(model).expanduser())
    folder = Path(model.removeprefix("local-dir:")).expanduser()
    if model.startswith("local-dir:") or folder.is_dir():
        if not (folder / "open_clip_config.json").is_file():
            raise ValueError(f"{reward}: {folder} is not an open_clip folder: it has no open_clip_config.json")
        return f"local-dir:{folder.resolve()}"
    known = open_clip.list_models()
    if model.replace("/", "-") not in known:
        raise ValueError(
            f"{reward}: {model!r} is neither an architecture of open_clip nor a folder"
            f"{nearest(model, known)} open_clip.list_models() lists them."
        )
    return model


def _add_architecture(reward: str, path: Path) -> str:
    import open_clip

    if not path.is_file():
        raise ValueError(f"{reward}: there is no architecture file {path}")
    config = json.loads(path.read_text(encoding="utf-8"))
    missing = [key for key in ("embed_dim", "vision_cfg", "text_cfg") if key not in config]
    if missing:
        raise ValueError(f"{reward}: {path} is not an open_clip architecture: it lacks {', '.join(missing)}")
    known = open_clip.get_model_config(path.stem)
    if known is not None and known != config:
        raise ValueError(f"{reward}: open_clip already has another architecture {path.stem!r}; rename {path.name}")
    if known is None:
        open_clip.add_model_config(path)
    return path.stem


def _check_weights(reward: str, name: str, pretrained: str | None, allow_random: bool) -> bool:
    """Return whether there are weights to load; this check runs before anything is built.

    Raises:
        ValueError: there are no weights and `allow_random` is false, or the weights are named twice or do not exist.
    """
    import open_clip

    random_hint = "(or `allow_random: true`, for tests)"
    if name.startswith(("local-dir:", "hf-hub:")):
        if pretrained is not None:
            raise ValueError(f"{reward}: {name} has its own weights; leave `pretrained` out")
        folder = Path(name.removeprefix("local-dir:"))
        if name.startswith("hf-hub:") or any(path.suffix in _WEIGHT_SUFFIXES for path in folder.iterdir()):
            return True
        if allow_random:
            return False
        raise ValueError(f"{reward}: {folder} has no weights; add a file ({', '.join(_WEIGHT_SUFFIXES)}) {random_hint}")
    tags = open_clip.list_pretrained_tags_by_model(name)
    if pretrained is None:
        if allow_random:
            return False
        raise ValueError(
            f"{reward}: there are no weights for {name!r}; set `pretrained` to a checkpoint file"
            f"{f' or one of {chr(44).join(tags)}' if tags else ''} {random_hint}"
        )
    if Path(pretrained).is_file():
        return True
    if not open_clip.is_pretrained_cfg(name, pretrained):
        raise ValueError(
            f"{reward}: pretrained={pretrained!r} is not a file"
            f"{f' and not one of the tags of {name!r}: {chr(44).join(tags)}' if tags else ''}"
        )
    quick = bool(open_clip.get_pretrained_cfg(name, pretrained).get("quick_gelu", False))
    if quick != bool(open_clip.get_model_config(name).get("quick_gelu", False)):
        kind = "QuickGELU" if quick else "GELU"
        raise ValueError(
            f"{reward}: the weights {pretrained!r} were trained with {kind}, but {name!r} has the other "
            "activation; use the architecture with or without '-quickgelu'"
        )
    return True
