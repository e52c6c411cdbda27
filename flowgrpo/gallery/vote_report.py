"""Statistics of people's choices: win rates with intervals, ties, and whether the side mattered."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..votes.file import Vote, latest, read_votes
from ..votes.interval import wilson
from .run_reading import Run
from .vote_pairs import folder_of
from .voted_samples import VotedSamples

LEAST = 10  # a part of the prompts is reported on its own if it has at least this number of votes


@dataclass
class Tally:
    """Counts of the votes between two sets, or between the two sides."""

    wins: int = 0
    losses: int = 0
    ties: int = 0
    skipped: int = 0

    @property
    def votes(self) -> int:
        """Number of votes without skipped pairs."""
        return self.wins + self.losses + self.ties

    def as_json(self) -> dict[str, Any]:
        """The counts, `rate` (share of wins among wins and losses; None without any), and its 95 % `interval`."""
        decided = self.wins + self.losses
        return {
            "wins": self.wins,
            "losses": self.losses,
            "ties": self.ties,
            "skipped": self.skipped,
            "rate": self.wins / decided if decided else None,
            "interval": list(wilson(self.wins, decided)),
        }


@dataclass
class VoteComparison:
    """Votes between two sets. A vote for the later set, `second`, over the earlier set, `first`, is a win."""

    first: str
    second: str
    tally: Tally = field(default_factory=Tally)
    parts: dict[tuple[str, str], Tally] = field(default_factory=dict)  # by column and value; at least LEAST votes each


@dataclass(frozen=True)
class VoteReport:
    """A report on the choices that count; `latest` says which choices count."""

    comparisons: tuple[VoteComparison, ...]
    position: Tally  # a vote for the left side is a win
    within: int  # votes between two samples of one set, which count in `position` only
    sessions: int
    elsewhere: int  # votes on other runs, not counted
    unreadable: int  # lines of the file that could not be read
    changed: int = 0  # votes on samples that the runs no longer have, not counted

    def as_json(self) -> dict[str, Any]:
        """The report as the page reads it."""
        return {
            "comparisons": [
                {
                    "first": one.first,
                    "second": one.second,
                    **one.tally.as_json(),
                    "parts": [
                        {"column": column, "value": value, **tally.as_json()}
                        for (column, value), tally in one.parts.items()
                    ],
                }
                for one in self.comparisons
            ],
            "position": self.position.as_json(),
            "notes": self.notes(),
        }

    def notes(self) -> list[str]:
        """Notes that a reader of the rates has to know."""
        found = []
        if self.sessions > 1:
            found.append(f"{self.sessions} sessions; the intervals take all votes as independent")
        decided = self.position.wins + self.position.losses
        low, high = wilson(self.position.wins, decided)
        if not low <= 0.5 <= high:
            side = "left" if low > 0.5 else "right"
            found.append(f"the {side} side was chosen more often than chance explains")
        if self.within:
            found.append(f"{self.within} votes are between samples of one evaluation, and tell no evaluations apart")
        if self.elsewhere:
            found.append(f"{self.elsewhere} votes in the file are on other runs and do not count here")
        if self.changed:
            found.append(f"{self.changed} votes are on samples that these runs no longer have, and do not count")
        if self.unreadable:
            found.append(f"{self.unreadable} lines of the file could not be read")
        return found

    def lines(self) -> list[str]:
        """The report as lines for a terminal."""
        found = []
        for one in self.comparisons:
            found.append(f"{one.second} against {one.first}: {_words(one.tally)}")
            found += [f"  {column} {value}: {_words(tally)}" for (column, value), tally in one.parts.items()]
        if not self.position.votes and not self.position.skipped:
            return ["no votes yet", *self.notes()]
        return [*found, f"left against right: {_words(self.position)}", *self.notes()]


def report_on(runs: Sequence[Run], path: Path) -> VoteReport:
    """Read a file of votes, and count the votes on these runs.

    Raises:
        ValueError: see `read_votes`.
    """
    votes, unreadable = read_votes(path)
    return make_report(votes, runs, path.parent, unreadable)


def make_report(votes: Iterable[Vote], runs: Sequence[Run], home: Path, unreadable: int = 0) -> VoteReport:
    """Count votes.

    Args:
        votes: votes of one file.
        runs: the runs whose votes count. `second` is the set of the later run, or the later evaluation of one run.
        home: the folder of the file.
        unreadable: lines of the file that held no vote.
    """
    counted = latest(list(votes))
    places = {folder_of(run, home): place for place, run in enumerate(runs)}
    asked = [vote for vote in counted if vote.left.folder in places and vote.right.folder in places]
    samples = VotedSamples(runs, home)
    here = [vote for vote in asked if samples.has(vote)]
    found: dict[tuple[tuple[int, int], ...], VoteComparison] = {}
    position, within = Tally(), 0
    for vote in here:
        _count(position, vote, vote.choice == "left")
        if vote.left.source == vote.right.source:
            within += 1
            continue
        sides = {side: (places[side.folder], side.iteration) for side in (vote.left, vote.right)}
        first, second = sorted(sides, key=lambda side: sides[side])
        one = found.setdefault(
            (sides[first], sides[second]), VoteComparison(_name(runs, *sides[first]), _name(runs, *sides[second]))
        )
        won = vote.preferred and vote.preferred[0] is second
        _count(one.tally, vote, won)
        for column in vote.columns.items():
            _count(one.parts.setdefault(column, Tally()), vote, won)
    for one in found.values():
        one.parts = {column: tally for column, tally in sorted(one.parts.items()) if tally.votes >= LEAST}
    return VoteReport(
        comparisons=tuple(found[key] for key in sorted(found)),
        position=position,
        within=within,
        sessions=len({vote.session for vote in here}),
        elsewhere=len(counted) - len(asked),
        changed=len(asked) - len(here),
        unreadable=unreadable,
    )


def _count(tally: Tally, vote: Vote, won: bool | None) -> None:
    if vote.choice == "skip":
        tally.skipped += 1
    elif vote.choice == "tie":
        tally.ties += 1
    elif won:
        tally.wins += 1
    else:
        tally.losses += 1


def _name(runs: Sequence[Run], place: int, iteration: int) -> str:
    """A set in words, with only as much of the run's name and folder as is needed to tell the runs apart."""
    run = runs[place]
    if len(runs) == 1:
        return f"iteration {iteration}"
    alike = sum(other.name == run.name for other in runs) > 1
    return f"{run.name}{f' ({run.folder})' if alike else ''}, iteration {iteration}"


def _words(tally: Tally) -> str:
    decided = tally.wins + tally.losses
    low, high = wilson(tally.wins, decided)
    rate = (
        f"{100 * tally.wins / decided:.0f} % of {decided} (95 %: {100 * low:.0f} to {100 * high:.0f} %)"
        if decided
        else "no choice yet"
    )
    ties = f"; ties {tally.ties} of {tally.votes} ({100 * tally.ties / tally.votes:.0f} %)" if tally.votes else ""
    return f"{rate}{ties}{f'; skipped {tally.skipped}' if tally.skipped else ''}"
