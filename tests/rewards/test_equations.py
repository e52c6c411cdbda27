"""Worked arithmetic: what is an equation, what holds, and texts that would fool or stop a verifier."""

import math
import pickle
import time

import pytest

from flowgrpo.rewards import RewardSet, RewardSpec
from flowgrpo.rewards.text.equation_reading import equations
from flowgrpo.rewards.text.equations import Equations

NAN = math.nan


def verdicts(text: str, **options: int) -> list[bool]:
    return [equation.holds for equation in equations(text, **options)]


def scored(*texts: str, parts: list[list[str]] | None = None, answer: list | None = None, **options: object):
    return Equations(**options)(list(texts), [""] * len(texts), parts, answer)


def test_a_worked_example_by_hand():
    lines = ["Two boxes have 2 * 12 = 24 eggs.\n", "With 7 more that makes 24 + 7 = 31.\n", "Answer: 31"]
    found = scored("".join(lines), parts=[lines], answer=["31"])
    assert found.values == [1.0]
    assert found.parts == [[1.0, 1.0, 1.0]]
    assert found.sub_scores == {"equations": [2.0], "right": [1.0], "answer": [1.0]}
    assert found.answers == ["31"]
    assert found.notes == ["2 equations hold"]
    # A mistake in the middle; the lines after it are judged by themselves, and the end by the reference.
    wrong = [lines[0].replace("24", "26"), "With 7 more that makes 26 + 7 = 33.\n", "Answer: 33"]
    found = scored("".join(wrong), parts=[wrong], answer=["31"])
    assert found.values == [0.0]
    assert found.parts == [[0.0, 1.0, 0.0]]
    assert found.notes == ["does not hold: 2 * 12 = 26"]
    assert found.sub_scores["right"] == [0.5]


def test_a_part_without_an_equation_has_no_score():
    found = scored("Well\n2 + 3 = 5\nso 5", parts=[["Well\n", "2 + 3 = 5\n", "so 5"]])
    assert str(found.parts) == str([[NAN, 1.0, NAN]])
    assert found.values == [1.0]


def test_saying_nothing_does_not_pay():
    """Not even the right answer counts, unless no work has to be shown."""
    assert scored("19", parts=[["19"]], answer=["19"]).parts == [[0.0]]
    assert scored("19", parts=[["19"]], answer=["19"], least=0).parts == [[1.0]]
    assert scored("Hm.").values == [0.0]
    assert math.isnan(scored("Hm.", least=0).values[0])
    # An equation that occurs twice counts once.
    assert scored("1 + 1 = 2\n1+1=2", least=2).values == [0.0]
    assert scored("1 + 1 = 2\n2 + 1 = 3", least=2).values == [1.0]


def test_lines_are_the_parts_where_a_recipe_does_not_cut():
    found = scored("1 + 1 = 2\n1 + 1 = 3", "1 + 1 = 2")
    assert found.values == [0.0, 1.0]
    assert found.parts == ()


@pytest.mark.parametrize(
    "text",
    [
        "12 + 7 = 19",
        "So she has 12 + 7 = 19 apples.",
        "In 2024 12 + 7 = 19 things",
        "(12 + 7 = 19)",
        "1. 12 + 7 = 19",
        "- 5 + 7 = 12",
        "-5 + 7 = 2",
        "2 - -3 = 5",
        "**12 + 7 = 19**",
        "19 = 12 + 7",
        "x = 3 + 4 = 7",
        "f(2) = 2 + 3 = 5",
        "3(4+5) = 27",
        "-2^2 = -4",
        "2**10 = 1,024",
        "3 x 4 = 12",
        "3×4÷2 = 6",
        "12 − 7 = 5",
        "0.1 + 0.2 = 0.3",
        "10 / 3 = 3.33",
        "10 / 3 ≈ 3.3",
        "996 * 1 ≈ 1000",
        "100% - 20% = 80%",
        r"\frac{1}{2} + \frac{1}{4} = \frac{3}{4}",
        r"\(12 \times 7 = \boxed{84}\)",
        "12 * $5 = $60",
        "48/2 = <<48/2=24>>24",
        "5 * 3 = 15cm",
        "60 / 2 = 30 km/h",
    ],
)
def test_what_holds(text: str):
    assert verdicts(text) == [True]


