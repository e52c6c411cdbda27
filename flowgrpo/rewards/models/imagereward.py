"""ImageReward: a preference model that reads prompt and image together.

Xu et al., "ImageReward: Learning and Evaluating Human Preferences for Text-to-Image Generation" (2304.05977), section
3: BLIP (2201.12086) with a text encoder that attends to the image, and a head on the first token of the text encoder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..backbones.model_loading import (
    check_dtype,
    find_file,
    fit,
    fixed_generator,
    linear_stack,
    load_processor,
    read_state,
    source_name,
)
from ..options import check_count
from ..pixels import as_frames, preprocess_images

TOKENS = 35
# Mean and standard deviation of the scores on the authors' data.
MEAN, DEVIATION = 0.16717362830052426, 1.0333394966054072
_HEAD_WIDTH = 64
_VISION_NAMES = (
    (r"^cls_token$", "embeddings.class_embedding"),
    (r"^pos_embed$", "embeddings.position_embedding"),
    (r"^patch_embed\.proj\.", "embeddings.patch_embedding."),
    (r"^norm\.", "post_layernorm."),
    (r"^blocks\.", "encoder.layers."),
    (r"\.norm([12])\.", r".layer_norm\1."),
    (r"\.attn\.qkv\.", ".self_attn.qkv."),
    (r"\.attn\.proj\.", ".self_attn.projection."),
)


class ImageReward:
    """Human preference: ImageReward's standardised score, about -2 to 2.

    Args:
        checkpoint: path of `ImageReward.pt`, or "hf-hub:ORG/NAME/FILE".
        tokenizer: folder or model id of the tokenizer of uncased BERT.
        device: where to score.
        dtype: data type of the weights.
        batch_size: largest number of images, or frames of videos, in one forward pass, and of samples in one call.
        frames: how many frames of a video are scored at most, evenly spaced; all by default.

    Raises:
        ValueError: there is no such file or tokenizer, or the file is not an ImageReward checkpoint.
    """

    name = "imagereward"

    def __init__(
        self,
        checkpoint: str = "hf-hub:THUDM/ImageReward/ImageReward.pt",
        *,
        tokenizer: str = "google-bert/bert-base-uncased",
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 32,
        frames: int | None = None,
    ) -> None:
        from transformers import AutoTokenizer

        check_count("imagereward", "batch_size", batch_size)
        check_count("imagereward", "frames", 1 if frames is None else frames)
        self.dtype = check_dtype("imagereward", dtype)
        path = find_file("imagereward", "checkpoint", checkpoint)
        state = read_state("imagereward", path)
        vision, text = vision_weights(state), text_weights(state)
        head = linear_stack(state, "mlp.layers.")
        if head is None or "embeddings.class_embedding" not in vision or "embeddings.LayerNorm.weight" not in text:
            raise ValueError(f"imagereward: {path} is not an ImageReward checkpoint: it lacks blip.* or mlp.layers.*")
        self.vision, self.text = build_encoders(vision, text)
        fit("imagereward", self.vision, vision, path)
        fit("imagereward", self.text, text, path)
        for module in (self.vision, self.text):
            module.to(device, self.dtype).eval().requires_grad_(False)
        self.head = head.to(device)
        source = source_name("imagereward", "tokenizer", tokenizer)
        self.tokenizer = load_processor("imagereward", AutoTokenizer, source)
        if len(self.tokenizer) > self.text.config.vocab_size:
            raise ValueError(
                f"imagereward: the tokenizer has {len(self.tokenizer)} tokens, the model "
                f"{self.text.config.vocab_size}; give that of uncased BERT"
            )
        self.device, self.batch_size, self.frames = device, batch_size, frames

    def __call__(self, images: Tensor, prompts: Sequence[str], **columns: Any) -> Tensor:
        """Preference for each image, given its prompt.

        Args:
            images: [B, 3, H, W] in [0, 1], cropped to a square; for videos [B, F, 3, H, W] the frames' scores are
                averaged.
            prompts: B strings, truncated at 35 tokens.
            columns: ignored.

        Returns:
            [B] float32.
        """
        frames = as_frames(images, self.frames)
        flat = frames.flatten(0, 1)
        if not len(flat):
            return torch.zeros(0)
        tokens = self.tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt"
        )
        ids, mask = (tokens[key].repeat_interleave(frames.shape[1], 0) for key in ("input_ids", "attention_mask"))
        parts = [slice(start, start + self.batch_size) for start in range(0, len(flat), self.batch_size)]
        with torch.autocast(torch.device(self.device).type, enabled=False):
            raw = torch.cat([self._forward(flat[part], ids[part], mask[part]) for part in parts])
        return ((raw - MEAN) / DEVIATION).view(frames.shape[:2]).mean(1)

    def close(self) -> None:
        """Release the model."""
        del self.vision, self.text, self.head

    def _forward(self, images: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        from open_clip import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD

        size = self.vision.config.image_size
        settings = {"size": size, "mean": OPENAI_DATASET_MEAN, "std": OPENAI_DATASET_STD}
        pixels = preprocess_images(images.to(self.device, torch.float32), settings).to(self.dtype)
        seen = self.vision(pixel_values=pixels).last_hidden_state
        # `is_decoder=False` lets every token see the whole text. The model was built as a decoder only because the
        # class has cross-attention in that form alone.
        read = self.text(
            input_ids=ids.to(self.device),
            attention_mask=mask.to(self.device),
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=self.device),
            is_decoder=False,
        ).last_hidden_state
        result: Tensor = self.head(read[:, 0].float()).squeeze(-1)
        return result


def vision_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the image encoder in `ImageReward.pt`, named as in transformers' `BlipVisionModel`."""
    prefix, found = "blip.visual_encoder.", {}
    for key, value in state.items():
        if key.startswith(prefix):
            name = key.removeprefix(prefix)
            for pattern, replacement in _VISION_NAMES:
                name = re.sub(pattern, replacement, name)
            found[name] = value
    return found


