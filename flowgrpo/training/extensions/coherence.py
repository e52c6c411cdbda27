"""A right answer earns a bonus if it follows better from its reasoning than the right answers of its group."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field

from ...core.combination import coherent_rewards
from ...parts.needs import Need, needs, one_round
from ...parts.ranges import Count, Given, Words
from ...text.cutting import cut_completions
from ...weights.averages import Ema
from ..credit.pooling import Batch, Pooled
from ..distributed.processes import Processes
from ..reporting.clock import Clock
from ..text.text_objective import statistics_of
from .extension import Rewards
from .measured import MeasuredByPolicy
from .rules import names_a_reward, once

if TYPE_CHECKING:
    # This imports the libraries of models, and a recipe is read without them.
    pass


@needs(
    once, names_a_reward, one_round("scores the completions of a prompt together"),
    Need("task", ("text",), "asks how likely the tokens of an answer are after the tokens before them, which only a "
         "causal language model tells", mend="leave the extension out"),
)  # fmt: skip
class Coherence(MeasuredByPolicy):
    """Turns a reward for right answers into a bonus for right answers that follow from their reasoning (GRPO-CARE).

    A slow average of the policy's weights says how likely an answer is after its reasoning: the geometric mean of the
    probabilities of the tokens after the last `marker`, the end token included. The score of a right completion stays
    as it is if its likelihood is above the mean of the right completions of its prompt. All other scores become 0 (the
    consistency bonus of GRPO-CARE, 2506.16141). A completion without the marker, or with nothing after it, gets no
    bonus. List the reward twice: once as it is, and once under the label that this extension changes, with the weight
    of the bonus. Metrics and gates have the new score.

    Args:
        reward: Label (or name) of the reward that becomes the bonus.
        marker: Text after which the answer stands.
        at_least: Smallest score of a right completion.
        decay: What the average keeps of itself at each update.
        every: The average is updated once in this many iterations. The first update of all copies the weights if it
            follows the first iteration.
    """

    column, metric = "coherence/likelihood", "coherence"

    def __init__(
        self,
        *,
        reward: str,
        marker: Words = "<answer>",
        at_least: float = 1.0,
        decay: Annotated[float, Field(ge=0, lt=1)] = 0.99,
        every: Count = 1,
        rewards: Given[Rewards],
    ) -> None:
        self.reward, self.marker, self.at_least = rewards.reported(reward), marker, at_least
        self.decay, self.every = decay, every

    def begin(self, task: Any, processes: Processes, clock: Clock) -> None:
        """Take the policy, and begin the average at its weights."""
        super().begin(task, processes, clock)
        self.average = Ema(task.weights, decay=self.decay, every=self.every, rise=1.0)

    def samples_scored(self, batch: Batch) -> Batch:
        """Share the likelihoods of the answers, and replace the scores of the reward."""
        batch = super().samples_scored(batch)
        scores, experience = batch.scores, batch.experience
        found = torch.tensor(batch.columns[self.column], dtype=torch.float64)
        place, values = scores.names.index(self.reward), scores.values.clone()
        counted = found.masked_fill(~experience.outcomes, torch.nan)
        values[:, place] = coherent_rewards(values[:, place], counted, experience.groups, at_least=self.at_least)
        return replace(batch, scores=replace(scores, values=values))

    def measured(self, batch: Batch) -> list[float]:
        """[B] likelihoods of the answers under the average of the weights; NaN for completions without an answer."""
        texts, ids = batch.experience.samples, batch.experience.sampled.ids
        cut = cut_completions(texts, ids, self.policy.language.decode, re.escape(self.marker))
        found = [math.nan] * len(texts)
        with self.average.applied():
            for rows, statistics in statistics_of(self.policy, batch.experience):
                for row, values in zip(rows, statistics.log_probs):
                    last = len(cut.texts[row]) - 1
                    start = cut.ids[row].index(last) if last in cut.ids[row] else len(ids[row])
                    # An answer of white space alone is no part of its own, and leaves the marker in the last part.
                    if last > 0 and self.marker not in cut.texts[row][last] and start < len(ids[row]):
                        found[row] = float(values[start : len(ids[row])].double().mean().exp())
        return found

    def update_done(self, samples: Pooled, record: Mapping[str, Any]) -> None:
        """Move the average, and keep the mean likelihood for the metrics."""
        super().update_done(samples, record)
        self.average.step()

    def state_dict(self) -> dict[str, Any]:
        """The average."""
        return self.average.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Continue from a state."""
        self.average.load_state_dict(state)
