"""A list of criteria. A judge says for each criterion whether it is met.

Rubrics as rewards: Gunjal et al. (arXiv 2507.17746, the explicit aggregation). Criteria with negative weights, and the
lower limit of 0, are as in HealthBench (arXiv 2505.08775).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..scores import Scores
from .judge_answers import NOTE_CHARACTERS, Unreadable, list_in, read_object, readable, refuse_if_none
from .judge_client import JudgeReply, Question
from .served_judge import ServedJudge

ASK = ("together", "each")
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


class CriteriaJudge(ServedJudge):
    """A reward that asks a judge of each criterion whether it is met.

    Args:
        server: {url, model, ...}; see `JudgeServer`.
        criteria: of the option, as it is written.
        ask: one of `ASK`.
        system: the system message for the model.
        needed: the arguments that the reward needs.

    Raises:
        ValueError: an option is wrong, or the environment variable of the key is not set.
    """

    def __init__(
        self, server: Mapping[str, Any], criteria: Sequence[Any] | None, ask: str, system: str, needed: Sequence[str]
    ) -> None:
        if ask not in ASK:
            raise ValueError(f"{self.name}: ask is {ask!r}; give one of {', '.join(ASK)}")
        self.criteria, self.ask = read_criteria(criteria, "the option `criteria`"), ask
        super().__init__(server, system=system, needed=needed)

    def of_column(self, column: Sequence[Any] | None, count: int) -> list[list[Criterion]]:
        """Read the criteria in the column `criteria` of `count` samples; a sample may have none of its own.

        Raises:
            ValueError: a row of the column is not a list of criteria.
        """
        rows = [None] * count if column is None else column
        return [read_criteria(entry, f"the column `criteria`, row {row},") for row, entry in enumerate(rows)]

    def judged(
        self, lists: Sequence[Sequence[Criterion]], about: Sequence[Question], why: Mapping[int, str], shared: bool
    ) -> Scores:
        """Ask for the verdicts on samples, and return the scores.

        Args:
            lists: the criteria of each sample.
            about: what comes before the question on the criteria, for each sample.
            why: row -> why the sample has no criteria, if more is known about it.
            shared: whether all samples have the criteria of the option, and these have sub-scores.
        """
        replies = self.asked([
            [replace(question, text=question.text + text) for text in questions_on(given, self.ask)]
            for question, given in zip(about, lists)
        ])  # fmt: skip
        verdicts = [
            why.get(row) or read_verdicts(answers, given, self.ask)
            for row, (answers, given) in enumerate(zip(replies, lists))
        ]
        return rubric_scores(self.name, lists, verdicts, self.criteria if shared else ())


class Rubric(CriteriaJudge):
    """Weighted share of the criteria that a sample meets, according to a judge.

    If m_k is 1 for a criterion that is met and 0 otherwise, and w_k is its weight,

        score = Σ_k w_k·m_k / Σ_k max(w_k, 0), at least 0

    A sample has no score if it has no criteria, or if the judge leaves a criterion undecided.

    Args:
        server: {url, model, ...}; see `JudgeServer`.
        criteria: texts, or {text, weight, name} with weight 1 if absent; for samples whose column `criteria` is empty.
        ask: "together": one question for each sample, answered in JSON; "each": one for each criterion, answered yes or
            no.
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
        system: str = "",
    ) -> None:
        super().__init__(server, criteria, ask, system, ("prompts", *(() if criteria else ("criteria",))))

    def __call__(
        self,
        prompts: Sequence[str],
        images: Tensor | None = None,
        completions: Sequence[str] | None = None,
        criteria: Sequence[Any] | None = None,
        **columns: Any,
    ) -> Scores:
        """Ask the judge for verdicts.

        Args:
            prompts: B strings.
            images: [B, 3, H, W] or [B, F, 3, H, W] in [0, 1].
            completions: B strings, instead of images.
            criteria: B lists; None uses the criteria of the option for that sample.
            columns: not used.

        Returns:
            Scores with B values in [0, 1], NaN for a sample without a score. Sub-scores: `met`, the share of the
            criteria with positive weight that are met. If all criteria come from the option, there is also a sub-score
            for each criterion under its name, 1 or 0. Notes: a line with verdict and reason for each criterion.

        Raises:
            ValueError: a row of the column is not a list of criteria.
            InvalidScores: there are 8 samples or more, and none has a score.
            ServerError: the server could not be asked.
        """
        own = self.of_column(criteria, len(prompts))
        about = [
            Question(_about(row, prompts, images, completions), () if images is None else (images[row],))
            for row in range(len(prompts))
        ]
        return self.judged([given or self.criteria for given in own], about, {}, not any(own))


