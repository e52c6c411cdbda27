"""Groups of unequal sizes: a rollout in several rounds, which is scored and trained as one rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ..configs.rollouts import BudgetConfig
from ..core.budgets import GAINS, Gain, allocate
from ..core.subsets import finished
from ..rewards.runner import RewardBatch, RewardSet
from ..text.cutting import Parts
from .credit.combining import total_reward
from .losses.objective import Objective, Outcome
from .reporting.records import joint_record
from .tasks import Collected


@dataclass(frozen=True)
class UnevenGroups:
    """Several rollouts of P prompts. A rollout has entries for some of the prompts, maybe several for one prompt.

    Attributes:
        rounds: the rollouts.
        prompts: for each rollout, the index 0..P-1 of the prompt of each entry.
    """

    rounds: tuple[Collected, ...]
    prompts: tuple[tuple[int, ...], ...]

    @cached_property
    def samples(self) -> Tensor | list[str]:
        """Samples, round by round."""
        return joined([part.samples for part in self.rounds])

    @cached_property
    def prompt_of_sample(self) -> list[int]:
        """[L] index of the prompt of each sample."""
        return [of[entry] for part, of in zip(self.rounds, self.prompts) for entry in part.prompt_of_sample]

    @property
    def groups(self) -> Tensor:
        """[L] ids of groups: a group is all samples of a prompt, from all rounds."""
        return torch.tensor(self.prompt_of_sample)

    @property
    def lengths(self) -> Tensor | None:
        """[L] tokens; for completions only."""
        return _known([part.lengths for part in self.rounds])

    @property
    def log_probs(self) -> Tensor | None:
        """[L] log-probs of whole samples under the sampler; for completions only."""
        return _known([part.log_probs for part in self.rounds])

    @property
    def parts(self) -> Parts | None:
        """The parts of completions; None if the recipe does not cut them."""
        cut = [part.parts for part in self.rounds]
        known = [part for part in cut if part is not None]
        if len(known) < len(cut):
            return None
        return Parts([texts for part in known for texts in part.texts], [ids for part in known for ids in part.ids])

    @property
    def outcomes(self) -> Tensor:
        """[L] bool: samples that are results, not previews of a state."""
        return torch.cat([part.outcomes for part in self.rounds])

    @property
    def columns(self) -> int:
        """Columns of the statistics of the ratio, the same in each round."""
        return self.rounds[0].columns

    def record(self) -> dict[str, float]:
        """Sums or means of the metrics of the rounds, the number of rounds, and the number of samples."""
        sizes = self._sizes()
        found = joint_record([part.record() for part in self.rounds], sizes)
        return {"rounds": len(sizes), "samples": sum(sizes), **found}

    def origins(self) -> list[dict[str, Any]]:
        """[L] how each sample was made, round by round."""
        return [origin for part in self.rounds for origin in part.origins()]

    def node_advantages(self, leaf: Tensor) -> Tensor:
        """[N] advantages of the nodes, round by round."""
        return torch.cat([part.node_advantages(own) for part, own in zip(self.rounds, leaf.split(self._sizes()))])

    def siblings(self, among: str) -> Tensor:
        """[L] the groups."""
        return self.groups

    def kept(self, chosen: Tensor) -> Tensor:
        """[N] bool: nodes that are trained, round by round."""
        return torch.cat([part.kept(own) for part, own in zip(self.rounds, chosen.split(self._sizes()))])

    @cached_property
    def nodes(self) -> list[slice]:
        """The places of the nodes of each round among all nodes."""
        sizes = [len(part.kept(torch.ones(n, dtype=torch.bool))) for part, n in zip(self.rounds, self._sizes())]
        return [slice(sum(sizes[:k]), sum(sizes[: k + 1])) for k in range(len(sizes))]

    def _sizes(self) -> list[int]:
        return [len(part.prompt_of_sample) for part in self.rounds]


class UnevenGroupsObjective:
    """The objective of a task over several rounds. An optimizer step takes all rounds together.

    Args:
        make: makes the objective of one rollout.
    """

    def __init__(self, make: Callable[[], Objective]) -> None:
        self._make = make
        self._each: list[Objective] = []

    def prepare(self, experience: UnevenGroups) -> None:
        """Let the objective of each round compute what it needs before the weights move."""
        self._each += [self._make() for _ in experience.rounds[len(self._each) :]]
        for objective, part in zip(self._each, experience.rounds):
            objective.prepare(part)

    def measure(self, experience: UnevenGroups, part: int, advantages: Tensor, keep: Tensor | None) -> Tensor | None:
        """Sums over all rounds that an optimizer step needs before its first batch; None if it needs none."""
        parts = zip(self._each, experience.rounds, experience.nodes)
        found = [each.measure(one, part, advantages[nodes], _own(keep, nodes)) for each, one, nodes in parts]
        sums = [one for one in found if one is not None]
        return torch.stack(sums).sum(0) if sums else None

    def settle(self, sums: Tensor) -> None:
        """Give the objective of each round the same sums."""
        for objective in self._each:
            objective.settle(sums)

    def rows(self, experience: UnevenGroups, part: int, keep: Tensor | None) -> int:
        """Rows of all rounds."""
        parts = zip(self._each, experience.rounds, experience.nodes)
        return sum(objective.rows(one, part, _own(keep, nodes)) for objective, one, nodes in parts)

    def batches(self, experience: UnevenGroups, part: int, keep: Tensor | None) -> Iterator[tuple[int, Any]]:
        """The batches of each round, with the number of the round."""
        for k, (one, nodes) in enumerate(zip(experience.rounds, experience.nodes)):
            for batch in self._each[k].batches(one, part, _own(keep, nodes)):
                yield k, batch

    def backward(
        self, experience: UnevenGroups, batch: tuple[int, Any], advantages: Tensor, keep: Tensor | None, rows: Tensor
    ) -> Outcome:
        """Add the gradient of a batch of one round."""
        k, inner = batch
        nodes = experience.nodes[k]
        return self._each[k].backward(experience.rounds[k], inner, advantages[nodes], _own(keep, nodes), rows)


def joined(samples: Sequence[Tensor | list[str]]) -> Tensor | list[str]:
    """The samples of several rollouts together: images as a tensor, completions as a list."""
    images = [part for part in samples if isinstance(part, Tensor)]
    return torch.cat(images) if images else [text for part in samples for text in part if isinstance(text, str)]


def _known(columns: Sequence[Tensor | None]) -> Tensor | None:
    """The columns of several rollouts as one column; None if the rollouts have no such column."""
    known = [column for column in columns if column is not None]
    return torch.cat(known) if known else None


def _own(keep: Tensor | None, nodes: slice) -> Tensor | None:
    return None if keep is None else keep[nodes]


def refuse_comparisons(rewards: RewardSet) -> None:
    """Raise ValueError for rewards that must see the samples of all rounds at once."""
    whole = [reward.name for reward in rewards.rewards if reward.whole_group]
    if whole:
        raise ValueError(
            f"with rollout.budget or data.templates, samples are scored round by round, and {', '.join(whole)} "
            "compares whole groups; leave one of them out"
        )


def join_scores(parts: Sequence[RewardBatch]) -> RewardBatch:
    """The scores of several calls of the same rewards, one after another."""
    first, sizes = parts[0], [len(part.values) for part in parts]

    def column(of: Callable[[RewardBatch], Any], missing: Any) -> list[Any]:
        return [value for part, size in zip(parts, sizes) for value in of(part) or [missing] * size]

    subs = {(reward, name): None for part in parts for reward, found in part.sub_scores.items() for name in found}
    sub_scores: dict[str, dict[str, list[float]]] = {}
    for reward, name in subs:
        read = partial(_sub_score, reward=reward, name=name)
        sub_scores.setdefault(reward, {})[name] = column(read, float("nan"))
    noted = dict.fromkeys(reward for part in parts for reward in part.notes)
    notes = {reward: column(partial(_said, kind="notes", reward=reward), "") for reward in noted}
    answered = dict.fromkeys(reward for part in parts for reward in part.answers)
    answers = {reward: column(partial(_said, kind="answers", reward=reward), None) for reward in answered}
    cut = dict.fromkeys(reward for part in parts for reward in part.parts)
    of_parts = {reward: column(partial(_said, kind="parts", reward=reward), None) for reward in cut}
    seconds = {name: sum(part.seconds[name] for part in parts) for name in first.seconds}
    values = torch.cat([part.values for part in parts])
    return replace(
        first, values=values, sub_scores=sub_scores, notes=notes, answers=answers, parts=of_parts, seconds=seconds
    )


def _sub_score(part: RewardBatch, reward: str, name: str) -> list[float] | None:
    return part.sub_scores.get(reward, {}).get(name)


def _said(part: RewardBatch, kind: str, reward: str) -> list[Any] | None:
    found: list[Any] | None = getattr(part, kind).get(reward)
    return found


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