@pytest.mark.parametrize(
    "text",
    [
        "12 + 7 = 18",
        "12 + 7 = 19.0001",
        "x = 3 + 4 = 8",
        "10 / 3 = 3",
        "10 / 3 = 3.34",
        "2 / 3 ≈ 0.6",
        "1 / 1000 = 0.00",
        "1 / 0 = 0",
        "0^-1 = 0 + 0",
        "9^9^9^9 = 1 + 1",
        "1 + " * 200 + "1 = 201",
    ],
)
def test_what_does_not(text: str):
    assert verdicts(text) == [False]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "19 = 19",
        "12 + 7 = 12 + 7",
        "(12 + 7) = 12 + 7",
        "n + 7 = 19",
        "2x + 3 = 7",
        "x/2 = 3 + 1",
        "7 - 2 = 5x",
        "12 + 7 = 19 - n",
        "12 + 7 =",
        "= 12 + 7",
        "12 + 7 => 18",
        "4 + 4 != 9",
        "3! = 6",
        "4 + 1 = 5!",
        "5² + 3 = 28",
        "√16 + 2 = 6",
        r"\sqrt{16} + 2 = 6",
        "Covid-19 + 1 = 20",
        "2,3 + 4 = 6,3",
        "1 1/2 + 1/2 = 2",
        "3/2 = 1 1/2",
        "9^(1/2) = 3",
        "10 % 3 = 1",
        "１２ + ７ = １８",
        "12 + = 19",
        "((12 + ) 7 = 19",
    ],
)
def test_what_is_left_alone(text: str):
    assert verdicts(text) == []


def test_a_chain_has_an_equation_for_each_sign():
    assert verdicts("2 + 3 = 5 + 4 = 9") == [False, True]
    assert verdicts("12 + 7 = 19 => 19 + 1 = 20") == [True, True]
    assert verdicts("2 + 2 = 5 3 + 3 = 6") == [False, True]


def test_decimals_of_a_rounded_result():
    assert verdicts("10 / 3 = 3.3", decimals=1) == [True]
    assert verdicts("10 / 3 = 3.33", decimals=3) == [False]
    assert verdicts("1.24 * 2 = 2.4", decimals=1) == [False]


@pytest.mark.parametrize(
    "piece",
    ["(", ")", "1+", "= ", "1 ", "\\frac{", "\\text{", "1+1=2\n", "1=1+", "- ", "9,", "(1)", "1 x", "^{", "2^", "1/7+"],
)
def test_long_texts_stop_nothing(piece: str):
    """In quadratic time any of them would take minutes."""
    started = time.process_time()
    verdicts(piece * 50_000 + "\n1 + 1 = 2")
    assert time.process_time() - started < 20


def test_depth_and_size_are_bounded():
    assert verdicts("(" * 40 + "1" + ")" * 40 + " + 1 = 2") == [True]
    assert verdicts("(" * 80 + "1" + ")" * 80 + " + 1 = 2") == [False]
    assert verdicts("1" * 450 + " + 1 = 2") == [False]
    assert verdicts("2^8000 = 2 * 2") == verdicts("2^9000 = 2 * 2") == [False]


def test_as_a_reward_of_a_recipe():
    rewards = RewardSet([RewardSpec("equations", options={"extract": "marked"})])
    texts = ["1 + 1 = 2\nso \\boxed{2}", "1 + 1 = 2\nso 2", "1 + 1 = 3\nso \\boxed{2}"]
    columns = {"answer": ["2", "2", None], "parts": [text.splitlines(keepends=True) for text in texts]}
    found = rewards.score(texts, [""] * 3, columns)
    assert found.values[:, 0].tolist() == [1.0, 0.0, 0.0]
    assert str(found.parts) == str({"equations": [[1.0, 1.0], [1.0, 0.0], [0.0, NAN]]})
    assert found.record(2)["parts"] == {"equations": [0.0, None]}
    assert "parts" not in rewards.score(texts, [""] * 3).record(0)
    assert pickle.loads(pickle.dumps(Equations())).least == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"least": -1}, "least is -1"),
        ({"decimals": 1.5}, "decimals is 1.5"),
        ({"extract": "last"}, "extract is 'last'"),
    ],
)
def test_options_out_of_range(options: dict, said: str):
    with pytest.raises(ValueError, match=said):
        Equations(**options)
