"""Which models of transformers are shown pictures, by the type in their configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from .diffusion_models import configuration

PROCESSORS = ("processor_config.json", "preprocessor_config.json")
"""Names of the processor's file. The folder of a model that sees has at least one."""


def sight_of(path: str, *, local: bool = False) -> Literal["always", "maybe", "never"]:
    """Whether transformers has a model as one that is shown pictures: always, beside a model of text, or never.

    Args:
        path: a folder, or a hub id.
        local: whether nothing may be downloaded.

    Raises:
        OSError: the configuration of the hub id cannot be read.
    """
    from transformers.models.auto import modeling_auto

    kind = configuration(path, local=local).get("model_type")
    if kind not in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return "never"
    return "maybe" if kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else "always"


def may_see(folder: Path) -> bool:
    """Whether a folder holds a model that can be shown pictures, and its processor."""
    if not (folder / "config.json").is_file() or not any((folder / name).is_file() for name in PROCESSORS):
        return False
    return sight_of(str(folder)) != "never"
