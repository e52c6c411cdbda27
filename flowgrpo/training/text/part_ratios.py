"""The parts of completions in a loss of tokens: their ratios, their equal share, and what a surrogate asks of them."""

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


GIVEN = ("units", "entropy", "mean_entropy")
"""What a surrogate of text may ask for: numbers of parts [R, T], entropies [R, T] as sampled, and their mean."""


class PartRatios:
    """What the objective of a recipe asks of the parts of completions.

    Args:
        level: what has a ratio.
        reduce: what the loss is a mean of.
        surrogate: with its options bound; what it asks for it is given for each batch.

    Attributes:
        guided: whether the surrogate asks how uncertain the policy was before the weights moved.

    Raises:
        ValueError: an option of the surrogate is out of range.
    """

    def __init__(self, level: str, reduce: str, surrogate: Callable[..., Tensor]) -> None:
        self._pooled, self._even = level == "part", reduce == "part"
        self._asks = given_names(surrogate.func if isinstance(surrogate, partial) else surrogate)
        self.guided = "entropy" in self._asks or "mean_entropy" in self._asks
        self._entropy: dict[int, Tensor] = {}
        self._mean: Tensor | float = 1.0
        nothing = torch.zeros(1, 1)
        given = {"units": nothing.long(), "entropy": nothing, "mean_entropy": 1.0}
        plain = partial(surrogate, **{name: given[name] for name in self._asks if name in given})
        plain(nothing, torch.ones(1), nothing, torch.ones(1, 1, dtype=torch.bool))

    @property
    def asked(self) -> bool:
        """Whether anything is."""
        return self._pooled or self._even or bool(self._asks)

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
        given: dict[str, Any] = {"units": units, "mean_entropy": self._mean}
        if "entropy" in self._asks:
            given["entropy"] = torch.stack([self._entropy[row] for row in batch])
        made = partial(plain, **{name: given[name] for name in self._asks}) if self._asks else plain
        # A surrogate that is given the parts pools by itself.
        return per_unit(made, units) if self._pooled and "units" not in self._asks else made

    def weight(self, units: Tensor, mask: Tensor) -> Tensor | None:
        """[R, T] weights under which every part counts once; None where the recipe does not ask for that."""
        return unit_weights(units, mask) if self._even else None


def units_of(experience: Completions, batch: Sequence[int], device: torch.device) -> Tensor:
    """[R, T] numbers of the parts of a batch's tokens, 0 in the padding; all 0 where completions are not cut."""
    if experience.parts is None:
        return torch.zeros(len(batch), int(experience.lengths[list(batch)].max()), dtype=torch.long, device=device)
    return right_padded([experience.parts.ids[row] for row in batch], 0, device)[0]
