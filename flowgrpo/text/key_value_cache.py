"""The cache of keys and values of a language model of transformers, under every name that transformers gives it.

transformers 5.24 calls it `cache` and deprecates `past_key_values`; older versions have the second name only.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor


def cache_of(output: Any) -> Any:
    """The cache in the output of a model."""
    cache = getattr(output, "cache", None)
    return output.past_key_values if cache is None else cache


def cache_argument(model: Any) -> str:
    """The name of the argument by which a model takes a cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def select_rows(cache: Any, rows: Tensor) -> None:
    """Keep the rows of a cache that `rows` names; a row that is named twice is kept twice.

    Raises:
        ValueError: if the model keeps a state from which rows cannot be chosen.
    """
    parts = [cache, *(getattr(cache, "layers", None) or [])]
    if not all(hasattr(part, "batch_select_indices") for part in parts):
        raise ValueError(
            f"the model keeps its past in {' and '.join(sorted({type(part).__name__ for part in parts}))}, whose rows "
            "cannot all be chosen; use a model whose layers all have a cache of keys and values"
        )
    cache.batch_select_indices(rows)
