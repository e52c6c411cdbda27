"""People's choices on disk: a file of JSON lines that is only ever appended to.

A line is one choice between two samples for the same prompt and seed. It contains everything about the choice, so the
file can be read without the command that wrote it. docs/gallery.md lists the fields.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from .lines import append_jsonl, check_image, iterate_jsonl
from .samples import as_text, parse_messages

FILE = "votes.jsonl"
CHOICES = ("left", "right", "tie", "skip")
Kind = TypeVar("Kind")
Key = frozenset[tuple[str, int, str, int, str]]


@dataclass(frozen=True)
class Side:
    """The sample on one side of a pair."""

    run: str  # name of the run
    folder: str  # folder of the run, relative to the folder of the votes, with forward slashes
    iteration: int  # iteration of the evaluation; folder and iteration name the set of the sample
    prompt_id: str
    sample: int
    image: str | None  # path relative to the folder of the run, with forward slashes; None for text
    completion: str | None  # None for images
    sha256: str  # hash of the image's file, or of the completion in UTF-8
    frames: int | None = None  # videos: number of frames, which stand side by side in the image

    @property
    def source(self) -> tuple[str, int]:
        """The set of the sample: folder and iteration."""
        return self.folder, self.iteration

    def content(self, home: Path) -> Path | str:
        """Return the image file, which may no longer exist, or the completion. `home` is the folder of the votes."""
        return home / self.folder / self.image if self.image else self.completion or ""

    def unchanged(self, home: Path) -> bool:
        """Whether the sample is still the one that was voted on."""
        content = self.content(home)
        if isinstance(content, str):
            return True
        return content.is_file() and hashlib.sha256(content.read_bytes()).hexdigest() == self.sha256


@dataclass(frozen=True)
class Vote:
    """One choice."""

    session: str  # name of the session; a session is one person's votes, in one order
    time: str  # time in ISO 8601, UTC
    prompt: str
    seed: str
    columns: dict[str, str]  # the prompt file's other columns, as text
    left: Side
    right: Side
    choice: str  # one of CHOICES
    values: dict[str, Any] | None = None  # the columns with their types; None in lines of earlier versions
    # The whole conversation, empty for a plain prompt; and copies of the prompt's pictures, relative to the folder of
    # the left run, with forward slashes. None in lines of earlier versions.
    messages: tuple[dict[str, str], ...] | None = None
    pictures: tuple[str, ...] | None = None
    line: int = field(default=0, compare=False)  # line number in the file from which the vote was read

    @property
    def key(self) -> Key:
        """The pair, without regard to left and right."""
        sides = (self.left, self.right)
        return frozenset((side.folder, side.iteration, side.prompt_id, side.sample, self.seed) for side in sides)

    @property
    def preferred(self) -> tuple[Side, Side] | None:
        """The chosen side and the other side; None for ties and skipped pairs."""
        if self.choice not in ("left", "right"):
            return None
        return (self.left, self.right) if self.choice == "left" else (self.right, self.left)


def append_vote(path: Path, vote: Vote) -> None:
    """Append a vote; see `append_votes`."""
    append_votes(path, [vote])


def append_votes(path: Path, votes: Sequence[Vote]) -> None:
    """Append votes; they are on the disk when this function returns. Processes that write to the same file take turns.

    Raises:
        OSError: the lines could not be written completely. An incomplete line is ignored on reading.
    """
    append_jsonl(path, [_row(vote) for vote in votes])


def votes_file(name: str | Path) -> Path:
    """Return the file of votes that a path names: itself, or the `votes.jsonl` in the folder of a run."""
    path = Path(name).expanduser()
    return path / FILE if path.is_dir() else path


def read_votes(path: Path) -> tuple[list[Vote], int]:
    """Return all votes of a file in their order, and the number of unreadable lines; no votes if there is no file.

    A line that a crash cut short is skipped, and so is a line with an image outside its run.

    Raises:
        ValueError: the file has lines, but none of them is a vote; or the path is not a file.
    """
    if not path.exists():
        return [], 0
    if not path.is_file():
        raise ValueError(f"{path} is not a file; name the .jsonl file of the votes")
    found = list(_lines(path))
    votes = [one for one in found if isinstance(one, Vote)]
    skipped = len(found) - len(votes)
    if skipped and not votes:
        raise ValueError(f"{path} has no votes, but {skipped} other lines; name another file with --votes ({found[0]})")
    return votes, skipped


def read_whole(path: Path) -> list[Vote]:
    """Return all votes of a file in their order, and refuse a file with an unreadable line.

    Raises:
        ValueError: there is no such file, or a line is not a vote; the message gives the line.
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
    """Return the choices that count: the last choice of every session on every pair."""
    return list({(vote.session, vote.key): vote for vote in votes}.values())


