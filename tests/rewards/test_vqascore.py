"""VQAScore on a small random Qwen2-VL, against the library called directly, one question at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowgrpo.rewards import RewardSet, RewardSpec
from flowgrpo.rewards.models.vqascore import VqaScore
from tests.tiny_rewards import as_pil, pictures, random_weights, save_qwen2_vl

PROMPTS = ["a red circle", "two blue squares and more"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import Qwen2VLForConditionalGeneration

    path = tmp_path_factory.mktemp("vlm")
    random_weights(Qwen2VLForConditionalGeneration, save_qwen2_vl(path)).save_pretrained(path)
    return str(path)


def direct(folder: str, images: Tensor, prompts: list[str]) -> Tensor:
    """Probabilities of the first letters of Yes and No, from single questions without padding."""
    from transformers import AutoProcessor, Qwen2VLForConditionalGeneration

    processor = AutoProcessor.from_pretrained(folder)
    model = Qwen2VLForConditionalGeneration.from_pretrained(folder).eval()
    letters = processor.tokenizer.convert_tokens_to_ids(["Y", "N"])
    rows = []
    for image, prompt in zip(images, prompts):
        chat = (
            "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>"
            f'Does this figure show "{prompt}"? Please answer yes or no.<|im_end|>\n<|im_start|>assistant\n'
        )
        inputs = processor(text=[chat], images=[as_pil(image)], return_tensors="pt")
        with torch.no_grad():
            rows.append(model(**inputs).logits[0, -1].softmax(-1)[letters])
    return torch.stack(rows)


def test_probability_of_yes(folder: str) -> None:
    images = pictures(2, 3, 56, 84)
    expected = direct(folder, images, PROMPTS)
    reward, contrasted = VqaScore(folder), VqaScore(folder, against="No")
    assert reward.lease.value is contrasted.lease.value
    scores = reward(images=images, prompts=PROMPTS)
    torch.testing.assert_close(scores.values, expected[:, 0], atol=1e-6, rtol=1e-3)
    both = contrasted(images=images, prompts=PROMPTS)
    torch.testing.assert_close(both.values, expected[:, 0] / expected.sum(1), atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(torch.tensor(both.sub_scores["mass"]), expected.sum(1), atol=1e-6, rtol=1e-3)
    assert (expected[0] / expected[1] - 1).abs().max() > 1e-2
    reward.close(), contrasted.close()


def test_batches_videos_and_none(folder: str) -> None:
    video = pictures(2, 2, 3, 56, 56)
    reward, single = VqaScore(folder), VqaScore(folder, batch_size=1)
    frames = single(images=video.flatten(0, 1), prompts=[PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]])
    scores = reward(images=video, prompts=PROMPTS)
    torch.testing.assert_close(scores.values, frames.values.view(2, 2).mean(1), atol=1e-6, rtol=1e-3)
    assert reward(images=video[:0], prompts=[]).values.shape == (0,)
    rewards = RewardSet([RewardSpec("vqascore", options={"model": folder})])
    torch.testing.assert_close(rewards.score(video, PROMPTS).values[:, 0], scores.values)
    rewards.close(), reward.close(), single.close()


def test_options_that_cannot_be_used(folder: str, tmp_path: Path) -> None:
    faults: list[tuple[dict[str, Any], str]] = [
        ({"question": "Is it good?"}, r"needs \{prompt\}"),
        ({"answer": "Yes", "against": "Yesterday"}, "begin with the same token"),
        ({"answer": ""}, "an answer is empty"),
        ({"model": str(tmp_path)}, "holds no processor"),
        ({"frames": 0}, "frames is 0"),
    ]
    for options, message in faults:
        with pytest.raises(ValueError, match=message):
            VqaScore(**{"model": folder, **options})
