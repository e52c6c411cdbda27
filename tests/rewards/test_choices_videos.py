"""The reward learned from votes on videos: it sees frames, and neither strips of frames nor motion."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from flowgrpo.rewards.models.choices import Choices
from flowgrpo.rewards.models.voted import read_voted
from flowgrpo.rewards.pixels import load_frames
from flowgrpo.votes.file import append_vote, read_votes
from tests.rewards.votes_on_disk import Picture, choice_by_gold, make_vote, save, scene_pairs, side, vote_on

PAIRS = 30


def vote_on_videos(run: Path, number: int, prompt: str, videos: list[list[Picture]], choice: str) -> None:
    """Save two videos, their frames side by side, and add the choice between them to the votes of the run."""
    sides = [
        replace(
            side(run, save(run, f"iter-{at:06d}/eval-{number:04d}.png", np.concatenate(frames, axis=1)), number, at),
            frames=len(frames),
        )
        for at, frames in zip((0, 10), videos)
    ]
    append_vote(run / "votes.jsonl", make_vote(number, prompt, sides[0], sides[1], choice))


def test_videos_that_stand_still_teach_what_their_pictures_teach(tmp_path: Path) -> None:
    for number, (prompt, pictures) in enumerate(scene_pairs(PAIRS, seed=1)):
        choice = choice_by_gold(prompt, pictures)
        vote_on(tmp_path / "pictures", number, prompt.text, pictures, choice)
        vote_on_videos(tmp_path / "videos", number, prompt.text, [[still] * 3 for still in pictures], choice)
    of_pictures = Choices(tmp_path / "pictures", regularisation=1.0, allow_chance=True)
    of_videos = Choices(tmp_path / "videos", regularisation=1.0, allow_chance=True, batch_size=4)
    assert of_videos.held_out.right == of_pictures.held_out.right
    images, prompts = torch.rand(2, 3, 64, 64), ["a red circle", "a blue square"]
    torch.testing.assert_close(
        of_videos(images, prompts).values, of_pictures(images, prompts).values, atol=1e-3, rtol=0
    )
    of_pictures.close(), of_videos.close()


def test_the_score_of_a_video_is_the_mean_over_its_frames(tmp_path: Path) -> None:
    for number, (prompt, pictures) in enumerate(scene_pairs(PAIRS, seed=1)):
        vote_on(tmp_path, number, prompt.text, pictures, choice_by_gold(prompt, pictures))
    reward = Choices(tmp_path, regularisation=1.0, allow_chance=True)
    videos, prompts = torch.rand(2, 5, 3, 64, 64), ["a red circle", "a blue square"]
    frames = torch.stack([reward(videos[:, at], prompts).values for at in range(5)])
    torch.testing.assert_close(reward(videos, prompts).values, frames.mean(0), atol=1e-4, rtol=0)
    reward.close()
    ends = Choices(tmp_path, regularisation=1.0, allow_chance=True, frames=2)
    torch.testing.assert_close(ends(videos, prompts).values, frames[[0, -1]].mean(0), atol=1e-4, rtol=0)
    ends.close()


def test_frames_are_read_back_and_odd_numbers_are_no_votes(tmp_path: Path) -> None:
    for number in range(5):
        shades = [[np.full((8, 6, 3), 20 * number + at + step, np.uint8) for step in (0, 1)] for at in (0, 10)]
        vote_on_videos(tmp_path, number, f"prompt {number}", shades, "left")
    voted = read_voted([tmp_path], 5)
    assert set(voted.frames.values()) == {2}
    assert set(voted.frames) == set(voted.files)
    content = hashlib.sha256((tmp_path / "samples/iter-000000/eval-0002.png").read_bytes()).hexdigest()
    video = load_frames(voted.files[content], voted.frames[content])
    assert video.shape == (2, 3, 8, 6)
    assert (255 * video).round().unique().tolist() == [40.0, 41.0]
    with pytest.raises(ValueError, match="12 pixels wide and cannot hold 5 frames of equal width"):
        load_frames(voted.files[content], 5)
    path = tmp_path / "votes.jsonl"
    text = path.read_text()
    for odd in ("1", "-2", "2.0", "true", '"2"'):
        path.write_text(text + text.splitlines()[0].replace('"frames": 2', f'"frames": {odd}', 1) + "\n")
        assert len(read_votes(path)[0]) == 5
        with pytest.raises(ValueError, match="line 6"):
            read_voted([path], 5)
