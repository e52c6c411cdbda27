"""UnifiedReward: vision-language models that were tuned to judge generated images and videos.

Wang et al., "Unified Reward Model for Multimodal Understanding and Generation" (arXiv 2503.05236); the version with
reasoning: arXiv 2505.03318. Comparisons of pairs within a group as rewards: Pref-GRPO (arXiv 2508.20751).

The prompts here ask for the answers that these models were tuned to give, but the wording is ours. If you want to
compare scores with published ones, give the text from the model's own page as `prompt` and `pair_prompt`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..scores import Scores
from .judge import SCORE, scored
from .judge_answers import ScoreReader, Unreadable, note_of, readable
from .judge_client import JudgeReply, Question
from .judge_pairs import read_preference
from .judge_prompts import Template, values_of
from .served_judge import Reading, ServedJudge, scores_of

SLACK = 0.5
AXES = {
    "image": {
        "Alignment": "how far the image shows what the caption says",
        "Coherence": "how free the image is of distortions and other faults",
        "Style": "how appealing the image looks, whatever the caption says",
    },
    "video": {
        "Alignment": "how far the video shows what the caption says",
        "Physics": "how plausible motion, weight and contact are",
        "Style": "how appealing the video looks, whatever the caption says",
    },
}
FORMS = ("axes", "final")


class UnifiedReward(ServedJudge):
    """A UnifiedReward model behind an OpenAI-compatible server: scores, or preferences for `win_rate`.

    Used as a reward, it scores every sample. With `form: axes`, the score is the mean of Alignment, Coherence and Style
    (for videos: Alignment, Physics and Style), which versions 1.5 and 2.0 give from 1 to 5. With `form: final`, the
    score is the "Final Score" from 1 to 5 that the first versions give. Used as the judge of `win_rate`, it compares
    pairs. It reads answers such as "Image 1 is better", with or without reasoning before it, or the relative scores of
    each axis that version 2.0 gives; see `read_preference`.

    Args:
        server: {url, model, ...}; see `JudgeServer`.
        form: "axes" or "final".
        scale: lowest and highest score, which become 0 and 1; null keeps the score unchanged. A score that is at most
            1/2 outside the scale counts as the end of the scale. A score further outside is not accepted.
        prompt: the question about one sample, in which {prompt} is replaced; the default is a question of the package.
        pair_prompt: the question about two samples.

    Raises:
        ValueError: an option is wrong, or the environment variable of the key is not set.
    """

    name = "unified_reward"
    max_tokens = 4096

    def __init__(
        self,
        server: Mapping[str, Any],
        form: str = "axes",
        scale: Sequence[float] | None = (1, 5),
        prompt: str | None = None,
        pair_prompt: str | None = None,
    ) -> None:
        if form not in FORMS:
            raise ValueError(f"unified_reward: form is {form!r}; give one of {', '.join(FORMS)}")
        self.form = form
        self.prompt = None if prompt is None else Template(self.name, "prompt", prompt)
        self.pair_prompt = None if pair_prompt is None else Template(self.name, "pair_prompt", pair_prompt)
        labels = {"Final"} if form == "final" else {axis for axes in AXES.values() for axis in axes}
        self.readers = {
            label: ScoreReader(self.name, rf"\b{label}\s+{SCORE}", None, scale, SLACK, ours=True) for label in labels
        }
        super().__init__(server, needed=("prompts", "images", *(self.prompt.needed if self.prompt else ())))

    def __call__(self, images: Tensor, prompts: Sequence[str], **columns: Any) -> Scores:
        """Return the scores that the judge gives.

        Args:
            images: [B, 3, H, W] or [B, F, 3, H, W] in [0, 1].
            prompts: B strings.
            columns: name -> B values, for the prompt.

        Returns:
            Scores with B values in [0, 1], or unchanged if there is no scale; NaN if an axis is missing from the
            answer. Sub-scores are the axes; notes are the answers.

        Raises:
            InvalidScores: there are 8 answers or more, and none has all scores.
            ServerError: the server could not be asked.
        """
        kind = _kind(images)
        template = self.prompt or Template(self.name, "prompt", about_one(kind, self.form))
        questions = [
            Question(template.fill(values_of(row, prompts, None, columns)), (images[row],))
            for row in range(len(prompts))
        ]
        labels = ["Final"] if self.form == "final" else list(AXES[kind])
        found = [self._axes(answer, labels) for answer in self.client.ask(questions)]
        return scores_of(self.name, found, () if self.form == "final" else [label.lower() for label in labels])

    def compare(self, first: Tensor, second: Tensor, prompts: Sequence[str], **columns: Any) -> Scores:
        """Return the preference for the first sample of each pair, in [0, 1]; NaN if there is none, which counts 1/2.

        Args:
            first: [P, 3, H, W] or [P, F, 3, H, W] in [0, 1].
            second: [P, 3, H, W] or [P, F, 3, H, W] in [0, 1].
            prompts: P strings.
            columns: name -> P values, for the prompt.
        """
        frames = min(first.shape[1], self.client.server.frames) if first.ndim == 5 else 0
        template = self.pair_prompt or Template(self.name, "pair_prompt", about_two(_kind(first), frames))
        questions = [
            Question(template.fill(values_of(row, prompts, None, columns)), (first[row], second[row]))
            for row in range(len(prompts))
        ]
        return scored(self.name, self.client.ask(questions), lambda answer: read_preference(readable(answer)))

    def _axes(self, answer: JudgeReply, labels: Sequence[str]) -> Reading:
        """Return the mean of the axes, NaN if one is missing, and the score of each axis."""
        axes, problem = dict[str, float](), ""
        for label in labels:
            try:
                axes[label.lower()] = self.readers[label].read(answer)
            except Unreadable as error:
                axes[label.lower()] = math.nan
                problem = problem or f"{label}: {error}"
        return Reading(math.fsum(axes.values()) / len(axes), note_of(answer, problem=problem), axes)


def about_one(kind: str, form: str) -> str:
    """Return the question about one image or video.

    Args:
        kind: "image" or "video".
        form: "axes" or "final".
    """
    if form == "final":
        return (
            f"Here is a generated {kind} and the caption it was made from. Judge how well it matches the caption, and "
            f"its visual quality. Go through the elements of the caption and say of each whether it is there, as "
            f"'element (type): 1' or 'element (type): 0'. Then give a score from 1 to 5 after 'Final Score:'.\n"
            "Text Caption: [{prompt}]"
        )
    axes = AXES[kind]
    rules = "\n".join(f"- {axis} Score: {meaning}" for axis, meaning in axes.items())
    lines = "\n".join(f"{axis} Score (1-5): N" for axis in axes)
    return (
        f"Here is a generated {kind} and the caption it was made from. Rate it from 1 to 5 on each of these:\n{rules}\n"
        f"\nAnswer in this form:\n\n{lines}\n\n"
        "Text Caption: [{prompt}]"
    )


def about_two(kind: str, frames: int = 0) -> str:
    """Return the question about two images or videos.

    Args:
        kind: "image" or "video".
        frames: number of frames that are shown of each video.
    """
    name = kind.capitalize()
    shown = f" The first {frames} frames are {name} 1, the other {frames} are {name} 2." if frames else ""
    return (
        f"Here are two generated {kind}s and the caption that both were made from.{shown} Compare how well they match "
        f"the caption, and their visual quality. Conclude with exactly one of:\n"
        f"<answer>{name} 1 is better</answer>\n<answer>{name} 2 is better</answer>\n"
        f"<answer>Both {kind}s are equally good</answer>\n"
        "Text Caption: [{prompt}]"
    )


def _kind(images: Tensor) -> str:
    return "video" if images.ndim == 5 else "image"
