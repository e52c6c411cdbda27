"""Families of language models: what is sampled is scored alike, whatever a layer keeps of the past.

The models are tiny and have random weights. A family is left out where transformers does not have it, and a family that
keeps states also where its cache is older than the layers with states.
"""

import copy
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.cache_utils
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from flowgrpo.bench.random_language_model import random_language_model
from flowgrpo.configs.load import load_recipe
from flowgrpo.configs.schema import TextRecipe
from flowgrpo.estimate.language import estimate_text
from flowgrpo.text.model import LanguageModel, LanguageWeights, linear_layers, merged_weights
from flowgrpo.text.sampling import Sampled, completion_keys, sample_completions
from flowgrpo.text.scoring import completion_statistics
from flowgrpo.training.session import lora_spec
from flowgrpo.weights.trained import LoraSpec
from tests.allocation import most_bytes

VOCABULARY = 120
WITHIN = 1e-4
TOKEN_IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 0}
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 4, **TOKEN_IDS}
HEADS = {**SIZES, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
KEYS: dict[str, dict[str, Any]] = {
    "llama": HEADS,
    "qwen3": HEADS,
    "gemma3_text": {**HEADS, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt2": {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256, **TOKEN_IDS},
    "gpt_oss": {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "deepseek_v3": {
        **SIZES, "intermediate_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip
MOE = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "num_experts_per_tok": 2}
KEYS |= {
    "glm4_moe": {**HEADS, **MOE, "moe_intermediate_size": 32, "n_routed_experts": 4, "first_k_dense_replace": 1},
    # Its layers have other names in its files, and peft renames the layers of an adapter as well.
    "laguna": {**HEADS, **MOE, "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "phimoe": {**SIZES, **MOE, "num_local_experts": 4},
}
STATES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**HEADS, **DELTA},
    "qwen3_next": {**HEADS, **DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "lfm2": {**HEADS, "layer_types": ["conv", "full_attention"] * 2},
    "falcon_h1": {**HEADS, **MAMBA, "mamba_d_ssm": 128},
    "granitemoehybrid": {**HEADS, **MAMBA, "layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 64},
    "jamba": {
        **HEADS, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8, "mamba_d_state": 16,
        "num_experts": 2,
    },
    "mamba": {**SIZES, "state_size": 16},
    "mamba2": {**SIZES, "num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1},
}  # fmt: skip
HAS_STATES = hasattr(transformers.cache_utils, "LinearAttentionLayer")
"""Whether this version of transformers has one kind of cache for all models that keep states."""
PROMPTS, OWNER = (9, 14, 5), [0, 0, 0, 1, 1, 1, 2, 2, 2]
TOKENS = 12


def folder_of(family: str, path: Path) -> Path:
    """A folder with the configuration of a tiny model."""
    if family not in CONFIG_MAPPING_NAMES or (family in STATES and not HAS_STATES):
        pytest.skip(f"this version of transformers has no {family}, or keeps its states in another way")
    AutoConfig.for_model(family, **KEYS.get(family, STATES.get(family))).save_pretrained(path / family)
    return path / family


@pytest.fixture(params=[*KEYS, *STATES])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def model(family: str, tmp_path: Path) -> LanguageModel:
    found = random_language_model(str(folder_of(family, tmp_path)), torch.float32, torch.device("cpu"))
    with torch.no_grad():
        for parameter in found.model.parameters():
            if parameter.dim() > 1:  # first weights are so small that all tokens are almost equally likely
                parameter.mul_(3)
    return found


def sampled(model: LanguageModel) -> tuple[list[list[int]], Sampled]:
    """Three prompts of different lengths, and three completions of each."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in PROMPTS]
    return prompts, sample_completions(model, prompts, OWNER, completion_keys([1, 2, 3], 3), max_tokens=TOKENS)


def test_only_some_families_keep_states(family: str, model: LanguageModel) -> None:
    assert model.keeps_states == (family in STATES)


@pytest.mark.parametrize("shared", [False, True])
def test_completions_are_scored_as_they_were_sampled(model: LanguageModel, shared: bool) -> None:
    prompts, found = sampled(model)
    scored = completion_statistics(model, prompts, found.ids, OWNER, shared_prefix=shared)
    for row, (ids, wanted) in enumerate(zip(found.ids, found.log_probs)):
        assert torch.allclose(scored.log_probs[row, : len(ids)], torch.tensor(wanted), atol=WITHIN)
    assert float(scored.log_probs.detach().std()) > 0.3
    scored.log_probs.sum().backward()
    named = dict(model.model.named_parameters())
    without = [name for name, p in named.items() if p.grad is None or not p.grad.isfinite().all()]
    # The choice of experts has no gradient where all chosen experts are weighted by their own scores.
    assert not [name for name in without if "expert" not in name and "bias" not in name]


def test_a_completion_is_the_same_alone(model: LanguageModel) -> None:
    prompts, found = sampled(model)
    key = completion_keys([1, 2, 3], 3)[6:7]
    assert sample_completions(model, prompts[2:], [0], key, max_tokens=TOKENS).ids == found.ids[6:7]


def with_lora(model: LanguageModel) -> float | str:
    """Largest difference of a log-prob between a LoRA as it was trained, and loaded or merged; or why there is none."""
    plain, loaded = copy.deepcopy(model), copy.deepcopy(model)
    spec = LoraSpec(rank=4, alpha=8)
    try:
        weights = LanguageWeights.adapter(model, spec, seed=0)
        dice = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in weights.parameters():
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=dice))
        before, wanted = scores(plain), scores(model)
        assert float((before - wanted).abs().max()) > 100 * WITHIN, "the LoRA does nothing"
        with tempfile.TemporaryDirectory() as folder:
            weights.save(Path(folder) / "lora")
            LanguageWeights.adapter(loaded, spec, seed=1).load_lora(Path(folder) / "lora")
        found = float((scores(loaded) - wanted).abs().max())
        weights.merge()
    except ValueError as error:
        return str(error)
    return max(found, float((scores(model) - wanted).abs().max()))


@torch.no_grad()
def scores(model: LanguageModel) -> torch.Tensor:
    """Log-probs of three completions."""
    completions = [[5, 6, 9], [7, 8, 10], [9, 9, 6]]
    return completion_statistics(model, [[5, 6, 7, 8], [9, 4, 3, 11]], completions, [0, 0, 1]).log_probs


def test_a_lora_is_loaded_and_merged_as_it_was_trained(model: LanguageModel) -> None:
    found = with_lora(model)
    assert isinstance(found, float)
    assert found < WITHIN


def test_peft_loads_the_lora_of_a_model_with_transposed_weights(tmp_path: Path) -> None:
    """peft would warn about each layer, if the file did not say that the weights are transposed."""
    folder = str(folder_of("gpt2", tmp_path))
    model, other = (random_language_model(folder, torch.float32, torch.device("cpu")) for _ in range(2))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*fan_in_fan_out.*")
        weights = LanguageWeights.adapter(model, LoraSpec(rank=4, alpha=8), seed=0)
        with torch.no_grad():
            for parameter in weights.parameters():
                parameter.fill_(0.1)
        weights.save(tmp_path / "lora")
        loaded = PeftModel.from_pretrained(other.model, str(tmp_path / "lora")).base_model.model
    assert torch.allclose(scores(LanguageModel(loaded, model.tokenizer)), scores(model), atol=WITHIN)


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("glm4_moe", {"gate_up_proj"}),
        ("phimoe", {"router"}),
        ("mamba", {"dt_proj", "out_proj"}),
        ("falcon_h1", {"out_proj"}),
        ("jamba", {"dt_proj"}),
    ],
)
def test_some_layers_have_no_lora(name: str, without: set[str], tmp_path: Path) -> None:
    model = random_language_model(str(folder_of(name, tmp_path)), torch.float32, torch.device("cpu")).model
    ends = {layer.rpartition(".")[2] for layer in linear_layers(model)}
    assert ends
    assert not ends & without
    assert any("attn" in layer or "mixer" in layer or "mamba" in layer for layer in linear_layers(model))


def test_loras_of_layers_that_share_their_weights_are_not_merged(tmp_path: Path) -> None:
    """As in Zamba2, which has one block at several places."""
    model = random_language_model(str(folder_of("llama", tmp_path)), torch.float32, torch.device("cpu"))
    layers = model.model.model.layers
    layers[2].mlp.up_proj.weight = layers[1].mlp.up_proj.weight
    weights = LanguageWeights.adapter(model, LoraSpec(rank=2, alpha=2), seed=0)
    said = r"model.layers.1.mlp.up_proj and model.layers.2.mlp.up_proj share their weights"
    with pytest.raises(ValueError, match=said):
        dict(merged_weights(model.model))
    with pytest.raises(ValueError, match=said):
        weights.merge()


@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1", "mamba2"])
@pytest.mark.parametrize("again", [False, True])
def test_memory_of_models_with_states_is_estimated(name: str, again: bool, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path)
    words = [f"model.path={folder}", "generation={max_tokens: 40, max_prompt_tokens: 24}", "model.train=lora"]
    words += ["rollout={prompts: 2, group: 4, batch: 8, tokens: 4096}", f"model.gradient_checkpointing={again}"]
    recipe = load_recipe("text", words)
    assert isinstance(recipe, TextRecipe)
    found = estimate_text(recipe, [])
    assert (found.prompt, found.scored) == (24, 8)
    language = random_language_model(str(folder), torch.float32, torch.device("cpu"))
    weights = LanguageWeights.adapter(language, lora_spec(recipe.model.lora), seed=0)
    weights.gradient_checkpointing(again)
    assert language.keeps_states
    completions = torch.randint(3, 20, (8, 40), generator=torch.Generator().manual_seed(0)).tolist()

    def work() -> None:
        scored = completion_statistics(
            language, [[4] * 24, [5] * 24], completions, [0] * 4 + [1] * 4, shared_prefix=not again
        )
        weights.backward(scored.log_probs.sum())

    work()  # the gradients stay, and are not counted again
    assert most_bytes(work, tmp_path / "trace.json") == pytest.approx(found.passing["training"], rel=0.12)


def test_states_do_not_grow_with_the_completions(tmp_path: Path) -> None:
    folder = folder_of("mamba2", tmp_path)
    of = [f"model.path={folder}", "rollout={prompts: 1, group: 4, batch: 4}"]
    sizes = []
    for tokens in (40, 400):
        recipe = load_recipe("text", [*of, f"generation={{max_tokens: {tokens}, max_prompt_tokens: 24}}"])
        assert isinstance(recipe, TextRecipe)
        sizes.append(estimate_text(recipe, []).passing["sampling"])
    assert sizes[0] == sizes[1]


OWN_CACHES = {
    "deepseek_v4": {
        "moe_intermediate_size": 32, "num_attention_heads": 4, "n_routed_experts": 4, "head_dim": 16,
        "qk_rope_head_dim": 8, "q_lora_rank": 16, "index_head_dim": 16, "index_n_heads": 2, "num_experts_per_tok": 2,
    },
    "minimax": {"layer_types": ["full_attention", "linear_attention"] * 2, "num_experts_per_tok": 2},
}  # fmt: skip


@pytest.mark.parametrize(("kind", "cache"), [("deepseek_v4", "CSACache"), ("minimax", "MiniMaxCache")])
def test_a_cache_of_a_models_own_kind_is_refused_before_anything_is_sampled(kind: str, cache: str) -> None:
    if kind not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this version of transformers has no {kind}")
    config = AutoConfig.for_model(kind, **SIZES, **OWN_CACHES[kind])
    model = LanguageModel(
        AutoModelForCausalLM.from_config(config).eval(), SimpleNamespace(pad_token_id=1, eos_token_id=0)
    )
    with pytest.raises(ValueError, match=rf"the model keeps its past in .*{cache}.*, whose rows cannot all be chosen"):
        _ = model.keeps_states
