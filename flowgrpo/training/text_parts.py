"""The parts of completions in a loss of tokens: their ratios, their equal share of it, and SSPO's clip."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..configs.schema import TextObjectiveConfig
from ..core.advantages import as_precise
from ..core.registry import PART_SURROGATES
from ..core.units import per_unit, unit_weights
from .part_credit import padded
from .text_policy import Completions


class PartRatios:
    """What the objective of a recipe asks of the parts of completions.

    Args:
        objective: of the recipe.
        surrogate: its surrogate, hyper-parameters bound.

    Attributes:
        guided: whether the surrogate asks how uncertain the parts were before the weights moved.

    Raises:
        ValueError: a hyper-parameter of such a surrogate is out of range.
    """

    def __init__(self, objective: TextObjectiveConfig, surrogate: Callable[..., Tensor]) -> None:
        self._pooled, self._even = objective.level == "part", objective.reduce == "part"
        self._make = surrogate
        self.guided = objective.surrogate in PART_SURROGATES
        self._entropy: dict[int, Tensor] = {}
        self._mean: Tensor | float = 1.0
        if self.guided:
            surrogate(torch.zeros(1, 1), torch.zeros(1, 1), self._mean)

    @property
    def asked(self) -> bool:
        """Whether anything is."""
        return self._pooled or self._even

    def forget(self) -> None:
        """Begin with another rollout."""
        self._entropy = {}

    def remember(self, rows: Sequence[int], entropy: Tensor | None) -> None:
        """Keep the entropies [R, T] of some completions, 0 in the padding, by the policy that sampled."""
        if entropy is not None:
            self._entropy |= dict(zip(rows, entropy))

    def entropies(self, lengths: Tensor, rows: Sequence[int], device: torch.device) -> Tensor:
        """[2] sum and number of the entropies of the tokens of some completions.

        Args:
            lengths: [B] of all completions.
            rows: which of them; may be none.
            device: of the result.
        """
        total = as_precise(torch.zeros(2, device=device))
        for row in rows:
            total[0] += as_precise(self._entropy[row]).sum()
        total[1] = lengths[list(rows)].sum()
        return total

    def settle(self, sums: Tensor) -> None:
        """Take what `entropies` adds up to over an optimizer step as that to which a part's is compared."""
        self._mean = sums[0] / sums[1].clamp(min=1)

    def surrogate(self, plain: Callable[..., Tensor], units: Tensor, batch: Sequence[int]) -> Callable[..., Tensor]:
        """The surrogate of a batch.

        Args:
            plain: that of tokens.
            units: [R, T], see `units_of`.
            batch: R rows of the rollout.
        """
        if self.guided:
            entropy = torch.stack([self._entropy[row] for row in batch])
            made: Callable[..., Tensor] = self._make(units, entropy, self._mean)
            return made
        return per_unit(plain, units) if self._pooled else plain

    def weight(self, units: Tensor, mask: Tensor) -> Tensor | None:
        """[R, T] weights under which every part counts once; None where the recipe does not ask for that."""
        return unit_weights(units, mask) if self._even else None


def units_of(experience: Completions, batch: Sequence[int], device: torch.device) -> Tensor:
    """[R, T] numbers of the parts of a batch's tokens, 0 in the padding."""
    assert experience.parts is not None
    rows = [experience.parts.ids[row] for row in batch]
    return padded(rows, max(len(row) for row in rows), 0).to(device)
