"""Other language models, frozen, from which the policy learns on its own completions."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from ..model_paths import loading_options
from ..teachers import language_teacher, named

if TYPE_CHECKING:
    # This imports the libraries of models, and a recipe is read without them.
    from ...text.model import LanguageModel
    from .text_policy import TextPolicy

SHOWN = 3
"""How many tokens an error names."""


def frozen_teachers(policy: TextPolicy) -> dict[str, TextPolicy]:
    """The teachers of a run by name, each a policy with another model on the same device. They are not trained.

    Args:
        policy: the policy that learns.

    Raises:
        ValueError: there is no such model, it cannot be loaded, or its tokens are not the policy's tokens.
    """
    # Two names may be two columns of one model, and its weights are held once. An objective is made anew when its
    # coefficients have moved.
    loaded = policy.frozen
    found: dict[str, TextPolicy] = {}
    for name, teacher in named(policy.recipe.model.teachers).items():
        found[name] = loaded[teacher.path] = loaded.get(teacher.path) or _frozen(policy, teacher.path)
    return found


def _frozen(policy: TextPolicy, path: str) -> TextPolicy:
    from ...text.model import load_language_model

    options = {**loading_options(policy.recipe.model), "quantize": None}
    language = load_language_model(language_teacher(path), **options)
    _require_same_tokens(policy.language, language, path)
    _require_room(policy, language, path)
    language.model.requires_grad_(False).to(policy.device)
    teacher = copy.copy(policy)
    teacher.language = language
    return teacher


def _require_same_tokens(student: LanguageModel, teacher: LanguageModel, path: str) -> None:
    """Refuse a teacher whose ids mean other tokens, because it reads the ids of the student's completions."""
    own, other = student.tokenizer.get_vocab(), teacher.tokenizer.get_vocab()
    differ = sorted(token for token in own.keys() | other.keys() if own.get(token) != other.get(token))
    if differ:
        named = ", ".join(repr(token) for token in differ[:SHOWN])
        raise ValueError(
            f"model.teachers: {path} has other tokens than the model ({len(differ):,} differ, such as {named}); a "
            "teacher reads the tokens of the model's completions, so use a teacher with the same tokenizer"
        )
    rows, needed = teacher.model.get_input_embeddings().num_embeddings, shared_tokens(student)
    if rows < needed:
        raise ValueError(
            f"model.teachers: {path} has embeddings for {rows:,} tokens, and its tokenizer has {needed:,}; get the "
            "model again, with the tokenizer that belongs to it"
        )


def _require_room(policy: TextPolicy, teacher: LanguageModel, path: str) -> None:
    """Refuse a teacher that has no positions for what the model may read and write."""
    settings, own, room = policy.recipe.generation, policy.language.positions, teacher.positions
    longest = settings.max_prompt_tokens + settings.max_tokens
    # Where the model has no more room than its teacher, its prompts have been checked one by one.
    if room is not None and room + 1 < longest and (own is None or room < own):
        raise ValueError(
            f"model.teachers: {path} has positions for {room + 1:,} tokens in all, and a prompt of "
            f"generation.max_prompt_tokens {settings.max_prompt_tokens:,} and a completion of generation.max_tokens "
            f"{settings.max_tokens:,} have {longest:,}; lower these, or use another teacher"
        )


def shared_tokens(language: LanguageModel) -> int:
    """How many ids have a token; tables of embeddings may have more rows, and each model its own number of them."""
    return 1 + max(language.tokenizer.get_vocab().values())
