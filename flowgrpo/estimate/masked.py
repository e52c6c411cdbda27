"""Estimates of the memory of a run of a masked language model; docs/estimates.md explains the method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..configs.schema import MaskedRecipe
from ..core.categorical import NUMBERS
from ..samplers.unmasking import reveal_log_probs, without_mask
from ..text.diffusion_models import DIFFUSION_TYPES, check_block, model_class, tokenizer_class, type_of
from ..text.masked_model import Frame, MaskedLanguageModel
from ..training.data import PromptRow
from ..training.model_paths import DTYPES, masked_folder
from ..training.planning import forecast, passes_of
from ..training.prompts.chosen_prompts import places_of
from ..training.recipe_prompts import given_columns
from ..training.text.whole_answers import compares
from .estimates import GPUS
from .footprint import LiveBytes
from .known_models import masked_shapes_of
from .language import MEASURED, TextEstimate, could_pack, model_bytes, on_meta, refuse_cards, trained_part
from .memory import Shares, at_rest

DRAWING = 24
"""Bytes for each number of the logits from which tokens are drawn, `NUMBERS` at a time: twice float32, and twice
float64."""


def estimate_masked(recipe: MaskedRecipe, rows: Sequence[PromptRow], gpu: str = "h100", gpus: int = 1) -> TextEstimate:
    """Memory of a recipe of a masked model, without its weights.

    Args:
        recipe: of a masked model.
        rows: training prompts; their lengths are counted if the model's tokenizer is on this machine.
        gpu: a key of `GPUS`.
        gpus: number of GPUs that share the prompts.

    Raises:
        ValueError: the GPU or the shapes of the model are unknown, there are fewer prompts than GPUs, or `model.block`
            is missing or not for this model.
    """
    refuse_cards(recipe, gpu, gpus)
    rollout, generation, path = recipe.rollout, recipe.generation, masked_folder(recipe.model.path)
    found = _longest(recipe, path, rows)
    prompt = min(found or generation.max_prompt_tokens, generation.max_prompt_tokens)
    language = _language(recipe, path)
    size = model_bytes(recipe, language)
    weights = trained_part(recipe, language)
    computing = [p for p in language.model.parameters() if p.requires_grad and p.dtype != torch.float32]
    trained, rounded = sum(p.numel() for p in weights.parameters()), sum(p.numel() for p in computing)
    prompts = math.ceil(rollout.prompts / gpus)
    each = math.ceil(forecast(recipe).images / rollout.prompts)
    together = min(rollout.chunk or prompts, prompts) * each
    for parameter in weights.parameters():
        parameter.grad = torch.empty_like(parameter)
    return TextEstimate(
        gpu=GPUS[gpu],
        gpus=gpus,
        prompt=prompt,
        counted=found is not None,
        scored=rollout.batch,
        recomputes=recipe.model.gradient_checkpointing,
        resting=at_rest(recipe, "model", size, trained, rounded, compares(recipe), Shares.of(recipe, gpus, None)),
        passing={
            # Given completions are not sampled, and evaluations sample `rollout.batch` at a time.
            "sampling": _sampling(recipe, language, rollout.batch if given_columns(recipe) else together, prompt),
            "training": _training(recipe, language, together // each, each, prompt),
        },
        levers=("rollout.chunk or rollout.batch", "rollout.batch"),
        packs=could_pack(recipe),
    )


def _language(recipe: MaskedRecipe, path: str) -> MaskedLanguageModel:
    """The model of a recipe on `meta`, from its configuration on this machine."""
    # Kernels that need a GPU are counted as the fused attention of PyTorch, which keeps as much.
    attention = "eager" if recipe.model.attention == "eager" else "sdpa"
    config = masked_shapes_of(path)
    check_block(path, config.model_type, recipe.model.block, recipe.model.attention)
    with torch.device("meta"):
        model = unread_model(config, dtype=DTYPES[recipe.model.dtype], attn_implementation=attention)
    named = SimpleNamespace(mask_token_id=0, pad_token_id=0, sep_token_id=None, eos_token_id=0)
    return MaskedLanguageModel(model.eval(), named, block=recipe.model.block)


def unread_model(config: Any, **options: Any) -> Any:
    """A masked language model of a configuration, on the device of the context, with weights that are not read.

    Args:
        config: see `masked_shapes_of`.
        options: dtype and implementation of attention.
    """
    from transformers import AutoModelForMaskedLM

    if config.model_type in DIFFUSION_TYPES:
        return model_class(config.model_type)._from_config(config, **options)
    return AutoModelForMaskedLM.from_config(config, trust_remote_code=False, **options)


def _longest(recipe: MaskedRecipe, path: str, rows: Sequence[PromptRow]) -> int | None:
    """Tokens of the longest of some prompts; None if they cannot be counted here."""
    from transformers import AutoTokenizer

    model, some = recipe.model, [rows[place] for place in places_of(len(rows), MEASURED, "spread")]
    try:
        kind = type_of(path, local=True)
        tokens = AutoTokenizer if kind is None else tokenizer_class(kind)
        tokenizer = tokens.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        chat = bool(getattr(tokenizer, "chat_template", None)) if model.chat is None else model.chat
        language = MaskedLanguageModel(None, tokenizer, model.system, chat, model.chat_template_kwargs)
        return max((sum(map(len, language.encode(row.text, row.messages))) for row in some), default=None)
    except (OSError, ValueError, TypeError):  # transformers 4.56 has a TypeError for files that are missing
        return None


def _logits(
    recipe: MaskedRecipe, language: MaskedLanguageModel, rows: int, prompt: int, tokens: int | None = None
) -> Tensor:
    """Logits of completions on `meta`, after prompts of the longest length; of all tokens if no number is given."""
    frames: list[Frame] = [([1] * prompt, [])] * rows
    length = tokens or recipe.generation.tokens
    return language.logits(frames, torch.zeros(rows, length, dtype=torch.long, device="meta"))


def _sampling(recipe: MaskedRecipe, language: MaskedLanguageModel, together: int, prompt: int) -> int:
    """Bytes of the logits of all states of a step, and of the pass that makes the last of them.

    Args:
        recipe: of the run.
        language: on `meta`.
        together: number of states of a chunk.
        prompt: tokens of each prompt.
    """
    batch, live = min(recipe.rollout.batch, together), LiveBytes()
    # With a cache, the call that begins with the prompts is the largest, and it has one block.
    cached = recipe.rollout.cache
    tokens = recipe.model.block if cached and recipe.model.block else recipe.generation.tokens
    with on_meta(), live, torch.no_grad():
        found = _logits(recipe, language, batch, prompt, tokens)
    one, drawn = found.nbytes // batch, min(together * found.numel() // batch, NUMBERS)
    kept = together * (prompt + recipe.generation.tokens) * _past_bytes(language) if cached else 0
    # A step has the predictions, their rows in the order of the children, and the rows without the mask token.
    return kept + max(live.most + (together - batch) * one, 3 * together * one + DRAWING * drawn)


def _past_bytes(language: MaskedLanguageModel) -> int:
    """Bytes of the keys and values of a token in all layers."""
    config, size = language.model.config, next(language.model.parameters()).element_size()
    return 2 * int(config.num_hidden_layers * config.num_key_value_heads * config.head_dim) * size


def _training(recipe: MaskedRecipe, language: MaskedLanguageModel, prompts: int, each: int, prompt: int) -> int:
    """Most bytes alive at once while a batch is scored and its gradient is computed, gradients left out.

    Args:
        recipe: of the run.
        language: on `meta`.
        prompts: number of prompts of a chunk.
        each: completions of a prompt.
        prompt: tokens of each prompt.
    """
    batch = recipe.rollout.batch
    if recipe.objective.get("likelihood") is not None:
        return _scored(recipe, language, batch, batch, _scored_tokens(recipe, batch), prompt)
    # The completions of a prompt begin as one state, and each of them is an edge, which has a copy of its logits.
    first, tokens = min(batch, prompts), [recipe.generation.tokens]
    return max(_scored(recipe, language, *sizes, tokens, prompt) for sizes in ((first, first * each), (batch, batch)))


def _scored_tokens(recipe: MaskedRecipe, batch: int) -> list[int]:
    """Tokens that each pass scores which is in memory with others, in the longest of a batch's completions."""
    draws = [(passes_of(recipe, draw).weight > 0).sum(1) for draw in range(batch)]
    longest = torch.stack(draws).amax(0).tolist()
    # Objective `answers` has `rollout.batch` passes in memory, of whichever completions they are.
    alone = recipe.objective.get("loss") is not None
    apart = passes_of(recipe).apart and recipe.objective.get("level") == "token"
    return [max(longest)] if alone or apart else [max(count, 1) for count in longest]


