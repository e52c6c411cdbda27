"""The reward learned from votes, on votes by a planted preference on scenes."""

import json
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from flowgrpo.configs.load import load_recipe
from flowgrpo.rewards import RewardSet, RewardSpec
from flowgrpo.rewards.backbones import sharing
from flowgrpo.rewards.models.choices import Choices
from flowgrpo.rewards.models.clip_score import ClipScore
from flowgrpo.rewards.models.siglip import Siglip
from flowgrpo.rewards.pixels import load_picture
from flowgrpo.votes.file import Side, append_vote, read_whole
from flowgrpo.worlds.scenes.scene_prompts import ScenePrompt
from tests.rewards.votes_on_disk import Picture, choice_by_gold, gold, make_vote, scene_pairs, vote_on
from tests.tiny_rewards import save_clip, save_siglip

PAIRS = 60
TURNED = {"left": "right", "right": "left", "tie": "tie"}


@pytest.fixture(autouse=True)
def nothing_left_in_memory() -> Iterator[None]:
    yield
    assert not sharing._LOADED


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Choices for what the gold reward prefers."""
    folder = tmp_path_factory.mktemp("by-gold")
    for number, (prompt, pictures) in enumerate(scene_pairs(PAIRS, seed=1)):
        vote_on(folder, number, prompt.text, pictures, choice_by_gold(prompt, pictures))
    return folder


@pytest.fixture(scope="module")
def coins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random choices, as by a coin."""
    folder, dice = tmp_path_factory.mktemp("by-coin"), random.Random(0)
    for number, (prompt, pictures) in enumerate(scene_pairs(PAIRS, seed=1)):
        vote_on(folder, number, prompt.text, pictures, dice.choice(("left", "right")))
    return folder


def tensor(*pictures: Picture) -> Tensor:
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 255


def head(reward: Choices) -> Tensor:
    assert reward._on_agreement is not None
    return torch.cat([reward._on_picture, torch.tensor([reward._on_agreement, *reward._means])])


@pytest.fixture(scope="module")
def others() -> list[tuple[ScenePrompt, tuple[Picture, Picture]]]:
    """Pairs of other prompts, told apart by gold, with the better picture first."""
    found = []
    for prompt, pictures in scene_pairs(40, seed=2, heldout=True):
        one, two = (gold(prompt, picture) for picture in pictures)
        if one != two:
            found.append((prompt, pictures if one > two else pictures[::-1]))
    assert len(found) > 30
    return found


def share_right(reward: Choices, pairs: list[tuple[ScenePrompt, tuple[Picture, Picture]]]) -> float:
    """How often the first picture gets the higher score."""
    images = tensor(*(picture for _, pictures in pairs for picture in pictures))
    values = reward(images=images, prompts=[prompt.text for prompt, _ in pairs for _ in range(2)]).values
    return float((values[0::2] > values[1::2]).float().mean())


def test_pictures_of_other_prompts_are_ranked_by_the_planted_preference(run: Path, others: Any, tmp_path: Path) -> None:
    reward = Choices(str(run))
    assert reward.held_out.beats_chance
    assert share_right(reward, others) > 0.8
    reward.close()
    against = copied(run, tmp_path, lambda rows: [row | {"choice": TURNED[row["choice"]]} for row in rows])
    contrary = Choices(against, regularisation=reward.regularisation)
    assert share_right(contrary, others) < 0.2
    contrary.close()


def test_choices_by_a_coin_are_refused_and_said_to_be_chance(coins: Path) -> None:
    message = (
        r"choices: no better than chance: \d+% of 60 held-out pairs predicted \(95 %: .*\), on prompts left out; vote"
    )
    with pytest.raises(ValueError, match=message):
        Choices(str(coins), regularisation=10.0)
    with pytest.warns(UserWarning, match=r"choices: no better than chance: .*; the preferences of this reward may"):
        reward = Choices(str(coins), allow_chance=True, regularisation=10.0)
    low, high = reward.held_out.interval
    assert low < 0.5 < high
    scores = reward(images=torch.rand(2, 3, 64, 64), prompts=["a red circle"] * 2)
    assert scores.notes == [reward.report] * 2
    assert reward.report.startswith("no better than chance: ")
    reward.close()


