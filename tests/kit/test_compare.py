"""Rewards on the same samples: agreement, and the samples on which they differ."""

import json
from pathlib import Path

import pytest
from PIL import Image

from flowgrpo.kit.compare import RewardComparison, compare_rewards
from flowgrpo.kit.given_samples import given_samples
from flowgrpo.rewards.base import RewardError, RewardSpec

REWARDS = """
def red(images, prompts):
    return images[:, 0].mean((1, 2))

def dark_red(images, prompts):
    return -images[:, 0].mean((1, 2))

def blue(images, prompts):
    return images[:, 2].mean((1, 2))

def bright(images, prompts):
    return (images[:, 0].mean((1, 2)) > 0.3).float()

def half(images, prompts):
    return [None if p == "a dog" else x for p, x in zip(prompts, images[:, 0].mean((1, 2)).tolist())]
"""


@pytest.fixture
def compared(tmp_path: Path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, red, blue in (("a_cat-0", 0, 0), ("a_cat-1", 51, 51), ("a_cat-2", 102, 255), ("a_dog-0", 51, 0),
                            ("a_dog-1", 255, 51)):  # fmt: skip
        Image.new("RGB", (6, 6), (red, 0, blue)).save(folder / f"{name}.png")
    (tmp_path / "mine.py").write_text(REWARDS)

    def run(*names: str) -> RewardComparison:
        return compare_rewards([RewardSpec(f"{tmp_path}/mine.py:{name}") for name in names], given_samples(folder))

    return run


def test_scores_agreement_and_grouping(compared):
    found = compared("red", "blue", "dark_red")
    assert found.scores["red"].tolist() == pytest.approx([0, 0.2, 0.4, 0.2, 1.0])
    assert found.groups == [0, 0, 0, 1, 1]
    pairs = {tuple(row["rewards"]): row for row in found.pairs()}
    assert pairs["red", "dark_red"]["pearson"] == pytest.approx(-1)
    assert pairs["red", "dark_red"]["order_within"] == 0
    assert pairs["red", "blue"]["order_within"] == 1
    # Ranks 1, 2.5, 4, 2.5, 5 against 1.5, 3.5, 5, 1.5, 3.5.
    assert pairs["red", "blue"]["spearman"] == pytest.approx(6.5 / (9.5 * 9) ** 0.5)


def test_the_order_of_the_names_does_not_matter(compared):
    """Of red's four pairs, bright tells three apart, and orders them as red does."""
    for names in (("red", "bright"), ("bright", "red")):
        found = compared(*names)
        (pair,) = found.pairs()
        assert (pair["order_within"], pair["pairs_within"]) == (1.0, 3)
        assert "100% of the 3 pairs within groups that both tell apart in the same order" in found.text(0)


def test_the_pictures_on_which_they_differ_most(compared):
    found = compared("red", "blue")
    # Within groups red stands at ∓.2 and ∓.4 with a spread of .4243, blue at -.4, -.2, .6 and ∓.1 with .4320.
    standing = found.standing("red").tolist()
    assert standing == pytest.approx([-0.4714, 0, 0.4714, -0.9428, 0.9428], abs=1e-4)
    differences = found.differences("red", "blue", 2)
    assert [Path(item["image"]).name for item in differences] == ["a_cat-2.png", "a_dog-0.png"]
    assert differences[0]["scores"] == pytest.approx({"red": 0.4, "blue": 1.0})
    assert found.differences("red", "red", 9) == []


def test_a_reward_that_does_not_apply_is_left_out_of_the_pairs(compared):
    found = compared("red", "half")
    assert found.pairs()[0]["both"] == 3
    record = json.loads(found.as_json(3))
    assert record["rewards"]["half"]["absent"] == 2
    assert record["samples"][3]["scores"]["half"] is None
    assert "a_cat-0.png" in json.dumps(record["samples"])
    assert "2 NaN" in found.text(3)


def test_what_cannot_be_compared_is_refused(compared, tmp_path: Path):
    with pytest.raises(ValueError, match="two rewards or more"):
        compared("red")
    with pytest.raises(ValueError, match="two rewards are called 'red'"):
        compared("red", "red")
    (tmp_path / "mine.py").write_text(REWARDS + "\ndef failing(images, prompts):\n    raise RuntimeError('no')\n")
    with pytest.raises(RewardError, match=r"'failing' .*RuntimeError: no"):
        compared("red", "failing")
    with pytest.raises(ValueError, match="scores `completions`"):
        compare_rewards([RewardSpec("gold"), RewardSpec("answer")], given_samples(tmp_path / "pictures"))


def test_completions_are_compared_within_each_evaluation(tmp_path: Path):
    rows = [
        {"prompt": prompt, "completion": text, "phase": "eval", "iteration": iteration, "columns": {"answer": "3"}}
        for iteration in (0, 8)
        for prompt, text in (("1+2=", "3"), ("1+2=", "three " * 40), ("0+3=", "30"), ("0+3=", "3"))
    ]
    (tmp_path / "index.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = compare_rewards([RewardSpec("answer"), RewardSpec("digit_share")], given_samples(tmp_path))
    assert found.groups == [0, 0, 1, 1, 2, 2, 3, 3]
    assert found.scores["answer"].tolist() == [1, 0, 0, 1] * 2
    assert found.scores["digit_share"].tolist() == [1, 0, 1, 1] * 2
    (pair,) = found.pairs()
    # In every second group digit_share has a tie, which does not count.
    assert (pair["order_within"], pair["pairs_within"]) == (1.0, 2)
    shown = found.text(1)
    assert shown.splitlines()[0] == "8 completions, 4 groups of one prompt at one moment of the run"
    assert json.loads(found.as_json(1))["samples"][1] == {
        "completion": "three " * 40, "prompt": "1+2=", "scores": {"answer": 0.0, "digit_share": 0.0},
    }  # fmt: skip
