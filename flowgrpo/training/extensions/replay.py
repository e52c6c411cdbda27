"""In groups without a success, past successes of a language model replace failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...core.prompt_memory import Successes
from ...parts.choice import Choice
from ...parts.needs import Need, needs
from ...parts.ranges import Count
from ...parts.traits import saying
from ...rewards.runner import RewardBatch
from ..credit.combining import total_reward
from ..credit.pooling import Batch
from ..text.kept import kept_columns, with_columns
from ..text.text_policy import Completions
from .extension import Extension, once, one_round

SUCCESS = 0.5
Repairs = list[tuple[int, dict[str, Any]]]
"""Rows of failures, each with the success that replaces the failure."""


def _scores_of_wholes(recipe: Any, choice: Choice) -> list[str]:
    return [
        f"extension replay remembers no scores of parts, and {part.kind} {part.short} asks for them; leave one of them "
        "out"
        for part in saying(recipe, "part_scores")
        if recipe.task == "text"
    ]


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
        kept = kept_columns(completions)
        solved = [(prompts[row], _item(kept, scores, row)) for row, r in enumerate(total) if r >= SUCCESS]
        # Each process remembers the successes of all, so the checkpoint of one process holds everything.
        everything = self.processes.gather((solved, len(repairs)))
        for prompt, item in (found for part, _ in everything for found in part):
            self.successes.add(prompt, item)
        self._replayed = sum(count for _, count in everything)
        if not repairs:
            return batch
        return replace(
            batch, experience=_mended(completions, repairs), scores=_mended_scores(scores, repairs)
        )  # fmt: skip

    def record(self) -> dict[str, float]:
        """How many successes were put back."""
        return {"replayed": float(self._replayed)} if self._replayed else {}

    def state_dict(self) -> dict[str, Any]:
        """The successes."""
        return self.successes.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Continue from a state."""
        self.successes.load_state_dict(state)


def _item(kept: Mapping[str, Sequence[Any]], scores: RewardBatch, row: int) -> dict[str, Any]:
    """What is remembered about a success."""
    return {
        **{name: column[row] for name, column in kept.items()},
        "rewards": scores.values[row].tolist(),
        "answers": {reward: column[row] for reward, column in scores.answers.items()},
    }


def _mended(completions: Completions, repairs: Repairs) -> Completions:
    columns = kept_columns(completions)
    for row, item in repairs:
        for name, column in columns.items():
            # A success counts as complete, even if it was cut off after its answer.
            column[row] = True if name == "ended" else item[name]
    return with_columns(completions, columns)


def _mended_scores(scores: RewardBatch, repairs: Repairs) -> RewardBatch:
    """Scores in which each replaced failure has the rewards and answers of the success, and nothing else."""
    values, rows = scores.values.clone(), [row for row, _ in repairs]
    answers = {reward: list(column) for reward, column in scores.answers.items()}
    for row, item in repairs:
        values[row] = torch.tensor(item["rewards"])
        for reward, column in answers.items():
            column[row] = item["answers"].get(reward)
    sub_scores = {
        reward: {name: _blank(column, rows, float("nan")) for name, column in found.items()}
        for reward, found in scores.sub_scores.items()
    }
    notes = {reward: _blank(column, rows, "") for reward, column in scores.notes.items()}
    of_parts = {reward: _blank(column, rows, None) for reward, column in scores.parts.items()}
    return replace(scores, values=values, sub_scores=sub_scores, notes=notes, answers=answers, parts=of_parts)


def _blank(column: Sequence[Any], rows: Sequence[int], value: Any) -> list[Any]:
    return [value if row in rows else old for row, old in enumerate(column)]