def copied(run: Path, folder: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Path:
    """The votes of a run, changed, in another folder."""
    rows = change([json.loads(line) for line in (run / "votes.jsonl").read_text().splitlines()])
    for row in rows:
        for name in ("left", "right"):
            row[name]["folder"] = str(run)
    folder.mkdir(exist_ok=True)
    (folder / "votes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def exchanged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same choices, with the pictures of some of them on the other side."""
    some = [row | {"left": row["right"], "right": row["left"], "choice": TURNED[row["choice"]]} for row in rows[::3]]
    return some + rows[1::3] + rows[2::3]


def shuffled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return random.Random(1).sample(rows, len(rows))


def test_votes_decide_and_not_their_order_or_sides(run: Path, tmp_path: Path) -> None:
    first = Choices(run, regularisation=1.0)
    for change in (list, exchanged, shuffled):
        other = Choices(copied(run, tmp_path / change.__name__, change), regularisation=1.0)
        assert torch.equal(head(first), head(other))
        assert (first.held_out, first.report) == (other.held_out, other.report)
        other.close()
    some = Choices(copied(run, tmp_path / "some", lambda rows: rows[:50]), regularisation=1.0)
    assert not torch.equal(head(first), head(some))
    some.close(), first.close()


def test_scores_are_log_odds_around_the_pictures_that_were_voted_on(run: Path) -> None:
    reward = Choices(run, regularisation=0.01)
    votes = read_whole(run / "votes.jsonl")
    sides = [(load_picture(run / side.image), vote) for vote in votes for side in (vote.left, vote.right) if side.image]
    scores = reward(images=torch.stack([image for image, _ in sides]), prompts=[vote.prompt for _, vote in sides])
    values = scores.values.double()
    assert all(abs(np.mean(part)) < 1e-5 for part in scores.sub_scores.values())
    assert values.std() > 1
    torch.testing.assert_close(
        values, torch.tensor(scores.sub_scores["picture"]).double() + torch.tensor(scores.sub_scores["agreement"]),
        atol=1e-5, rtol=0,
    )  # fmt: skip
    decided = torch.tensor([vote.choice != "tie" for vote in votes])
    left = torch.tensor([vote.choice == "left" for vote in votes])
    odds = values[0::2] - values[1::2]
    # With hardly any penalty, it explains every choice that it was fitted on.
    assert torch.equal(odds[decided] > 0, left[decided])
    assert odds[decided].abs().sigmoid().mean() > 0.95
    assert len(scores.values) == 2 * PAIRS
    few = reward(images=torch.stack([image for image, _ in sides[:3]]), prompts=[vote.prompt for _, vote in sides[:3]])
    torch.testing.assert_close(few.values, scores.values[:3], atol=1e-5, rtol=0)
    assert reward(images=torch.zeros(0, 3, 64, 64), prompts=[]).values.shape == (0,)
    reward.close()


def test_without_agreement_a_preference_for_pictures_is_found_whatever_the_prompt(tmp_path: Path) -> None:
    """People here like a dim picture."""
    dice = np.random.default_rng(4)

    def dimmed(pictures: tuple[Picture, Picture]) -> tuple[tuple[Picture, Picture], str]:
        shades = dice.permutation([dice.uniform(0.5, 0.7), dice.uniform(0.8, 1.0)])
        dim = [np.round(picture * shade).astype(np.uint8) for picture, shade in zip(pictures, shades)]
        return (dim[0], dim[1]), "left" if shades[0] < shades[1] else "right"

    for number, (prompt, pictures) in enumerate(scene_pairs(40, seed=3)):
        shown, choice = dimmed(pictures)
        vote_on(tmp_path, number, prompt.text, shown, choice)
    reward = Choices(tmp_path, agreement=False, regularisation=1.0)
    right = []
    for prompt, pictures in scene_pairs(40, seed=5, heldout=True):
        shown, choice = dimmed(pictures)
        scores = reward(images=tensor(*shown), prompts=[prompt.text] * 2)
        right.append((scores.values[0] > scores.values[1]).item() == (choice == "left"))
        assert torch.equal(scores.values, reward(images=tensor(*shown), prompts=["", "a star"]).values)
        assert not scores.sub_scores
    assert np.mean(right) > 0.9
    reward.close()


def test_one_line_of_a_recipe_is_enough(run: Path, tmp_path: Path) -> None:
    line = {"name": "choices", "options": {"votes": str(run)}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"base": "mixgrpo_flash_guard", "rewards": [line]}))
    entry = load_recipe(tmp_path / "recipe.yaml").rewards[0]
    rewards = RewardSet([RewardSpec(entry.name, weight=entry.weight, options=entry.options, label=entry.label)])
    prompt, pictures = next(scene_pairs(1, seed=2))
    batch = rewards.score(tensor(*pictures), [prompt.text] * 2, {"tag": ["colors"] * 2})
    record = batch.record(0)
    assert set(record["sub_scores"]["choices"]) == {"picture", "agreement"}
    assert "held-out pairs predicted (95 %" in record["notes"]["choices"]
    assert batch.values.isfinite().all()
    rewards.close()


