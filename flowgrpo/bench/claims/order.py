"""Which run is made next: first every claim's first seeds, then seeds for the claims that are nearest to a decision."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .evidence import Claim, Statement

Answer = tuple[Claim, str, Sequence[Statement]]


def more_seeds(findings: Iterable[Statement]) -> float:
    """About how many seeds more a claim needs; 0 if the runs decide nothing more, infinite if nobody can say."""
    counts = [
        math.inf if finding.measure.more is None else finding.measure.more
        for finding in findings
        if finding.measure is not None and finding.holds is None and finding.measure.each == "seeds"
    ]
    return max(counts, default=0.0)


def order(answers: Sequence[Answer], made: Mapping[str, Any], first: Sequence[int], most: int) -> list[tuple[str, int]]:
    """Runs that are missing, as labels and seeds, in the order in which they should be made.

    Args:
        answers: claims with their verdicts and findings on the present results.
        made: label → seeds that have a result, also of runs that failed.
        first: the seeds that every claim gets.
        most: the number of seeds that no claim exceeds.

    Returns:
        First the runs of the first seeds, seed by seed. Then, for each claim that is undecided, the runs of its next
        seed. A claim that needs fewer seeds comes earlier, because a claim that is decided needs nothing more.
    """
    found: dict[tuple[str, int], None] = {}
    for seed in first:
        for claim, _, _ in answers:
            found |= {(label, seed): None for label in claim.runs if seed not in made.get(label, ())}
    open_claims = [(more_seeds(findings), claim) for claim, verdict, findings in answers if verdict == "undecided"]
    for count, claim in sorted(((c, k) for c, k in open_claims if k.runs), key=lambda pair: pair[0]):
        if not count:
            continue
        free = (seed for seed in range(most) if any(seed not in made.get(label, ()) for label in claim.runs))
        for seed in itertools.islice(free, 1):
            found |= {(label, seed): None for label in claim.runs if seed not in made.get(label, ())}
    return list(found)
