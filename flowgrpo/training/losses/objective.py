"""The protocol of objectives, and the arguments of an objective of images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ...core.penalties import PENALTIES, Edges
from ...parts.choice import Choice

if TYPE_CHECKING:
    # These import the libraries of models, and a recipe is read without them.
    from ...configs.schema import Recipe
    from ...pipelines.policy import FlowPolicy
    from ...rewards.runner import RewardSet
    from ..controls import Controls


@dataclass
class Outcome:
    """The results of one batch.

    Attributes:
        statistics: [steps, 2, 5], see `core.diagnostics.step_statistics`.
        metrics: name -> [sum, count].
        error: largest |log ratio|.
    """

    statistics: Tensor
    metrics: dict[str, Tensor]
    error: Tensor


class Objective(Protocol):
    """A loss over the rows of a rollout."""

    def prepare(self, experience: Any) -> None:
        """Compute what is needed before the weights move."""

    def measure(self, experience: Any, part: int, advantages: Tensor, keep: Tensor | None) -> Tensor | None:
        """Sums over this rank's batches that an optimizer step needs before its first batch; None if it needs none."""

    def settle(self, sums: Tensor) -> None:
        """Use the sums of `measure`, added over ranks."""

    def rows(self, experience: Any, part: int, keep: Tensor | None) -> int:
        """How many rows of one part enter the loss, on this rank."""

    def batches(self, experience: Any, part: int, keep: Tensor | None) -> Iterator[Any]:
        """Batches of the rows of one part."""

    def backward(self, experience: Any, batch: Any, advantages: Tensor, keep: Tensor | None, rows: Tensor) -> Outcome:
        """Add the gradient of one batch. The loss is divided by `rows`, the count of the whole optimizer step."""


@dataclass(frozen=True)
class ObjectiveSetting:
    """The arguments of an objective of images, apart from its options.

    Attributes:
        recipe: of the run.
        policy: what is trained.
        elements: numbers in a latent.
        controls: coefficients that move.
        old: a context in which the policy is the one with which the loss compares: the sampling policy, unless the
            objective names another. None if that policy does not lag behind.
        rewards: of the run, for objectives that differentiate them.
    """

    recipe: Recipe
    policy: FlowPolicy
    elements: int
    controls: Controls
    old: Callable[[], AbstractContextManager[None]] | None = None
    rewards: RewardSet | None = None


class Unmeasured:
    """An objective whose optimizer steps need no sums over their batches."""

    def prepare(self, experience: Any) -> None:
        """Do nothing: the rollout has recorded everything."""

    def measure(self, experience: Any, part: int, advantages: Tensor, keep: Tensor | None) -> Tensor | None:
        """None: nothing is measured."""
        return None

    def settle(self, sums: Tensor) -> None:
        """Never called."""


class Penalties:
    """The penalties of a recipe. They are always added in the same order, whatever the order of the recipe.

    Args:
        chosen: of the recipe.
        elements: numbers in a latent.
    """

    def __init__(self, chosen: Sequence[Choice], elements: int) -> None:
        known = list(PENALTIES)
        ordered = sorted(chosen, key=lambda one: known.index(one.name) if one.name in known else len(known))
        self._each = [(one.short, one["weight"], one.make(elements=elements)) for one in ordered]

    def of(self, edges: Edges) -> dict[str, Tensor]:
        """Name -> [E, 1] penalty, without its weight.

        Raises:
            ValueError: a penalty does not return one value for each edge.
        """
        found, count = {}, len(edges.log_ratio)
        for name, _, penalty in self._each:
            values = penalty(edges)
            if values.shape != (count,):
                raise ValueError(
                    f"penalty {name} returns a tensor of shape {tuple(values.shape)}; return one value for each edge, "
                    f"({count},)"
                )
            found[name] = values[:, None]
        return found

    def weighted(self, values: dict[str, Tensor]) -> list[Tensor]:
        """[E, 1] penalties, each times its weight."""
        return [weight * values[name] for name, weight, _ in self._each]


def pair(values: Tensor) -> Tensor:
    """[2] sum and count of some values, the form of metrics."""
    return torch.stack([values.sum(), values.new_tensor(float(values.numel()))])
