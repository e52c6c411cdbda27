"""vLLM as a sampler: the requests to it, the use of its answers, and that it follows the trained weights."""

import inspect
import os
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from flowgrpo.text.model import LanguageModel, LanguageWeights, load_language_model, merged_weights
from flowgrpo.text.sampling import completion_keys, sample_completions
from flowgrpo.text.scoring import completion_log_probs
from flowgrpo.text.vllm_engine import VllmEngine
from flowgrpo.weights.lora import LoraSpec
from tests.text import stub_vllm

PROMPTS = ["1+2=", "47-85=", "9"]
OWNER = [0, 0, 1, 1, 2, 2]
SPEC = LoraSpec(rank=4, alpha=8.0)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The stand-in, in the place of the package."""
    monkeypatch.setitem(sys.modules, "vllm", stub_vllm)
    monkeypatch.setattr(stub_vllm.LLM, "made", [])
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    return stub_vllm


def engine_of(language: LanguageModel, **options: Any) -> VllmEngine:
    return VllmEngine(language, dtype="float32", seed=3, longest=40, options=options)


def perturb(weights: LanguageWeights) -> None:
    """Move the trained weights, including B, which begins at 0."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in weights.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    weights.write()


@pytest.mark.parametrize(
    "how",
    [{}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.8}, {"temperature": 0.0}],
)
def test_it_samples_what_its_engine_draws(vllm: ModuleType, language: LanguageModel, how: dict[str, Any]) -> None:
    prompts = [language.encode(text) for text in PROMPTS]
    keys = completion_keys([11, 12, 13], 2)
    wanted = sample_completions(language, prompts, OWNER, keys, max_tokens=6, **how)
    found = engine_of(language)(language, prompts, OWNER, keys, max_tokens=6, **how)
    assert found.ids == wanted.ids
    assert found.ended == wanted.ended
    for mine, theirs in zip(found.log_probs, wanted.log_probs):
        assert mine == pytest.approx(theirs, abs=1e-4)


def test_an_end_is_told_from_a_cut(vllm: ModuleType, language: LanguageModel) -> None:
    prompt = language.encode("1+2=")
    found = engine_of(language)(language, [prompt], [0] * 64, completion_keys([3], 64), max_tokens=5)
    assert 0 < sum(found.ended) < 64
    for ids, chances, ended in zip(found.ids, found.log_probs, found.ended):
        assert len(ids) == len(chances)
        assert ended == (ids[-1] in language.ends)


def test_a_text_that_ends_a_completion_is_passed_on(vllm: ModuleType, language: LanguageModel) -> None:
    prompt, keys = language.encode("1+2="), completion_keys([3], 64)
    found = engine_of(language)(language, [prompt], [0] * 64, keys, max_tokens=5, stop=["7", "12"])
    own = sample_completions(language, [prompt], [0] * 64, keys, max_tokens=5, stop=["7", "12"])
    assert (found.ids, found.ended) == (own.ids, own.ended)
    assert any(ended and ids[-1] not in language.ends for ids, ended in zip(found.ids, found.ended))


def test_vllm_is_given_what_the_recipe_says(vllm: ModuleType, language: LanguageModel) -> None:
    engine_of(language, gpu_memory_utilization=0.5, enforce_eager=True)
    [made] = vllm.LLM.made
    assert made.settings == {
        "dtype": "float32", "seed": 3, "max_model_len": 40, "gpu_memory_utilization": 0.5, "enforce_eager": True,
        "logprobs_mode": "processed_logprobs",
    }  # fmt: skip
    # The weights can only be handed over within one process.
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    language.model.config.max_position_embeddings = 16
    engine_of(language)
    assert vllm.LLM.made[1].settings["max_model_len"] == 16
    assert vllm.LLM.made[1].settings["gpu_memory_utilization"] == 0.3


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_change_of_the_weights_reaches_it(vllm: ModuleType, language: LanguageModel, kind: str) -> None:
    adapted = kind == "lora"
    weights = LanguageWeights.adapter(language, SPEC, seed=0) if adapted else LanguageWeights.whole(language)
    engine = engine_of(language)
    prompts = [language.encode(text) for text in PROMPTS]
    keys = completion_keys([11, 12, 13], 2)
    before = engine(language, prompts, OWNER, keys, max_tokens=6)
    perturb(weights)
    after = engine(language, prompts, OWNER, keys, max_tokens=6)
    wanted = sample_completions(language, prompts, OWNER, keys, max_tokens=6)
    assert after.ids == wanted.ids
    assert after.ids != before.ids
    [made] = vllm.LLM.made
    assert made.reloads == 2
    ids, owner = after.ids, OWNER
    mine = completion_log_probs(language, prompts, ids, owner)[0]
    theirs = completion_log_probs(made.language, prompts, ids, owner)[0]
    assert torch.allclose(mine, theirs, atol=1e-4)


