"""Hints for prompts that a policy does not solve: the hint joins the prompt, and the group gets hinted completions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....parts.needs import needs
from ....parts.ranges import Count, Fraction, Share, Whole
from .filling import best_first, by_prompt, failing, holds, scores_of, started, written

if TYPE_CHECKING:
    # This imports the libraries of models, and a recipe is read without them.
    from ..writing import Attempt, Writer


@needs(holds("template", "prompt", "hint"))
def hints(
    writer: Writer,
    *,
    column: str = "solution",
    shares: list[Fraction] | None = None,
    template: str = "{prompt}\nHint: {hint}",
    after: Whole = 0,
    replace: Count | None = None,
    tries: Count | None = None,
    success: float = 0.5,
) -> list[Attempt]:
    """Prompts without a success are tried again with hints of their file, from the weakest hint to the strongest.

    A prompt gets the next hint only if no completion with the hint before was a success. The completions with the first
    hint that leads to a success take places of the group, and they are trained with the hint in their context. If no
    hint helps, the group stays as it was. Evaluations have no hints.

    A column with a list of hints is Scaf-GRPO (arXiv 2510.19807), whose hints go from a concept to a step, and replace
    one failure. Shares of a solution are GHPO (arXiv 2507.10628).

    Options:
        column: the column with the hints: a text, or a list of texts from the weakest hint to the strongest.
        shares: the hints are these shares of the text, from its beginning and in tokens, rounded up. If left out, the
            hints are the texts of the column.
        template: the prompt with its hint; holds `{prompt}` and `{hint}`, and may hold `{COLUMN}` of any column.
        after: iterations at the beginning of the run in which there are no hints.
        replace: completions of a group that hinted completions replace, from the last on; all if left out.
        tries: completions that are written with each hint; the best are kept; `replace` if left out.
        success: the least score of a success.
    """
    found = writer.write(writer.starts())
    if (writer.iteration or 0) < after:
        return found
    left = failing(found, scores_of(writer, found), success)
    known = {p: hints_of(writer, p, column, shares) for p in left}
    places = min(replace or writer.group, writer.group)
    for level in range(max(map(len, known.values()), default=0)):
        asked = [p for p in left if level < len(known[p])]
        starts = [started(writer, p, template, hint=known[p][level]) for p in asked for _ in range(tries or places)]
        if not starts:
            break
        found, solved = replaced(writer, found, writer.write(starts, stage=level + 1), places, success)
        left = [p for p in left if p not in solved]
    return found


def hints_of(writer: Writer, prompt: int, column: str, shares: Sequence[float] | None) -> list[str]:
    """The hints of a prompt, from the weakest to the strongest; none where its column is empty.

    Raises:
        ValueError: the prompt has no such column, or it holds no text and no list of texts.
    """
    row = writer.rows[prompt]
    if column not in row.columns:
        raise ValueError(f"{row.place}: form hints needs a column {column!r}; there are {', '.join(row.columns)}")
    given = row.columns[column]
    texts = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{row.place}: the column {column!r} is {given!r:.80}; write a text, or a list of texts")
    if shares is None or not texts:
        return list(texts)
    if len(texts) > 1:
        raise ValueError(f"{row.place}: form hints takes shares of one text, and {column!r} has {len(texts)}")
    ids = writer.ids(texts[0])
    return [writer.policy.language.decode(ids[: math.ceil(share * len(ids))]) for share in sorted(shares)]


@needs(holds("ask", "prompt"), holds("template", "prompt", "hint"))
def self_hints(
    writer: Writer,
    *,
    ask: str = "{prompt}\nThe answer is {answer}. Write a short hint that does not tell the answer:",
    template: str = "{prompt}\nHint: {hint}",
    tokens: Count = 64,
    each: bool = False,
    after: Whole = 0,
    replace: Count | None = None,
    success: float = 0.5,
) -> list[Attempt]:
    """Prompts without a success are tried again with hints that the policy itself writes, for instance from the answer.

    The hinted completions take places of the group if one of them is a success, and they are trained with the hint in
    their context. The hints are not trained. Evaluations have no hints.

    With a hint for each completion this is SAGE (arXiv 2602.03143), and with one hint for all NuRL (arXiv 2509.25666).

    Options:
        ask: the prompt that asks for a hint; holds `{prompt}`, and may hold `{COLUMN}` of any column.
        template: the prompt with its hint; holds `{prompt}` and `{hint}`.
        tokens: length of the longest hint.
        each: whether each completion has a hint of its own. If not, a prompt has one hint.
        after: iterations at the beginning of the run in which there are no hints.
        replace: completions of a group that hinted completions replace, from the last on; all if left out.
        success: the least score of a success.
    """
    found = writer.write(writer.starts())
    if (writer.iteration or 0) < after:
        return found
    left = failing(found, scores_of(writer, found), success)
    places = min(replace or writer.group, writer.group)
    wanted = [p for p in left for _ in range(places if each else 1)]
    told = written(writer, [started(writer, p, ask) for p in wanted], tokens, stage=1)
    pairs = [(p, hint) for p, hint in zip(wanted, told) for _ in range(1 if each else places)]
    starts = [started(writer, p, template, hint=hint) for p, hint in pairs]
    return replaced(writer, found, writer.write(starts, stage=2), places, success)[0] if starts else found


@needs(holds("simplify", "prompt"), holds("diversify", "prompt"))
def rewritten(
    writer: Writer,
    *,
    simplify: str = "Rewrite this problem so that it is easier and has the same answer:\n{prompt}\nThe problem:",
    diversify: str | None = None,
    hard: Share = 0.0,
    medium: Share = 0.5,
    tokens: Count = 256,
    success: float = 0.5,
) -> list[Attempt]:
    """The policy rewrites the prompts that it rarely solves, and completes what it has written.

    The completions of the rewritten prompt take the place of the group, and the rewards judge them as completions of
    the prompt. A prompt stays as it is if the policy solves it often enough, or if it writes nothing.

    This is the restructuring of problems of CLPO (arXiv 2509.25004). The group tells how hard a prompt is.

    Options:
        simplify: asks for an easier form of a hard prompt; holds `{prompt}`, and may hold `{COLUMN}` of any column.
        diversify: asks for another form of a prompt of medium difficulty, like `simplify`; such prompts stay as they
            are if it is left out.
        hard: a prompt is hard if at most this share of its completions are successes.
        medium: a prompt that is not hard is of medium difficulty if at most this share are successes.
        tokens: length of the longest form.
        success: the least score of a success.
    """
    found = writer.write(writer.starts())
    scores = scores_of(writer, found)
    asks = dict[int, str]()
    for p, rows in by_prompt(found).items():
        rate = sum(scores[row] >= success for row in rows) / len(rows)
        ask = simplify if rate <= hard else diversify if rate <= medium else None
        if ask is not None and not any(math.isnan(scores[row]) for row in rows):
            asks[p] = ask
    told = written(writer, [started(writer, p, ask) for p, ask in asks.items()], tokens, stage=1)
    forms = {p: text for p, text in zip(asks, told) if text}
    again = [
        started(writer, p, "{rewritten}", rewritten=text) for p, text in forms.items() for _ in range(writer.group)
    ]
    return [one for one in found if one.prompt not in forms] + writer.write(again, stage=2)


def replaced(
    writer: Writer, attempts: Sequence[Attempt], others: Sequence[Attempt], places: int, success: float
) -> tuple[list[Attempt], set[int]]:
    """Groups in which the best others have the last places, wherever one of the others is a success.

    Args:
        writer: of the rollout.
        attempts: whole groups.
        others: further attempts of some of the prompts.
        places: how many attempts of a group are replaced.
        success: the least score of a success.

    Returns:
        The groups, and the prompts whose groups have changed.
    """
    scores = scores_of(writer, others)
    groups = {p: [attempts[row] for row in rows] for p, rows in by_prompt(attempts).items()}
    solved = set[int]()
    for p, rows in by_prompt(others).items():
        chosen = best_first(rows, scores)[:places]
        if scores[chosen[0]] >= success:
            groups[p][len(groups[p]) - len(chosen) :] = [others[row] for row in chosen]
            solved.add(p)
    return [one for group in groups.values() for one in group], solved
