"""Expressions: what they are worth, how a value is written, and what an expression may not do."""

from fractions import Fraction

import pytest

from flowgrpo.intake.expressions import value_of, written_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a + b * 2", 13), ("(a + b) / 2", Fraction(4)), ("a / b", Fraction(3, 5)), ("-a ** 2", -9), ("b // a", 1),
        ("-b % a", 1), ("2 ** -2", Fraction(1, 4)), ("0.1 * 3", Fraction(3, 10)), ("abs(a - b) + max(a, b, 1)", 7),
        ("1 < a <= 3 and b % 2 == 1", True), ("not a > b or b == 4", True), ("colour == 'red'", True),
        ("colour != 'red'", False), ("colour", "red"), ("n + 1", 8),
    ],
)  # fmt: skip
def test_values_are_exact(text: str, value: object) -> None:
    assert value_of(text, {"a": Fraction(3), "b": Fraction(5), "colour": "red", "n": 7}) == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("__import__('os')", "is no arithmetic"), ("a.real", "is no arithmetic"), ("[a][0]", "is no arithmetic"),
        ("(lambda: a)()", "is no arithmetic"), ("abs(*a)", "is no arithmetic"), ("True", "is no arithmetic"),
        ("c + 1", "no variable 'c'; the variables are a, colour"), ("a +", "no expression"), ("", "no expression"),
        ("a / (a - 3)", "divides by 0"), ("colour + 'x'", "calculates with a text"), ("(a < 4) + 1", "calculates with"),
        ("-(a < 4)", "calculates with"), ("-colour", "calculates with"),
        ("a ** 65", "a power is a whole number"), ("a ** 0.5", "a power is a whole number"),
        ("((9 ** 64) ** 64) ** 64", r"larger than 2\*\*4096"), ("1e999", "is no arithmetic"),
        ("-" * 250 + "a +", "no expression"),
        ("1 + " * 100 + "1", "at most 300 characters"),
    ],
)  # fmt: skip
def test_what_is_no_arithmetic_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        value_of(text, {"a": Fraction(3), "colour": "red"})


@pytest.mark.parametrize(
    ("text", "written"), [("a - 5", "-2"), ("a / 2", "3/2"), ("a < 4", "yes"), ("a == 4", "no"), ("colour", "red")]
)
def test_values_are_written_as_answers(text: str, written: str) -> None:
    assert written_value(text, {"a": 3, "colour": "red"}) == written
