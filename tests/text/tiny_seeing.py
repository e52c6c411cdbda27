"""Tiny language models that are shown pictures, with random weights, and their processors."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from transformers import PreTrainedTokenizerFast

from flowgrpo.worlds.arithmetic.problems import build_character_tokenizer

TEMPLATE = (
    "{%- for message in messages -%}<turn>{%- if message.content is string -%}{{ message.content }}{%- else -%}"
    "{%- for part in message.content -%}{%- if part.type == 'image' -%}IMAGE{%- else -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{%- if not loop.last or add_generation_prompt -%}</turn>{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<turn>{%- endif -%}"
)
OLDER = int(hf.__version__.partition(".")[0]) < 5
SPREAD: ContextVar[float] = ContextVar("spread")
TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 1024,
}  # fmt: skip
SIGHT: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip


def tokenizer_with(*words: str, **named: str) -> PreTrainedTokenizerFast:
    """The character tokenizer with further tokens, some of them attributes of the tokenizer."""
    tokenizer = build_character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>", "</turn>", *words, *named.values()]})
    if not named:
        return tokenizer
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        padding_side="left", extra_special_tokens=named,
    )  # fmt: skip


def _written(folder: Path, model: Any, processor: Any) -> Path:
    for weight in model.parameters():
        if weight.dim() > 1:
            # With the weights of a new model all tokens are nearly as likely, whatever their positions are.
            torch.nn.init.normal_(weight, std=SPREAD.get())
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _text(tokenizer: Any, **more: Any) -> dict[str, Any]:
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    return {**TEXT, "vocab_size": len(tokenizer), **ends, **more}


def _qwen(folder: Path, kind: str) -> Path:
    words = {
        "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
        "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
    }  # fmt: skip
    tokenizer = tokenizer_with(*words.values())
    if OLDER:
        # Older processors want the tokenizer of the family; newer ones would draw up its vocabulary anew.
        tokenizer = hf.Qwen2TokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
            padding_side="left",
        )  # fmt: skip
    template = TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    sections = {"rope_type": "default", "mrope_section": [2, 1, 1]}
    rope = {"rope_scaling": sections} if OLDER else {"rope_parameters": {**sections, "rope_theta": 1e4}}
    newer = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    full = ["full_attention"] * 2
    sight, more, name, reads = {
        "qwen2_vl": ({"depth": 2, "embed_dim": 16, "num_heads": 2, "hidden_size": 32}, full, "Qwen2VL", "Qwen2VL"),
        "qwen2_5_vl": (
            {**newer, "window_size": 56, "fullatt_block_indexes": [1]}, full, "Qwen2_5_VL", "Qwen2_5_VL"
        ),
        "qwen3_vl": (
            {**newer, "patch_size": 14, "deepstack_visual_indexes": [0], "num_position_embeddings": 64}, None,
            "Qwen3VL", "Qwen3VL",
        ),
        "qwen3_5": (
            {**newer, "patch_size": 14, "num_position_embeddings": 64}, ["linear_attention", "full_attention"],
            "Qwen3_5", "Qwen3VL",
        ),
    }[kind]  # fmt: skip
    text = _text(tokenizer, **rope, **({} if more is None else {"layer_types": more}))
    if kind == "qwen3_5":
        text |= {f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim")}
        text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    ids = {name: tokenizer.convert_tokens_to_ids(word) for name, word in words.items()}
    config = getattr(hf, f"{name}Config")(text_config=text, vision_config=sight, **ids)
    images = hf.Qwen2VLImageProcessor(size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 6}, patch_size=14)
    films = (hf.Qwen3VLVideoProcessor if reads == "Qwen3VL" else hf.Qwen2VLVideoProcessor)()
    processor = getattr(hf, f"{reads}Processor")(images, tokenizer, films, chat_template=template)
    return _written(folder, getattr(hf, f"{name}ForConditionalGeneration")(config), processor)


def _siglip(size: int = 28) -> dict[str, Any]:
    return {"model_type": "siglip_vision_model", "image_size": size, "patch_size": 14, **SIGHT}


def _gemma3(folder: Path) -> Path:
    tokenizer = tokenizer_with(boi_token="<boi>", eoi_token="<eoi>", image_token="<soft>")
    ids = {
        "boi_token_index": tokenizer.convert_tokens_to_ids("<boi>"),
        "eoi_token_index": tokenizer.convert_tokens_to_ids("<eoi>"),
        "image_token_id": tokenizer.convert_tokens_to_ids("<soft>"),
    }
    text = _text(tokenizer, layer_types=["sliding_attention", "full_attention"], sliding_window=6)
    config = hf.Gemma3Config(text_config=text, vision_config=_siglip(56), mm_tokens_per_image=4, **ids)
    images = hf.Gemma3ImageProcessor(size={"height": 56, "width": 56})
    processor = hf.Gemma3Processor(
        images, tokenizer, chat_template=TEMPLATE.replace("IMAGE", "<boi>"), image_seq_length=4
    )
    return _written(folder, hf.Gemma3ForConditionalGeneration(config), processor)


def _gemma4(folder: Path) -> Path:
    signs = ("boi", "eoi", "image", "video", "audio", "boa", "eoa")
    tokenizer = tokenizer_with(**{f"{sign}_token": f"<{sign}>" for sign in signs})
    ids = {f"{sign}_token_id": tokenizer.convert_tokens_to_ids(f"<{sign}>") for sign in signs}
    text = _text(
        tokenizer, layer_types=["sliding_attention", "full_attention"], sliding_window=6, per_layer_config={},
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=len(tokenizer), global_head_dim=8,
        use_bidirectional_attention="vision",
    )  # fmt: skip
    sight = {**SIGHT, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 14, "pooling_kernel_size": 2}
    config = hf.Gemma4Config(
        text_config=text, vision_config={**sight, "position_embedding_size": 64}, audio_config=None, **ids
    )
    images = hf.Gemma4ImageProcessor(patch_size=14, max_soft_tokens=70, pooling_kernel_size=2)
    processor = hf.Gemma4Processor(
        hf.Gemma4AudioFeatureExtractor(), images, tokenizer, hf.Gemma4VideoProcessor(),
        chat_template=TEMPLATE.replace("IMAGE", "<image>"), image_seq_length=70,
    )  # fmt: skip
    return _written(folder, hf.Gemma4ForConditionalGeneration(config), processor)


def _llava(folder: Path, kind: str) -> Path:
    tokenizer = tokenizer_with("<image>", "<video>")
    token = tokenizer.convert_tokens_to_ids("<image>")
    text = {"model_type": "llama", **_text(tokenizer)}
    sight = {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, "projection_dim": 16, **SIGHT}
    options = {"vision_feature_select_strategy": "default", "patch_size": 14, "num_additional_image_tokens": 1}
    template = TEMPLATE.replace("IMAGE", "<image>")
    square = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    if kind == "llava":
        config: Any = hf.LlavaConfig(text_config=text, vision_config=sight, image_token_id=token)
        processor: Any = hf.LlavaProcessor(
            hf.CLIPImageProcessor(**square), tokenizer, chat_template=template, **options
        )
        return _written(folder, hf.LlavaForConditionalGeneration(config), processor)
    grid = [[28, 56], [56, 28], [56, 56]]
    config = hf.LlavaNextConfig(text_config=text, vision_config=sight, image_token_id=token, image_grid_pinpoints=grid)
    images = hf.LlavaNextImageProcessor(image_grid_pinpoints=grid, **square)
    processor = hf.LlavaNextProcessor(images, tokenizer, chat_template=template, **options)
    return _written(folder, hf.LlavaNextForConditionalGeneration(config), processor)


def _onevision(folder: Path) -> Path:
    tokenizer = tokenizer_with("<image>", "<video>")
    ids = {f"{what}_token_id": tokenizer.convert_tokens_to_ids(f"<{what}>") for what in ("image", "video")}
    grid = [[28, 56], [56, 28], [56, 56]]
    text = {"model_type": "qwen2", **_text(tokenizer, layer_types=["full_attention"] * 2)}
    config = hf.LlavaOnevisionConfig(text_config=text, vision_config=_siglip(), image_grid_pinpoints=grid, **ids)
    images = hf.LlavaOnevisionImageProcessor(size={"height": 28, "width": 28}, image_grid_pinpoints=grid)
    processor = hf.LlavaOnevisionProcessor(
        images, tokenizer, hf.LlavaOnevisionVideoProcessor(), num_image_tokens=4, vision_feature_select_strategy="full",
        chat_template=TEMPLATE.replace("IMAGE", "<image>"),
    )  # fmt: skip
    return _written(folder, hf.LlavaOnevisionForConditionalGeneration(config), processor)


def _idefics3(folder: Path) -> Path:
    tokenizer = tokenizer_with(
        "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
        *(f"<row_{r}_col_{c}>" for r in range(1, 5) for c in range(1, 5)),
    )  # fmt: skip
    token = tokenizer.convert_tokens_to_ids("<image>")
    text = {"model_type": "llama", **_text(tokenizer)}
    sight = {"model_type": "idefics3_vision", "image_size": 56, "patch_size": 14, **SIGHT}
    config = hf.Idefics3Config(text_config=text, vision_config=sight, image_token_id=token, scale_factor=2)
    images = hf.Idefics3ImageProcessor(size={"longest_edge": 112}, max_image_size={"longest_edge": 56})
    processor = hf.Idefics3Processor(
        images, tokenizer, image_seq_len=4, chat_template=TEMPLATE.replace("IMAGE", "<image>")
    )
    return _written(folder, hf.Idefics3ForConditionalGeneration(config), processor)


def _internvl(folder: Path) -> Path:
    words = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    tokenizer = tokenizer_with(**words, video_token="<video>")
    token = tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
    text = {"model_type": "qwen2", **_text(tokenizer, layer_types=["full_attention"] * 2)}
    sight = {"model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14], **SIGHT}
    config = hf.InternVLConfig(
        text_config=text, vision_config=sight, image_token_id=token, image_seq_length=1, downsample_ratio=0.5
    )
    images = hf.GotOcr2ImageProcessor(
        size={"height": 28, "width": 28}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    processor = hf.InternVLProcessor(
        images, tokenizer, hf.InternVLVideoProcessor(), image_seq_length=1,
        chat_template=TEMPLATE.replace("IMAGE", "<IMG_CONTEXT>\n"),
    )  # fmt: skip
    return _written(folder, hf.InternVLForConditionalGeneration(config), processor)


def _mistral3(folder: Path) -> Path:
    tokenizer = tokenizer_with("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    token = tokenizer.convert_tokens_to_ids("[IMG]")
    text = {"model_type": "mistral", **_text(tokenizer, sliding_window=None)}
    sight = {"model_type": "pixtral", "image_size": 112, "patch_size": 14, **SIGHT, "head_dim": 8}
    config = hf.Mistral3Config(
        text_config=text, vision_config=sight, image_token_id=token, spatial_merge_size=2, vision_feature_layer=-1
    )
    images = hf.PixtralImageProcessor(size={"longest_edge": 84}, patch_size={"height": 14, "width": 14})
    processor = hf.PixtralProcessor(
        images, tokenizer, patch_size=14, spatial_merge_size=2, chat_template=TEMPLATE.replace("IMAGE", "[IMG]")
    )
    return _written(folder, hf.Mistral3ForConditionalGeneration(config), processor)


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "qwen2_vl": lambda folder: _qwen(folder, "qwen2_vl"),
    "qwen2_5_vl": lambda folder: _qwen(folder, "qwen2_5_vl"),
    "qwen3_vl": lambda folder: _qwen(folder, "qwen3_vl"),
    "qwen3_5": lambda folder: _qwen(folder, "qwen3_5"),
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "llava": lambda folder: _llava(folder, "llava"),
    "llava_next": lambda folder: _llava(folder, "llava_next"),
    "llava_onevision": _onevision,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "mistral3": _mistral3,
}
"""Type of model -> what writes a tiny instance into a folder."""
for kind, own in {"qwen3_vl": "Qwen3VLConfig", "qwen3_5": "Qwen3_5Config", "gemma4": "Gemma4Config"}.items():
    if not hasattr(hf, own):  # older transformers
        del FAMILIES[kind]


def put_tiny_seeing(kind: str, folder: Path, spread: float = 0.3) -> Path:
    """Write a tiny model of a type, with random weights of this spread, and its processor; returns the folder."""
    before = SPREAD.set(spread)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(0)
            return FAMILIES[kind](folder)
    finally:
        SPREAD.reset(before)
