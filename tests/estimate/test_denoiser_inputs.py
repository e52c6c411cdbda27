"""What an estimate takes for the inputs of a denoiser, against the calls that tiny pipelines of each class make."""

import inspect
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from PIL import Image
from torch.utils._pytree import tree_leaves, tree_map_only

from flowgrpo.configs.image_recipe import ModelConfig
from flowgrpo.estimate.estimates import EMBEDDINGS, GIB, estimate, table
from flowgrpo.estimate.models import Model, model_of
from flowgrpo.pipelines.architectures import appended_tokens, architecture_of, built, latent_shape
from flowgrpo.pipelines.conformance.conform import TINY
from flowgrpo.pipelines.families import FAMILIES
from tests.estimate.test_estimates import recipe

pytestmark = pytest.mark.slow

PROMPTS = ["a red circle", "a blue square"]
BESIDE = {"encoder_hidden_states_mask"}
"""Masks of prompts without padding, which the pipelines leave out or give. They take no operations that count."""


class Case(NamedTuple):
    """A tiny pipeline, arguments in place of its own (None: the class's default), and the evaluations of a state.

    Without `adjusted` the pipeline has the token lengths that are fixed in its class.
    """

    name: str
    call: dict[str, Any]
    evaluations: int
    rows: int = 1
    adjusted: bool = True


ONLY_TEXT = {"stg_scale": 0.0, "audio_stg_scale": 0.0, "modality_scale": 1.0, "audio_modality_scale": 1.0}


def told(case: Case) -> str:
    """A name that is the same in every process; a picture's own name is not."""
    return re.sub(r" at 0x[0-9A-Fa-f]+", "", f"{case.name}-{case.call}")


CASES = [
    Case("StableDiffusion3Pipeline", {}, 2, 2),
    Case("StableDiffusion3Pipeline", {"guidance_scale": 1.0}, 1),
    Case("FluxPipeline", {"height": 16, "width": 32}, 1),
    Case("FluxPipeline, true guidance", {}, 2),
    Case("Flux2Pipeline", {"height": 16, "width": 32}, 1),
    Case("Flux2KleinPipeline", {"height": 16, "width": 32}, 2),
    Case("Flux2KleinPipeline", {"guidance_scale": None}, 2),
    Case("Flux2KleinPipeline, with a picture", {"image": Image.new("RGB", (75, 66))}, 2),
    Case("Flux2KleinPipeline, with a picture", {"image": [Image.new("RGB", (64, 64))] * 2}, 2),
    Case("Flux2KleinPipeline", {"guidance_scale": 1.0}, 1),
    Case("QwenImagePipeline", {}, 2),
    Case("QwenImagePipeline", {"negative_prompt": None}, 1),
    Case("ZImagePipeline", {"height": 32, "width": 48}, 2, 2),
    Case("ZImagePipeline", {"guidance_scale": 1.0}, 2, 2),
    Case("ZImagePipeline", {"guidance_scale": 0.0}, 1),
    Case("WanPipeline", {"height": 32, "width": 48, "num_frames": 9}, 2),
    Case("HunyuanVideoPipeline", {"height": 32, "width": 48, "num_frames": 9}, 1),
    Case("HunyuanVideoPipeline, true guidance", {}, 2),
    Case("HunyuanVideo15Pipeline", {"height": 16, "width": 24, "num_frames": 9}, 2, adjusted=False),
    Case("HunyuanVideo15Pipeline", {"height": None, "width": None}, 2, adjusted=False),
    Case("HunyuanVideo15ImageToVideoPipeline", {"image": Image.new("RGB", (64, 36))}, 2, adjusted=False),
    Case("LTX2Pipeline", {"height": 32, "width": 64, "num_frames": 9}, 4, 2),
    Case("LTX2Pipeline", {"num_frames": 25, "frame_rate": None, "stg_scale": 0.0, "audio_stg_scale": 0.0}, 3, 2),
    Case("LTX2Pipeline", {"modality_scale": 1.0, "guidance_scale": 1.0, "audio_guidance_scale": 1.0}, 3),
    Case("LTX2Pipeline", ONLY_TEXT, 2, 2),
    Case("LTX2Pipeline", {**ONLY_TEXT, "guidance_scale": 1.0, "audio_guidance_scale": 1.0}, 1),
    Case("StableAudio3Pipeline", {"duration": 0.0301}, 1),
    Case("StableAudio3Pipeline, base", {}, 2, 2),
    Case("AceStepPipeline", {"audio_duration": 0.31}, 1),
    Case("AceStepPipeline", {"guidance_scale": None}, 2, 2),
    Case("LongCatAudioDiTPipeline", {}, 2),
    Case("LongCatAudioDiTPipeline", {"audio_duration_s": 0.0309, "guidance_scale": 1.0}, 1),
]


