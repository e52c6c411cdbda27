"""LoRAs of other tools: what they change, and what is refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor, nn

from flowgrpo.configs.load import load_recipe
from flowgrpo.pipelines.conformance.conform import TINY
from flowgrpo.pipelines.conformance.tiny import installed
from flowgrpo.training.lora_start import with_start
from flowgrpo.training.session import lora_spec
from flowgrpo.weights.adapter_files import read_start
from flowgrpo.weights.adapters import adapter_layers
from flowgrpo.weights.lora import LoraSpec
from flowgrpo.weights.lora_conversion import BasePipeline, UnreadBase
from flowgrpo.weights.other_tools import write_for
from flowgrpo.weights.trained import TrainedWeights, trainable_modules


def numbers(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * 0.3


def kohya(layer: str) -> str:
    return "lora_unet_" + layer.replace(".", "_")


def comfy(layer: str) -> str:
    return f"diffusion_model.{layer}"


def as_wan(layer: str) -> str:
    """The name that a layer of Wan had in its release."""
    layer = layer.replace("attn1", "self_attn").replace("attn2", "cross_attn")
    layer = layer.replace("net.0.proj", "0").replace("net.2", "2")
    return re.sub(r"to_(out\.0|[qkv])", lambda match: match[1][0], layer)


ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
WAN = [
    *(f"blocks.{i}.attn{j}.{end}" for i in range(2) for j in (1, 2) for end in ATTENTION),
    *(f"blocks.{i}.ffn.{end}" for i in range(2) for end in ("net.0.proj", "net.2")),
]
QWEN = [f"transformer_blocks.1.{end}" for end in ("attn.to_q", "attn.to_out.0", "attn.add_k_proj", "img_mlp.net.2")]
ZIMAGE = [
    f"{part}.0.{end}" for part in ("layers", "noise_refiner") for end in ("attention.to_out.0", "feed_forward.w2")
]
SD3 = ["transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_out.0", "transformer_blocks.1.ff.net.2"]
SDXL = [
    f"down_blocks.1.attentions.0.transformer_blocks.0.{end}"
    for end in ("attn1.to_q", "attn2.to_v", "attn2.to_out.0", "ff.net.2")
]
FLUX = ["transformer_blocks.0.attn.to_out.0", "transformer_blocks.0.attn.to_add_out", "transformer_blocks.0.ff.net.2"]
FLUX_NAMES = dict(zip(FLUX, ("img_attn_proj", "txt_attn_proj", "img_mlp_2")))

CASES: dict[str, tuple[str, list[str], Callable[[str], str], tuple[str, str]]] = {
    "flux of kohya": ("FluxPipeline", FLUX, lambda at: kohya(f"double_blocks.0.{FLUX_NAMES[at]}"), ("down", "up")),
    "wan of comfyui": ("WanPipeline", WAN, lambda at: comfy(as_wan(at)), ("down", "up")),
    "wan of musubi": ("WanPipeline", WAN, lambda at: kohya(as_wan(at)), ("down", "up")),
    "qwen of ai-toolkit": ("QwenImagePipeline", QWEN, comfy, ("A", "B")),
    "qwen of musubi": ("QwenImagePipeline", QWEN, kohya, ("down", "up")),
    "z-image of ai-toolkit": ("ZImagePipeline", ZIMAGE, comfy, ("A", "B")),
    "z-image of kohya": ("ZImagePipeline", ZIMAGE, kohya, ("down", "up")),
    "sd3 of diffusers": ("StableDiffusion3Pipeline", SD3, lambda at: f"transformer.{at}", ("A", "B")),
    "sdxl of kohya": ("StableDiffusionXLPipeline", SDXL, kohya, ("down", "up")),
    "flux2 with alphas": ("Flux2KleinPipeline", ["transformer_blocks.0.attn.to_q"], comfy, ("A", "B")),
}


def changes(modules: dict[str, nn.Module]) -> dict[str, Tensor]:
    """What the adapters add to the weight of each layer."""
    found = {}
    for module in modules.values():
        names = {id(part): name for name, part in module.named_modules()}
        for layer in adapter_layers({"": module}):
            [name] = layer.active_adapters
            b, a = (of[name].weight.detach().double() for of in (layer.lora_B, layer.lora_A))
            found[names[id(layer)]] = b @ a * layer.scaling[name]
    return found


def begun(pipe: Any, file: Path, base: BasePipeline) -> dict[str, Tensor]:
    start = read_start(str(file), base)
    weights = TrainedWeights.lora(pipe, LoraSpec(start.rank, start.alpha, start.layers), seed=1)
    weights.start_from(start)
    return changes(weights.modules)


def index(folder: Path, name: str) -> BasePipeline:
    """The folder of a pipeline of which nothing but the class is read."""
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "model_index.json").write_text(json.dumps({"_class_name": name}))
    return BasePipeline(str(folder / "model"))


def written(folder: Path, state: dict[str, Tensor]) -> Path:
    save_file(state, folder / "x.safetensors")
    return folder / "x.safetensors"


# An older diffusers loses a part of these files, or refuses them. Then flowgrpo refuses them too.
CONVERTED_SINCE = {"flux2 with alphas": "0.38", "qwen of ai-toolkit": "0.42"}


@pytest.mark.slow
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_weights_change_as_the_file_says(tmp_path: Path, case: str, uneven: bool) -> None:
    name, layers, named, sides = CASES[case]
    pipe = TINY[name].fresh()
    [module] = trainable_modules(pipe).values()
    state, wanted = {}, {}
    for number, layer in enumerate(layers):
        linear = module.get_submodule(layer)
        assert isinstance(linear, nn.Linear)
        rank, alpha = (2 + number % 3, 1.0 + number) if uneven else (4, 1.0)
        a, b = numbers(rank, linear.in_features), numbers(linear.out_features, rank, seed=number)
        state |= {f"{named(layer)}.lora_{sides[0]}.weight": a, f"{named(layer)}.lora_{sides[1]}.weight": b}
        state[f"{named(layer)}.alpha"] = torch.tensor(alpha)
        wanted[layer] = b.double() @ a.double() * alpha / rank
    if not installed(CONVERTED_SINCE.get(case, "0.0")):
        with pytest.raises(ValueError, match=f"the conversion of diffusers for {name}"):
            begun(pipe, written(tmp_path, state), index(tmp_path, name))
        return
    found = begun(pipe, written(tmp_path, state), index(tmp_path, name))
    assert found.keys() == wanted.keys()
    for layer, change in wanted.items():
        assert torch.allclose(found[layer], change, rtol=0, atol=1e-6 * float(change.abs().max())), layer


@pytest.mark.slow
@pytest.mark.parametrize("sparse", [False, True])
def test_a_product_of_queries_keys_and_values_is_cut_into_three(tmp_path: Path, sparse: bool) -> None:
    pipe = TINY["FluxPipeline"].fresh()
    width = pipe.transformer.get_submodule("transformer_blocks.0.attn.to_q").in_features
    a, b = numbers(6, width), numbers(3 * width, 6)
    if sparse:
        # So do scripts of kohya write three LoRAs of rank 2 as one of rank 6.
        b *= torch.block_diag(*[torch.ones(width, 2)] * 3)
    stem = kohya("double_blocks_0_img_attn_qkv")
    file = written(tmp_path, {f"{stem}.lora_down.weight": a, f"{stem}.lora_up.weight": b})
    found = begun(pipe, file, index(tmp_path, "FluxPipeline"))
    assert read_start(str(file), index(tmp_path, "FluxPipeline")).rank == (2 if sparse else 6)
    joined = torch.cat([found[f"transformer_blocks.0.attn.to_{one}"] for one in "qkv"])
    assert torch.allclose(joined, b.double() @ a.double(), rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FluxPipeline", "StableDiffusionXLPipeline"])
def test_a_file_that_a_run_has_written_for_another_tool_comes_back(tmp_path: Path, name: str) -> None:
    pipe = TINY[name].fresh()
    weights = TrainedWeights.lora(pipe, LoraSpec(4, 2.0, ("to_q", "to_v")), seed=1)
    with torch.no_grad():
        for parameter in weights.parameters():
            parameter.copy_(numbers(*parameter.shape))
    weights.write()
    weights.save(tmp_path / "lora")
    wanted = changes(weights.modules)
    tool = "kohya" if name == "StableDiffusionXLPipeline" else "comfyui"
    write_for(tool, tmp_path / "lora", tmp_path / "x.safetensors")  # type: ignore[arg-type]
    found = begun(TINY[name].fresh(), tmp_path / "x.safetensors", index(tmp_path, name))
    # The scale is a half, so not even the product with B is rounded.
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.slow
def test_a_scale_does_not_round_numbers_of_16_bits(tmp_path: Path) -> None:
    stem = kohya("double_blocks_0_img_attn_proj")
    state = {key: value.bfloat16() for key, value in pair(stem, width=32).items()}
    wanted = state[f"{stem}.lora_up.weight"].double() @ state[f"{stem}.lora_down.weight"].double() * 1.5
    state[f"{stem}.alpha"] = torch.tensor(3.0).bfloat16()
    [found] = begun(TINY["FluxPipeline"].fresh(), written(tmp_path, state), index(tmp_path, "FluxPipeline")).values()
    assert torch.allclose(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_layer_whose_name_ends_other_names_is_adapted_alone(tmp_path: Path) -> None:
    pipe = TINY["FluxPipeline"].fresh()
    layers = ["proj_out", "transformer_blocks.0.attn.to_q"]
    state = {}
    for layer in layers:
        linear = pipe.transformer.get_submodule(layer)
        state[f"transformer.{layer}.lora_A.weight"] = numbers(4, linear.in_features)
        state[f"transformer.{layer}.lora_B.weight"] = numbers(linear.out_features, 4)
    file = written(tmp_path, state)
    recipe = with_start(load_recipe("flow_grpo", [f"model.lora={{start: '{file}'}}"]))
    assert recipe.model.lora.targets == ["^proj_out", layers[1]]
    weights = TrainedWeights.lora(pipe, lora_spec(recipe.model.lora), seed=1)
    weights.start_from(read_start(str(file)))
    assert list(changes(weights.modules)) == layers[::-1]
    weights.add_teacher("one", read_start(str(file)))
    weights.save(tmp_path / "lora")
    plain = TINY["FluxPipeline"].fresh()
    plain.load_lora_weights(tmp_path / "lora")
    assert changes({"": plain.transformer}).keys() == set(layers)


@pytest.mark.slow
def test_patterns_of_ranks_and_alphas_are_read_as_peft_means_them(tmp_path: Path) -> None:
    module = TINY["FluxPipeline"].fresh().transformer
    patterns = {
        "rank_pattern": {"attn.to_v": 5},
        "alpha_pattern": {"attn.to_v": 2, "^transformer_blocks.0.attn.to_q": 9},
    }
    config = LoraConfig(r=3, lora_alpha=12, target_modules=["to_q", "to_v"], **patterns)  # type: ignore[arg-type]
    module.add_adapter(config, adapter_name="mine")
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if "lora_" in key:
                parameter.copy_(numbers(*parameter.shape))
    wanted = changes({"": module})
    module.save_lora_adapter(tmp_path, adapter_name="mine", weight_name="x.safetensors")
    found = begun(TINY["FluxPipeline"].fresh(), tmp_path / "x.safetensors", index(tmp_path, "FluxPipeline"))
    assert found.keys() == wanted.keys()
    for layer, change in wanted.items():
        assert torch.allclose(found[layer], change, rtol=0, atol=1e-6 * float(change.abs().max())), layer


# -- what is left out and refused ----------------------------------------------------------------------------------


def pair(stem: str, down: str = "lora_down", up: str = "lora_up", rank: int = 2, width: int = 6) -> dict[str, Tensor]:
    return {f"{stem}.{down}.weight": numbers(rank, width), f"{stem}.{up}.weight": numbers(width, rank)}


FLUX_PAIR = pair("lora_unet_double_blocks_0_img_attn_proj")
ENCODER = pair("lora_te1_text_model_encoder_layers_0_self_attn_q_proj")


def test_the_lora_of_a_text_encoder_is_left_out(tmp_path: Path) -> None:
    base = index(tmp_path, "FluxPipeline")
    found = read_start(str(written(tmp_path, FLUX_PAIR | ENCODER)), base)
    assert (found.layers, found.left_out) == (("transformer_blocks.0.attn.to_out.0",), ("text_encoder",))
    plain = pair("transformer.a.to_q", "lora_A", "lora_B") | pair("text_encoder.b.q_proj", "lora_A", "lora_B", rank=3)
    noted = {"transformer.lora_alpha": 4, "text_encoder.lora_alpha": 9}
    save_file(plain, tmp_path / "x.safetensors", metadata={"lora_adapter_metadata": json.dumps(noted)})
    found = read_start(str(tmp_path / "x.safetensors"), base)
    assert (found.layers, found.left_out, found.rank, found.alpha) == (("a.to_q",), ("text_encoder",), 2, 4.0)
    with pytest.raises(ValueError, match="adapts text_encoder alone"):
        read_start(str(written(tmp_path, ENCODER)), base)


REFUSED: dict[str, tuple[str, dict[str, Tensor], str]] = {
    "lokr": ("FluxPipeline", {"lora_unet_x.lokr_w1": numbers(2, 2)}, r"is a LoKr .*lora_unet_x\.lokr_w1.*plain LoRA"),
    "loha": ("FluxPipeline", {"lora_unet_x.hada_w1_a": numbers(2, 2)}, "is a LoHa"),
    "dora": ("FluxPipeline", FLUX_PAIR | {"lora_unet_x.dora_scale": numbers(6, 1)}, "is a DoRA"),
    "biases": (
        "WanPipeline",
        pair("diffusion_model.a") | {"diffusion_model.a.diff_b": numbers(6)},
        "whole differences",
    ),
    "another model": (
        "FluxPipeline",
        pair("lora_unet_blocks_0_self_attn_q"),
        "for FluxPipeline does not take .*blocks_0",
    ),
    "no conversion": ("StableDiffusion3Pipeline", pair("lora_unet_joint_blocks_0_mlp"), "no conversion of such names"),
    "no reader": ("OmniGenPipeline", FLUX_PAIR, r"diffusers converts none for .*OmniGenPipeline"),
    "a part": (
        "Flux2Pipeline",
        pair("lora_unet_double_blocks_0_img_attn_proj") | pair("lora_unet_double_blocks_0_new_layer"),
        "leaves out a part",
    ),
    "endless": ("WanPipeline", pair(f"diffusion_model.blocks.{10**12}.self_attn.q"), "a number that no layer has"),
    "half": ("FluxPipeline", {key: value for key, value in FLUX_PAIR.items() if "up" in key}, "lacks pairs"),
    "infinite": ("FluxPipeline", {key: value * float("inf") for key, value in FLUX_PAIR.items()}, "not finite"),
    "alpha": (
        "FluxPipeline",
        FLUX_PAIR | {"lora_unet_double_blocks_0_img_attn_proj.alpha": torch.tensor(0.0)},
        "not a number above 0",
    ),
    "convolution": (
        "StableDiffusionPipeline",
        {
            "lora_unet_down_blocks_0_attentions_0_proj_in.lora_down.weight": numbers(2, 6, 1, 1),
            "lora_unet_down_blocks_0_attentions_0_proj_in.lora_up.weight": numbers(6, 2, 1, 1),
        },
        "which is of a convolution",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_plain_lora_of_the_model_is_refused(tmp_path: Path, case: str) -> None:
    name, state, said = REFUSED[case]
    with pytest.raises(ValueError, match=said):
        read_start(str(written(tmp_path, state)), index(tmp_path, name))


def test_a_pipeline_of_the_hub_that_is_not_here_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, FLUX_PAIR)
    with pytest.raises(UnreadBase, match="nobody/nothing"):
        read_start(str(file), BasePipeline("nobody/nothing", fetches=False))
    indices = {"nobody/nothing": {"_class_name": "FluxPipeline"}}
    monkeypatch.setattr(DiffusionPipeline, "load_config", lambda path, **given: indices[path])
    found = read_start(str(file), BasePipeline("nobody/nothing"))
    assert found.layers == ("transformer_blocks.0.attn.to_out.0",)
    # Names of diffusers need no class.
    file = written(tmp_path, pair("transformer.a.to_q", "lora_A", "lora_B"))
    assert read_start(str(file), BasePipeline("nobody/nothing", fetches=False)).layers == ("a.to_q",)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "run",))

    for name in ("x.safetensors", "x.pt", "x.bin", "x.ckpt", "x.zip"):
        torch.save(Evil(), tmp_path / name)
        with pytest.raises(ValueError, match=r"cannot be read|is not a \.safetensors file"):
            read_start(str(tmp_path / name), index(tmp_path, "FluxPipeline"))
    assert not (tmp_path / "run").exists()
