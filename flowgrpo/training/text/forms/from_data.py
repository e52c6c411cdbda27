"""Completions that the data give, in the place of completions that the policy writes, or beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ....core.addressing import address
from ....parts.choice import Choice
from ....parts.needs import Need, needs, one_round, unscored
from ....parts.ranges import Share
from ....parts.traits import offers, rewarded

if TYPE_CHECKING:
    # These import the libraries of models, and a recipe is read without them.
    from ...data import PromptRow
    from ..writing import Attempt, Writer


def _as_many_as_columns(recipe: Any, choice: Choice) -> list[str]:
    columns, group = choice["columns"], recipe.rollout.group
    if fault := unscored(recipe, columns):
        return [fault]
    if len(set(columns)) < len(columns) or not columns:
        return [f"rollout.form.columns is {list(columns)}; name one column or more, each once"]
    if group != len(columns):
        return [
            f"rollout.group is {group}, and rollout.form.columns names {len(columns)}: {', '.join(columns)}; write "
            f"rollout.group: {len(columns)}, or other columns"
        ]
    return []


def _is_taught(recipe: Any, choice: Choice) -> list[str]:
    if recipe.objective.name != "distilled" or not rewarded(recipe):
        return []
    return [
        f"form {choice.short} gives completions that the policy did not draw, and objective distilled trains with "
        "their rewards here; name a teacher in model.teachers, without `both` and without extension teacher"
    ]


def _written_too(recipe: Any, choice: Choice) -> list[str]:
    """Faults of a recipe in which the policy writes completions too, or in which nothing is sampled."""
    if not choice.get("own"):
        need = Need(
            "generation.temperature", (1.0,), "gives completions that the policy did not draw, so nothing is sampled"
        )
        fault = need.fault(recipe, f"form {choice.short}")
        return [] if fault is None else [fault]
    faults = []
    if recipe.objective.name != "distilled":
        faults.append(
            f"rollout.form.own lets the policy write completions of some prompts, and objective "
            f"{recipe.objective.short} compares the completions of the data; use objective distilled, or leave own out"
        )
    if any(entry.name == "given" for entry in recipe.rewards):
        faults.append(
            "rollout.form.own lets the policy write completions of some prompts, and reward given ranks the "
            "completions of the data; use another reward, or leave own out"
        )
    return faults


@offers("given")
@needs(
    _as_many_as_columns,
    _is_taught,
    _written_too,
    Need(
        "objective",
        ("answers", "distilled"),
        "gives completions that the policy did not draw, and only whole answers and distillation need none",
    ),
    one_round("trains on the completions of the data"),
)
def given(writer: Writer, *, columns: tuple[str, ...] = ("chosen", "rejected"), own: Share = 0.0) -> list[Attempt]:
    """No sampling: the data give the completions of each prompt, as in offline DPO (arXiv 2305.18290).

    The rewards score the given completions. Reward `given` says how the data rank them. Evaluations sample. With
    objective `distilled`, a teacher says how likely it finds the tokens of these completions (supervised distillation).
    Some prompts may have completions that the policy writes itself (GKD, 2306.13649, Algorithm 1).

    Options:
        columns: columns of the training prompts with the completions, the best first: a text, or a conversation that
            ends with a message of the assistant.
        own: the probability that the policy writes the completions of a prompt itself, as many as there are columns
            (GKD's lambda).

    Raises:
        ValueError: a prompt lacks a column, or what is there is no completion.
    """
    from ..writing import Attempt

    written = {p for p, key in enumerate(writer.keys) if address(key, _WHOSE) < own * _SEEDS}
    mine = writer.write([one for one in writer.starts() if one.prompt in written]) if written else []
    # Their place is told too, as nothing, so that each process has the same columns.
    found = [replace(one, origin={"given_place": None, "given_places": len(columns)}) for one in mine]
    for p, row in enumerate(writer.rows):
        for place, column in enumerate(() if p in written else columns):
            ids = writer.policy.language.answer_tokens(answer_of(row, column))
            found.append(
                Attempt(
                    p, writer.context(p), ids, [0.0] * len(ids), [True] * len(ids), ended=True,
                    origin={"given_place": place, "given_places": len(columns)},
                )
            )  # fmt: skip
    return found


_WHOSE = 0x6F776E
"""Addresses the draw whose completions a prompt has, apart from the draws of its completions."""
_SEEDS = 2**63
"""Addresses are below this number."""


def answer_of(row: PromptRow, column: str) -> str:
    """The completion in a column of a prompt.

    Raises:
        ValueError: there is none, or the messages before it are not the prompt's.
    """
    from ...prompts.prompt_rows import ASSISTANT, check_fields, message_of

    said, place = row.columns.get(column), row.place or f"{row.text!r:.80}"
    if isinstance(said, list) and said:
        if not isinstance(said[-1], dict) or said[-1].get("role") != ASSISTANT:
            raise ValueError(
                f"{place}: `{column}` is a conversation that does not end with a message of the assistant; write the "
                "answer as its last message, with role assistant"
            )
        before = [message_of(place, message) for message in said[:-1]]
        check_fields(place, said[-1])
        if before and before not in _prompts(row):
            raise ValueError(f"{place}: {_strange(row, column, before)}")
        # A model may have ended at once, so an empty text is an answer too.
        said = said[-1].get("content")
        said = message_of(place, {"role": ASSISTANT, "content": said})["content"] if isinstance(said, list) else said
    if not isinstance(said, str):
        raise ValueError(
            f"{place}: `{column}` is {said!r:.80}; write the words of a completion, or a conversation that ends with a "
            "message of the assistant"
        )
    return said


def _strange(row: PromptRow, column: str, before: list[dict[str, str]]) -> str:
    """What is wrong with the messages before a completion, which are not the prompt's, and what to write instead."""
    from ...prompts.prompt_rows import PAIR

    said = [row.columns.get(name) for name in PAIR]
    talks = [one[:-1] for one in said if isinstance(one, list) and one]
    both = column in PAIR and len(talks) == len(PAIR)
    if both and talks[0] != talks[1] and any(before[: len(own)] == own for own in _prompts(row)):
        return (
            "the conversations of `chosen` and `rejected` differ before their last message; let each end with the "
            "message of the assistant in which they first differ"
        )
    instead = ", or leave out `prompt`, and it is read from the two" if both and talks[0] == talks[1] else ""
    return (
        f"`{column}` is a conversation that does not begin with the prompt; write the message of the assistant "
        f"alone{instead}"
    )


def _prompts(row: PromptRow) -> list[list[dict[str, str]]]:
    """The messages that may stand before a completion."""
    if row.messages is None:
        return [[{"role": "user", "content": row.text}]]
    # A data set may repeat the conversation with or without its system message.
    return [[*row.messages], [*row.messages[1:]]] if row.messages[0]["role"] == "system" else [[*row.messages]]
