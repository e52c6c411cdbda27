"""Groups in which each completion is told a budget of tokens, and several budgets are tried."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ....parts.needs import at_least, needs
from ....parts.ranges import Fraction

if TYPE_CHECKING:
    from ..writing import Attempt, Writer

Shares = Annotated[list[Fraction], Field(min_length=2)]


@needs(
    at_least(
        "rollout.group", lambda recipe, choice: len(choice["budgets"]), "has {least} budgets",
        mend="use a group at least as large as the list of budgets",
    ),
)  # fmt: skip
def subgroups(
    writer: Writer,
    *,
    budgets: Shares = [0.2, 0.4, 0.8, 1.0],  # noqa: B006
    opening: str = "I will answer the question with {budget} tokens. ",
    cut: bool = False,
) -> list[Attempt]:
    """A group has a subgroup for each budget, whose completions begin with that budget (HBPO, arXiv 2507.15844).

    Args:
        writer: writes.
        budgets: as shares of generation.max_tokens. The group is divided among them in nearly equal parts; a
            budget that is listed twice gets twice as many completions.
        opening: the first words of a completion, which are not trained; `{budget}` is the budget in tokens. May be
            empty.
        cut: whether a completion ends at its budget at the latest. If not, all may have generation.max_tokens.
    """
    openings: list[Attempt] = []
    limits: list[int] = []
    tokens = [max(1, round(share * writer.max_tokens)) for share in budgets]
    for k, start in enumerate(writer.starts()):
        budget = tokens[k % writer.group * len(tokens) // writer.group]
        told = writer.ids(opening.replace("{budget}", str(budget)))
        origin = {"budget": budget, "opening": len(told), "longest": writer.max_tokens}
        openings.append(replace(start.followed(told), origin=origin))
        limits.append(len(told) + (budget if cut else writer.max_tokens))
    return writer.write(openings, limit=limits)
