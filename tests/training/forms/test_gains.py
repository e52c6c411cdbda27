"""What each segment of a completion adds to the probability of the right answer."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flowgrpo.configs.load import load_recipe
from flowgrpo.training.text.forms.gains import answer_of, gains
from flowgrpo.training.text.writing import Attempt
from tests.training.forms.scripted import Scripted, judged_by, text_of
from tests.training.forms.test_writing import writer_of
from tests.training.judging import credited
from tests.training.text_runs import trainer_of


class Knowing(Scripted):
    """A policy whose answer `ab` is likelier after each `y`, and less likely after each `n`."""

    def log_probs(self, attempts: list[Attempt]) -> list[torch.Tensor]:
        """The two tokens of the answer have probabilities of geometric mean 2^(y - n - 3)."""
        found = []
        for one in attempts:
            assert text_of(one.ids) == "ab"
            seen = text_of(one.context[1:])
            assert seen.endswith(":")
            level = (seen.count("y") - seen.count("n") - 3) * math.log(2)
            found.append(torch.tensor([level - 0.3, level + 0.3]))
        return found


def test_a_segment_is_worth_what_it_added() -> None:
    """Probabilities 1/8 before, then 1/2 after `yy`, and 1/8 after `nn`. The last segment has no gain."""
    writer = Knowing({0: ["yynnx$", "nnyy$"]}, group=2)
    found = gains(writer, every=2, closing=":")
    assert [one.origin["cuts"] for one in found] == [[2, 4], [2, 4]]
    assert found[0].origin["gains"] == pytest.approx([3 / 8, -3 / 8])
    assert found[1].origin["gains"] == pytest.approx([-3 / 32, 3 / 32])
    assert [text_of(one.ids) for one in found] == ["yynnx$", "nnyy$"]


def test_gains_and_the_outcome_are_returned_together() -> None:
    """The six rewards have mean 1/6; the token before the last cut has its own and what follows."""
    writer = Knowing({0: ["yynnx$", "nnyy$"]}, group=2)
    e, scores = judged_by(gains(writer, every=2, closing=":"), writer, [1.0, 0.0])
    found = credited(e, scores, {"name": "gains", "scale": "none"})
    third, second = 1 - 1 / 6, -3 / 8 - 1 / 6
    first = 3 / 8 - 1 / 6
    assert found[0].tolist() == pytest.approx([first + second + third] * 2 + [second + third] * 2 + [third] * 2)
    assert float(found[1, 4]) == pytest.approx(-1 / 6)
    assert float(found[1, 5]) == 0.0


def test_the_first_answer_of_several_is_asked() -> None:
    assert answer_of(["7", "8"], "answer", "?") == "7"
    assert answer_of(12, "answer", "?") == "12"
    assert answer_of(0, "answer", "?") == "0"
    for nothing in (None, "", []):
        with pytest.raises(ValueError, match=r"'3\+4=' has none in column 'solution'"):
            answer_of(nothing, "solution", "3+4=")


def test_probabilities_are_those_of_the_policy(small_text: list[str], tmp_path: Path) -> None:
    writer = writer_of(small_text, tmp_path / "run")
    found = gains(writer, every=1, closing="=")
    one = next(one for one in found if len(one.ids) > 2)
    answer = writer.ids(str(writer.rows[one.prompt].columns["answer"]))
    chances = []
    for place in (0, 1, 2):
        context = one.context + one.ids[:place] + writer.ids("=")
        [values] = writer.log_probs([replace(one, context=context, ids=answer)])
        chances.append(math.exp(sum(values.tolist()) / len(answer)))
    gained = [chances[1] - chances[0], chances[2] - chances[1]]
    assert one.origin["gains"][:2] == pytest.approx(gained, abs=1e-6)


@pytest.mark.parametrize(
    "lines",
    [
        ["rollout.form={name: gains, every: 2, closing: '='}"],
        ["rollout.form={name: gains, at: parts}", "parts={cut: pattern, pattern: '[0-9]'}"],
    ],
)
def test_a_run(small_text: list[str], tmp_path: Path, lines: list[str]) -> None:
    record = trainer_of(small_text, tmp_path / "run", *lines, "credit=gains", "advantage=null").iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert record["grad_norm"] > 0


def test_parts_that_are_not_cut_are_refused() -> None:
    with pytest.raises(ValueError, match="or use at tokens"):
        load_recipe("text", ["rollout.form={name: gains, at: parts}"])
