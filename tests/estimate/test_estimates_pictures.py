"""Estimates for pipelines that make a video of a picture, against the same tiny pipelines really called."""

import math
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft.tuners.lora import Linear
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from flowgrpo.configs.image_recipe import ModelConfig
from flowgrpo.estimate.estimates import estimate
from flowgrpo.estimate.footprint import LiveBytes
from flowgrpo.estimate.models import Model, model_of
from flowgrpo.pipelines.architectures import appended_tokens, architecture_of, built, latent_shape
from flowgrpo.pipelines.conformance.conform import TINY
from flowgrpo.pipelines.families import FAMILIES
from flowgrpo.pipelines.known_pipelines import CLIP_H_TOKENS, CLIP_H_VISION, KNOWN
from flowgrpo.pipelines.random_weights import random_pipeline
from flowgrpo.training.session import lora_spec
from flowgrpo.weights.lora_layer import AddingLora
from flowgrpo.weights.trained import TrainedWeights
from tests.estimate.test_estimates import recipe

WITH_ENCODER = "WanImageToVideoPipeline"
CLASSES = [
    WITH_ENCODER, "WanImageToVideoPipeline, 2.2 with two experts", "WanImageToVideoPipeline, 2.2 5B",
    "WanPipeline, 2.2 5B",
]  # fmt: skip
CALL = {"height": 32, "width": 48, "num_frames": 9, "guidance_scale": 1.0, "max_sequence_length": 16}
ROWS = 2


def numbers(module: Any) -> int:
    return sum(tensor.numel() for tensor in (*module.parameters(), *module.buffers()))


