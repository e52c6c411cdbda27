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

from ..options import check_positive
from ..scores import Scores
from ..within import signature_of
from .judge_answers import NOTE_CHARACTERS, Unreadable, read_object, readable, refuse_if_none
from .judge_client import JudgeClient, JudgeReply, Question
from .judge_images import chosen_frames
from .judge_rubric import Criterion, CriterionVerdict, read_criteria, read_verdict_list, weighted_share

MAX_TOKENS = 1024
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


class Verifier:
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
    remote = True

    def __init__(
        self,
        server: Mapping[str, Any],
        process: Sequence[Any],
        outcome: Sequence[Any],
        *,
        share: float = 0.5,
        system: str = "",
    ) -> None:
        check_positive(self.name, "share", share, "0.5")
        if share > 1:
            raise ValueError(f"verifier: share is {share!r}; give the weight of the outcome, at most 1")
        self.process, self.outcome = disjoint_criteria(process, outcome)
        self.client = JudgeClient(self.name, server, max_tokens=MAX_TOKENS, system=system)
        self.share, self.batch_size = float(share), self.client.batch_size
        self.__signature__ = signature_of("prompts")

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
        if completions is not None:
            steps: list[list[Any]] = [[text] for text in completions] if parts is None else [list(p) for p in parts]
        else:
            assert images is not None
            steps = [[own] if own.ndim == 3 else [own[k] for k in self._chosen(own)] for own in images]
        asked = [
            about_step(prompt, own, k, self.process) for prompt, own in zip(prompts, steps) for k in range(len(own))
        ]
        replies = iter(self.client.ask(asked))
        judged = [read_steps([next(replies) for _ in own], len(self.process)) for own in steps]
        done = {row: found for row, found in enumerate(judged) if not isinstance(found, str)}
        ends = [about_outcome(prompts[row], steps[row][-1], found, self.outcome) for row, found in done.items()]
        outcomes = dict(zip(done, (read_outcome(answer, len(self.outcome)) for answer in self.client.ask(ends))))
        rows = [
            _row(found, outcomes.get(row, ""), (self.process, self.outcome), self.share)
            for row, found in enumerate(judged)
        ]
        values, notes = [row[0] for row in rows], [row[2] for row in rows]
        refuse_if_none(self.name, values, notes)
        subs = {name: [row[1][name] for row in rows] for name in SUB_SCORES}
        return Scores(
            values, subs, notes, parts=[] if parts is None or completions is None else [row[3] for row in rows]
        )

    def close(self) -> None:
        """Close the connections."""
        self.client.close()

    def _chosen(self, video: Tensor) -> list[int]:
        return chosen_frames(len(video), self.client.server.frames)


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


def _row(
    judged: Sequence[StepVerdict] | str,
    outcome: Sequence[CriterionVerdict] | str,
    criteria: tuple[Sequence[Criterion], Sequence[Criterion]],
    share: float,
) -> tuple[float, dict[str, float], str, list[float] | None]:
    """The score of a sample, its sub-scores, its note, and the scores of its steps."""
    if isinstance(judged, str) or isinstance(outcome, str):
        return (
            math.nan,
            dict.fromkeys(SUB_SCORES, math.nan),
            str(judged if isinstance(judged, str) else outcome),
            None,
        )
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
    return value, subs, "\n".join(lines), each


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
    lists = [
        read_criteria(given, f"the option `{name}` of verifier")
        for name, given in (("process", process), ("outcome", outcome))
    ]
    for name, found in zip(("process", "outcome"), lists):
        if not found:
            raise ValueError(f"verifier: {name} is empty; give criteria, such as ['The step follows from the task.']")
    both = {one.text.casefold() for one in lists[0]} & {one.text.casefold() for one in lists[1]}
    if both:
        raise ValueError(
            f"verifier: {min(both)!r:.80} is in `process` and in `outcome`, and would count twice; leave one out"
        )
    return lists[0], lists[1]


def read_steps(answers: Sequence[JudgeReply], criteria: int) -> list[StepVerdict] | str:
    """Return the verdict on each step; or a text that says why one is missing."""
    found = []
    for number, answer in enumerate(answers, start=1):
        try:
            value = read_object(readable(answer))
            given = value if isinstance(value, Mapping) else {}
            failure = given.get("failure")
            if failure not in FAILURES:
                raise Unreadable(f"`failure` is none of {', '.join(FAILURES)}")
            verdicts = read_verdict_list(given.get("verdicts"), criteria)
        except Unreadable as problem:
            return f"no score (step {number}: {problem}): {answer.text.strip()[:NOTE_CHARACTERS]}"
        found.append(StepVerdict(str(given.get("shows") or "")[:200], failure, tuple(verdicts)))
    return found


def read_outcome(answer: JudgeReply, criteria: int) -> list[CriterionVerdict] | str:
    """Return the verdict on each criterion of the outcome; or a text that says why one is missing."""
    try:
        return read_verdict_list(read_object(readable(answer)), criteria)
    except Unreadable as problem:
        return f"no score (outcome: {problem}): {answer.text.strip()[:NOTE_CHARACTERS]}"


def _listed(criteria: Sequence[Criterion]) -> str:
    return "\n".join(f"{number}. {criterion.text}" for number, criterion in enumerate(criteria, start=1))
