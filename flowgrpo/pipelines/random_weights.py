"""Pipelines with the shapes of real models and random weights, to measure speed and memory without real weights."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .architectures import architecture_of, latent_shape
from .families import FAMILIES
from .zeroed import Zeroed

_CLASSES = {
    "SD3Transformer2DModel": "StableDiffusion3Pipeline",
    "FluxTransformer2DModel": "FluxPipeline",
    "Flux2Transformer2DModel": "Flux2Pipeline",
    "QwenImageTransformer2DModel": "QwenImagePipeline",
    "ZImageTransformer2DModel": "ZImagePipeline",
    "WanTransformer3DModel": "WanPipeline",
}
_SCHEDULE = {"shift": 3.0}
_BOUNDARY = 0.875
"""The noise level below which the second denoiser of Wan 2.2 takes over, as a share of all levels."""


def random_pipeline(path: str, call: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Any:
    """A pipeline of the class and sizes of `path`, with random weights and without text encoders.

    The weights of denoisers and VAE are drawn on `device`. The embeddings of a prompt are noise of the right shape;
    equal prompts have equal embeddings. The pipeline's images are noise, but the denoiser needs the time and memory of
    the real model.

    Args:
        path: a pipeline folder (its configurations are read, its weights are not), or a model id of `KNOWN`.
        call: arguments of the pipeline's call, for the number of text tokens.
        dtype: of weights and embeddings.
        device: of weights and embeddings.
        seed: of the weights.

    Raises:
        ValueError: as in `architecture_of`, or if there are no random embeddings for the class of the denoiser, or
            the denoiser takes a picture too.
    """
    import diffusers

    architecture = architecture_of(path)
    name, config = architecture.denoiser
    if name not in _TEXTS:
        raise ValueError(
            f"{path}: there are no random weights for a {name}; use a model with one of {', '.join(_TEXTS)}"
        )
    if architecture.inputs.get("picture_tokens"):
        raise ValueError(
            f"{path}: there are no random weights for a pipeline that edits a picture; use the text-to-image model of "
            "the same size, such as black-forest-labs/FLUX.1-dev or Qwen/Qwen-Image"
        )
    channels = latent_shape(architecture, call)[0]
    if name.startswith("Wan") and (taken := config.get("in_channels", channels)) != channels:
        raise ValueError(
            f"{path}: there are no random weights for a denoiser that takes a picture with the state ({taken} "
            f"channels, and the autoencoder makes {channels}); use the text-to-video model of the same size, such as "
            "Wan-AI/Wan2.1-T2V-14B-Diffusers"
        )
    parts: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for key in ("transformer", "transformer_2")[: architecture.experts]:
            parts[key] = _drawn(name, config, dtype, device)
        kind, settings = architecture.vae
        offset = {"shift_factor": 0.0} if kind == "AutoencoderKL" else {}
        parts["vae"] = _drawn(kind, {**offset, **settings}, dtype, device)
    texts = _TEXTS[name](parts["transformer"].config, FAMILIES[name].tokens(call))
    # FLUX.2 klein is the one without an embedding of the guidance.
    klein = name == "Flux2Transformer2DModel" and not parts["transformer"].config.guidance_embeds
    own = getattr(diffusers, "Flux2KleinPipeline" if klein else _CLASSES[name])
    if klein:
        parts["is_distilled"] = architecture.one_evaluation
    if architecture.experts == 2:
        parts["boundary_ratio"] = _BOUNDARY
    if architecture.inputs.get("expand_timesteps"):
        parts["expand_timesteps"] = True
    none = dict.fromkeys(own._optional_components)
    none |= {key: None for key in own.__init__.__annotations__ if key.startswith(("text_encoder", "tokenizer"))}
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**_SCHEDULE)
    pipe = _without_encoders(own, texts)(**{**none, **parts, "scheduler": scheduler})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _drawn(name: str, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    import diffusers

    # The weights are drawn in their final dtype: twelve billion numbers in float32 would need twice the memory for a
    # moment.
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), Zeroed():
            module: torch.nn.Module = getattr(diffusers, name).from_config(dict(config))
    finally:
        torch.set_default_dtype(before)
    return module.requires_grad_(False).eval()


Drawn = Callable[..., Tensor]
Texts = Callable[[Drawn, int, bool], tuple[Any, ...]]


def _without_encoders(own: type, texts: Texts) -> type:
    original: Any = own.encode_prompt  # type: ignore[attr-defined]

    @functools.wraps(original)
    def encode_prompt(
        self: Any, prompt: str | Sequence[str], *args: Any, do_classifier_free_guidance: bool = True, **kwargs: Any
    ) -> tuple[Any, ...]:
        rows = [prompt] if isinstance(prompt, str) else list(prompt)
        denoiser = self.transformer

        def drawn(*shape: int) -> Tensor:
            generators = [torch.Generator().manual_seed(zlib.crc32(row.encode())) for row in rows]
            noise = torch.stack([torch.randn(shape, generator=generator) for generator in generators])
            return noise.to(denoiser.device, denoiser.dtype)

        return texts(drawn, len(rows), do_classifier_free_guidance)

    return type(own.__name__, (own,), {"encode_prompt": encode_prompt, "__module__": own.__module__})


def _sd3(config: Any, tokens: int) -> Texts:
    def texts(drawn: Drawn, rows: int, guided: bool) -> tuple[Any, ...]:
        wide, pooled = drawn(tokens, config.joint_attention_dim), drawn(config.pooled_projection_dim)
        return (wide, -wide, pooled, -pooled) if guided else (wide, None, pooled, None)

    return texts


def _flux(config: Any, tokens: int) -> Texts:
    def texts(drawn: Drawn, rows: int, guided: bool) -> tuple[Any, ...]:
        wide = drawn(tokens, config.joint_attention_dim)
        return wide, drawn(config.pooled_projection_dim), wide.new_zeros(tokens, 3)

    return texts


def _flux2(config: Any, tokens: int) -> Texts:
    def texts(drawn: Drawn, rows: int, guided: bool) -> tuple[Any, ...]:
        wide = drawn(tokens, config.joint_attention_dim)
        ids = wide.new_zeros(rows, tokens, 4)
        ids[..., 3] = torch.arange(tokens, device=wide.device)
        return wide, ids

    return texts


def _z_image(config: Any, tokens: int) -> Texts:
    def texts(drawn: Drawn, rows: int, guided: bool) -> tuple[Any, ...]:
        wide = drawn(tokens, config.cap_feat_dim)
        return list(wide), list(-wide) if guided else []

    return texts


def _qwen(config: Any, tokens: int) -> Texts:
    def texts(drawn: Drawn, rows: int, guided: bool) -> tuple[Any, ...]:
        wide = drawn(tokens, config.joint_attention_dim)
        return wide, torch.ones(rows, tokens, dtype=torch.long, device=wide.device)

    return texts


def _wan(config: Any, tokens: int) -> Texts:
    def texts(drawn: Drawn, rows: int, guided: bool) -> tuple[Any, ...]:
        wide = drawn(tokens, config.text_dim)
        return wide, -wide if guided else None

    return texts


_TEXTS: Mapping[str, Callable[[Any, int], Texts]] = {
    "SD3Transformer2DModel": _sd3,
    "FluxTransformer2DModel": _flux,
    "Flux2Transformer2DModel": _flux2,
    "QwenImageTransformer2DModel": _qwen,
    "ZImageTransformer2DModel": _z_image,
    "WanTransformer3DModel": _wan,
}
WITH_RANDOM_WEIGHTS = frozenset(_TEXTS)
"""Classes of denoisers whose pipelines can have random weights."""
