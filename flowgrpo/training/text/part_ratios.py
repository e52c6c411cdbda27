"""The parts of completions in a loss of tokens: their ratios, their equal weight, and what a surrogate asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...core.advantages import as_precise
from ...core.pooled_ratios import per_unit, unit_weights
from ...parts.choice import given_names
from ...text.scoring import right_padded

if TYPE_CHECKING:
    from .text_policy import Completions


GIVEN = ("units", "entropy", "mean_entropy", "curvature")
"""What a surrogate of text may ask for: numbers of parts [R, T], entropies [R, T] when sampled, their mean, and the
curvature [R, T] of the log-likelihood of each token along its own gradient, see `core.categorical.own_curvature`."""


class PartRatios:
    """The objective's use of the parts of completions.

    Args:
        level: what has a ratio.
        reduce: what the loss is a mean of.
        surrogate: with its options bound. It gets the other values that it asks for with each batch.

    Attributes:
        guided: whether the surrogate asks for the entropy of the policy before the weights moved.
        curved: whether the surrogate asks for the curvature of the policy as it is.

    Raises:
        ValueError: an option of the surrogate is out of range.
    """

    def __init__(self, level: str, reduce: str, surrogate: Callable[..., Tensor]) -> None:
        self._pooled, self._even = level == "part", reduce == "part"
        self._asks = given_names(surrogate.func if isinstance(surrogate, partial) else surrogate)
        self.guided = "entropy" in self._asks or "mean_entropy" in self._asks
        self.curved = "curvature" in self._asks
        self._entropy: dict[int, Tensor] = {}
        self._mean: Tensor | float = 1.0
        nothing = torch.zeros(1, 1)
        given = {"units": nothing.long(), "entropy": nothing, "mean_entropy": 1.0, "curvature": nothing}
        plain = partial(surrogate, **{name: given[name] for name in self._asks if name in given})
        plain(nothing, torch.ones(1), nothing, torch.ones(1, 1, dtype=torch.bool))

    @property
    def asked(self) -> bool:
        """Whether the objective uses parts at all."""
        return self._pooled or self._even or bool(self._asks)

    def forget(self) -> None:
        """Forget the entropies of the last rollout."""
        self._entropy = {}

    def remember(self, rows: Sequence[int], entropy: Tensor | None) -> None:
        """Keep the entropies [R, T] of some completions under the policy that sampled, 0 in the padding."""
        if entropy is not None:
            self._entropy |= dict(zip(rows, entropy))

    def entropies(self, experience: Completions, rows: Sequence[int], device: torch.device) -> Tensor:
        """[2] the sum of the entropies of the tokens that the policy drew in some completions, and their number.

        Args:
            experience: all completions.
            rows: the chosen completions; may be empty.
            device: of the result.
        """
        total = as_precise(torch.zeros(2, device=device))
        for row in rows:
            own = experience.trained([row])[0].to(device)
            total[0] += as_precise(self._entropy[row].to(device)[: len(own)])[own].sum()
            total[1] += own.sum()
        return total

    def settle(self, sums: Tensor) -> None:
        """Take the mean entropy of an optimizer step from the sums of `entropies`."""
        self._mean = sums[0] / sums[1].clamp(min=1)

    def surrogate(
        self, plain: Callable[..., Tensor], units: Tensor, batch: Sequence[int], curvature: Tensor | None = None
    ) -> Callable[..., Tensor]:
        """The surrogate of a batch.

        Args:
            plain: the surrogate of tokens.
            units: [R, T], see `units_of`.
            batch: R rows of the rollout.
            curvature: [R, T]; needed only if the surrogate asks for it.
        """
        given: dict[str, Any] = {"units": units, "mean_entropy": self._mean, "curvature": curvature}
        if "entropy" in self._asks:
            given["entropy"] = torch.stack([self._entropy[row] for row in batch])
        made = partial(plain, **{name: given[name] for name in self._asks}) if self._asks else plain
        # A surrogate that gets the parts pools by itself.
        return per_unit(made, units) if self._pooled and "units" not in self._asks else made

    def weight(self, units: Tensor, mask: Tensor) -> Tensor | None:
        """[R, T] weights with which every part counts once; None if the recipe does not ask for them."""
        return unit_weights(units, mask) if self._even else None


def units_of(experience: Completions, batch: Sequence[int], device: torch.device) -> Tensor:
    """[R, T] the number of the part of each token, 0 in the padding; all 0 if completions are not cut."""
    if experience.parts is None:
        return torch.zeros(len(batch), int(experience.lengths[list(batch)].max()), dtype=torch.long, device=device)
    return right_padded([experience.parts.ids[row] for row in batch], 0, device)[0]
