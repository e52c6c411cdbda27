"""Which pipelines make sounds, and with how many samples a second."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .json_files import read_json_object

_KEYS = ("sampling_rate", "sample_rate")


def sampling_rate_of(pipe: Any) -> int | None:
    """Samples a second of the sounds that a pipeline makes; None if it makes pictures or videos.

    The autoencoder of sounds has a sampling rate in its configuration. An LTX-2 pipeline has a second autoencoder for
    the sound of its videos, but its own one makes pictures.
    """
    return rate_of(getattr(getattr(pipe, "vae", None), "config", {}))


def sampling_rate_in(folder: Path) -> int | None:
    """As `sampling_rate_of`, of the pipeline in a folder; None if its autoencoder has no readable configuration."""
    try:
        return rate_of(read_json_object(folder / "vae" / "config.json"))
    except (OSError, ValueError):
        return None


def rate_of(config: Mapping[str, Any]) -> int | None:
    """As `sampling_rate_of`, from the configuration of the autoencoder."""
    found = [config[key] for key in _KEYS if key in config]
    return found[0] if found and type(found[0]) is int and found[0] > 0 else None
