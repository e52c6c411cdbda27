"""How pipelines of sounds call their denoisers: the inputs of each class of diffusers, and the length of a latent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch


class Seconds(NamedTuple):
    """The argument of a pipeline's call for the length of its sounds.

    Attributes:
        name: of the argument, in seconds.
        default: its value if the call does not give it. If the class then takes the length from the prompt, this is the
            longest sound.
        part: whether a last part of a latent counts as a latent.
        longest: seconds to which the class cuts; None if it does not cut.
    """

    name: str
    default: float
    part: bool = True
    longest: float | None = None


def sound_shape(seconds: Seconds, call: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[int, int]:
    """Shape of the latent of a sound, [C, L].

    Args:
        seconds: how the class says the length.
        call: arguments of the pipeline's call.
        settings: configuration of the autoencoder.
    """
    given = call.get(seconds.name)
    length = seconds.default if given is None else float(given)
    if seconds.longest is not None:
        length = min(length, seconds.longest)
    rate, hop = int(settings.get("sampling_rate") or settings["sample_rate"]), _hop(settings)
    latents = length * rate / hop
    channels = int(settings.get("latent_dim") or settings["decoder_input_channels"])
    return channels, max(math.ceil(latents) if seconds.part else int(latents), 1)


def _hop(settings: Mapping[str, Any]) -> int:
    """Samples of a sound for each step of its latent."""
    if "downsampling_ratio" in settings:
        return int(settings["downsampling_ratio"])
    if "downsampling_ratios" in settings:
        return math.prod(settings["downsampling_ratios"])
    return int(settings["patch_size"] * math.prod(settings["encoder_strides"]))


STABLE_AUDIO_TEXT = 256 + 1
"""Tokens of a prompt of Stable Audio 3, always padded, and one token for the duration."""
ACE_STEP_TEXT = 256
"""Tokens that are assumed for a prompt of ACE-Step with its instruction, its lyrics and its timbre."""


def stable_audio(config: Mapping[str, Any], latent: tuple[int, ...], tokens: int, rows: int) -> dict[str, Any]:
    return {
        "hidden_states": torch.empty(rows, *latent),
        "timestep": torch.empty(rows),
        "encoder_hidden_states": torch.empty(rows, tokens, config["cond_token_dim"]),
        "global_hidden_states": torch.empty(rows, config["global_cond_dim"]),
        "encoder_attention_mask": torch.empty(rows, tokens),
    }


def ace_step(config: Mapping[str, Any], latent: tuple[int, ...], tokens: int, rows: int) -> dict[str, Any]:
    channels, length = latent
    width = config.get("encoder_hidden_size") or config["hidden_size"]
    return {
        "hidden_states": torch.empty(rows, length, channels),
        "timestep": torch.empty(rows),
        "timestep_r": torch.empty(rows),
        "encoder_hidden_states": torch.empty(rows, tokens, width),
        # A sound to begin from, and a mask.
        "context_latents": torch.empty(rows, length, config["in_channels"] - channels),
    }


def longcat(config: Mapping[str, Any], latent: tuple[int, ...], tokens: int, rows: int) -> dict[str, Any]:
    channels, length = latent
    return {
        "hidden_states": torch.empty(rows, length, channels),
        "encoder_hidden_states": torch.empty(rows, tokens, config["dit_text_dim"]),
        "encoder_attention_mask": torch.empty(rows, tokens, dtype=torch.bool),
        "timestep": torch.empty(rows),
        "attention_mask": torch.empty(rows, length, dtype=torch.bool),
        "latent_cond": torch.empty(rows, length, channels),
    }
