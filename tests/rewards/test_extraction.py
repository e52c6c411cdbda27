"""Final answers, exact numbers and fenced blocks, on texts as models write them and on hostile ones."""

from fractions import Fraction

import pytest

from flowgrpo.rewards.text.extraction import agreement, canonical, fenced, final_answer

HUGE = 300_000


@pytest.mark.parametrize(
    ("text", "rule", "answer"),
    [
        (r"so \boxed{1} or \boxed{ \frac{1}{2} }.", "marked", r"\frac{1}{2}"),
        (r"\boxed {\{1, 2\}}", "marked", r"\{1, 2\}"),
        (r"\boxed{\boxed{3}}", "marked", "3"),
        (r"\boxed{1} and then \boxed{2", "last_number", None),
        (r"\boxed{}", "whole", None),
        (r"<answer>7</answer> \boxed{8}", "whole", "8"),
        ("<answer>6</answer> no, <answer>\n 7 </answer>.", "whole", "7"),
        ("<answer>6</answer> no, <answer>7", "whole", None),
        ("<answer>6<answer>7</answer></answer>", "whole", "7"),
        (" 42\n", "whole", "42"),
        ("it is 42", "whole", "it is 42"),
        ("", "whole", None),
        ("it is 42", "marked", None),
        ("12 apples, 1,234.5 pears.", "last_number", "1,234.5"),
        ("5-3, so x = -2.", "last_number", "-2"),
        ("5-3", "last_number", "3"),
        ("about 3/4, 50%", "last_number", "50%"),
        ("it is 12, I think", "last_number", "12"),
        ("1e3 or .5", "last_number", ".5"),
        ("none", "last_number", None),
    ],
)
def test_final_answer(text: str, rule: str, answer: str | None) -> None:
    assert final_answer(text, rule) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,234,567", Fraction(1234567)),
        ("+007.50", Fraction(15, 2)),
        (".5", Fraction(1, 2)),
        ("5.", Fraction(5)),
        ("0.1", Fraction(1, 10)),
        ("1/2", Fraction(1, 2)),
        ("-1.5 / 0.5", Fraction(-3)),
        (r"\frac{1}{2}", Fraction(1, 2)),
        (r"-\dfrac{3}{-4}", Fraction(3, 4)),
        (r"\frac12", Fraction(1, 2)),
        ("12.5%", Fraction(1, 8)),
        (r"50\%", Fraction(1, 2)),
        ("-2E3", Fraction(-2000)),
        ("\u22127", Fraction(-7)),
        ("$5", Fraction(5)),
        ("$$1{,}000$$", Fraction(1000)),
        (r"\(3\)", Fraction(3)),
        (r"\text{12}.", Fraction(12)),
        ("1e1000", Fraction(10) ** 1000),
    ],
)
def test_a_number_is_read_exactly(text: str, number: Fraction) -> None:
    assert canonical(text) == number


@pytest.mark.parametrize("text", ["12,34", "1/0", "1/2/3", "e5", "%", "5 apples", "1e1001", "1e999999999", "²", "1 2"])
def test_what_is_no_number_is_text(text: str) -> None:
    assert canonical(text) == text


def test_texts_are_compared_without_case_space_and_a_final_stop() -> None:
    assert canonical("  New\n York. ") == canonical("new york") == canonical(r"\text{New York}") == "new york"
    assert canonical("a.b") != canonical("ab")


@pytest.mark.parametrize(
    ("one", "other", "share"),
    [
        ("124", "123", 2 / 3),
        ("10", "1000", 1 / 2),
        ("1,000", "1000.0", 1.0),
        ("9", "12", 0.0),
        ("a1c", "abbc", 1 / 2),
        ("-12", "12", 2 / 3),
        ("", "12", 0.0),
        ("aa", "aaa", 2 / 3),
    ],
)
def test_agreement_counts_the_common_start_and_end_once(one: str, other: str, share: float) -> None:
    assert agreement(one, other) == agreement(other, one) == share


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a = 1", "a = 1"),
        ("Here:\n```python\na = 1\nb = 2\n```\nDone.", "a = 1\nb = 2\n"),
        ("```\nfirst\n```\nthen\n```py\nsecond\n```", "second\n"),
        ("```python\ncut", "cut"),
        ("```\nwhole\n```\n```\ncut", "whole\n"),
        ("a ``` inside", "a ``` inside"),
    ],
)
def test_the_last_fenced_block(text: str, code: str) -> None:
    assert fenced(text) == code


def test_hostile_texts_are_read_in_time() -> None:
    """If the time is not linear, or a limit is missing, each of these takes forever or raises an error."""
    deep = 50_000
    assert final_answer("\\boxed{" * deep + "7" + "}" * deep) == "7"
    assert final_answer("\\boxed{" + "{" * deep + "}" * deep + "}") == "{" * deep + "}" * deep
    assert final_answer("\\boxed{" * deep) is None
    assert final_answer("<answer>" * deep) is None
    assert canonical("9" * HUGE) == "9" * HUGE
    assert canonical("9" * 1000) == 10**1000 - 1
    assert canonical("1e" + "9" * 500) == "1e" + "9" * 500
    assert canonical("\\frac{" + "{" * 900) == "\\frac{" + "{" * 900
    assert final_answer("1," * HUGE, "last_number") == "1," * (HUGE - 1) + "1"
    assert final_answer("-+" * HUGE, "last_number") is None
    assert agreement("1" * HUGE, "1" * HUGE + "2") == HUGE / (HUGE + 1)
    assert fenced("```\n" * 2 * deep) == ""
