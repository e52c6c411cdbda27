"""Tiny folders of LLaDA, LLaDA-MoE, MMaDA, Dream and SDAR with random weights, laid out as the published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flowgrpo.text.dream import DreamConfig, DreamModel
from flowgrpo.text.llada import LLaDAConfig, LLaDAModelLM, MMadaConfig, MMadaModelLM
from flowgrpo.text.llada2 import LLaDA2MoeConfig, LLaDA2MoeModelLM
from flowgrpo.text.llada_moe import LLaDAMoEConfig, LLaDAMoEModelLM
from flowgrpo.text.sdar import SDARConfig, SDARForCausalLM, SDARMoeConfig, SDARMoeForCausalLM

BYTES = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
LLADA_CHAT = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
DREAM_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SDAR_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|MASK|>")
DREAM_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|beginoftext|>", "<|mask|>")


def llada_folder(folder: Path, **changes: Any) -> Path:
    """LLaDA: its tokenizer has no name for the mask token."""
    return _written(LLaDAModelLM, LLaDAConfig(**_llada_settings(_llada_tokenizer(folder)), **changes), folder)


def mmada_folder(folder: Path) -> Path:
    """MMaDA: LLaDA with another type."""
    return _written(MMadaModelLM, MMadaConfig(**_llada_settings(_llada_tokenizer(folder))), folder)


def moe_folder(folder: Path) -> Path:
    """LLaDA-MoE, under the type of LLaDA, as one of its published forms; the first layer has no experts."""
    tokenizer = _llada_tokenizer(folder)
    config = LLaDAMoEConfig(
        vocab_size=264, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_experts=4, num_experts_per_tok=2, expert_intermediate_size=16, dense_intermediate_size=48,
        moe_layer_freq=[0, 1], max_position_embeddings=128, rope_theta=50000.0, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, mask_token_id=tokenizer.convert_tokens_to_ids("<|mdm_mask|>"),
        auto_map={"AutoModel": "modeling_lladamoe.LLaDAMoEModelLM"},
    )  # fmt: skip
    _written(LLaDAMoEModelLM, config, folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "model_type": "llada"}))
    return folder


def _llada_tokenizer(folder: Path) -> Any:
    tokens = Tokenizer(models.BPE(vocab=BYTES, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, bos_token="<|startoftext|>", eos_token="<|endoftext|>", pad_token="<|endoftext|>",
        additional_special_tokens=["<|mdm_mask|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    )  # fmt: skip
    tokenizer.chat_template = LLADA_CHAT
    tokenizer.save_pretrained(folder)
    return tokenizer


def _llada_settings(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer), "embedding_size": 264, "d_model": 32, "n_heads": 4, "n_kv_heads": 2,
        "n_layers": 2, "mlp_hidden_size": 48, "max_sequence_length": 128, "eos_token_id": tokenizer.eos_token_id,
        "mask_token_id": tokenizer.convert_tokens_to_ids("<|mdm_mask|>"), "block_type": "llama",
        "layer_norm_type": "rms", "rope": True, "auto_map": {"AutoModel": "modeling_llada.LLaDAModelLM"},
    }  # fmt: skip


def dream_folder(folder: Path) -> Path:
    """Dream: its tokenizer is of a class that comes with the weights."""
    _qwen_tokenizer(
        folder, DREAM_SPECIAL, bos_token="<|beginoftext|>", mask_token="<|mask|>", tokenizer_class="DreamTokenizer",
        auto_map={"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
    )  # fmt: skip
    config = DreamConfig(
        vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, rope_theta=1000000.0, mask_token_id=len(BYTES) + 4,
        pad_token_id=len(BYTES), auto_map={"AutoModel": "modeling_dream.DreamModel"},
    )  # fmt: skip
    return _written(DreamModel, config, folder)


def sdar_folder(folder: Path, **changes: Any) -> Path:
    """SDAR: blocks of 4 tokens, and a tokenizer of the class of Qwen2."""
    return _written(SDARForCausalLM, SDARConfig(**_sdar_settings(folder, "SDARForCausalLM"), **changes), folder)


def sdar_moe_folder(folder: Path) -> Path:
    """SDAR with mixtures of experts in all layers."""
    settings = _sdar_settings(folder, "SDARMoeForCausalLM")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    return _written(SDARMoeForCausalLM, SDARMoeConfig(**settings, **experts), folder)


def llada2_folder(folder: Path) -> Path:
    """LLaDA 2: the first layer has no experts, and the experts of the second one are in two groups."""
    tokenizer = _llada_tokenizer(folder)
    config = LLaDA2MoeConfig(
        vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, num_experts=8, num_experts_per_tok=2, n_group=2,
        topk_group=1, moe_intermediate_size=16, eos_token_id=tokenizer.eos_token_id, use_qk_norm=True,
        pad_token_id=tokenizer.pad_token_id, mask_token_id=tokenizer.convert_tokens_to_ids("<|mdm_mask|>"),
        auto_map={"AutoModelForCausalLM": "modeling_llada2_moe.LLaDA2MoeModelLM"},
    )  # fmt: skip
    return _written(LLaDA2MoeModelLM, config, folder)


def _sdar_settings(folder: Path, name: str) -> dict[str, Any]:
    _qwen_tokenizer(
        folder, SDAR_SPECIAL, bos_token=None, mask_token="<|MASK|>", tokenizer_class="Qwen2Tokenizer",
        auto_map={"AutoTokenizer": ["tokenization_qwen2.Qwen2Tokenizer", None]},
    )  # fmt: skip
    return {
        "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rope_theta": 1000000.0,
        "mask_token_id": len(BYTES) + SDAR_SPECIAL.index("<|MASK|>"), "eos_token_id": len(BYTES),
        "auto_map": {"AutoModelForCausalLM": f"modeling_sdar.{name}"},
    }  # fmt: skip


def _qwen_tokenizer(folder: Path, names: tuple[str, ...], **more: Any) -> None:
    folder.mkdir(parents=True)
    special = {str(len(BYTES) + place): token for place, token in enumerate(names)}
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    settings = {
        "added_tokens_decoder": {place: {"content": token, **flags} for place, token in special.items()},
        "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "chat_template": DREAM_CHAT, **more,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "vocab.json").write_text(json.dumps(BYTES))
    (folder / "merges.txt").write_text("#version: 0.2\n")


FOLDERS = {"llada": llada_folder, "lladamoe": moe_folder, "mmada": mmada_folder, "dream": dream_folder}
BLOCK_FOLDERS = {"sdar": sdar_folder, "sdar_moe": sdar_moe_folder, "llada2": llada2_folder}


def _written(kind: Any, config: Any, folder: Path) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = kind(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(6)
    model.save_pretrained(folder)
    return folder
