"""Images that a reward made of completions: kept where wanted, taken along, checked, and not sent by servers."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flowgrpo.rewards import Reward, RewardSet, Scores
from flowgrpo.rewards.inputs import Inputs
from flowgrpo.rewards.score_batches import RewardBatch, join_scores
from flowgrpo.rewards.scores import InvalidScores, normalise
from flowgrpo.rewards.serving import wire
from flowgrpo.rewards.within import score_within

PROMPTS = ["p"] * 3
LEVELS = [0.0, 0.5, 1.0]


def painted(completions: Sequence[str], prompts: Sequence[str]) -> Scores:
    """An image of each completion, of the brightness that it says; none of an empty completion."""
    images = [[torch.full((3, 2, 2), float(text))] if text else None for text in completions]
    videos = [[torch.zeros(4, 3, 2, 2)]] * len(completions)
    return Scores([1.0] * len(completions), rendered={"": images, "plain": videos})


def kept(texts: Sequence[str]) -> RewardBatch:
    one = RewardSet([Reward(painted, "r")])
    one.keeps_rendered = True
    return one.score(texts, PROMPTS[: len(texts)])


def levels(batch: RewardBatch, label: str = "r") -> list[Any]:
    return [None if own is None else [int(image.max()) for image in own] for own in batch.rendered[label]]


def test_images_are_kept_as_bytes_where_they_are_wanted() -> None:
    texts = ["0.0", "", "1.0"]
    assert RewardSet([Reward(painted, "r")]).score(texts, PROMPTS).rendered == {}
    found = kept(texts)
    assert levels(found) == [[0], None, [255]]
    assert [tuple(own[0].shape) for own in found.rendered["r / plain"] if own] == [(4, 3, 2, 2)] * 3
    assert all(image.dtype == torch.uint8 for own in found.rendered["r"] if own for image in own)
    assert levels(found.taken([2, 1])) == [[255], None]
    joined = join_scores(
        [found, RewardBatch(torch.ones(1, 1), ("r",), torch.ones(1), {}, {}, {"r": 0.0}), kept(["0.5"])]
    )
    assert levels(joined) == [[0], None, [255], None, [128]]
    assert kept(texts).rendered.keys() == {"r", "r / plain"}
    assert "rendered" not in found.record(0)


def test_images_of_images_are_not_kept() -> None:
    def overlay(images: Tensor, prompts: Sequence[str]) -> Scores:
        return Scores([1.0] * len(images), rendered={"": [[image] for image in images]})

    one = RewardSet([Reward(overlay, "r")])
    one.keeps_rendered = True
    assert one.score(torch.zeros(3, 3, 2, 2), PROMPTS).rendered == {}


def test_a_reward_around_a_reward_hands_its_images_on() -> None:
    inner = score_within(Reward(painted, "inner"), Inputs(["1.0", ""], ["p", "p"], {}, None), "judge")
    assert inner.rendered.keys() == {"", "plain"}

    def around(completions: Sequence[str], prompts: Sequence[str]) -> Scores:
        return Scores(inner.values, rendered=inner.rendered)

    outer = RewardSet([Reward(around, "outer")])
    outer.keeps_rendered = True
    assert levels(outer.score(["1.0", ""], ["p", "p"]), "outer") == [[255], None]


@pytest.mark.parametrize(
    ("rendered", "message"),
    [
        ([[torch.zeros(3, 2, 2)]], "returned no mapping of lists as `rendered`; give name -> 1 lists"),
        ({"": torch.zeros(1, 3, 2, 2)}, "returned no mapping of lists as `rendered`"),
        ({"": []}, "returned 0 lists of images for 1 samples; one each"),
        ({"": [torch.zeros(3, 2, 2)]}, r"as images of row 0 of the call; give a list of tensors \[3, H, W\]"),
        ({"": [[torch.zeros(2, 2, 3)]]}, "as images of row 0"),
        ({"": [["cat.png"]]}, "as images of row 0"),
    ],
)
def test_wrong_images_are_refused(rendered: Any, message: str) -> None:
    with pytest.raises(InvalidScores, match=f"reward 'r' {message}" if message.startswith("returned") else message):
        normalise(Scores([1.0], rendered=rendered), 1, "r")


def test_a_server_says_that_there_are_images_and_does_not_send_them() -> None:
    sent = wire.pack_scores(normalise(painted(["1.0", ""], ["p", "p"]), 2, "r"))
    assert len(sent) < 300
    found = normalise(wire.unpack_scores(sent), 2, "r")
    assert found.rendered == {"": [[], None], "plain": [[], []]}
    # An earlier server knows nothing of images.
    assert wire.unpack_scores(b'{"values": [1.0], "sub_scores": {}, "notes": []}').rendered == {}
    with pytest.raises(ValueError, match="the reply is not from a server of rewards"):
        wire.unpack_scores(b'{"values": [1.0], "sub_scores": {}, "notes": [], "rendered": [1]}')
