"""A verifier of what was done step by step: each step is judged by itself, then the outcome, and the two are joined.

The Art of Building Verifiers for Computer Use Agents: criteria that do not overlap, process and outcome apart,
screenshots one by one, and failures that could not be avoided told from those that could.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..options import check_share, weighted
from ..scores import Scores
from .judge_answers import Unreadable, read_fields
from .judge_client import JudgeReply, Question
from .judge_rubric import Case, CriteriaJudge, Criterion, QuestionForm, read_criteria, read_verdict_list, weighted_share
from .judge_steps import Step, showing, steps_of
from .served_judge import Reading, scores_of

SUB_SCORES = ("outcome", "process", "uncontrollable")
FAILURES = ("none", "controllable", "uncontrollable")
_STEP = (
    "Judge this step alone, and not what came of it. Say in one sentence what the step shows. Say whether something "
    "failed in it: none; controllable, if whoever did the task could have avoided it; uncontrollable, if nobody doing "
    "the task could. Then say of each criterion whether this step meets it.\n{criteria}\nAnswer with a JSON object and "
    'nothing else: {"shows": "one sentence", "failure": "none", "verdicts": [{"number": 1, "met": true, "reason": "one '
    'sentence"}]}'
)
_OUTCOME = "Judge the outcome alone, however it came about. "


class Verifier(CriteriaJudge):
    """Outcome and process of a sample that consists of steps, judged apart by a served model.

    The steps are the frames of a video (screenshots, for an agent), or the parts into which the recipe cuts
    completions. Each step is judged in a question of its own, by the criteria of `process`. A step with an
    uncontrollable failure does not count. The outcome is judged by the criteria of `outcome`, from the last step and
    from what the judge said that each step shows. With P the mean over the steps that count and O the outcome, each a
    weighted share of criteria as for `rubric`, the score is

        share·O + (1 - share)·P

    and O alone if no step counts. A sample has no score if the judge leaves a criterion undecided.

    Args:
        server: {url, model, ...}; see `JudgeServer`. Its `frames` are the largest number of frames that are judged.
        process: texts, or {text, weight, name}, on each step.
        outcome: texts, or {text, weight, name}, on the end. No criterion may be in both lists.
        share: weight of the outcome, above 0 and at most 1.
        system: the system message for the model.

    Raises:
        ValueError: an option is wrong, or the environment variable of the key is not set.
    """

    name = "verifier"

    def __init__(
        self,
        server: Mapping[str, Any],
        process: Sequence[Any],
        outcome: Sequence[Any],
        *,
        share: float = 0.5,
        system: str = "",
    ) -> None:
        check_share(self.name, "share", share, "the weight of the outcome")
        super().__init__(server, outcome, "together", system, ("prompts",), "outcome")
        self.process, self.share = read_criteria(process, f"{self.name}: the option `process`"), float(share)
        check_lists({"process": self.process, "outcome": self.criteria})

    def __call__(
        self,
        prompts: Sequence[str],
        images: Tensor | None = None,
        completions: Sequence[str] | None = None,
        parts: Sequence[Sequence[str]] | None = None,
        **columns: Any,
    ) -> Scores:
        """Judge all steps of B samples, then their outcomes.

        Args:
            prompts: B strings, the tasks.
            images: videos [B, F, 3, H, W] in [0, 1]; an image [B, 3, H, W] is one step.
            completions: B strings, instead of images.
            parts: B lists of the steps of the completions; a completion that is not cut is one step.
            columns: not used.

        Returns:
            Scores with B values in [0, 1], NaN without a score. Sub-scores `outcome` and `process`, in [0, 1], and
            `uncontrollable`, the share of steps with such a failure. Notes: a line for each step, and the outcome.
            For completions that are cut, `parts` are the scores of the steps, NaN for a step that does not count.

        Raises:
            InvalidScores: there are 8 samples or more, and none has a score.
            ServerError: the server could not be asked.
        """
        steps = steps_of(images, completions, parts, self.client.server.frames)
        processes = self.judged_steps([self.process] * len(steps), prompts, steps, QuestionForm(_STEP, read_step))
        ends = [
            Case(about_outcome(prompt, own[-1], process), [] if process.missing else self.criteria, process.note)
            for prompt, own, process in zip(prompts, steps, processes)
        ]
        found = [joined(process, outcome, self.share) for process, outcome in zip(processes, self.judged(ends))]
        return scores_of(self.name, found, SUB_SCORES, parts=images is None and parts is not None)


def read_step(criteria: Sequence[Criterion], answer: JudgeReply) -> Reading:
    """Return the score of a step. Its note begins with the failure, and its answer is what the step shows.

    A step with an uncontrollable failure has nothing to judge.

    Raises:
        Unreadable: the answer names no failure, or leaves a criterion undecided.
    """
    given = read_fields(answer)
    failure, shows = given.get("failure"), str(given.get("shows") or "")[:200]
    if failure not in FAILURES:
        raise Unreadable(f"`failure` is none of {', '.join(FAILURES)}")
    value = weighted_share(criteria, read_verdict_list(given.get("verdicts"), len(criteria)))
    counts = failure != "uncontrollable"
    return Reading(value if counts else math.nan, f"{failure}: {shows}", answer=shows, judged=counts)


def about_outcome(prompt: str, last: Step, process: Reading) -> Question:
    """Return what a judge sees of the outcome: the last step, and in words what each step shows."""
    shown = "\n".join(f"Step {number}: {one.answer}" for number, one in enumerate(process.each, start=1))
    before = f"What the steps show, as each was judged:\n{shown}\n----\n"
    return showing(prompt, before, "The last step", last, _OUTCOME)


def joined(process: Reading, outcome: Reading, share: float) -> Reading:
    """Return the score of a sample.

    Args:
        process: the mean of its steps; nothing was judged if all have uncontrollable failures.
        outcome: of the sample. If it is missing, so is the score.
        share: weight of the outcome.
    """
    if outcome.missing:
        return outcome
    parts = {"outcome": outcome.value, "process": process.value}
    lost = sum(not one.judged for one in process.each) / len(process.each)
    note = f"{process.note}\noutcome: {outcome.value:.2f}, {outcome.note}"
    value = weighted({"outcome": share, "process": 1 - share}, parts)
    return Reading(value, note, {**parts, "uncontrollable": lost}, each=process.each)


def check_lists(lists: Mapping[str, Sequence[Criterion]]) -> None:
    """Refuse criteria of steps and of outcomes that overlap.

    Raises:
        ValueError: a list is empty, or a criterion is in both.
    """
    for name, found in lists.items():
        if not found:
            raise ValueError(f"verifier: {name} is empty; give criteria, such as ['The step follows from the task.']")
    first, second = ({one.text.casefold() for one in found} for found in lists.values())
    if both := first & second:
        raise ValueError(
            f"verifier: {min(both)!r:.80} is in `process` and in `outcome`, and would count twice; leave one out"
        )
