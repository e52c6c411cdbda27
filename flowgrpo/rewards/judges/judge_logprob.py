"""Scores from the probability of answer words: one token a sample, and no text to read.

VQAScore (Lin et al., arXiv 2404.01291): the probability that a model answers "Yes" when it is asked whether the image
shows the text. DeQA-Score (You et al., arXiv 2501.11561): the mean level of quality over the probabilities of
"excellent" to "bad".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..options import check_flag
from ..scores import InvalidScores, Scores
from ..within import signature_of
from .judge import scored
from .judge_answers import Unreadable
from .judge_client import ALTERNATIVES, JudgeClient, JudgeReply, Question
from .judge_prompts import Template, values_of

ROUNDING = 1e-3
"""A log-probability this far above 0 is one of 0, computed in half precision."""
YES_OR_NO = {"Yes": 1.0, "No": 0.0}
ABOUT_IMAGES = 'Does this figure show "{prompt}"? Please answer yes or no.'


class JudgeLogprob:
    """Expected value of a judge's one-word answer, from its token log-probabilities: VQAScore, DeQA and the like.

    With p_k the probability of the answer k as the first token, and v_k its value,

        score = Σ_k v_k·p_k / Σ_k p_k

    Only the 20 most probable tokens are known; an answer that is not among them counts 0. White space around a token
    and its case do not count. The answers should be single tokens of the judge: where the sub-score `mass`, which is
    Σ_k p_k, is small, it says something else.

    Args:
        server: {url, model, ...}; see `JudgeServer`. It has to give log-probabilities.
        prompt: the question, with {prompt}, {completion} and {COLUMN} replaced; VQAScore's if absent.
        answers: word -> value; {Yes: 1, No: 0} if absent.
        begun: the start of the answer, of which the word is the rest, such as DeQA's "The quality of the image is". The
            server has to be able to continue a message; vLLM and SGLang are.
        normalise: divide by Σ_k p_k; otherwise the score is Σ_k v_k·p_k.
        least_mass: a sample for which Σ_k p_k is smaller has no score.
        system: a system message.

    Raises:
        ValueError: an option is wrong, or the environment variable of the key is not set.
    """

    name = "judge_logprob"
    remote = True

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
        # One token is needed, and more would only cost time.
        self.client = JudgeClient(self.name, server, max_tokens=1, system=system, logprobs=True)
        self.prompt, self.begun = Template(self.name, "prompt", prompt), begun
        self.normalise, self.least_mass = normalise, least_mass
        self.batch_size = self.client.batch_size
        self.__signature__ = signature_of("prompts", *self.prompt.needed)

    def __call__(
        self,
        prompts: Sequence[str],
        images: Tensor | None = None,
        completions: Sequence[str] | None = None,
        **columns: Any,
    ) -> Scores:
        """Expected values.

        Args:
            prompts: B strings.
            images: [B, 3, H, W] or [B, F, 3, H, W] in [0, 1].
            completions: B strings, instead of images.
            columns: name -> B values, for the prompt.

        Returns:
            Scores with B values between the smallest and the largest value of an answer; NaN where the judge says
            something else. Sub-scores: `mass`, Σ_k p_k in [0, 1].

        Raises:
            InvalidScores: the server gives no log-probabilities, or no sample of 8 or more has a score.
            ServerError: the server could not be asked.
        """
        questions = [
            Question(
                self.prompt.fill(values_of(row, prompts, completions, columns)),
                () if images is None else (images[row],),
                self.begun,
            )
            for row in range(len(prompts))
        ]
        answers = self.client.ask(questions)
        if answers and not any(answer.first or answer.refused for answer in answers):
            raise InvalidScores(
                f"judge_logprob: {self.client.server.url} gives no log-probabilities of tokens; use a server that does "
                "(vLLM, SGLang), or the reward judge"
            )
        found = scored(self.name, answers, self._expected)
        masses = [math.fsum(self._probabilities(answer).values()) for answer in answers]
        return Scores(found.values, {"mass": masses}, [_note(answer) for answer in answers])

    def close(self) -> None:
        """Close the connections."""
        self.client.close()

    def _probabilities(self, answer: JudgeReply) -> dict[str, float]:
        """Probability of each answer that is among the alternatives, over all ways to write it."""
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
            raise Unreadable("an answer has a log-probability above 0, or one that is no number")
        if not mass or mass < self.least_mass:
            raise Unreadable(f"the answers have a probability of {mass:.3g} in all")
        mean = math.fsum(self.answers[word] * value for word, value in probabilities.items())
        return mean / mass if self.normalise else mean


def _check_answers(answers: Any) -> dict[str, float]:
    """Answers by their folded words.

    Raises:
        ValueError: they are not two or more different words, each with a finite number.
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
    # Some servers give tokens as the tokenizer spells them, with its signs for a space.
    return token.strip(" \t\n▁Ġ").casefold()


def _note(answer: JudgeReply) -> str:
    if answer.refused:
        return f"no score ({answer.refused})"
    return ", ".join(f"{token!r} {math.exp(min(logprob, 0.0)):.3f}" for token, logprob in answer.first[:5])
