"""The pairs that an export shows: the pairs that gained most, lost most, or look like cheating."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from ..votes.samples import Sample
from .run_figures import SAME
from .run_reading import Run

ORDERS = ("gained", "lost", "cheating", "high", "low", "file")


@dataclass(frozen=True)
class Row:
    """Samples of one prompt and seed: from the first evaluation of the first run, and from the last of every run."""

    shots: tuple[Sample | None, ...]

    @property
    def first(self) -> Sample:
        """The earliest sample; it carries the prompt and the seed."""
        return next(shot for shot in self.shots if shot is not None)

    def gain(self, reward: str) -> float | None:
        """Score in the last run minus score in the first evaluation; None if the reward does not apply to both."""
        base, tuned = self.shots[0], self.shots[-1]
        if not (base and tuned and reward in base.rewards and reward in tuned.rewards):
            return None
        return tuned.rewards[reward] - base.rewards[reward]


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """Prompts and seeds that every run evaluated first and last, in the order of the first run.

    Raises:
        ValueError: a run has no evaluations.
    """
    columns: list[dict[Hashable, Sample]] = []
    for number, run in enumerate(runs):
        evaluated = run.iterations("eval")
        if not evaluated:
            raise ValueError(f"{run.folder} has no evaluation samples to export; evaluate in the run")
        for iteration in (evaluated[0], evaluated[-1]) if number == 0 else (evaluated[-1],):
            columns.append(samples_at(run, iteration))
    shared = [key for key in columns[0] if all(key in column for column in columns)]
    return [Row(tuple(column[key] for column in columns)) for key in shared]


def choose(rows: Sequence[Row], rewards: Sequence[str], reward: str | None, order: str, count: int) -> list[Row]:
    """The first `count` rows by an order.

    Args:
        rows: see `rows_of`.
        rewards: the names of all rewards.
        reward: the reward that gained, lost, high and low refer to; the first if None.
        order: one of ORDERS. `cheating` takes rows in which the reward rose while another reward fell. It sorts them by
            the sum of rise and fall, each in units of its root mean square over the rows.
        count: at least 1.

    Raises:
        ValueError: an unknown reward or order, or nothing to show.
    """
    if order not in ORDERS:
        raise ValueError(f"no order {order!r}; use one of {', '.join(ORDERS)}")
    if not rows:
        raise ValueError(
            "the evaluations that are compared have no prompt with the same seed in common, so there are no pairs to "
            "show; their prompts or seeds are not the same"
        )
    if reward is not None and reward not in rewards:
        raise ValueError(f"no reward {reward!r} in the samples; use one of {', '.join(rewards) or 'none'}")
    if order == "file" or not rewards:
        chosen = list(rows)
    else:
        scored = _scores(rows, rewards, reward or rewards[0], order)
        chosen = [row for row, score in sorted(zip(rows, scored), key=lambda pair: -pair[1]) if score > -math.inf]
    if not chosen and all(row.gain(reward or rewards[0]) is None for row in rows):
        raise ValueError(
            f"no pair of samples has the reward {reward or rewards[0]!r} at the start and at the end; give another "
            "reward, or the order 'file'"
        )
    if not chosen:
        raise ValueError(f"no pair of samples to show by {order!r}; use another order, such as 'file'")
    return chosen[:count]


def _scores(rows: Sequence[Row], rewards: Sequence[str], reward: str, order: str) -> list[float]:
    def known(value: float | None, sign: int = 1) -> float:
        return -math.inf if value is None else sign * value

    if order in ("gained", "lost"):
        return [known(row.gain(reward), 1 if order == "gained" else -1) for row in rows]
    if order in ("high", "low"):
        last = [row.shots[-1] for row in rows]
        return [known(shot.rewards.get(reward) if shot else None, 1 if order == "high" else -1) for shot in last]
    gains = {name: [row.gain(name) for row in rows] for name in rewards}
    scale = {name: _size([value for value in values if value is not None]) for name, values in gains.items()}
    found = []
    for at in range(len(rows)):
        gain = gains[reward][at]
        falls = [
            -value / scale[name]
            for name, values in gains.items()
            if name != reward and (value := values[at]) is not None and value < -SAME
        ]
        found.append(gain / scale[reward] + max(falls) if gain is not None and gain > SAME and falls else -math.inf)
    return found


def _size(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values)) or 1.0 if values else 1.0


def samples_at(run: Run, iteration: int) -> dict[Hashable, Sample]:
    """Samples by what they have in common with samples of other runs, in their order.

    The prompt's text, pictures and conversation are the key, because its number depends on the prompt file; then the
    seed, and the number among the pairs with the same prompt and seed.
    """
    found: dict[Hashable, Sample] = {}
    counts = Counter[Hashable]()
    for pair in run.pairs:
        if pair.phase == "eval":
            own = (pair.first.asked_anywhere, pair.first.seed)
            if iteration in pair.shots:
                found[own, counts[own]] = pair.shots[iteration]
            counts[own] += 1
    return found
