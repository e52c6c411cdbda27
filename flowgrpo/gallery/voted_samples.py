"""The samples that runs have now, to tell votes on them from votes on samples that a new run has replaced."""

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from ..votes.file import Side, Vote
from ..votes.samples import Sample
from .run_reading import Run
from .vote_pairs import folder_of

_Place = tuple[str, int, str, int]


class VotedSamples:
    """The samples of runs by the places that a file of votes gives them.

    Args:
        runs: the runs.
        home: the folder of the file of votes.
    """

    def __init__(self, runs: Sequence[Run], home: Path) -> None:
        self._shots: dict[_Place, list[tuple[Run, Sample]]] = {}
        for run in runs:
            folder = folder_of(run, home)
            for pair in run.pairs:
                for iteration, shot in pair.shots.items():
                    self._shots.setdefault((folder, iteration, shot.prompt_id, shot.sample), []).append((run, shot))
        self._digest = cache(_digest)

    def has(self, vote: Vote) -> bool:
        """Whether both samples of a vote are there as they were. A picture whose file is gone may be the same."""
        return all(self.sample(side) is not None for side in (vote.left, vote.right))

    def sample(self, side: Side) -> Sample | None:
        """The sample that a side of a vote is about; None if it is not there as it was. See `has`."""
        here = self._shots.get((side.folder, side.iteration, side.prompt_id, side.sample), [])
        for run, shot in here:
            if shot.completion is not None:
                if shot.completion == side.completion:
                    return shot
            elif shot.image is None or self._digest(run.samples / shot.image) in (None, side.sha256):
                return shot
        return None


def _digest(file: Path) -> str | None:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None
