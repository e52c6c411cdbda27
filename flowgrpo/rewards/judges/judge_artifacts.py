"""Artifacts in generated images: a vision-language model finds them, and names each by a label.

MagicMirror (arXiv 2509.10260): a taxonomy of artifacts, and an assessor that gives labels. The taxonomy here is ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..options import check_weights
from ..scores import Scores
from .judge_answers import Unreadable, list_in, read_object, readable
from .judge_client import JudgeReply, Question
from .served_judge import Reading, ServedJudge, reading_of, scores_of

MOST_FINDINGS = 50
SEVERITIES = {"slight": 1 / 3, "clear": 2 / 3, "severe": 1.0}
LABELS = {
    "hands": "hands or feet with a wrong number of fingers or toes, or with wrong shapes",
    "faces": "faces, eyes or teeth that are distorted",
    "bodies": "people or animals with missing, extra, melted or wrongly bent parts",
    "objects": "things that are broken, melted or cannot be built",
    "contact": "things that go through each other, float, or touch where they cannot",
    "space": "wrong perspective, shadows or reflections",
    "text": "letters that are no letters, or words that are no words where words should be",
    "surface": "blur, noise, seams, repeated patterns or patches that do not belong there",
}
"""Label -> what it means, for images of any kind."""
_QUESTION = (
    "This picture was made by a model from the text between the lines.\n----\n",
    "\n----\nLook for artifacts: faults that a photographer or painter would not make. What the text asks for is no "
    "artifact, however strange it is. Use these labels:\n",
    '\nAnswer with a JSON list and nothing else, one object for each artifact, such as {"label": "',
    '", "severity": "slight", "where": "a few words"}. severity is slight, clear or severe. Answer with [] if there is '
    "no artifact.",
)


@dataclass(frozen=True)
class Artifact:
    """One artifact: its label, its severity as a word of `SEVERITIES`, and where it is."""

    label: str
    severity: str
    where: str


class Artifacts(ServedJudge):
    """Freedom from artifacts, which a served vision-language model finds and labels (MagicMirror, 2509.10260).

    If s_k is the severity of the worst artifact of label k (slight 1/3, clear 2/3, severe 1, none 0), and w_k is the
    weight of the label, the score is

        1 / (1 + Σ_k w_k·s_k)

    so an image without artifacts has 1, and every further label lowers the score. The labels are the `answers` of the
    reward, and the notes say where each artifact is. A model that was tuned to assess artifacts can be served like any
    other; give its labels.

    Args:
        server: {url, model, ...}; see `JudgeServer`.
        labels: label -> what it means. The default is `LABELS`.
        weights: label -> weight of 0 or more; 1 for a label that is not named.
        system: the system message for the model.

    Raises:
        ValueError: an option is wrong, or the environment variable of the key is not set.
    """

    name = "artifacts"

    def __init__(
        self,
        server: Mapping[str, Any],
        labels: Mapping[str, str] | None = None,
        *,
        weights: Mapping[str, float] | None = None,
        system: str = "",
    ) -> None:
        self.labels = check_labels(LABELS if labels is None else labels)
        self.weights = check_weights(self.name, weights, dict.fromkeys(self.labels, 1.0))
        super().__init__(server, system=system, needed=("images", "prompts"))

    def __call__(self, images: Tensor, prompts: Sequence[str], **columns: Any) -> Scores:
        """Ask for the artifacts of B images.

        Args:
            images: [B, 3, H, W] or [B, F, 3, H, W] in [0, 1].
            prompts: B strings.
            columns: not used.

        Returns:
            Scores with B values in (0, 1]; NaN if the answer cannot be read. Sub-scores: the severity s_k of each
            label, in [0, 1]. Answers: the labels in the order of the option, joined by commas. Notes: a line for each
            artifact.

        Raises:
            InvalidScores: there are 8 images or more, and none has a score.
            ServerError: the server could not be asked.
        """
        questions = [
            Question(about_artifacts(prompt, self.labels), (images[row],)) for row, prompt in enumerate(prompts)
        ]
        found = [reading_of(self._read, answer) for answer in self.client.ask(questions)]
        return scores_of(self.name, found, self.labels, answers=True)

    def _read(self, answer: JudgeReply) -> Reading:
        found = read_artifacts(answer, self.labels)
        worst = {
            label: max((SEVERITIES[one.severity] for one in found if one.label == label), default=0.0)
            for label in self.labels
        }
        value = 1 / (1 + math.fsum(self.weights[label] * s for label, s in worst.items()))
        note = "\n".join(f"{one.label} ({one.severity}): {one.where}" for one in found)
        labels = ", ".join(label for label, s in worst.items() if s)
        return Reading(value, note or "no artifacts", worst, labels or "no artifacts")


def about_artifacts(prompt: str, labels: Mapping[str, str]) -> str:
    """Return the question about the artifacts of an image."""
    lines = "\n".join(f"- {label}: {meaning}" for label, meaning in labels.items())
    before, between, after, end = _QUESTION
    return before + prompt + between + lines + after + next(iter(labels)) + end


def read_artifacts(answer: JudgeReply, labels: Mapping[str, str]) -> list[Artifact]:
    """Return the artifacts that an answer lists.

    Raises:
        Unreadable: the answer is no JSON list of artifacts with known labels and severities.
    """
    listed = list_in(read_object(readable(answer)))
    if listed is None or len(listed) > MOST_FINDINGS:
        raise Unreadable(f"the JSON is not a list of at most {MOST_FINDINGS} artifacts")
    known, found = {label.casefold(): label for label in labels}, []
    for entry in listed:
        given = entry if isinstance(entry, Mapping) else {}
        label = known.get(str(given.get("label")).strip().casefold())
        severity = str(given.get("severity")).strip().casefold()
        if label is None or severity not in SEVERITIES:
            raise Unreadable(f"{entry!r:.80} is no artifact with a known label and severity")
        found.append(Artifact(label, severity, str(given.get("where") or "")[:200]))
    return found


def check_labels(labels: Any) -> dict[str, str]:
    """Return the labels with their meanings.

    Raises:
        ValueError: they are not different words with a meaning each.
    """
    texts = [text for pair in labels.items() for text in pair] if isinstance(labels, Mapping) else []
    fits = bool(texts) and all(isinstance(text, str) and text.strip() for text in texts)
    if not fits or len({label.strip().casefold() for label in labels}) < len(labels):
        raise ValueError(f"artifacts: labels is {labels!r:.80}; give label: meaning, such as hands: wrong fingers")
    return {label.strip(): meaning.strip() for label, meaning in labels.items()}
