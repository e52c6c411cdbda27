"""BAPO's search for the ratio bounds of an optimizer step, over all batches and processes of the step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..configs.sections import BalanceConfig
from ..core.advantages import as_precise
from ..core.bounds import balance_path, balance_sums, balanced_bounds, bapo


class Balance:
    """Bounds of the ratio that are moved at each optimizer step until good samples have a given share of the gradient.

    Args:
        settings: the range of the bounds, and the share (rho_0 of arXiv 2510.18927).

    Attributes:
        surrogate: `bapo` with the bounds of the present step. Before the first step, it has the first bounds of the
            search.

    Raises:
        ValueError: bounds are out of order.
    """

    def __init__(self, settings: BalanceConfig) -> None:
        try:
            self._path = balance_path(
                lower=settings.lower, upper=settings.upper, lower_step=settings.lower_step,
                upper_step=settings.upper_step,
            )  # fmt: skip
        except ValueError as error:
            raise ValueError(f"objective.balance: {error}") from None
        self._target = settings.target
        self._bounds = torch.tensor(self._path[0])
        self.surrogate: Callable[..., Tensor] = partial(bapo, lower=self._path[0][0], upper=self._path[0][1])

    def nothing(self, device: torch.device) -> Tensor:
        """[K, 2] zeros, the contributions before the first batch."""
        return as_precise(torch.zeros(len(self._path), 2, device=device))

    def contributions(self, log_ratio: Tensor, advantage: Tensor, mask: Tensor | None) -> Tensor:
        """[K, 2] contributions of one batch, see `core.bounds.balance_sums`."""
        return balance_sums(log_ratio, advantage, mask, self._path)

    def settle(self, sums: Tensor) -> None:
        """Choose the bounds by the contributions [K, 2] of a whole optimizer step."""
        lower, upper = balanced_bounds(sums, self._path, self._target)
        self._bounds = torch.stack([lower, upper]).float()
        self.surrogate = partial(bapo, lower=lower, upper=upper)

    def metrics(self, count: Tensor) -> dict[str, Tensor]:
        """The present bounds as [sum, count], for a batch of `count` columns."""
        bounds = self._bounds.to(count.device)
        named = zip(("bound/lower", "bound/upper"), bounds)
        return {name: torch.stack([bound * count, count]) for name, bound in named}
