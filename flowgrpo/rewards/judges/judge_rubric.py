"""A list of criteria. A judge says for each criterion whether it is met.

Rubrics as rewards: Gunjal et al. (arXiv 2507.17746, the explicit aggregation). Criteria with negative weights, and the
lower limit of 0, are as in HealthBench (arXiv 2505.08775).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from ..options import check_flag, read_column, read_entries
from ..scores import Scores
from .judge_answers import Unreadable, list_in, read_object, readable
from .judge_client import JudgeReply, Question, media_of
from .judge_steps import Step, about_step, steps_of
from .served_judge import Reading, ServedJudge, mean_reading, reading_of, scores_of

MOST_CRITERIA = 50
_WORD = re.compile(r"\W*(yes|no)\b", re.IGNORECASE)
_REASON_CHARACTERS = 200
_IMAGE = "The picture was made from this text:\n----\n{prompt}\n----\n"
_TEXT = (
    "Here are a task and an answer to it. What the answer says of itself does not count.\n"
    "---- task\n{prompt}\n---- answer\n{completion}\n----\n"
)
_EACH = (
    "Does it meet this criterion?\n{criterion}\nAnswer with Yes or No as the first word, then give the reason in one "
    "sentence."
)
_TOGETHER = (
    "Say of each criterion whether it is met.\n{criteria}\nAnswer with a JSON list and nothing else, one object for "
    'each criterion, in order: {"number": 1, "met": true, "reason": "one sentence"}'
)


@dataclass(frozen=True)
class Criterion:
    """One criterion.

    Attributes:
        text: what the sample must satisfy.
        weight: how much the criterion counts; below 0 if it describes a fault.
        name: name of its sub-score.
    """

    text: str
    weight: float = 1.0
    name: str = ""


@dataclass(frozen=True)
class CriterionVerdict:
    """Whether a criterion is met, and why."""

    met: bool
    reason: str


@dataclass(frozen=True)
class QuestionForm:
    """How a judge is asked about criteria.

    Attributes:
        text: the question. With {criterion} in it, it is asked of each criterion; with {criteria}, once of all.
        read: criteria and the answers to these questions -> what was read. Raises `Unreadable`.
    """

    text: str
    read: Callable[..., Reading]

    def asks(self, criteria: Sequence[Criterion]) -> list[str]:
        """Return the texts of the questions; none without criteria."""
        if "{criterion}" in self.text:
            return [self.text.replace("{criterion}", criterion.text) for criterion in criteria]
        lines = "\n".join(f"{number}. {criterion.text}" for number, criterion in enumerate(criteria, start=1))
        return [self.text.replace("{criteria}", lines)] if criteria else []


@dataclass(frozen=True)
class Case:
    """A sample, or a step of it, and the criteria by which it is judged.

    Attributes:
        about: what comes before the question on the criteria.
        criteria: may be empty. Then nothing is asked.
        why: why the criteria are missing; empty if there are none.
        name: what is judged, for notes.
    """

    about: Question
    criteria: Sequence[Criterion]
    why: str = ""
    name: str = ""


class CriteriaJudge(ServedJudge):
    """A reward that asks a judge of each criterion whether it is met.

    Args:
        server: {url, model, ...}; see `JudgeServer`.
        criteria: of the option, as it is written.
        ask: one of `ASK`.
        system: the system message for the model.
        needed: the arguments that the reward needs.
        option: name of the option, for messages.

    Raises:
        ValueError: an option is wrong, or the environment variable of the key is not set.
    """

    def __init__(
        self, server: Mapping[str, Any], criteria: Sequence[Any] | None, ask: str, system: str, needed: Sequence[str],
        option: str = "criteria",
    ) -> None:  # fmt: skip
        if ask not in ASK:
            raise ValueError(f"{self.name}: ask is {ask!r}; give one of {', '.join(ASK)}")
        self.criteria, self.form = read_criteria(criteria, f"{self.name}: the option `{option}`"), ASK[ask]
        super().__init__(server, system=system, needed=needed)

    def of_column(self, column: Sequence[Any] | None, count: int) -> list[list[Criterion]]:
        """Read the criteria in the column `criteria` of `count` samples; a sample may have none of its own.

        Raises:
            ValueError: a row of the column is not a list of criteria.
        """
        rows = [None] * count if column is None else column
        return read_column(self.name, "criteria", rows, read_criteria)

    def sub_scores(self, shared: bool) -> list[str]:
        """Return the names of the sub-scores; `shared` says whether all samples have the criteria of the option."""
        return ["met", *(one.name or one.text for one in self.criteria if shared)]

    def judged(self, cases: Sequence[Case], form: QuestionForm | None = None) -> list[Reading]:
        """Ask for the verdicts on samples or steps, in the form of the option `ask` if no other is given."""
        form = form or self.form
        replies = self.asked([
            [replace(case.about, text=case.about.text + text) for text in form.asks(case.criteria)] for case in cases
        ])  # fmt: skip
        return [
            reading_of(partial(form.read, case.criteria), *answers, what=case.name)
            if case.criteria
            else Reading(note=case.why or "no criteria", judged=bool(case.why))
            for case, answers in zip(cases, replies)
        ]

    def judged_steps(
        self, lists: Sequence[Sequence[Criterion]], prompts: Sequence[str], steps: Sequence[Sequence[Step]],
        form: QuestionForm | None = None,
    ) -> list[Reading]:  # fmt: skip
        """Ask for the verdicts on each step of samples. Returns the means over the steps of each sample.

        Args:
            lists: the criteria of each sample.
            prompts: its task.
            steps: its steps.
            form: how the judge is asked about a step, as for `judged`.
        """
        cases = [
            Case(about_step(prompt, own, k), given, name=f"step {k + 1}")
            for given, prompt, own in zip(lists, prompts, steps)
            for k in range(len(own))
        ]
        found = iter([
            one if one.missing else replace(one, note=f"{case.name}: {one.value:.2f}, {one.note}")
            for case, one in zip(cases, self.judged(cases, form))
        ])  # fmt: skip
        return [mean_reading([next(found) for _ in own]) for own in steps]


class Rubric(CriteriaJudge):
    """Weighted share of the criteria that a sample meets, according to a judge.

    If m_k is 1 for a criterion that is met and 0 otherwise, and w_k is its weight,

        score = Σ_k w_k·m_k / Σ_k max(w_k, 0), at least 0

    A sample has no score if it has no criteria, or if the judge leaves a criterion undecided.

    With `steps`, each step is judged by itself: each frame of a video, or each part into which the recipe cuts
    completions. The score is the mean over the steps. The parts of completions have scores, which `credit: parts`
    takes.

    Args:
        server: {url, model, ...}; see `JudgeServer`. Its `frames` are the largest number of frames that are judged.
        criteria: texts, or {text, weight, name} with weight 1 if absent; for samples whose column `criteria` is empty.
        ask: "together": one question for each sample or step, answered in JSON; "each": one for each criterion,
            answered yes or no.
        steps: whether each step is judged by itself.
        system: the system message for the model.

    Raises:
        ValueError: an option is wrong, or the environment variable of the key is not set.
    """

    name = "rubric"

    def __init__(
        self,
        server: Mapping[str, Any],
        criteria: Sequence[Any] | None = None,
        ask: str = "together",
        steps: bool = False,
        system: str = "",
    ) -> None:
        check_flag(self.name, "steps", steps)
        self.steps = steps
        super().__init__(server, criteria, ask, system, ("prompts", *(() if criteria else ("criteria",))))

    def __call__(
        self,
        prompts: Sequence[str],
        images: Tensor | None = None,
        completions: Sequence[str] | None = None,
        criteria: Sequence[Any] | None = None,
        parts: Sequence[Sequence[str]] | None = None,
        **columns: Any,
    ) -> Scores:
        """Ask the judge for verdicts.

        Args:
            prompts: B strings.
            images: [B, 3, H, W] or [B, F, 3, H, W] in [0, 1].
            completions: B strings, instead of images.
            criteria: B lists; None uses the criteria of the option for that sample.
            parts: B lists of the steps of the completions; a completion that is not cut is one step.
            columns: not used.

        Returns:
            Scores with B values in [0, 1], NaN for a sample without a score. Sub-scores: `met`, the share of the
            criteria with positive weight that are met. If all criteria come from the option, there is also a sub-score
            for each criterion under its name, 1 or 0. Notes: a line with verdict and reason for each criterion.
            With `steps`, the sub-scores are means over the steps, and `parts` has the scores of parts of completions.

        Raises:
            ValueError: a row of the column is not a list of criteria.
            InvalidScores: there are 8 samples with criteria or more, and none has a score.
            ServerError: the server could not be asked.
        """
        own = self.of_column(criteria, len(prompts))
        lists = [given or self.criteria for given in own]
        if self.steps:
            steps = steps_of(images, completions, parts, self.client.server.frames)
            found = self.judged_steps(lists, prompts, steps)
        else:
            found = self.judged([
                Case(_about(row, prompts, images, completions), given) for row, given in enumerate(lists)
            ])  # fmt: skip
        cut = self.steps and images is None and parts is not None
        return scores_of(self.name, found, self.sub_scores(not any(own)), parts=cut)


def read_criteria(given: Any, where: str) -> list[Criterion]:
    """Read the criteria in a recipe or in a prompt file; a text may contain them as JSON.

    Raises:
        ValueError: they are not a list of texts or {text, weight, name}, there are too many, or none has a positive
            weight.
    """
    entries = read_entries(given, where, MOST_CRITERIA, "criteria")
    if not entries:
        return []
    found = [_read_criterion(entry, where) for entry in entries]
    names = [criterion.name or criterion.text for criterion in found]
    if len(set(names)) < len(names) or "met" in names:
        raise ValueError(f"{where} has two criteria of the same name, or one called 'met'; give other names")
    if not any(criterion.weight > 0 for criterion in found):
        raise ValueError(f"{where} has no criterion with a weight above 0; add one")
    return found


def weighted_share(criteria: Sequence[Criterion], verdicts: Sequence[CriterionVerdict]) -> float:
    """Return Σ_k w_k·m_k / Σ_k max(w_k, 0), at least 0; NaN if there are no criteria."""
    if not criteria:
        return math.nan
    reached = math.fsum(criterion.weight for criterion, verdict in zip(criteria, verdicts) if verdict.met)
    return max(0.0, reached / math.fsum(max(criterion.weight, 0.0) for criterion in criteria))


def _read_together(criteria: Sequence[Criterion], answer: JudgeReply) -> Reading:
    return reading_by(criteria, read_verdict_list(read_object(readable(answer)), len(criteria)))


def _read_each(criteria: Sequence[Criterion], *answers: JudgeReply) -> Reading:
    return reading_by(criteria, [_read_one(answer) for answer in answers])


def reading_by(criteria: Sequence[Criterion], verdicts: Sequence[CriterionVerdict]) -> Reading:
    """Return the weighted share of criteria that are met, with sub-scores and a line for each criterion."""
    wanted = [verdict.met for criterion, verdict in zip(criteria, verdicts) if criterion.weight > 0]
    subs = {one.name or one.text: float(verdict.met) for one, verdict in zip(criteria, verdicts)}
    return Reading(
        weighted_share(criteria, verdicts), _note(criteria, verdicts), {**subs, "met": sum(wanted) / len(wanted)}
    )


def _read_one(answer: JudgeReply) -> CriterionVerdict:
    text = readable(answer)
    word = _WORD.match(text)
    if word is None:
        raise Unreadable(f"neither yes nor no: {text[:60]!r}")
    return CriterionVerdict(
        word.group(1).lower() == "yes", text[word.end() :].strip(" \n.,:;*-–—")[:_REASON_CHARACTERS]
    )


def read_verdict_list(value: Any, count: int) -> list[CriterionVerdict]:
    """Return the verdicts in the JSON of an answer, one for each of `count` criteria.

    Raises:
        Unreadable: a verdict is missing, or is neither true nor false.
    """
    if isinstance(value, Mapping) and count == 1 and "met" in value:
        value = [value]
    listed = list_in(value)
    if listed is None or len(listed) != count:
        raise Unreadable(f"the JSON is not a list of {count} verdicts")
    found = []
    for number, entry in enumerate(listed, start=1):
        met = entry.get("met") if isinstance(entry, Mapping) else None
        if not isinstance(met, bool) or entry.get("number", number) != number:
            raise Unreadable(f"verdict {number} does not say whether criterion {number} is met")
        found.append(CriterionVerdict(met, str(entry.get("reason") or "")[:_REASON_CHARACTERS]))
    return found


def _read_criterion(entry: Any, where: str) -> Criterion:
    fields = {"text": entry} if isinstance(entry, str) else entry
    known = isinstance(fields, Mapping) and set(fields) <= {"text", "weight", "name"}
    fields = fields if known else {}
    text, weight, name = fields.get("text"), fields.get("weight", 1.0), fields.get("name", "")
    number = isinstance(weight, (int, float)) and not isinstance(weight, bool) and math.isfinite(weight)
    if not isinstance(text, str) or not text.strip() or not number or not isinstance(name, str):
        raise ValueError(f"{where} has {entry!r:.80}; give a text, or {{text: ..., weight: 2, name: ...}}")
    return Criterion(text.strip(), float(weight), name)


def _about(row: int, prompts: Sequence[str], images: Tensor | None, completions: Sequence[str] | None) -> Question:
    # The pieces are joined, and nothing is replaced inside them, because prompts and completions may contain braces.
    if images is not None or completions is None:
        before, after = _IMAGE.split("{prompt}")
        return Question(before + prompts[row] + after, media_of(row, images))
    before, rest = _TEXT.split("{prompt}")
    between, after = rest.split("{completion}")
    return Question(before + prompts[row] + between + completions[row] + after)


def _note(criteria: Sequence[Criterion], verdicts: Sequence[CriterionVerdict]) -> str:
    return "\n".join(
        f"{'yes' if verdict.met else 'no'} ({criterion.weight:g}) {criterion.name or criterion.text}"
        + (f": {verdict.reason}" if verdict.reason else "")
        for criterion, verdict in zip(criteria, verdicts)
    )


ASK = {"together": QuestionForm(_TOGETHER, _read_together), "each": QuestionForm(_EACH, _read_each)}
"""`ask` of a rubric -> how its judge is asked: one question on all criteria, or one on each."""
