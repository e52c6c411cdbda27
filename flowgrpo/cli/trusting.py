"""The option `--trust` of commands that open run folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from .output import is_first, say

TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="The run folder may run its code, send to its addresses and follow its links; this machine remembers it.",
    ),
]
LinksOption = Annotated[
    bool,
    typer.Option(
        "--trust", help="Follow links that lead out of the run folders or --out; this machine remembers them."
    ),
]


def trust_run(trust: bool, folders: Sequence[Path | None], recipes: Mapping[str | None, bool] | None = None) -> None:
    """With `--trust`, remember the links of folders, and what recipes of run folders would run and send.

    Args:
        trust: whether the option is given.
        folders: folders that the command reads or writes.
        recipes: sources of recipes that the command reads -> whether it makes their rewards.

    Raises:
        ValueError: a recipe cannot be read, or a folder holds a pipe or a device.
    """
    if not trust:
        return
    from ..configs.load import trust_recipe
    from ..intake.links import trust_links

    notes = [trust_links(folder) for folder in folders if folder is not None]
    notes += [trust_recipe(source, rewards) for source, rewards in (recipes or {}).items()]
    for note in dict.fromkeys(notes):
        if note is not None and is_first():
            say(f"note: {note}")
