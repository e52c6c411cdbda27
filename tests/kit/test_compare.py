"""Rewards on one folder: agreement, and the pictures on which they differ."""

import json
from pathlib import Path

import pytest
from PIL import Image

from flowgrpo.kit.compare import RewardComparison, compare_rewards
from flowgrpo.kit.folder import read_folder
from flowgrpo.rewards.base import RewardSpec

REWARDS = """
def red(images, prompts):
    return images[:, 0].mean((1, 2))

def dark_red(images, prompts):
    return -images[:, 0].mean((1, 2))

def blue(images, prompts):
    return images[:, 2].mean((1, 2))

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
        return compare_rewards([RewardSpec(f"{tmp_path}/mine.py:{name}") for name in names], read_folder(folder))

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


def test_the_pictures_on_which_they_differ_most(compared):
    found = compared("red", "blue")
    # Within groups red stands at ∓.2 and ∓.4 with a spread of .4243, blue at -.4, -.2, .6 and ∓.1 with .4320.
    standing = found.standing("red").tolist()
    assert standing == pytest.approx([-0.4714, 0, 0.4714, -0.9428, 0.9428], abs=1e-4)
    differences = found.differences("red", "blue", 2)
    assert [Path(item["file"]).name for item in differences] == ["a_cat-2.png", "a_dog-0.png"]
    assert differences[0]["scores"] == pytest.approx({"red": 0.4, "blue": 1.0})
    assert found.differences("red", "red", 9) == []


def test_a_reward_that_does_not_apply_is_left_out_of_the_pairs(compared):
    found = compared("red", "half")
    assert found.pairs()[0]["both"] == 3
    record = json.loads(found.as_json(3))
    assert record["rewards"]["half"]["absent"] == 2
    assert record["pictures"][3]["scores"]["half"] is None
    assert "a_cat-0.png" in json.dumps(record["pictures"])
    assert "2 NaN" in found.text(3)


def test_what_cannot_be_compared_is_refused(compared, tmp_path: Path):
    with pytest.raises(ValueError, match="two rewards or more"):
        compared("red")
    with pytest.raises(ValueError, match="two rewards are called 'red'"):
        compared("red", "red")
    (tmp_path / "mine.py").write_text(REWARDS + "\ndef failing(images, prompts):\n    raise RuntimeError('no')\n")
    with pytest.raises(ValueError, match=r"'failing' fails on .*RuntimeError: no"):
        compared("red", "failing")
    with pytest.raises(ValueError, match="scores `completions`"):
        compare_rewards([RewardSpec("red"), RewardSpec("answer")][::-1], [])
