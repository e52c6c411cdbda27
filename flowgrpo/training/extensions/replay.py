"""In groups without a success, past successes of a language model replace failures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...core.prompt_memory import Successes
from ...parts.choice import Choice
from ...parts.needs import Need, needs, one_round
from ...parts.ranges import Count
from ...parts.traits import offers, saying
from ..credit.combining import total_reward
from ..credit.pooling import Batch
from ..text.kept import joined, packed
from .extension import Extension
from .rules import once

SUCCESS = 0.5


def _scores_of_wholes(recipe: Any, choice: Choice) -> list[str]:
    return [
        f"extension replay remembers no scores of parts, and {part.kind} {part.short} asks for them; leave one of them "
        "out"
        for part in saying(recipe, "part_scores")
        if recipe.task == "text"
    ]


@offers("memory")
@needs(
    once, Need("task", ("text",), "puts back completions"), one_round("changes groups that are complete"),
    _scores_of_wholes, Need("rollout.form", ("plain",), "puts back completions of the prompt alone"),
)  # fmt: skip
class Replay(Extension):
    """Replaces one failure of each group without a success by a remembered success, and remembers new successes.

    This is the experience replay of ARPO (arXiv 2505.16282). A success has a weighted sum of rewards of at least 0.5.
    A success that is put back has the log-probs with which it was sampled. So a correction of the objective can weight
    it by how much the policy has changed since then.

    Args:
        keep: How many successes of a prompt are remembered; the latest are kept.
    """

    def __init__(self, *, keep: Count = 4) -> None:
        self.successes = Successes(keep)
        self._replayed = 0

    def samples_scored(self, batch: Batch) -> Batch:
        """Put successes back, and remember the new ones."""
        completions, scores = batch.experience, batch.scores
        total = total_reward(scores, completions).tolist()
        prompts = [batch.rows[p].id for p in completions.prompt_of_sample]
        repairs = self.successes.repairs(total, prompts, SUCCESS)
        # A success brings its rewards and answers. Notes and sub-scores would only make checkpoints larger.
        bare = replace(scores, sub_scores={}, notes={}, parts={})
        # A success counts as complete, even if it was cut off after its answer.
        solved = [
            (prompts[row], packed(completions, bare, [row]) | {"ended": [True]})
            for row, reward in enumerate(total)
            if reward >= SUCCESS
        ]
        # Each process remembers the successes of all, so the checkpoint of one process holds everything.
        everything = self.processes.gather((solved, len(repairs)))
        for prompt, item in (found for part, _ in everything for found in part):
            self.successes.add(prompt, item)
        self._replayed = sum(count for _, count in everything)
        if not repairs:
            return batch
        order = list(range(len(total)))
        for place, (row, _) in enumerate(repairs, start=len(total)):
            order[row] = place
        experience, scores = joined(completions, scores, [item for _, item in repairs], order)
        return replace(batch, experience=experience, scores=scores)

    def record(self) -> dict[str, float]:
        """How many successes were put back."""
        return {"replayed": float(self._replayed)} if self._replayed else {}

    def state_dict(self) -> dict[str, Any]:
        """The successes."""
        return self.successes.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Continue from a state."""
        self.successes.load_state_dict(state)
