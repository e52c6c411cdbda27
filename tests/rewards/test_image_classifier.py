"""Image classifiers as rewards and as a guard, against the library called directly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowgrpo.rewards import RewardSet, RewardSpec
from flowgrpo.rewards.models.image_classifier import ImageClassifier, Safety
from tests.tiny_rewards import as_pil, pictures, save_classifier


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_classifier(tmp_path_factory.mktemp("classifier"), ["normal", "nsfw", "drawing"]))


def logits(folder: str, images: Tensor) -> Tensor:
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    pixels = AutoImageProcessor.from_pretrained(folder)([as_pil(image) for image in images], return_tensors="pt")
    with torch.no_grad():
        found: Tensor = AutoModelForImageClassification.from_pretrained(folder).eval()(**pixels).logits
    return found


@pytest.mark.parametrize("size", [(32, 32), (48, 80)])
def test_weighted_sum_of_the_librarys_probabilities(folder: str, size: tuple[int, int]) -> None:
    images = pictures(3, 3, *size)
    expected = logits(folder, images).softmax(-1)
    reward = ImageClassifier(folder, {"drawing": 2.0, "nsfw": -1})
    scores = reward(images=images, prompts=[""] * 3)
    torch.testing.assert_close(scores.values, 2 * expected[:, 2] - expected[:, 1], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(torch.tensor(scores.sub_scores["nsfw"]), expected[:, 1], atol=1e-5, rtol=1e-4)
    assert expected.std(0).min() > 1e-3
    reward.close()


def test_labels_that_do_not_exclude_each_other(tmp_path: Path) -> None:
    folder = str(save_classifier(tmp_path, ["a", "b"], problem_type="multi_label_classification"))
    images = pictures(2, 3, 32, 32)
    scores = ImageClassifier(folder, {"b": 1})(images=images, prompts=["", ""])
    torch.testing.assert_close(scores.values, logits(folder, images).sigmoid()[:, 1], atol=1e-5, rtol=1e-4)


def test_safety_is_one_minus_the_unsafe_share_of_the_worst_frame(folder: str) -> None:
    video = pictures(2, 3, 3, 40, 40)
    expected = logits(folder, video.flatten(0, 1)).softmax(-1).view(2, 3, 3)
    rewards = RewardSet([RewardSpec("safety", options={"model": folder, "unsafe": ["nsfw", "drawing"]}, weight=0)])
    values = rewards.score(video, ["", ""]).values[:, 0]
    torch.testing.assert_close(values, expected[..., 0].amin(1), atol=1e-5, rtol=1e-4)
    singly = rewards.score(video[:, 0], ["", ""]).values[:, 0]
    torch.testing.assert_close(singly, expected[:, 0, 0], atol=1e-5, rtol=1e-4)
    rewards.close()


def test_two_guards_share_one_model(folder: str) -> None:
    one, other = Safety(folder), ImageClassifier(folder, {"nsfw": 1})
    assert one.lease.value is other.lease.value
    images = pictures(2, 3, 32, 32)
    total = one(images=images, prompts=["", ""]).values + other(images=images, prompts=["", ""]).values
    torch.testing.assert_close(total, torch.ones(2))
    for reward in (one, other):
        assert torch.as_tensor(reward(images=images[:0], prompts=[]).values).shape == (0,)
        reward.close()


def test_options_that_cannot_be_used(folder: str) -> None:
    faults: list[tuple[Any, dict[str, Any], str]] = [
        (ImageClassifier, {"model": folder, "labels": {"nfsw": 1}}, "no label 'nfsw'; did you mean 'nsfw'"),
        (ImageClassifier, {"model": folder, "labels": {}}, "give label: weight"),
        (ImageClassifier, {"model": folder, "labels": {"nsfw": "high"}}, "weight of nsfw is 'high'"),
        (Safety, {"model": folder, "unsafe": "nsfw"}, "give a list of labels"),
        (Safety, {"model": folder, "unsafe": ["porn"]}, "safety: .* has no label 'porn'"),
        (Safety, {"model": "/no/folder"}, "is not a folder"),
    ]
    for kind, options, message in faults:
        with pytest.raises(ValueError, match=message):
            kind(**options)
