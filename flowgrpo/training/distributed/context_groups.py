"""Context parallelism in a run: the processes of a group make the same samples, and one of them asks the rewards.

Each process decides by scores which samples are trained, and all processes of a group must decide alike. A judge may
answer twice in different ways, and so may a reward model on a GPU. So the scores of one process count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from ...configs.schema import AnyRecipe, Recipe
from ...rewards.base import Reward, RewardError, RewardSpec
from ...rewards.runner import RewardBatch, RewardSet
from .processes import PATIENCE

T = TypeVar("T")


def context_of(recipe: AnyRecipe) -> int:
    """The number of processes that evaluate one sample together; 1 without context parallelism."""
    return recipe.model.context_parallel if isinstance(recipe, Recipe) else 1


class ContextGroup:
    """The group of this process. Every process must make one at the same place.

    Args:
        size: number of processes in a group; it divides the number of all processes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._first = dist.get_rank() // size * size
        # The group works on the CPU, so that a message does not wait for the accelerator.
        self._group, _ = dist.new_subgroups(group_size=size, backend="gloo", timeout=PATIENCE)

    def told(self, work: Callable[[], T]) -> T:
        """The result of `work` in the first process of the group. The others do not call `work`.

        Every process of the group must call it.

        Raises:
            RewardError: the first process has raised it; all processes of the group raise it.
        """
        box: list[Any] = [None, None]
        failed: RewardError | None = None
        if dist.get_rank() == self._first:
            try:
                box[0] = work()
            except RewardError as error:
                failed = error
                box[1] = (str(error), error.reward, error.index, error.indices, error.prompt, error.saved)
        dist.broadcast_object_list(box, src=self._first, group=self._group)
        if failed is not None:
            raise failed
        if box[1] is not None:
            raise RewardError(*box[1])
        found: T = box[0]
        return found


class LedRewards(RewardSet):
    """Rewards that the first process of a group asks for the whole group.

    Args:
        specs: as of `RewardSet`.
        group: of this process.
    """

    def __init__(self, specs: Sequence[RewardSpec | Reward], group: ContextGroup) -> None:
        super().__init__(specs)
        self._group = group

    def score(self, *args: Any, **options: Any) -> RewardBatch:
        """What `RewardSet.score` returns in the first process of the group. Every process of the group must call it."""
        return self._group.told(lambda: RewardSet.score(self, *args, **options))