def _scored(
    recipe: MaskedRecipe, language: MaskedLanguageModel, states: int, edges: int, passes: Sequence[int], prompt: int
) -> int:
    """Most bytes while the passes of a batch are scored, each at so many tokens, and their gradient is computed."""
    live = LiveBytes()
    with on_meta(), live, torch.enable_grad():
        total: Any = 0
        for tokens in passes:
            logits = without_mask(_scoring_logits(recipe, language, states, tokens, prompt), language.mask)
            if recipe.objective.name == "trajectory":
                logits = logits[torch.zeros(edges, dtype=torch.long, device="meta")]
            ids = torch.zeros(logits.shape[:2], dtype=torch.long, device="meta")
            total = total + reveal_log_probs(logits, ids, ids == 0, recipe.generation.temperature).sum()
            del logits
        if compares(recipe):
            with torch.no_grad():
                _scoring_logits(recipe, language, states, passes[0], prompt)
        torch.autograd.backward([total])
    return live.most


def _scoring_logits(recipe: MaskedRecipe, language: MaskedLanguageModel, rows: int, tokens: int, prompt: int) -> Tensor:
    """The logits of a batch that is trained; finished completions are scored at some of their positions."""
    if recipe.objective.name == "trajectory":
        return _logits(recipe, language, rows, prompt)
    ids = torch.zeros(rows, recipe.generation.tokens, dtype=torch.long, device="meta")
    return language.scored_logits([([1] * prompt, [])] * rows, ids, ids, ids[:, :tokens])
