"""A checklist of what a generated image must keep from its reference images. A judge that sees all of them checks it.

Visual-Aware CoT: a plan of what must stay consistent with the reference images, and a reward that checks the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..options import check_count
from ..pixels import load_picture
from ..scores import Scores
from .judge_answers import Unreadable, list_in, note_of, read_object, readable
from .judge_client import JudgeReply, Question
from .judge_images import data_urls
from .judge_rubric import Case, CriteriaJudge, Criterion
from .served_judge import scores_of

_MADE = ("The last picture was made from the {count} before it and from this text:\n----\n", "\n----\n")
_DRAFT = (
    "A new picture will be made from these {count} and from this text:\n----\n",
    "\n----\nList what the new picture must have in common with the pictures here, and what the text asks to change. "
    "Write at most {most} short sentences about the new picture, each about something else that can be seen. Answer "
    'with a JSON list of these sentences and nothing else, such as ["The dog has one white ear."].',
)


class Checklist(CriteriaJudge):
    """Weighted share of a checklist that an image meets beside its reference images (Visual-Aware CoT).

    The reference images are in the column `image`, which also condition the pipeline. The checklist of a prompt
    is its column `criteria`, else the option `criteria`. Without both, the judge writes the list from the prompt and
    the reference images, before it sees any sample. All samples of a prompt are judged by one list. Then the judge
    sees the reference images and the sample, and says for each criterion whether it is met. The score is as
    for `rubric`.

    A sample has no score if the judge writes no list, or leaves a criterion undecided.

    Args:
        server: {url, model, ...}; see `JudgeServer`. The model must take several images.
        criteria: texts, or {text, weight, name}; see `rubric`.
        most: largest number of criteria that the judge writes.
        ask: "each": one question for each criterion, answered yes or no; "together": one for each sample.
        system: the system message for the model.

    Raises:
        ValueError: an option is wrong, or the environment variable of the key is not set.
    """

    name = "checklist"

    def __init__(
        self,
        server: Mapping[str, Any],
        criteria: Sequence[Any] | None = None,
        *,
        most: int = 8,
        ask: str = "each",
        system: str = "",
    ) -> None:
        check_count(self.name, "most", most)
        super().__init__(server, criteria, ask, system, ("images", "prompts", "image"))
        self.most = most

    def __call__(
        self,
        images: Tensor,
        prompts: Sequence[str],
        image: Sequence[Any],
        criteria: Sequence[Any] | None = None,
        **columns: Any,
    ) -> Scores:
        """Ask the judge for lists and verdicts.

        Args:
            images: [B, 3, H, W] or [B, F, 3, H, W] in [0, 1].
            prompts: B strings.
            image: B paths, or lists of paths, of the reference images.
            criteria: B lists; None takes the option, or lets the judge write the list.
            columns: not used.

        Returns:
            Scores with B values in [0, 1], NaN for a sample without a score. Sub-scores and notes as for `rubric`.

        Raises:
            ValueError: a reference image cannot be read, or a row of the column is not a list of criteria.
            InvalidScores: there are 8 samples or more, and none has a score.
            ServerError: the server could not be asked.
        """
        own = self.of_column(criteria, len(prompts))
        shown = list(zip(prompts, references_of(image, self.client.server.side)))
        drafts = self._drafts({k: shown[k] for k, given in enumerate(own) if not (given or self.criteria)})
        cases = [
            Case(
                Question(_about(_MADE, *shown[k]), (*shown[k][1], images[k])), *drafts.get(k, (given or self.criteria,))
            )
            for k, given in enumerate(own)
        ]
        return scores_of(self.name, self.judged(cases), self.sub_scores(not any(own)))

    def _drafts(self, wanted: Mapping[int, tuple[str, tuple[str, ...]]]) -> dict[int, tuple[list[Criterion], str]]:
        """Return a list that the judge wrote for each row, or no list and the reason. Equal rows are asked once."""
        end = _DRAFT[1].replace("{most}", str(self.most))
        asked = {shown: Question(_about((_DRAFT[0], end), *shown), shown[1]) for shown in wanted.values()}
        replies = dict(zip(asked, self.client.ask(list(asked.values()))))
        return {row: read_draft(replies[shown], self.most) for row, shown in wanted.items()}


def _about(words: tuple[str, str], prompt: str, pictures: Sequence[str]) -> str:
    # The pieces are joined, and nothing is replaced inside the prompt, because it may contain braces.
    return words[0].replace("{count}", str(len(pictures))) + prompt + words[1]


def references_of(column: Sequence[Any], side: int | None) -> list[tuple[str, ...]]:
    """Return the pictures of each row of a column of paths, or of lists of paths, as data URLs. A file is read once.

    Args:
        column: B paths, or lists of paths.
        side: pictures with a longer side, in pixels, are shrunk to this side; None shrinks nothing.

    Raises:
        ValueError: a row has no path, or a picture cannot be read.
    """
    known: dict[str, str] = {}
    found = []
    for row, entry in enumerate(column):
        paths = list(entry) if isinstance(entry, (list, tuple)) else [entry]
        if not paths or not all(isinstance(path, str) and path for path in paths):
            raise ValueError(
                f"checklist: the column `image`, row {row}, has {entry!r:.80}; give a path, or a list of paths"
            )
        for path in paths:
            if path not in known:
                (known[path],) = data_urls(load_picture(Path(path)), side)
        found.append(tuple(known[path] for path in paths))
    return found


def read_draft(answer: JudgeReply, most: int) -> tuple[list[Criterion], str]:
    """Return the first `most` criteria of a list that a judge wrote; or no criteria, and the note that says why."""
    try:
        texts = list_in(read_object(readable(answer)))
        if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
            raise Unreadable("the JSON of the answer is not a list of sentences")
        return [Criterion(text) for text in dict.fromkeys(text.strip() for text in texts[:most])], ""
    except Unreadable as problem:
        return [], note_of(answer, problem=f"no checklist: {problem}")
