"""VideoAlign on a small random Qwen2-VL with a LoRA, saved as peft does, against the library called directly."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowgrpo.rewards import RewardSet, RewardSpec
from flowgrpo.rewards.models.videoalign import AXES, TOKENS, VideoAlign, find_checkpoint, merge_lora, sampled_frames
from tests.tiny_rewards import pictures, random_weights, save_qwen2_vl

TEXT = "Quality: <|VQ_reward|>\nMotion: <|MQ_reward|>\nPrompt: {text_prompt}\nText: <|TA_reward|>\nEND\n"
PROMPTS = ["a red circle", "two blue squares"]
STATISTICS = {"VQ_mean": 1.0, "VQ_std": 2.0, "MQ_mean": -1.0, "MQ_std": 0.5, "TA_mean": 0.0, "TA_std": 4.0}


class Original:
    """The published network, built from the library's parts and peft."""

    def __init__(self, folder: Path) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoProcessor, Qwen2VLForConditionalGeneration

        config = save_qwen2_vl(folder)
        self.processor = AutoProcessor.from_pretrained(folder)
        self.processor.tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS)})
        config.text_config.vocab_size = len(self.processor.tokenizer)
        model = random_weights(Qwen2VLForConditionalGeneration, config)
        torch.manual_seed(9)
        model.rm_head = nn.Linear(32, 3, bias=False)
        adapter = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
        self.model = get_peft_model(model, adapter).eval()
        for name, parameter in self.model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(generator=torch.Generator().manual_seed(len(name)))

    def state(self) -> dict[str, Tensor]:
        return {
            key.replace("model.visual.", "visual.").replace("model.language_model.", "model."): value.clone()
            for key, value in self.model.state_dict().items()
        }

    @torch.no_grad()
    def raw(self, videos: Tensor, prompts: list[str]) -> Tensor:
        """Each axis at its own token, [B, 3]."""
        inner = self.model.base_model.model
        rows = []
        for video, prompt in zip(videos, prompts):
            chat = f"<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>{TEXT.format(text_prompt=prompt)}"
            inputs = self.processor(
                text=[chat + "<|im_end|>\n<|im_start|>assistant\n"],
                videos=[(video * 255).round().to(torch.uint8)],
                videos_kwargs={"do_sample_frames": False, "do_resize": False},
                return_tensors="pt",
            )
            length = inputs["input_ids"].shape[1]
            hidden = inner.model(**inputs, position_ids=torch.arange(length).expand(3, 1, length)).last_hidden_state
            at = [(inputs["input_ids"][0] == token).nonzero().item() for token in self.ids]
            rows.append(inner.rm_head(hidden[0, at]).diagonal())
        return torch.stack(rows)

    @property
    def ids(self) -> list[int]:
        return self.processor.tokenizer.convert_tokens_to_ids(list(TOKENS))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    return Original(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def files(original: Original, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("videoalign")
    save_qwen2_vl(folder / "base")
    (folder / "checkpoint-10").mkdir()
    torch.save(original.state(), folder / "checkpoint-10" / "model.pth")
    settings = {"peft_lora_config": {"lora_r": 4, "lora_alpha": 8}, "inference_config": STATISTICS}
    (folder / "model_config.json").write_text(json.dumps(settings))
    (folder / "rubric.txt").write_text(TEXT)
    return {"folder": str(folder), "rubric": str(folder / "rubric.txt"), "base": str(folder / "base")}


@pytest.fixture(scope="module")
def reward(files: dict[str, str]) -> VideoAlign:
    return VideoAlign(**files)


def test_each_axis_is_the_librarys_at_its_token(original: Original, reward: VideoAlign) -> None:
    videos = pictures(2, 4, 3, 308, 364)
    raw = original.raw(videos, PROMPTS)
    scores = reward(images=videos, prompts=PROMPTS)
    for k, axis in enumerate(AXES):
        expected = (raw[:, k] - STATISTICS[f"{axis}_mean"]) / STATISTICS[f"{axis}_std"]
        torch.testing.assert_close(torch.tensor(scores.sub_scores[axis]), expected, atol=2e-5, rtol=1e-4)
    total = sum(torch.tensor(scores.sub_scores[axis]) for axis in AXES)
    torch.testing.assert_close(scores.values, total)
    assert raw.std(0).min() > 1e-4


def test_only_the_last_axis_reads_the_prompt(reward: VideoAlign) -> None:
    video = pictures(1, 4, 3, 308, 364)
    one, other = (reward(images=video, prompts=[prompt]).sub_scores for prompt in PROMPTS)
    assert one["VQ"] == pytest.approx(other["VQ"], abs=1e-6)
    assert one["MQ"] == pytest.approx(other["MQ"], abs=1e-6)
    assert abs(one["TA"][0] - other["TA"][0]) > 1e-4


def test_weights_batches_and_none(files: dict[str, str], reward: VideoAlign) -> None:
    videos = pictures(2, 6, 3, 40, 60)
    usual = reward(images=videos, prompts=PROMPTS)
    chosen = VideoAlign(**files, weights={"VQ": 0.5, "TA": 0}, batch_size=1)(images=videos, prompts=PROMPTS)
    expected = 0.5 * torch.tensor(usual.sub_scores["VQ"]) + torch.tensor(usual.sub_scores["MQ"])
    torch.testing.assert_close(chosen.values, expected, atol=1e-5, rtol=1e-4)
    assert reward(images=videos[:0], prompts=[]).values.shape == (0,)


@pytest.mark.parametrize(
    ("count", "rate", "frames"),
    [
        (81, 16.0, [0, 9, 18, 27, 36, 44, 53, 62, 71, 80]),
        (16, 16.0, [0, 5, 10, 15]),
        (5, 16.0, [0, 1, 3, 4]),
        (3, 16.0, [0, 2]),
        (2, 16.0, [0, 1]),
    ],
)
def test_two_frames_a_second_and_at_least_four(count: int, rate: float, frames: list[int]) -> None:
    assert sampled_frames(count, rate) == frames


def test_a_lora_is_merged_as_peft_merges_it(original: Original) -> None:
    import copy

    merged = merge_lora(original.model.state_dict(), 2.0)
    expected = copy.deepcopy(original.model).merge_and_unload().state_dict()
    assert set(merged) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(merged[key], value)
    with pytest.raises(ValueError, match="LoRA of a is not complete"):
        merge_lora({"a.lora_A.default.weight": torch.zeros(1, 1)}, 1.0)


def test_a_head_that_was_saved_apart_is_taken() -> None:
    head = {"base_model.model.rm_head.original_module.weight": torch.zeros(1)}
    head["base_model.model.rm_head.modules_to_save.default.weight"] = torch.ones(1)
    assert merge_lora(head, 1.0) == {"rm_head.weight": torch.ones(1)}


def test_folders_and_inputs_that_cannot_be_used(files: dict[str, str], reward: VideoAlign, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no model_config\.json"):
        find_checkpoint(tmp_path)
    (tmp_path / "model_config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no checkpoint-N/model"):
        find_checkpoint(tmp_path)
    for number in (9, 10):
        (tmp_path / f"checkpoint-{number}").mkdir()
        torch.save({"rm_head.weight": torch.zeros(2, 32)}, tmp_path / f"checkpoint-{number}" / "model.pth")
    assert find_checkpoint(tmp_path)[0].parent.name == "checkpoint-10"
    with pytest.raises(ValueError, match=r"no head rm_head.weight of 1 or 3 rows"):
        VideoAlign(str(tmp_path), files["rubric"], base=files["base"])
    with pytest.raises(ValueError, match=r"give videos \[B, F, 3, H, W\]"):
        reward(images=pictures(1, 3, 56, 56), prompts=["a cat"])
    faults: list[tuple[dict[str, Any], str]] = [
        ({"weights": {"XQ": 1}}, "names 'XQ'"),
        ({"video_rate": 0}, "video_rate is 0"),
    ]
    for options, message in faults:
        with pytest.raises(ValueError, match=message):
            VideoAlign(**files, **options)


def test_in_a_set(files: dict[str, str], reward: VideoAlign) -> None:
    videos = pictures(2, 4, 3, 56, 84)
    rewards = RewardSet([RewardSpec("videoalign", options=files)])
    expected = reward(images=videos, prompts=PROMPTS)
    batch = rewards.score(videos, PROMPTS)
    torch.testing.assert_close(batch.values[:, 0], torch.as_tensor(expected.values))
    assert set(batch.sub_scores["videoalign"]) == set(AXES)
    rewards.close()
