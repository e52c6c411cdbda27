"""One minus the Brier score of stated confidences, by hand."""

import math

import pytest

from flowgrpo.rewards import RewardSet, RewardSpec
from flowgrpo.rewards.text.confidence import Confidence, stated_confidence

SAID = "<answer>7</answer><confidence>{}</confidence>"


def scored(texts: list[str], answers: list[object], **options: object) -> tuple[list[float], dict[str, list[float]]]:
    specs = [RewardSpec("confidence", options={"correct": "answer", **options})]
    batch = RewardSet(specs).score(texts, ["p"] * len(texts), {"answer": answers})
    return batch.values[:, 0].tolist(), batch.sub_scores["confidence"]


def test_a_confidence_of_four_fifths() -> None:
    """The Brier score is 0.04 for a right answer, and 0.64 for a wrong one. Without a confidence there is no reward."""
    texts = [SAID.format("8"), SAID.format("8"), "<answer>7</answer>", SAID.format("8"), SAID.format(10)]
    values, subs = scored(texts, ["7", "9", "7", None, "7"])
    assert values[:3] == pytest.approx([0.96, 0.36, 0])
    assert math.isnan(values[3])
    assert values[4] == 1
    assert subs["correct"][:3] == [1, 0, 1]
    assert math.isnan(subs["stated"][2])


def test_the_success_rate_is_the_best_confidence() -> None:
    """Three of four answers are right: c = 3/4 leaves a variance of 3/16, and 1/2 or 1 leave 1/4."""
    means = {
        stated: sum(scored([SAID.format(stated)] * 4, ["7", "7", "7", "1"])[0]) / 4 for stated in ("5", "75%", "1/1")
    }
    assert means == {"5": 0.75, "75%": pytest.approx(13 / 16), "1/1": 0.75}


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("sure: 7", 0.7), ("1 or 2, so 20%", 0.2), ("9/10", 0.9), ("0", 0.0), ("11", None), ("no", None), ("-1", None),
        ("", None),
    ],
)  # fmt: skip
def test_what_counts_as_a_confidence(text: str, read: float | None) -> None:
    found = stated_confidence(text, 10.0)
    assert math.isnan(found) if read is None else found == pytest.approx(read)


def test_another_tag_and_another_scale() -> None:
    values, _ = scored(["<answer>1</answer><sure>60</sure>"], ["1"], tag="sure", scale=100)
    assert values == pytest.approx([1 - 0.4**2])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tag": "<sure>"}, "give different names without brackets"),
        ({"scale": 0}, "scale is 0"),
        ({"threshold": "1"}, "threshold is '1'"),
        ({"correct": "right"}, "for `correct` cannot be made"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Confidence(**{"correct": "answer", **options})  # type: ignore[arg-type]
