"""The reward learned from favourites, on marks by a planted taste on scenes."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flowgrpo.rewards.models.bradley_terry import HeldOut, Pairs
from flowgrpo.rewards.models.reactions import Reactions, check_enough, file_of, ranked_right
from flowgrpo.votes.marks import Reaction
from flowgrpo.votes.samples import Sample
from flowgrpo.worlds.scenes.scene_prompts import ScenePrompt
from tests.rewards.votes_on_disk import Picture, gold, scene_pairs

PROMPTS = 60


def marks_of(folder: Path, loves: Callable[[ScenePrompt, Picture], bool]) -> tuple[Path, Path]:
    """A run with two pictures of each prompt, and the marks of somebody who loves what `loves` says."""
    run, marks, lines = folder / "run", [], []
    (run / "samples").mkdir(parents=True)
    for number, (prompt, pictures) in enumerate(scene_pairs(PROMPTS, seed=1)):
        for seed, picture in enumerate(pictures):
            name = f"{number}-{seed}.png"
            Image.fromarray(picture).save(run / "samples" / name)
            place = {"phase": "eval", "prompt": prompt.text, "seed": seed, "iteration": 0}
            lines.append({**place, "prompt_id": number, "sample": number, "image": name})
            favourite = loves(prompt, picture)
            marks.append({**place, "seed": str(seed), "sample": 0, "favourite": favourite, "note": "seen"})
    (run / "samples" / "index.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    # A mark that takes back a star is kept for its note, so that the picture was seen.
    content = {"flowgrpo": "marks", "version": 1, "runs": [{"id": "x", "name": "n", "folder": "run", "marks": marks}]}
    (folder / "marks.json").write_text(json.dumps(content))
    return folder / "marks.json", run


def test_the_favourites_of_a_taste_are_predicted_on_other_prompts(tmp_path: Path) -> None:
    marks, run = marks_of(tmp_path, lambda prompt, picture: gold(prompt, picture) == 1.0)
    reward = Reactions(marks, run, regularisation=10.0)
    assert reward.held_out.beats_chance
    others = [(prompt, pictures) for prompt, pictures in scene_pairs(40, seed=2, heldout=True)]
    known = [(prompt, picture, gold(prompt, picture) == 1.0) for prompt, pictures in others for picture in pictures]
    images = torch.from_numpy(np.stack([picture for _, picture, _ in known])).permute(0, 3, 1, 2).float() / 255
    scores = reward(images=images, prompts=[prompt.text for prompt, _, _ in known])
    assert scores.notes[0] == reward.report
    values, loved = scores.values, torch.tensor([one for _, _, one in known])
    assert bool(((values > 0) & (values < 1)).all())
    # About half of the pictures are loved. The probabilities have this mean, and they tell the pictures apart.
    assert float(values.mean()) == pytest.approx(float(loved.float().mean()), abs=0.15)
    above = values[loved][:, None] > values[~loved]
    assert float(above.float().mean()) > 0.7
    reward.close()


def test_favourites_by_a_coin_are_refused(tmp_path: Path) -> None:
    dice = random.Random(0)
    marks, run = marks_of(tmp_path, lambda prompt, picture: dice.random() < 0.5)
    with pytest.raises(ValueError, match=r"reactions: no better than chance: \d+% of \d+ held-out favourites"):
        Reactions(marks, run, regularisation=10.0)
    with pytest.warns(UserWarning, match="may be noise"):
        reward = Reactions(marks, run, regularisation=10.0, allow_chance=True, agreement=False)
    assert reward(images=torch.rand(2, 3, 64, 64), prompts=["a", "b"]).values.shape == (2,)
    reward.close()


def test_held_out_favourites_are_compared_within_their_prompts() -> None:
    """One feature that decides: of 6 prompts with a loved and two other pictures, all 12 pairs are right."""
    loved = np.array([1.0, 0.0, 0.0] * 6)
    features = np.stack([np.where(loved > 0, 1.0, -1.0), np.full(18, 30.0)], 1)
    units = np.arange(18) // 3
    rows = Pairs(features, loved, 1 - loved, np.zeros(18), units)
    found = ranked_right(rows, 1.0)
    assert (found.right, found.count) == (12, 12)
    # A feature of the prompt alone ranks no picture above another of its prompt.
    blind = Pairs(np.stack([units * 1.0, np.full(18, 30.0)], 1), loved, 1 - loved, np.zeros(18), units)
    assert (ranked_right(blind, 1.0).right, ranked_right(blind, 1.0).count) == (0, 12)


def sample(prompt: str, **content: str | None) -> Sample:
    return Sample("eval", 0, prompt, "0", "7", 0, **{"image": None, **content})


def test_reactions_to_texts_are_refused() -> None:
    assert file_of(Reaction(Path("x"), sample("p", image="y.png"), True)) == Path("x/samples/y.png")
    with pytest.raises(ValueError, match="reactions: seed 7 of 'p' in x is a completion"):
        file_of(Reaction(Path("x"), sample("p", completion="a text"), True))


def test_too_few_reactions_are_refused() -> None:
    seen = [Reaction(Path("x"), sample(f"p{k // 2}", image="y.png"), k % 2 == 0) for k in range(12)]
    check_enough(seen, 6)
    with pytest.raises(ValueError, match="6 favourites and 6 other pictures beside them, and 6 prompts with both; 7"):
        check_enough(seen, 7)
    with pytest.raises(ValueError, match="4 prompts with both"):
        check_enough(seen[:8], 2)


def test_favourites_of_noise_rarely_beat_chance_although_their_pictures_share_prompts() -> None:
    rng, accepted, independent = np.random.default_rng(0), 0, 0
    for _ in range(100):
        features, units = rng.normal(size=(160, 8)) / 8**0.5, np.repeat(np.arange(10), 16)
        loved = np.tile(np.repeat([1.0, 0.0], 8), 10)
        rows = Pairs(np.column_stack([features, np.full(160, 30.0)]), loved, 1 - loved, np.zeros(160), units)
        found = ranked_right(rows, 1.0)
        accepted += found.beats_chance
        independent += HeldOut(found.right, found.count).beats_chance
    # If all pairs counted as independent, a quarter of such rewards would pass. About one in twenty passes now; chance
    # alone would let one in forty pass, and the folds share their training pairs.
    assert independent > 20
    assert accepted <= 10