def rubric_scores(
    reward: str,
    lists: Sequence[Sequence[Criterion]],
    verdicts: Sequence[Sequence[CriterionVerdict] | str],
    named: Sequence[Criterion] = (),
) -> Scores:
    """Return the scores of samples from the verdicts on their criteria.

    Args:
        reward: name of the reward, for messages.
        lists: the criteria of each sample.
        verdicts: one for each criterion; or a text that says why the sample has no score.
        named: the criteria that all samples share, if they do; each gets a sub-score.

    Raises:
        InvalidScores: there are 8 samples with criteria or more, and none has a score.
    """
    values, met, notes = [], [], []
    for given, found in zip(lists, verdicts):
        values.append(math.nan if isinstance(found, str) else weighted_share(given, found))
        wanted = [] if isinstance(found, str) else [v.met for c, v in zip(given, found) if c.weight > 0]
        met.append(sum(wanted) / len(wanted) if wanted else math.nan)
        notes.append(found if isinstance(found, str) else _note(given, found))
    asked = [value for value, given in zip(values, lists) if given]
    refuse_if_none(reward, asked, [note for note, given in zip(notes, lists) if given])
    subs = {"met": met}
    for k, criterion in enumerate(named):
        subs[criterion.name or criterion.text] = [
            math.nan if isinstance(found, str) else float(found[k].met) for found in verdicts
        ]
    return Scores(values, subs, notes)


def read_criteria(given: Any, where: str) -> list[Criterion]:
    """Read the criteria in a recipe or in a prompt file; a text may contain them as JSON.

    Raises:
        ValueError: they are not a list of texts or {text, weight, name}, there are too many, or none has a positive
            weight.
    """
    if given is None or given == "" or given == []:
        return []
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            given = [given]
    if not isinstance(given, (list, tuple)) or len(given) > MOST_CRITERIA:
        raise ValueError(f"rubric: {where} has {given!r:.80}; give a list of at most {MOST_CRITERIA} criteria")
    found = [_read_criterion(entry, where) for entry in given]
    names = [criterion.name or criterion.text for criterion in found]
    if len(set(names)) < len(names) or "met" in names:
        raise ValueError(f"rubric: {where} has two criteria of the same name, or one called 'met'; give other names")
    if not any(criterion.weight > 0 for criterion in found):
        raise ValueError(f"rubric: {where} has no criterion with a weight above 0; add one")
    return found


def weighted_share(criteria: Sequence[Criterion], verdicts: Sequence[CriterionVerdict]) -> float:
    """Return Σ_k w_k·m_k / Σ_k max(w_k, 0), at least 0; NaN if there are no criteria."""
    if not criteria:
        return math.nan
    reached = math.fsum(criterion.weight for criterion, verdict in zip(criteria, verdicts) if verdict.met)
    return max(0.0, reached / math.fsum(max(criterion.weight, 0.0) for criterion in criteria))


def read_verdicts(
    answers: Sequence[JudgeReply], criteria: Sequence[Criterion], ask: str
) -> list[CriterionVerdict] | str:
    """Return a verdict for each criterion; or a text that says why a verdict is missing."""
    if not criteria:
        return "no criteria"
    try:
        if ask == "each":
            return [_read_one(answer) for answer in answers]
        return read_verdict_list(read_object(readable(answers[0])), len(criteria))
    except Unreadable as problem:
        shown = " / ".join(answer.text.strip() for answer in answers)[:NOTE_CHARACTERS]
        return f"no score ({problem}): {shown}"


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
        raise ValueError(f"rubric: {where} has {entry!r:.80}; give a text, or {{text: ..., weight: 2, name: ...}}")
    return Criterion(text.strip(), float(weight), name)


def _about(row: int, prompts: Sequence[str], images: Tensor | None, completions: Sequence[str] | None) -> str:
    # The pieces are joined, and nothing is replaced inside them, because prompts and completions may contain braces.
    if images is not None or completions is None:
        before, after = _IMAGE.split("{prompt}")
        return before + prompts[row] + after
    before, rest = _TEXT.split("{prompt}")
    between, after = rest.split("{completion}")
    return before + prompts[row] + between + completions[row] + after


def questions_on(criteria: Sequence[Criterion], ask: str) -> list[str]:
    """Return the questions that ask for the verdicts: one on all criteria, or one on each."""
    if ask == "each":
        return [_EACH.replace("{criterion}", criterion.text) for criterion in criteria]
    lines = "\n".join(f"{number}. {criterion.text}" for number, criterion in enumerate(criteria, start=1))
    return [_TOGETHER.replace("{criteria}", lines)] if criteria else []


def _note(criteria: Sequence[Criterion], verdicts: Sequence[CriterionVerdict]) -> str:
    return "\n".join(
        f"{'yes' if verdict.met else 'no'} ({criterion.weight:g}) {criterion.name or criterion.text}"
        + (f": {verdict.reason}" if verdict.reason else "")
        for criterion, verdict in zip(criteria, verdicts)
    )
