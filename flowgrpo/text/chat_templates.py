"""The variables of a chat template, so that a misspelt one is refused: a template ignores what it does not read."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta

from ..parts.plugins import nearest

SET_BY_US = {"messages", "add_generation_prompt", "raise_exception", "strftime_now"}
"""Variables that the run and transformers set, among them functions of templates."""
GIVEN = {"tools", "documents"}
"""Arguments of `apply_chat_template` that are variables of templates too."""


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
