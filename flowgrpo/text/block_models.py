"""What the models that write block after block share: rows with a mask for each token, and a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.modeling_outputs import MaskedLMOutput

from .key_value_cache import cache_argument, cache_of
from .published_settings import other_settings


class WritesBlocks:
    """Comes before a class of models with `model` and `lm_head`; a token sees what its row of a mask says.

    Attributes:
        expected: setting -> its value in published models.
        kind: name of the kind of models.

    Raises:
        ValueError: the configuration asks for layers that no published model has.
    """

    expected: ClassVar[Mapping[str, Any]] = {}
    kind: ClassVar[str]
    config: Any
    model: Any
    lm_head: Any

    def __init__(self, config: Any) -> None:
        if faults := other_settings(config, self.expected, self.kind):
            raise ValueError(f"this {self.kind} cannot be loaded: {'; '.join(faults)}")
        super().__init__(config)  # type: ignore[call-arg]

    def forward(
        self, input_ids: Tensor, seen: Tensor, positions: Tensor | None = None, places: Tensor | None = None
    ) -> MaskedLMOutput:
        """Logits [N, W, V] of N rows of W tokens.

        Args:
            input_ids: [N, W].
            seen: [N, W, W] bool: whether a token sees another, see `core.completion_blocks.seen_in_blocks`.
            positions: [N, W] place of each token in its text; from 0 on if left out.
            places: [N, L] the positions in the row whose logits are wanted, [N, L, V]; all if left out.
        """
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        x = self.model(
            input_ids=input_ids, attention_mask=self._bias(seen), position_ids=positions, use_cache=False
        ).last_hidden_state
        return MaskedLMOutput(logits=self.lm_head(x if places is None else _at(x, places)))

    def with_past(
        self, input_ids: Tensor, seen: Tensor, positions: Tensor, places: Tensor, cache: Any
    ) -> tuple[Tensor, Any]:
        """Logits [N, K, V] of tokens that follow others, and the cache with the keys and values of all of them.

        Args:
            input_ids: [N, W] the new tokens.
            seen: [N, W, P + W] bool: whether a new token sees a token, the P tokens of the cache first.
            positions: [N, W] place of each new token in its text.
            places: [N, K] the positions among the new tokens whose logits are wanted.
            cache: of the call before; None if nothing came before.
        """
        given = {} if cache is None else {cache_argument(self.model): cache}
        output = self.model(
            input_ids=input_ids, attention_mask=self._bias(seen), position_ids=positions, use_cache=True, **given
        )
        return self.lm_head(_at(output.last_hidden_state, places)), cache_of(output)

    def _bias(self, seen: Tensor) -> Tensor:
        """[N, 1, W, W'] what attention adds to its scores."""
        dtype = self.lm_head.weight.dtype
        bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return bias.masked_fill(~seen, torch.finfo(dtype).min)[:, None]


def _at(x: Tensor, places: Tensor) -> Tensor:
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))
