"""Language models of other people: what is missing is said, their code is not run, and layers are computed again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowgrpo.text.model import LanguageModel, LanguageWeights, linear_layers, load_language_model
from flowgrpo.text.positions import room_of
from flowgrpo.text.scoring import completion_log_probs
from flowgrpo.weights.lora import LoraSpec

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(random_language_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(random_language_folder, tmp_path / "model"))


def test_weights_that_are_missing_are_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    gone = next(name for name in weights if "mlp" in name)
    save_file({name: value for name, value in weights.items() if name != gone}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"lacks weights of \w+: {gone}\. They would be drawn at random"):
        load_language_model(str(folder))


def changed(folder: Path, **entries: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))


def test_code_of_a_model_is_not_run(folder: Path) -> None:
    (folder / "own.py").write_text("raise SystemExit('the code of the model was run')")
    brought = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    changed(folder, auto_map=brought)
    load_language_model(str(folder))  # transformers has this class, so its own is taken
    changed(folder, auto_map=brought, model_type="own")
    with pytest.raises(ValueError, match=r"brings its own code.*not run"):
        load_language_model(str(folder))


def test_a_padding_token_without_an_embedding_is_replaced(language: LanguageModel) -> None:
    assert language.pad == language.tokenizer.pad_token_id
    language.tokenizer.add_special_tokens({"pad_token": "[NEW]"})
    assert language.tokenizer.pad_token_id >= language.model.get_input_embeddings().num_embeddings
    assert language.pad == language.ends[0]


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_activations_are_computed_again_and_gradients_stay(kind: str, language: LanguageModel) -> None:
    make = LanguageWeights.whole if kind == "full" else lambda own: LanguageWeights.adapter(own, LoraSpec(4), seed=0)
    weights = make(language)
    ids = torch.arange(3, 9)[None].expand(4, -1).contiguous()
    kept: list[int] = []

    def pack(value: Tensor) -> Tensor:
        kept.append(value.numel())
        return value

    found = []
    for on in (False, True, False):
        weights.gradient_checkpointing(on)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            loss = language.model(input_ids=ids, use_cache=False).logits.float().logsumexp(-1).sum()
        held = sum(kept)
        loss.backward()
        named = weights.named_parameters()
        found.append((held, {name: value.grad.clone() for name, value in named.items() if value.grad is not None}))
        for value in named.values():
            value.grad = None
    (plain, gradients), (fewer, again), (after, _) = found
    assert fewer < 0.6 * plain
    assert after == plain
    assert gradients
    assert all(torch.equal(gradients[name], again[name]) for name in gradients)


def test_layers_that_text_does_not_pass_have_no_adapter(language: LanguageModel) -> None:
    """Gemma 3 also reads images. Every adapted layer gets a gradient from text alone."""
    from transformers import AutoModelForCausalLM, Gemma3Config

    text = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    vision = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = Gemma3Config(
        text_config={**text, "head_dim": 16, "intermediate_size": 64, "vocab_size": len(language.tokenizer)},
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    assert [name for name, _ in model.named_modules() if name.endswith("vision_tower")]
    own = LanguageModel(model, language.tokenizer)
    weights = LanguageWeights.adapter(own, LoraSpec(rank=2, init="default"), seed=0)
    assert not [name for name in weights.named_parameters() if "vision" in name]
    log_probs, _ = completion_log_probs(own, [[4, 5]], [[6, 7, 8], [5, 5, 5]], [0, 0])
    weights.backward(log_probs.sum())
    assert all(parameter.grad is not None for parameter in weights.parameters())
    assert len(weights.parameters()) == 2 * 2 * 7  # A and B of seven layers in each of two blocks


def test_all_layers_but_the_output_have_an_adapter_in_a_model_of_text_alone() -> None:
    from transformers import AutoModelForMaskedLM, BertConfig, ModernBertConfig

    sizes = {"vocab_size": 30, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    bert = AutoModelForMaskedLM.from_config(BertConfig(**sizes, intermediate_size=64))
    modern = AutoModelForMaskedLM.from_config(ModernBertConfig(**sizes, **ends, intermediate_size=64))
    assert "cls.predictions.transform.dense" in linear_layers(bert)
    assert "head.dense" in linear_layers(modern)
    for model in (bert, modern):
        every = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
        assert len(linear_layers(model)) == len(every) - 1


@pytest.mark.parametrize(
    ("rope", "room"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, None),
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, 64),
        ({"rope_type": "longrope", "original_max_position_embeddings": 16, "long_factor": [2.0] * 4,
          "short_factor": [1.0] * 4, "factor": 4.0, "rope_theta": 1e4}, 16),
    ],
)  # fmt: skip
def test_positions_that_turn_with_the_length_of_a_row_have_an_end(rope: dict[str, Any], room: int | None) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, rope_scaling=rope,
    )  # fmt: skip
    assert room_of(LlamaForCausalLM(config)) == room
