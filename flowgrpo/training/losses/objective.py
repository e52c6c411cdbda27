"""What every objective has, and what an objective of images is made with."""

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
    # These import the libraries of models, without which a recipe is read.
    from ...configs.schema import Recipe
    from ...pipelines.policy import FlowPolicy
    from ..controls import Controls


@dataclass
class Outcome:
    """What one batch contributed.

    Attributes:
        statistics: [steps, 2, 5], see `core.diagnostics.step_statistics`.
        metrics: name -> [sum, count].
        error: largest |log ratio|.
    """

    statistics: Tensor
    metrics: dict[str, Tensor]
    error: Tensor


class Objective(Protocol):
    """A form of loss over the rows of a rollout."""

    def prepare(self, experience: Any) -> None:
        """Whatever must be computed before the weights move."""

    def measure(self, experience: Any, part: int, advantages: Tensor, keep: Tensor | None) -> Tensor | None:
        """What an optimizer step must know of all its batches before the first: sums of this rank, None for nothing."""

    def settle(self, sums: Tensor) -> None:
        """Take what was measured, added over ranks."""

    def rows(self, experience: Any, part: int, keep: Tensor | None) -> int:
        """Rows of one part that enter the loss, on this rank."""

    def batches(self, experience: Any, part: int, keep: Tensor | None) -> Iterator[Any]:
        """Batches of them."""

    def backward(self, experience: Any, batch: Any, advantages: Tensor, keep: Tensor | None, rows: Tensor) -> Outcome:
        """Add one batch's gradient of the loss over `rows`, the count of the whole optimizer step."""


@dataclass(frozen=True)
class ObjectiveSetting:
    """What an objective of images is made with beside its options.

    Attributes:
        recipe: of the run.
        policy: what is trained.
        elements: numbers in a latent.
        controls: coefficients that move.
        old: a context in which the policy is the one that sampled, where that lags behind; None where it does not.
    """

    recipe: Recipe
    policy: FlowPolicy
    elements: int
    controls: Controls
    old: Callable[[], AbstractContextManager[None]] | None = None


class Unmeasured:
    """An objective whose optimizer steps need to know nothing of all their batches."""

    def prepare(self, experience: Any) -> None:
        """Nothing: the rollout has recorded it."""

    def measure(self, experience: Any, part: int, advantages: Tensor, keep: Tensor | None) -> Tensor | None:
        """Nothing."""
        return None

    def settle(self, sums: Tensor) -> None:
        """Never called."""


class Penalties:
    """The penalties of a recipe, added up in one order, however a recipe lists them.

    Args:
        chosen: of the recipe.
        elements: numbers in a latent.
    """

    def __init__(self, chosen: Sequence[Choice], elements: int) -> None:
        known = list(PENALTIES)
        ordered = sorted(chosen, key=lambda one: known.index(one.name) if one.name in known else len(known))
        self._each = [(one.short, one["weight"], one.make(elements=elements)) for one in ordered]

    def of(self, edges: Edges) -> dict[str, Tensor]:
        """Name -> [E, 1], without its weight.

        Raises:
            ValueError: a penalty that gives no value for each edge.
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
        """[E, 1] of each, times its weight."""
        return [weight * values[name] for name, weight, _ in self._each]


def pair(values: Tensor) -> Tensor:
    """[2] sum and count of some values, as metrics have them."""
    return torch.stack([values.sum(), values.new_tensor(float(values.numel()))])
