"""What all rewards share that ask a served model: the client, and scores from what was read in its answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..scores import Scores
from ..within import signature_of
from .judge_answers import Unreadable, note_of, refuse_if_none
from .judge_client import JudgeClient, JudgeReply, Question


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
    """What was read about one sample; see `Scores` for the meaning of each. Without a value, the note says why."""

    value: float = math.nan
    note: str = ""
    subs: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None
    parts: list[float] | None = None


def reading_of(answer: JudgeReply, read: Callable[[JudgeReply], Reading]) -> Reading:
    """Return what `read` finds in an answer. An answer that cannot be read has no value, and its note says why."""
    try:
        return read(answer)
    except Unreadable as problem:
        return Reading(note=note_of(answer, str(problem)))


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
        InvalidScores: there are 8 samples or more, and none has a score.
    """
    values, notes = [one.value for one in found], [one.note for one in found]
    refuse_if_none(reward, values, notes)
    return Scores(
        values, {name: [one.subs.get(name, math.nan) for one in found] for name in subs}, notes,
        answers=[one.answer for one in found] if answers else (), parts=[one.parts for one in found] if parts else (),
    )  # fmt: skip
