"""Trained weights: what trains, what stays, the reference, and the state for checkpoints."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from flowgrpo.pipelines.conformance import conform as run
from flowgrpo.pipelines.denoiser import Denoiser
from flowgrpo.weights.trained import Ema, LoraSpec, TrainedWeights, trainable_modules
from tests.pipelines.trained import KEYS, SPEC, output, perturb, prediction
from tests.tiny_pipelines import TINY

pytestmark = pytest.mark.slow


def tensors(pipe: DiffusionPipeline) -> dict[str, Tensor]:
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    return {
        f"{name}.{key}": tensor.detach().clone()
        for name, part in parts.items()
        for key, tensor in part.state_dict().items()
    }


@pytest.mark.parametrize("key", KEYS)
def test_a_lora_step_moves_the_adapter_and_nothing_else(key: str) -> None:
    pipe = TINY[key]()
    before = tensors(pipe)
    weights = TrainedWeights.lora(pipe, SPEC, seed=0)
    trained = [p for part in pipe.components.values() if isinstance(part, nn.Module) for p in part.parameters()]
    assert {id(p) for p in trained if p.requires_grad} == {id(p) for p in weights.parameters()}
    assert all(".lora_" in name and name.startswith("transformer.") for name in weights.named_parameters())

    old = weights.state_dict()
    loss = prediction(pipe, key).square().sum()
    loss.backward()
    torch.optim.SGD(weights.parameters(), lr=0.1).step()
    moved = {name for name, tensor in weights.state_dict().items() if not torch.equal(tensor, old[name])}
    # A receives no gradient while B is zero.
    assert moved
    assert all(".lora_B." in name for name in moved)
    after = {name.replace(".base_layer.", "."): tensor for name, tensor in tensors(pipe).items()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_pipeline_as_it_is_has_the_arithmetic_that_a_run_begins_with(kind: Literal["lora", "full"]) -> None:
    """If a weight can have a gradient, torch may multiply in another order, even if no gradient is asked for."""
    trained, plain = TINY["sd3"](), TINY["sd3"]()
    if kind == "lora":
        TrainedWeights.lora(trained, SPEC, seed=0)
    else:
        TrainedWeights.full(trained)
    assert TrainedWeights.given(plain, kind).kind == kind
    for name, part in plain.components.items():
        if isinstance(part, nn.Module):
            own = {key.replace(".base_layer", ""): p for key, p in trained.components[name].named_parameters()}
            assert {key: p.requires_grad for key, p in part.named_parameters()} == {
                key: p.requires_grad for key, p in own.items() if ".lora_" not in key
            }


def test_default_targets_are_the_attention_projections() -> None:
    names = TrainedWeights.lora(TINY["sd3"](), SPEC, seed=0).named_parameters()
    endings = {name.split(".lora_")[0].split("attn.")[1] for name in names}
    joint = {"add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"}
    assert endings == {"to_q", "to_k", "to_v", "to_out.0"} | joint
    # Two joint blocks of 8 projections less the last block's to_add_out, which does not exist.
    assert len(names) == 2 * (2 * 8 - 1)


def test_targets_choose_layers_by_whole_name_endings() -> None:
    pipe = TINY["sd3"]()
    weights = TrainedWeights.lora(pipe, LoraSpec(rank=2, targets=("attn.to_q", "proj_out")), seed=0)
    layers = {name.split(".lora_")[0] for name in weights.named_parameters()}
    blocks = {f"transformer.transformer_blocks.{i}.attn.to_q" for i in range(2)}
    assert layers == blocks | {"transformer.proj_out"}
    assert weights.named_parameters()["transformer.proj_out.lora_A.default.weight"].shape == (2, 16)


@pytest.mark.parametrize("key", KEYS)
def test_reference_of_a_lora_is_the_original_model_exactly(key: str) -> None:
    pipe = TINY[key]()
    original = output(pipe, key)
    weights = TrainedWeights.lora(pipe, SPEC, seed=0)
    assert torch.equal(output(pipe, key), original)
    perturb(weights)
    changed = output(pipe, key)
    assert (changed - original).abs().max() > 1e-2
    with weights.reference():
        with weights.reference():
            pass
        assert torch.equal(output(pipe, key), original)
    with pytest.raises(RuntimeError, match="inside"), weights.reference():
        raise RuntimeError("inside")
    assert torch.equal(output(pipe, key), changed)
    assert all(parameter.requires_grad for parameter in weights.parameters())


def test_reference_of_full_weights_is_the_kept_copy_and_comes_back_bitwise() -> None:
    pipe = TINY["sd3"]()
    original = output(pipe, "sd3")
    weights = TrainedWeights.full(pipe, keep_reference=True)
    perturb(weights)
    changed, state = output(pipe, "sd3"), weights.state_dict()
    for _ in range(2):
        with weights.reference(), weights.reference():
            assert torch.equal(output(pipe, "sd3"), original)
        assert torch.equal(output(pipe, "sd3"), changed)
    assert all(torch.equal(tensor, state[name]) for name, tensor in weights.state_dict().items())
    with pytest.raises(ValueError, match="keep_reference=True"), TrainedWeights.full(pipe).reference():
        pass


def test_initialisation_depends_on_the_seed_only_and_leaves_global_randomness_alone() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = TrainedWeights.lora(TINY["wan"](), SPEC, seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    again = TrainedWeights.lora(TINY["wan"](), SPEC, seed=3).state_dict()
    other = TrainedWeights.lora(TINY["wan"](), SPEC, seed=4).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())
    assert all(torch.equal(other[name], first[name]) == (".lora_B." in name) for name in first)


def test_initial_distributions() -> None:
    gaussian = TrainedWeights.lora(TINY["wan"](), LoraSpec(rank=5), seed=0).named_parameters()
    drawn = torch.cat([p.detach().flatten() for name, p in gaussian.items() if ".lora_A." in name])
    # 5 standard errors of a standard deviation estimated from that many draws.
    assert drawn.std().item() * 5 == pytest.approx(1, abs=5 / math.sqrt(2 * len(drawn)))
    uniform = TrainedWeights.lora(TINY["wan"](), LoraSpec(rank=5, init="default"), seed=0).named_parameters()
    for name, parameter in uniform.items():
        if ".lora_A." in name:
            bound = 1 / math.sqrt(parameter.shape[1])
            assert 0.9 * bound < parameter.detach().abs().max() <= bound
        else:
            assert not parameter.any()


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_gradient_checkpointing_recomputes_the_same_gradients(kind: str) -> None:
    pipe = TINY["sd3"]()
    weights = TrainedWeights.lora(pipe, SPEC, seed=0) if kind == "lora" else TrainedWeights.full(pipe)
    perturb(weights)
    calls = []
    pipe.transformer.transformer_blocks[0].attn.register_forward_hook(lambda *_: calls.append(1))
    gradients = []
    for on, passes in ((False, 1), (True, 2), (False, 1)):
        weights.gradient_checkpointing(on)
        calls.clear()
        for parameter in weights.parameters():
            parameter.grad = None
        prediction(pipe, "sd3").square().mean().backward()
        assert len(calls) == passes
        gradients.append([None if p.grad is None else p.grad.clone() for p in weights.parameters()])
    assert sum(gradient is not None and bool(gradient.any()) for gradient in gradients[0]) > 20
    for other in gradients[1:]:
        for a, b in zip(gradients[0], other):
            assert (a is None and b is None) or torch.equal(a, b)


def test_gradient_checkpointing_that_changes_the_prediction_is_refused() -> None:
    """Chroma's leaves the attention mask of its single blocks out (diffusers 0.42)."""
    weights = TrainedWeights.full(run.TINY["ChromaPipeline"].fresh())
    with pytest.raises(ValueError, match=r"leaves the attention mask out.*turn gradient_checkpointing off"):
        weights.gradient_checkpointing(True)
    weights.gradient_checkpointing(False)


