"""Costs counted on `meta` against the same classes really run: operations, saved bytes, and numbers of parameters."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from peft.tuners.lora import Linear
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from flowgrpo.estimate.footprint import Footprint, LiveBytes, Remembered, decoding, footprint
from flowgrpo.estimate.known_models import known_config
from flowgrpo.pipelines.architectures import architecture_of, built, latent_shape
from flowgrpo.pipelines.families import FAMILIES
from flowgrpo.pipelines.known_pipelines import (
    BYT5_SMALL,
    CLIP_G,
    CLIP_L,
    CLIP_L_PROJECTED,
    GEMMA3_12B,
    KNOWN,
    LLAMA3_8B,
    LTX2_CONNECTORS,
    LTX2_SOUND,
    LTX2_VOCODER,
    MISTRAL_SMALL,
    QWEN3_4B,
    QWEN3_8B,
    QWEN_VL,
    QWEN_VL_TEXT,
    SIGLIP,
    T5_XXL,
    UMT5_XXL,
)
from flowgrpo.weights.lora import LoraSpec
from flowgrpo.weights.lora_layer import AddingLora
from flowgrpo.weights.trained import TrainedWeights
from tests.allocation import most_bytes

LATENT, TEXT, WIDTH, SOUND = (4, 16, 16), 12, 64, 10
HEADS = {"num_attention_heads": 4, "attention_head_dim": 16}
ROPE = {"axes_dims_rope": [4, 6, 6], "in_channels": 16}
TINY: dict[str, dict[str, Any]] = {
    "SD3Transformer2DModel": {
        **HEADS, "num_layers": 5, "caption_projection_dim": 64, "joint_attention_dim": 32, "pooled_projection_dim": 48,
        "in_channels": 4, "out_channels": 4, "sample_size": 16, "pos_embed_max_size": 16, "qk_norm": "rms_norm",
        "dual_attention_layers": [0, 1],
    },
    "FluxTransformer2DModel": {
        **HEADS, **ROPE, "num_layers": 2, "num_single_layers": 3, "joint_attention_dim": 32,
        "pooled_projection_dim": 48, "guidance_embeds": True,
    },
    "QwenImageTransformer2DModel": {**HEADS, **ROPE, "num_layers": 3, "joint_attention_dim": 32, "out_channels": 4},
    "Flux2Transformer2DModel": {
        **HEADS, "in_channels": 16, "axes_dims_rope": [4, 4, 4, 4], "num_layers": 2, "num_single_layers": 3,
        "joint_attention_dim": 32, "timestep_guidance_channels": 32,
    },
    "ZImageTransformer2DModel": {
        "in_channels": 4, "dim": 64, "n_layers": 3, "n_refiner_layers": 2, "n_heads": 4, "n_kv_heads": 4,
        "cap_feat_dim": 32, "axes_dims": [8, 4, 4], "axes_lens": [64, 16, 16],
    },
    "HunyuanVideoTransformer3DModel": {
        **HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_single_layers": 3, "num_refiner_layers": 1,
        "text_embed_dim": 32, "pooled_projection_dim": 48, "rope_axes_dim": [4, 6, 6],
    },
    "HunyuanVideo15Transformer3DModel": {
        **HEADS, "in_channels": 9, "out_channels": 4, "num_layers": 3, "num_refiner_layers": 1, "text_embed_dim": 32,
        "text_embed_2_dim": 24, "image_embed_dim": 40, "rope_axes_dim": [4, 6, 6],
    },
    "LTX2VideoTransformer3DModel": {
        **HEADS, "num_layers": 3, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 64,
        "caption_channels": 32,
        "audio_in_channels": 4, "audio_out_channels": 4, "audio_num_attention_heads": 4, "audio_attention_head_dim": 8,
        "audio_cross_attention_dim": 32, "rope_double_precision": False, "rope_type": "split",
    },
    "WanTransformer3DModel": {
        **HEADS, "num_layers": 3, "ffn_dim": 160, "text_dim": 32, "freq_dim": 32, "in_channels": 4, "out_channels": 4,
    },
    "UNet2DConditionModel": {
        "sample_size": 16, "block_out_channels": [32, 64], "layers_per_block": 2, "norm_num_groups": 8,
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"], "cross_attention_dim": 32,
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"], "attention_head_dim": 4,
    },
}  # fmt: skip


# At its peak, this class computes attention of many tokens. Then the kernel of the CPU has buffers of its own, for 256
# queries and 512 keys: their scores, two numbers for each query, and its output. The estimate counts no workspaces.
WORKSPACE = {"HunyuanVideo15Transformer3DModel": 4 * 256 * (512 + 2 + HEADS["attention_head_dim"])}


def latent_of(name: str) -> tuple[int, ...]:
    return (4, 3, 16, 16) if "3D" in name else LATENT


def attention(name: str) -> float:
    """Products of the scores and of the values, by hand: 4 · queries · keys · width a layer."""
    image = 192 if "3D" in name else 64
    joint, video = image + TEXT, 4 * image  # LTX-2 has no patches
    padded = 32  # Z-Image pads texts, and pictures, to multiples of 32 tokens
    return {
        "SD3Transformer2DModel": 4 * WIDTH * (5 * joint**2 + 2 * image**2),
        "FluxTransformer2DModel": 4 * WIDTH * 5 * joint**2,
        "Flux2Transformer2DModel": 4 * WIDTH * 5 * joint**2,
        "ZImageTransformer2DModel": 4 * WIDTH * (2 * image**2 + 2 * padded**2 + 3 * (image + padded) ** 2),
        "HunyuanVideoTransformer3DModel": 4 * WIDTH * (5 * joint**2 + TEXT**2),
        # No patches; texts to be written and pictures are always padded.
        "HunyuanVideo15Transformer3DModel": 4 * WIDTH * (3 * (video + TEXT + 256 + 729) ** 2 + TEXT**2),
        # Video and sound read themselves, the text, and each other. With the sound, the width is half.
        "LTX2VideoTransformer3DModel": 12 * WIDTH * (video**2 + video * TEXT)
        + 6 * WIDTH * (SOUND**2 + SOUND * TEXT + 2 * video * SOUND),
        "QwenImageTransformer2DModel": 4 * WIDTH * 3 * joint**2,
        "WanTransformer3DModel": 4 * WIDTH * 3 * (image**2 + image * TEXT),
        # Two layers on the way down and three up at full resolution, half as wide; one at half of it in the middle.
        "UNet2DConditionModel": 4 * (32 * 5 * (256**2 + 256 * TEXT) + 64 * (64**2 + 64 * TEXT)),
    }[name]


def settings_of(module: Any) -> dict[str, Any]:
    return {**module.config, "sound_tokens": SOUND}


def adapted(module: nn.Module) -> TrainedWeights:
    pipe: Any = SimpleNamespace(components={"transformer": module})
    return TrainedWeights.lora(pipe, LoraSpec(rank=8), seed=0, modules={"transformer": module})


@cache
def counted(name: str, rows: int = 1) -> Footprint:
    module = built(name, TINY[name], torch.float32)
    adapted(module)
    with torch.device("meta"):
        family = FAMILIES[name]
        given = family.inputs(settings_of(module), latent_of(name), TEXT, rows)
        return footprint(module, given, rows, alike=family.alike)


def real(name: str, rows: int = 1) -> tuple[nn.Module, dict[str, Any]]:
    import diffusers

    torch.manual_seed(0)
    module: nn.Module = getattr(diffusers, name).from_config(TINY[name])
    given = FAMILIES[name].inputs(settings_of(module), latent_of(name), TEXT, rows)
    return module, tree_map_only(torch.Tensor, torch.rand_like, given)


def predicted(module: nn.Module, given: dict[str, Any]) -> list[torch.Tensor]:
    return [value for value in tree_leaves(module(**given, return_dict=False)) if isinstance(value, torch.Tensor)]


def total(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.sum() for tensor in tensors]).sum()


@contextmanager
def kept_storages(module: nn.Module) -> Iterator[dict[int, int]]:
    """Bytes of the storages that autograd keeps, without the weights, which are known by their addresses."""
    tables = [v for part in module.modules() for v in vars(part).values() if isinstance(v, torch.Tensor)]
    weights = {p.untyped_storage().data_ptr() for p in (*module.parameters(), *module.buffers(), *tables)}
    found: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


@pytest.mark.parametrize("name", TINY)
def test_parameters_are_those_of_the_real_class(name: str):
    module, _ = real(name)
    shapes = {k: v.shape for k, v in built(name, TINY[name], torch.float32).named_parameters()}
    assert shapes == {k: v.shape for k, v in module.named_parameters()}


@pytest.mark.parametrize("name", TINY)
def test_operations_are_those_torch_counts_in_a_real_evaluation(name: str):
    module, given = real(name)
    adapted(module)
    for layer in module.modules():
        if isinstance(layer, AddingLora):
            layer.__class__ = Linear  # the layer of peft, whose products torch counts
    forward, both = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH):
        with forward, torch.no_grad():
            module(**given, return_dict=False)
        with both:
            total(predicted(module, given)).backward()
    found = counted(name)
    assert found.forward == pytest.approx(forward.get_total_flops(), rel=0.01)
    # A fused kernel computes the scores again in its backward pass: half as much as the attention's forward pass.
    again = 0.5 * attention(name)
    assert found.backward == pytest.approx(both.get_total_flops() - forward.get_total_flops() + again, rel=0.01)


@pytest.mark.parametrize("name", TINY)
def test_operations_are_two_for_each_parameter_and_token_and_the_attention(name: str):
    if name == "ZImageTransformer2DModel" and Version(torch.__version__) < Version("2.9"):
        pytest.skip("older versions of torch have no gradient of a choice by a mask on `meta`")
    module, given = real(name)
    products = 0.0

    def linear(layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        nonlocal products
        weight: Any = layer.weight
        products += 2.0 * weight.numel() * output.numel() / weight.shape[0]

    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.Conv3d):
            layer.register_forward_hook(linear)
    module(**given)
    plain = built(name, TINY[name], torch.float32)
    plain.requires_grad_(True)
    with torch.device("meta"):
        family = FAMILIES[name]
        found = footprint(plain, family.inputs(settings_of(plain), latent_of(name), TEXT, 1), alike=family.alike)
    assert found.forward == pytest.approx(products + attention(name), rel=0.01)
    # For every product the gradient needs two, for inputs and weights; the embeddings' inputs need none.
    assert found.backward == pytest.approx(2 * found.forward + 0.5 * attention(name), rel=0.05)
    # A U-Net has convolutions between its blocks. In HunyuanVideo 1.5, a layer outside of them is always 2048 wide.
    outside = {"UNet2DConditionModel": 0.15, "HunyuanVideo15Transformer3DModel": 0.45}
    assert (1.0 - outside.get(name, 0.1)) * found.forward < found.recompute < found.forward


@pytest.mark.parametrize("name", TINY)
def test_a_frozen_base_makes_the_gradient_cheaper(name: str):
    """In frozen layers only the inputs need a gradient, so without attention it costs what the prediction costs."""
    found, scores = counted(name), attention(name)
    assert found.backward - 2.5 * scores < 1.1 * (found.forward - scores)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", TINY)
def test_saved_bytes_are_what_autograd_keeps(name: str, rows: int):
    module, given = real(name, rows)
    adapted(module)
    with kept_storages(module) as storages:
        module(**given, return_dict=False)
        assert rows * counted(name, rows).saved == pytest.approx(sum(storages.values()), rel=0.02)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", TINY)
def test_kept_bytes_are_those_alive_after_a_real_evaluation(name: str, checkpointing: bool):
    module, given = real(name, 2)
    adapted(module).gradient_checkpointing(checkpointing)
    live = LiveBytes()
    with live:
        predictions = predicted(module, given)
    alive = live.now - sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in predictions}.values())
    found = counted(name, 2)
    assert 2 * (found.kept if checkpointing else found.saved) == pytest.approx(alive, rel=0.05)
    if checkpointing:
        assert found.kept + found.block < found.saved


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", TINY)
def test_no_more_is_allocated_than_was_counted(name: str, checkpointing: bool, tmp_path: Path):
    """Sampling takes the counted memory. Training takes less, because kept and computed tensors overlap."""
    module, given = real(name, 2)
    adapted(module).gradient_checkpointing(checkpointing)

    def predict() -> Any:
        return predicted(module, given)

    def train() -> None:
        total(predict()).backward()

    train()  # the adapter's gradients are there from now on
    cost, trace = counted(name, 2), tmp_path / "trace.json"
    most = most_bytes(torch.no_grad()(predict), trace) - WORKSPACE.get(name, 0)
    assert most == pytest.approx(2 * cost.working, rel=0.01)
    held = 2 * ((cost.kept + cost.block if checkpointing else cost.saved) + cost.working - cost.mask)
    assert 0.7 * held < most_bytes(train, trace) <= held


@pytest.mark.parametrize("name", TINY)
def test_costs_are_of_a_row(name: str):
    two, four = counted(name, 2), counted(name, 4)
    for field in ("forward", "backward", "recompute"):
        assert getattr(four, field) == pytest.approx(getattr(two, field), rel=1e-6)
    # Tables of positions are shared by all rows.
    for field in ("saved", "kept", "block", "working"):
        assert 0.8 * getattr(two, field) < getattr(four, field) <= getattr(two, field)


def test_live_bytes_count_what_is_alive_and_its_most():
    live = LiveBytes()
    with live:
        one = torch.ones(1000)
        two = one + one
        view = two[:10]
        assert live.now == 8000
        del one
        assert live.now == 4000
        del two
        assert live.now == 4000
        del view
        three = torch.ones(100)
        three.add_(1.0)
    assert (live.now, live.most) == (400, 8000)


def told(value: Any) -> Any:
    """What is known of a tensor on `meta`."""
    return value.shape, value.stride(), value.dtype, value.untyped_storage().nbytes()


OPERATIONS = {
    "sum": lambda x: x + x,
    "whole number": lambda x: x.long() * 2,
    "number": lambda x: x.long() * 2.0,
    "truth": lambda x: x.bool() * True,
    "transposed": lambda x: x.t().relu(),
    "in place": lambda x: x.clone().mul_(2).t_(),
    "joined": lambda x: torch.cat([x, x]),
    "two": lambda x: torch.topk(x, 2),
    "parts": lambda x: torch.split(x * 2, 2),
    "part": lambda x: (x * 2)[1:],
    "filled": lambda x: torch.zeros_like(x, dtype=torch.float64),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(6, 2).clone()).conj() * 1j),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_remembered_operation_gives_what_it_gave(name: str):
    operation = OPERATIONS[name]
    for shape in ((3, 4), (4, 3)):
        x = torch.empty(shape, device="meta")
        plain = [told(value) for value in tree_leaves(operation(x))]
        for _ in range(2):
            live = LiveBytes()
            with Remembered(), live:
                made = tree_leaves(operation(x))
                own = {value.untyped_storage()._cdata for value in made}
                assert live.now == sum(
                    {v.untyped_storage()._cdata: v.untyped_storage().nbytes() for v in made}.values()
                )
            assert [told(value) for value in made] == plain
            assert x.untyped_storage()._cdata not in own


def test_what_is_remembered_is_not_computed_again_and_a_view_stays_a_view(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Remembered, "_known", {})
    counter, x = FlopCounterMode(display=False), torch.empty(5, 5, device="meta")
    with counter, Remembered():
        first, second = x @ x, x @ x
        assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
        assert x.t().untyped_storage()._cdata == x.view(25).untyped_storage()._cdata == x.untyped_storage()._cdata
        assert x.mul_(2) is x
        assert x.mul_(2) is x
        y = x.clone()
        for other in (torch.empty(5, 5, device="meta"), torch.empty(5, 5, device="meta")):
            assert y.set_(other).untyped_storage()._cdata == other.untyped_storage()._cdata
    assert counter.get_total_flops() == 2 * 5**3  # a mode around it sees the first product only
    with Remembered(), FlopCounterMode(display=False) as within:
        assert torch.ones(2, 2) @ torch.ones(2, 2) == pytest.approx(torch.full((2, 2), 2.0))
        x @ x
    assert within.get_total_flops() == 2 * 5**3 + 2 * 2**3


SMALL_VAE = {
    "block_out_channels": [16, 32], "down_block_types": ["DownEncoderBlock2D"] * 2, "norm_num_groups": 8,
    "up_block_types": ["UpDecoderBlock2D"] * 2, "layers_per_block": 1, "latent_channels": 4,
}  # fmt: skip


def test_decoding_is_counted_as_in_a_real_one():
    from diffusers import AutoencoderKL

    vae, latent = AutoencoderKL.from_config(SMALL_VAE), torch.rand(1, 4, 16, 16)
    counter, live = FlopCounterMode(display=False), LiveBytes()
    with torch.no_grad(), counter, sdpa_kernel(SDPBackend.MATH):
        vae.decode(latent)
    with torch.no_grad(), live:
        vae.decode(latent)
    found = decoding(built("AutoencoderKL", SMALL_VAE, torch.float32), latent.to("meta"))
    flops, most = found.flops, found.working
    assert flops == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert most == pytest.approx(live.most, rel=0.05)
    assert (found.graph_flops, found.graph) == (0.0, 0)


def test_the_gradient_of_decoding_is_counted_as_in_a_real_one():
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_config(SMALL_VAE).requires_grad_(False)
    latent = torch.rand(1, 4, 16, 16, requires_grad=True)
    counter, weights, kept = FlopCounterMode(display=False), {p.untyped_storage()._cdata for p in vae.parameters()}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage
        return tensor

    with counter, sdpa_kernel(SDPBackend.MATH):
        vae.decode(latent, return_dict=False)[0].sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        vae.decode(latent, return_dict=False)[0].sum().backward()
    found = decoding(built("AutoencoderKL", SMALL_VAE, torch.float32), latent.detach().to("meta"), graph=True)
    # The backward pass of a fused attention computes its products of queries and keys again.
    again = 2 * (16 * 16) ** 2 * 32
    assert found.graph_flops == pytest.approx(counter.get_total_flops() + again, rel=1e-6)
    # On `meta`, older versions of torch keep one more map of full size.
    more = 4 * 32 * 32**2 if Version(torch.__version__) < Version("2.9") else 0
    assert found.graph == pytest.approx(sum(storage.nbytes() for storage in kept.values()) + more, rel=0.05)


@pytest.mark.parametrize(
    ("path", "billions"),
    [
        ("stabilityai/stable-diffusion-3-medium-diffusers", 2.028),
        ("stabilityai/stable-diffusion-3.5-medium", 2.243),
        ("stabilityai/stable-diffusion-3.5-large", 8.057),
        ("black-forest-labs/FLUX.1-dev", 11.90),
        ("black-forest-labs/FLUX.2-dev", 32.22),
        ("black-forest-labs/FLUX.2-klein-4B", 3.876),
        ("black-forest-labs/FLUX.2-klein-9B", 9.079),
        ("Tongyi-MAI/Z-Image-Turbo", 6.155),
        ("hunyuanvideo-community/HunyuanVideo", 12.82),
        ("hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v", 8.327),
        ("Lightricks/LTX-2", 18.88),
        ("Qwen/Qwen-Image", 20.43),
        ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", 1.419),
        ("Wan-AI/Wan2.1-T2V-14B-Diffusers", 14.29),
        ("Wan-AI/Wan2.2-TI2V-5B-Diffusers", 5.000),
        ("stable-diffusion-v1-5/stable-diffusion-v1-5", 0.8595),
        ("stabilityai/stable-diffusion-xl-base-1.0", 2.567),
    ],
)
def test_known_models_have_their_published_sizes(path: str, billions: float):
    module = built(*KNOWN[path].denoiser, torch.bfloat16)
    assert sum(p.numel() for p in module.parameters()) / 1e9 == pytest.approx(billions, rel=1e-3)


def test_latents_have_the_size_of_the_call():
    call = {"height": 512, "width": 512, "num_frames": 33}
    shapes = {path: latent_shape(known, call) for path, known in KNOWN.items()}
    assert shapes["stabilityai/stable-diffusion-3.5-medium"] == (16, 64, 64)
    assert shapes["black-forest-labs/FLUX.1-dev"] == (16, 64, 64)
    assert shapes["Qwen/Qwen-Image"] == (16, 1, 64, 64)
    assert shapes["Wan-AI/Wan2.1-T2V-14B-Diffusers"] == (16, 9, 64, 64)
    assert shapes["Wan-AI/Wan2.2-TI2V-5B-Diffusers"] == (48, 9, 32, 32)
    assert shapes["black-forest-labs/FLUX.2-klein-4B"] == (32, 64, 64)
    assert shapes["Tongyi-MAI/Z-Image"] == (16, 64, 64)
    assert shapes["hunyuanvideo-community/HunyuanVideo"] == (16, 9, 64, 64)


def test_latents_have_the_size_of_the_class_if_the_call_gives_none():
    assert latent_shape(KNOWN["black-forest-labs/FLUX.2-dev"], {}) == (32, 128, 128)
    assert latent_shape(KNOWN["Tongyi-MAI/Z-Image"], {}) == (16, 128, 128)
    assert latent_shape(KNOWN["Wan-AI/Wan2.1-T2V-14B-Diffusers"], {}) == (16, 21, 60, 104)
    assert latent_shape(KNOWN["hunyuanvideo-community/HunyuanVideo"], {}) == (16, 33, 90, 160)
    assert latent_shape(KNOWN["Lightricks/LTX-2"], {}) == (128, 16, 16, 24)
    # A video of 16:9 as large as a square of 640 or 960 pixels: 480×848 or 720×1280.
    hunyuan15 = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-"
    assert latent_shape(KNOWN[f"{hunyuan15}480p_t2v"], {}) == (32, 31, 30, 53)
    assert latent_shape(KNOWN[f"{hunyuan15}720p_i2v_distilled"], {}) == (32, 31, 45, 80)


def test_text_encoders_have_the_numbers_of_their_classes():
    """Shapes of the released configurations, through the classes of transformers."""
    import transformers as hf

    t5 = {"d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu"}
    clip = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    big = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20}
    gemma = hf.Gemma3Config(
        text_config={
            "hidden_size": 3840, "intermediate_size": 15_360, "num_hidden_layers": 48, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 262_208,
        },
        vision_config={
            "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
            "image_size": 896, "patch_size": 14, "vision_use_head": False,
        },
    )  # fmt: skip
    with torch.device("meta"):
        sizes = {
            T5_XXL: hf.T5EncoderModel(hf.T5Config(vocab_size=32128, **t5)),
            UMT5_XXL: hf.UMT5EncoderModel(hf.UMT5Config(vocab_size=256384, **t5)),
            CLIP_L: hf.CLIPTextModel(hf.CLIPTextConfig(vocab_size=49408, **clip)),
            CLIP_L_PROJECTED: hf.CLIPTextModelWithProjection(
                hf.CLIPTextConfig(vocab_size=49408, projection_dim=768, **clip)
            ),
            CLIP_G: hf.CLIPTextModelWithProjection(hf.CLIPTextConfig(vocab_size=49408, projection_dim=1280, **big)),
            # The defaults of this class are the sizes of Mistral Small 3.1 and 3.2, which have their own output layer.
            MISTRAL_SMALL: hf.Mistral3ForConditionalGeneration(hf.Mistral3Config(tie_word_embeddings=False)),
            QWEN3_4B: hf.Qwen3ForCausalLM(known_config("Qwen/Qwen3-4B")),
            QWEN3_8B: hf.Qwen3ForCausalLM(known_config("Qwen/Qwen3-8B")),
            GEMMA3_12B: hf.Gemma3ForConditionalGeneration(gemma),
            LLAMA3_8B: hf.LlamaModel(known_config("meta-llama/Llama-3.1-8B")),
            QWEN_VL_TEXT: hf.Qwen2_5_VLTextModel(
                hf.Qwen2_5_VLTextConfig(
                    hidden_size=3584,
                    num_hidden_layers=28,
                    num_attention_heads=28,
                    num_key_value_heads=4,
                    intermediate_size=18_944,
                    vocab_size=152_064,
                )
            ),
            BYT5_SMALL: hf.T5EncoderModel(
                hf.T5Config(
                    vocab_size=384,
                    d_model=1472,
                    d_kv=64,
                    d_ff=3584,
                    num_layers=12,
                    num_heads=6,
                    feed_forward_proj="gated-gelu",
                )
            ),
            SIGLIP: hf.SiglipVisionModel(
                hf.SiglipVisionConfig(
                    hidden_size=1152,
                    intermediate_size=4304,
                    num_hidden_layers=27,
                    num_attention_heads=16,
                    image_size=384,
                    patch_size=14,
                )
            ),
        }
    for expected, module in sizes.items():
        assert sum(p.numel() for p in module.parameters()) == expected
    assert round(QWEN_VL / 1e9, 2) == 8.29


def test_the_further_networks_of_ltx2_have_the_numbers_of_their_classes():
    """Shapes of diffusers' script that converts the weights; the autoencoder of the sound has the class's defaults."""
    from diffusers import AutoencoderKLLTX2Audio
    from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder

    heads = {"num_attention_heads": 30, "attention_head_dim": 128, "num_layers": 2, "num_learnable_registers": 128}
    # These have defaults only in newer versions, and no parameter depends on them.
    rotary = {
        "connector_rope_base_seq_len": 4096, "rope_theta": 10_000.0, "rope_double_precision": True,
        "causal_temporal_positioning": False,
    }  # fmt: skip
    both = {f"{kind}_connector_{name}": value for kind in ("video", "audio") for name, value in heads.items()}
    with torch.device("meta"):
        sizes = {
            LTX2_CONNECTORS: LTX2TextConnectors(caption_channels=3840, text_proj_in_factor=49, **both, **rotary),
            LTX2_SOUND: AutoencoderKLLTX2Audio(),
            LTX2_VOCODER: LTX2Vocoder(
                in_channels=128, hidden_channels=1024, upsample_kernel_sizes=[16, 15, 8, 4, 4],
                upsample_factors=[6, 5, 2, 2, 2], resnet_kernel_sizes=[3, 7, 11], resnet_dilations=[[1, 3, 5]] * 3,
            ),
        }  # fmt: skip
    for expected, module in sizes.items():
        assert sum(p.numel() for p in module.parameters()) == expected


@pytest.mark.slow
def test_a_pipeline_folder_is_read_without_its_weights(tmp_path, monkeypatch):
    from flowgrpo.training.model_paths import embedded_pipeline

    folder = embedded_pipeline()
    found = architecture_of(str(folder))
    assert found.denoiser[0] == "SD3Transformer2DModel"
    assert found.vae[0] == "AutoencoderKL"
    assert set(found.encoders) == {"text_encoder", "text_encoder_2"}
    from diffusers import StableDiffusion3Pipeline

    pipe = StableDiffusion3Pipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None)
    stored = sum(p.numel() for p in pipe.text_encoder.state_dict().values())
    assert found.encoders["text_encoder"] == pytest.approx(stored, rel=0.01)


def test_what_is_not_known_is_told():
    with pytest.raises(ValueError, match="give the folder of the pipeline"):
        architecture_of("somebody/something")
