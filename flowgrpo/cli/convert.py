"""`flowgrpo convert`: a configuration of another tool as a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..intake.visible import visible
from .output import output_file, say


def convert(
    file: Annotated[
        str,
        typer.Argument(
            help="A YAML file of Flow-Factory or UniRL, a shell script of verl-omni, a Python file of flow_grpo with "
            "the name of the configuration, such as config/grpo.py:pickscore_sd3, or a GRPOConfig or DPOConfig of TRL "
            "as YAML or JSON."
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="New file for the recipe; it is printed if left out.")] = None,
    tool: Annotated[
        str | None,
        typer.Option(
            "--from", help="flow-factory, flow_grpo, trl, unirl or verl-omni; found out from the content if left out."
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="Number of GPUs on which the other tool ran; as in the file, if it is there."),
    ] = None,
) -> None:
    """Convert a configuration of another tool into a recipe, and list what was carried over and what was not.

    The file is read and never executed. Without --out the recipe goes to the standard output, and the list to the
    standard error.
    """
    from ..convert.converting import convert_file
    from ..training.folder.files import write_text

    output_file(out)
    if out is not None and out.exists():
        raise ValueError(f"{out} exists; name a new file with --out")
    converted = convert_file(file, tool, gpus)
    if out is None:
        # The recipe alone is the output, so that it can be sent into a file.
        errors = Console(stderr=True)
        for line in converted.lines:
            errors.print(visible(line), highlight=False, markup=False, emoji=False, soft_wrap=True)
        return say(converted.recipe.rstrip("\n"))
    for line in converted.lines:
        say(line)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, converted.recipe)
    say(f"recipe: {out}; look at it with `flowgrpo plan {out}`")
