"""HPSv3 on a small random Qwen2-VL, saved under the published names, against the library called directly."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from flowgrpo.rewards import RewardSet, RewardSpec
from flowgrpo.rewards.backbones.qwen2_vl import fit_pixels, read_rubric, rename_weights
from flowgrpo.rewards.models.hpsv3 import PIXELS, HpsV3
from tests.tiny_rewards import as_pil, pictures, published_names, random_weights, save_qwen2_vl

TEXT = "Rate it.\nPrompt: {text_prompt}\n\nThe rating: <|Reward|>\n\nEND\n"
PROMPTS = ["a red circle", "two blue squares"]


class Original:
    """The published network, built from the library's parts."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoProcessor, Qwen2VLForConditionalGeneration

        config = save_qwen2_vl(folder)
        self.processor = AutoProcessor.from_pretrained(folder)
        self.processor.tokenizer.add_special_tokens({"additional_special_tokens": ["<|Reward|>"]})
        config.text_config.vocab_size = len(self.processor.tokenizer)
        self.model = random_weights(Qwen2VLForConditionalGeneration, config)
        torch.manual_seed(8)
        self.head = nn.Sequential(
            nn.Linear(32, 12), nn.ReLU(), nn.Dropout(0.05), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2)
        ).eval()

    def state(self) -> dict[str, Tensor]:
        head = {f"rm_head.{key}": value for key, value in self.head.state_dict().items()}
        state = published_names({**self.model.state_dict(), **head})
        return {key: value.clone() for key, value in state.items()}

    @torch.no_grad()
    def outputs(self, images: Tensor, prompts: list[str], *, plain_places: bool = True) -> Tensor:
        rows = []
        for image, prompt in zip(images, prompts):
            chat = f"<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{TEXT.format(text_prompt=prompt)}"
            inputs = self.processor(
                text=[chat + "<|im_end|>\n<|im_start|>assistant\n"],
                images=[as_pil(image)],
                return_tensors="pt",
            )
            length = inputs["input_ids"].shape[1]
            places = {"position_ids": torch.arange(length).expand(3, 1, length)} if plain_places else {}
            hidden = self.model.model(**inputs, **places).last_hidden_state
            asked = inputs["input_ids"][0] == self.processor.tokenizer.convert_tokens_to_ids("<|Reward|>")
            rows.append(self.head(hidden[0, asked])[0])
        return torch.stack(rows)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    return Original(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def files(original: Original, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("hpsv3")
    save_qwen2_vl(folder / "base")
    save_file(original.state(), folder / "HPSv3.safetensors")
    (folder / "rubric.txt").write_text(TEXT)
    return {
        "rubric": str(folder / "rubric.txt"),
        "checkpoint": str(folder / "HPSv3.safetensors"),
        "base": str(folder / "base"),
    }


@pytest.fixture(scope="module")
def reward(files: dict[str, str]) -> HpsV3:
    return HpsV3(**files)


def test_mean_and_spread_are_those_of_the_library(original: Original, reward: HpsV3) -> None:
    images = pictures(2, 3, 448, 448)
    expected = original.outputs(images, PROMPTS)
    scores = reward(images=images, prompts=PROMPTS)
    torch.testing.assert_close(scores.values, expected[:, 0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(torch.tensor(scores.sub_scores["spread"]), expected[:, 1], atol=1e-5, rtol=1e-4)
    assert (expected[0] - expected[1]).abs().max() > 1e-3


def test_the_librarys_own_places_would_give_another_score(original: Original) -> None:
    images = pictures(1, 3, 448, 448)
    plain, own = (original.outputs(images, PROMPTS[:1], plain_places=plain) for plain in (True, False))
    assert (plain - own).abs().max() > 1e-4


def test_images_of_other_sizes_keep_their_proportions() -> None:
    image = pictures(1, 3, 300, 520)
    fitted = fit_pixels(image, PIXELS, PIXELS)
    height, width = fitted.shape[-2:]
    assert height % 28 == width % 28 == 0
    assert height * width == pytest.approx(PIXELS, rel=0.15)
    assert height / width == pytest.approx(300 / 520, rel=0.1)
    resized = np.asarray(as_pil(image[0]).resize((width, height), Image.Resampling.BICUBIC))
    difference = fitted[0].permute(1, 2, 0).numpy().astype(int) - resized
    assert np.abs(difference).max() <= 1


def test_batches_videos_none_and_divisor(files: dict[str, str], reward: HpsV3) -> None:
    video = pictures(2, 2, 3, 60, 90)
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]]
    frames = reward(images=video.flatten(0, 1), prompts=prompts).values.view(2, 2)
    divided = HpsV3(**files, divisor=2, batch_size=1)(images=video, prompts=PROMPTS)
    torch.testing.assert_close(divided.values, frames.mean(1) / 2, atol=1e-5, rtol=1e-4)
    assert reward(images=video[:0], prompts=[]).values.shape == (0,)


def test_in_a_set_a_prompt_with_the_token_is_refused(files: dict[str, str]) -> None:
    rewards = RewardSet([RewardSpec("hpsv3", options=files)])
    images = pictures(1, 3, 56, 56)
    assert rewards.score(images, ["a cat"]).values.isfinite().all()
    with pytest.raises(Exception, match=r"special tokens .* instead of once each; does the prompt contain one"):
        rewards.score(images, ["a <|Reward|> cat"])
    rewards.close()


def test_names_of_old_and_new_checkpoints(original: Original) -> None:
    state = original.model.state_dict()
    old, new = rename_weights(published_names(state)), rename_weights(state)
    assert set(old) == set(new) == set(original.model.model.state_dict())
    assert all(torch.equal(old[key], new[key]) for key in old)


def test_rubrics_come_from_a_text_or_the_release(tmp_path: Path) -> None:
    release = tmp_path / "collator.py"
    release.write_text('import nothing_here\nA = "Rate {text_prompt}. "\nB = "Score: <|Reward|>"\n')
    assert read_rubric("r", str(release), ["A", "B"], ["<|Reward|>"]) == "Rate {text_prompt}. Score: <|Reward|>"
    for names, message in [(["A"], "has <|Reward|> 0 times"), (["A", "C"], "does not define the text C")]:
        with pytest.raises(ValueError, match=message.replace("|", r"\|")):
            read_rubric("r", str(release), names, ["<|Reward|>"])


def test_files_that_do_not_fit(original: Original, files: dict[str, str], tmp_path: Path) -> None:
    state = original.state()
    short = {**state, "model.embed_tokens.weight": state["model.embed_tokens.weight"][:-1].clone()}
    part = {key: value for key, value in state.items() if key != "model.norm.weight"}
    bare: dict[str, Any] = {key: value for key, value in state.items() if "rm_head" not in key}
    for weights, message in [
        (short, "set base to the model that was fine-tuned"),
        (part, "no weights that fit language_model.norm.weight"),
        (bare, "has no head"),
        ({key: value for key, value in state.items() if "rm_head" in key}, "is not a Qwen2-VL model"),
    ]:
        save_file(weights, tmp_path / "weights.safetensors")
        with pytest.raises(ValueError, match=message):
            HpsV3(**{**files, "checkpoint": str(tmp_path / "weights.safetensors")})
