"""ImageReward against the two libraries its code was written from: timm's image encoder and transformers' BERT."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowgrpo.rewards import RewardSet, RewardSpec
from flowgrpo.rewards.models.imagereward import DEVIATION, MEAN, TOKENS, ImageReward, vision_weights
from tests.rewards.slopes import slope_ratio
from tests.tiny_rewards import WORDS, as_pil, pictures, random_weights

WIDTH, VOCABULARY, SIZE = 128, 40, 32
_LETTERS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "circle", "two", "blue", "squares"]


class Original:
    """The parts of the published model, under its names, from libraries other than the one under test."""

    def __init__(self) -> None:
        from timm.models.vision_transformer import VisionTransformer
        from transformers import BertConfig, BertModel

        self.vision = VisionTransformer(
            img_size=SIZE, patch_size=8, embed_dim=WIDTH, depth=2, num_heads=2, num_classes=0, global_pool=""
        ).eval()
        for number, parameter in enumerate(self.vision.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.data.add_(0.05 * noise)
        settings = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
        config = BertConfig(
            **settings,
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
            is_decoder=True,
            add_cross_attention=True,
            attn_implementation="eager",
        )
        self.text = random_weights(lambda c: BertModel(c, add_pooling_layer=False), config)
        torch.manual_seed(6)
        self.head = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.2), nn.Linear(16, 1)).eval()

    def state(self) -> dict[str, Tensor]:
        state = {f"blip.visual_encoder.{key}": value for key, value in self.vision.state_dict().items()}
        for key, value in self.text.state_dict().items():
            # The published class has no segments.
            if "token_type" not in key:
                state[f"blip.text_encoder.{key}"] = value
        state["blip.text_encoder.embeddings.position_ids"] = torch.arange(64)[None]
        state["blip.vision_proj.weight"] = torch.zeros(4, WIDTH)
        return {**state, **{f"mlp.layers.{key}": value for key, value in self.head.state_dict().items()}}

    @torch.no_grad()
    def score(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        self.text.embeddings.token_type_embeddings.weight.zero_()
        seen = self.vision.forward_features(pixels)
        # Built as a decoder, which brings the cross-attention, and run without a decoder's causal mask.
        self.text.config.is_decoder = False
        read = self.text(input_ids=ids, attention_mask=mask, encoder_hidden_states=seen).last_hidden_state
        return (self.head(read[:, 0]).squeeze(-1) - MEAN) / DEVIATION


@pytest.fixture(scope="module")
def original() -> Original:
    return Original()


@pytest.fixture(scope="module")
def files(original: Original, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    from transformers import BertTokenizerFast

    folder = tmp_path_factory.mktemp("imagereward")
    torch.save(original.state(), folder / "ImageReward.pt")
    (folder / "vocab.txt").write_text("\n".join(_LETTERS) + "\n")
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder / "tokenizer")
    return {"checkpoint": str(folder / "ImageReward.pt"), "tokenizer": str(folder / "tokenizer")}


@pytest.fixture(scope="module")
def reward(files: dict[str, str]) -> ImageReward:
    return ImageReward(**files)


def inputs(reward: ImageReward, images: Tensor, prompts: list[str]) -> tuple[Tensor, Tensor, Tensor]:
    from torchvision import transforms

    steps = transforms.Compose(
        [
            transforms.Resize(SIZE, interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(SIZE),
            transforms.ToTensor(),
            transforms.Normalize((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
        ]
    )
    tokens = reward.tokenizer(prompts, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt")
    return torch.stack([steps(as_pil(image)) for image in images]), tokens["input_ids"], tokens["attention_mask"]


def test_the_score_is_that_of_the_original_networks(original: Original, reward: ImageReward) -> None:
    images = pictures(3, 3, SIZE, SIZE)
    expected = original.score(*inputs(reward, images, WORDS))
    scores = reward(images=images, prompts=WORDS)
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-4)
    assert scores.std() > 0.01
    assert scores.dtype == torch.float32
    wide = pictures(3, 3, 40, 72)
    expected = original.score(*inputs(reward, wide, WORDS))
    # Pillow rounds each of its two passes to 8 bits.
    torch.testing.assert_close(reward(images=wide, prompts=WORDS), expected, atol=0.01, rtol=0.01)


def test_a_word_at_the_end_counts_as_it_would_not_in_a_decoder(reward: ImageReward) -> None:
    image = pictures(1, 3, SIZE, SIZE)
    one, other = (reward(images=image, prompts=[prompt]) for prompt in ("a red circle", "a red squares"))
    assert (one - other).abs() > 1e-4


def test_prompts_are_cut_at_35_tokens(reward: ImageReward) -> None:
    image = pictures(1, 3, SIZE, SIZE)
    long = " ".join(["red"] * 40)
    assert torch.equal(reward(images=image, prompts=[long]), reward(images=image, prompts=[long + " blue"]))


def test_batches_videos_and_none(files: dict[str, str], reward: ImageReward) -> None:
    images = pictures(3, 3, 40, 64)
    scores = reward(images=images, prompts=WORDS)
    singly = torch.cat([reward(images=images[i : i + 1], prompts=WORDS[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(scores, singly, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ImageReward(**files, batch_size=2)(images=images, prompts=WORDS), scores)
    assert reward(images=images[:0], prompts=[]).shape == (0,)
    video = pictures(2, 3, 3, 40, 40)
    frames = reward(images=video.flatten(0, 1), prompts=[word for word in WORDS[:2] for _ in range(3)])
    torch.testing.assert_close(reward(images=video, prompts=WORDS[:2]), frames.view(2, 3).mean(1))


def test_names_of_the_image_encoder() -> None:
    names = [
        "cls_token",
        "pos_embed",
        "patch_embed.proj.bias",
        "blocks.3.norm1.weight",
        "blocks.3.attn.proj.bias",
        "norm.bias",
    ]
    renamed = vision_weights({f"blip.visual_encoder.{name}": torch.zeros(1) for name in [*names]})
    assert list(renamed) == [
        "embeddings.class_embedding",
        "embeddings.position_embedding",
        "embeddings.patch_embedding.bias",
        "encoder.layers.3.layer_norm1.weight",
        "encoder.layers.3.self_attn.projection.bias",
        "post_layernorm.bias",
    ]


def test_checkpoints_that_are_something_else(original: Original, files: dict[str, str], tmp_path: Path) -> None:
    part = {key: value for key, value in original.state().items() if "blocks.0.norm1.bias" not in key}
    faults: list[tuple[Any, str]] = [
        ({"weight": torch.zeros(2)}, "is not an ImageReward checkpoint"),
        (part, "it lacks encoder"),
        ({**original.state(), "blip.text_encoder.more": torch.zeros(1)}, "it has more, which the model does not have"),
    ]
    for state, message in faults:
        torch.save(state, tmp_path / "other.pt")
        with pytest.raises(ValueError, match=message):
            ImageReward(str(tmp_path / "other.pt"), tokenizer=files["tokenizer"])
    with pytest.raises(ValueError, match="holds no tokenizer"):
        ImageReward(files["checkpoint"], tokenizer=str(tmp_path))


def test_in_a_set(files: dict[str, str], reward: ImageReward) -> None:
    images = pictures(3, 3, SIZE, SIZE)
    rewards = RewardSet([RewardSpec("imagereward", options=files)])
    torch.testing.assert_close(rewards.score(images, WORDS).values[:, 0], reward(images=images, prompts=WORDS))
    rewards.close()


def test_the_gradient_is_the_slope_of_the_scores(reward: ImageReward) -> None:
    images = 0.25 + 0.5 * pictures(3, 3, 40, 36)
    assert slope_ratio(reward, images, WORDS, 1e-3) == pytest.approx(1.0, abs=0.02)
