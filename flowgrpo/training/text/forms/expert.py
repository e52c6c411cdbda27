"""The completion of an expert beside the policy's own, for prompts that the policy does not solve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....parts.needs import Need, needs
from ....parts.ranges import Share

if TYPE_CHECKING:
    # This imports the libraries of models, and a recipe is read without them.
    from ..writing import Attempt, Writer


EXPERT = "expert"
"""The mark of an expert's completion in its origin."""


@needs(Need("objective", ("guided",), "writes completions of an expert, which no other objective trains on"))
def expert(writer: Writer, *, column: str = "answer", success: float = 0.5, below: Share = 0.5) -> list[Attempt]:
    """The policy's completions, and an expert's where too few of them succeed (AHPO, MM-HELIX, arXiv 2510.08540).

    The expert's completion is the text of a column of the prompt file, with an end token. The completion is neither
    compared with the others nor counted in the mean rewards, and objective `guided` trains on it.

    Options:
        column: column of the prompt file with the expert's text.
        success: weighted sum of rewards from which a completion is a success.
        below: the expert is asked if the share of successes among a prompt's completions is below this.

    Raises:
        ValueError: a prompt lacks the column, or its text is empty.
    """
    from ..writing import Attempt

    own = writer.write(writer.starts())
    # NaN is no success.
    solved = (writer.score(own) >= success).tolist()
    found = list(own)
    for p, row in enumerate(writer.rows):
        mine = [done for one, done in zip(own, solved) if one.prompt == p]
        if sum(mine) >= below * len(mine):
            continue
        text = row.columns.get(column)
        ids = writer.ids(str(text)) if text not in (None, "") else []
        if not ids:
            raise ValueError(
                f"form expert reads the expert's text from column {column!r}, and "
                f"{row.place or f'{row.text!r:.80}'} has none; add it, or name another column"
            )
        ids = [*ids, writer.policy.language.answer_end]
        found.append(
            Attempt(
                p, writer.context(p), ids, [0.0] * len(ids), [True] * len(ids), ended=True, counts=False,
                origin={EXPERT: True},
            )
        )  # fmt: skip
    return found
