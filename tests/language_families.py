"""Which families of causal language models can be trained: every type of transformers, tiny and with random weights.

    python tests/language_families.py            # all types, in two minutes
    python tests/language_families.py lfm2 gemma2

For each type, three prompts of different lengths get three completions each. The log-probs of the completions, as they
were sampled, are compared with their scores: with each prompt encoded once, and with prompt and completion as one
sequence. The gradients of both scores are compared, too, and one completion is sampled again alone. A type passes if
the log-probs agree within 1e-4, the gradients within 1e-3 of their largest entry, and the completion alone is the same.

A LoRA of random numbers is then put on the model. It passes if the log-probs are the same within 1e-4 after it was
saved and loaded into another instance, and after it was added into the weights.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import tempfile
import warnings
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from flowgrpo.bench.random_language_model import random_language_model
from flowgrpo.text.model import LanguageModel
from flowgrpo.text.sampling import completion_keys, sample_completions
from flowgrpo.text.scoring import completion_statistics
from tests.text.test_families import KEYS, STATES, VOCABULARY, WITHIN, with_lora

LARGEST = 100_000_000
"""Number of weights from which on a type is left out: some keys of its configuration keep it large."""
GRADIENTS_WITHIN = 1e-3
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "num_experts_per_token", "moe_k"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "mamba_d_head", "mamba_head_dim"), 32),
    **dict.fromkeys(("head_dim", "v_head_dim", "linear_head_dim", "index_head_dim", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "linear_key_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim", "sliding_window"), 8),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "mamba_n_groups", "num_expert_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_nextn_predict_layers"), 1),
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_num_heads": 4, "linear_value_head_dim": 16,
    "mamba_d_ssm": 128, "n_positions": 256, "max_position_embeddings": 256, "index_n_heads": 2,
    "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16, "laurel_rank": 8,
    "ffn_hidden_size": 64, "expert_ffn_hidden_size": 32, "zero_expert_num": 2, "moe_topk": 2,
    # Sparse attention over fewer tokens than there are has ties in so small a model.
    "index_topk": 256,
    "vocab_size": VOCABULARY, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
ALTERNATE = ["sliding_attention", "full_attention"] * 2
TWO_KINDS = {"linear_attention": ["linear_attention", "full_attention"] * 2, "conv": ["conv", "full_attention"] * 2}
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": TWO_KINDS["linear_attention"], "layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "dots1": {"n_routed_experts": None, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 4},
    "gemma3n_text": {"layer_types": ALTERNATE, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": {"layer_types": ALTERNATE, "num_kv_shared_layers": 2, "per_layer_config": {}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "kimi_linear": {"layer_types": TWO_KINDS["linear_attention"]},
    "lfm2_moe": {"layer_types": TWO_KINDS["conv"]},
    "longcat_flash": {"head_dim": 8},
    "minimax": {"layer_types": TWO_KINDS["linear_attention"]},
    "zamba2": {"layer_types": ["mamba", "hybrid"] * 2, "layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
    **KEYS,
    **STATES,
}
"""Keys that a type needs beyond `SMALL`."""


def main(names: list[str]) -> None:
    """Print a line for each type, and how many pass."""
    passed, adapted = [], []
    kinds = names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    for kind in kinds:
        try:
            with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
                warnings.simplefilter("ignore")
                found, states, model = compared(kind)
                lora = with_lora(model)
        except Exception as error:  # any model's own code may fail in any way
            print(f"{kind:<26} {type(error).__name__}: {' '.join(str(error).split())[:150]}", flush=True)
            continue
        off = max(found["plain"], found["shared"])
        good = off < WITHIN and found["gradients"] < GRADIENTS_WITHIN and found["alone"] == 1
        passed += [kind] if good else []
        words = "  ".join(f"{name} {value:.1e}" for name, value in found.items())
        told = f"{lora:.1e}" if isinstance(lora, float) else lora
        adapted += [kind] if good and isinstance(lora, float) and lora < WITHIN else []
        line = f"{kind:<26} {'passes' if good else 'FAILS '}  {words}{'  states' if states else ''}  lora {told}"
        print(line, flush=True)
    print(f"with a LoRA, {len(adapted)} pass; without one, {', '.join(sorted({*passed} - {*adapted})) or 'none'}")
    print(f"{len(passed)} of {len(kinds)} pass with transformers {transformers.__version__}: {', '.join(passed)}")


def compared(kind: str) -> tuple[dict[str, float], bool, LanguageModel]:
    """The differences of a type, whether it keeps states, and its model."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        configuration(kind).save_pretrained(folder)
        with torch.device("meta"):
            size = sum(p.numel() for p in _random(folder, "meta").model.parameters())
        if size > LARGEST:
            raise ValueError(f"{size:,} weights with these keys, which is too large to try")
        model = _random(folder, "cpu")
    with torch.no_grad():
        for parameter in model.model.parameters():
            if parameter.dim() > 1:  # first weights are so small that all tokens are almost equally likely
                parameter.mul_(3)
    dice = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCABULARY, (length,), generator=dice).tolist() for length in (9, 14, 5)]
    owner, keys = [0, 0, 0, 1, 1, 1, 2, 2, 2], completion_keys([1, 2, 3], 3)
    made = sample_completions(model, prompts, owner, keys, max_tokens=12)
    found, gradients = dict[str, float](), list[dict[str, torch.Tensor]]()
    for name, shared in (("plain", False), ("shared", True)):
        scored = completion_statistics(model, prompts, made.ids, owner, shared_prefix=shared)
        rows = zip(scored.log_probs.detach(), made.log_probs)
        found[name] = max(float((row[: len(own)] - torch.tensor(own)).abs().max()) for row, own in rows)
        model.model.zero_grad()
        scored.log_probs.sum().backward()
        gradients.append({n: p.grad.clone() for n, p in model.model.named_parameters() if p.grad is not None})
    plain, other = gradients
    largest = max(float(gradient.abs().max()) for gradient in plain.values())
    found["gradients"] = max(float((plain[n] - other[n]).abs().max()) for n in plain) / largest
    alone = sample_completions(model, prompts[2:], [0], keys[6:7], max_tokens=12)
    found["alone"] = float(alone.ids == made.ids[6:7])
    return found, model.keeps_states, model


def configuration(kind: str) -> Any:
    """A small configuration of a type; a model that reads images, too, has a small part for text."""
    base = AutoConfig.for_model(kind)
    text = base.get_text_config(decoder=True)
    keys = {**_small(text.to_dict()), **OWN.get(text.model_type, {})}
    if text is base:
        return AutoConfig.for_model(kind, **keys)
    name = next(name for name, part in vars(base).items() if part is text)
    return AutoConfig.for_model(kind, **{name: {**keys, "model_type": text.model_type}})


def _small(keys: dict[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in SMALL.items() if name in keys or name.endswith("token_id")}
    if "kv_lora_rank" in keys:  # latent attention has as many keys as queries, with sizes of their own
        found |= {"num_key_value_heads": 4}
        found.pop("head_dim", None)
    return found


def _random(folder: str, device: str) -> LanguageModel:
    return random_language_model(folder, torch.float32, torch.device(device))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    main(sys.argv[1:])
