"""The pairs of pictures in files of votes and the choices between them, checked for a reward that learns from them.

Nothing is left out silently, because nobody would notice that a reward has learned from only a part of the votes. A
faulty line ends the reading with an error that names the file and the line.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from ...votes.file import Vote, latest, read_whole, votes_file

LEAST_UNITS = 5


@dataclass(frozen=True, order=True)
class VotedPair:
    """Two pictures for one prompt, named by the hashes of their content; `first` is the smaller hash."""

    prompt: str
    first: str
    second: str


@dataclass
class Count:
    """How often the first picture of a pair was preferred, how often the second, and how often neither."""

    first: int = 0
    second: int = 0
    tie: int = 0


@dataclass(frozen=True)
class Voted:
    """The choices of people in files of votes.

    Attributes:
        pairs: the different pairs with their counts. They are sorted, so neither the order of the lines nor the sides
            of the pictures have an effect.
        files: a file for each content.
        frames: number of frames of each content that is a video; the frames stand side by side in its picture.
        units: [N] the number of the unit to which each pair belongs. What is learned from a pair says nothing about the
            pairs of other units.
        shared: what the pairs of a unit have in common, in words.
    """

    pairs: dict[VotedPair, Count]
    files: dict[str, Path]
    frames: dict[str, int]
    units: NDArray[np.int64]
    shared: str


def read_voted(names: Sequence[str | Path], least: int) -> Voted:
    """Read the pairs in files of votes. If a session chose several times on one pair in a file, the last choice counts.

    Args:
        names: files, or folders of runs that hold a `votes.jsonl`.
        least: smallest number of pairs in which one picture was preferred more often than the other.

    Raises:
        ValueError: one of these is true: a file is missing or named twice; a line is not a vote, is about completions
            or about two equal pictures; a line names a picture that is gone, has changed since the vote, or is outside
            its run; there are too few pairs, or too few units.
    """
    paths = [votes_file(name) for name in names]
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError(f"one file of votes is named twice: {', '.join(map(str, paths))}")
    counts: dict[VotedPair, Count] = {}
    files: dict[str, Path] = {}
    frames: dict[str, int] = {}
    for path in paths:
        for vote in latest(read_whole(path)):
            if vote.choice != "skip":
                files |= _files(vote, path, files)
                frames |= {side.sha256: side.frames for side in (vote.left, vote.right) if side.frames is not None}
                _add(counts, vote)
    decided = sum(count.first != count.second for count in counts.values())
    if decided < least:
        raise ValueError(
            f"{', '.join(map(str, paths))}: {decided} pairs in which one picture was preferred, but {least} are "
            "needed. Vote on more with `flowgrpo gallery RUN --vote`, or lower `least`"
        )
    pairs = {pair: counts[pair] for pair in sorted(counts)}
    return Voted(pairs, files, frames, *_units(pairs))


def _files(vote: Vote, path: Path, known: Mapping[str, Path]) -> dict[str, Path]:
    """Return the files of a vote's pictures by their content; the files in `known` have already been checked."""
    where, found = f"{path}, line {vote.line}", {}
    for side in (vote.left, vote.right):
        file = side.content(path.parent)
        if isinstance(file, str):
            raise ValueError(
                f"{where} is a choice between completions, and `choices` learns from pictures. For text take a judge "
                "(`judge`, `unified_reward`, `rubric`), with `objective: {name: answers, loss: dpo}` if you like; "
                "`flowgrpo gallery RUN --vote-dataset DIR` writes choices between completions as prompt, chosen and "
                "rejected for programs that train on them"
            )
        if known.get(side.sha256) != file and not side.unchanged(path.parent):
            lost = "has changed since the vote" if file.is_file() else "is gone"
            raise ValueError(f"{where}: {file} {lost}; put the picture back, or take the line out")
        found[side.sha256] = file
    if len(found) < 2:
        raise ValueError(f"{where} is a choice between two equal pictures; take the line out")
    return found


def _add(counts: dict[VotedPair, Count], vote: Vote) -> None:
    first, second = sorted((vote.left.sha256, vote.right.sha256))
    count = counts.setdefault(VotedPair(vote.prompt, first, second), Count())
    if vote.preferred is None:
        count.tie += 1
    elif vote.preferred[0].sha256 == first:
        count.first += 1
    else:
        count.second += 1


def _units(pairs: Collection[VotedPair]) -> tuple[NDArray[np.int64], str]:
    """Return `Voted.units` and `Voted.shared`: units by prompt, or by picture if there are few prompts.

    By picture, two pairs are in one unit if they have a picture in common, or if a chain of such pairs links them.
    """
    prompts = {prompt: place for place, prompt in enumerate(sorted({pair.prompt for pair in pairs}))}
    if len(prompts) >= LEAST_UNITS:
        return np.array([prompts[pair.prompt] for pair in pairs]), "prompts"
    contents = sorted({content for pair in pairs for content in (pair.first, pair.second)})
    places = {content: place for place, content in enumerate(contents)}
    ends = np.array([(places[pair.first], places[pair.second]) for pair in pairs])
    graph = coo_matrix((np.ones(len(ends)), ends.T), shape=(len(places), len(places)))
    parts, labels = connected_components(graph, directed=False)
    if parts < LEAST_UNITS:
        raise ValueError(
            f"the votes are on {len(prompts)} prompts, and comparisons link their pictures into too few separate "
            f"sets, so no pairs can be held out for a test; vote on {LEAST_UNITS} prompts or more"
        )
    return np.asarray(labels[ends[:, 0]], dtype=np.int64), "pictures"
