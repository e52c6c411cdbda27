"""The words of a command in a shell script, read and never executed: quotes, and variables that the script sets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..configs.explaining import short

NAME = re.compile(r"[A-Za-z_]\w*")
ASSIGNED = re.compile(r"(?:export\s+|readonly\s+|local\s+)?([A-Za-z_]\w*)=")
OPENS, CLOSES = ("if", "for", "while", "until", "case", "select"), ("fi", "done", "esac")
DEEPEST = 20
"""Substitutions that may stand in one another."""
LONGEST = 20_000
"""Characters of a word with its variables filled in."""
ENDS = ("|", ";", "&", ">", "<", "(", ")", "\n")


@dataclass
class Word:
    """A word of a command.

    Attributes:
        text: with its variables filled in; what is not known is left out.
        unsaid: what only a run of the script shows, such as a variable or a command.
        assumed: variables of the environment whose defaults were taken.
        chosen: variables that get their value under a condition.
    """

    text: str = ""
    unsaid: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    chosen: list[str] = field(default_factory=list)

    def add(self, other: Word, place: str) -> None:
        """Put another piece of the word behind this one.

        Raises:
            ValueError: the word is too long.
        """
        self.text += other.text
        self.unsaid += other.unsaid
        self.assumed += other.assumed
        self.chosen += other.chosen
        if len(self.text) > LONGEST:
            raise ValueError(f"{place}: a word of a command has more than {LONGEST:,} characters; shorten it")


class ShellScript:
    """The variables of a shell script, and its commands.

    Args:
        path: of the script, for messages.
        text: of the script.

    Raises:
        ValueError: quotes do not end, or variables lead on and on.
    """

    def __init__(self, path: Path, text: str) -> None:
        self.place = str(path)
        self.variables: dict[str, Word] = {"HOME": Word("~")}
        """What the script sets. The home folder is `~`."""
        self.lines = _lines(text)
        depth = 0
        for line in self.lines:
            first = line.split(maxsplit=1)[0] if line.split() else ""
            depth += first in OPENS
            depth -= first in CLOSES and depth > 0
            self._assign(line, depth > 0)

    def command(self, module: str) -> list[Word] | None:
        """The words of the last command that runs `python -m MODULE`, after the module; None if there is none."""
        runs = re.compile(rf"-m\s+{re.escape(module)}(?=\s|$)")
        found = [match for line in self.lines if (match := runs.search(line)) is not None]
        return list(self.words(found[-1].string[found[-1].end() :])) if found else None

    def words(self, text: str, depth: int = 0) -> Iterator[Word]:
        """The words of a command up to its end, such as a pipe or a redirection."""
        place, word, begun = 0, Word(), False
        while place < len(text):
            letter = text[place]
            if letter in " \t":
                if begun:
                    yield word
                place, word, begun = place + 1, Word(), False
                continue
            if letter in ENDS or (letter == "#" and not begun):
                if letter == ">" and begun and word.text.isdigit():
                    begun = False  # 2>&1
                break
            begun = True
            piece, place = self._piece(text, place, depth)
            word.add(piece, self.place)
        if begun:
            yield word

    def _assign(self, line: str, conditional: bool) -> None:
        found = ASSIGNED.match(line.strip())
        if found is None:
            return
        name, rest = found[1], line.strip()[found.end() :]
        if rest.startswith("("):  # a list of words
            word = Word(unsaid=[f"${name}"])
        else:
            word = next(self.words(rest), Word()) if rest and rest[0] not in " \t" else Word()
        # What a condition sets is taken only where nothing else sets it; of several values, the last one.
        known = self.variables.get(name)
        if conditional and known is not None and not known.chosen:
            return
        word.chosen += [name] if conditional else []
        self.variables[name] = word

    def _piece(self, text: str, place: int, depth: int) -> tuple[Word, int]:
        """A piece of a word, and where the next one begins."""
        letter = text[place]
        if letter == "\\":
            return Word(text[place + 1 : place + 2]), place + 2
        if letter == "'":
            end = text.find("'", place + 1)
            if end < 0:
                raise self._unended("'", text[place:])
            return Word(text[place + 1 : end]), end + 1
        if letter == '"':
            return self._quoted(text, place + 1, depth)
        if letter in "$`":
            return self._substituted(text, place, depth)
        return Word(letter), place + 1

    def _quoted(self, text: str, place: int, depth: int) -> tuple[Word, int]:
        start, word = place, Word()
        while place < len(text):
            letter = text[place]
            if letter == '"':
                return word, place + 1
            if letter == "\\" and text[place + 1 : place + 2] in tuple('"\\$`'):
                piece, place = Word(text[place + 1]), place + 2
            elif letter in "$`":
                piece, place = self._substituted(text, place, depth)
            else:
                piece, place = Word(letter), place + 1
            word.add(piece, self.place)
        raise self._unended('"', text[start - 1 :])

    def _substituted(self, text: str, place: int, depth: int) -> tuple[Word, int]:
        """What begins with `$` or a backtick."""
        if depth > DEEPEST:
            raise ValueError(f"{self.place}: {short(text[place : place + 60])} has too many substitutions; simplify it")
        if text.startswith("$((", place):
            end = text.find("))", place)
            if end < 0:
                raise self._unended("$((", text[place:])
            return self._computed(text[place + 3 : end]), end + 2
        if text.startswith("$(", place) or text[place] == "`":
            end = _closing(text, place + 1, "(", ")") if text[place] == "$" else text.find("`", place + 1)
            if end < 0:
                raise self._unended(text[place : place + 2], text[place:])
            return Word(unsaid=[text[place : end + 1][:60]]), end + 1
        if text.startswith("${", place):
            end = _closing(text, place + 1, "{", "}")
            if end < 0:
                raise self._unended("${", text[place:])
            return self._braced(text[place + 2 : end], depth), end + 1
        named = NAME.match(text, place + 1)
        if named is None:
            known = text[place + 1 : place + 2] in tuple("@*")
            return (Word() if known else Word(text[place : place + 2])), place + 2
        return self._value(named[0]), named.end()

    def _braced(self, inner: str, depth: int) -> Word:
        found = NAME.match(inner)
        if found is None:
            return Word(unsaid=[f"${{{inner:.60}}}"])
        name, rest = found[0], inner[found.end() :]
        if not rest:
            return self._value(name)
        if rest.startswith((":-", ":=", "-", "=")):
            if name in self.variables and name != "HOME":
                return self._value(name)
            word = Word(assumed=[name])
            place, default = 0, rest.lstrip(":")[1:]
            while place < len(default):
                piece, place = self._piece(default, place, depth + 1)
                word.add(piece, self.place)
            return word
        return Word(unsaid=[f"${{{inner:.60}}}"])

    def _value(self, name: str) -> Word:
        known = self.variables.get(name)
        if known is None:
            return Word(unsaid=[f"${name}"])
        return Word(known.text, list(known.unsaid), list(known.assumed), list(known.chosen))

    def _computed(self, text: str) -> Word:
        """`$((…))` of whole numbers and variables, without brackets."""
        told, parts = Word(), re.findall(r"\$?\{?(\w+)\}?|([-+*/%])|(\S)", text)
        numbers: list[int] = []
        signs: list[str] = []
        for name, sign, other in parts:
            word = Word(name) if name.isdigit() else self._value(name) if name else Word()
            told.unsaid += word.unsaid
            told.assumed += word.assumed
            if other or (sign == "") != (len(numbers) == len(signs)) or (name and not _is_number(word.text)):
                return Word(unsaid=[*told.unsaid, f"$(({text:.60}))"])
            (signs.append(sign) if sign else numbers.append(int(word.text)))
        if len(numbers) != len(signs) + 1:
            return Word(unsaid=[*told.unsaid, f"$(({text:.60}))"])
        value = _of_products(numbers, signs)
        if value is None:
            return Word(unsaid=[*told.unsaid, f"$(({text:.60}))"])
        return Word(str(value), told.unsaid, told.assumed)

    def _unended(self, mark: str, text: str) -> ValueError:
        return ValueError(f"{self.place}: {mark} is not closed in {short(text[:80])}; close it, and convert it again")


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 16


def _of_products(numbers: list[int], signs: list[str]) -> int | None:
    """A sum of products, from left to right; None for a division by 0 or a number of too many digits."""
    total, sign, product = 0, 1, numbers[0]
    for mark, number in zip(signs, numbers[1:]):
        if mark in "*/%":
            if mark != "*" and number == 0:
                return None
            product = product * number if mark == "*" else product // number if mark == "/" else product % number
        else:
            total, sign, product = total + sign * product, 1 if mark == "+" else -1, number
        if abs(product) > 2**53:
            return None
    return total + sign * product


def _closing(text: str, place: int, opens: str, closes: str) -> int:
    """Where the bracket at `place` is closed; -1 if it is not."""
    depth = 0
    for number in range(place, len(text)):
        depth += text[number] == opens
        depth -= text[number] == closes
        if depth == 0:
            return number
    return -1


def _lines(text: str) -> list[str]:
    """The lines of a script, with continued lines joined. A comment continues no line."""
    found: list[str] = []
    joined = ""
    for line in text.splitlines():
        if not joined and line.lstrip().startswith("#"):
            continue
        if line.endswith("\\"):
            joined += line[:-1] + " "
        else:
            found.append(joined + line)
            joined = ""
    return [*found, joined] if joined else found
