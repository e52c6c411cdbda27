"""Successes of a group, and feedback, as what the policy knows when it teaches itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...parts.choice import Choice
from ...parts.needs import Need, needs, one_round
from ...parts.traits import offers
from ..credit.combining import total_reward
from ..credit.pooling import Batch
from ..data import PromptRow, templated
from ..distributed.processes import Processes
from ..reporting.clock import Clock
from .measured import MeasuredSamples
from .rules import once


def _knows_more(recipe: Any, choice: Choice) -> list[str]:
    template = choice["template"]
    if "{prompt}" in template and ("{solution}" in template or "{feedback}" in template):
        return []
    return [
        f"extension teacher: template is {template!r:.80}, and a teacher sees the prompt and more; write {{prompt}}, "
        "and {solution} or {feedback}"
    ]


@offers("teachers")
@needs(
    once, Need("task", ("text",), "writes contexts of completions"), one_round("changes groups that are complete"),
    Need("rollout.form", ("plain",), "writes contexts of the prompt alone"), _knows_more,
    Need("objective", ("distilled",), "gives completions a teacher, which no other objective uses"),
)  # fmt: skip
class Teacher(MeasuredSamples):
    """Gives completions a context in which the policy is their teacher, for objective `distilled` (SDPO, 2601.20802).

    The context is a template around the prompt. `{solution}` in it is another completion of the group that is a
    success. `{feedback}` is what rewards say about the completion itself, such as a judge's reason. A completion for
    which the template has nothing has no teacher.

    Args:
        template: What the teacher sees; has `{prompt}`, and `{solution}` or `{feedback}`.
        success: Weighted sum of rewards from which a completion is a success.
        failed: Whether only failures have a teacher (SRPO). If not, successes have one too (SDPO).
    """

    column, metric = "teacher/taught", "taught"

    def __init__(self, *, template: str, success: float = 0.5, failed: bool = True) -> None:
        self.template, self.success, self.failed = template, success, failed

    def begin(self, task: Any, processes: Processes, clock: Clock) -> None:
        """Take the model, which turns templates into tokens."""
        self.language = task.policy.language

    def samples_scored(self, batch: Batch) -> Batch:
        """Give the completions of this process their teachers."""
        e = batch.experience
        total, owners = total_reward(batch.scores, e).tolist(), e.prompt_of_sample
        # The sum is NaN where no reward applies: neither a success nor a failure.
        good = [row for row, value in enumerate(total) if value >= self.success]
        notes = ["\n".join(said for column in batch.scores.notes.values() if (said := column[row])) for row in
                 range(len(owners))]  # fmt: skip
        teachers: list[list[int] | None] = []
        for row, value in enumerate(total):
            wanted = value < self.success or (value >= self.success and not self.failed)
            others = [k for k in good if owners[k] == owners[row] and e.sampled.ids[k] != e.sampled.ids[row]]
            solution = e.samples[others[0]] if others else ""
            teachers.append(self._context(batch.rows[owners[row]], solution, notes[row]) if wanted else None)
        batch.columns[self.column] = [float(one is not None) for one in teachers]
        return replace(batch, experience=replace(e, teachers=teachers))

    def _context(self, row: PromptRow, solution: str, feedback: str) -> list[int] | None:
        """Ids of what the teacher sees; None if the template has nothing for a completion."""
        words = {"solution": self.language.words(solution), "feedback": self.language.words(feedback)}
        if not any(words[name] for name in words if f"{{{name}}}" in self.template):
            return None
        known = templated(row, self.template, **words)
        found: list[int] = self.language.encode(known.text, known.messages, known.pictures)
        return found
