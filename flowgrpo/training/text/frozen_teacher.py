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
    loaded: dict[str, TextPolicy] = {}
    found: dict[str, TextPolicy] = {}
    for name, teacher in named(policy.recipe.model.teachers).items():
        # Two names may be two columns of one model, and its weights are held once.
        found[name] = loaded[teacher.path] = loaded.get(teacher.path) or _frozen(policy, teacher.path)
    return found


def _frozen(policy: TextPolicy, path: str) -> TextPolicy:
    from ...text.model import load_language_model

    language = load_language_model(language_teacher(path), **loading_options(policy.recipe.model))
    _require_same_tokens(policy.language, language, path)
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


def shared_tokens(language: LanguageModel) -> int:
    """How many ids have a token; tables of embeddings may have more rows, and each model its own number of them."""
    return 1 + max(language.tokenizer.get_vocab().values())
