"""People's choices on disk: a file of JSON lines that is only ever appended to.

A line is one choice between two samples of one prompt and seed. It says all there is to know of it, so the file can be
read without the command that made it; docs/gallery.md lists the fields.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from .lines import check_image, iterate_jsonl

CHOICES = ("left", "right", "tie", "skip")
Kind = TypeVar("Kind")
Key = frozenset[tuple[str, int, str, int, str]]


@dataclass(frozen=True)
class Side:
    """What stood on one side."""

    run: str  # name of the run
    folder: str  # of the run, relative to that of the votes, with forward slashes
    iteration: int  # the evaluation; with the folder, the set that the sample is of
    prompt_id: str
    sample: int
    image: str | None  # relative to the folder of the run, with forward slashes; None for text
    completion: str | None  # None for images
    sha256: str  # of the image's file, or of the completion in UTF-8

    @property
    def source(self) -> tuple[str, int]:
        """The set."""
        return self.folder, self.iteration

    def content(self, home: Path) -> Path | str:
        """Its image file, which need not exist any more, or its completion. `home` is the folder of the votes."""
        return home / self.folder / self.image if self.image else self.completion or ""

    def unchanged(self, home: Path) -> bool:
        """Whether the sample is what was voted on."""
        content = self.content(home)
        if isinstance(content, str):
            return True
        return content.is_file() and hashlib.sha256(content.read_bytes()).hexdigest() == self.sha256


@dataclass(frozen=True)
class Vote:
    """One choice."""

    session: str  # one person's votes, in one order
    time: str  # ISO 8601, UTC
    prompt: str
    seed: str
    columns: dict[str, str]  # the prompt file's other columns, as text
    left: Side
    right: Side
    choice: str  # one of CHOICES
    line: int = field(default=0, compare=False)  # of the file that it was read from

    @property
    def key(self) -> Key:
        """The pair, whichever side was which."""
        sides = (self.left, self.right)
        return frozenset((side.folder, side.iteration, side.prompt_id, side.sample, self.seed) for side in sides)

    @property
    def preferred(self) -> tuple[Side, Side] | None:
        """The side chosen, then the other one; None for ties and skipped pairs."""
        if self.choice not in ("left", "right"):
            return None
        return (self.left, self.right) if self.choice == "left" else (self.right, self.left)


def append_vote(path: Path, vote: Vote) -> None:
    """Add a line, on the disk when this returns. Processes that write to one file take turns.

    Raises:
        OSError: it could not be written, or not whole. What was written of it is then ignored on reading.
    """
    line = (json.dumps(_row(vote)) + "\n").encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file, _locked(file.fileno()):
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            # A line that a crash cut short would swallow this one.
            line = line if file.read(1) == b"\n" else b"\n" + line
        if file.write(line) != len(line):
            raise OSError(f"{path} took only a part of the vote; is the disk full?")
        os.fsync(file.fileno())


def read_votes(path: Path) -> tuple[list[Vote], int]:
    """All votes of a file in their order, and how many lines were unreadable; none if there is no file.

    A line that a crash cut short costs only itself, and so does one that names an image outside its run.

    Raises:
        ValueError: the file holds something else than votes.
    """
    if not path.exists():
        return [], 0
    if not path.is_file():
        raise ValueError(f"{path} is not a file; name the .jsonl file of the votes")
    found = list(_lines(path))
    votes = [one for one in found if isinstance(one, Vote)]
    skipped = len(found) - len(votes)
    if skipped and not votes:
        raise ValueError(
            f"{path} holds no votes but {skipped} other lines; name another file with --votes ({found[0]})"
        )
    return votes, skipped


def read_whole(path: Path) -> list[Vote]:
    """All votes of a file in their order, for whoever cannot do with less than all of them.

    Raises:
        ValueError: there is no such file, or a line of it is no vote; names the line.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}; vote with `flowgrpo gallery RUN --vote` first")
    votes = []
    for one in _lines(path):
        if isinstance(one, str):
            raise ValueError(f"{one}; take the line out")
        votes.append(one)
    return votes


def latest(votes: Sequence[Vote]) -> list[Vote]:
    """The choices that count: the last one of every session on every pair."""
    return list({(vote.session, vote.key): vote for vote in votes}.values())


def _lines(path: Path) -> Iterator[Vote | str]:
    """The lines that are not blank: votes, and for the others where they stand and what is wrong with them."""
    for line, record in iterate_jsonl(path):
        where = f"{path}, line {line}"
        if record is None:
            yield f"{where} is cut short, or no JSON object"
            continue
        try:
            yield _vote(record, path.parent, where, line)
        except KeyError as error:
            yield f"{where} is no vote: it has no {error.args[0]!r}"
        except TypeError as error:
            yield f"{where} is no vote: {error}"
        except ValueError as error:
            yield str(error)


def _row(vote: Vote) -> dict[str, Any]:
    row = {key: value for key, value in asdict(vote).items() if key != "line"}
    for side in ("left", "right"):
        row[side] = {key: value for key, value in row[side].items() if value is not None}
    return row


def _vote(record: dict[str, Any], home: Path, where: str, line: int) -> Vote:
    columns = _typed(record, "columns", dict)
    vote = Vote(
        **{key: _typed(record, key, str) for key in ("session", "time", "prompt", "seed", "choice")},
        columns={name: _typed(columns, name, str) for name in columns},
        left=_side(_typed(record, "left", dict), home, where),
        right=_side(_typed(record, "right", dict), home, where),
        line=line,
    )
    if vote.choice not in CHOICES or len(vote.key) != 2:
        raise ValueError(f"{where}: no choice between two samples")
    return vote


def _side(record: dict[str, Any], home: Path, where: str) -> Side:
    image = _typed(record, "image", str) if "image" in record else None
    completion = _typed(record, "completion", str) if "completion" in record else None
    if (image is None) == (completion is None):
        raise ValueError(f"{where}: neither an image nor a completion, or both")
    folder = _typed(record, "folder", str)
    if image is not None:
        if not image.startswith("samples/"):
            raise ValueError(f"{where}: the image {image!r} is not in samples/")
        check_image(image.removeprefix("samples/"), (home / folder / "samples").resolve(), where)
    return Side(
        run=_typed(record, "run", str),
        folder=folder,
        iteration=_typed(record, "iteration", int),
        prompt_id=_typed(record, "prompt_id", str),
        sample=_typed(record, "sample", int),
        image=image,
        completion=completion,
        sha256=_typed(record, "sha256", str),
    )


def _typed(record: dict[str, Any], key: str, kind: type[Kind]) -> Kind:
    value = record[key]
    if type(value) is not kind:  # a bool is an int to isinstance
        raise TypeError(f"{key} is {value!r}")
    return value


@contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # a system without such locks: a single write at the end of the file is the next best
        yield
        return
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
