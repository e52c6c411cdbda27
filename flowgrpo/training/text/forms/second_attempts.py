"""Second attempts: a completion is written again, with a draft, a critique, or from the place of an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from ....parts.choice import Choice
from ....parts.needs import needs
from ....parts.ranges import Count
from .filling import best_first, by_prompt, holds, scores_of, started, written

if TYPE_CHECKING:
    # This imports the libraries of models, and a recipe is read without them.
    from ..writing import Attempt, Writer


@needs(holds("template", "prompt", "draft"))
def drafts(
    writer: Writer, *, count: Count = 8, template: str = "{prompt}\nA draft of the answer: {draft}\nA better answer:"
) -> list[Attempt]:
    """The best of some drafts joins the prompt, and the completions of this longer prompt are trained.

    The drafts are not trained. Evaluations have no drafts. This is iGRPO (arXiv 2602.09000).

    Options:
        count: drafts of a prompt. To sample as much as without drafts, lower `rollout.group` by this number.
        template: the prompt with its best draft; holds `{prompt}` and `{draft}`, and may hold `{COLUMN}` of any column.
    """
    tried = writer.write(writer.starts(count=count))
    scores = scores_of(writer, tried)
    best = {p: best_first(rows, scores)[0] for p, rows in by_prompt(tried).items()}
    starts = [started(writer, p, template, draft=writer.text(tried[row])) for p, row in best.items()]
    return writer.write([one for one in starts for _ in range(writer.group)], stage=1)


@needs(holds("template", "prompt", "completion"))
def critiques(
    writer: Writer,
    *,
    template: str = "{prompt}\nA wrong answer: {completion}\nThe right answer is {answer}. A right solution:",
    keep: Count = 1,
    alone: bool = True,
    success: float = 0.5,
) -> list[Attempt]:
    """Failures are refined with a critique in the context, and the best refinements join the group.

    This is Critique-GRPO (arXiv 2506.03106) with critiques by rule: the template is the critique of a failure, and may
    tell the right answer from a column. A group without a failure has no refinement.

    Options:
        template: the prompt with a failure and its critique; holds `{prompt}` and `{completion}`, and may hold
            `{COLUMN}` of any column.
        keep: refinements of a prompt that join its group; a group is larger by this number.
        alone: whether a refinement is trained as a completion of the prompt alone, as in the paper. It was not sampled
            from this context, so `sampler_gap` is large. If not, it is trained with the critique in its context.
        success: the least score of a success.
    """
    found = writer.write(writer.starts())
    failed = [one for one, score in zip(found, scores_of(writer, found)) if score < success]
    starts = [started(writer, one.prompt, template, completion=writer.text(one)) for one in failed]
    if not starts:
        return found
    refined = writer.write(starts, stage=1)
    scores = scores_of(writer, refined)
    chosen = [row for rows in by_prompt(refined).values() for row in best_first(rows, scores)[:keep]]
    if alone:
        refined = [replace(one, context=writer.context(one.prompt)) for one in refined]
    return found + [refined[row] for row in chosen]


def _reflects(recipe: object, choice: Choice) -> list[str]:
    """Faults of a recipe: the two templates of a reflection go together."""
    if (choice["reflect"] is None) == (choice["template"] is None):
        return []
    return ["form retries: reflect asks for a reflection and template shows it; write both, or leave both out"]


@needs(
    _reflects, holds("reflect", "prompt", "completion"), holds("template", "prompt", "reflection", more=("completion",))
)  # fmt: skip
def retries(
    writer: Writer,
    *,
    place: Literal["divergence", "doubt"] = "divergence",
    reflect: str | None = None,
    template: str | None = None,
    tokens: Count = 64,
    success: float = 0.5,
) -> list[Attempt]:
    """Each failure is tried again from the place of its error, and only what comes after this place is trained.

    The second attempt keeps the tokens of the failure before the place, and joins the group. In both, the shared tokens
    are not trained. This is R³L (arXiv 2601.03715).

    Options:
        place: the place of the error: the first token that differs from the best success of the group, or the token
            that was the least likely (`doubt`), which is also taken where the group has no success.
        reflect: asks the policy for a reflection about a failure; holds `{prompt}` and `{completion}`. There is no
            reflection if it is left out.
        template: the prompt with the reflection, as the second attempt sees it; holds `{prompt}` and `{reflection}`.
            The second attempt is trained as a completion of the prompt alone.
        tokens: length of the longest reflection.
        success: the least score of a success.
    """
    found = writer.write(writer.starts())
    scores = scores_of(writer, found)
    pivots = dict[int, int]()
    for rows in by_prompt(found).values():
        best = best_first(rows, scores)[0]
        shown = found[best].ids if place == "divergence" and scores[best] >= success else None
        for row in rows:
            if scores[row] < success:
                pivots[row] = place_of_error(found[row].ids, found[row].log_probs, shown)
    starts = [found[row].cut(pivot) for row, pivot in pivots.items()]
    if reflect is not None and template is not None:
        texts = [writer.text(found[row]) for row in pivots]
        asked = [started(writer, one.prompt, reflect, completion=text) for one, text in zip(starts, texts)]
        told = written(writer, asked, tokens, stage=1)
        seen = [
            started(writer, one.prompt, template, completion=text, reflection=reflection)
            for one, text, reflection in zip(starts, texts, told)
        ]
        starts = [replace(one, context=other.context, origin=other.origin) for one, other in zip(starts, seen)]
    again = writer.write(starts, stage=2)
    again = [
        replace(one.trained_from(pivot), context=found[row].context, origin={**one.origin, "from": pivot})
        for one, (row, pivot) in zip(again, pivots.items())
    ]
    return [one.trained_from(pivots.get(row, 0)) for row, one in enumerate(found)] + again


def place_of_error(ids: Sequence[int], log_probs: Sequence[float], success: Sequence[int] | None) -> int:
    """The first token of a failure that differs from a success; without a success, its least likely token.

    A failure that is the beginning of the success has its error in its last token, where it ended.

    Args:
        ids: of the failure.
        log_probs: of its tokens.
        success: ids of a success of the same prompt; None if there is none.
    """
    if success is None:
        return min(range(len(ids)), key=lambda t: log_probs[t])
    same = next((t for t, (one, other) in enumerate(zip(ids, success)) if one != other), min(len(ids), len(success)))
    return min(same, len(ids) - 1)
