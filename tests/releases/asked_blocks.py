"""What released code of models of blocks is asked: logits of a tiny SDAR, texts of its sampler, passes of TraceRL.

The logits were asked with transformers 4.52. The released file imports `rms_norm_fn` from flash_attn, which needs a
GPU. In its place stood a module of this name with the formula of the layer, in float32.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.releases.asked_models import LLADA, drawn_weight, masked_logits, sizes, with_drawn_weights
from tests.releases.asking import Names, Question, drawn
from tests.releases.sources import DLLM, DLLM_RL, SDAR

BLOCK, MASK = 4, 29
SETTINGS = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": None,
}  # fmt: skip
PROMPT = [3, 7, 1, 12]
IDS = [5, 9, 2, 2, 17, 4, 8, 20]
NOISED = [5, MASK, MASK, 2, MASK, MASK, MASK, MASK]


def sdar(names: Names) -> dict[str, Any]:
    """The logits of SDAR for a row in blocks, and for a row in which masked blocks follow the finished ones."""
    model = with_drawn_weights(names["SDARForCausalLM"](names["SDARConfig"](**SETTINGS, fuse_cross_entropy=False)))
    blocks = torch.arange(len(PROMPT) + len(IDS)) // BLOCK
    plain = blocks[None, :] <= blocks[:, None]
    own, places = blocks[len(PROMPT) :], torch.arange(len(blocks))
    # The masks as the paper's figure of training has them: first form, then masked form.
    below = torch.cat([blocks[None, :] < own[:, None], own[None, :] == own[:, None]], dim=1)
    beside = torch.cat([plain, torch.zeros(len(plain), len(own), dtype=torch.bool)], dim=1)
    rows = {
        "finished": (PROMPT + IDS, plain, places),
        "noised": (PROMPT + IDS + NOISED, torch.cat([beside, below]), torch.cat([places, places[len(PROMPT) :]])),
    }
    found = {
        name: model(
            input_ids=torch.tensor([ids]), attention_mask=mask[None, None].float(), position_ids=positions[None],
            use_cache=False,
        ).logits
        for name, (ids, mask, positions) in rows.items()
    }  # fmt: skip
    return {**found, "weights": sizes(model)}


LLADA2 = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "rope_theta": 600000.0,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-6, "num_experts": 12, "num_shared_experts": 2,
    "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "moe_intermediate_size": 8,
    "first_k_dense_replace": 1, "use_qkv_bias": False, "use_bias": False, "use_qk_norm": True, "norm_head": False,
    "use_sliding_window": False, "rope_scaling": None, "pad_token_id": 0,
}  # fmt: skip


def llada2(names: Names) -> dict[str, Any]:
    """The logits of LLaDA 2 for a row in blocks. The biases of its gates are drawn too."""
    model = with_drawn_weights(names["LLaDA2MoeModelLM"](names["LLaDA2MoeConfig"](**LLADA2)))
    biases = {name: bias for name, bias in model.named_buffers() if name.endswith("expert_bias")}
    for name, bias in biases.items():
        bias.copy_(drawn_weight(name, bias.shape))
    blocks = torch.arange(len(PROMPT) + len(IDS)) // BLOCK
    seen = blocks[None, :] <= blocks[:, None]
    logits = model(torch.tensor([PROMPT + IDS]), attention_mask=seen[None, None], use_cache=False).logits
    return {"logits": logits, "weights": {**sizes(model), **{name: list(bias.shape) for name, bias in biases.items()}}}


# Tokens, tokens of a block, steps of a block, threshold, token that ends a text. With a threshold, each step has one
# token at least: with two, the released sampler writes over a finished token where a block has one mask left.
TEXTS = (
    (8, 8, 1, None, None), (8, 8, 2, None, None), (12, 4, 4, None, None), (16, 8, 8, None, None),
    (24, 8, 8, 0.3, None), (24, 4, 4, 0.4, None), (24, 8, 8, 0.5, None), (24, 4, 4, 0.4, 18), (24, 8, 8, None, 27),
)  # fmt: skip


def sdar_texts(names: Names) -> dict[str, Any]:
    """What SDAR's sampler writes with the likeliest tokens, and how often it calls its model for it."""

    class Cache:
        def __init__(self) -> None:
            self.ids = torch.zeros(1, 0, dtype=torch.long)

    class Model:
        device = torch.device("cpu")
        calls = 0

        def eval(self) -> None:
            """Nothing is to be changed."""

        def __call__(self, x: Tensor, past_key_values: Cache, store_kv: bool, **options: Any) -> Any:
            whole = torch.cat([past_key_values.ids, x], dim=1)
            if store_kv:
                past_key_values.ids = whole
            self.calls += not store_kv
            return SimpleNamespace(logits=masked_logits(whole)[:, -x.shape[1] :])

    def likeliest(logits: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        chance = logits.softmax(-1)
        return chance.argmax(-1), chance.max(-1).values

    generate = names["block_diffusion_generate"]
    inspect.unwrap(generate).__globals__.update(DynamicCache=Cache, sample_with_temperature_topk_topp=likeliest)
    prompt, rows = PROMPT * 2, []
    for tokens, block, steps, threshold, end in TEXTS:
        model = Model()
        text = generate(
            model, {"input_ids": torch.tensor([prompt])}, LLADA["mask_token_id"], gen_length=tokens,
            block_length=block, denoising_steps=steps, confidence_threshold=threshold,
            remasking_strategy="low_confidence_static" if threshold is None else "low_confidence_dynamic",
            stopping_criteria_idx=None if end is None else [end],
        )[0]  # fmt: skip
        rows.append({"text": text[len(prompt) :], "calls": model.calls})
    return {"texts": rows}


# Tokens, tokens of a block, steps of a block, threshold, token that ends a text.
LLADA2_TEXTS = ((24, 8, 4, 0.3, 31), (24, 8, 8, 0.6, 31), (24, 4, 2, 0.9, 31), (24, 8, 4, 0.3, 27), (24, 8, 8, 0.5, 18))


def llada2_texts(names: Names) -> dict[str, Any]:
    """What LLaDA 2's sampler writes with the likeliest tokens, and how often it calls its model for it."""
    calls: list[int] = []

    def forward(x: Tensor, **options: Any) -> Any:
        calls.append(x.shape[1])
        return SimpleNamespace(logits=masked_logits(x))

    def likeliest(logits: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return logits.argmax(-1), logits.softmax(-1).max(-1).values

    model = SimpleNamespace(
        device=torch.device("cpu"), forward=forward, _sample_with_temperature_topk_topp=likeliest,
        _get_num_transfer_tokens=lambda size, steps: torch.full((steps,), size // steps),
    )  # fmt: skip
    prompt, rows = PROMPT * 2, []
    for tokens, block, steps, threshold, end in LLADA2_TEXTS:
        calls.clear()
        text = names["generate"](
            model, torch.tensor([prompt]), block_length=block, steps=steps, gen_length=tokens, eos_early_stop=True,
            threshold=threshold, eos_id=end, mask_id=LLADA["mask_token_id"],
        )[0]  # fmt: skip
        rows.append({"text": text, "calls": len(calls)})
    return {"texts": rows}


def passes(names: Names) -> dict[str, Any]:
    """Which positions each pass masks and scores, for random steps, blocks and shrinkages."""
    rows = []
    for case, (block, shrink) in enumerate([(2, 1), (4, 1), (4, 2), (8, 3), (12, 1), (12, 5)]):
        steps = (drawn(case, 24).abs() * 3).long() + 10 * (torch.arange(24) // block)
        collapsed: list[int] = []
        for first in range(0, 24, block):
            collapsed += names["collapse_k_unique"](steps[first : first + block].tolist(), shrink)
        left, masked, scored = torch.tensor(collapsed), [], []
        while True:
            row, chosen, left, more = names["one_round_vectorized"](torch.arange(24), left, 0, 24, block, -1)
            if not more:
                break
            masked.append((row[24:] == -1).long())
            scored.append(chosen.long())
        rows.append({"block": block, "shrink": shrink, "steps": steps, "masked": masked, "scored": scored})
    return {"passes": rows}


BLOCK_MODELS: dict[str, Question] = {
    "sdar_logits": Question(
        *DLLM_RL, "models/sdar/modeling_sdar.py", ("SDARForCausalLM", "SDARConfig"), sdar,
        package=("configuration_sdar.py",),
    ),
    "llada2_logits": Question(
        *DLLM, "dllm/pipelines/llada2/models/modeling_llada2_moe.py", ("LLaDA2MoeModelLM", "LLaDA2MoeConfig"), llada2,
        package=("configuration_llada2_moe.py",),
    ),
    "sdar_texts": Question(
        *SDAR, "generate.py", ("get_num_transfer_tokens", "block_diffusion_generate"), sdar_texts
    ),
    "llada2_texts": Question(
        *DLLM, "dllm/pipelines/llada2/models/modeling_llada2_moe.py", ("LLaDA2MoeModelLM.generate",), llada2_texts
    ),
    "trace_rl_passes": Question(
        *DLLM_RL, "train/rl_sdar.py", ("main.collapse_k_unique", "main.one_round_vectorized"), passes
    ),
}  # fmt: skip
