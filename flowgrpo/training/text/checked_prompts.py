"""The lengths of the prompts of a run of text, in tokens of its model."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

from ...configs.schema import MaskedRecipe, TextRecipe
from ...text.chat_templates import conversation, template_ids, uses_template, without_template
from ..data import Data, PromptRow, templated
from ..recipe_prompts import given_columns
from .forms.from_data import answer_of

Note = Callable[[str], None]
"""Called with a sentence that is reported when the run starts."""


def check_prompts(
    recipe: TextRecipe | MaskedRecipe,
    data: Data,
    tokens: Callable[[PromptRow], int],
    check_fits: Callable[[PromptRow, int], object],
    note: Note,
) -> None:
    """Check the lengths of all prompts of a run of text, and leave long training prompts out if the recipe says so.

    A held-out prompt is never left out, because a mean would be over other prompts than the file has.

    Args:
        recipe: for the largest length, and the names of the prompt files.
        data: the prompts.
        tokens: the number of tokens of a prompt; raises ValueError if the prompt cannot be encoded.
        check_fits: raises ValueError if the model has no room for a prompt of this number of tokens.
        note: called with a sentence about the prompts that are left out.

    Raises:
        ValueError: a prompt is empty, longer than the recipe allows, or longer than the model takes, or all training
            prompts would be left out, or so many that an iteration has not enough.
    """
    most = recipe.generation.max_prompt_tokens

    def fits(source: str, row: PromptRow, drops: bool = False) -> bool:
        try:
            count = tokens(row)
            if drops and count > most:
                return False
            check_fits(row, count)
        except ValueError as error:
            raise ValueError(f"{source}: prompt {row.id + 1}: {error}") from error
        if not 0 < count <= most:
            other = "" if source == recipe.data.heldout or not count else ", or write generation.long_prompts: drop"
            raise ValueError(
                f"{source}: prompt {row.id + 1} has {count} tokens; generation.max_prompt_tokens is {most}: "
                f"raise it, or leave out the prompt{other}"
            )
        return True

    source, rows, drops = recipe.data.train, data.train.rows, recipe.generation.long_prompts == "drop"
    asked = [[row, *(templated(row, template) for template in recipe.data.templates)] for row in rows]
    kept = [row for row, forms in zip(rows, asked) if all(fits(source, form, drops) for form in forms)]
    if not kept:
        raise ValueError(f"{source}: all prompts have more tokens than generation.max_prompt_tokens {most}; raise it")
    if len(kept) < len(rows):
        note(
            f"{len(rows) - len(kept):,} of {len(rows):,} prompts of {source} are left out, because they have more than "
            f"{most} tokens (generation.max_prompt_tokens)"
        )
        _refuse_too_few(recipe, len(kept), "generation.max_prompt_tokens")
        data.train.rows = kept
    for row in data.heldout:
        fits(str(recipe.data.heldout), row)


def _refuse_too_few(recipe: TextRecipe | MaskedRecipe, left: int, key: str) -> None:
    """Refuse too few prompts, as a short file is refused: an iteration would repeat some of them."""
    if left < recipe.rollout.prompts:
        raise ValueError(
            f"rollout.prompts is {recipe.rollout.prompts}, but without the long prompts {recipe.data.train} holds "
            f"{left}; use at most {left}, raise {key}, or give more short prompts"
        )


def check_with_tokenizer(recipe: TextRecipe, data: Data | None, folder: str, stored: bool = False) -> list[str]:
    """Make the check of `check_prompts` before the model is loaded, as far as its tokenizer tells.

    Only prompts that may be too long are encoded: a token has at least one byte. Pictures need the model itself.

    Args:
        recipe: of the run.
        data: the prompts, which stay as they are; None if they cannot be read.
        folder: of the model, or its hub id.
        stored: nothing is downloaded, and without a tokenizer on this machine nothing is checked.

    Returns:
        Sentences about the prompts that a run will leave out.

    Raises:
        ValueError: as `check_prompts`, or a prompt is a conversation and the tokenizer has no chat template.
    """
    from transformers import AutoTokenizer

    model = recipe.model
    if data is None or model.pictures:
        return []
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=stored)
    except (OSError, ValueError, TypeError):  # transformers 4.56 has a TypeError for files that are missing
        if stored:
            return []
        raise
    chats = uses_template(tokenizer, model.path, model.chat, model.system, model.chat_template_kwargs)

    def encoded(prompt: str, messages: Any) -> int:
        if chats:
            return len(template_ids(tokenizer, prompt, messages, model.system, model.chat_template_kwargs))
        return len(tokenizer(without_template(prompt, messages)).input_ids)

    around = encoded("-", None)

    def tokens(row: PromptRow) -> int:
        said = conversation(row.text, row.messages, None)
        size = sum(len(one["content"].encode()) for one in said)
        short = 0 < size <= recipe.generation.max_prompt_tokens - around * len(said)
        return 1 if short and (chats or row.messages is None) else encoded(row.text, row.messages)

    own = copy(data)
    own.train = copy(data.train)
    notes = list[str]()
    check_prompts(recipe, own, tokens, lambda row, count: None, notes.append)
    return notes


def check_answers(
    recipe: TextRecipe | MaskedRecipe,
    data: Data,
    prompt_tokens: Callable[[PromptRow], int],
    tokens: Callable[[str], list[int]],
    note: Note,
) -> None:
    """Check the lengths of the completions that the data give, and leave out prompts with longer ones if it says so.

    Args:
        recipe: for the largest length, the tokens that are scored at once, and the columns of the completions.
        data: the prompts.
        prompt_tokens: the number of tokens of a prompt.
        tokens: the token ids of a completion, with its end.
        note: called with a sentence about the prompts that are left out.

    Raises:
        ValueError: a completion is longer than the recipe allows, the completions of a prompt are too long to be scored
            together, or so many training prompts would be left out that an iteration has not enough.
    """
    columns, source = given_columns(recipe), recipe.data.train
    if not columns:
        return
    if isinstance(recipe, TextRecipe):
        key, most, room = "generation.max_tokens", recipe.generation.max_tokens, recipe.rollout.tokens
    else:
        key, most, room = "generation.tokens", recipe.generation.tokens, None
    drops, kept = recipe.generation.long_prompts == "drop", list[PromptRow]()
    for row in data.train.rows:
        longest = max(len(tokens(answer_of(row, column))) for column in columns)
        together = 0 if room is None else len(columns) * (prompt_tokens(row) + longest)
        if longest <= most and together <= (room or 0):
            kept.append(row)
        elif not drops and longest <= most:
            raise ValueError(
                f"{source}: the {len(columns)} completions of prompt {row.id + 1} are compared, and have {together:,} "
                f"tokens together with their prompt and padding; rollout.tokens is {room:,}: raise "
                "it, or leave out the prompt, or write generation.long_prompts: drop"
            )
        elif not drops:
            raise ValueError(
                f"{source}: a completion of prompt {row.id + 1} has {longest} tokens; {key} is {most}: "
                "raise it, or leave out the prompt, or write generation.long_prompts: drop"
            )
    if not kept:
        raise ValueError(f"{source}: all prompts have completions of more than {key} {most}; raise it")
    if len(kept) < len(data.train.rows):
        note(
            f"{len(data.train.rows) - len(kept):,} of {len(data.train.rows):,} prompts of {source} are left out, "
            f"because their completions have more than {most} tokens ({key})"
            + ("" if room is None else f", or more than {room:,} together (rollout.tokens)")
        )
        _refuse_too_few(recipe, len(kept), key)
        data.train.rows = kept
