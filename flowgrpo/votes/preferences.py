"""People's choices as preferences: (prompt, chosen, rejected), for a reward or a DPO recipe to learn from."""

from pathlib import Path
from typing import NamedTuple

from .file import Vote, latest, read_votes


class Preference(NamedTuple):
    """One pair of a preference data set."""

    prompt: str
    chosen: Path | str  # image file, or completion
    rejected: Path | str
    vote: Vote  # where it came from


def read_preferences(path: Path) -> list[Preference]:
    """The pairs of a file of votes in their order: without ties, skipped pairs and choices taken back.

    Images are named by their paths, which need not exist any more.

    Raises:
        ValueError: see `read_votes`.
    """
    found = []
    for vote in latest(read_votes(path)[0]):
        if vote.preferred:
            chosen, rejected = (side.content(path.parent) for side in vote.preferred)
            found.append(Preference(vote.prompt, chosen, rejected, vote))
    return found