def text_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the text encoder in `ImageReward.pt`, named as in transformers' `BlipTextModel`."""
    prefix = "blip.text_encoder."
    return {
        key.removeprefix(prefix): value
        for key, value in state.items()
        if key.startswith(prefix) and not key.endswith("embeddings.position_ids")
    }


def build_encoders(vision: Mapping[str, Tensor], text: Mapping[str, Tensor]) -> tuple[Any, Any]:
    """Build a `BlipVisionModel` and a `BlipTextModel` of the sizes of the weights; attention heads are 64 wide.

    Args:
        vision: the result of `vision_weights`.
        text: the result of `text_weights`.
    """
    from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

    width, patch = vision["embeddings.class_embedding"].shape[-1], vision["embeddings.patch_embedding.weight"].shape[-1]
    cells = vision["embeddings.position_embedding"].shape[1] - 1
    seen = BlipVisionConfig(
        hidden_size=width,
        intermediate_size=vision["encoder.layers.0.mlp.fc1.weight"].shape[0],
        num_hidden_layers=_layers(vision, "encoder.layers."),
        num_attention_heads=width // _HEAD_WIDTH,
        image_size=round(cells**0.5) * patch,
        patch_size=patch,
        # The value of the original model. The default of the class is different.
        layer_norm_eps=1e-6,
    )
    words, inner = text["embeddings.word_embeddings.weight"], text["encoder.layer.0.intermediate.dense.weight"]
    read = BlipTextConfig(
        vocab_size=words.shape[0],
        hidden_size=words.shape[1],
        encoder_hidden_size=width,
        intermediate_size=inner.shape[0],
        num_hidden_layers=_layers(text, "encoder.layer."),
        num_attention_heads=words.shape[1] // _HEAD_WIDTH,
        max_position_embeddings=text["embeddings.position_embeddings.weight"].shape[0],
        is_decoder=True,
    )
    with fixed_generator():
        return BlipVisionModel(seen), BlipTextModel(read, add_pooling_layer=False)


def _layers(state: Mapping[str, Tensor], prefix: str) -> int:
    return 1 + max(int(key.removeprefix(prefix).partition(".")[0]) for key in state if key.startswith(prefix))
