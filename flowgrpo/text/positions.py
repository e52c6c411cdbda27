"""How many tokens a language model takes in a row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

TABLES = ("position_embeddings", "embed_positions", "wpe")
"""What transformers calls the table of a model's absolute positions."""

CHANGING = ("longrope", "su", "dynamic")
"""Rules of rotary positions that depend on the length of the longest row."""
_FIRST = ("original_max_position_embeddings", "max_position_embeddings")


def room_of(model: Any) -> int | None:
    """The largest number of tokens that a model of transformers takes; None if it takes rows of any length.

    A model with a table of positions takes as many tokens as the table has rows. A model with rotary or relative
    positions takes any number. There is one exception: some models turn all positions of a row in another way as soon
    as the longest row of a call is longer than the rows that they were first trained on. Then a token would have one
    log-prob while it is sampled and another while it is trained.
    """
    most = getattr(model.config, "max_position_embeddings", None) or math.inf
    rooms = []
    for name, part in model.named_modules():
        if isinstance(part, nn.Embedding) and name.rpartition(".")[2] in TABLES:
            # Some models have a table that is larger than what their forward pass can address.
            size = min(part.num_embeddings, most)
            # Models of the RoBERTa family count positions from the padding token's id on.
            rooms.append(int(size) - (0 if part.padding_idx is None else part.padding_idx + 1))
    for part in model.modules():
        # GPT-J's table is a plain attribute in transformers 4, and a buffer later.
        for table in (getattr(part, name, None) for name in TABLES):
            if isinstance(table, Tensor) and table.dim() == 2:
                rooms.append(len(table))
    rooms += _before_other_rotations(model.config)
    return min(rooms, default=None)


def _before_other_rotations(config: Any) -> Iterator[int]:
    """The lengths from which on rotary positions follow another rule, for rules that depend on the length."""
    given = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    rules = [rule for rule in given if isinstance(rule, dict)]
    # Some models have a rule for each kind of layer.
    rules += [inner for rule in rules for inner in rule.values() if isinstance(inner, dict)]
    for rule in rules:
        if rule.get("rope_type", rule.get("type")) in CHANGING:
            places = (rule, vars(config))
            length = next((p[key] for key in _FIRST for p in places if isinstance(p.get(key), int)), None)
            if length is not None:
                yield length
