"""Equality of formulas. The reward `math` runs this module in a separate process, without torch."""

from __future__ import annotations

from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify


def equal(answer: str, references: list[str]) -> bool:
    """Whether a formula is equal to one of the references. This function may never return."""
    given = _parsed(answer)
    return bool(given) and any(
        # The caller limits the time of the whole call. The limit of math-verify cannot end a computation in C.
        bool(verify(_parsed(reference), given, timeout_seconds=None))
        for reference in references
    )


def _parsed(formula: str) -> list[Any]:
    """Return a formula as math-verify parses it; an empty list if the text is not a formula."""
    marked = formula if "$" in formula or "\\(" in formula or "\\[" in formula else f"${formula}$"
    config = [LatexExtractionConfig(), ExprExtractionConfig()]
    return list(parse(marked, config, fallback_mode="no_fallback", parsing_timeout=None))


# The parser builds its tables at its first use. They are built here, so that no call has to wait for them.
equal("\\frac{1}{2}", ["0.5"])
