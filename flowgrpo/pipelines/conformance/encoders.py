"""Text encoders and tokenizers at toy size, each encoder of the class that a released pipeline uses.

The tokenizers are not the models' own tokenizers, but `PreTrainedTokenizerFast` instances that are trained here on a
few words. So a tokenizer is built without a network.
"""

from __future__ import annotations

import functools
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

# Whether transformers is of version 5 or later.
_FIVE = int(transformers.__version__.partition(".")[0]) >= 5
VOCAB = 512
PAD, EOS, BOS = 0, 1, 2
WIDTH = 16
_TEXT = ("<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>")
_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VISION_START, VISION_END, IMAGE, VIDEO = range(VOCAB - len(_VISION), VOCAB)
_CORPUS = (
    "system user assistant Describe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:",
    "a photo of one two three four red green blue yellow purple orange circle square triangle star",
    "circles squares triangles stars above below left right of and",
)
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def _tokenizer_json() -> str:
    """Byte-level BPE, trained on a few sentences: a common word is one token, and any other text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(_VISION),
        special_tokens=list(_TEXT),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    unused = VISION_START - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([*(f"<unused {number}>" for number in range(unused)), *_VISION])
    text: str = tokenizer.to_str()
    return text


def tokenizer(
    *,
    max_length: int = 32,
    template: str = "$A <eos>",
    side: str = "right",
    kind: str = "PreTrainedTokenizerFast",
    **more: Any,
) -> Any:
    """A tokenizer of at most 512 entries, with a chat template; it puts each text into `template`.

    `more` goes to the class of transformers that `kind` names.
    """
    made = Tokenizer.from_str(_tokenizer_json())
    made.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<eos>", EOS), ("<bos>", BOS)]
    )
    return getattr(transformers, kind)(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        # Versions before 5 would also make `token_type_ids`, which no encoder of a pipeline takes.
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=max_length,
        padding_side=side,
        chat_template=_CHAT,
        extra_special_tokens={
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_start_token": "<|vision_start|>",
            "vision_end_token": "<|vision_end|>",
        },
        **more,
    )


def clip_tokenizer() -> Any:
    """A tokenizer that adds the same start and end as CLIP's tokenizer."""
    return tokenizer(template="<bos> $A <eos>")


def long_tokenizer() -> Any:
    """A tokenizer of a language model: it adds no start or end, and has room for a system prompt."""
    return tokenizer(max_length=2048, template="$A")


def clip_text(*, projected: bool = False, positions: int = 32) -> Any:
    """`CLIPTextModel`, or with `projected` `CLIPTextModelWithProjection`, both of width 16."""
    config = transformers.CLIPTextConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        projection_dim=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=positions,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return (transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel)(config)


def clip_vision(*, projected: bool = False, width: int = WIDTH) -> Any:
    """`CLIPVisionModel`, or with `projected` `CLIPVisionModelWithProjection`, for images of 32 pixels."""
    config = transformers.CLIPVisionConfig(
        hidden_size=width,
        projection_dim=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=16,
    )
    return (transformers.CLIPVisionModelWithProjection if projected else transformers.CLIPVisionModel)(config)


def clip_image_processor() -> Any:
    """Scales images to the 32 pixels of `clip_vision`."""
    return transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})


def siglip_vision() -> Any:
    """`SiglipVisionModel` for images of 32 pixels."""
    config = transformers.SiglipVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=32,
        patch_size=16,
    )
    return transformers.SiglipVisionModel(config)


def siglip_image_processor() -> Any:
    """Scales images to the 32 pixels of `siglip_vision`."""
    return transformers.SiglipImageProcessor(size={"height": 32, "width": 32})


def siglip2_vision() -> Any:
    """`Siglip2VisionModel` for images of 4 patches."""
    config = transformers.Siglip2VisionConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_patches=4,
        patch_size=16,
    )
    return transformers.Siglip2VisionModel(config)