def test_a_class_without_a_lora_or_checkpointing_is_told_what_to_write() -> None:
    pipe = run.TINY["LongCatAudioDiTPipeline"].fresh()
    with pytest.raises(ValueError, match=r"no LoRA for this class; write model\.train: full"):
        TrainedWeights.lora(pipe, SPEC, seed=0)
    weights = TrainedWeights.full(pipe)
    with pytest.raises(ValueError, match=r"write model\.gradient_checkpointing: false"):
        weights.gradient_checkpointing(True)
    weights.gradient_checkpointing(False)


def test_blocks_called_with_keywords_can_be_checkpointed() -> None:
    """As those of HunyuanImage, whose keywords the library's own checkpointing does not take (diffusers 0.42)."""
    tiny = run.TINY["HunyuanImagePipeline"]
    pipe = tiny.fresh()
    assert tiny.adjust is not None
    tiny.adjust(pipe)
    weights = TrainedWeights.full(pipe)
    d = Denoiser(pipe, num_steps=3, call=tiny.call, variant="direct")
    x = d.initial_noise([torch.Generator().manual_seed(0)])
    gradients = []
    for on in (False, True):
        weights.gradient_checkpointing(on)
        loss = d.velocity(x, 1, ["a star"]).square().mean()
        gradients.append(torch.autograd.grad(loss, pipe.transformer.proj_out.weight)[0])
    assert bool(gradients[0].any())
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_state_round_trip_is_exact_and_independent_of_later_training(kind: str) -> None:
    def made() -> TrainedWeights:
        pipe = TINY["sana"]()
        return TrainedWeights.lora(pipe, SPEC, seed=0) if kind == "lora" else TrainedWeights.full(pipe)

    weights, fresh = made(), made()
    perturb(weights)
    state, expected = weights.state_dict(), output(weights.pipe, "sana")
    perturb(weights, seed=1)
    assert not torch.equal(output(weights.pipe, "sana"), expected)
    fresh.load_state_dict(state)
    assert torch.equal(output(fresh.pipe, "sana"), expected)
    assert list(state) == list(fresh.named_parameters())


