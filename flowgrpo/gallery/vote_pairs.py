"""The pairs that people are asked about: their order, and which of the two samples is on which side."""

import filecmp
import hashlib
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import combinations
from pathlib import Path

from ..votes.file import Key, Side, Vote
from ..votes.samples import Sample
from .export_rows import samples_at
from .run_reading import Run

OF = " / "
"""As `rewards.runner.OF`, without the libraries of rewards."""


@dataclass(frozen=True)
class Source:
    """A set: one evaluation of one run."""

    run: Run
    iteration: int


@dataclass(frozen=True)
class Candidate:
    """A sample of a set."""

    source: Source
    shot: Sample

    @property
    def file(self) -> Path | None:
        """The sample's image file; None for a completion."""
        return self.source.run.samples / self.shot.image if self.shot.image else None

    @property
    def film(self) -> bool:
        """Whether the sample is a video."""
        return self.file is not None and self.shot.frames > 1

    def side(self, home: Path) -> Side:
        """The sample as a file of votes records it.

        Args:
            home: the folder of the file of votes.

        Raises:
            OSError: the image cannot be read.
        """
        content = self.file.read_bytes() if self.file else (self.shot.completion or "").encode(errors="surrogatepass")
        return Side(
            run=self.source.run.name,
            folder=folder_of(self.source.run, home),
            iteration=self.source.iteration,
            prompt_id=self.shot.prompt_id,
            sample=self.shot.sample,
            image=f"samples/{self.shot.image}" if self.shot.image else None,
            completion=self.shot.completion,
            sha256=hashlib.sha256(content).hexdigest(),
            frames=self.shot.frames if self.film else None,
        )


@dataclass(frozen=True)
class Ballot:
    """Two samples of one prompt, and the side of each: of one seed and two sets, or of two seeds and one set."""

    left: Candidate
    right: Candidate

    @property
    def seed(self) -> str:
        """The seed of both samples, or the two seeds in their order in the run."""
        sides = sorted((self.left, self.right), key=lambda its: its.shot.sample)
        return ", ".join(dict.fromkeys(its.shot.seed for its in sides))

    def rendered(self, side: str) -> list[str]:
        """The images that rewards made of the completion of a side, by path, each once.

        Images of something else, such as the prompt itself, would not help to choose.
        """
        found = (self.left if side == "left" else self.right).shot.rendered
        own = (made for label, made in found.items() if label.rpartition(OF)[0] not in found)
        return list(dict.fromkeys(one.image for made in own for one in made if one.image))

    def key(self, home: Path) -> Key:
        """The same key as `Vote.key` of a vote on these samples."""
        return frozenset(
            (folder_of(its.source.run, home), its.source.iteration, its.shot.prompt_id, its.shot.sample, self.seed)
            for its in (self.left, self.right)
        )

    def vote(self, session: str, choice: str, home: Path) -> Vote:
        """The choice as a file of votes in `home` records it, made now.

        Raises:
            OSError: an image cannot be read.
        """
        asked = self.left.shot
        return Vote(
            session=session,
            time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            prompt=asked.prompt,
            seed=self.seed,
            columns=asked.columns,
            values=asked.values,
            messages=asked.messages,
            pictures=tuple(f"samples/{name}" for name in asked.pictures),
            left=self.left.side(home),
            right=self.right.side(home),
            choice=choice,
        )


def folder_of(run: Run, home: Path) -> str:
    """A run's folder as files in `home` call it: a path relative to `home`, with forward slashes."""
    return os.path.relpath(run.folder.resolve(), home.resolve()).replace(os.sep, "/")


def sources_of(runs: Sequence[Run], chosen: str) -> list[Source]:
    """The sets that are compared with each other, or the one set whose samples are compared with each other.

    Args:
        runs: at least one.
        chosen: words separated by commas. `base` is the first evaluation of the first run. `last` is the last
            evaluation of every run. A number is the evaluation after that many iterations, of every run that has it.

    Returns:
        Two or more sets; one set only if a single word asks for it.

    Raises:
        ValueError: an unknown word, a number that no run has, a run without evaluations or with sounds, or several
            words for one set.
    """
    evaluated = [run.iterations("eval") for run in runs]
    for run, iterations in zip(runs, evaluated):
        if not iterations:
            raise ValueError(f"{run.folder} has no evaluation samples to vote on; evaluate in the run")
        if any(shot.sound for pair in run.pairs for shot in pair.shots.values()):
            raise ValueError(
                f"{run.folder} has sounds, and the page of votes cannot play them; listen in its gallery, and mark "
                "favourites there"
            )
    found: list[Source] = []
    for word in chosen.split(","):
        name = word.strip()
        if name == "base":
            found.append(Source(runs[0], evaluated[0][0]))
        elif name == "last":
            found += [Source(run, iterations[-1]) for run, iterations in zip(runs, evaluated)]
        else:
            having = [run for run, iterations in zip(runs, evaluated) if name in map(str, iterations)]
            if not having:
                known = ", ".join(map(str, sorted(set().union(*evaluated))))
                raise ValueError(f"--sets: no set {name!r} to vote on; use base, last, or an evaluation: {known}")
            found += [Source(run, int(name)) for run in having]
    sources = list({(source.run.folder, source.iteration): source for source in found}.values())
    if len(sources) < 2 and "," in chosen:
        raise ValueError(
            f"only one set to vote on, {sources[0].run.name}, iteration {sources[0].iteration}; "
            "name another run, or other evaluations with --sets. `--sets base` compares samples of a prompt with each "
            "other"
        )
    return sources