def siglip2_image_processor() -> Any:
    """Scales images to the 4 patches of `siglip2_vision`."""
    return transformers.Siglip2ImageProcessor(patch_size=16, max_num_patches=4)


def _t5_sizes(width: int) -> dict[str, int]:
    return {"vocab_size": VOCAB, "d_model": width, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}


def t5(width: int = WIDTH) -> Any:
    """`T5EncoderModel`."""
    return transformers.T5EncoderModel(transformers.T5Config(**_t5_sizes(width)))


def umt5(width: int = WIDTH) -> Any:
    """`UMT5EncoderModel`."""
    return transformers.UMT5EncoderModel(transformers.UMT5Config(**_t5_sizes(width)))


def language_model(model: str, config: str, *, layers: int = 2, **settings: Any) -> Any:
    """A decoder of transformers, given by the names of its classes, of width 16."""
    return getattr(transformers, model)(getattr(transformers, config)(**decoder_sizes(layers), **settings))


def decoder_sizes(layers: int = 2) -> dict[str, Any]:
    """Fields that the configurations of most language models share."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 4096,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": BOS,
    }


def gemma2() -> Any:
    """`Gemma2Model`."""
    return language_model("Gemma2Model", "Gemma2Config")


def gemma3() -> Any:
    """`Gemma3ForConditionalGeneration`, with which LTX-2 reads prompts; its vision tower has one layer."""
    text = {**decoder_sizes(), "layer_types": ["full_attention"] * 2, "query_pre_attn_scalar": 8}
    vision = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 32, "patch_size": 16}  # fmt: skip
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return transformers.Gemma3ForConditionalGeneration(config)


def qwen2_5_vl(model: str = "Qwen2_5_VLForConditionalGeneration", *, layers: int = 2) -> Any:
    """A class of the Qwen2.5-VL family; its vision tower has one layer."""
    sizes = {name: value for name, value in decoder_sizes(layers).items() if name not in ("head_dim", "pad_token_id")}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**sizes, **_mrope()},
        vision_config={
            "depth": 1,
            "hidden_size": WIDTH,
            "intermediate_size": WIDTH,
            "num_heads": 2,
            "out_hidden_size": WIDTH,
            "fullatt_block_indexes": [0],
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    return getattr(transformers, model)(config.text_config if model.endswith("TextModel") else config)


def qwen2_vl_processor(kind: str = "Qwen2_5_VLProcessor", pixels: int = 28 * 28) -> Any:
    """A processor of the Qwen-VL family around `long_tokenizer`, for images of a few patches."""
    images = transformers.Qwen2VLImageProcessor(min_pixels=pixels, max_pixels=4 * pixels)
    videos = transformers.Qwen2VLVideoProcessor(min_pixels=pixels, max_pixels=4 * pixels)
    words = long_tokenizer()
    if not _FIVE:
        # These processors then take no other class. Its own unknown token would be one more entry.
        words = tokenizer(max_length=2048, template="$A", kind="Qwen2TokenizerFast", unk_token="<pad>")
    return getattr(transformers, kind)(images, words, videos, chat_template=words.chat_template)


def _mrope() -> dict[str, Any]:
    rope = {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default", "rope_theta": 10000.0}
    # Transformers 5 has another name for this processor.
    return {"rope_parameters" if _FIVE else "rope_scaling": rope}


def qwen3_vl(model: str = "Qwen3VLForConditionalGeneration", *, layers: int = 2) -> Any:
    """A class of the Qwen3-VL family; its vision tower has one layer."""
    sizes = {name: value for name, value in decoder_sizes(layers).items() if name != "pad_token_id"}
    config = transformers.Qwen3VLConfig(
        text_config={
            **sizes,
            "rope_parameters": {"mrope_section": [2, 1, 1], "rope_type": "default", "rope_theta": 1e4},
        },
        vision_config={
            "depth": 1,
            "hidden_size": WIDTH,
            "intermediate_size": WIDTH,
            "num_heads": 2,
            "out_hidden_size": WIDTH,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [],
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    return getattr(transformers, model)(config)


def qwen2_vl() -> Any:
    """`Qwen2VLForConditionalGeneration`; its vision tower has one layer."""
    sizes = {name: value for name, value in decoder_sizes().items() if name not in ("head_dim", "pad_token_id")}
    config = transformers.Qwen2VLConfig(
        text_config={**sizes, **_mrope()},
        vision_config={"depth": 1, "embed_dim": WIDTH, "hidden_size": WIDTH, "mlp_ratio": 2, "num_heads": 2},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def qwen3_vl_processor() -> Any:
    """A processor of the Qwen3-VL family around `long_tokenizer`."""
    images = transformers.Qwen2VLImageProcessor(min_pixels=32 * 32, max_pixels=64 * 64, patch_size=16)
    words = long_tokenizer()
    videos = transformers.Qwen3VLVideoProcessor()
    return transformers.Qwen3VLProcessor(images, words, videos, chat_template=words.chat_template)


def mistral3(model: str = "Mistral3ForConditionalGeneration", *, layers: int = 2) -> Any:
    """A class of the Mistral3 family."""
    config = transformers.Mistral3Config(
        text_config={"model_type": "mistral", **decoder_sizes(layers)},
        vision_config={
            "model_type": "pixtral",
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 8,
            "image_size": 28,
            "patch_size": 14,
        },
        image_token_index=IMAGE,
    )
    return getattr(transformers, model)(config)


def llava() -> tuple[Any, Any]:
    """`LlavaForConditionalGeneration` of three layers, and its tokenizer, with which HunyuanVideo reads a picture."""
    words = long_tokenizer()
    marks = ["<image>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    words.add_tokens(marks, special_tokens=True)
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**{**decoder_sizes(3), "vocab_size": len(words)}),
        vision_config=clip_vision().config,
        image_token_index=words.convert_tokens_to_ids("<image>"),
        pad_token_id=PAD,
    )
    return transformers.LlavaForConditionalGeneration(config), words


def t5_gemma() -> Any:
    """`T5GemmaEncoder`, with which PRX reads prompts."""
    from transformers.models.t5gemma.configuration_t5gemma import T5GemmaModuleConfig
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

    config = T5GemmaModuleConfig(**decoder_sizes(), layer_types=["full_attention"] * 2, query_pre_attn_scalar=8)
    # The configuration of the whole model sets this rate, but the encoder alone has no such configuration.
    config.dropout_rate = 0.0
    return T5GemmaEncoder(config)


def t5_gemma_model() -> Any:
    """`T5GemmaEncoderModel`, with which Stable Audio 3 reads prompts."""
    from transformers.models.t5gemma.configuration_t5gemma import T5GemmaModuleConfig

    module = T5GemmaModuleConfig(**decoder_sizes(), layer_types=["full_attention"] * 2, query_pre_attn_scalar=8)
    config = transformers.T5GemmaConfig(
        encoder=module.to_dict(), decoder=module.to_dict(), is_encoder_decoder=False, dropout_rate=0.0
    )
    return transformers.T5GemmaEncoderModel(config)


def t5_gemma2() -> Any:
    """`T5Gemma2Encoder`, with which Motif-Video reads prompts."""
    from transformers.models.t5gemma2.configuration_t5gemma2 import T5Gemma2EncoderConfig
    from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2Encoder

    text = {**decoder_sizes(), "layer_types": ["full_attention"] * 2, "query_pre_attn_scalar": 8}
    vision = {"model_type": "siglip_vision_model", "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH,
              "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 16}  # fmt: skip
    config = T5Gemma2EncoderConfig(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    # The same as in `t5_gemma`.
    config.text_config.dropout_rate = config.dropout_rate = 0.0
    return T5Gemma2Encoder(config, eoi_token_index=EOS)