@pytest.fixture(scope="module", params=CLASSES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    path = tmp_path_factory.mktemp("pictures") / "pipeline"
    TINY[request.param].fresh().save_pretrained(path)
    return request.param, path


def found(path: Path, **call: Any) -> Model:
    return model_of(ModelConfig(path=str(path), call={**CALL, **call}, lora={"rank": 4, "alpha": 8.0}))


@cache
def called(name: str) -> tuple[Any, dict[str, Any], torch.Tensor]:
    """A tiny pipeline with a LoRA, the arguments of its denoiser in a call of its own, and the state at its end."""
    pipe = TINY[name].fresh()
    alone: Any = SimpleNamespace(components={"transformer": pipe.transformer})
    spec = lora_spec(ModelConfig(lora={"rank": 4, "alpha": 8.0}).lora)
    TrainedWeights.lora(alone, spec, seed=0, modules=alone.components)
    seen: list[dict[str, Any]] = []
    hook = pipe.transformer.register_forward_pre_hook(lambda _, args, given: seen.append(given), with_kwargs=True)
    picture = {key: value for key, value in TINY[name].call.items() if key == "image"}
    states = pipe(prompt=["a", "b"], **CALL, **picture, num_inference_steps=1, output_type="latent").frames
    hook.remove()
    given = {key: value for key, value in seen[0].items() if isinstance(value, torch.Tensor)}
    return pipe, given, states


@pytest.mark.slow
def test_the_denoiser_gets_inputs_of_the_counted_shapes(folder: tuple[str, Path]):
    name, path = folder
    _, given, states = called(name)
    shapes = architecture_of(str(path))
    kind, config = shapes.denoiser
    latent = (4, 3, 4, 6)
    assert states.shape[1:] == latent
    counted = FAMILIES[kind].inputs({**config, **shapes.inputs}, latent, 16, ROWS)
    assert {key: value.shape for key, value in counted.items()} == {key: value.shape for key, value in given.items()}
    assert ("encoder_hidden_states_image" in counted) == (name == WITH_ENCODER)
    assert (counted["hidden_states"].shape[1] > latent[0]) == ("5B" not in name)


@pytest.mark.slow
def test_an_evaluation_costs_what_the_pipeline_s_own_inputs_cost(folder: tuple[str, Path]):
    name, path = folder
    pipe, given, _ = called(name)
    cost, module = found(path).evaluation, pipe.transformer
    live = LiveBytes()
    with live:
        prediction = module(**given, return_dict=False)[0]
    assert ROWS * cost.saved == pytest.approx(live.now - prediction.untyped_storage().nbytes(), rel=0.05)
    del prediction
    working = LiveBytes()
    with torch.no_grad(), working:
        module(**given, return_dict=False)
    assert ROWS * cost.working == pytest.approx(working.most, rel=0.02)
    layers = [layer for layer in module.modules() if isinstance(layer, AddingLora)]
    for layer in layers:
        layer.__class__ = Linear  # the layer of peft, whose products torch counts
    forward = FlopCounterMode(display=False)
    with forward, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        module(**given, return_dict=False)
    for layer in layers:
        layer.__class__ = AddingLora
    assert ROWS * cost.forward == pytest.approx(forward.get_total_flops(), rel=0.01)


@pytest.mark.slow
def test_the_parts_are_those_of_the_pipeline(folder: tuple[str, Path]):
    name, path = folder
    pipe, model = TINY[name].fresh(), found(path)
    assert model.denoiser == 4 * numbers(pipe.transformer) * (2 if "experts" in name else 1)
    assert model.elements == math.prod((4, 3, 4, 6))
    vision = 4 * sum(p.numel() for p in pipe.image_encoder.parameters()) if name == WITH_ENCODER else 0
    assert model.image_encoders == vision
    lora = recipe(model={"path": str(path), "call": CALL, "release_text_encoders": True})
    # The image encoder stays on the card, because each picture is encoded when it is drawn.
    assert estimate(lora).resting["image encoder"] == vision


@pytest.mark.slow
def test_an_image_encoder_without_its_sizes_is_named(tmp_path: Path):
    TINY[WITH_ENCODER].fresh().save_pretrained(tmp_path)
    (tmp_path / "image_encoder" / "config.json").write_text('{"image_size": 224}')
    with pytest.raises(ValueError, match=r"image_encoder/config\.json: there is no estimate, because it has no whole"):
        architecture_of(str(tmp_path))


@pytest.mark.parametrize(
    ("path", "billions"),
    [("Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", 16.39), ("Wan-AI/Wan2.2-I2V-A14B-Diffusers", 14.29)],
)
def test_known_models_take_the_picture_as_further_channels(path: str, billions: float):
    """By hand: the text-to-video model of 14.288 billion, two projections of 5120² in 40 layers, and an embedder."""
    name, config = KNOWN[path].denoiser
    module = built(name, config, torch.bfloat16)
    assert sum(p.numel() for p in module.parameters()) / 1e9 == pytest.approx(billions, rel=1e-3)
    given = FAMILIES[name].inputs({**module.config, **KNOWN[path].inputs}, (16, 21, 60, 104), 512, 1)
    assert given["hidden_states"].shape == (1, 36, 21, 60, 104)
    assert ("encoder_hidden_states_image" in given) == ("2.1" in path)


def test_the_image_encoder_has_the_numbers_of_its_class():
    import transformers as hf

    sizes = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16}
    with torch.device("meta"):
        module = hf.CLIPVisionModel(hf.CLIPVisionConfig(**sizes, image_size=224, patch_size=14))
    assert sum(p.numel() for p in module.parameters()) == CLIP_H_VISION
    assert CLIP_H_TOKENS == (224 // 14) ** 2 + 1


@pytest.mark.parametrize(
    ("path", "beside", "read"),
    [
        ("black-forest-labs/FLUX.1-Kontext-dev", 4096, 0),
        ("Qwen/Qwen-Image-Edit", 4096, 1369),
        ("Qwen/Qwen-Image-Edit-2509", 4096, 196),
    ],
)
def test_the_tokens_of_an_edited_picture_are_beside_the_state(path: str, beside: int, read: int):
    architecture = architecture_of(path)
    name, config = architecture.denoiser
    module = built(name, config, torch.bfloat16)
    latent = latent_shape(architecture, {"height": 512, "width": 768})
    given = FAMILIES[name].inputs({**module.config, **architecture.inputs}, latent, 77, 2)
    assert given["hidden_states"].shape[:2] == (2, 32 * 48 + beside)
    assert architecture.inputs.get("read_tokens", 0) == read
    with torch.device("meta"):
        module(**{key: meta(value) for key, value in given.items()}, return_dict=False)


def meta(value: Any) -> Any:
    return value.to("meta", torch.bfloat16) if isinstance(value, torch.Tensor) else value


def test_a_class_of_the_recipe_decides_whether_a_picture_is_edited():
    plain, edits = "black-forest-labs/FLUX.1-dev", "FluxKontextPipeline"
    assert architecture_of(plain, edits) == architecture_of("black-forest-labs/FLUX.1-Kontext-dev")
    assert architecture_of("black-forest-labs/FLUX.1-Kontext-dev", "FluxPipeline") == architecture_of(plain)
    both = [
        recipe(model={"path": plain, "call": {"height": 512, "width": 512}, "pipeline": kind}) for kind in (None, edits)
    ]
    one, other = (model_of(made.model) for made in both)
    assert other.evaluation.forward > 3 * one.evaluation.forward
    assert (other.elements, other.denoiser) == (one.elements, one.denoiser)


@pytest.mark.slow
def test_a_folder_says_by_its_class_that_a_picture_is_edited(tmp_path: Path):
    TINY["FluxKontextPipeline"].fresh().save_pretrained(tmp_path)
    assert architecture_of(str(tmp_path)).inputs["picture_tokens"] == 4096
    assert "picture_tokens" not in architecture_of(str(tmp_path), "FluxPipeline").inputs
    with pytest.raises(ValueError, match="no random weights for a pipeline that edits a picture"):
        random_pipeline(str(tmp_path), {}, torch.float32, torch.device("cpu"))


FLUX2 = "black-forest-labs/FLUX.2-klein-base-4B"


def test_pictures_of_flux2_count_by_their_sizes_up_to_a_million_pixels():
    def tokens(*sizes: tuple[int, int]) -> int:
        pictures = [Image.new("RGB", size) for size in sizes]
        return appended_tokens(architecture_of(FLUX2), {"image": pictures}).get("picture_tokens", 0)

    assert tokens() == 0
    assert tokens((512, 512)) == 32 * 32
    assert tokens((520, 256)) == 32 * 16
    # 2048 × 1024 becomes 1448 × 724.
    assert tokens((512, 512), (2048, 1024)) == 32 * 32 + 90 * 45
    assert appended_tokens(architecture_of("Qwen/Qwen-Image"), {"image": Image.new("RGB", (512, 512))}) == {}


def test_pictures_of_flux2_make_an_evaluation_longer(tmp_path: Path):
    """By hand: beside 512 tokens of text, a state of 512² has 1,024 tokens, and a picture of a prompt 4,096."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "red", "image": "a.png"}\n{"prompt": "blue", "image": "b.png"}\n')
    model = {"path": FLUX2, "call": {"height": 512, "width": 512}}
    plain = estimate(recipe(model=model))
    pictured = estimate(recipe(model=model, data={"train": str(prompts)}))
    ratio = (512 + 1024 + 4096) / (512 + 1024)
    assert ratio < pictured.flops["sampling"] / plain.flops["sampling"] < 2 * ratio
    assert pictured.resting["rollout states"] == plain.resting["rollout states"]
