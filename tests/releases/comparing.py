"""What the tests of the releases share."""

from __future__ import annotations

import json
from typing import Any

from tests.releases.asking import NUMBERS

# Sums and differences of float32 numbers of order 1.
ROUNDING = {"rtol": 1e-6, "atol": 1e-6}


def numbers(name: str) -> dict[str, Any]:
    """The inputs and outputs that a release was asked for."""
    found: dict[str, Any] = json.loads((NUMBERS / f"{name}.json").read_text(encoding="utf-8"))
    return found
