"""Scores of what is sampled already, while the next chunk of the rollout is sampled.

Rewards that run elsewhere, in another process or on a device of their own, get a chunk as soon as it is decoded, in
threads. Those that share the policy's device or this process's Python are called afterwards, with all samples: beside
the sampler they would only slow it, and take of its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ..rewards.base import Reward
from ..rewards.runner import RewardBatch, RewardSet
from ..rewards.threads import Line
from .uneven_groups import join_scores


def runs_elsewhere(reward: Reward, device: torch.device) -> bool:
    """Whether a reward takes nothing from a policy on `device`: it is remote, or names another device as its own."""
    if reward.remote or reward.device is None:
        return reward.remote
    own = torch.device(reward.device)
    same = own.type == device.type and (own.index is None or device.index is None or own.index == device.index)
    return not same


class OverlappedScoring:
    """The scores of one rollout, those of rewards that run elsewhere begun before it is complete.

    A remote reward has a thread of its own; rewards on one device share one, in which they are called in turn. So no
    reward is called twice at a time, and what rewards of a device have in common is not either. As a context manager it
    lets go of its threads: at the end of a run that failed, without waiting for an answer from elsewhere.

    Args:
        rewards: of the run.
        device: of the policy.
    """

    def __init__(self, rewards: RewardSet, device: torch.device) -> None:
        self._rewards = rewards
        self._elsewhere = [k for k, reward in enumerate(rewards.rewards) if runs_elsewhere(reward, device)]
        self._lines: dict[int | str, Line] = {}
        self._begun: dict[int, list[Future[RewardBatch]]] = {}
        self._count = 0

    def begin(
        self,
        samples: Tensor | Sequence[str],
        prompts: Sequence[str],
        columns: Mapping[str, Sequence[Any]] | None = None,
        groups: Tensor | Sequence[int] | None = None,
    ) -> None:
        """Let the next samples of the rollout be scored, by the rewards that run elsewhere; arguments as of `scores`.

        Groups must be whole.

        Raises:
            RewardError: a reward has failed on samples that came before.
        """
        for future in chain.from_iterable(self._begun.values()):
            if future.done():
                future.result()
        for k in self._elsewhere:
            reward = self._rewards.rewards[k]
            place = k if reward.remote else str(reward.device)
            if place not in self._lines:
                self._lines[place] = Line("rewards ahead")
            score = partial(self._rewards.only(k).score, samples, prompts, columns, groups, self._count)
            self._begun.setdefault(k, []).append(self._lines[place].put(score))
        self._count += len(prompts)

    def scores(
        self,
        samples: Tensor | Sequence[str],
        prompts: Sequence[str],
        columns: Mapping[str, Sequence[Any]] | None = None,
        groups: Tensor | Sequence[int] | None = None,
    ) -> RewardBatch:
        """Scores of the whole rollout by every reward.

        Args:
            samples: B of them as of `RewardSet.score`, those that were begun first and in that order.
            prompts: B prompts.
            columns: name -> B values.
            groups: B group ids.

        Returns:
            What `RewardSet.score` would have, for rewards that do not mind which groups come in one call.

        Raises:
            ValueError, RewardError, MissingDependency: as of `RewardSet.score`.
        """
        begun, rewards = self._begun, self._rewards
        if not begun:
            return rewards.score(samples, prompts, columns, groups)
        places = range(len(rewards.names))
        found = {k: rewards.only(k).score(samples, prompts, columns, groups) for k in places if k not in begun}
        found |= {k: join_scores([future.result() for future in futures]) for k, futures in begun.items()}
        self._begun, self._count = {}, 0
        return side_by_side([found[k] for k in places])

    def __enter__(self) -> OverlappedScoring:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for future in chain.from_iterable(self._begun.values()):
            future.cancel()
        for line in self._lines.values():
            line.end()
        for place, line in self._lines.items():
            if isinstance(place, str):
                # It computes in this process, which must not end under it.
                line.join()


def side_by_side(columns: Sequence[RewardBatch]) -> RewardBatch:
    """The scores of the same samples by several rewards, from those by each."""
    named = ("sub_scores", "notes", "seconds", "answers", "parts")
    return replace(
        columns[0],
        values=torch.cat([column.values for column in columns], dim=1),
        names=tuple(name for column in columns for name in column.names),
        weights=torch.cat([column.weights for column in columns]),
        **{kind: {name: found for c in columns for name, found in getattr(c, kind).items()} for kind in named},
    )