def test_merged_weights_are_those_of_the_formula(language: LanguageModel, random_language_folder: Any) -> None:
    base = load_language_model(str(random_language_folder))
    weights = LanguageWeights.adapter(language, SPEC, seed=0)
    perturb(weights)
    trained = {name: p.detach().clone() for name, p in language.model.named_parameters()}
    own = dict(base.model.named_parameters())
    found = dict(merged_weights(language.model))
    assert list(found) == list(own)
    moved = 0
    for name, weight in found.items():
        layer = name.removesuffix(".weight")
        delta = 0.0
        if f"{layer}.lora_A.default.weight" in trained:
            a, b = (trained[f"{layer}.lora_{part}.default.weight"] for part in "AB")
            delta = SPEC.alpha / SPEC.rank * b @ a
            moved += 1
        assert torch.allclose(weight, own[name] + delta, atol=1e-6), name
    assert moved == 14  # seven linear layers in each of two blocks
    for name, parameter in language.model.named_parameters():
        assert torch.equal(parameter, trained[name])
    with weights.reference():
        assert all(torch.equal(weight, own[name]) for name, weight in merged_weights(language.model))


def test_merged_weights_of_half_precision_are_rounded_once(random_language_folder: Any) -> None:
    language = load_language_model(str(random_language_folder), dtype=torch.bfloat16)
    weights = LanguageWeights.adapter(language, SPEC, seed=0)
    perturb(weights)
    trained = dict(language.model.named_parameters())
    layer = "model.layers.0.self_attn.q_proj"
    a, b = (trained[f"{layer}.lora_{part}.default.weight"] for part in "AB")
    found = dict(merged_weights(language.model))[f"{layer}.weight"]
    wanted = trained[f"{layer}.base_layer.weight"].float() + SPEC.alpha / SPEC.rank * b.float() @ a.float()
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, wanted.to(torch.bfloat16))


def test_a_full_model_is_handed_over_as_it_is(language: LanguageModel) -> None:
    weights = LanguageWeights.whole(language)
    perturb(weights)
    own = dict(language.model.named_parameters())
    found = dict(merged_weights(language.model))
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], own[name]) and not found[name].requires_grad for name in own)


def test_prompts_that_vllm_cannot_forget_are_no_base_to_sample_from(
    vllm: ModuleType, language: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(language)
    monkeypatch.setattr(vllm.LLM, "reset_prefix_cache", lambda self: False)
    with pytest.raises(RuntimeError, match="did not clear its cache of prompts"):
        engine(language, [language.encode("9")], [0], [1], max_tokens=2)


def test_a_completion_that_was_given_up_is_no_completion(
    vllm: ModuleType, language: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(language)
    given = vllm.CompletionOutput(0, "", [], 0.0, [], "abort")
    monkeypatch.setattr(vllm.LLM, "generate", lambda *a, **k: [vllm.RequestOutput([4], [given])])
    with pytest.raises(RuntimeError, match="by 'abort'"):
        engine(language, [language.encode("9")], [0], [1], max_tokens=2)


@pytest.mark.parametrize("name", ["model", "logprobs_mode", "tensor_parallel_size"])
def test_what_follows_from_the_recipe_is_no_option(vllm: ModuleType, language: LanguageModel, name: str) -> None:
    with pytest.raises(ValueError, match=f"generation.engine_options has {name}"):
        engine_of(language, **{name: 2})


def test_a_missing_package_is_named_with_its_extra(language: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match="pip install vllm"):
        engine_of(language)


def test_the_stand_in_takes_what_vllm_takes() -> None:
    real: Any = pytest.importorskip("vllm")
    for name in ("__init__", "generate", "collective_rpc", "reset_prefix_cache"):
        own = inspect.signature(getattr(stub_vllm.LLM, name)).parameters
        assert own.keys() <= inspect.signature(getattr(real.LLM, name)).parameters.keys(), name
    fields = stub_vllm.SamplingParams.__dataclass_fields__
    assert all(hasattr(real.SamplingParams(), name) for name in fields)
    assert "prompt_token_ids" in real.TokensPrompt.__annotations__
