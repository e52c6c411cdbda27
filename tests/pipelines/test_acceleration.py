"""Attention backends, compiled blocks and quantised weights: same method, other arithmetic, and errors that say why."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import nn
from torch._inductor import config as inductor

from flowgrpo.pipelines.acceleration import compile_blocks, use_attention
from flowgrpo.pipelines.denoiser import Denoiser
from flowgrpo.weights.trained import TrainedWeights
from tests.pipelines.trained import SPEC, output, perturb, prediction
from tests.tiny_pipelines import CALL, TINY

pytestmark = pytest.mark.slow


@pytest.fixture
def backends() -> Any:
    """Diffusers keeps the backend that was set last for all models; put the first one back."""
    active = _AttentionBackendRegistry.get_active_backend()[0]
    yield
    _AttentionBackendRegistry.set_active_backend(active)


def test_an_attention_backend_is_set_on_every_block_and_computes_the_same(backends: None) -> None:
    pipe = TINY["flux"]()
    before = output(pipe, "flux")
    use_attention(pipe, "_native_math")
    blocks = [part.processor for part in pipe.transformer.modules() if hasattr(part, "processor")]
    assert {processor._attention_backend for processor in blocks} == {AttentionBackendName._NATIVE_MATH}
    torch.testing.assert_close(output(pipe, "flux"), before)


def test_an_attention_backend_that_cannot_be_had_is_refused_by_its_key(backends: None) -> None:
    with pytest.raises(ValueError, match=r"model.attention 'fast' cannot be used: .*native"):
        use_attention(TINY["flux"](), "fast")
    with pytest.raises(ValueError, match=r"model.attention 'sage' cannot be used: "):
        use_attention(TINY["flux"](), "sage")


def test_attention_without_a_choice_of_backend_is_no_silent_success(backends: None) -> None:
    pipe = TINY["sd3"]()
    for part in pipe.transformer.modules():
        if hasattr(getattr(part, "processor", None), "_attention_backend"):
            pytest.skip("this version of diffusers gives the choice")
    with pytest.raises(ValueError, match=r"SD3Transformer2DModel .* no choice of backend"):
        use_attention(pipe, "native")


@pytest.mark.parametrize("key", ["sd3", "flux", "wan"])
def test_compiled_blocks_predict_and_learn_the_same_and_replay_exactly(key: str) -> None:
    plain, pipe = TINY[key](), TINY[key]()
    eager, weights = (TrainedWeights.lora(p, SPEC, seed=0) for p in (plain, pipe))
    perturb(eager)
    perturb(weights)
    assert compile_blocks(pipe, backend="aot_eager") == 2
    sampled = output(pipe, key)
    assert not sampled.requires_grad
    trained = prediction(pipe, key)
    assert torch.equal(sampled, trained)
    torch.testing.assert_close(sampled, output(plain, key))
    trained.square().sum().backward()
    prediction(plain, key).square().sum().backward()
    for mine, theirs in zip(weights.parameters(), eager.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_compiled_denoiser_passes_the_self_check_in_both_grad_modes_and_follows_the_weights() -> None:
    pipe = TINY["flux"]()
    weights = TrainedWeights.lora(pipe, SPEC, seed=0)
    compile_blocks(pipe, backend="aot_eager")
    denoiser = Denoiser(pipe, num_steps=3, call=CALL["flux"])
    assert denoiser.self_check(["red circle", "two stars"]) == "direct"
    x, texts = torch.randn(2, *denoiser.probe.latent_shape), ["red circle", "two stars"]
    with torch.no_grad():
        before = denoiser.velocity(x, 1, texts)
    assert torch.equal(denoiser.velocity(x, 1, texts), before)
    perturb(weights)
    moved = denoiser.velocity(x, 1, texts)
    assert moved.requires_grad
    assert not torch.equal(moved, before)
    with torch.no_grad(), weights.reference():
        assert torch.equal(denoiser.velocity(x, 1, texts), before)


@pytest.mark.skipif(shutil.which("g++") is None, reason="the default compiler needs a C++ compiler")
def test_rollout_and_training_run_one_graph_of_the_default_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    # The compiler would try each kind of vectors that the CPU names in processes of its own, which import torch.
    monkeypatch.setattr(inductor.cpp, "vec_isa_ok", True)
    pipe = TINY["sd3"]()
    TrainedWeights.lora(pipe, SPEC, seed=0)
    compile_blocks(pipe)
    assert torch.equal(output(pipe, "sd3"), prediction(pipe, "sd3"))


def test_a_model_without_repeated_blocks_is_not_compiled() -> None:
    class Single(nn.Module):
        pass

    class Pipe:
        transformer = Single()

    with pytest.raises(ValueError, match=r"Single \(transformer\) has no repeated blocks"):
        compile_blocks(Pipe())
