"""A guard watches a reward that is measured and not optimised, and warns or stops the run when the reward falls.

A run over-optimises if the optimised reward rises while other rewards fall (Gao et al., "Scaling Laws for Reward Model
Overoptimization", arXiv 2210.10760).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Literal

from ...configs.reading_soundness import reward_place
from ...configs.run_recipes import measure
from ...parts.needs import SOMETHING, Need, needs
from ...parts.ranges import Count, Given, NotNegative
from ..reporting.reporter import Alarm
from .extension import Evaluation, Extension, Rewards


@needs(Need("data.heldout", (SOMETHING,), "watches evaluations"))
class Guard(Extension):
    """Watches an evaluation reward that is not optimised; if the reward falls, the run over-optimises.

    An alarm is given once, when the patience runs out. It is given again only after the reward has recovered. A reward
    that applied to no sample has no mean, and has not fallen. If a run goes on with evaluations that measure something
    else, such as more steps, the guard begins anew.

    Args:
        reward: Label (or name) of an evaluation reward.
        fall: The reward has fallen if its mean is more than this below the reference.
        reference: What the mean is compared with: the first evaluations, or the best so far.
        settle: Number of first evaluations that count as the start.
        smooth: How many of the latest evaluations are averaged before the comparison.
        patience: How many evaluations in a row must be low before an alarm.
        action: `warn` prints the alarm. `stop` also ends the run and saves its results.
    """

    remembers = ("first", "latest", "best", "low", "measured")

    def __init__(
        self,
        *,
        reward: str,
        fall: NotNegative,
        reference: Literal["start", "best"] = "start",
        settle: Count = 1,
        smooth: Count = 1,
        patience: Count = 1,
        action: Literal["warn", "stop"] = "warn",
        recipe: Given[Any],
        rewards: Given[Rewards],
        evaluated: Given[Sequence[str]],
    ) -> None:
        measured = recipe.rewards if recipe.evaluate.rewards is None else recipe.evaluate.rewards
        place = reward_place(measured, reward)
        self.reward = reward if place is None else evaluated[place]
        if self.reward not in evaluated:
            raise ValueError(f"it watches {reward!r}, which is not measured; name one of {', '.join(evaluated)}")
        weights = {name: entry.weight for name, entry in zip(rewards.names, rewards.entries)}
        if weights.get(self.reward):
            raise ValueError(f"it watches {self.reward!r}, which is optimised; set its weight to 0")
        self.fall, self.reference, self.action = fall, reference, action
        self.settle, self.smooth, self.patience = settle, smooth, patience
        self.measured = json.dumps(measure(recipe.evaluate.model_dump(mode="json")), sort_keys=True)
        self._begin_anew()

    def _begin_anew(self) -> None:
        # The first measurements, the latest, the best smoothed mean, and how many in a row were low.
        self.first: list[float] = []
        self.latest: list[float] = []
        self.best = -math.inf
        self.low = 0

    def load_state_dict(self, state: Any) -> None:
        """Continue from a state, unless other evaluations gave its numbers."""
        now = self.measured
        # A state of an earlier version does not say what was measured, or lacks a setting.
        super().load_state_dict({"measured": now, **state})
        if measure(json.loads(self.measured)) != json.loads(now):
            self._begin_anew()
        self.measured = now

    def evaluation_done(self, evaluation: Evaluation) -> None:
        """Give an alarm if the reward has fallen."""
        value = evaluation.means.get(self.reward)
        if value is None or not math.isfinite(value):
            return
        self.latest.append(value)
        del self.latest[: -self.smooth]
        smoothed = math.fsum(self.latest) / len(self.latest)
        if len(self.first) < self.settle:
            self.first.append(value)
            self.best = max(self.best, smoothed)
            return
        reference = math.fsum(self.first) / len(self.first) if self.reference == "start" else self.best
        self.best = max(self.best, smoothed)
        self.low = self.low + 1 if smoothed < reference - self.fall else 0
        if self.low == self.patience:
            since = "its best" if self.reference == "best" else "the start"
            said = (
                f"guard: {self.reward} fell to {smoothed:.4g} at iteration {evaluation.iteration}, from "
                f"{reference:.4g} at {since}; that is more than {self.fall:g}"
            )
            evaluation.alarms.append(Alarm(said, f"guard/{self.reward}", self.action == "stop"))
