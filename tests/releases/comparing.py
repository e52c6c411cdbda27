"""What the tests of the releases share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.releases.asked_models import drawn_weight
from tests.releases.asking import NUMBERS

# Sums and differences of float32 numbers of order 1.
ROUNDING = {"rtol": 1e-6, "atol": 1e-6}


def with_released_names(kind: Any, config: Any, shapes: dict[str, list[int]], folder: Path, attention: str) -> Any:
    """A model of a class, with drawn weights that it reads under their released names and saves under them again."""
    weights = {name: drawn_weight(name, shape) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    model = kind.from_pretrained(folder, attn_implementation=attention).eval()
    model.save_pretrained(folder / "again")
    again = load_file(folder / "again" / "model.safetensors")
    assert {name: list(weight.shape) for name, weight in again.items()} == shapes
    assert all(torch.equal(weight, weights[name]) for name, weight in again.items())
    return model


def numbers(name: str) -> dict[str, Any]:
    """The inputs and outputs that a release was asked for."""
    found: dict[str, Any] = json.loads((NUMBERS / f"{name}.json").read_text(encoding="utf-8"))
    return found
