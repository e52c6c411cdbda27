"""A table of the rewards of a run in which the trained weights make only a share of the denoising steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from ..configs.schema import Recipe
from ..training.evaluating import Scored
from ..training.planning import base_from, steps_of
from .evaluation import summaries
from .model_recipes import with_share


def share_lines(recipe: Recipe, shares: Sequence[float], scored: Sequence[Scored]) -> Iterator[str]:
    """A line for each share, with the mean of each reward and its standard error over prompts.

    In brackets is the mean of the differences from the first share, by sample, with its standard error over prompts.

    Args:
        recipe: of the evaluations.
        shares: of the steps that the trained weights made.
        scored: the scores of each share, of the same samples in the same order.
    """
    steps, first = steps_of(recipe, evaluation=True), scored[0]
    rows = [["share", "steps", *first.names]]
    for share, own in zip(shares, scored, strict=True):
        switch = base_from(with_share(recipe, share))
        gained = summaries(Scored(own.names, own.owners, own.values - first.values))
        cells = [
            _figure(mean, error) + ("" if own is first else f" ({_figure(*gained[name][:2], sign='+')})")
            for name, (mean, error, _) in summaries(own).items()
        ]
        rows.append([f"{share:g}", f"{steps if switch is None else switch} of {steps}", *cells])
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    if len(shares) > 1:
        yield f"in brackets: the difference from share {shares[0]:g}"


def _figure(mean: float, error: float, sign: str = "-") -> str:
    if math.isnan(mean):
        return "–"
    spread = f"{error:.4f}" if math.isfinite(error) else "–"
    return f"{mean:{sign}.4f} ± {spread}"
