"""Groups of unequal sizes: a rollout in several rounds, which is scored and trained as one rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..configs.rollouts import BudgetConfig
from ..core.budgets import GAINS, Gain, allocate
from ..core.subsets import finished
from ..rewards.runner import RewardBatch
from ..rewards.score_batches import join_scores
from .credit.combining import total_reward
from .joined_rollouts import JoinedRollouts
from .tasks import Collected


def meets(budget: BudgetConfig | None) -> bool:
    """Whether the processes wait for each other in `pool`, once, after the first rollout."""
    return budget is not None and budget.choice != "until"


@dataclass(frozen=True)
class UnevenGroups(JoinedRollouts):
    """Several rollouts of P prompts. A rollout has entries for some of the prompts, maybe several for one prompt."""

    @property
    def groups(self) -> Tensor:
        """[L] ids of groups: a group is all samples of a prompt, from all rounds."""
        return torch.tensor(self.prompt_of_sample)

    @property
    def kinds(self) -> tuple[int, ...]:
        """The number of each round."""
        return tuple(range(len(self.rounds)))

    def siblings(self, among: str) -> Tensor:
        """[L] the groups."""
        return self.groups

    def record(self) -> dict[str, float]:
        """Sums or means of the metrics of the rounds, the number of rounds, and the number of samples."""
        return {"rounds": len(self.sizes), "samples": sum(self.sizes), **super().record()}


Sample = Callable[[Sequence[int], Sequence[int]], Collected]
"""`sample(prompts, rounds)`: a rollout of entries; an entry has a prompt and the number of its round."""

Pool = Callable[[list[float]], tuple[list[float], list[int]]]
"""Takes a number for each prompt of this process; returns the numbers of all processes, and the places of its own."""


def collect_rounds(
    budget: BudgetConfig | None,
    count: int,
    first: int,
    group: int,
    sample: Sample,
    score: Callable[[Collected, Sequence[int]], RewardBatch],
    pool: Pool = lambda own: (own, list(range(len(own)))),
) -> tuple[UnevenGroups, RewardBatch]:
    """The first rounds of every prompt, and the further rounds that the budget gives.

    Args:
        budget: decides which prompts get further rounds; None for no further rounds.
        count: P prompts.
        first: rounds of every prompt in the first call.
        group: samples per round.
        sample: makes a rollout.
        score: scores a rollout, given the prompt of each of its entries.
        pool: collects numbers from all processes, because the rounds are shared among the prompts of all processes.
    """
    prompts: list[tuple[int, ...]] = []
    parts: list[Collected] = []
    scores: list[RewardBatch] = []
    rounds = [0] * count
    entries = [p for p in range(count) for _ in range(first)]
    while entries:
        numbers = []
        for p in entries:
            numbers.append(rounds[p])
            rounds[p] += 1
        parts.append(sample(entries, numbers))
        prompts.append(tuple(entries))
        scores.append(score(parts[-1], entries))
        if budget is None:
            break
        so_far = UnevenGroups(tuple(parts), tuple(prompts))
        entries = _next_entries(budget, group, rounds, so_far, join_scores(scores), pool)
    return UnevenGroups(tuple(parts), tuple(prompts)), join_scores(scores)


def _next_entries(
    budget: BudgetConfig, group: int, rounds: Sequence[int], so_far: UnevenGroups, scores: RewardBatch, pool: Pool
) -> list[int]:
    """Prompts of the next call; a prompt is listed once for each of its rounds."""
    rewards = total_reward(scores, so_far)
    if budget.choice == "until":
        done = finished(
            rewards, so_far.groups, positives=budget.positives, negatives=budget.negatives, success=budget.success
        )
        return [p for p, complete in enumerate(done.tolist()) if not complete and rounds[p] < budget.rounds]
    if len(so_far.rounds) > 1:
        return []
    first = rounds[0]
    statistics, mine = pool([_statistic(budget, rewards[so_far.groups == p]) for p in range(len(rounds))])
    gain = partial(GAINS[budget.choice], **({"bonus": budget.bonus} if budget.choice == "interval" else {}))
    total = max(budget.rounds, first) * len(statistics)
    limit = None if budget.most is None else max(budget.most, first)
    sizes = allocate(statistics, total, partial(_of_a_round, gain, group), least=first, most=limit)
    return [p for p, place in enumerate(mine) for _ in range(sizes[place] - first)]


def _of_a_round(gain: Gain, group: int, statistic: float, rounds: int) -> float:
    """The gain from the samples of one more round."""
    return sum(gain(statistic, rounds * group + k) for k in range(group))


def _statistic(budget: BudgetConfig, rewards: Tensor) -> float:
    """The statistic of a prompt's first round that decides the share of the prompt.

    A success rate is Laplace's (s + 1) / (n + 2), because a few samples without a success do not mean that the rate is
    0.
    """
    known = rewards[~rewards.isnan()]
    if budget.choice == "knapsack":
        return (float((known >= budget.success).sum()) + 1) / (len(known) + 2)
    return float(known.double().std()) if len(known) > 1 else 0.0
