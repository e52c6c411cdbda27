"""Pairs of pictures from files of votes: what counts, what belongs together, and what is refused."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flowgrpo.rewards.models.voted import Count, Voted, read_voted
from flowgrpo.votes.file import Side, append_vote
from tests.rewards.votes_on_disk import Picture, make_vote, save, side, vote_on


def shade(level: int) -> Picture:
    return np.full((8, 8, 3), level, dtype=np.uint8)


def run_of(folder: Path, prompts: int = 6, offset: int = 0) -> Path:
    """A run with one choice a prompt, for the darker picture, which is on the left of every second."""
    for number in range(prompts):
        pictures = (shade(offset + 2 * number), shade(offset + 2 * number + 1))
        turned = number % 2
        vote_on(folder, number, f"prompt {number}", pictures[:: -1 if turned else 1], ("left", "right")[turned])
    return folder


def counts(voted: Voted) -> list[tuple[str, Count]]:
    return [(pair.prompt, count) for pair, count in voted.pairs.items()]


def test_choices_of_one_pair_are_counted_together_whatever_the_sides(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    path = run / "votes.jsonl"
    (first, *_), (pair, *_) = [json.loads(line) for line in path.read_text().splitlines()], read_voted([run], 6).pairs
    dark, light = Side(**first["left"], completion=None), Side(**first["right"], completion=None)
    append_vote(path, make_vote(0, "prompt 0", light, dark, "right", session="bob"))  # dark again
    append_vote(path, make_vote(0, "prompt 0", light, dark, "left", session="eve"))
    append_vote(path, make_vote(0, "prompt 0", dark, light, "tie", session="zoe"))
    append_vote(path, make_vote(0, "prompt 0", dark, light, "skip", session="dan"))
    append_vote(path, make_vote(0, "prompt 0", dark, light, "right", session="max"))
    append_vote(path, make_vote(0, "prompt 0", dark, light, "left", session="max"))  # taken back
    count = read_voted([run], 6).pairs[pair]
    assert pair.first < pair.second
    assert {pair.first, pair.second} == {dark.sha256, light.sha256}
    by_content = {pair.first: count.first, pair.second: count.second}
    assert (by_content[dark.sha256], by_content[light.sha256], count.tie) == (3, 1, 1)


def test_order_of_lines_and_sides_do_not_matter(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    path = run / "votes.jsonl"
    before = read_voted([path], 6)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[::2]:
        row["left"], row["right"] = row["right"], row["left"]
        row["choice"] = {"left": "right", "right": "left"}[row["choice"]]
    path.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    after = read_voted([run], 6)
    assert counts(before) == counts(after)
    assert list(before.pairs) == list(after.pairs)
    assert before.units.tolist() == after.units.tolist() == list(range(6))


def test_several_files_add_up(tmp_path: Path) -> None:
    one, two = run_of(tmp_path / "one"), run_of(tmp_path / "two", offset=100)
    both = read_voted([one, two / "votes.jsonl"], 12)
    assert (len(both.pairs), len(both.files), both.shared) == (12, 24, "prompts")
    # Two pairs a prompt.
    assert sorted(both.units.tolist()) == sorted([*range(6), *range(6)])
    with pytest.raises(ValueError, match="one file of votes is named twice"):
        read_voted([one, one / ".." / "one" / "votes.jsonl"], 6)


def test_a_vote_may_be_on_another_run_than_that_of_the_file(tmp_path: Path) -> None:
    one, two = run_of(tmp_path / "one"), run_of(tmp_path / "two", 1, offset=100)
    shown = [side(folder, f"samples/iter-{at:06d}/eval-0000.png", 0, at) for folder, at in ((one, 0), (two, 10))]
    shown[1] = replace(shown[1], folder="../two")
    append_vote(one / "votes.jsonl", make_vote(0, "prompt 0", shown[0], shown[1], "left"))
    voted = read_voted([one], 7)
    assert voted.files[shown[1].sha256].resolve() == (two / "samples/iter-000010/eval-0000.png").resolve()
    assert voted.units.tolist() == [0, 0, 1, 2, 3, 4, 5]


def test_of_few_prompts_pictures_that_were_compared_belong_together(tmp_path: Path) -> None:
    for number in range(5):
        vote_on(tmp_path, number, "one prompt", (shade(10 * number), shade(10 * number + 1)), "left")
    voted = read_voted([tmp_path], 5)
    assert (voted.shared, sorted(voted.units.tolist())) == ("pictures", list(range(5)))
    # Links the pictures of two pairs.
    linked = [side(tmp_path, f"samples/iter-000000/eval-000{number}.png", number, 0) for number in (0, 1)]
    append_vote(tmp_path / "votes.jsonl", make_vote(9, "one prompt", linked[0], linked[1], "left"))
    with pytest.raises(ValueError, match="the votes are on 1 prompts, and comparisons link their pictures"):
        read_voted([tmp_path], 5)
    vote_on(tmp_path, 5, "one prompt", (shade(50), shade(51)), "left")
    units = dict(zip(read_voted([tmp_path], 5).pairs, read_voted([tmp_path], 5).units.tolist()))
    assert sorted(np.bincount(list(units.values())).tolist()) == [1, 1, 1, 1, 3]


def test_too_few_decided_pairs(tmp_path: Path) -> None:
    run = run_of(tmp_path, 7)
    vote_on(run, 7, "prompt 7", (shade(200), shade(201)), "tie")
    assert len(read_voted([run], 7).pairs) == 8
    with pytest.raises(ValueError, match=r"votes\.jsonl: 7 pairs in which one picture was preferred, but 8 are needed"):
        read_voted([run], 8)


def test_pictures_must_be_those_that_were_voted_on(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    file = run / "samples/iter-000010/eval-0003.png"
    kept = file.read_bytes()
    file.unlink()
    with pytest.raises(ValueError, match=r"votes\.jsonl, line 4: .*eval-0003\.png is gone; put the picture back"):
        read_voted([run], 6)
    save(run, "iter-000010/eval-0003.png", shade(99))
    with pytest.raises(ValueError, match=r"votes\.jsonl, line 4: .*eval-0003\.png has changed since the vote"):
        read_voted([run], 6)
    # If one known content replaces another, that is a change too.
    shutil.copyfile(run / "samples/iter-000010/eval-0002.png", file)
    with pytest.raises(ValueError, match=r"line 4: .*has changed"):
        read_voted([run], 6)
    file.write_bytes(kept)
    assert len(read_voted([run], 6).pairs) == 6
    # A known content does not replace a missing file.
    row = json.loads((run / "votes.jsonl").read_text().splitlines()[0])
    row["left"]["image"], row["session"] = "samples/gone.png", "bob"
    with (run / "votes.jsonl").open("a") as votes:
        votes.write(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=r"line 7: .*gone\.png is gone"):
        read_voted([run], 6)


def test_a_link_out_of_the_run_is_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    file = run / "samples/iter-000010/eval-0001.png"
    outside = tmp_path / "outside.png"
    os.replace(file, outside)
    file.symlink_to(outside)
    with pytest.raises(ValueError, match=r"votes\.jsonl, line 2: `image` 'iter-000010/eval-0001\.png' leads outside"):
        read_voted([run], 6)


def test_equal_pictures_and_completions_are_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    written = [Side("run", ".", at, "0", 0, None, f"text {at}", "") for at in (0, 10)]
    path = run / "votes.jsonl"
    before = path.read_text()
    append_vote(path, make_vote(7, "prompt 7", written[0], written[1], "left"))
    with pytest.raises(
        ValueError,
        match=r"votes\.jsonl, line 7 is a choice between completions.*`objective: \{name: answers, loss: dpo\}`",
    ):
        read_voted([run], 6)
    path.write_text(before)
    vote_on(run, 8, "prompt 8", (shade(1), shade(1)), "left")
    with pytest.raises(ValueError, match=r"votes\.jsonl, line 7 is a choice between two equal pictures"):
        read_voted([run], 6)
    path.write_text(before[:-9])
    with pytest.raises(ValueError, match=r"votes\.jsonl, line 6 is cut short"):
        read_voted([run], 6)
    with pytest.raises(ValueError, match=r"there is no file .*nowhere"):
        read_voted([tmp_path / "nowhere"], 6)