def test_a_wrong_state_is_refused_by_name_and_changes_nothing() -> None:
    weights = TrainedWeights.lora(TINY["sana"](), SPEC, seed=0)
    before = weights.state_dict()
    state = {name: tensor + 1 for name, tensor in before.items()}
    first, second = list(state)[:2]
    state["transformer.unknown"] = state.pop(first)
    with pytest.raises(ValueError, match=rf"missing: {first}; unexpected: transformer\.unknown;"):
        weights.load_state_dict(state)
    state[second] = state[second][:1]
    with pytest.raises(ValueError, match=rf"shape of {second}: \[1, \d+\] given"):
        weights.load_state_dict(state, strict=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights.state_dict().items())

    state[second] = before[second] + 1
    weights.load_state_dict(state, strict=False)
    now = weights.state_dict()
    assert torch.equal(now[first], before[first])
    assert torch.equal(now[second], before[second] + 1)


def test_another_rank_is_refused_in_few_words() -> None:
    state = TrainedWeights.lora(TINY["sana"](), LoraSpec(rank=2), seed=0).state_dict()
    weights = TrainedWeights.lora(TINY["sana"](), LoraSpec(rank=3), seed=0)
    assert len(state) > 8
    with pytest.raises(
        ValueError, match=rf"and {len(state) - 2} more; give a state that was saved with .* rank"
    ) as caught:
        weights.load_state_dict(state)
    assert len(str(caught.value)) < 600


def test_errors_say_what_to_write_instead() -> None:
    pipe = TINY["wan"]()
    with pytest.raises(ValueError, match=r"no linear layer named to_p; .* to_q"):
        TrainedWeights.lora(pipe, LoraSpec(targets=("to_q", "to_p")), seed=0)
    TrainedWeights.lora(pipe, SPEC, seed=0)
    with pytest.raises(ValueError, match="already has the adapters default"):
        TrainedWeights.lora(pipe, SPEC, seed=0)
    pipe.transformer = None
    with pytest.raises(ValueError, match=r"no `transformer` or `unet` to train \(modules: text_encoder, vae\)"):
        trainable_modules(pipe)
    for fields in ({"rank": 0}, {"alpha": 0}, {"targets": ()}, {"targets": "to_q"}, {"dropout": 1.0}):
        with pytest.raises(ValueError, match=f"LoraSpec.{next(iter(fields))} is"):
            LoraSpec(**fields)
    with pytest.raises(ValueError, match="'gaussian' or 'default'"):
        LoraSpec(init="zero")  # type: ignore[arg-type]
    weights = TrainedWeights.full(TINY["wan"]())
    for options, word in (({"decay": 1.0}, "decay"), ({"every": 0}, "every 0")):
        with pytest.raises(ValueError, match=word):
            Ema(weights, **options)
