"""A verifier of what was done step by step: each step is judged by itself, then the outcome, and the two are joined.

The Art of Building Verifiers for Computer Use Agents: criteria that do not overlap, process and outcome apart,
screenshots one by one, and failures that could not be avoided told from those that could.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..options import check_share
from ..scores import Scores
from .judge_answers import Unreadable, note_of, read_fields, read_object, readable
from .judge_client import JudgeReply, Question
from .judge_images import frames_of
from .judge_rubric import Criterion, CriterionVerdict, read_criteria, read_verdict_list, weighted_share
from .served_judge import Reading, ServedJudge, scores_of

SUB_SCORES = ("outcome", "process", "uncontrollable")
FAILURES = ("none", "controllable", "uncontrollable")
_TASK = ("The task was:\n----\n", "\n----\n")
_STEP = (
    "Judge this step alone, and not what came of it. Say in one sentence what the step shows. Say whether something "
    "failed in it: none; controllable, if whoever did the task could have avoided it; uncontrollable, if nobody doing "
    "the task could. Then say of each criterion whether this step meets it.\n",
    '\nAnswer with a JSON object and nothing else: {"shows": "one sentence", "failure": "none", "verdicts": '
    '[{"number": 1, "met": true, "reason": "one sentence"}]}',
)
_OUTCOME = (
    "Judge the outcome alone, however it came about. Say of each criterion whether it is met at the end.\n",
    '\nAnswer with a JSON list and nothing else, one object for each criterion, in order: {"number": 1, "met": true, '
    '"reason": "one sentence"}',
)


@dataclass(frozen=True)
class StepVerdict:
    """What a judge says of one step: what it shows, one of `FAILURES`, and a verdict on each criterion."""

    shows: str
    failure: str
    verdicts: tuple[CriterionVerdict, ...]


class Verifier(ServedJudge):
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
        self.process, self.outcome = disjoint_criteria(process, outcome)
        self.share = float(share)
        super().__init__(server, system=system, needed=("prompts",))

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
        steps: Sequence[Sequence[Any]] = parts or [[text] for text in completions or ()]
        if images is not None:
            steps = [list(frames_of(own, self.client.server.frames)) for own in images]
        replies = self.asked([
            [about_step(prompt, own, k, self.process) for k in range(len(own))] for prompt, own in zip(prompts, steps)
        ])  # fmt: skip
        judged = [read_steps(own, len(self.process)) for own in replies]
        ends = [
            [] if isinstance(found, str) else [about_outcome(prompt, own[-1], found, self.outcome)]
            for prompt, own, found in zip(prompts, steps, judged)
        ]
        outcomes = [[read_outcome(answer, len(self.outcome)) for answer in own] for own in self.asked(ends)]
        found = [_found(*both, (self.process, self.outcome), self.share) for both in zip(judged, outcomes)]
        return scores_of(self.name, found, SUB_SCORES, parts=images is None and parts is not None)


def about_step(prompt: str, steps: Sequence[Any], place: int, criteria: Sequence[Criterion]) -> Question:
    """Return the question about one step: a picture, or a text after the texts before it."""
    step, number = steps[place], f"Step {place + 1} of {len(steps)}"
    about = f"{_TASK[0]}{prompt}{_TASK[1]}"
    if not isinstance(step, str):
        return Question(f"{about}{number} is the picture.\n{_STEP[0]}{_listed(criteria)}{_STEP[1]}", (step,))
    before = "".join(steps[:place])
    about += f"What was done before:\n{before}\n----\n{number}:\n{step}\n----\n"
    return Question(f"{about}{_STEP[0]}{_listed(criteria)}{_STEP[1]}")


def about_outcome(prompt: str, last: Any, judged: Sequence[StepVerdict], criteria: Sequence[Criterion]) -> Question:
    """Return the question about the outcome: the last step, and in words what each step shows."""
    shown = "\n".join(f"Step {number}: {one.shows}" for number, one in enumerate(judged, start=1))
    end = f"The last step:\n{last}\n----\n" if isinstance(last, str) else "The picture is the last step.\n"
    about = f"{_TASK[0]}{prompt}{_TASK[1]}What the steps show, as each was judged:\n{shown}\n----\n{end}"
    media = () if isinstance(last, str) else (last,)
    return Question(f"{about}{_OUTCOME[0]}{_listed(criteria)}{_OUTCOME[1]}", media)


def _found(
    judged: Sequence[StepVerdict] | str,
    outcomes: Sequence[Sequence[CriterionVerdict] | str],
    criteria: tuple[Sequence[Criterion], Sequence[Criterion]],
    share: float,
) -> Reading:
    """The score of a sample; `outcomes` has one outcome if all steps could be read, and none otherwise."""
    if isinstance(judged, str):
        return Reading(note=judged)
    (outcome,) = outcomes
    if isinstance(outcome, str):
        return Reading(note=outcome)
    each = [
        math.nan if one.failure == "uncontrollable" else weighted_share(criteria[0], one.verdicts) for one in judged
    ]
    value, subs = joined(each, weighted_share(criteria[1], outcome), share)
    steps = enumerate(zip(each, judged), start=1)
    lines = [f"step {number}: {score:.2f}, {one.failure}: {one.shows}" for number, (score, one) in steps]
    lines += [
        f"outcome, {criterion.name or criterion.text}: {'yes' if verdict.met else 'no'}. {verdict.reason}"
        for criterion, verdict in zip(criteria[1], outcome)
    ]
    return Reading(value, "\n".join(lines), subs, parts=each)


def joined(steps: Sequence[float], outcome: float, share: float) -> tuple[float, dict[str, float]]:
    """Return the score and the sub-scores of a sample.

    Args:
        steps: score of each step in [0, 1]; NaN for a step with an uncontrollable failure.
        outcome: in [0, 1].
        share: weight of the outcome.
    """
    counted = [score for score in steps if not math.isnan(score)]
    process = math.fsum(counted) / len(counted) if counted else math.nan
    value = share * outcome + (1 - share) * process if counted else outcome
    return value, {"outcome": outcome, "process": process, "uncontrollable": 1 - len(counted) / len(steps)}


def disjoint_criteria(process: Any, outcome: Any) -> tuple[list[Criterion], list[Criterion]]:
    """Read the criteria of steps and of outcomes.

    Raises:
        ValueError: a list is empty or cannot be read, or a criterion is in both.
    """
    lists = {
        name: read_criteria(given, f"the option `{name}` of verifier")
        for name, given in (("process", process), ("outcome", outcome))
    }
    for name, found in lists.items():
        if not found:
            raise ValueError(f"verifier: {name} is empty; give criteria, such as ['The step follows from the task.']")
    first, second = lists.values()
    if both := {one.text.casefold() for one in first} & {one.text.casefold() for one in second}:
        raise ValueError(
            f"verifier: {min(both)!r:.80} is in `process` and in `outcome`, and would count twice; leave one out"
        )
    return first, second


def read_steps(answers: Sequence[JudgeReply], criteria: int) -> list[StepVerdict] | str:
    """Return the verdict on each step; or a text that says why one is missing."""
    found = []
    for number, answer in enumerate(answers, start=1):
        try:
            given = read_fields(answer)
            failure = given.get("failure")
            if failure not in FAILURES:
                raise Unreadable(f"`failure` is none of {', '.join(FAILURES)}")
            verdicts = read_verdict_list(given.get("verdicts"), criteria)
        except Unreadable as problem:
            return note_of(answer, f"step {number}: {problem}")
        found.append(StepVerdict(str(given.get("shows") or "")[:200], failure, tuple(verdicts)))
    return found


def read_outcome(answer: JudgeReply, criteria: int) -> list[CriterionVerdict] | str:
    """Return the verdict on each criterion of the outcome; or a text that says why one is missing."""
    try:
        return read_verdict_list(read_object(readable(answer)), criteria)
    except Unreadable as problem:
        return note_of(answer, f"outcome: {problem}")


def _listed(criteria: Sequence[Criterion]) -> str:
    return "\n".join(f"{number}. {criterion.text}" for number, criterion in enumerate(criteria, start=1))