def test_what_is_predicted_of_held_out_pairs_is_said_when_it_is_loaded(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "flowgrpo.rewards.models.choices"), warnings.catch_warnings():
        warnings.simplefilter("error")
        reward = Choices(run, regularisation=1.0)
    assert caplog.messages == [f"choices: {reward.report}"]
    assert f"{reward.held_out.right / reward.held_out.count:.0%} of {reward.held_out.count} held-out" in reward.report
    reward.close()


# Features of other models


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_features_of_a_folder_are_shared_with_the_reward_that_has_it(kind: str, run: Path, tmp_path: Path) -> None:
    folder = str((save_clip if kind == "clip" else save_siglip)(tmp_path / kind))
    other: Any = ClipScore(folder) if kind == "clip" else Siglip(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reward = Choices(run, features=folder, allow_chance=True, regularisation=1.0)
    # Random features may tell pictures apart by luck, in some versions of transformers.
    warned = any("no better than chance" in str(warning.message) for warning in caught)
    assert warned is not reward.held_out.beats_chance
    assert reward.lease.value is other.lease.value
    images, prompts = torch.rand(3, 3, 40, 48), ["a red circle", "a star", "a red circle"]
    scores = reward(images=images, prompts=prompts)
    towers = other.lease.value
    features = towers.embed_images(images, 3)
    by_hand = features @ reward._on_picture - sum(reward._means)
    assert reward._on_agreement
    by_hand += (features * towers.embed_texts(prompts)).sum(-1) * reward._on_agreement
    torch.testing.assert_close(scores.values, by_hand, atol=1e-5, rtol=1e-5)
    reward.close(), other.close()


def test_features_that_are_no_model(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"choices: features='\./nowhere' is not a folder"):
        Choices(run, features="./nowhere")
    with pytest.raises(ValueError, match="holds no config"):
        Choices(run, features=str(tmp_path))
    (tmp_path / "open_clip_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"choices: .* has no weights"):
        Choices(run, features=str(tmp_path))


# What is wrong with the votes or an option


def test_what_is_wrong_with_the_votes_is_said(run: Path, tmp_path: Path) -> None:
    few = copied(run, tmp_path / "few", lambda rows: rows[:10])
    with pytest.raises(ValueError, match=r"choices: .*few/votes\.jsonl: \d+ pairs .* 20 are needed\. Vote on more"):
        Choices(few)
    texts = [Side("run", ".", at, "0", 0, None, f"text {at}", "") for at in (0, 10)]
    append_vote(tmp_path / "text.jsonl", make_vote(0, "a prompt", texts[0], texts[1], "left"))
    with pytest.raises(ValueError, match=r"choices: .*text\.jsonl, line 1 is a choice between completions"):
        Choices([str(run), str(tmp_path / "text.jsonl")])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"votes": []}, r"choices: votes is \[\]; give a file of votes"),
        ({"votes": 5}, "choices: votes is 5; give a file of votes"),
        ({"votes": ["a", 5]}, "give a file of votes"),
        ({"votes": "nowhere.jsonl"}, r"choices: there is no file nowhere\.jsonl"),
        ({"regularisation": 0}, "choices: regularisation is 0; give a number above 0"),
        ({"least": 1}, "choices: least is 1; give a whole number of 2 or more"),
        ({"agreement": "no"}, "choices: agreement is 'no'; give true or false"),
        ({"batch_size": 0}, "choices: batch_size is 0"),
        ({"dtype": "int8"}, "choices: dtype is 'int8'"),
    ],
)
def test_options_out_of_range(run: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Choices(**{"votes": run, **options})
