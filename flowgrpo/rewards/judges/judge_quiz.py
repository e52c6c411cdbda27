"""Usefulness of a sample: the share of multiple-choice questions that a model answers rightly from it alone.

CapRL (arXiv 2509.22647): a caption is as good as the answers that a language model without eyes reads from it. For
generated images, a vision-language model answers from the image, and does not see the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from ..options import check_count, read_column, read_entries
from ..scores import Scores
from .judge_answers import Unreadable, readable
from .judge_client import JudgeReply, Question, media_of
from .served_judge import Reading, ServedJudge, mean_reading, reading_of, scores_of

LETTERS = "ABCDEFGH"  # an answer that begins with "I" is a sentence
MOST_QUESTIONS = 50
_UNKNOWN = "this cannot be told"
# A letter before another word, as in "A cat", is no answer.
_FIRST = re.compile(r"\W*(?:(?:the\s+)?answer\s*(?:is)?\W*)?([A-H])(?=[^\w\s']|\s*$|\s*\n)", re.IGNORECASE)
_TEXT = "Answer the question from the text between the lines alone, and from nothing else that you know.\n----\n"
_IMAGE = "Answer the question from the picture alone.\n"
_END = "\nSay the letter of the answer as the first word."


@dataclass(frozen=True)
class Choosing:
    """A multiple-choice question.

    Attributes:
        question: its text.
        choices: two to seven different answers.
        right: place of the right answer, from 0.
    """

    question: str
    choices: tuple[str, ...]
    right: int

    def rotated(self, turn: int) -> Choosing:
        """Return the question with its choices rotated by `turn` places, at most as many as it has choices."""
        choices = self.choices[turn:] + self.choices[:turn]
        return Choosing(self.question, choices, (self.right - turn) % len(choices))


class Quiz(ServedJudge):
    """Share of multiple-choice questions that a served model answers rightly from the sample alone (CapRL, 2509.22647).

    The column `questions` holds a list of {question, choices, answer} for each prompt; `answer` is one of the choices.
    Every question is asked by itself, so no question helps with another. A last choice says that the sample does not
    tell. This choice counts as wrong, so that a guess does not pay more than the truth.

    A sample has no score if it has no questions, or if an answer has no letter.

    Args:
        server: {url, model, ...}; see `JudgeServer`. For completions any language model; for images one that sees.
        turns: how often each question is asked; in turn t the choices are rotated by t places, so that a habit of the
            model, such as the letter A, is right at most in one of the turns. At most the number of choices counts.
        system: the system message for the model.

    Raises:
        ValueError: an option is wrong, or the environment variable of the key is not set.
    """

    name = "quiz"
    max_tokens = 256

    def __init__(self, server: Mapping[str, Any], *, turns: int = 1, system: str = "") -> None:
        check_count(self.name, "turns", turns)
        super().__init__(server, system=system, needed=("prompts", "questions"))
        self.turns = turns

    def __call__(
        self,
        prompts: Sequence[str],
        questions: Sequence[Any],
        images: Tensor | None = None,
        completions: Sequence[str] | None = None,
        **columns: Any,
    ) -> Scores:
        """Ask the questions of B samples.

        Args:
            prompts: B strings; the model does not see them.
            questions: B lists of questions, or None.
            images: [B, 3, H, W] or [B, F, 3, H, W] in [0, 1].
            completions: B strings, instead of images.
            columns: not used.

        Returns:
            Scores with B values in [0, 1]: the mean over questions and turns; NaN for a sample without a score.
            Sub-score `told`: share of the questions to which the model did not say that the sample does not tell.
            Notes: a line for each question with the letters that were answered.

        Raises:
            ValueError: a row of the column is not a list of questions.
            InvalidScores: there are 8 samples with questions or more, and none has a score.
            ServerError: the server could not be asked.
        """
        rows = read_column(self.name, "questions", questions, read_questions)
        turns = [[one.rotated(k) for one in own for k in range(min(self.turns, len(one.choices)))] for own in rows]
        about = [_IMAGE if completions is None else f"{_TEXT}{text}\n----\n" for text in completions or prompts]
        replies = self.asked([
            [Question(about[row] + told(one), media_of(row, images)) for one in own] for row, own in enumerate(turns)
        ])  # fmt: skip
        each = [
            [reading_of(partial(marked, one), answer) for one, answer in zip(*both)] for both in zip(turns, replies)
        ]
        return scores_of(self.name, [mean_reading(own, "no questions") for own in each], ("told",))


def read_questions(given: Any, where: str) -> list[Choosing]:
    """Read the questions of a prompt; a text may contain them as JSON.

    Raises:
        ValueError: they are not a list of {question, choices, answer}, or `answer` is none of the choices.
    """
    return [_read_question(entry, where) for entry in read_entries(given, where, MOST_QUESTIONS, "questions")]


def _read_question(entry: Any, where: str) -> Choosing:
    known = isinstance(entry, Mapping) and set(entry) == {"question", "choices", "answer"}
    text, choices, answer = (entry[name] for name in ("question", "choices", "answer")) if known else ("", [], "")
    listed = [str(choice).strip() for choice in choices] if isinstance(choices, (list, tuple)) else []
    fits = isinstance(text, str) and text.strip() and 2 <= len(listed) < len(LETTERS) and all(listed)
    if not fits or len(set(listed)) < len(listed) or str(answer).strip() not in listed:
        raise ValueError(
            f"{where} has {entry!r:.80}; give {{question: ..., choices: [...], answer: ...}} with 2 to "
            f"{len(LETTERS) - 1} different choices, and the answer is one of them"
        )
    return Choosing(text.strip(), tuple(listed), listed.index(str(answer).strip()))


def told(question: Choosing) -> str:
    """Return the text of a question with its choices, and with the choice of not knowing."""
    lines = "\n".join(f"{letter}) {choice}" for letter, choice in zip(LETTERS, (*question.choices, _UNKNOWN)))
    return f"{question.question}\n{lines}{_END}"


def read_letter(answer: JudgeReply, count: int) -> int:
    """Return the place of the letter that an answer begins with, from 0 to `count`; `count` says "not told".

    Raises:
        Unreadable: the answer begins with no letter of a choice.
    """
    text = readable(answer)
    found = _FIRST.match(text)
    if found is None or found[1].upper() not in LETTERS[: count + 1]:
        raise Unreadable(f"no letter of a choice: {text[:60]!r}")
    return LETTERS.index(found[1].upper())


def marked(question: Choosing, answer: JudgeReply) -> Reading:
    """Return 1 for a right answer to a question and 0 for a wrong one, and whether the sample told any answer.

    Raises:
        Unreadable: the answer begins with no letter of a choice.
    """
    place = read_letter(answer, len(question.choices))
    said, right = (*question.choices, _UNKNOWN)[place], place == question.right
    note = f"{question.question} {said}{'' if right else ' (wrong)'}"
    return Reading(float(right), note, {"told": float(place < len(question.choices))})
