"""Successes of a group, feedback and columns of the data, as what the policy knows when it teaches itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...parts.choice import Choice
from ...parts.needs import Need, needs, one_round
from ...parts.traits import checks_prompts, offers
from ..credit.combining import total_reward
from ..credit.pooling import Batch
from ..data import PromptRow, fields_of, templated, told_in
from ..distributed.processes import Processes
from ..reporting.clock import Clock
from .measured import MeasuredSamples
from .rules import once


def _knows_more(recipe: Any, choice: Choice) -> list[str]:
    template = choice["template"]
    if "{prompt}" in template and fields_of(template):
        return []
    return [
        f"extension teacher: template is {template!r:.80}, and a teacher sees the prompt and more; write {{prompt}}, "
        "and {solution}, {feedback}, or a column of the prompts in braces"
    ]


def _matches(recipe: Any, choice: Choice) -> list[str]:
    pattern = choice.get("without")
    if pattern is None:
        return []
    try:
        re.compile(pattern)
    except re.error as error:
        return [f"extension teacher: without is {pattern!r:.80}, which is no regular expression: {error}"]
    if SOLUTION in fields_of(choice["template"]):
        return []
    return ["extension teacher: without shortens solutions, and template has no {solution}; leave without out"]


SOLUTION, FEEDBACK = "solution", "feedback"


def _told_enough(choice: Choice, rows: Sequence[PromptRow]) -> None:
    """Raise ValueError if a training prompt lacks a column of the template, or has nothing for the teacher."""
    names = fields_of(choice["template"])
    columns = [name for name in names if name not in (SOLUTION, FEEDBACK)]
    for row in rows:
        told = [told_in(row, name, "extension teacher") for name in columns]
        if columns == names and not any(told):
            raise ValueError(
                f"extension teacher: {_place(row)} has nothing in {' or '.join(map(repr, columns))}, so the "
                "teacher knows no more than the policy; fill in the column, or leave the prompt out"
            )


@offers("teachers")
@checks_prompts(_told_enough)
@needs(
    once, Need("task", ("text",), "writes contexts of completions"), one_round("changes groups that are complete"),
    Need("rollout.form", ("plain",), "writes contexts of the prompt alone"), _knows_more, _matches,
    Need("objective", ("distilled",), "gives completions a teacher, which no other objective uses"),
)  # fmt: skip
class Teacher(MeasuredSamples):
    """Gives completions a context in which the policy is their teacher, for objective `distilled` (SDPO, 2601.20802).

    The context is a template around the prompt. `{solution}` in it is another completion of the group that is a
    success. `{feedback}` is what rewards say about the completion itself, such as a judge's reason. Another name in
    braces is a column of the prompts, such as a demonstration (SDFT, 2601.19897; OPSD, 2601.18734). A completion for
    which the template has nothing has no teacher.

    Args:
        template: What the teacher sees; has `{prompt}`, and `{solution}`, `{feedback}` or columns.
        success: Weighted sum of rewards from which a completion is a success.
        failed: Whether only failures have a teacher (SRPO). If not, all completions may have one (SDPO).
        without: A regular expression; what it matches is left out of solutions, such as a thought.
    """

    column, metric = "teacher/taught", "taught"

    def __init__(self, *, template: str, success: float = 0.5, failed: bool = True, without: str | None = None) -> None:
        self.template, self.success, self.failed, self.without = template, success, failed, without
        self.names = fields_of(template)

    @staticmethod
    def teaches_all(choice: Choice) -> bool:
        """Whether every completion has a teacher, whatever its rewards are: the template has columns alone."""
        return not choice.get("failed", True) and not {SOLUTION, FEEDBACK}.intersection(fields_of(choice["template"]))

    def begin(self, task: Any, processes: Processes, clock: Clock) -> None:
        """Take the model, which turns templates into tokens."""
        self.language = task.policy.language

    def samples_scored(self, batch: Batch) -> Batch:
        """Give the completions of this process their teachers."""
        e = batch.experience
        total, owners = total_reward(batch.scores, e).tolist(), e.prompt_of_sample
        # The sum is NaN where no reward applies: neither a success nor a failure. It is taught if successes are.
        good = [row for row, value in enumerate(total) if value >= self.success]
        notes = ["\n".join(said for column in batch.scores.notes.values() if (said := column[row])) for row in
                 range(len(owners))]  # fmt: skip
        teachers: list[list[int] | None] = []
        for row, value in enumerate(total):
            wanted = value < self.success or not self.failed
            others = [k for k in good if owners[k] == owners[row] and e.sampled.ids[k] != e.sampled.ids[row]]
            solution = e.samples[others[0]] if others else ""
            if self.without is not None:
                solution = re.sub(self.without, "", solution)
            teachers.append(self._context(batch.rows[owners[row]], solution, notes[row]) if wanted else None)
        batch.columns[self.column] = [float(one is not None) for one in teachers]
        return replace(batch, experience=replace(e, teachers=teachers))

    def _context(self, row: PromptRow, solution: str, feedback: str) -> list[int] | None:
        """Ids of what the teacher sees; None if the template has nothing for a completion."""
        given = {SOLUTION: solution, FEEDBACK: feedback}
        told = {name: given[name] if name in given else told_in(row, name, "extension teacher") for name in self.names}
        words = {name: self.language.words(text) for name, text in told.items()}
        if not any(words.values()):
            return None
        known = templated(row, self.template, **words)
        found: list[int] = self.language.encode(known.text, known.messages, known.pictures)
        return found


def _place(row: PromptRow) -> str:
    return row.place or f"{row.text!r:.80}"
