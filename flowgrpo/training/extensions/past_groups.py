"""Groups of earlier iterations that are trained again, beside the groups of the iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...core.addressing import address
from ...parts.choice import Choice
from ...parts.needs import Need, alone, needs, one_round
from ...parts.ranges import Count, Fraction, Given
from ...pipelines.pictures import Picture
from ..credit.pooling import Batch
from ..data import PromptRow
from ..distributed.processes import Processes
from ..reporting.clock import Clock
from ..text.kept import Packed, joined, packed
from .extension import Extension
from .rules import once

DRAWS = 15
"""The part of an address that says: this draws the groups that come back."""


def _first(recipe: Any, choice: Choice) -> list[str]:
    fault = f"extension {choice.short} adds samples, and other extensions have to see them; write it first"
    return [] if recipe.extensions[0].name == choice.name else [fault]


@needs(
    once, _first, alone("memory", "brings groups back"), one_round("adds groups"),
    Need("task", ("text",), "keeps the tokens of completions"),
    Need("rollout.form", ("plain",), "keeps completions of the prompt alone"),
    Need("optimizer.updates", (1,), "adds groups to one optimizer step", mend="use optimizer.epochs for more steps"),
    Need("objective.correction", ("truncate", "mask"), "brings back completions of older policies, which are weighted "
         "by the ratio of the policies"),
)  # fmt: skip
class PastGroups(Extension):
    """Groups of earlier iterations come back beside the new ones (mixed policies of ReMix, arXiv 2507.06892).

    A group that comes back has the log-probs and the rewards of the time when it was sampled. Let pi_i be the policy
    that sampled it, and pi_k the policy before the update. `objective.correction` gives each token the weight
    pi_k / pi_i, up to its cap, and the surrogate bounds pi / pi_k. Metrics and saved samples have the old groups too.

    Args:
        share: Of the groups of an iteration that come back later, in addition to the new groups.
        keep: How many past iterations are remembered.
        until: The iteration from which on no group comes back, and the run is on-policy; never if left out.
    """

    remembers = ("past",)

    def __init__(
        self, *, share: Fraction = 0.5, keep: Count = 1, until: Count | None = None, recipe: Given[Any]
    ) -> None:  # fmt: skip
        self.share, self.keep, self.until = share, keep, until
        self._seed, self._prompts = recipe.run.seed, recipe.rollout.prompts
        self.past: dict[int, list[Packed]] = {}
        self._mixed = 0

    def begin(self, task: Any, processes: Processes, clock: Clock) -> None:
        """Take the policy, which reads the pictures of past prompts again."""
        super().begin(task, processes, clock)
        self._task = task

    def samples_scored(self, batch: Batch) -> Batch:
        """Add past groups, and remember the new ones."""
        past = [group for groups in self.past.values() for group in groups]
        order = torch.Generator().manual_seed(address(self._seed, DRAWS, self.iteration))
        ends = self.until is not None and self.iteration >= self.until
        count = 0 if ends else min(round(self.share * self._prompts), len(past))
        drawn = [past[k] for k in torch.randperm(len(past), generator=order).tolist()[:count]]
        self._mixed = len(drawn)
        # Each process remembers the groups of all.
        fresh, _ = self.processes.pool(_groups(batch, self.iteration), batch.places)
        self.past = {k: groups for k, groups in self.past.items() if k > self.iteration - self.keep}
        self.past[self.iteration] = fresh
        # Each process adds the groups of its own places, so no group comes back twice.
        mine = [group for group in drawn if group["place"] in batch.places]
        return self._joined(batch, mine) if mine else batch

    def _joined(self, batch: Batch, past: Sequence[Packed]) -> Batch:
        """A batch with past groups at its end. Their places are above all others, and differ by iteration."""
        e, rows = batch.experience, [(k, group) for k, group in enumerate(past) for _ in group["text"]]
        asked = [_row(group) for group in past]
        experience, scores = joined(
            e, batch.scores, past,
            prompts=[*e.prompts, *(self._ids(row, group) for row, group in zip(asked, past))],
            prompt_of_sample=[*e.prompt_of_sample, *(len(e.prompts) + k for k, _ in rows)],
            told=[{} for _ in e.samples] + [{"sampled_at": group["iteration"]} for _, group in rows],
            # The rewards have scored all of them, each group with the keys of its own iteration.
            keys=(),
        )  # fmt: skip
        return replace(
            batch, experience=experience, scores=scores, rows=[*batch.rows, *asked],
            places=[*batch.places, *(self._prompts * (group["iteration"] + 1) + group["place"] for group in past)],
        )  # fmt: skip

    def _ids(self, row: PromptRow, group: Packed) -> list[int]:
        if row.pictures is None:
            return list(group["prompt"])
        found: list[int] = self._task.policy.language.encode(row.text, row.messages, row.pictures)
        return found

    def record(self) -> dict[str, float]:
        """How many groups came back."""
        return {"past_groups": float(self._mixed)}


def _groups(batch: Batch, iteration: int) -> list[Packed]:
    """The groups of a batch in the order of its prompts, each with its prompt."""
    e, found = batch.experience, []
    for p, (place, row) in enumerate(zip(batch.places, batch.rows)):
        rows = [k for k, owner in enumerate(e.prompt_of_sample) if owner == p]
        about: Packed = {"row": [row.id, row.text, dict(row.columns), row.messages], "prompt": list(e.prompts[p])}
        if row.pictures is not None:
            # A checkpoint has the paths. Pictures are read again when they come back.
            about |= {"pictures": [str(one.path) for one in row.shown], "read_from": row.place}
        found.append({"place": place, "iteration": iteration, **about, **packed(e, batch.scores, rows)})
    return found


def _row(group: Packed) -> PromptRow:
    shown = tuple(Picture(Path(path), group["read_from"]) for path in group.get("pictures", ()))
    number, text, columns, messages = group["row"]
    return PromptRow(number, text, columns, messages, shown or None)