class Seen(NamedTuple):
    """Arguments of each call of the denoiser, and the states and predictions of the step: video and sound are two."""

    calls: list[dict[str, Any]]
    states: list[torch.Tensor]
    predictions: list[torch.Tensor]


def called(pipe: Any, call: dict[str, Any]) -> Seen:
    """One step of a pipeline's own call."""
    calls, steps = list[dict[str, Any]](), list[tuple[Any, ...]]()
    scheduler, names = type(pipe.scheduler), inspect.signature(type(pipe.transformer).forward)
    own = scheduler.step

    def watch(module: Any, args: Any, given: Any) -> None:
        calls.append({k: v for k, v in names.bind(module, *args, **given).arguments.items() if k != "self"})

    def step(self: Any, prediction: Any, time: Any, state: Any, *args: Any, **given: Any) -> Any:
        steps.append((state.clone(), prediction.clone()))
        return own(self, prediction, time, state, *args, **given)

    hook = pipe.transformer.register_forward_pre_hook(watch, with_kwargs=True)
    given = {**call, "num_inference_steps": 1, "output_type": "latent"}
    for name in ("negative_prompt", "lyrics"):
        if call.get(name) is not None:
            given[name] = [call[name]] * len(PROMPTS)
    # LTX-2 copies its scheduler for the sound, so the class is watched.
    with torch.no_grad(), patch.object(scheduler, "step", step):
        pipe(prompt=list(PROMPTS), **given)
    hook.remove()
    return Seen(calls, *map(list, zip(*steps)))


def rows_of(given: dict[str, Any]) -> int:
    return len(given["hidden_states"] if "hidden_states" in given else given["x"])


def shapes(given: dict[str, Any]) -> dict[str, Any]:
    """Shapes of the tensors among the arguments."""
    tensors = {
        key: tree_map_only(torch.Tensor, lambda value: tuple(value.shape), value) for key, value in given.items()
    }
    return {
        key: tensors[key] for key in given if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(given[key]))
    }


def arranged(case: Case, tmp_path: Path) -> tuple[Any, dict[str, Any], Path]:
    pipe = TINY[case.name].fresh()
    pipe.save_pretrained(tmp_path / "pipeline")
    if case.adjusted and (adjust := TINY[case.name].adjust) is not None:
        adjust(pipe)
    call = {key: value for key, value in {**TINY[case.name].call, **case.call}.items() if value is not None}
    if unknown := set(call) - set(inspect.signature(type(pipe).__call__).parameters):
        pytest.skip(f"this version of diffusers has a {case.name} without {', '.join(sorted(unknown))}")
    return pipe, call, tmp_path / "pipeline"


def estimated(path: Path, call: dict[str, Any], dtype: str = "float32") -> Model:
    plain = {key: value for key, value in call.items() if key == "image" or isinstance(value, (str, int, float))}
    adapted = architecture_of(str(path)).denoiser[0] not in ("StableAudio3DiTModel", "LongCatAudioDiTTransformer")
    how = {"lora": {"rank": 4, "alpha": 8.0}} if adapted else {"train": "full"}
    return model_of(ModelConfig(path=str(path), call=plain, dtype=dtype, **how))