def ballots_of(sources: Sequence[Source], order: str) -> tuple[list[Ballot], int]:
    """All pairs of samples of every two sets, or of one set. The seed `order` gives their order and their sides.

    Two samples of two sets have one prompt and seed. Two samples of one set have one prompt and different seeds.

    The pairs of two sets are shuffled. Among each four successive pairs, each set is on the left twice. So a voter who
    stops early has still seen both sets on both sides. If there are more than two sets, the pairs of sets take turns.

    Args:
        sources: see `sources_of`.
        order: seed; equal for equal sets and samples.

    Returns:
        The ballots, and the number of pairs that were left out because both samples are equal.

    Raises:
        ValueError: no pair is left.
    """
    dice = random.Random(order)
    queues, same = [], 0
    groups = [_across(*two) for two in combinations(sources, 2)] if len(sources) > 1 else [_within(sources[0])]
    for group in groups:
        pairs = [pair for pair in group if not equal(*pair)]
        same += len(group) - len(pairs)
        dice.shuffle(pairs)
        turned = _sides(len(pairs), dice)
        queues.append([Ballot(b, a) if turn else Ballot(a, b) for (a, b), turn in zip(pairs, turned)])
    ballots: list[Ballot] = []
    while any(queues):
        going = [queue for queue in queues if queue]
        dice.shuffle(going)
        ballots += [queue.pop() for queue in going]
    if not ballots:
        if same:
            why = f"all {same} pairs are of equal samples"
        elif len(sources) > 1:
            why = "no prompt and seed has samples in two of the sets"
        else:
            why = "no prompt has two samples in this set (`evaluate.seeds` of a run is their number)"
        raise ValueError(f"nothing to vote on: {why}; choose other sets with --sets, or other runs")
    return ballots, same


def _across(first: Source, second: Source) -> list[tuple[Candidate, Candidate]]:
    """The pairs of two sets that have something to show."""
    shots = [samples_at(source.run, source.iteration) for source in (first, second)]
    both = [(Candidate(first, shots[0][key]), Candidate(second, shots[1][key])) for key in shots[0] if key in shots[1]]
    return [pair for pair in both if all(_there(its.shot) for its in pair)]


def _within(source: Source) -> list[tuple[Candidate, Candidate]]:
    """The pairs of samples of one prompt in a set that have something to show."""
    by_prompt: dict[tuple[str, str], list[Candidate]] = {}
    for shot in samples_at(source.run, source.iteration).values():
        if _there(shot):
            by_prompt.setdefault(shot.asked, []).append(Candidate(source, shot))
    pairs = (pair for candidates in by_prompt.values() for pair in combinations(candidates, 2))
    # The number of the sample tells the two samples apart in the file of votes.
    return [(one, two) for one, two in pairs if one.shot.sample != two.shot.sample]


def _there(shot: Sample) -> bool:
    return bool(shot.image) or shot.completion is not None


def equal(a: Candidate, b: Candidate) -> bool:
    """Whether two samples have the same content."""
    if a.file and b.file:
        return filecmp.cmp(a.file, b.file, shallow=False)
    return a.shot.completion == b.shot.completion


def _sides(count: int, dice: random.Random) -> list[bool]:
    """For each of `count` pairs, whether its sides are exchanged, in balanced blocks of at most four."""
    turned: list[bool] = []
    while len(turned) < count:
        left = count - len(turned)
        block = [False, True] * min(2, left // 2) or [dice.random() < 0.5]
        dice.shuffle(block)
        turned += block
    # Ballots are taken from the end. Without the reversal, the block of a single pair would be taken first.
    return turned[::-1]
