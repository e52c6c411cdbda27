"""The text that names prompts in a recipe: a file, a folder or a data set of the hub, and what of it is read."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HUB = "hub:"
"""Beginning of the name of a data set of the hub."""
WORDS = {
    "split": "the split, such as test or train[:500]",
    "config": "the configuration",
    "revision": "the branch, tag or commit",
    "column": "the column with the prompts",
    "image": "the column with the pictures",
}
"""What may follow the `?` of a source, and what it says."""
_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)


@dataclass(frozen=True)
class PromptSource:
    """A source of prompts.

    Attributes:
        path: path of a file or folder, name of an embedded set, or with `hub` the id of a data set (`owner/name`).
        hub: whether it is a data set of the hub.
        split: name of the split, maybe with a range (`train[:500]`); None for the only split.
        config: name of the configuration; None for the default.
        revision: branch, tag or commit of a data set of the hub; None for its main branch.
        column: name of the column with the prompts; None for `prompt`.
        image: name of the column with the pictures; None for `image`.
    """

    path: str
    hub: bool = False
    split: str | None = None
    config: str | None = None
    revision: str | None = None
    column: str | None = None
    image: str | None = None

    def __str__(self) -> str:
        """The text of the source."""
        words = [f"{word}={value}" for word in WORDS if (value := getattr(self, word)) is not None]
        return f"{HUB if self.hub else ''}{self.path}{'?' if words else ''}{'&'.join(words)}"

    def at(self, revision: str) -> PromptSource:
        """The same source at a revision."""
        return replace(self, revision=revision)


def prompt_source(text: str) -> PromptSource:
    """The source that a text names: `PATH`, `PATH?split=test&column=caption` or `hub:OWNER/NAME?revision=v1`.

    Raises:
        ValueError: a word after the `?` is unknown, empty, or stands twice, or the id of a data set is none.
    """
    # The path may hold a question mark itself.
    path, mark, asked = (text, "", "") if Path(text).exists() else text.partition("?")
    given: dict[str, Any] = {}
    for part in asked.split("&") if mark else ():
        word, equals, value = part.partition("=")
        if word not in WORDS or not equals or not value:
            known = ", ".join(f"{name}=… ({what})" for name, what in WORDS.items())
            raise ValueError(f"{text!r}: {part!r} after the `?` says nothing; write some of {known}, with & between")
        if word in given:
            raise ValueError(f"{text!r}: {word} stands twice after the `?`; keep one of them")
        given[word] = value
    if not path.startswith(HUB):
        return PromptSource(path, **given)
    name = path.removeprefix(HUB)
    if _ID.fullmatch(name) is None:
        raise ValueError(f"{text!r} names no data set of the hub; write {HUB}owner/name")
    return PromptSource(name, hub=True, **given)
