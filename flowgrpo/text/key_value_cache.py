"""The past that a language model of transformers keeps, under every name that transformers gives it.

Attention keeps keys and values of each token. Recurrent layers and convolutions keep a state in their place. The name
of the whole is `cache` in transformers 5.24, which deprecates `past_key_values`; older versions have the second name.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

from torch import Tensor


def cache_of(output: Any) -> Any:
    """The cache in the output of a model.

    Raises:
        ValueError: the model gives none.
    """
    found = getattr(output, "cache", None)
    found = getattr(output, "past_key_values", None) if found is None else found
    if found is None:
        raise ValueError(
            "the model gives no cache of keys and values or of states, with which it could go on after a token; use "
            "another model, or a newer version of transformers (a model of an encoder's class needs is_decoder: true "
            "in its config.json)"
        )
    return found


def cache_argument(model: Any) -> str:
    """The name of the argument by which a model takes a cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def has_states(cache: Any) -> bool:
    """Whether a layer keeps a state, as recurrent layers and convolutions do."""
    return any(map(_keeps_state, _layers(cache)))


def has_keys(cache: Any) -> bool:
    """Whether a layer keeps keys and values, or the cache does not say what its layers keep."""
    layers = _layers(cache)
    return not layers or any(hasattr(layer, "keys") for layer in layers)


def state_bytes(cache: Any) -> int:
    """Bytes of the states, which do not grow with the number of tokens."""
    kept = [
        state
        for layer in _layers(cache)
        if _keeps_state(layer)
        for state in (*layer.conv_states.values(), *layer.recurrent_states.values())
    ]
    return sum(state.nbytes for state in kept if state is not None)


def select_rows(cache: Any, rows: Tensor) -> None:
    """Keep the rows of a cache that `rows` names; a row that is named twice is kept twice.

    Raises:
        ValueError: if the model keeps a past from which rows cannot be chosen.
    """
    layers = _layers(cache)
    parts = [cache, *(layer for layer in layers if not _keeps_state(layer))]
    # MiniMax keeps its states in a list of the cache, which takes no further tokens after rows were chosen.
    beside = (
        [name for name, kept in vars(cache).items() if isinstance(kept, list) and name != "layers"] if layers else []
    )
    if beside or not all(map(_chooses, parts)):
        names = sorted({type(part).__name__ for part in (cache, *layers)})
        raise ValueError(
            f"the model keeps its past in {' and '.join(names)}, whose rows cannot all be chosen; use another model, "
            "or a newer version of transformers"
        )
    if not has_states(cache):
        return cache.batch_select_indices(rows)
    for layer in layers:
        # A layer that keeps both a state and keys has both methods, and only the first one chooses among the states.
        choose = layer.reorder_cache if _keeps_state(layer) else layer.batch_select_indices
        choose(rows)


def select_tokens(cache: Any, places: Tensor) -> None:
    """Keep the keys and values of K tokens of each row, `places` [N, K], in this order."""
    for layer in _layers(cache):
        index = places[:, None, :, None].expand(-1, layer.keys.shape[1], -1, layer.keys.shape[3])
        layer.keys, layer.values = layer.keys.gather(2, index), layer.values.gather(2, index)


def copied(cache: Any) -> Any:
    """A cache that can be changed without the other one; both have the same tensors at first."""
    found = copy.copy(cache)
    found.layers = [copy.copy(layer) for layer in _layers(cache)]
    return found


def _layers(cache: Any) -> list[Any]:
    return list(getattr(cache, "layers", None) or [])


def _keeps_state(part: Any) -> bool:
    return hasattr(part, "conv_states") and hasattr(part, "reorder_cache")


def _chooses(part: Any) -> bool:
    """Whether rows can be chosen from a part.

    A class of a single model, such as DeepSeek V4's, may keep more than the keys that its base class chooses among.
    """
    owner = next((kind for kind in type(part).__mro__ if "batch_select_indices" in vars(kind)), None)
    return owner is not None and (owner is type(part) or type(part).__module__ == owner.__module__)
