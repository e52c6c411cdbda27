"""Statistics of a run that are computed once, when the gallery is built."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from ..votes.samples import Sample, SamplePair
from .run_reading import Run
from .thumbnails import Thumbnail

SAME = 1e-6  # gains up to this size count as no change, here and in the page


def summarize(run: Run, reward: str) -> dict[str, Any] | None:
    """The change of one reward from the first evaluation to the last, over samples of the same seed.

    Evaluations that had other settings than the last one do not count. `error` is the standard error of the mean gain
    over prompts, because the seeds of a prompt are not independent. A prompt has the weight that it has in the mean:
    its number of pairs. Pairs in which the reward does not apply to one of the samples are left out. `whole` holds the
    trainer's own means of the two evaluations, which may cover more samples than were saved.

    Returns:
        The statistics, or None if no pair has this reward in both evaluations, or no evaluation compares with the last.
    """
    evaluated = [iteration for iteration in run.iterations("eval") if iteration >= run.alike_since]
    if not evaluated or (run.alike_since and len(evaluated) == 1):
        return None
    first, last = evaluated[0], evaluated[-1]
    before, after = [], []
    gains: dict[tuple[str, str], list[float]] = {}
    for pair in run.pairs:
        base, tuned = pair.shots.get(first), pair.shots.get(last)
        if pair.phase == "eval" and base and tuned and reward in base.rewards and reward in tuned.rewards:
            before.append(base.rewards[reward])
            after.append(tuned.rewards[reward])
            gains.setdefault(base.asked, []).append(after[-1] - before[-1])
    if not before:
        return None
    every = [gain for group in gains.values() for gain in group]
    prompts, mean = len(gains), fmean(every)
    squares = math.fsum(math.fsum(gain - mean for gain in group) ** 2 for group in gains.values())
    means = {row["iteration"]: row.get(f"eval/{reward}") for row in run.metrics}
    whole = [means.get(first), means.get(last)]
    return {
        "reward": reward,
        "before": short(fmean(before)),
        "after": short(fmean(after)),
        "error": short(math.sqrt(squares * prompts / (prompts - 1)) / len(every)) if prompts > 1 else None,
        "prompts": prompts,
        "pairs": len(every),
        "gained": sum(gain > SAME for gain in every),
        "lost": sum(gain < -SAME for gain in every),
        "whole": None if None in whole else [short(mean) for mean in whole],
    }


def diversity_of_colours(colours: Sequence[bytes]) -> float:
    """How far the images of a group differ, as a share of the full range of colours; 0 for equal images.

    It is the root mean square, over places and channels, of the standard deviation of the coarse colours. For two
    images it is their root mean square difference divided by √2.

    Args:
        colours: at least two, of equal length, see `Thumbnail.colours`.
    """
    count = len(colours)
    total = 0.0
    for values in zip(*colours):
        mean = sum(values) / count
        total += sum((value - mean) ** 2 for value in values) / (count - 1)
    return math.sqrt(total / len(colours[0])) / 255


def diversity_of_texts(texts: Sequence[str]) -> float:
    """How far the completions of a group differ: (distinct - 1) / (all - 1); 0 if all are equal, 1 if no two are."""
    return (len(set(texts)) - 1) / (len(texts) - 1)


def group_spreads(
    pairs: Iterable[SamplePair], rewards: Sequence[str], thumbnails: Mapping[str, Thumbnail | None]
) -> list[dict[str, Any]]:
    """Diversity within the groups of each phase and iteration. A group is two or more samples of one prompt.

    Args:
        pairs: the pairs of one run.
        rewards: names of rewards.
        thumbnails: the thumbnails by `Sample.image`.

    Returns:
        For each phase and iteration: `groups`, the number of groups; `looks`, the mean diversity of their images or
        texts; `spread`, for each reward the mean standard deviation within a group.
    """
    groups: dict[tuple[str, int], dict[tuple[str, str], list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for pair in pairs:
        for iteration, shot in pair.shots.items():
            groups[pair.phase, iteration][shot.asked].append(shot)
    found = []
    for (phase, iteration), by_prompt in sorted(groups.items()):
        several = [shots for shots in by_prompt.values() if len(shots) > 1]
        if several:
            looks = [value for shots in several if (value := _looks(shots, thumbnails)) is not None]
            found.append(
                {
                    "phase": phase,
                    "iteration": iteration,
                    "groups": len(several),
                    "looks": _mean(looks),
                    "spread": [_mean(_deviations(several, name)) for name in rewards],
                }
            )
    return found


def short(value: float | None) -> float | None:
    """The number with nine digits, enough to tell a ratio of 1 from a ratio with a float32 rounding error."""
    return None if value is None else float(f"{value:.9g}")


def _looks(shots: Sequence[Sample], thumbnails: Mapping[str, Thumbnail | None]) -> float | None:
    texts = [shot.completion for shot in shots if shot.completion is not None]
    if texts:
        return diversity_of_texts(texts) if len(texts) > 1 else None
    found = [thumbnails.get(shot.image) for shot in shots if shot.image]
    colours = [thumbnail.colours for thumbnail in found if thumbnail]
    return diversity_of_colours(colours) if len(colours) > 1 else None


def _deviations(groups: Sequence[Sequence[Sample]], reward: str) -> list[float]:
    scores = [[shot.rewards[reward] for shot in shots if reward in shot.rewards] for shots in groups]
    return [stdev(values) for values in scores if len(values) > 1]


def _mean(values: Sequence[float]) -> float | None:
    return short(fmean(values)) if values else None
