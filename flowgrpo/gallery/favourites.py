"""Writes the favourites of the page as choices: a favourite is preferred to the other samples beside it."""

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from ..votes.file import append_votes
from ..votes.marks import Reaction, read_reactions
from .build import read_runs
from .page_files import write_new
from .run_reading import Run
from .vote_pairs import Ballot, Candidate, Source, equal

SESSION = "favourites"


def write_favourites(folders: Sequence[Path], marks: Path, file: Path) -> int:
    """Write the favourites in a file of marks as a new file of votes.

    A vote says that a favourite was preferred to a sample of its prompt and iteration that is no favourite. There is a
    vote for every such pair whose samples differ. The favourite stands on the left in every other vote.

    Returns:
        The number of votes.

    Raises:
        ValueError: see `read_runs` and `read_reactions`; the file exists; or there is no such pair.
    """
    pairs = [pair for run in read_runs(folders) for pair in _pairs(run, read_reactions(marks, [run.folder]))]
    if not pairs:
        raise ValueError(
            f"{marks} has no favourite beside another sample of its prompt and iteration; `evaluate.seeds` of a run is "
            "the number of samples of a prompt"
        )

    votes = []
    for number, (loved, other) in enumerate(pairs):
        ballot, choice = (Ballot(loved, other), "left") if number % 2 == 0 else (Ballot(other, loved), "right")
        votes.append(ballot.vote(SESSION, choice, file.parent))
    write_new(file, lambda path: append_votes(path, votes))
    return len(pairs)


def _pairs(run: Run, seen: Sequence[Reaction]) -> Iterator[tuple[Candidate, Candidate]]:
    """Yield each favourite with each sample beside it that is none."""
    beside: dict[tuple[str, tuple[str, str], int], list[Reaction]] = {}
    for one in seen:
        beside.setdefault((one.sample.phase, one.sample.asked, one.sample.iteration), []).append(one)
    for group in beside.values():
        for loved, other in product(group, group):
            if loved.loved and not other.loved:
                source = Source(run, loved.sample.iteration)
                pair = Candidate(source, loved.sample), Candidate(source, other.sample)
                # The number of the sample tells the two samples apart in the file of votes.
                if loved.sample.sample != other.sample.sample and not equal(*pair):
                    yield pair
