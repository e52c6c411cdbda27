"""Prompts through the chat template of a tokenizer, and the variables of the template.

A template ignores what it does not read, so a misspelt variable is refused here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta

from ..parts.plugins import nearest

SET_BY_US = {"messages", "add_generation_prompt", "raise_exception", "strftime_now"}
"""Variables that the run and transformers set, among them functions of templates."""
GIVEN = {"tools", "documents"}
"""Arguments of `apply_chat_template` that are variables of templates too."""


def uses_template(
    tokenizer: Any, owner: str, chat: bool | None, system: str | None, variables: Mapping[str, Any]
) -> bool:
    """Whether prompts go through the chat template.

    Args:
        tokenizer: of the model.
        owner: the path of the model, for messages.
        chat: what the recipe says; None uses the template if there is one.
        system: a system message, or None.
        variables: values for further variables of the template.

    Raises:
        ValueError: the template is needed and there is none, or it does not read one of the variables.
    """
    has = bool(getattr(tokenizer, "chat_template", None))
    if (chat or system is not None or variables) and not has:
        key = "system" if system is not None else "chat_template_kwargs"
        asked = "model.chat is true" if chat else f"model.{key} is given"
        raise ValueError(f"{asked}, but the tokenizer of {owner} has no chat template; leave this key out")
    if variables:
        check_variables(tokenizer, variables, owner)
    return has if chat is None else chat


def template_ids(
    tokenizer: Any,
    prompt: str,
    messages: Sequence[Mapping[str, str]] | None,
    system: str | None,
    variables: Mapping[str, Any],
) -> list[int]:
    """Token ids of a prompt, or of a conversation so far, so that the model can continue it.

    Args:
        tokenizer: with a chat template.
        prompt: the user's message, where there is no conversation.
        messages: a conversation; if the last message is the assistant's, it is the beginning of the answer.
        system: a system message, for prompts that have none.
        variables: values for further variables of the template.

    Raises:
        ValueError: the template refuses the conversation.
    """
    talk = conversation(prompt, messages, system)
    try:
        continues = talk[-1]["role"] == "assistant"
        text = tokenizer.apply_chat_template(
            talk, tokenize=False, add_generation_prompt=not continues, continue_final_message=continues, **variables
        )
    except (jinja2.TemplateError, ValueError) as error:
        raise ValueError(
            f"the chat template of the tokenizer refuses a prompt: {error}; check the roles of the conversation and "
            "model.system, mend the template, or write model.chat: false"
        ) from error
    # The template writes the special tokens itself.
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def conversation(
    prompt: str, messages: Sequence[Mapping[str, str]] | None, system: str | None
) -> list[Mapping[str, str]]:
    """The messages of a prompt or of a conversation, with the system message before them if they have none."""
    alone = [{"role": "user", "content": prompt}]
    talk: list[Mapping[str, str]] = list(alone if messages is None else messages)
    if system is not None and talk[0]["role"] != "system":
        talk.insert(0, {"role": "system", "content": system})
    return talk


def without_template(prompt: str, messages: Sequence[Mapping[str, str]] | None) -> str:
    """A prompt for a model that has no chat template.

    Raises:
        ValueError: the prompt is a conversation.
    """
    if messages is not None:
        raise ValueError(
            "the prompts are conversations, but the tokenizer has no chat template; use a model that has one, or plain "
            "prompts"
        )
    return prompt


def turn_end(tokenizer: Any) -> int | None:
    """The token of its own that a chat template writes after the assistant's message; None if it writes none."""
    answer = "answer"
    talk = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
    try:
        text = str(tokenizer.apply_chat_template(talk, tokenize=False))
    except (jinja2.TemplateError, ValueError):
        return None
    ids = tokenizer(text.rpartition(answer)[2], add_special_tokens=False).input_ids
    return int(ids[0]) if ids and ids[0] in tokenizer.added_tokens_decoder else None


def answer_end(tokenizer: Any, chat: bool, ends: Sequence[int]) -> int:
    """The token that ends an answer; of several end tokens, the one of the chat template or of the tokenizer."""
    named = (turn_end(tokenizer) if chat else None, tokenizer.eos_token_id)
    return next((int(token) for token in named if token is not None and token in ends), ends[0])


def check_variables(tokenizer: Any, given: Mapping[str, Any], owner: str) -> None:
    """Refuse values for variables that the chat template of a tokenizer does not read.

    Args:
        tokenizer: with a chat template.
        given: name -> value.
        owner: the path of the model, for the message.

    Raises:
        ValueError: the template does not read a name, or the name belongs to the run.
    """
    arguments = set(inspect.signature(tokenizer.apply_chat_template).parameters) - GIVEN
    known = variables_of(tokenizer.chat_template)
    for name in given:
        key = f"model.chat_template_kwargs.{name}"
        if name in SET_BY_US | arguments:
            raise ValueError(f"{key} is set for each prompt; leave it out")
        if known is not None and name not in known:
            free = sorted(known - SET_BY_US - set(tokenizer.special_tokens_map))
            raise ValueError(
                f"{key}: the chat template of {owner} does not read {name!r}{nearest(name, free)} It reads "
                f"{', '.join(free) or 'nothing but the messages'}."
            )


def variables_of(template: Any) -> set[str] | None:
    """The variables that a template reads and does not set; None if that cannot be told."""
    if not isinstance(template, str):
        return None
    environment = jinja2.Environment(extensions=[jinja2.ext.loopcontrols, "jinja2.ext.do"])
    try:
        # transformers marks the text of the assistant with tags of its own.
        plain = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
        return jinja2.meta.find_undeclared_variables(environment.parse(plain))
    except jinja2.TemplateError:
        return None
