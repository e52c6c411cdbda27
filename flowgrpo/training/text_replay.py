"""Past successes of a language model in the place of failures, in groups that have nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import gather_object

from ..core.replay import Successes
from ..rewards.runner import RewardBatch
from ..text.parts import Parts
from ..text.sampling import Sampled
from .combining import total_reward
from .data import PromptRow
from .text_policy import Completions

SUCCESS = 0.5


def replay_successes(
    memory: Successes, rows: Sequence[PromptRow], completions: Completions, scores: RewardBatch
) -> tuple[Completions, RewardBatch]:
    """Put a remembered success in the place of one failure of each group without any; remember the new ones.

    The experience replay of ARPO (arXiv 2505.16282). What is put back carries the log-probs it was sampled with, so
    `objective.correction` can weigh it by how much the policy has changed since.

    Args:
        memory: successes by prompt id.
        rows: P prompts.
        completions: of this iteration.
        scores: of them; a success has a weighted sum of rewards of at least 0.5.

    Returns:
        The completions that are learned from, and their scores.
    """
    total = total_reward(scores, completions)
    prompts = [rows[p].id for p in completions.prompt_of_sample]
    repairs = memory.repairs(total.tolist(), prompts, SUCCESS)
    sampled = completions.sampled
    solved: list[tuple[int, dict[str, Any]]] = []
    for row, reward in enumerate(total.tolist()):
        if reward >= SUCCESS:
            item = {
                "ids": list(sampled.ids[row]), "log_probs": list(sampled.log_probs[row]),
                "text": completions.samples[row], "rewards": scores.values[row].tolist(),
                "answers": {reward: column[row] for reward, column in scores.answers.items()},
            }  # fmt: skip
            if completions.parts is not None:
                item["parts"] = [completions.parts.texts[row], completions.parts.ids[row]]
            solved.append((prompts[row], item))
    # Of all ranks, so that every rank remembers the same and a checkpoint of one holds everything.
    for part in gather_object([solved]):
        for prompt, item in part:
            memory.add(prompt, item)
    if not repairs:
        return completions, scores
    ids, log_probs, ended = list(sampled.ids), list(sampled.log_probs), list(sampled.ended)
    texts, values = list(completions.samples), scores.values.clone()
    answers = {reward: list(column) for reward, column in scores.answers.items()}
    for row, item in repairs:
        ids[row], log_probs[row], ended[row] = item["ids"], item["log_probs"], True
        texts[row], values[row] = item["text"], torch.tensor(item["rewards"])
        for reward, column in answers.items():
            column[row] = item.get("answers", {}).get(reward)
    parts = completions.parts
    if parts is not None:
        parts = Parts(list(parts.texts), list(parts.ids))
        for row, item in repairs:
            parts.texts[row], parts.ids[row] = item["parts"]
    repaired = [row for row, _ in repairs]
    sub_scores = {
        reward: {name: _blank(column, repaired, float("nan")) for name, column in found.items()}
        for reward, found in scores.sub_scores.items()
    }
    notes = {reward: _blank(column, repaired, "") for reward, column in scores.notes.items()}
    of_parts = {reward: _blank(column, repaired, None) for reward, column in scores.parts.items()}
    found = replace(
        completions, sampled=Sampled(ids, log_probs, ended), samples=texts, replayed=len(repairs), parts=parts
    )
    return found, replace(
        scores, values=values, sub_scores=sub_scores, notes=notes, answers=answers, parts=of_parts
    )  # fmt: skip


def _blank(column: list, rows: Sequence[int], value: object) -> list:  # type: ignore[type-arg]
    """What was said of a failure does not belong to the success in its place."""
    return [value if row in rows else old for row, old in enumerate(column)]
