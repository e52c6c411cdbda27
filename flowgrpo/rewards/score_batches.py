"""The scores of some samples by several rewards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class RewardBatch:
    """Scores of B samples by K rewards.

    Attributes:
        values: [B, K] float32 on the CPU; NaN where a reward does not apply.
        names: K names.
        weights: [K] float32.
        sub_scores: reward -> name -> [B] floats, for rewards that have sub-scores.
        notes: reward -> [B] strings, for rewards that write notes.
        seconds: reward -> time spent, retries included.
        answers: reward -> [B] strings, what the reward read in each sample, or None if it read nothing; for rewards
            that give answers.
        parts: reward -> [B] lists, the scores of the parts of each completion, or None; for rewards that score parts.
        rendered: reward, or `REWARD / NAME` -> [B] lists of the images that the reward made of a completion, uint8
            [3, H, W] or [F, 3, H, W] on the CPU; or None. See `Scores` and `RewardSet.keeps_rendered`.
    """

    values: Tensor
    names: tuple[str, ...]
    weights: Tensor
    sub_scores: dict[str, dict[str, list[float]]]
    notes: dict[str, list[str]]
    seconds: dict[str, float]
    answers: dict[str, list[str | None]] = field(default_factory=dict)
    parts: dict[str, list[list[float] | None]] = field(default_factory=dict)
    rendered: dict[str, list[list[Tensor] | None]] = field(default_factory=dict)

    def counted(self) -> RewardBatch:
        """Return the batch without the columns of rewards of weight 0. These rewards are only recorded."""
        counts = self.weights != 0
        names = tuple(name for name, own in zip(self.names, counts.tolist()) if own)
        return replace(self, values=self.values[:, counts], names=names, weights=self.weights[counts])

    def taken(self, rows: Sequence[int]) -> RewardBatch:
        """Return the scores of some samples, in a given order."""

        def column(values: Sequence[Any]) -> list[Any]:
            return [values[row] for row in rows]

        subs = {name: {key: column(values) for key, values in found.items()} for name, found in self.sub_scores.items()}
        kinds: dict[str, Any] = {
            kind: {name: column(values) for name, values in getattr(self, kind).items()}
            for kind in ("notes", "answers", "parts", "rendered")
        }
        return replace(self, values=self.values[list(rows)], sub_scores=subs, **kinds)

    def record(self, row: int) -> dict[str, Any]:
        """Return the record of one sample for JSON: `rewards`, `sub_scores`, `notes`, and `parts` if they were scored.

        NaN becomes None.
        """

        def plain(value: float) -> float | None:
            return None if math.isnan(value) else value

        parts = {
            name: [plain(score) for score in own]
            for name, column in self.parts.items()
            if (own := column[row]) is not None
        }
        return {
            "rewards": {name: plain(self.values[row, k].item()) for k, name in enumerate(self.names)},
            "sub_scores": {
                name: {key: plain(column[row]) for key, column in subs.items()}
                for name, subs in self.sub_scores.items()
            },
            "notes": {name: notes[row] for name, notes in self.notes.items() if notes[row]},
            **({"parts": parts} if parts else {}),
        }


def join_scores(parts: Sequence[RewardBatch]) -> RewardBatch:
    """The scores of several calls of the same rewards, one after another."""
    first, sizes = parts[0], [len(part.values) for part in parts]

    def column(of: Callable[[RewardBatch], Any], missing: Any) -> list[Any]:
        return [value for part, size in zip(parts, sizes) for value in of(part) or [missing] * size]

    subs = {(reward, name): None for part in parts for reward, found in part.sub_scores.items() for name in found}
    sub_scores: dict[str, dict[str, list[float]]] = {}
    for reward, name in subs:
        read = partial(_sub_score, reward=reward, name=name)
        sub_scores.setdefault(reward, {})[name] = column(read, float("nan"))
    noted = dict.fromkeys(reward for part in parts for reward in part.notes)
    notes = {reward: column(partial(_said, kind="notes", reward=reward), "") for reward in noted}
    answered = dict.fromkeys(reward for part in parts for reward in part.answers)
    answers = {reward: column(partial(_said, kind="answers", reward=reward), None) for reward in answered}
    cut = dict.fromkeys(reward for part in parts for reward in part.parts)
    of_parts = {reward: column(partial(_said, kind="parts", reward=reward), None) for reward in cut}
    made = dict.fromkeys(label for part in parts for label in part.rendered)
    rendered = {label: column(partial(_said, kind="rendered", reward=label), None) for label in made}
    seconds = {name: sum(part.seconds[name] for part in parts) for name in first.seconds}
    values = torch.cat([part.values for part in parts])
    return replace(
        first, values=values, sub_scores=sub_scores, notes=notes, answers=answers, parts=of_parts, rendered=rendered,
        seconds=seconds,
    )  # fmt: skip


def _sub_score(part: RewardBatch, reward: str, name: str) -> list[float] | None:
    return part.sub_scores.get(reward, {}).get(name)


def _said(part: RewardBatch, kind: str, reward: str) -> list[Any] | None:
    found: list[Any] | None = getattr(part, kind).get(reward)
    return found
