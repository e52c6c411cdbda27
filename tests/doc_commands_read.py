"""Finds what the documentation tells a reader to type: commands, programs and recipes, with page and line."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
# Walkthroughs are followed in a way of their own: see walkthrough.py.
WALKTHROUGHS = sorted((ROOT / "docs" / "walkthroughs").glob("*.md"))
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page not in WALKTHROUGHS),
]

SHELLS = {"sh", "bash", "shell", "console"}
# Programs that begin a command in an inline span, or in a fence without a language.
STARTS = re.compile(r"(\$ )?(flowgrpo|pip|python3?|accelerate|make|pytest|pre-commit|git|torchrun) +(?!\d)\S")
OPERATORS = {";", "&&", "||", "|", "&", ">", ">>", "<", "<<", "2>"}
Kind = Literal["command", "span", "python", "yaml", "script"]

FENCE = re.compile(r"^( *)(```+|~~~+)([^\n]*)\n(.*?)^ *\2 *$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)(`+)(?!`)((?:(?!\n\s*\n).)+?)(?<!`)\1(?!`)", re.DOTALL)
FILE_NAME = re.compile(r"# ([\w-]+\.(?:py|yaml|yml|sh))\n")


@dataclass(frozen=True)
class Example:
    """Something that a page shows.

    Attributes:
        page: a page of the documentation.
        line: the line where the example begins, from 1.
        kind: `command` is a line of a shell fence, `span` an inline command, the others are whole fences. A `script`
            is a shell fence that shows a file, and nobody runs it.
        text: the text of the page, without indentation, comments and continued lines.
        words: the words of a command; operators of the shell are separate words.
    """

    page: Path
    line: int
    kind: Kind
    text: str
    words: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Page and line."""
        page = self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page.name
        return f"{page}:{self.line}"

    @property
    def file(self) -> str | None:
        """The name in the first line of a fence that shows a file."""
        found = FILE_NAME.match(self.text) if self.kind in ("python", "yaml", "script") else None
        return found[1] if found else None


@cache
def examples(page: Path) -> list[Example]:
    """All examples of a page, in the order of the page."""
    text = page.read_text(encoding="utf-8")
    found = []
    for fence in FENCE.finditer(text):
        found += _of_fence(page, text.count("\n", 0, fence.start(4)) + 1, fence)
    rest = FENCE.sub(lambda fence: re.sub(r"[^\n]", " ", fence[0]), text)
    for span in _SPAN.finditer(rest):
        words = " ".join(span[2].replace("\\|", "|").split())
        if STARTS.match(words):
            line = text.count("\n", 0, span.start()) + 1
            found += [Example(page, line, "span", *command) for command in _commands(words.removeprefix("$ "))]
    return sorted(found, key=lambda example: example.line)


def _of_fence(page: Path, line: int, fence: re.Match[str]) -> list[Example]:
    indent, info = len(fence[1]), fence[3].strip().strip("{}").lstrip(".").split()
    body = "".join(row[min(indent, len(row) - len(row.lstrip(" "))) :] for row in fence[4].splitlines(keepends=True))
    language = info[0].lower() if info else ""
    if language in ("python", "py"):
        return [Example(page, line, "python", body)]
    if language in ("yaml", "yml"):
        return [Example(page, line, "yaml", body)]
    if language in SHELLS and FILE_NAME.match(body):
        return [Example(page, line, "script", body)]
    if language not in (*SHELLS, "", "text", "none"):
        return []
    rows = list(_joined(body, line))
    if language == "console":
        rows = [(at, row.removeprefix("$ ")) for at, row in rows if row.startswith("$ ")]
    elif language not in SHELLS:
        rows = [(at, row.removeprefix("$ ")) for at, row in rows if STARTS.match(row)]
    return [Example(page, at, "command", *command) for at, row in rows for command in _commands(row)]


def _joined(body: str, line: int) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, each with its number; a line that ends in a backslash is joined with the next line."""
    row, began = "", line
    for number, part in enumerate(body.splitlines(), line):
        began = began if row else number
        row += part.removesuffix("\\")
        if not part.endswith("\\"):
            if row.strip():
                yield began, row.strip()
            row = ""
    if row.strip():
        yield began, row.strip()


def _commands(line: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The simple commands of a line, as text and words; a pipe or a redirection stays one command."""
    reader = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
    reader.whitespace_split = True
    words: list[str] = []
    for word in [*reader, ";"]:
        if word not in (";", "&&", "&"):
            words.append(word)
        elif words:
            yield " ".join(word if word in OPERATORS else shlex.quote(word) for word in words), tuple(words)
            words = []
