"""The five pipelines that most tests use, from the tiny instances of the conformance kit.

`TINY[key]()` returns a new pipeline, always with the same weights. `CALL[key]` has the keyword arguments that make
`pipe(prompt=[...], **CALL[key])` small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flowgrpo.pipelines.conformance import conform as run

_NAMES = {
    "sd3": "StableDiffusion3Pipeline",
    "flux": "FluxPipeline",
    "qwenimage": "QwenImagePipeline",
    "sana": "SanaPipeline",
    "wan": "WanPipeline",
}

TINY: dict[str, Callable[[], Any]] = {key: run.TINY[name].fresh for key, name in _NAMES.items()}
CALL: dict[str, dict[str, Any]] = {key: dict(run.TINY[name].call) for key, name in _NAMES.items()}


def require(name: str) -> None:
    """Skip a test of a tiny instance that the installed diffusers cannot run."""
    if why := run.lacking(name):
        pytest.skip(why)