def _lines(path: Path) -> Iterator[Vote | str]:
    """Yield a vote for each non-blank line; for a faulty line, a text that says where it is and what is wrong."""
    for line, record in iterate_jsonl(path):
        where = f"{path}, line {line}"
        if record is None:
            yield f"{where} is cut short, or is not a JSON object"
            continue
        try:
            yield _vote(record, path.parent, where, line)
        except KeyError as error:
            yield f"{where} is not a vote: it has no {error.args[0]!r}"
        except TypeError as error:
            yield f"{where} is not a vote: {error}"
        except ValueError as error:
            yield str(error)


def _row(vote: Vote) -> dict[str, Any]:
    row = {key: value for key, value in asdict(vote).items() if key not in ("line", "values")}
    row = {key: value for key, value in row.items() if value is not None}
    if vote.values is not None:
        row |= {"columns": vote.values, "typed": True}
    for side in ("left", "right"):
        row[side] = {key: value for key, value in row[side].items() if value is not None}
    return row


def _vote(record: dict[str, Any], home: Path, where: str, line: int) -> Vote:
    columns, typed = _typed(record, "columns", dict), record.get("typed") is True
    left = _side(_typed(record, "left", dict), home, where)
    vote = Vote(
        **{key: _typed(record, key, str) for key in ("session", "time", "prompt", "seed", "choice")},
        columns={name: as_text(columns[name]) if typed else _typed(columns, name, str) for name in columns},
        values=columns if typed else None,
        messages=parse_messages(record["messages"], where) if "messages" in record else None,
        pictures=_pictures(record["pictures"], home / left.folder, where) if "pictures" in record else None,
        left=left,
        right=_side(_typed(record, "right", dict), home, where),
        line=line,
    )
    if vote.choice not in CHOICES or len(vote.key) != 2:
        raise ValueError(f"{where} is not a choice between two samples")
    return vote


def _side(record: dict[str, Any], home: Path, where: str) -> Side:
    image = _typed(record, "image", str) if "image" in record else None
    completion = _typed(record, "completion", str) if "completion" in record else None
    frames = _typed(record, "frames", int) if "frames" in record else None
    if (image is None) == (completion is None):
        raise ValueError(f"{where}: a side must have either an image or a completion")
    if frames is not None and (frames < 2 or image is None):
        raise ValueError(f"{where}: `frames` is {frames}; a video has two frames or more, side by side in its image")
    folder = _typed(record, "folder", str)
    if image is not None:
        _check_in_run(image, home / folder, where, "image")
    return Side(
        run=_typed(record, "run", str),
        folder=folder,
        iteration=_typed(record, "iteration", int),
        prompt_id=_typed(record, "prompt_id", str),
        sample=_typed(record, "sample", int),
        image=image,
        completion=completion,
        sha256=_typed(record, "sha256", str),
        frames=frames,
    )


def _pictures(value: object, run: Path, where: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: `pictures` is {value!r:.80}. It must be a list of paths of images.")
    for picture in value:
        _check_in_run(picture, run, where, "pictures")
    return tuple(value)


def _check_in_run(image: object, run: Path, where: str, field: str) -> None:
    if not isinstance(image, str) or not image.startswith("samples/"):
        raise ValueError(f"{where}: the image {image!r} is not in samples/")
    check_image(image.removeprefix("samples/"), (run / "samples").resolve(), where, field)


def _typed(record: dict[str, Any], key: str, kind: type[Kind]) -> Kind:
    value = record[key]
    if type(value) is not kind:  # isinstance would accept a bool as an int
        raise TypeError(f"{key} is {value!r}")
    return value
