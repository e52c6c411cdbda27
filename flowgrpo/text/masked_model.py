"""A masked language model of transformers as a denoiser of completions: logits at every position of a state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..weights.pipeline_folders import from_hub
from .model_folder import check_language_folder, load_whole
from .positions import room_of

Frame = tuple[list[int], list[int]]
"""The token ids before and after the completion: the prompt, and a closing token if the tokenizer writes one."""


@dataclass(frozen=True)
class MaskedLanguageModel:
    """A masked language model with bidirectional attention.

    Attributes:
        model: a model of transformers, with `logits` [N, W, V] in its output.
        tokenizer: the tokenizer of the model, with a mask token.
    """

    model: Any
    tokenizer: Any

    @property
    def components(self) -> dict[str, nn.Module]:
        """The parts that can be trained."""
        return {"model": self.model}

    @property
    def mask(self) -> int:
        """The id of the mask token."""
        return int(self.tokenizer.mask_token_id)

    @property
    def pad(self) -> int:
        """The id for padding; positions with it are always masked out."""
        found = self.tokenizer.pad_token_id
        return self.mask if found is None else int(found)

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end the text of a completion. The positions after them are not part of the text."""
        found = (self.tokenizer.eos_token_id, self.tokenizer.sep_token_id)
        return tuple(dict.fromkeys(int(token) for token in found if token is not None))

    @cached_property
    def positions(self) -> int | None:
        """The largest number of tokens that the model takes, see `room_of`."""
        return room_of(self.model)

    def encode(self, prompt: str) -> Frame:
        """Token ids before and after the completion of a prompt."""
        ids: list[int] = list(self.tokenizer(prompt).input_ids)
        closing = self.tokenizer.sep_token_id
        return (ids[:-1], ids[-1:]) if closing is not None and ids[-1:] == [closing] else (ids, [])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a completion up to its first end token; masks that are left are shown as `_`."""
        ended = next((k for k, token in enumerate(ids) if token in self.ends), len(ids))
        parts: list[str] = []
        kept: list[int] = []
        for token in [*ids[:ended], None]:
            if token is None or token == self.mask:
                parts.append(self._plain(kept))
                kept = []
                parts.append("" if token is None else "_")
            else:
                kept.append(token)
        return "".join(parts)

    def _plain(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text if ids else ""

    def logits(self, frames: Sequence[Frame], x: Tensor) -> Tensor:
        """Logits [N, L, V] at the positions of N completions.

        Rows are padded on the right, so a model with absolute positions counts from the start of each prompt.

        Args:
            frames: N prompts.
            x: [N, L] token ids of the completions, masks among them.
        """
        device, length = x.device, x.shape[1]
        width = max(len(head) + len(tail) for head, tail in frames) + length
        rows, mask = [], []
        for head, tail in frames:
            spare = width - length - len(head) - len(tail)
            rows.append([*head, *[self.pad] * length, *tail, *[self.pad] * spare])
            mask.append([1] * (width - spare) + [0] * spare)
        ids = torch.tensor(rows, device=device)
        starts = torch.tensor([len(head) for head, _ in frames], device=device)
        places = starts[:, None] + torch.arange(length, device=device)
        ids = ids.scatter(1, places, x)
        out = self.model(input_ids=ids, attention_mask=torch.tensor(mask, device=device))
        found: Tensor = out.logits.gather(1, places[..., None].expand(-1, -1, out.logits.shape[-1]))
        return found


def load_masked_model(
    path: str, *, dtype: torch.dtype = torch.float32, attention: str | None = None
) -> MaskedLanguageModel:
    """Load a folder or hub id of transformers, in evaluation mode, because dropout makes log-probs irreproducible.

    Code that a model brings with it is never run.

    Args:
        path: a folder or hub id, as `from_pretrained` takes it.
        dtype: dtype of the weights.
        attention: transformers' `attn_implementation`.

    Raises:
        ValueError: a file of the folder is missing or damaged, or the tokenizer has no mask token or no end token.
    """
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    if Path(path).is_dir():
        check_language_folder(Path(path), masked=True)
    options = {} if attention is None else {"attn_implementation": attention}
    # Every supported version takes this name; newer versions prefer `dtype`.
    with from_hub(path):
        model = load_whole(AutoModelForMaskedLM, path, dtype=dtype, **options)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    if tokenizer.mask_token_id is None:
        raise ValueError(f"the tokenizer of {path} has no mask token; give it one and save it")
    found = MaskedLanguageModel(model, tokenizer)
    if not found.ends:
        raise ValueError(
            f"the tokenizer of {path} has no end token (eos or sep), so all texts have the same length; give it one "
            "and save it"
        )
    return found
