"""One call from a file of another tool to a recipe and the list of what it has and has not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from ..configs.explaining import short
from ..configs.yaml_text import in_one_line
from .conversion import Conversion
from .foreign_text import TOOLS, read_mapping, read_source, tool_of
from .from_flow_factory import from_flow_factory
from .from_flow_grpo import from_flow_grpo
from .from_unirl import from_unirl
from .from_verl_omni import from_verl_omni
from .recipe_text import fitted, recipe_text
from .trl_trainers import convert_trl


@dataclass(frozen=True)
class Converted:
    """A converted file.

    Attributes:
        tool: the tool that it belongs to.
        recipe: the recipe, as YAML.
        lines: what was carried over, what has no effect here, and what could not be carried over.
    """

    tool: str
    recipe: str
    lines: list[str]


def convert_file(file: str, tool: str | None = None, gpus: int | None = None) -> Converted:
    """Convert a configuration of another tool.

    Args:
        file: path of the file. A function of a Python file is named as `config/grpo.py:pickscore_sd3`.
        tool: one of `TOOLS`; None finds it out from the content.
        gpus: number of GPUs on which the other tool ran; None for the number in the file.

    Raises:
        ValueError: the file cannot be read, belongs to no tool, or its settings make no recipe.
    """
    if tool is not None and tool not in TOOLS:
        raise ValueError(f"--from is {short(tool)}; write one of {', '.join(TOOLS)}")
    path, function = _parted(file)
    text = read_source(path)
    tool = tool or tool_of(path, text)
    if function is not None and tool != "flow_grpo":
        raise ValueError(f"{file} names a function, and a configuration of {tool} has none; leave :{function} out")
    if tool == "flow_grpo":
        conversion = from_flow_grpo(path, function, gpus)
    elif tool == "verl-omni":
        conversion = from_verl_omni(path, text)
    else:
        given = read_mapping(path, text)
        if tool == "unirl":
            conversion = from_unirl(path, given)
        else:
            conversion = (convert_trl if tool == "trl" else from_flow_factory)(path, given, gpus)
    conversion.recipe["name"] = recipe_name(conversion.name)
    recipe = fitted(conversion)
    source = f"{shown_path(path)}{f':{function}' if function else ''} ({tool})"
    return Converted(tool, recipe_text(conversion, recipe, source), list(_lines(conversion)))


def _parted(file: str) -> tuple[Path, str | None]:
    path, colon, function = file.rpartition(":")
    if colon and not Path(file).exists() and re.fullmatch(r"[A-Za-z_]\w*", function):
        return Path(path), function
    return Path(file), None


def recipe_name(name: str) -> str:
    """A name for a recipe. A run folder has the name of its recipe, so a name from a foreign file is cut down."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:60]
    return plain or "converted"


def shown_path(path: Path) -> str:
    """The name of a file, for a comment: without its folders, and quoted if it is not printable."""
    return path.name if path.name.isprintable() else short(path.name)


def _lines(conversion: Conversion) -> Iterator[str]:
    yield "carried over:"
    for row in conversion.carried:
        yield f"  {row.theirs} → {row.ours}: {in_one_line(row.value)}" + (f" ({row.note})" if row.note else "")
    if conversion.idle:
        yield "without effect here:"
    for why, remarks in groupby(sorted(conversion.idle, key=lambda remark: remark.text), lambda remark: remark.text):
        yield f"  {', '.join(remark.theirs for remark in remarks)}: {why}"
    if not conversion.lost:
        yield "everything else was carried over"
        return
    yield "not carried over:"
    for remark in conversion.lost:
        yield f"  {remark.theirs}: {remark.text}" if remark.theirs else f"  {remark.text}"
