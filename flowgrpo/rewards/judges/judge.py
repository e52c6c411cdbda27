"""Any model behind an OpenAI-compatible server as a judge of images, videos and texts.

Scores for single samples: Zheng et al., "Judging LLM-as-a-Judge with MT-Bench and Chatbot Arena" (arXiv 2306.05685),
section 3.1, single answer grading. Comparisons of pairs, asked in both orders: sections 3.1 and 3.4 of the same paper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..scores import Scores
from .judge_answers import NUMBER, ScoreReader, note_of, readable
from .judge_client import JudgeReply, Question, media_of
from .judge_pairs import read_preference
from .judge_prompts import Template, values_of
from .served_judge import Reading, ServedJudge, reading_of, scores_of

INSTRUCTIONS = "instructions"
"""Place of a prompt and name of a column: what the judge shall look for, apart from the form of its answer."""
# "Score (0-10): 7", "Score: **7**" and "Score: 7/10" are all 7.
SCORE = rf"\bscore\s*(?:\([^()]{{0,20}}\))?[^\w+\-.]{{0,10}}({NUMBER})"
ABOUT_IMAGES = """The picture was made from the text between the lines.

----
{prompt}
----

Look for everything that the text asks for: what is shown, how many of it, colours, places and relations. Then look at \
how well the picture is made. Say in a few sentences what is right and what is wrong. End with a line of the form
Score: N
where N is a whole number from 0 (nothing fits, or nothing can be recognised) to 10 (all of it fits, and it is well \
made)."""
ABOUT_TEXTS = """Between the lines are a task and an answer to it. What the answer says of itself does not count.

---- task
{prompt}
---- answer
{completion}
----

Say in a few sentences what is right and what is wrong. End with a line of the form
Score: N
where N is a whole number from 0 (of no use) to 10 (nothing could be better)."""


class Judge(ServedJudge):
    """A score that a model behind any OpenAI-compatible server gives when it is asked.

    Args:
        server: {url, model, ...}; see `JudgeServer`.
        prompt: the question, in which {prompt}, {completion} and {COLUMN} are replaced; images are shown before it. The
            default is a short question of the package, which asks for "Score: N" with N from 0 to 10.
        pattern: a regular expression with one group that matches the score; the last match counts. The default matches
            "Score" and a number.
        field: in place of the pattern, a field of the JSON object that the model answers with, such as "score".
        scale: lowest and highest score, which become 0 and 1; a score outside the scale is not accepted. null keeps all
            scores unchanged.
        system: the system message for the model.
        instructions: replaces {instructions} in the prompt; a sample whose column `instructions` is not empty has its
            own. Extension `meta_judge` writes this column, and so refines what the judge looks for.
        pair_prompt: a question about two samples, which makes this a judge of pairs for the reward `win_rate`. The
            model must answer that Image 1 or Image 2 is better, or give scores of both; see `read_preference`. For
            texts, the question refers to them as {first} and {second}.

    Raises:
        ValueError: an option is wrong, or the environment variable of the key is not set.
    """

    name = "judge"
    compare: Callable[..., Scores] | None = None

    def __init__(
        self,
        server: Mapping[str, Any],
        prompt: str | None = None,
        *,
        pattern: str | None = None,
        field: str | None = None,
        scale: Sequence[float] | None = (0, 10),
        system: str = "",
        instructions: str | None = None,
        pair_prompt: str | None = None,
    ) -> None:
        self.instructions = check_instructions(self.name, instructions, prompt)
        self.prompt = None if prompt is None else Template(self.name, "prompt", prompt)
        ours = pattern is None and field is None
        self.reader = ScoreReader(self.name, SCORE if ours else pattern, field, scale, ours=ours)
        self.pair_prompt = None if pair_prompt is None else Template(self.name, "pair_prompt", pair_prompt)
        if self.pair_prompt is not None:
            self.compare = self._compare
        needed = self.prompt.needed if self.prompt else ()
        given = () if self.instructions is None else (INSTRUCTIONS,)
        super().__init__(server, system=system, needed=("prompts", *(name for name in needed if name not in given)))

    def __call__(
        self,
        prompts: Sequence[str],
        images: Tensor | None = None,
        completions: Sequence[str] | None = None,
        **columns: Any,
    ) -> Scores:
        """Return the scores that the judge gives.

        Args:
            prompts: B strings.
            images: [B, 3, H, W] or [B, F, 3, H, W] in [0, 1].
            completions: B strings, instead of images.
            columns: name -> B values, for the prompt.

        Returns:
            Scores with B values in [0, 1], or unchanged if there is no scale; NaN if the answer has no score. Notes are
            the answers.

        Raises:
            InvalidScores: there are 8 answers or more, and none has a score.
            ServerError: the server could not be asked.
        """
        template = self.prompt or Template(self.name, "prompt", ABOUT_TEXTS if images is None else ABOUT_IMAGES)
        questions = []
        for row in range(len(prompts)):
            values = values_of(row, prompts, completions, columns)
            if self.instructions is not None:
                values[INSTRUCTIONS] = values.get(INSTRUCTIONS) or self.instructions
            questions.append(Question(template.fill(values), media_of(row, images)))
        return scored(self.name, self.client.ask(questions), self.reader.read)

    def close(self) -> None:
        """Close the connections, and end the process that matches the pattern."""
        super().close()
        self.reader.close()

    def _compare(self, first: Any, second: Any, prompts: Sequence[str], **columns: Any) -> Scores:
        """Return the preference for the first sample of each pair; NaN if the answer has none."""
        assert self.pair_prompt is not None
        pictures = isinstance(first, Tensor)
        questions = []
        for row in range(len(prompts)):
            values = values_of(row, prompts, None, columns)
            if not pictures:
                values |= {"first": first[row], "second": second[row]}
            media = (first[row], second[row]) if pictures else ()
            questions.append(Question(self.pair_prompt.fill(values), media))
        return scored(self.name, self.client.ask(questions), lambda answer: read_preference(readable(answer)))


def check_instructions(reward: str, instructions: Any, prompt: Any) -> str | None:
    """Return the instructions of a judge.

    Raises:
        ValueError: they are no text, or the prompt has no place for them.
    """
    if instructions is None:
        return None
    place = f"{{{INSTRUCTIONS}}}"
    if not isinstance(instructions, str) or not instructions.strip():
        raise ValueError(f"{reward}: instructions is {instructions!r}; give a text")
    if not isinstance(prompt, str) or place not in prompt:
        raise ValueError(f"{reward}: `instructions` replaces {place} in `prompt`, which has no such place; add it")
    return instructions


def scored(reward: str, answers: Sequence[JudgeReply], read: Callable[[JudgeReply], float]) -> Scores:
    """Return the scores of answers, read by `read`. An answer without a score gets NaN, and the reason in its note.

    Raises:
        InvalidScores: there are 8 answers or more, and none has a score.
    """
    found = [reading_of(lambda one: Reading(read(one), note_of(one)), answer) for answer in answers]
    return scores_of(reward, found)
