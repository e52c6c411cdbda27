"""Scores of the steps of a completion, from critiques that each read all steps at once.

CAPO (arXiv 2508.02298): a language model that was not trained for it names the wrong steps of a completion in one
answer. Several critiques vote on each step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..options import check_count, check_positive, check_share
from ..scores import Scores
from .judge_answers import Unreadable, note_of, read_fields
from .judge_client import JudgeReply, Question
from .served_judge import Reading, ServedJudge, scores_of

_REASON_CHARACTERS = 400
_BEFORE, _BETWEEN, _AFTER = (
    "Here are a task and an answer to it, cut into numbered steps. What the answer says of itself does not count.\n"
    "---- task\n",
    "\n---- answer\n",
    "\n----\nRead the steps in order. A step is wrong if it makes a mistake of its own: something false, or something "
    "that does not follow. A step that only goes on from a mistake of an earlier step is not wrong. Answer with a JSON "
    'object and nothing else, such as {"reason": "step 2 adds 3 and 4 to 8", "wrong": [2]}; "wrong" has the numbers of '
    "all wrong steps, and is [] if there is none.",
)


class Critique(ServedJudge):
    """Steps of a completion that are right, according to critiques of a model behind a server (CAPO, 2508.02298).

    A critique reads all steps in one question and names the wrong ones. If q_k is the share of the critiques that name
    step k, the step has score 0 if q_k is at least `quorum`, and 1 otherwise. The value of a completion is the mean
    over its steps. The steps are the parts into which the recipe cuts completions, and `credit: parts` with
    `later: false` gives every step its own score.

    A critique that cannot be read has no vote. A completion has no score if none of its critiques can be read.

    Args:
        server: {url, model, ...}; see `JudgeServer`.
        votes: number of critiques of a completion.
        quorum: share of the critiques that makes a step wrong, above 0: 0.5 is the paper's majority, and 1 its
            intersection.
        temperature: of the critiques, if there are several; vote k is asked with seed k. One critique has temperature
            0.
        system: the system message for the model.

    Raises:
        ValueError: an option is wrong, or the environment variable of the key is not set.
    """

    name = "critique"
    max_tokens = 2048

    def __init__(
        self,
        server: Mapping[str, Any],
        *,
        votes: int = 1,
        quorum: float = 0.5,
        temperature: float = 0.7,
        system: str = "",
    ) -> None:
        check_count(self.name, "votes", votes)
        check_share(self.name, "quorum", quorum)
        check_positive(self.name, "temperature", temperature, "0.7")
        super().__init__(server, system=system)
        self.votes, self.quorum = votes, float(quorum)
        self.temperature = float(temperature) if votes > 1 else 0.0

    def __call__(self, completions: Sequence[str], prompts: Sequence[str], parts: Sequence[Sequence[str]]) -> Scores:
        """Ask for the critiques of B completions.

        Args:
            completions: B strings.
            prompts: B strings.
            parts: B lists of the steps of each completion.

        Returns:
            Scores with B values in [0, 1]; NaN without a readable critique. `parts`: 1 for a right step, 0 for a wrong
            one. Sub-score `votes`: number of critiques that could be read. Notes: the wrong steps with the share of
            the critiques that name each, and the reasons.

        Raises:
            InvalidScores: there are 8 completions or more, and none has a score.
            ServerError: the server could not be asked.
        """
        asked = [
            [Question(about_steps(prompt, steps), (), "", self.temperature, vote) for vote in range(self.votes)]
            for prompt, steps in zip(prompts, parts)
        ]
        found = [self._judged(answers, len(steps)) for answers, steps in zip(self.asked(asked), parts)]
        return scores_of(self.name, found, ("votes",), parts=True)

    def _judged(self, answers: Sequence[JudgeReply], steps: int) -> Reading:
        """Return the scores of the steps, their mean, the number of critiques that could be read, and the note."""
        found, problem = list[tuple[frozenset[int], str]](), ""
        for answer in answers:
            try:
                found.append(read_critique(answer, steps))
            except Unreadable as error:
                problem = problem or note_of(answer, problem=str(error))
        if not found:
            return Reading(note=problem, subs={"votes": 0.0})
        shares = [sum(step in wrong for wrong, _ in found) / len(found) for step in range(1, steps + 1)]
        named = [f"step {k}: wrong in {share:.0%}" for k, share in enumerate(shares, start=1) if share]
        said = [reason for _, reason in found if reason]
        own = [float(share < self.quorum) for share in shares]
        value = sum(own) / len(own) if own else math.nan
        return Reading(
            value, "\n".join([*named, *said]), {"votes": float(len(found))}, each=[Reading(score) for score in own]
        )


def about_steps(prompt: str, steps: Sequence[str]) -> str:
    """Return the question about all steps of a completion, numbered from 1."""
    # The pieces are joined, and nothing is replaced inside them, because prompts and completions may contain braces.
    listed = "\n".join(f"Step {number}: {step.strip()}" for number, step in enumerate(steps, start=1))
    return _BEFORE + prompt + _BETWEEN + listed + _AFTER


def read_critique(answer: JudgeReply, steps: int) -> tuple[frozenset[int], str]:
    """Return the numbers of the wrong steps of a critique, from 1 to `steps`, and its reason.

    Raises:
        Unreadable: the answer is no JSON object with the numbers of existing steps in `wrong`.
    """
    value = read_fields(answer)
    wrong = value.get("wrong")
    if not isinstance(wrong, list):
        raise Unreadable("the JSON of the answer has no list `wrong`")
    for number in wrong:
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= steps:
            raise Unreadable(f"there is no step {number!r:.20}; there are {steps}")
    return frozenset(wrong), str(value.get("reason") or "")[:_REASON_CHARACTERS]
