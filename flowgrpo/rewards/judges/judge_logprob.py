"""Scores from the probabilities of answer words: one token for each sample, and no text to parse.

VQAScore (Lin et al., arXiv 2404.01291) is the probability that a model answers "Yes" when it is asked whether the image
shows the text. DeQA-Score (You et al., arXiv 2501.11561) is the expected level of quality under the probabilities of
the words from "excellent" to "bad".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..options import check_flag
from ..scores import InvalidScores, Scores
from .judge import scored
from .judge_answers import Unreadable
from .judge_client import ALTERNATIVES, JudgeReply, Question, media_of
from .judge_prompts import Template, values_of
from .served_judge import ServedJudge

ROUNDING = 1e-3
"""A log-prob that exceeds 0 by at most this much counts as 0: it was computed in half precision."""
YES_OR_NO = {"Yes": 1.0, "No": 0.0}
ABOUT_IMAGES = 'Does this figure show "{prompt}"? Please answer yes or no.'


class JudgeLogprob(ServedJudge):
    """Expected value of a judge's one-word answer, from the log-probs of its first token: VQAScore, DeQA-Score.

    If p_k is the probability of the answer k as the first token, and v_k is its value,

        score = Σ_k v_k·p_k / Σ_k p_k

    Only the 20 most probable tokens are known; an answer that is not among them has p_k = 0. White space around a token
    and its case do not count. The answers should be single tokens of the judge. The sub-score `mass` is Σ_k p_k; if it
    is small, the judge says something else.

    Args:
        server: {url, model, ...}; see `JudgeServer`. The server must return log-probs.
        prompt: the question, in which {prompt}, {completion} and {COLUMN} are replaced; the default is VQAScore's
            question.
        answers: word -> value; {Yes: 1, No: 0} if absent.
        begun: the start of the answer, which the word completes, such as DeQA's "The quality of the image is". The
            server must be able to continue a message; vLLM and SGLang are able to.
        normalise: if true, divide by Σ_k p_k. If false, the score is Σ_k v_k·p_k.
        least_mass: a sample has no score if Σ_k p_k is smaller than this.
        system: the system message for the model.

    Raises:
        ValueError: an option is wrong, or the environment variable of the key is not set.
    """

    name = "judge_logprob"
    # Only one token is needed. More tokens would only cost time.
    max_tokens = 1

    def __init__(
        self,
        server: Mapping[str, Any],
        prompt: str = ABOUT_IMAGES,
        *,
        answers: Mapping[str, float] | None = None,
        begun: str = "",
        normalise: bool = True,
        least_mass: float = 0.1,
        system: str = "",
    ) -> None:
        check_flag(self.name, "normalise", normalise)
        if isinstance(least_mass, bool) or not isinstance(least_mass, (int, float)) or not 0 <= least_mass < 1:
            raise ValueError(f"judge_logprob: least_mass is {least_mass!r}; give a number of 0 or more, below 1")
        if not isinstance(begun, str):
            raise ValueError(f"judge_logprob: begun is {begun!r}; give a text")
        self.answers = _check_answers(YES_OR_NO if answers is None else answers)
        self.prompt, self.begun = Template(self.name, "prompt", prompt), begun
        self.normalise, self.least_mass = normalise, least_mass
        super().__init__(server, system=system, needed=("prompts", *self.prompt.needed), logprobs=True)

    def __call__(
        self,
        prompts: Sequence[str],
        images: Tensor | None = None,
        completions: Sequence[str] | None = None,
        **columns: Any,
    ) -> Scores:
        """Return the expected values.

        Args:
            prompts: B strings.
            images: [B, 3, H, W] or [B, F, 3, H, W] in [0, 1].
            completions: B strings, instead of images.
            columns: name -> B values, for the prompt.

        Returns:
            Scores with B values between the smallest and the largest value of an answer; NaN if the judge says
            something else. Sub-score `mass`: Σ_k p_k in [0, 1].

        Raises:
            InvalidScores: the server returns no log-probs, or there are 8 samples or more and none has a score.
            ServerError: the server could not be asked.
        """
        questions = [
            Question(
                self.prompt.fill(values_of(row, prompts, completions, columns)),
                media_of(row, images),
                self.begun,
            )
            for row in range(len(prompts))
        ]
        answers = self.client.ask(questions)
        if answers and not any(answer.first or answer.refused for answer in answers):
            raise InvalidScores(
                f"judge_logprob: {self.client.server.url} returns no log-probs of tokens; use a server that does "
                "(vLLM, SGLang), or the reward judge"
            )
        found = scored(self.name, answers, self._expected)
        masses = [math.fsum(self._probabilities(answer).values()) for answer in answers]
        return Scores(found.values, {"mass": masses}, [_note(answer) for answer in answers])

    def _probabilities(self, answer: JudgeReply) -> dict[str, float]:
        """Return the probability of each answer that is among the alternatives, summed over its spellings."""
        found: dict[str, list[float]] = {}
        for token, logprob in answer.first:
            word = _fold(token)
            if word in self.answers:
                found.setdefault(word, []).append(math.exp(min(logprob, 0.0)) if logprob <= ROUNDING else math.nan)
        return {word: math.fsum(values) for word, values in found.items()}

    def _expected(self, answer: JudgeReply) -> float:
        if answer.refused:
            raise Unreadable(answer.refused)
        probabilities = self._probabilities(answer)
        mass = math.fsum(probabilities.values())
        if math.isnan(mass):
            raise Unreadable("an answer has a log-prob above 0, or one that is not a number")
        if not mass or mass < self.least_mass:
            raise Unreadable(f"the answers have a total probability of {mass:.3g}")
        mean = math.fsum(self.answers[word] * value for word, value in probabilities.items())
        return mean / mass if self.normalise else mean


def _check_answers(answers: Any) -> dict[str, float]:
    """Return the values of the answers, by the folded words.

    Raises:
        ValueError: the answers are not two or more different words, each with a finite number.
    """
    example = (
        "give two or more words with a number each, such as {'Yes': 1, 'No': 0} (in quotes: YAML reads Yes as true)"
    )
    if not isinstance(answers, Mapping) or len(answers) < 2 or len(answers) > ALTERNATIVES:
        raise ValueError(f"judge_logprob: answers is {answers!r}; {example}")
    for word, value in answers.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not isinstance(word, str) or not word.strip() or not number:
            raise ValueError(f"judge_logprob: answers has {word!r}: {value!r}; {example}")
    folded = {_fold(word): float(value) for word, value in answers.items()}
    if len(folded) < len(answers):
        raise ValueError(f"judge_logprob: answers {list(answers)} differ only in case; {example}")
    return folded


def _fold(token: str) -> str:
    # Some servers return tokens in the spelling of the tokenizer, with its special characters for a space.
    return token.strip(" \t\n▁Ġ").casefold()


def _note(answer: JudgeReply) -> str:
    if answer.refused:
        return f"no score ({answer.refused})"
    return ", ".join(f"{token!r} {math.exp(min(logprob, 0.0)):.3f}" for token, logprob in answer.first[:5])
