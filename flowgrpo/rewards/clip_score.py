"""CLIP score: cosine similarity of an image and its prompt.

Hessel et al., "CLIPScore: A Reference-free Evaluation Metric for Image Captioning" (2021), without the
rescaling of its equation 1. Scores are comparable only between images of one prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pth")
_PREPROCESS = ("size", "mean", "std", "interpolation", "resize_mode", "fill_color")


class ClipScore:
    """Text match: cosine between CLIP embeddings of the image and of its prompt (any open_clip model).

    Args:
        model: an open_clip architecture ("ViT-L-14-quickgelu"), the path of a `.json` architecture file, a
            folder in open_clip's format (also written "local-dir:FOLDER"), or "hf-hub:ORG/NAME". Weights
            of OpenAI's and DFN's models belong to the architectures that end in "-quickgelu".
        pretrained: the path of a checkpoint, or one of open_clip's tags for the architecture ("openai"),
            which it downloads. Not with a folder or hub model, which bring their own.
        device: where to score.
        batch_size: most images in one call.
        logit_scaled: return the model's logit, exp(logit_scale)·cosine (+ bias), instead of the cosine.
        allow_random: score with untrained weights (always the same ones) if there are none to load.
        preprocess: replaces entries of the model's own preprocessing: size, mean, std, interpolation,
            resize_mode ("shortest", "longest" or "squash"), fill_color.

    Raises:
        ValueError: no such model or checkpoint, or weights that do not fit the architecture.
    """

    name = "clip_score"

    def __init__(
        self,
        model: str = "ViT-B-32-quickgelu",
        pretrained: str | None = None,
        *,
        device: str = "cpu",
        batch_size: int = 32,
        logit_scaled: bool = False,
        allow_random: bool = False,
        preprocess: Mapping[str, Any] | None = None,
    ) -> None:
        import open_clip

        unknown = sorted(set(preprocess or {}) - set(_PREPROCESS))
        if unknown:
            raise ValueError(f"clip_score: no preprocess entry {unknown[0]!r}; there are {', '.join(_PREPROCESS)}")
        name = _model_name(model)
        pretrained = None if pretrained is None else str(Path(pretrained).expanduser())
        loads = _check_weights(name, pretrained, allow_random)
        # Building draws random weights first: the caller's generator must not notice, and weights that are
        # really meant to be random must not differ between processes.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                self.model = open_clip.create_model(
                    name,
                    pretrained=pretrained,
                    precision="fp32",
                    device=device,
                    pretrained_text=False,
                    require_pretrained=loads,
                    force_preprocess_cfg=dict(preprocess or {}),
                )
            except ModuleNotFoundError:
                raise
            except Exception as error:
                raise ValueError(f"clip_score: {pretrained or name} does not load as {model!r}: {error}") from error
        self.model.eval().requires_grad_(False)
        self.tokenizer = open_clip.get_tokenizer(name)
        self.preprocess: dict[str, Any] = dict(self.model.visual.preprocess_cfg)
        self.device, self.batch_size, self.logit_scaled = device, batch_size, logit_scaled

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[str], **columns: Any) -> Tensor:
        """Cosine (or logit) of each image with its prompt.

        Args:
            images: [B, 3, H, W] in [0, 1]; of videos [B, F, 3, H, W] the frames' scores are averaged.
            prompts: B strings, cut at the model's context length.
            columns: ignored.

        Returns:
            [B] float32.
        """
        frames = images if images.ndim == 5 else images.unsqueeze(1)
        # Autocast would take the embeddings to bfloat16, whose cosines are too coarse to rank a group by.
        with torch.autocast(torch.device(self.device).type, enabled=False):
            unique = list(dict.fromkeys(prompts))
            text = self.model.encode_text(self.tokenizer(unique).to(self.device), normalize=True)
            rows = torch.tensor([unique.index(prompt) for prompt in prompts], device=self.device)
            pixels = preprocess_images(frames.flatten(0, 1).to(self.device, torch.float32), self.preprocess)
            vision = torch.cat(
                [self.model.encode_image(part, normalize=True) for part in pixels.split(self.batch_size)]
            )
            cosine = (vision.unflatten(0, frames.shape[:2]) * text[rows].unsqueeze(1)).sum(-1).mean(1)
            if not self.logit_scaled:
                return cosine
            bias = getattr(self.model, "logit_bias", None)
            return self.model.logit_scale.exp() * cosine + (0 if bias is None else bias)


def preprocess_images(images: Tensor, config: Mapping[str, Any]) -> Tensor:
    """open_clip's inference preprocessing, on float tensors.

    open_clip's own transform takes 8-bit PIL pictures; this is the same resampling (antialiased, clamped,
    as 8-bit bicubic is) without the rounding, and without dividing by 255 what is in [0, 1] already.

    Args:
        images: [B, 3, H, W] in [0, 1].
        config: `size` (int or (height, width)), `mean`, `std`, `interpolation`, `resize_mode`, `fill_color`.

    Returns:
        [B, 3, *size], normalised.
    """
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as F

    size = config["size"]
    height, width = (size, size) if isinstance(size, int) else (int(size[0]), int(size[-1]))
    old_height, old_width = images.shape[-2:]
    mode = config.get("resize_mode") or "shortest"
    fill = float(config.get("fill_color") or 0) / 255
    if mode == "squash":
        target = (height, width)
    elif mode == "shortest" and height == width:
        # torchvision, which open_clip uses here, truncates the longer side; open_clip's own resize rounds.
        short = min(old_height, old_width)
        target = (height * old_height // short, width * old_width // short)
    else:
        ratios = (old_height / height, old_width / width)
        ratio = max(ratios) if mode == "longest" else min(ratios)
        target = (max(1, round(old_height / ratio)), max(1, round(old_width / ratio)))
    bilinear = config.get("interpolation") == "bilinear"
    interpolation = InterpolationMode.BILINEAR if bilinear else InterpolationMode.BICUBIC
    resized = F.resize(images, list(target), interpolation, antialias=True).clamp(0, 1)
    pad_h, pad_w = max(0, height - target[0]), max(0, width - target[1])
    padding = [pad_w // 2, pad_h // 2, (pad_w + 1) // 2, (pad_h + 1) // 2]
    padded = F.pad(resized, padding, fill=fill) if any(padding) else resized
    return F.normalize(F.center_crop(padded, [height, width]), config["mean"], config["std"])


def _model_name(model: str) -> str:
    """open_clip's name for an architecture, an architecture file or a folder.

    Raises:
        ValueError: there is no such architecture, file or folder.
    """
    import open_clip

    from .base import nearest

    if model.startswith("hf-hub:"):
        return model
    if model.endswith(".json"):
        return _add_architecture(Path(model).expanduser())
    folder = Path(model.removeprefix("local-dir:")).expanduser()
    if model.startswith("local-dir:") or folder.is_dir():
        if not (folder / "open_clip_config.json").is_file():
            raise ValueError(f"clip_score: {folder} is no open_clip folder: it has no open_clip_config.json")
        return f"local-dir:{folder}"
    known = open_clip.list_models()
    if model.replace("/", "-") not in known:
        raise ValueError(
            f"clip_score: {model!r} is neither an architecture of open_clip nor a folder"
            f"{nearest(model, known)} open_clip.list_models() lists them."
        )
    return model


def _add_architecture(path: Path) -> str:
    import open_clip

    if not path.is_file():
        raise ValueError(f"clip_score: there is no architecture file {path}")
    config = json.loads(path.read_text(encoding="utf-8"))
    missing = [key for key in ("embed_dim", "vision_cfg", "text_cfg") if key not in config]
    if missing:
        raise ValueError(f"clip_score: {path} is no open_clip architecture: it lacks {', '.join(missing)}")
    known = open_clip.get_model_config(path.stem)
    if known is not None and known != config:
        raise ValueError(f"clip_score: open_clip knows another architecture {path.stem!r}; rename {path.name}")
    if known is None:
        open_clip.add_model_config(path)
    return path.stem


def _check_weights(name: str, pretrained: str | None, allow_random: bool) -> bool:
    """Whether there are weights to load, found out before anything is built.

    Raises:
        ValueError: there are none and `allow_random` is off, or they are named twice or do not exist.
    """
    import open_clip

    random_hint = "(or `allow_random: true`, for tests)"
    if name.startswith(("local-dir:", "hf-hub:")):
        if pretrained is not None:
            raise ValueError(f"clip_score: {name} brings its own weights; leave `pretrained` out")
        folder = Path(name.removeprefix("local-dir:"))
        if name.startswith("hf-hub:") or any(path.suffix in _WEIGHT_SUFFIXES for path in folder.iterdir()):
            return True
        if allow_random:
            return False
        raise ValueError(f"clip_score: {folder} holds no weights ({', '.join(_WEIGHT_SUFFIXES)}) {random_hint}")
    tags = open_clip.list_pretrained_tags_by_model(name)
    if pretrained is None:
        if allow_random:
            return False
        raise ValueError(
            f"clip_score: no weights for {name!r}: set `pretrained` to a checkpoint file"
            f"{f' or one of {chr(44).join(tags)}' if tags else ''} {random_hint}"
        )
    if Path(pretrained).is_file():
        return True
    if not open_clip.is_pretrained_cfg(name, pretrained):
        raise ValueError(
            f"clip_score: pretrained={pretrained!r} is no file"
            f"{f' and none of the tags of {name!r}: {chr(44).join(tags)}' if tags else ''}"
        )
    quick = bool(open_clip.get_pretrained_cfg(name, pretrained).get("quick_gelu", False))
    if quick != bool(open_clip.get_model_config(name).get("quick_gelu", False)):
        kind = "QuickGELU" if quick else "GELU"
        raise ValueError(
            f"clip_score: the weights {pretrained!r} were trained with {kind}, but {name!r} has the other "
            "activation; use the architecture with or without '-quickgelu'"
        )
    return True