@pytest.mark.parametrize("case", CASES, ids=told)
def test_the_denoiser_is_called_as_often_and_with_the_shapes_that_are_counted(case: Case, tmp_path: Path) -> None:
    pipe, call, path = arranged(case, tmp_path)
    seen, model, architecture = called(pipe, call), estimated(path, call), architecture_of(str(path))
    assert (model.branches, model.rows) == (case.evaluations, case.rows)
    assert [rows_of(given) for given in seen.calls] == [model.rows * len(PROMPTS)] + [len(PROMPTS)] * (
        model.branches - model.rows
    )
    name, config = architecture.denoiser
    family, given = FAMILIES[name], seen.calls[0]
    beside = {**architecture.inputs, **family.beside(call, architecture.inputs), **appended_tokens(architecture, call)}
    settings = {**built(name, config, torch.float32).config, **beside}
    text = next(given[key] for key in ("encoder_hidden_states", "cap_feats") if key in given)
    # A pipeline that does not pad prompts gives the tokens of its prompts; and tiny CLIPs read fewer tokens than CLIP.
    padded = family.text_tokens is not None and not family.fixed
    tokens = family.tokens(call) if padded else text[0].shape[0]
    counted = family.inputs(settings, latent_shape(architecture, call), tokens, model.rows * len(PROMPTS))
    found = {key: value for key, value in shapes(given).items() if key not in BESIDE}
    assert _same_text(shapes(counted)) == _same_text(found)
    assert model.elements == sum(math.prod(state.shape[1:]) for state in seen.states)


def _same_text(found: dict[str, Any]) -> dict[str, Any]:
    """The shapes, with texts of equal length: without padding, prompts of a batch differ."""
    return {key: (len(value) if key == "cap_feats" else value) for key, value in found.items()}


@pytest.mark.parametrize("case", CASES, ids=told)
def test_states_and_predictions_have_the_bytes_that_are_counted(case: Case, tmp_path: Path) -> None:
    """In bfloat16: a prediction takes two bytes a number if bfloat16 holds it exactly."""
    pipe, call, path = arranged(case, tmp_path)
    seen, model = called(pipe.to(torch.bfloat16), call), estimated(path, call, "bfloat16")
    assert {state.element_size() for state in seen.states} == {model.state_bytes}
    exact = all(torch.equal(found.float(), found.bfloat16().float()) for found in seen.predictions)
    assert model.prediction_bytes == (2 if exact else 4)


def test_a_distilled_klein_is_evaluated_once(tmp_path: Path) -> None:
    import diffusers

    from flowgrpo.pipelines.conformance.images import flux2_klein_parts

    pipe = diffusers.Flux2KleinPipeline(**flux2_klein_parts(), is_distilled=True)
    pipe.save_pretrained(tmp_path / "pipeline")
    call = dict(TINY["Flux2KleinPipeline"].call)
    assert len(called(pipe, call).calls) == estimated(tmp_path / "pipeline", call).branches == 1


@pytest.mark.parametrize(
    ("kind", "settings", "evaluations"),
    [
        ("ClassifierFreeGuidance", {"guidance_scale": 1.0}, 1),
        ("ClassifierFreeGuidance", {"guidance_scale": 6.0, "enabled": False}, 1),
        ("ClassifierFreeGuidance", {"guidance_scale": 6.0, "stop": 0.5}, 2),
        ("AdaptiveProjectedGuidance", {"guidance_scale": 6.0}, 2),
        ("SkipLayerGuidance", {"guidance_scale": 6.0, "skip_layer_guidance_layers": [0]}, 3),
    ],
)
def test_a_guider_says_how_often_a_state_is_evaluated(
    kind: str, settings: dict[str, Any], evaluations: int, tmp_path: Path
) -> None:
    import diffusers

    pipe = TINY["HunyuanVideo15Pipeline"].fresh()
    pipe.register_modules(guider=getattr(diffusers, kind)(**settings))
    pipe.save_pretrained(tmp_path / "pipeline")
    model = estimated(tmp_path / "pipeline", {"height": 16, "width": 16, "num_frames": 5})
    assert (model.branches, model.rows) == (evaluations, 1)
    # The negative prompt is encoded in a call of its own, and kept once for the run.
    assert model.prompt_bytes == 4 * (1000 * 16 + 256 * 16)


