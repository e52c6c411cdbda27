"""The networks of the embedded pipeline before training, and its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from diffusers import AutoencoderKL, SD3Transformer2DModel
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.trainers import BpeTrainer
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from .draw import SIZE
from .scene_prompts import all_prompts

LATENT_CHANNELS = 8
TOKENS = 12


def build_tokenizer(folder: Path) -> CLIPTokenizer:
    """A CLIP byte-pair tokenizer in which every word of the world is one token; an unknown word is split to letters."""
    end = "</w>"
    alphabet = list("abcdefghijklmnopqrstuvwxyz")
    model = Tokenizer(BPE(end_of_word_suffix=end, unk_token="<|endoftext|>"))
    model.pre_tokenizer = WhitespaceSplit()
    trainer = BpeTrainer(
        vocab_size=600,
        min_frequency=1,
        end_of_word_suffix=end,
        initial_alphabet=alphabet,
        # Final letters are listed too. Otherwise the trainer would number them in the order of a hash, and the numbers
        # decide ties.
        special_tokens=["<|startoftext|>", "<|endoftext|>", *(letter + end for letter in alphabet)],
        show_progress=False,
    )
    words = sorted({word for prompt in all_prompts() for word in prompt.text.split()})
    model.train_from_iterator(alphabet + words, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    write_vocabulary(json.loads(model.to_str()), folder)
    return CLIPTokenizer.from_pretrained(folder, model_max_length=TOKENS, pad_token="<|endoftext|>")


def write_vocabulary(learned: dict[str, Any], folder: Path) -> None:
    """Write the two files that every version of `CLIPTokenizer` reads, from the JSON of the library `tokenizers`."""
    model = learned["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")


def build_text_encoder(tokenizer: CLIPTokenizer, width: int, layers: int) -> CLIPTextModelWithProjection:
    """A small CLIP text tower for `TOKENS` tokens."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        projection_dim=width,
        max_position_embeddings=TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModelWithProjection(config)


def build_vae() -> AutoencoderKL:
    """A small autoencoder, 64×64×3 to 8×8×8."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 16, 32, 64),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=SIZE,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def build_transformer(text_width: int) -> SD3Transformer2DModel:
    """The denoiser: 64 image tokens, four joint blocks of width 128, 2.3 million parameters."""
    return SD3Transformer2DModel(
        sample_size=SIZE // 8,
        patch_size=1,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=text_width,
        pooled_projection_dim=text_width,
        caption_projection_dim=128,
        pos_embed_max_size=SIZE // 8,
        qk_norm="rms_norm",
    )
