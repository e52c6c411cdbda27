"""Rewards against people's choices, on votes written by hand."""

import hashlib
import json
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from flowgrpo.cli.app import app
from flowgrpo.kit.agreement import Agreement, agreement_with
from flowgrpo.rewards.base import RewardSpec
from flowgrpo.votes.file import append_vote
from tests.gallery.voting import make_vote

REWARDS = """
import math

def red(images, prompts):
    return images[:, 0].mean(dim=(1, 2))

def flat(images, prompts):
    return [1.0] * len(images)

def blind(images, prompts):
    return [math.nan if float(image[0].mean()) > 0.9 else 0.0 for image in images]

def size(completions, prompts):
    return [float(len(text)) for text in completions]

def wanted(completions, prompts, answer):
    return [float(len(text) == wanted["length"]) for text, wanted in zip(completions, answer)]
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(REWARDS)
    return path


def vote_on_pictures(folder: Path, number: int, left: int, right: int, choice: str) -> None:
    """A vote between two pictures of these levels of red."""
    sides = []
    for side, level in (("left", left), ("right", right)):
        path = folder / "samples" / f"{number}-{side}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (4, 3), (level, 0, 0)).save(path)
        sides.append(f"samples/{path.name}")
    vote = make_vote(choice, seed=str(number))
    shown = [vote.left, vote.right]
    record = [
        type(side)(
            side.run,
            side.folder,
            side.iteration,
            side.prompt_id,
            side.sample,
            image,
            completion=None,
            sha256=hashlib.sha256((folder / image).read_bytes()).hexdigest(),
        )
        for side, image in zip(shown, sides)
    ]
    append_vote(folder / "votes.jsonl", type(vote)(**{**vars(vote), "left": record[0], "right": record[1]}))


def test_agreement_with_videos(tmp_path: Path, source: Path) -> None:
    vote_on_pictures(tmp_path, 0, 200, 10, "left")
    path = tmp_path / "votes.jsonl"
    path.write_text(path.read_text().replace('"sha256"', '"frames": 2, "sha256"'))
    source.write_text(
        REWARDS + "\ndef shape(images, prompts):\n    assert images.shape[1:] == (2, 3, 3, 2)\n"
        "    return images[:, 0, 0].mean(dim=(1, 2))\n"
    )
    (shape,) = agreement_with([RewardSpec(f"{source}:shape")], path)
    assert (shape.right, shape.wrong) == (1, 0)


def test_what_a_reward_says_of_itself_is_shown(tmp_path: Path, source: Path) -> None:
    vote_on_pictures(tmp_path, 0, 200, 10, "left")
    source.write_text(REWARDS + "\nred.report = 'seen on a stove'\nflat.report = print\n")
    specs = [RewardSpec(f"{source}:{name}") for name in ("red", "flat")]
    red, flat = agreement_with(specs, tmp_path / "votes.jsonl")
    assert red.text().splitlines()[1] == "  it says of itself: seen on a stove"
    assert len(flat.text().splitlines()) == 1


def test_agreement_with_pictures(tmp_path: Path, source: Path) -> None:
    for number, (left, right, choice) in enumerate(
        [(200, 10, "left"), (10, 200, "right"), (10, 200, "left"), (255, 0, "left"), (50, 60, "tie"), (5, 6, "skip")]
    ):
        vote_on_pictures(tmp_path, number, left, right, choice)
    specs = [RewardSpec(f"{source}:{name}", label=name) for name in ("red", "flat", "blind")]
    red, flat, blind = agreement_with(specs, tmp_path / "votes.jsonl")
    assert red == Agreement("red", right=3, wrong=1, equal=0, absent=0)
    assert red.share == 0.75
    assert red.text().startswith("red: agrees on 75% of 4 pairs (95 %: 30% to 95%)")
    assert flat == Agreement("flat", 0, 0, 4, 0)
    assert flat.text() == "flat: tells no pair apart; 4 with equal scores, 0 not scored"
    # The picture of level 255 is not scored.
    assert blind == Agreement("blind", 0, 0, 3, 1)


def test_a_picture_that_changed_since_the_vote_is_refused(tmp_path: Path, source: Path) -> None:
    vote_on_pictures(tmp_path, 0, 200, 10, "left")
    Image.new("RGB", (4, 3), (0, 90, 0)).save(tmp_path / "samples" / "0-right.png")
    with pytest.raises(ValueError, match=r"votes.jsonl, line 1: .*0-right\.png has changed since the vote"):
        agreement_with([RewardSpec(f"{source}:red")], tmp_path / "votes.jsonl")


def test_agreement_with_completions(tmp_path: Path, source: Path) -> None:
    columns = {"answer": json.dumps({"length": 7})}
    # Its sides read "text 0" and "text 10".
    append_vote(tmp_path / "votes.jsonl", make_vote("right", columns=columns))
    specs = [RewardSpec(f"{source}:{name}", label=name) for name in ("size", "wanted")]
    size, wanted = agreement_with(specs, tmp_path / "votes.jsonl")
    assert (size.right, size.wrong) == (1, 0)
    assert (wanted.right, wanted.wrong) == (1, 0)


def test_equal_words_about_other_pictures_are_told_apart(tmp_path: Path, source: Path) -> None:
    # The completions and the words are equal, and the columns say which of them is right.
    for number, length in enumerate((6, 7)):
        columns = {"answer": {"length": length}, "image": f"{number}.png"}
        choice = "left" if length == 6 else "right"
        append_vote(
            tmp_path / "votes.jsonl", make_vote(choice, seed=str(number), columns={"image": ""}, values=columns)
        )
    (wanted,) = agreement_with([RewardSpec(f"{source}:wanted")], tmp_path / "votes.jsonl")
    assert (wanted.right, wanted.wrong) == (2, 0)


def test_files_that_say_less_than_they_seem_to(tmp_path: Path, source: Path) -> None:
    votes = tmp_path / "votes.jsonl"
    append_vote(votes, make_vote("right", values={"answer": {"length": 7}}))
    specs = [RewardSpec(f"{source}:size"), RewardSpec(f"{source}:size")]
    with pytest.raises(ValueError, match="two rewards are called 'size'; give one of them a `label`"):
        agreement_with(specs, votes)
    with votes.open("a") as file:
        file.write('{"session": "a')
    done = CliRunner().invoke(app, ["rewards", "compare", f"{source}:size", "--votes", str(votes)])
    assert f"1 lines of {votes} could not be read, and do not count" in done.output
    vote_on_pictures(tmp_path, 1, 200, 10, "left")
    with pytest.raises(
        ValueError, match=r"votes\.jsonl, line 3 is a choice between pictures, and line 1 between compl"
    ):
        agreement_with(specs[:1], votes)


def test_the_command(tmp_path: Path, source: Path) -> None:
    vote_on_pictures(tmp_path, 0, 200, 10, "left")
    votes, out = tmp_path / "votes.jsonl", tmp_path / "out.json"
    run = CliRunner().invoke(app, ["rewards", "compare", f"{source}:red", "--votes", str(votes), "--json", str(out)])
    assert run.exit_code == 0, run.output
    assert "agrees on 100% of 1 pairs (95 %: 21% to 100%)" in run.output
    [record] = json.loads(out.read_text())
    assert (record["right"], record["share"]) == (1, 1.0)
    folder = CliRunner().invoke(app, ["rewards", "compare", f"{source}:red", "--votes", str(tmp_path)])
    assert "agrees on 100% of 1 pairs" in folder.output
    wrong = CliRunner().invoke(
        app, ["rewards", "compare", f"{source}:red", "--votes", str(tmp_path), "--options", "shade=3"]
    )
    assert "reward 'red' has no option 'shade'" in str(wrong.exception)
    [same] = agreement_with([RewardSpec(f"{source}:red")], tmp_path)
    assert same.record() == record
    both = CliRunner().invoke(app, ["rewards", "compare", "gold"])
    assert "give --samples, a run or a folder of pictures, or --votes" in str(both.exception)


def test_what_cannot_be_compared(tmp_path: Path, source: Path) -> None:
    votes = tmp_path / "votes.jsonl"
    append_vote(votes, make_vote("tie"))
    with pytest.raises(ValueError, match="holds no decided pair"):
        agreement_with([RewardSpec(f"{source}:size")], votes)
    vote_on_pictures(tmp_path, 1, 200, 10, "left")
    (tmp_path / "samples" / "1-left.png").unlink()
    votes.write_text(votes.read_text().splitlines(keepends=True)[-1])
    with pytest.raises(ValueError, match=r"1-left\.png, which was voted on, is missing"):
        agreement_with([RewardSpec(f"{source}:red")], votes)
