"""`flowgrpo parts`: what a recipe can choose by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from .output import say

if TYPE_CHECKING:
    from ..parts.kinds import Kind


def parts(
    kind: Annotated[
        str | None, typer.Argument(help="List the parts of this kind only, with options; a name from the whole list.")
    ] = None,
) -> None:
    """List the parts that a recipe can choose, such as kernels and surrogates; for one kind, with their options."""
    from ..parts.kinds import KINDS
    from ..parts.plugins import nearest

    if kind is None:
        for found in KINDS.values():
            say(f"{found.word} (recipe key {found.key})")
            say(f"  {', '.join(found.names())}")
        say("\n`flowgrpo parts KIND` lists options. In place of a name, a recipe may give your own part: FILE.py:NAME")
        return
    words = {word.replace(" ", "_"): word for word in KINDS} | {word: word for word in KINDS}
    words |= {found.plural: word for word, found in KINDS.items()}
    if kind not in words:
        raise ValueError(f"there is no kind of part {kind!r}{nearest(kind, list(KINDS))} Kinds: {', '.join(KINDS)}")
    _list(KINDS[words[kind]])


def _list(kind: Kind) -> None:
    """All parts of a kind: what each is, its papers, and its options with their values and defaults."""
    from ..parts.choice import annotation_of, default_of, options_model
    from ..parts.docstrings import papers, summary

    say(f"recipe key {kind.key}; in Python {kind.call}")
    for name in kind.names():
        target = kind.resolve(name)
        say(f"\n{name}: {summary(target)}")
        if found := papers(target):
            say(f"  arXiv {', '.join(found)}")
        for option, field in options_model(kind.word, name).model_fields.items():
            value = "required" if field.is_required() else json.dumps(default_of(field))
            say(f"  {option}: {annotation_of(kind.word, name, option)}, {value}. {field.description or ''}".rstrip())
