"""Advantages that remember every prompt over the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...core.trackers import CumulativeStandardiser, ValueTracker
from ...parts.choice import Choice
from ...parts.needs import needs
from ...parts.ranges import Given, NotNegative, Positive
from ...parts.traits import offered, offers
from .conditions import compares_samples
from .scales import Ddof

HALF_LIFE = 0.06
"""Nats of divergence; the value of SPO."""


def _forgets(recipe: Any, choice: Choice) -> list[str]:
    """A need of `half_life`: something measures the divergence."""
    if choice["half_life"] is None or offered(recipe, "divergence"):
        return []
    return [
        "advantage.half_life counts the divergence that extension visits measures; add visits to extensions, or leave "
        "advantage.half_life out"
    ]


@offers("memory")
@needs(compares_samples, _forgets)
class Tracked:
    """The baseline of a sample is the running success rate of its prompt (SPO, arXiv 2509.13232).

    Args:
        prior: success rate of a prompt that was not seen before, between 0 and 1.
        half_life: nats of divergence that halve what is remembered, 0.06 if left out. Extension `visits` measures the
            divergence.
        low: smallest share of the past that is kept, at least 0.
        high: largest share of the past that is kept, below 1.
        eps: added to the standard deviation over the batch.
        ddof: 1 for the sample standard deviation, 0 for the population one.

    Raises:
        ValueError: a number out of range.
    """

    def __init__(
        self,
        *,
        prior: float = 0.5,
        half_life: Positive | None = None,
        low: NotNegative = 0.875,
        high: NotNegative = 0.96,
        eps: NotNegative = 1e-4,
        ddof: Ddof = 1,
    ) -> None:
        self._tracker = ValueTracker(prior=prior, half_life=half_life or HALF_LIFE, low=low, high=high)
        self._eps, self._ddof = eps, ddof

    def __call__(
        self, rewards: Tensor, groups: Tensor, *, prompts: Given[Sequence[int]], divergence: Given[Tensor | None]
    ) -> Tensor:
        """[B] advantages. The call remembers the rewards, so call it once per iteration."""
        moved = None if divergence is None else divergence.nan_to_num(0.0)
        return self._tracker.advantages(rewards, prompts, moved, eps=self._eps, ddof=self._ddof)

    def state_dict(self) -> dict[str, Tensor]:
        """What is remembered."""
        return self._tracker.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what was remembered."""
        self._tracker.load_state_dict(state)


@offers("memory")
@needs(compares_samples)
class Cumulative:
    """A sample is compared with all samples of its prompt so far (smooth standardisation of DCPO, arXiv 2509.02333).

    Args:
        eps: added to standard deviations.
        ddof: 1 for the sample standard deviation, 0 for the population one.
    """

    def __init__(self, *, eps: NotNegative = 1e-4, ddof: Ddof = 1) -> None:
        self._standardiser = CumulativeStandardiser(eps=eps, ddof=ddof)

    def __call__(self, rewards: Tensor, groups: Tensor, *, prompts: Given[Sequence[int]]) -> Tensor:
        """[B] advantages. The call remembers the rewards, so call it once per iteration."""
        return self._standardiser.advantages(rewards, prompts)

    def state_dict(self) -> dict[str, Tensor]:
        """What is remembered."""
        return self._standardiser.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what was remembered."""
        self._standardiser.load_state_dict(state)
