"""What all rewards share that ask a served model: the client, and scores from what was read in its answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..scores import Scores
from ..serving.http_client import server_in_words
from ..within import signature_of
from .judge_answers import Unreadable, note_of, refuse_if_none
from .judge_client import JudgeClient, JudgeReply, JudgeServer, Question


class ServedJudge:
    """A reward whose scores come from the answers of a model behind an OpenAI-compatible server.

    Args:
        server: {url, model, ...}; see `JudgeServer`.
        system: the system message for the model.
        needed: the arguments that the reward needs; by default the arguments of its `__call__`.
        logprobs: whether to request the alternatives to the first token.

    Attributes:
        max_tokens: largest number of tokens of an answer, if the server does not set it.

    Raises:
        ValueError: an option is wrong, or the environment variable of the key is not set.
    """

    name = ""
    remote = True
    max_tokens = 1024

    def __init__(
        self, server: Mapping[str, Any], *, system: str = "", needed: Sequence[str] = (), logprobs: bool = False
    ) -> None:
        self.client = JudgeClient(self.name, server, max_tokens=self.max_tokens, system=system, logprobs=logprobs)
        self.batch_size = self.client.batch_size
        if needed:
            self.__signature__ = signature_of(*needed)

    @staticmethod
    def check_options(name: str, options: Mapping[str, Any]) -> None:
        """Refuse a server that is written wrongly, without a question to it.

        Raises:
            ValueError: a field of the server is unknown, missing or wrong.
        """
        JudgeServer.read(name, options["server"])

    @staticmethod
    def served_at(options: Mapping[str, Any]) -> list[str]:
        """The server of these options, in words."""
        server = JudgeServer.read("", options["server"])
        return [server_in_words(server.url, server.key_env)]

    def asked(self, questions: Sequence[Sequence[Question]]) -> list[list[JudgeReply]]:
        """Ask all questions on all samples at the same time. Returns the answers in the order of the questions.

        Raises:
            ServerError: the server could not be asked.
        """
        answers = iter(self.client.ask([question for own in questions for question in own]))
        return [[next(answers) for _ in own] for own in questions]

    def close(self) -> None:
        """Close the connections."""
        self.client.close()


@dataclass(frozen=True)
class Reading:
    """What was read about one sample, or about one part of it; see `Scores` for the meaning of each.

    Attributes:
        value: the score.
        note: what the judge said; without a value, why there is none.
        subs: sub-scores.
        answer: the answer that was read.
        each: what was read about each part of the sample, if it has parts.
        judged: whether there was something to judge. If not, the value is not missing.
    """

    value: float = math.nan
    note: str = ""
    subs: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None
    each: Sequence[Reading] = ()
    judged: bool = True

    @property
    def missing(self) -> bool:
        """Whether there was something to judge, and no score was read."""
        return self.judged and math.isnan(self.value)


def reading_of(read: Callable[..., Reading], *answers: JudgeReply, what: str = "") -> Reading:
    """Return what `read` finds in the answers about a sample. If they cannot be read, the note says why.

    Args:
        read: takes the answers; raises `Unreadable` if they give no score.
        answers: about the sample.
        what: words about the answers, for the note.
    """
    try:
        return read(*answers)
    except Unreadable as problem:
        return Reading(note=note_of(*answers, problem=f"{what}: {problem}" if what else str(problem)))


def mean_reading(each: Sequence[Reading], empty: str = "") -> Reading:
    """Return the mean of what was read about the parts of a sample, such as steps or questions.

    A part that had nothing to judge does not count. If the score of a part is missing, the score of the sample is
    missing too.

    Args:
        each: of the parts.
        empty: the note of a sample without parts.
    """
    for one in each:
        if one.missing:
            return one
    counted = [one for one in each if one.judged]
    names = counted[0].subs if counted else ()
    return Reading(
        _mean([one.value for one in counted]), "\n".join(one.note for one in each) or empty,
        {name: _mean([one.subs[name] for one in counted]) for name in names},
        each=each, judged=bool(counted),
    )  # fmt: skip


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def scores_of(
    reward: str, found: Sequence[Reading], subs: Iterable[str] = (), *, answers: bool = False, parts: bool = False
) -> Scores:
    """Return the scores of samples.

    Args:
        reward: name of the reward, for messages.
        found: of each sample.
        subs: names of the sub-scores; NaN for a sample that lacks one.
        answers: whether the scores have answers.
        parts: whether the scores have parts.

    Raises:
        InvalidScores: there are 8 samples with something to judge or more, and none has a score.
    """
    judged = [one for one in found if one.judged]
    refuse_if_none(reward, [one.value for one in judged], [one.note for one in judged])
    return Scores(
        [one.value for one in found], {name: [one.subs.get(name, math.nan) for one in found] for name in subs},
        [one.note for one in found], answers=[one.answer for one in found] if answers else (),
        parts=[[part.value for part in one.each] or None for one in found] if parts else (),
    )  # fmt: skip
