"""People's choices as preferences: (prompt, chosen, rejected). A reward or a DPO recipe can learn from them."""

from pathlib import Path
from typing import NamedTuple

from .file import Vote, latest, read_votes, votes_file


class Preference(NamedTuple):
    """One pair of a preference dataset."""

    prompt: str
    chosen: Path | str  # image file, or completion
    rejected: Path | str
    vote: Vote  # the vote from which the pair was made


def unreadable_note(path: str | Path) -> str | None:
    """A sentence on the lines of a file of votes that could not be read; None if there are none.

    Raises:
        ValueError: as for `read_votes`.
    """
    skipped = read_votes(votes_file(path))[1]
    return f"{skipped} lines of {path} could not be read, and do not count" if skipped else None


def read_preferences(path: str | Path) -> list[Preference]:
    """Return the pairs in a file of votes, in their order, without ties, skipped pairs and revoked choices.

    Images are given by their paths. The files may no longer exist.

    Args:
        path: the file, or a folder of a run with `votes.jsonl`.

    Raises:
        ValueError: as for `read_votes`.
    """
    found, path = [], votes_file(path)
    for vote in latest(read_votes(path)[0]):
        if vote.preferred:
            chosen, rejected = (side.content(path.parent) for side in vote.preferred)
            found.append(Preference(vote.prompt, chosen, rejected, vote))
    return found
