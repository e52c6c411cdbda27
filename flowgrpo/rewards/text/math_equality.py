"""Equality of formulas, as `math_answer` asks for it in a process of its own; without torch."""

from __future__ import annotations

from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify


def equal(answer: str, references: list[str]) -> bool:
    """Whether a formula is equal to one of the references. May take for ever."""
    given = _parsed(answer)
    return bool(given) and any(
        # The caller has a limit for the whole call, and math-verify's own ends no computation in C.
        bool(verify(_parsed(reference), given, timeout_seconds=None))
        for reference in references
    )


def _parsed(formula: str) -> list[Any]:
    """What math-verify makes of a formula; nothing if it is none."""
    marked = formula if "$" in formula or "\\(" in formula or "\\[" in formula else f"${formula}$"
    config = [LatexExtractionConfig(), ExprExtractionConfig()]
    return list(parse(marked, config, fallback_mode="no_fallback", parsing_timeout=None))


# The parser builds its tables when it is first used, which no call should have to pay for.
equal("\\frac{1}{2}", ["0.5"])
