"""Votes on pictures, written as the gallery writes them."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from flowgrpo.votes.file import Side, Vote, append_vote
from flowgrpo.worlds.scenes.draw import draw
from flowgrpo.worlds.scenes.gold import find_things, verify
from flowgrpo.worlds.scenes.scene_prompts import ScenePrompt, compose, disturb, ground_colour, split

Picture = NDArray[np.uint8]


def save(run: Path, name: str, picture: Picture) -> str:
    """Save a picture [H, W, 3] in a run, and return its place there."""
    path = run / "samples" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture).save(path)
    return f"samples/{name}"


def side(run: Path, image: str, number: int, iteration: int, folder: str = ".") -> Side:
    digest = hashlib.sha256((run / image).read_bytes()).hexdigest()
    return Side(run.name, folder, iteration, str(number), 0, image, None, digest)


def make_vote(number: int, prompt: str, left: Side, right: Side, choice: str, session: str = "ann") -> Vote:
    return Vote(session, "2026-01-01T00:00:00+00:00", prompt, str(number), {}, left, right, choice)


def vote_on(
    run: Path, number: int, prompt: str, pictures: tuple[Picture, Picture], choice: str, **changes: Any
) -> Vote:
    """Save two pictures, and add the choice between them to the votes of the run."""
    sides = [
        side(run, save(run, f"iter-{at:06d}/eval-{number:04d}.png", picture), number, at)
        for at, picture in zip((0, 10), pictures)
    ]
    vote = make_vote(number, prompt, sides[0], sides[1], choice, **changes)
    append_vote(run / "votes.jsonl", vote)
    return vote


def scene_pairs(count: int, seed: int, heldout: bool = False) -> Iterator[tuple[ScenePrompt, tuple[Picture, Picture]]]:
    """Prompts of the embedded world, each with a scene that fits and one that does not, in random order."""
    dice = np.random.default_rng(seed)
    for prompt in split(heldout, count, seed)[:count]:
        pictures = [
            np.round(255 * draw(compose(items, dice), ground_colour(dice))).astype(np.uint8)
            for items in (prompt.items, disturb(prompt.items, dice))
        ]
        if dice.random() < 0.5:
            pictures.reverse()
        yield prompt, (pictures[0], pictures[1])


def gold(prompt: ScenePrompt, picture: Picture) -> float:
    """The gold reward's partial credit."""
    return verify(find_things(picture.astype(np.float32) / 255), prompt.items)[1]


def choice_by_gold(prompt: ScenePrompt, pictures: tuple[Picture, Picture]) -> str:
    left, right = (gold(prompt, picture) for picture in pictures)
    return "tie" if left == right else "left" if left > right else "right"
