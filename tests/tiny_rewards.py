"""Tiny reward models with random weights, of the same classes as the released checkpoints, saved to a folder.

Tokenizers are also made here. Their tokens are single bytes, so they can encode any text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from open_clip.tokenizer import bytes_to_unicode
from torch import Tensor

WORDS = ["a red circle", "two blue squares", "a red circle"]
OPEN_CLIP = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def pictures(*shape: int, seed: int = 1) -> Tensor:
    """Smooth random images of this shape, in 8-bit levels, so that a saved picture equals them."""
    coarse = torch.rand(*shape[:-2], 6, 6, generator=torch.Generator().manual_seed(seed))
    smooth = torch.nn.functional.interpolate(coarse.flatten(0, -4), size=shape[-2:], mode="bilinear")
    return ((smooth * 255).round() / 255).view(shape)


def as_pil(image: Tensor) -> Any:
    """An image [3, H, W] in [0, 1] as a PIL picture."""
    from PIL import Image

    return Image.fromarray((image * 255).round().to(torch.uint8).permute(1, 2, 0).numpy())


def random_weights(kind: Any, config: Any, seed: int = 0) -> Any:
    """A model with random weights that are larger than a new model's, so that its outputs differ by input."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.mul_(4)
    return model


def clip_tokenizer(folder: Path, length: int) -> Any:
    """CLIP's tokenizer without merges: 256 bytes, 256 bytes at the end of a word, a start token and an end token."""
    from transformers import CLIPTokenizer

    letters = list(bytes_to_unicode().values())
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({token: place for place, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=length)


def save_clip(folder: Path, *, seed: int = 0, size: int = 32, length: int = 40) -> Path:
    """A `CLIPModel` with its processor."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor

    ends = {"bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513}
    text = {**_TOWER, **ends, "vocab_size": 514, "max_position_embeddings": length}
    vision = {**_TOWER, "image_size": size, "patch_size": 8}
    model = random_weights(CLIPModel, CLIPConfig(text_config=text, vision_config=vision, projection_dim=16), seed)
    model.save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": size}, crop_size={"height": size, "width": size})
    CLIPProcessor(images, clip_tokenizer(folder, length)).save_pretrained(folder)
    return folder


def save_clap(folder: Path, *, seed: int = 0, fused: bool = False) -> Path:
    """A `ClapModel` with its processor: spectra of one second, at 8000 samples a second, and projections of 16."""
    from transformers import ClapConfig, ClapFeatureExtractor, ClapModel, ClapProcessor

    tokens = byte_tokenizer(40, end=True, kind="RobertaTokenizerFast")
    text = {
        "vocab_size": len(tokens), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 64, "projection_dim": 16, "pad_token_id": 0,
    }  # fmt: skip
    sound = {
        "spec_size": 64, "num_mel_bins": 16, "window_size": 4, "patch_size": 4, "patch_stride": [4, 4],
        "hidden_size": 32, "patch_embeds_hidden_size": 16, "depths": [1, 1], "num_attention_heads": [2, 2],
        "num_hidden_layers": 2, "num_classes": 4, "projection_dim": 16, "enable_fusion": fused,
    }  # fmt: skip
    model = random_weights(ClapModel, ClapConfig(text_config=text, audio_config=sound, projection_dim=16), seed)
    model.save_pretrained(folder)
    reader = ClapFeatureExtractor(
        feature_size=16, sampling_rate=8000, hop_length=80, max_length_s=1, fft_window_size=256, frequency_min=50,
        frequency_max=3800, truncation="rand_trunc", padding="repeatpad",
    )  # fmt: skip
    ClapProcessor(reader, tokens).save_pretrained(folder)
    return folder


def save_open_clip(folder: Path, name: str) -> tuple[Path, Path]:
    """Make a model of open_clip and register its name there; returns its architecture file and its weights."""
    import open_clip

    folder.mkdir(parents=True, exist_ok=True)
    architecture, weights = folder / f"{name}.json", folder / "weights.pt"
    architecture.write_text(json.dumps(OPEN_CLIP))
    open_clip.add_model_config(architecture)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        torch.save(open_clip.create_model(name).state_dict(), weights)
    return architecture, weights


def byte_tokenizer(length: int, *extra: str, end: bool = False, kind: str = "PreTrainedTokenizerFast") -> Any:
    """A tokenizer of single bytes, `<pad>`, `<eos>` and `extra` tokens; with `end`, texts end in `<eos>`.

    `kind` is its class: processors of transformers before 5 take their own only.
    """
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    special = ["<pad>", "<eos>", *extra]
    vocabulary = {token: place for place, token in enumerate([*special, *sorted(bytes_to_unicode().values())])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    if end:
        tokenizer.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    return getattr(transformers, kind)(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        model_max_length=length,
        padding_side="right",
        model_input_names=["input_ids", "attention_mask"],
    )


def save_siglip(folder: Path, *, length: int = 64) -> Path:
    """A `SiglipModel` with its processor."""
    from transformers import SiglipConfig, SiglipImageProcessor, SiglipModel, SiglipProcessor

    text = {**_TOWER, "vocab_size": 300, "max_position_embeddings": length, "projection_size": 32}
    vision = {**_TOWER, "image_size": 32, "patch_size": 8}
    model = random_weights(SiglipModel, SiglipConfig(text_config=text, vision_config=vision))
    with torch.no_grad():
        model.logit_scale.fill_(1.5)
        model.logit_bias.fill_(-2.0)
    model.save_pretrained(folder)
    images = SiglipImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    SiglipProcessor(images, byte_tokenizer(length, end=True)).save_pretrained(folder)
    return folder


def save_mask2former(folder: Path, labels: list[str], *, queries: int = 6) -> Path:
    """A `Mask2FormerForUniversalSegmentation` with its image processor."""
    from transformers import (
        Mask2FormerConfig,
        Mask2FormerForUniversalSegmentation,
        Mask2FormerImageProcessor,
        SwinConfig,
    )

    swin = SwinConfig(
        image_size=64,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 2, 2, 2],
        window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = Mask2FormerConfig(
        backbone_config=swin,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=32,
        dim_feedforward=32,
        num_attention_heads=2,
        encoder_layers=1,
        decoder_layers=2,
        num_queries=queries,
        num_labels=len(labels),
    )
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: place for place, label in enumerate(labels)}
    model = random_weights(Mask2FormerForUniversalSegmentation, config)
    model.save_pretrained(folder)
    Mask2FormerImageProcessor(image_mean=[0.5] * 3, image_std=[0.25] * 3).save_pretrained(folder)
    return folder


def save_classifier(folder: Path, labels: list[str], **config: Any) -> Path:
    """A `ViTForImageClassification` with its image processor."""
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    names = dict(enumerate(labels))
    settings = ViTConfig(**_TOWER, image_size=32, patch_size=8, id2label=names, **config)
    random_weights(ViTForImageClassification, settings).save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN_SPECIAL = ["im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad"]


def save_qwen2_vl(folder: Path) -> Any:
    """Save the configuration and processor of a `Qwen2VLForConditionalGeneration`; returns the configuration."""
    from transformers import (
        Qwen2TokenizerFast,
        Qwen2VLConfig,
        Qwen2VLImageProcessor,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
    )

    letters = {letter: place for place, letter in enumerate([*bytes_to_unicode().values(), "<|endoftext|>"])}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(letters))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = Qwen2TokenizerFast(str(folder / "vocab.json"), str(folder / "merges.txt"))
    special = [f"<|{name}|>" for name in _QWEN_SPECIAL]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    ids = dict(zip(_QWEN_SPECIAL, tokenizer.convert_tokens_to_ids(special)))
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    rope = {"rope_type": "default", "type": "mrope", "mrope_section": [1, 1, 2]}
    config = Qwen2VLConfig(
        text_config={
            **text,
            "num_key_value_heads": 2,
            "vocab_size": len(tokenizer),
            "rope_scaling": rope,
            "bos_token_id": 256,
            "eos_token_id": 256,
        },
        vision_config={"embed_dim": 16, "hidden_size": 32, "depth": 2, "num_heads": 2, "mlp_ratio": 2},
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
    )
    config.save_pretrained(folder)
    processor = Qwen2VLProcessor(Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor(), chat_template=CHAT)
    processor.save_pretrained(folder)
    return config


def published_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A Qwen2-VL's weights under the names that checkpoints of transformers 4.45 use."""
    return {
        key.replace("model.visual.", "visual.").replace("model.language_model.", "model."): value
        for key, value in state.items()
    }
