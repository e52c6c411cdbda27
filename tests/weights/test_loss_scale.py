"""Gradients of models in float16: scaled losses keep what the format alone would lose."""

import gc
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn

from flowgrpo.weights.trained import LoraSpec, TrainedWeights

SIZES = (1e-3, 1e-6, 1e-9)


def weights_of(kind: str, dtype: torch.dtype) -> TrainedWeights:
    """The trained weights of a small SD3 transformer, the same for every dtype up to rounding."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = SD3Transformer2DModel(
            sample_size=16, patch_size=2, in_channels=4, num_layers=3, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=16, out_channels=4,
            pos_embed_max_size=16, qk_norm="rms_norm",
        )  # fmt: skip
    for part in module.modules():
        for key, parameter in part.named_parameters(recurse=False):
            part.register_parameter(key, nn.Parameter(parameter.detach().half().to(dtype)))
    pipe = SimpleNamespace(transformer=module.eval(), components={"transformer": module})
    if kind == "full":
        return TrainedWeights.full(pipe)
    made = TrainedWeights.lora(pipe, LoraSpec(rank=4, alpha=8, init="gaussian"), seed=0)
    for name, parameter in made.named_parameters().items():
        if "lora_B" in name:
            parameter.data = 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    made.write()
    return made


def loss_of(weights: TrainedWeights, size: float, seed: int = 0) -> Tensor:
    """A loss whose gradient in each predicted number is about `size`."""
    draw = torch.Generator().manual_seed(seed)
    module: Any = weights.modules["transformer"]
    x, texts, pooled, direction = (
        torch.randn(*shape, generator=draw) for shape in ((2, 4, 16, 16), (2, 5, 32), (2, 16), (2, 4, 16, 16))
    )
    predicted = module(
        x.to(module.dtype), encoder_hidden_states=texts.to(module.dtype),
        pooled_projections=pooled.to(module.dtype), timestep=torch.tensor([300.0, 700.0]).to(module.dtype),
    ).sample  # fmt: skip
    return size * (predicted.float() * direction).sum()


def flat(gradients: list[Tensor | None]) -> Tensor:
    return torch.cat([gradient.detach().float().flatten() for gradient in gradients if gradient is not None])


def accumulated(weights: TrainedWeights) -> Tensor:
    return flat([parameter.grad for parameter in weights.parameters()])


def cosine(found: Tensor, wanted: Tensor) -> float:
    """The cosine of vectors of any length: torch's own function takes short ones for longer."""
    found, wanted = found.double(), wanted.double()
    return float((found / found.norm()) @ (wanted / wanted.norm()))


def alike(found: Tensor, wanted: Tensor) -> None:
    assert cosine(found, wanted) > 0.999
    assert float(found.double().norm() / wanted.double().norm()) == pytest.approx(1.0, abs=0.01)


@pytest.fixture(scope="module", params=["lora", "full"])
def exact(request: pytest.FixtureRequest) -> tuple[str, Tensor]:
    """A kind of training, and its gradient in float32 for a loss of size 1."""
    weights = weights_of(request.param, torch.float32)
    weights.backward(loss_of(weights, 1.0))
    return request.param, accumulated(weights)


@pytest.mark.parametrize("size", SIZES)
def test_small_gradients_are_those_of_float32(exact: tuple[str, Tensor], size: float) -> None:
    kind, wanted = exact
    weights = weights_of(kind, torch.float16)
    weights.backward(loss_of(weights, size))
    assert all(
        parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in weights.parameters()
    )
    alike(accumulated(weights), size * wanted)
    alike(flat(weights.gradients(loss_of(weights, size))), size * wanted)


def test_without_the_scale_they_would_be_lost() -> None:
    """The numbers in these tests are so small that float16 loses their digits."""
    wanted = weights_of("lora", torch.float32)
    wanted.backward(loss_of(wanted, 1e-6))
    weights = weights_of("lora", torch.float16)
    loss_of(weights, 1e-6).backward()
    assert cosine(accumulated(weights), accumulated(wanted)) < 0.9


def test_losses_of_unequal_size_add_up(exact: tuple[str, Tensor]) -> None:
    kind, _ = exact
    sums = []
    for dtype in (torch.float32, torch.float16):
        weights = weights_of(kind, dtype)
        for seed, size in enumerate((1e-6, 3e-4, 2e-6)):
            weights.backward(loss_of(weights, size, seed))
        sums.append(accumulated(weights))
    alike(sums[1], sums[0])


def test_one_loss_of_several_evaluations(exact: tuple[str, Tensor]) -> None:
    kind, _ = exact
    sums = []
    for dtype in (torch.float32, torch.float16):
        weights = weights_of(kind, dtype)
        weights.backward(loss_of(weights, 1e-6, 1) + loss_of(weights, 2e-6, 2))
        sums.append(accumulated(weights))
    alike(sums[1], sums[0])


@pytest.mark.parametrize("size", [0.0, 1e4])
def test_losses_without_a_gradient_and_with_a_large_one(size: float) -> None:
    weights = weights_of("lora", torch.float16)
    weights.backward(loss_of(weights, size))
    found = accumulated(weights)
    assert bool(found.isfinite().all())
    assert bool(found.any()) == (size > 0)


def test_a_loss_that_uses_no_prediction() -> None:
    weights = weights_of("lora", torch.float16)
    weights.backward(torch.stack([parameter.square().sum() for parameter in weights.parameters()]).sum())
    assert all(torch.allclose(p.grad, 2 * p) for p in weights.parameters() if p.grad is not None)


def test_an_evaluation_without_a_backward_pass_keeps_no_graph() -> None:
    weights = weights_of("lora", torch.float16)
    assert weights._scale is not None
    for seed in range(3):
        loss_of(weights, 1.0, seed)
    gc.collect()
    assert [known for known in weights._scale._predictions if known() is not None] == []


def test_a_prediction_may_be_changed_in_place_and_a_module_copied() -> None:
    weights = weights_of("lora", torch.float16)
    module: Any = weights.modules["transformer"]
    x, texts, pooled = (torch.ones(shape).half() for shape in ((1, 4, 16, 16), (1, 5, 32), (1, 16)))
    given = {"encoder_hidden_states": texts, "pooled_projections": pooled, "timestep": torch.tensor([500.0]).half()}
    once = module(x, **given).sample
    twice = module(x, **given).sample
    twice *= 2
    weights.backward(1e-6 * twice.float().sum())
    doubled = accumulated(weights)
    for parameter in weights.parameters():
        parameter.grad = None
    weights.backward(1e-6 * once.float().sum())
    alike(doubled, 2 * accumulated(weights))
    assert pickle.loads(pickle.dumps(weights._scale)).factor == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_formats_have_no_scale(dtype: torch.dtype) -> None:
    assert weights_of("lora", dtype)._scale is None
