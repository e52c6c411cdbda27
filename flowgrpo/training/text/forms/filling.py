"""Templates of forms: texts with fields for the prompt, its columns and what was written before."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ....configs.sections import PROMPT
from ....parts.choice import Choice
from ....parts.needs import Rule

if TYPE_CHECKING:
    # This imports the libraries of models, and a recipe is read without them.
    from ..writing import Attempt, Writer

_FIELD = re.compile(r"\{(\w+)\}")


def holds(option: str, *fields: str, more: Sequence[str] = ()) -> Rule:
    """A need of a form: the template in an option holds these fields. A template that is left out needs none.

    `more` are further fields that the form can fill.
    """

    def rule(recipe: Any, choice: Choice) -> list[str]:
        template = choice[option]
        missing = [f"{{{field}}}" for field in fields if template is not None and f"{{{field}}}" not in template]
        return [f"form {choice.short}: {option} is {template!r}; write {one} into it" for one in missing]

    rule.template = (option, (*fields, *more))  # type: ignore[attr-defined]
    return rule


def missing_columns(choice: Choice, columns: Sequence[str], key: str = "rollout.form") -> Iterator[str]:
    """What a form or plan of the package reads from the prompts that they do not have, a sentence for each.

    Args:
        choice: the form or plan.
        columns: of the prompts.
        key: where the recipe chooses it.
    """
    who = f"{choice.kind} {choice.short}"
    have = f"the prompts have the columns {', '.join(columns)}" if columns else "the prompts have no columns"
    if (column := choice.get("column")) is not None and column not in columns:
        yield f"{who} reads column {column!r}, and {have}; name one of them with {key}.column"
    for column in choice.get("columns") or ():
        if column not in columns:
            yield f"{who} reads column {column!r}, and {have}; name them with {key}.columns"
    for rule in getattr(choice.target, "needs", ()):
        option, fields = getattr(rule, "template", (None, ()))
        if option is None or choice[option] is None:
            continue
        for name in _FIELD.findall(choice[option]):
            if name not in (*fields, *columns):
                known = ", ".join(dict.fromkeys((*fields, *columns)))
                yield f"{who}: {option} asks for {{{name}}}; there are {known}"


def filled(writer: Writer, prompt: int, template: str, **fields: str) -> str:
    """A template with its fields; only `{prompt}` is left, for `Writer.context`.

    Args:
        writer: of the rollout.
        prompt: the number of a prompt. A field that is not among `fields` is a column of this prompt.
        template: the text.
        fields: values of fields.

    Raises:
        ValueError: the template has a field that is neither among `fields` nor a column.
    """
    row, words = writer.rows[prompt], writer.policy.language.words

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if match[0] == PROMPT:
            return PROMPT
        if name not in fields and row.columns.get(name) is None:
            known = ", ".join([*fields, "prompt", *row.columns])
            raise ValueError(f"{row.place}: a template of rollout.form asks for {match[0]}; there are {known}")
        return words(fields[name] if name in fields else str(row.columns[name]))

    return _FIELD.sub(value, template)


def started(writer: Writer, prompt: int, template: str, **fields: str) -> Attempt:
    """An attempt without tokens, whose context is a prompt within a template; `fields` are its origin."""
    from ..writing import Attempt

    return Attempt(prompt, writer.context(prompt, filled(writer, prompt, template, **fields)), origin=dict(fields))


def scores_of(writer: Writer, attempts: Sequence[Attempt]) -> list[float]:
    """The score of each attempt. An attempt to which no reward applies has NaN."""
    found: list[float] = writer.score(attempts).tolist()
    return found


def by_prompt(attempts: Sequence[Attempt]) -> dict[int, list[int]]:
    """The numbers of the attempts of each prompt, in order."""
    found: dict[int, list[int]] = {}
    for k, one in enumerate(attempts):
        found.setdefault(one.prompt, []).append(k)
    return found


def best_first(rows: Sequence[int], scores: Sequence[float]) -> list[int]:
    """Rows from the highest score to the lowest; equal scores keep their order, and rows without a score are last."""
    return sorted(rows, key=lambda row: -scores[row] if scores[row] == scores[row] else float("inf"))


def failing(attempts: Sequence[Attempt], scores: Sequence[float], success: float) -> list[int]:
    """The prompts whose attempts all have scores without a success."""
    return [p for p, rows in by_prompt(attempts).items() if all(scores[row] < success for row in rows)]


def written(writer: Writer, starts: Sequence[Attempt], tokens: int, *, stage: int) -> list[str]:
    """The texts of at most `tokens` tokens that the policy writes from some contexts; they are not trained."""
    return [writer.text(one).strip() for one in writer.write(starts, stage=stage, limit=tokens)]