@pytest.mark.parametrize(
    ("entry", "config", "said"),
    [
        (["diffusers", "NoGuidance"], {}, "no estimate for a pipeline with the guider NoGuidance, because diffusers"),
        (["diffusers", "ClassifierFreeGuidance"], {"start": 2.0}, "does not take this configuration: Expected `start`"),
    ],
)
def test_a_guider_that_cannot_be_built_is_named(
    entry: list[str], config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    TINY["HunyuanVideo15Pipeline"].fresh().save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"guider": entry}))
    (tmp_path / "guider" / "guider_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=said):
        architecture_of(str(tmp_path))


def test_videos_of_hunyuan_video15_are_decoded_one_by_one(tmp_path: Path) -> None:
    TINY["HunyuanVideo15Pipeline"].fresh().save_pretrained(tmp_path)
    call = {"height": 16, "width": 16, "num_frames": 5}
    one, four = (
        estimate(recipe(model={"path": str(tmp_path), "call": call}, rollout={"decode_batch": size})).passing
        for size in (1, 4)
    )
    assert one["decoding"] == four["decoding"] > 0


@pytest.mark.parametrize("scale", [3.0, 1.0])
def test_ltx2_keeps_the_hidden_states_of_all_layers(scale: float, tmp_path: Path) -> None:
    """Its connectors make the denoiser's texts in each call of what `encode_prompt` returned."""
    case = Case("LTX2Pipeline", {"guidance_scale": scale, "audio_guidance_scale": scale}, 4, 2)
    pipe, call, path = arranged(case, tmp_path)
    texts = pipe.encode_prompt("a", "b", do_classifier_free_guidance=scale > 1, max_sequence_length=16)
    kept = [text for text in (texts[0], texts[2]) if text is not None]
    assert estimated(path, call).prompt_bytes == 4 * sum(text.numel() for text in kept)


def test_ltx2_has_further_networks_on_the_card(tmp_path: Path) -> None:
    pipe, call, path = arranged(Case("LTX2Pipeline", {}, 4, 2), tmp_path)
    parts = (pipe.connectors, pipe.audio_vae, pipe.vocoder)
    assert estimated(path, call).others == 4 * sum(t.numel() for part in parts for t in part.state_dict().values())


def test_a_class_of_the_recipe_keeps_what_belongs_to_the_weights() -> None:
    klein, base = (f"black-forest-labs/FLUX.2-klein-{name}" for name in ("4B", "base-4B"))
    assert architecture_of(klein, "Flux2KleinPipeline").one_evaluation
    assert not architecture_of(base, "Flux2KleinPipeline").one_evaluation
    assert architecture_of(base, "Flux2KleinKVPipeline").one_evaluation
    ltx2 = architecture_of("Lightricks/LTX-2")
    assert architecture_of("Lightricks/LTX-2", "LTX2ConditionPipeline") == ltx2


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("HunyuanVideoTransformer3DModel", {"image_condition_type": "token_replace"}),
        ("HunyuanVideoTransformer3DModel", {"in_channels": 33}),
        ("ZImageTransformer2DModel", {"siglip_feat_dim": 1152}),
    ],
)
def test_models_that_take_a_picture_have_no_estimate(name: str, changes: dict[str, Any]) -> None:
    config = {"in_channels": 16, "cap_feat_dim": 32, "text_embed_dim": 32, "pooled_projection_dim": 32, **changes}
    with pytest.raises(ValueError, match=f"no estimate for a {name} that"):
        FAMILIES[name].inputs(config, (16, 3, 8, 8), 16, 1)


@pytest.mark.parametrize(
    ("released", "said"), [(True, "write model.release_text_encoders: false"), (False, "a smaller evaluate.prompts")]
)
def test_embeddings_that_take_much_host_memory_have_a_remedy(released: bool, said: str) -> None:
    large = replace(estimate(recipe()), waiting={EMBEDDINGS: 33 * GIB}, released=released)
    [note] = [line for line in table(large) if "much host memory" in line]
    assert note.endswith(said)
    few = replace(large, waiting={EMBEDDINGS: 3 * GIB})
    assert not any("much host memory" in line for line in table(few))
