"""Real diffusers pipelines at toy size, with random weights and tokenizers made in code.

Every component is the class a released checkpoint uses, text encoders included; only the tokenizers are
`PreTrainedTokenizerFast` instances trained here on a few words instead of each model's own. Building needs
no network. `TINY[key]()` returns a fresh pipeline (same weights each time), `CALL[key]` the keyword
arguments that make `pipe(prompt=[...], **CALL[key])` small: latents of at most 8x8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Gemma2Config,
    Gemma2Model,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

_VOCAB = 512
_SPECIAL = ("<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>")
_PAD, _EOS, _BOS = 0, 1, 2
_CORPUS = (
    "system user assistant Describe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:",
    "a photo of one two three four red green blue yellow purple orange circle square triangle star",
    "circles squares triangles stars above below left right of and",
)


@functools.cache
def _tokenizer_json() -> str:
    """Byte-level BPE trained on a few sentences: common words are one token, any other text still encodes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    text: str = tokenizer.to_str()
    return text


def tiny_tokenizer(*, max_length: int = 32, template: str = "$A <eos>") -> PreTrainedTokenizerFast:
    """A tokenizer of 512 entries that frames each text by `template` and pads on the right."""
    tokenizer = Tokenizer.from_str(_tokenizer_json())
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<eos>", _EOS), ("<bos>", _BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        model_max_length=max_length,
        padding_side="right",
    )


def _clip_config(hidden: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=_VOCAB,
        hidden_size=hidden,
        projection_dim=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        pad_token_id=_PAD,
        bos_token_id=_BOS,
        eos_token_id=_EOS,
    )


def _clip_tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer(template="<bos> $A <eos>")


def _t5_sizes(width: int) -> dict[str, int]:
    return {"vocab_size": _VOCAB, "d_model": width, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}


def _autoencoder(channels: int) -> AutoencoderKL:
    """Downsamples twofold, so that 16 pixels are 8 latents."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=16,
        scaling_factor=1.5,
        shift_factor=0.1,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def _shifted_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Resolution-dependent shift, as Flux and Qwen-Image ship."""
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=16, max_image_seq_len=64
    )


def _sd3() -> DiffusionPipeline:
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pooled_projection_dim=32,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_autoencoder(4),
        text_encoder=CLIPTextModelWithProjection(_clip_config(16)),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=CLIPTextModelWithProjection(_clip_config(16)),
        tokenizer_2=_clip_tokenizer(),
        text_encoder_3=T5EncoderModel(T5Config(**_t5_sizes(32))),
        tokenizer_3=tiny_tokenizer(),
    )


def _flux() -> DiffusionPipeline:
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )
    return FluxPipeline(
        scheduler=_shifted_scheduler(),
        vae=_autoencoder(4),
        text_encoder=CLIPTextModel(_clip_config(16)),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=T5EncoderModel(T5Config(**_t5_sizes(32))),
        tokenizer_2=tiny_tokenizer(),
        transformer=transformer,
    )


def _qwenimage() -> DiffusionPipeline:
    encoder_config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": _VOCAB,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "bos_token_id": _BOS,
            "eos_token_id": _EOS,
            "rope_parameters": {
                "mrope_section": [1, 1, 2],
                "rope_type": "default",
                "type": "default",
                "rope_theta": 10000.0,
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 16,
        },
        image_token_id=_VOCAB - 1,
        video_token_id=_VOCAB - 2,
    )
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 4, 8),
    )
    vae = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.1, -0.1, 0.2, 0.0],
        latents_std=[1.5, 0.8, 1.0, 1.2],
    )
    return QwenImagePipeline(
        scheduler=_shifted_scheduler(),
        vae=vae,
        text_encoder=Qwen2_5_VLForConditionalGeneration(encoder_config),
        tokenizer=tiny_tokenizer(max_length=2048, template="$A"),
        transformer=transformer,
    )


def _sana() -> DiffusionPipeline:
    encoder_config = Gemma2Config(
        vocab_size=_VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=_PAD,
        eos_token_id=_EOS,
        bos_token_id=_BOS,
    )
    transformer = SanaTransformer2DModel(
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=16,
        sample_size=8,
    )
    vae = AutoencoderDC(
        latent_channels=4,
        attention_head_dim=8,
        encoder_block_types="ResBlock",
        decoder_block_types="ResBlock",
        encoder_block_out_channels=(8, 8, 8),
        decoder_block_out_channels=(8, 8, 8),
        encoder_layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        encoder_qkv_multiscales=((), (), ()),
        decoder_qkv_multiscales=((), (), ()),
        upsample_block_type="interpolate",
        downsample_block_type="stride_conv",
        scaling_factor=0.4,
    )
    # As released: a DPM-Solver whose sigmas are those of flow matching.
    scheduler = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return SanaPipeline(
        tokenizer=tiny_tokenizer(max_length=512, template="<bos> $A"),
        text_encoder=Gemma2Model(encoder_config),
        vae=vae,
        transformer=transformer,
        scheduler=scheduler,
    )


def _wan() -> DiffusionPipeline:
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.1, 0.2, 0.0],
        latents_std=[1.5, 0.8, 1.0, 1.2],
    )
    # As released: UniPC, whose timesteps are integers and hence not exactly 1000 sigma.
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return WanPipeline(
        tokenizer=tiny_tokenizer(),
        text_encoder=UMT5EncoderModel(UMT5Config(**_t5_sizes(16))),
        vae=vae,
        scheduler=scheduler,
        transformer=transformer,
    )


def _seeded(build: Callable[[], DiffusionPipeline]) -> Callable[[], DiffusionPipeline]:
    """Fix the weights by a seed and move every denoiser parameter off its initial value.

    Fresh diffusers transformers hold zero-initialised gates and output layers; with them whole branches, and
    whatever a test hopes to see of them, would not exist.
    """

    def seeded() -> DiffusionPipeline:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            pipe = build()
            with torch.no_grad():
                for parameter in pipe.transformer.parameters():
                    parameter.add_(0.05 * torch.randn_like(parameter))
        for component in pipe.components.values():
            if isinstance(component, torch.nn.Module):
                component.eval()
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return seeded


TINY: dict[str, Callable[[], DiffusionPipeline]] = {
    "sd3": _seeded(_sd3),
    "flux": _seeded(_flux),
    "qwenimage": _seeded(_qwenimage),
    "sana": _seeded(_sana),
    "wan": _seeded(_wan),
}

CALL: dict[str, dict[str, Any]] = {
    "sd3": {
        "height": 16,
        "width": 16,
        "guidance_scale": 4.0,
        "negative_prompt": "blue",
        "max_sequence_length": 16,
    },
    "flux": {"height": 16, "width": 16, "guidance_scale": 3.5, "max_sequence_length": 16},
    "qwenimage": {"height": 16, "width": 16, "true_cfg_scale": 3.0, "negative_prompt": "a blue square"},
    "sana": {
        "height": 32,
        "width": 32,
        "guidance_scale": 4.0,
        "negative_prompt": "blue",
        "use_resolution_binning": False,
        "complex_human_instruction": None,
        "max_sequence_length": 16,
    },
    "wan": {
        "height": 32,
        "width": 32,
        "num_frames": 5,
        "guidance_scale": 4.0,
        "negative_prompt": "blue",
        "max_sequence_length": 16,
    },
}
