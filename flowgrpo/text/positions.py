"""How many tokens a language model takes in a row."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

TABLES = ("position_embeddings", "embed_positions", "wpe")
"""What transformers calls the table of a model's absolute positions."""


def room_of(model: Any) -> int | None:
    """The largest number of tokens that a model of transformers takes; None if it has no table of positions.

    A model with rotary or relative positions takes rows of any length.
    """
    most = getattr(model.config, "max_position_embeddings", None) or math.inf
    rooms = []
    for name, part in model.named_modules():
        if isinstance(part, nn.Embedding) and name.rpartition(".")[2] in TABLES:
            # Some models have a table that is larger than what their forward pass can address.
            size = min(part.num_embeddings, most)
            # Models of the RoBERTa family count positions from the padding token's id on.
            rooms.append(int(size) - (0 if part.padding_idx is None else part.padding_idx + 1))
    for name, table in model.named_buffers():
        if name.rpartition(".")[2] in TABLES and table.dim() == 2:
            rooms.append(len(table))
    return min(rooms, default=None)
