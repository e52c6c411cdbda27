"""A masked language model as a denoiser of completions: logits at every position of a state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.completion_blocks import open_block, seen_in_blocks
from ..weights.pipeline_folders import from_hub
from ..weights.quantized import Quantized
from ..weights.quantized import quantize as put_in_fewer_bits
from .chat_templates import answer_end, template_ids, turn_end, uses_template, without_template
from .diffusion_models import DIFFUSION_TYPES, check_block, model_class, tokenizer_class, type_of
from .model import linear_layers
from .model_folder import check_language_folder, load_whole
from .positions import room_of

Frame = tuple[list[int], list[int]]
"""The token ids before and after the completion: the prompt, and a closing token if the tokenizer writes one."""


@dataclass(frozen=True)
class MaskedLanguageModel:
    """A masked language model, in which a token sees all tokens, or all up to the end of its block.

    Attributes:
        model: a model of transformers, with `logits` [N, W, V] in its output.
        tokenizer: the tokenizer of the model.
        system: a system message, for chat templates.
        chat: whether prompts go through the chat template.
        chat_template_kwargs: values for further variables of the chat template.
        block: tokens of a block, for a model that writes block after block. Blocks are counted from the first token of
            the completion, forwards in the completion and backwards in the prompt.
    """

    model: Any
    tokenizer: Any
    system: str | None = None
    chat: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    block: int | None = None

    @property
    def components(self) -> dict[str, nn.Module]:
        """The parts that can be trained."""
        return {"model": self.model}

    @property
    def mask(self) -> int:
        """The id of the mask token. LLaDA's tokenizer does not name it, and its configuration does."""
        found = self.tokenizer.mask_token_id
        return int(self.model.config.mask_token_id if found is None else found)

    def embeds(self, token: int) -> bool:
        """Whether the model has an embedding of a token id."""
        return 0 <= token < getattr(self.model.get_input_embeddings(), "num_embeddings", math.inf)

    @property
    def pad(self) -> int:
        """The id for padding; positions with it are always masked out.

        It is the mask token if the tokenizer has no token for padding, or one that the model has no embedding of.
        """
        found = self.tokenizer.pad_token_id
        return self.mask if found is None or not self.embeds(found) else int(found)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end the text of a completion. The positions after them are not part of the text."""
        turn = turn_end(self.tokenizer) if self.chat else None
        found = (self.tokenizer.eos_token_id, self.tokenizer.sep_token_id, turn)
        return tuple(dict.fromkeys(int(token) for token in found if token is not None))

    @property
    def _diffusion(self) -> bool:
        return self.model.config.model_type in DIFFUSION_TYPES

    @cached_property
    def positions(self) -> int | None:
        """The largest number of tokens that the model takes, see `room_of`."""
        return room_of(self.model)

    def encode(self, prompt: str, messages: Sequence[Mapping[str, str]] | None = None) -> Frame:
        """Token ids before and after the completion of a prompt, or of a conversation so far, see `template_ids`."""
        if self.chat:
            return template_ids(self.tokenizer, prompt, messages, self.system, self.chat_template_kwargs), []
        ids: list[int] = list(self.tokenizer(without_template(prompt, messages)).input_ids)
        closing = self.tokenizer.sep_token_id
        return (ids[:-1], ids[-1:]) if closing is not None and ids[-1:] == [closing] else (ids, [])

    def answer_tokens(self, text: str) -> list[int]:
        """The token ids of a whole completion that the model did not write: its words and an end token."""
        words: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return [*words, answer_end(self.tokenizer, self.chat, self.ends)]

    @property
    def fill(self) -> int:
        """The end token that fills a completion behind its end."""
        eos = self.tokenizer.eos_token_id
        return self.ends[0] if eos is None else int(eos)

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
        """Logits [N, L, V] at the positions of N completions; [N, block, V] if the model writes block after block.

        Rows are padded on the right, so a model with absolute positions counts from the start of each prompt. A model
        of blocks has logits at the places of `open_block`, and does not evaluate what follows them.

        Args:
            frames: N prompts.
            x: [N, L] token ids of the completions, masks among them.
        """
        if self.block is not None:
            places = open_block(x == self.mask, self.block)
            # An estimate of memory is made on `meta`, where a tensor has no numbers.
            end = x.shape[1] if x.is_meta else int(places.max()) + 1
            return self._in_blocks(frames, [x[:, :end]], places)
        return self._whole(frames, x, torch.arange(x.shape[1], device=x.device).expand_as(x))

    def _whole(self, frames: Sequence[Frame], x: Tensor, wanted: Tensor) -> Tensor:
        """Logits [N, K, V] at K places `wanted` [N, K] of N completions, if a token sees all others."""
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
        ids, wanted = ids.scatter(1, places, x), starts[:, None] + wanted
        if self._diffusion:
            # The vocabulary is large, so the logits of other positions are not computed.
            padding = None if all(map(all, mask)) else torch.tensor(mask, device=device)
            chosen: Tensor = self.model(ids, padding, wanted).logits
            return chosen
        out = self.model(input_ids=ids, attention_mask=torch.tensor(mask, device=device))
        found: Tensor = out.logits.gather(1, wanted[..., None].expand(-1, -1, out.logits.shape[-1]))
        return found

    def scored_logits(self, frames: Sequence[Frame], x: Tensor, ids: Tensor, places: Tensor) -> Tensor:
        """Logits [N, K, V] at places of N completions, from which the log-probs of finished tokens are taken.

        If the model writes block after block, then each block is evaluated after the finished blocks before it.

        Args:
            frames: N prompts.
            x: [N, L] token ids of the completions, masks among them.
            ids: [N, L] token ids of the finished completions.
            places: [N, K] positions of the completions.
        """
        if self.block is None:
            return self._whole(frames, x, places)
        return self._in_blocks(frames, [ids, x], places + x.shape[1])

    def _in_blocks(self, frames: Sequence[Frame], parts: Sequence[Tensor], places: Tensor) -> Tensor:
        """Logits [N, K, V] of a model of blocks.

        Args:
            frames: N prompts. What a tokenizer writes after a completion is left out: no token of it would see that.
            parts: [N, L] the completions, and if there are two, their second form with masks.
            places: [N, K] places in the joined parts.
        """
        joined = torch.cat(list(parts), dim=1)
        device, length, heads = joined.device, parts[0].shape[1], [len(head) for head, _ in frames]
        width = max(heads) + joined.shape[1]
        rows = [[*head, *[self.pad] * (width - len(head))] for head, _ in frames]
        starts = torch.tensor(heads, device=device)[:, None]
        own = starts + torch.arange(joined.shape[1], device=device)
        ids = torch.tensor(rows, device=device).scatter(1, own, joined)
        # The padding follows the completions, so it is in later blocks, which no token of a completion sees.
        after = torch.arange(width, device=device) - starts
        noised = None
        if len(parts) > 1:
            noised = (after >= length) & (after < 2 * length)
            after = torch.where(noised, after - length, after)
        number = torch.div(after, self.block, rounding_mode="floor")
        found: Tensor = self.model(ids, seen_in_blocks(number, noised), after + starts, places + starts).logits
        return found


def load_masked_model(
    path: str,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
    chat: bool | None = None,
    system: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    block: int | None = None,
    quantize: Quantized | None = None,
) -> MaskedLanguageModel:
    """Load a folder or hub id of transformers, in evaluation mode, because dropout makes log-probs irreproducible.

    Code that a model brings with it is never run. LLaDA, LLaDA 2, Dream and SDAR have classes here.

    Args:
        path: a folder or hub id, as `from_pretrained` takes it.
        dtype: dtype of the weights.
        attention: transformers' `attn_implementation`.
        chat: whether to use the chat template; None uses it if there is one.
        system: a system message; needs a chat template.
        chat_template_kwargs: values for further variables of the chat template.
        block: tokens of a block; only for a model that writes block after block, and needed for it.
        quantize: as for `load_language_model`.

    Raises:
        ValueError: a file of the folder is missing or damaged, there is no mask token or no end token, a chat template
            is needed and there is none, or it does not read one of the variables; `block` is missing or not for this
            model; the kernel of attention has no blocks.
    """
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    if Path(path).is_dir():
        check_language_folder(Path(path), masked=True)
    options = {} if attention is None else {"attn_implementation": attention}
    with from_hub(path):
        kind = type_of(path)
        check_block(path, kind, block, attention)
        # Every supported version takes this name; newer versions prefer `dtype`.
        model = load_whole(AutoModelForMaskedLM if kind is None else model_class(kind), path, dtype=dtype, **options)
        tokens = AutoTokenizer if kind is None else tokenizer_class(kind)
        tokenizer = tokens.from_pretrained(path, trust_remote_code=False)
    if quantize is not None:
        put_in_fewer_bits(model, quantize, linear_layers(model))
    if tokenizer.mask_token_id is None and getattr(model.config, "mask_token_id", None) is None:
        raise ValueError(f"the tokenizer of {path} has no mask token; give it one and save it")
    values = dict(chat_template_kwargs or {})
    chats = uses_template(tokenizer, path, chat, system, values)
    found = MaskedLanguageModel(model, tokenizer, system, chats, values, block)
    if not found.embeds(found.mask):
        own = "write its id as mask_token_id into config.json"
        change = own if tokenizer.mask_token_id is None else "use the tokenizer that the model was trained with"
        raise ValueError(
            f"the mask token of {path} has the id {found.mask}, and the model has no embedding of it; {change}"
        )
    if not found.ends:
        raise ValueError(
            f"the tokenizer of {path} has no end token (eos or sep), so all texts have the same length; give it one "
            "and save it"
        )
    return found
