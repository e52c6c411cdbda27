"""What a person said about the samples of a prompt, in a file of JSON lines that is only ever appended to."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ...votes.lines import append_jsonl, read_jsonl

SUFFIX = ".jsonl"


@dataclass(frozen=True)
class Medium:
    """Something that a browser shows or plays: its type, and its bytes."""

    kind: str
    content: bytes


@dataclass(frozen=True)
class ShownGroup:
    """The samples of a prompt, as they are shown.

    Attributes:
        question: what the page asks about the samples.
        prompt: the prompt.
        samples: a text, or a picture, a video or a sound, for each sample.
        given: the pictures of the prompt.
    """

    question: str
    prompt: str
    samples: tuple[str | Medium, ...]
    given: tuple[Medium, ...] = ()

    @property
    def key(self) -> str:
        """A digest of question, prompt, samples and the pictures of the prompt; the same is asked once."""
        digest = hashlib.sha256()
        # Short answers about pictures recur: "yes" may be right for one picture and wrong for another.
        given: tuple[str | Medium, ...] = ("given", *self.given) if self.given else ()
        for part in (self.question, self.prompt, *self.samples, *given):
            content = part.encode(errors="surrogatepass") if isinstance(part, str) else part.content
            digest.update(len(content).to_bytes(8, "big") + content)
        return digest.hexdigest()


class MarksFile:
    """The marks of all calls, by the digest of what was asked.

    Args:
        path: the file; it need not exist yet.

    Raises:
        ValueError: the name does not end in `.jsonl`, or the file holds lines that are no marks.
    """

    def __init__(self, path: Path) -> None:
        check_name(path)
        self.path = path
        self._known: dict[str, tuple[int, ...] | None] = {}
        if not path.exists():
            return
        if not path.is_file():
            raise ValueError(f"person: {path} is not a file; name a {SUFFIX} file with the option `answers`")
        for number, line in read_jsonl(path)[0]:
            marks = line.get("marks")
            sound = isinstance(marks, list) and all(mark in (0, 1) and type(mark) is int for mark in marks)
            if not isinstance(line.get("key"), str) or not (sound or marks is None):
                raise ValueError(f"person: {path}, line {number} holds no marks; name another file as `answers`")
            self._known[line["key"]] = None if marks is None else tuple(marks)

    def has(self, asked: ShownGroup) -> bool:
        """Whether a person has been asked this."""
        return asked.key in self._known

    def of(self, asked: ShownGroup) -> tuple[int, ...] | None:
        """The marks of the samples, 1 for a good one and 0 for another; None if the person skipped them.

        Raises:
            ValueError: the file holds another number of marks than there are samples.
        """
        marks = self._known[asked.key]
        if marks is not None and len(marks) != len(asked.samples):  # one mark alone would spread over all samples
            raise ValueError(
                f"person: {self.path} has {len(marks)} marks for the {len(asked.samples)} samples of the prompt "
                f"{asked.prompt!r:.80}; remove the line with the key {asked.key}, or name another file as `answers`"
            )
        return marks

    def add(self, asked: ShownGroup, marks: Sequence[int] | None) -> None:
        """Keep the marks of the samples; None if the person skips them. They are on the disk when this returns.

        Raises:
            OSError: the file cannot be written.
        """
        row: dict[str, Any] = {
            "key": asked.key,
            "question": asked.question,
            "prompt": asked.prompt,
            "marks": None if marks is None else list(marks),
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        append_jsonl(self.path, [row])
        self._known[asked.key] = None if marks is None else tuple(marks)

    def __len__(self) -> int:
        return len(self._known)


def check_name(path: Path) -> None:
    """Refuse a file that is not named as JSON lines, because lines are appended to whatever it is.

    Raises:
        ValueError: the name does not end in `.jsonl`.
    """
    if path.suffix != SUFFIX:
        raise ValueError(f"person: `answers` is {str(path)!r}; name a file that ends in {SUFFIX}")
