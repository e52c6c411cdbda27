"""Language models with the shapes of real models and random weights, to measure speed and memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..estimate.known_models import masked_shapes_of, shapes_of
from ..estimate.masked import unread_model
from ..text.masked_model import MaskedLanguageModel
from ..text.model import LanguageModel

SPECIAL = ("<end>", "<pad>", "<unk>", "<mask>")


def random_language_model(
    path: str, dtype: torch.dtype, device: torch.device, *, attention: str | None = None, seed: int = 0
) -> LanguageModel:
    """A causal language model of the class and sizes of `path`, with random weights; only its configuration is read.

    A number is a word, and each word is a token, as many as the vocabulary has. So a text is a row of numbers.

    Args:
        path: a folder of transformers, a hub id whose configuration is on this machine, or a model id of
            `KNOWN_LANGUAGE_MODELS`.
        dtype: of the weights.
        device: where the weights are drawn.
        attention: transformers' `attn_implementation`.
        seed: of the weights.

    Raises:
        ValueError: the shapes of the model are unknown.
    """
    from transformers import AutoModelForCausalLM

    config = shapes_of(path)
    options = {} if attention is None else {"attn_implementation": attention}
    with _drawing(device, seed):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False, **options)
    # The end token of the configuration belongs to another tokenizer.
    model.generation_config.eos_token_id = None
    return LanguageModel(model.eval(), _tokenizer(config.get_text_config().vocab_size))


def random_masked_model(
    path: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    attention: str | None = None,
    block: int | None = None,
    seed: int = 0,
) -> MaskedLanguageModel:
    """A masked language model of the class and sizes of `path`, as `random_language_model`.

    Args:
        path: a folder, a hub id whose configuration is on this machine, or a model id of `KNOWN_DIFFUSION_MODELS`.
        dtype: of the weights.
        device: where the weights are drawn.
        attention: transformers' `attn_implementation`.
        block: tokens of a block, for a model that writes block after block.
        seed: of the weights.

    Raises:
        ValueError: the shapes of the model are unknown.
    """
    config = masked_shapes_of(path)
    options = {} if attention is None else {"attn_implementation": attention}
    with _drawing(device, seed):
        model = unread_model(config, dtype=dtype, **options)
    return MaskedLanguageModel(model.eval(), _tokenizer(config.vocab_size), block=block)


@contextmanager
def _drawing(device: torch.device, seed: int) -> Iterator[None]:
    """A context in which weights are made on a device, from a seed."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(seed)
        yield


def numbers(count: int, tokens: int, vocabulary: int, seed: int = 0) -> Iterator[str]:
    """`count` texts of random words, each with `tokens` tokens for a model of `random_language_model`."""
    dice = random.Random(seed)
    for _ in range(count):
        yield " ".join(str(dice.randrange(len(SPECIAL), vocabulary)) for _ in range(tokens))


def _tokenizer(vocabulary: int) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    end, pad, unknown, mask = SPECIAL
    words = {word: k for k, word in enumerate([*SPECIAL, *map(str, range(len(SPECIAL), vocabulary))])}
    tokenizer = Tokenizer(WordLevel(words, unk_token=unknown))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, pad_token=pad, unk_token=unknown, mask_token=mask,
        padding_side="left",
    )  # fmt: skip
