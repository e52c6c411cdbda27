"""A completion of the likeliest tokens beside the samples of a prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..writing import Attempt, Writer


def greedy(writer: Writer) -> list[Attempt]:
    """Completions, and one of the likeliest tokens that is scored and not trained (ReMax, arXiv 2310.10505)."""
    sampled = writer.write(writer.starts())
    likeliest = writer.write(writer.starts(count=1), stage=1, temperature=0.0)
    return sampled + [replace(one, counts=False, origin={"greedy": True}) for one in likeliest]
