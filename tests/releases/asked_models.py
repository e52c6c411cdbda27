"""What the released code of diffusion language models is asked: the logits of a tiny model, and texts of its sampler.

The models run with transformers 4.56 and need einops; they do not run with transformers 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.releases.asking import Names, Question, drawn
from tests.releases.sources import DLLM, FAST_DLLM, MMADA

LLADA = {
    "vocab_size": 30, "embedding_size": 32, "d_model": 16, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2,
    "mlp_hidden_size": 24, "max_sequence_length": 16, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
    "mask_token_id": 29, "weight_tying": False,
}  # fmt: skip
# The published code names every choice.
CHOICES = {
    "block_type": "llama", "layer_norm_type": "rms", "activation_type": "silu", "rope": True,
    "rope_full_precision": True, "alibi": False, "flash_attention": False, "attention_layer_norm": False,
    "attention_layer_norm_with_affine": True, "layer_norm_with_affine": True, "bias_for_layer_norm": False,
    "include_bias": False, "include_qkv_bias": False, "input_emb_norm": False, "scale_logits": False,
    "attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0, "block_group_size": 1,
    "use_cache": False,
}  # fmt: skip
DREAM = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
    "mask_token_id": 29, "pad_token_id": 0,
}  # fmt: skip
LLADA_MOE = {
    "vocab_size": 32, "hidden_size": 16, "dense_intermediate_size": 24, "expert_intermediate_size": 12,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16,
    "rope_theta": 50000.0, "partial_rotary_factor": 1, "rms_norm_eps": 1e-5, "num_experts": 6, "num_experts_per_tok": 2,
    "moe_layer_freq": [0, 1], "qk_layernorm": True, "moe_router_enable_expert_bias": False,
    "moe_router_score_function": "softmax", "shared_expert_intermediate_size": None, "pad_token_id": 0,
}  # fmt: skip
IDS = [[3, 7, 11, 29, 29, 2, 29], [5, 1, 29, 8, 29, 29, 4]]


def with_drawn_weights(model: nn.Module) -> Any:
    """The model in evaluation mode, with weights that depend on their names alone."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(drawn_weight(name, weight.shape))
    return model.eval()


def drawn_weight(name: str, shape: Sequence[int]) -> Tensor:
    """A weight that depends on its name alone."""
    seed = sum((place + 1) * ord(letter) for place, letter in enumerate(name))
    return drawn(seed, *shape) * 0.3 + float(len(shape) == 1)


def llada(names: Names) -> dict[str, Any]:
    """The logits of LLaDA, at every position."""
    model = with_drawn_weights(names["LLaDAModelLM"](names["LLaDAConfig"](**LLADA, **CHOICES)))
    return {"logits": model(input_ids=torch.tensor(IDS)).logits, "weights": sizes(model)}


def mmada(names: Names) -> dict[str, Any]:
    """The logits of MMaDA, at every position."""
    # Its configuration has no defaults: the published file has every key of LLaDA.
    settings = names["LLaDAConfig"](**LLADA, **CHOICES).to_dict()
    settings.pop("model_type")
    model = with_drawn_weights(names["MMadaModelLM"](names["MMadaConfig"](**settings)))
    return {"logits": model(input_ids=torch.tensor(IDS)).logits, "weights": sizes(model)}


def llada_moe(names: Names) -> dict[str, Any]:
    """The logits of LLaDA-MoE, at every position."""
    model = with_drawn_weights(names["LLaDAMoEModelLM"](names["LLaDAMoEConfig"](**LLADA_MOE)))
    return {"logits": model(input_ids=torch.tensor(IDS)).logits, "weights": sizes(model)}


def dream(names: Names) -> dict[str, Any]:
    """The logits of Dream as its sampler uses them: moved by a position, and the first position's own."""
    model = with_drawn_weights(names["DreamModel"](names["DreamConfig"](**DREAM)))
    found: Tensor = model(input_ids=torch.tensor(IDS)).logits
    return {"logits": torch.cat([found[:, :1], found[:, :-1]], dim=1), "weights": sizes(model)}


PROMPT, BLOCKS = [3, 7, 1], ((16, 16, 4), (16, 8, 8), (32, 16, 8), (24, 12, 24))


def masked_logits(x: Tensor) -> Tensor:
    """Logits [N, W, V] of tokens [N, W], in which each position depends on all tokens; any fixed function will do."""
    size, width = LLADA["vocab_size"], 64
    here, there = drawn(1, size, size), drawn(2, width, size, size)
    seen = there[torch.arange(x.shape[1]), x].sum(1, keepdim=True) / x.shape[1] ** 0.5
    found = here[x] + seen * (1 + torch.arange(x.shape[1])[:, None] % 5) + drawn(3, width, size)[: x.shape[1]]
    # LLaDA's sampler does not end if the model draws the mask token.
    return found.index_fill(-1, torch.tensor(LLADA["mask_token_id"]), -30.0)


def llada_texts(names: Names) -> dict[str, Any]:
    """What LLaDA's sampler writes without noise, for several lengths, numbers of steps and blocks."""

    class Model:
        device = torch.device("cpu")

        def __call__(self, x: Tensor) -> Any:
            return SimpleNamespace(logits=masked_logits(x))

    rows = []
    for tokens, steps, size in BLOCKS:
        found = names["generate"](
            Model(), torch.tensor([PROMPT]), steps=steps, gen_length=tokens, block_length=size,
            mask_id=LLADA["mask_token_id"],
        )[0]  # fmt: skip
        rows.append({"tokens": tokens, "steps": steps, "size": size, "text": found[0, len(PROMPT) :]})
    return {"texts": rows}


def sizes(model: nn.Module) -> dict[str, list[int]]:
    """The names and shapes of the weights."""
    return {name: list(weight.shape) for name, weight in model.named_parameters()}


SAMPLER = ("add_gumbel_noise", "get_num_transfer_tokens", "get_transfer_index", "generate")
MODELS: dict[str, Question] = {
    "llada_texts": Question(*FAST_DLLM, "llada/generate.py", SAMPLER, llada_texts),
    "llada_logits": Question(
        *FAST_DLLM, "llada/model/modeling_llada.py", ("LLaDAModelLM", "LLaDAConfig"), llada,
        package=("configuration_llada.py",),
    ),
    "mmada_logits": Question(
        *MMADA, "models/modeling_mmada.py", ("MMadaModelLM", "MMadaConfig", "LLaDAConfig"), mmada,
        package=("modeling_llada.py", "configuration_llada.py", "sampling.py"),
    ),
    "llada_moe_logits": Question(
        *DLLM, "dllm/pipelines/llada/models/modeling_lladamoe.py", ("LLaDAMoEModelLM", "LLaDAMoEConfig"), llada_moe,
        package=("configuration_lladamoe.py",),
    ),
    "dream_logits": Question(
        *FAST_DLLM, "dream/model/modeling_dream.py", ("DreamModel", "DreamConfig"), dream,
        package=("configuration_dream.py", "generation_utils.py"),
    ),
}  # fmt: skip
