"""Estimates of models of sounds: costs counted on `meta` against real evaluations, and published sizes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from flowgrpo.estimate.estimates import estimate
from flowgrpo.estimate.footprint import Footprint, LiveBytes, decoding, footprint
from flowgrpo.pipelines.architectures import architecture_of, built, latent_shape
from flowgrpo.pipelines.conformance.sounding import same
from flowgrpo.pipelines.families import FAMILIES
from flowgrpo.pipelines.known_pipelines import (
    ACE_CONDITIONS,
    ACE_TOKENIZERS,
    KNOWN,
    QWEN3_EMBEDDING,
    SA3_DURATION,
    T5GEMMA_BASE,
    UMT5_BASE,
)
from flowgrpo.training.model_paths import sample_noun
from tests.estimate.test_estimates import recipe
from tests.estimate.test_footprint import kept_storages, predicted, total

MEDIUM, LONGCAT = "stabilityai/stable-audio-3-medium", "ruixiangma/LongCat-AudioDiT-1B-Diffusers"
TURBO, XL = "Runware/acestep-v15-turbo-diffusers", "ACE-Step/acestep-v15-xl-turbo-diffusers"
TINY: dict[str, dict[str, Any]] = {
    "StableAudio3DiTModel": {
        "io_channels": 8, "embed_dim": 64, "depth": 3, "num_heads": 4, "cond_token_dim": 32, "global_cond_dim": 32,
        "local_add_cond_dim": 9, "timestep_features_dim": 16, "num_memory_tokens": 4,
    },
    "AceStepTransformer1DModel": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "in_channels": 24, "audio_acoustic_hidden_dim": 8,
    },
    "LongCatAudioDiTTransformer": {
        "dit_dim": 64, "dit_depth": 3, "dit_heads": 4, "dit_text_dim": 32, "latent_dim": 8,
    },
}  # fmt: skip
LATENT, TEXT = (8, 48), 12
AGAIN = ["StableAudio3DiTModel", "AceStepTransformer1DModel"]
"""Classes that can evaluate their blocks a second time."""


def given(name: str, module: Any, rows: int) -> dict[str, Any]:
    return FAMILIES[name].inputs(dict(module.config), LATENT, TEXT, rows)


def counted(name: str, rows: int = 2) -> Footprint:
    module = built(name, TINY[name], torch.float32).requires_grad_(True)
    with torch.device("meta"):
        return footprint(module, given(name, module, rows), rows)


def real(name: str, rows: int = 2) -> tuple[nn.Module, dict[str, Any]]:
    import diffusers

    torch.manual_seed(0)
    module: nn.Module = getattr(diffusers, name).from_config(TINY[name])

    def filled(value: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(value) if value.dtype == torch.bool else torch.rand_like(value)

    return module, tree_map_only(torch.Tensor, filled, given(name, module, rows))


@pytest.mark.parametrize("name", TINY)
def test_operations_are_those_torch_counts_in_a_real_evaluation(name: str) -> None:
    module, inputs = real(name)
    forward = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), forward, torch.no_grad():
        predicted(module, inputs)
    assert 2 * counted(name).forward == pytest.approx(forward.get_total_flops(), rel=0.01)


@pytest.mark.parametrize("name", TINY)
def test_saved_bytes_are_what_autograd_keeps(name: str) -> None:
    module, inputs = real(name)
    with kept_storages(module) as storages:
        predicted(module, inputs)
        assert 2 * counted(name).saved == pytest.approx(sum(storages.values()), rel=0.02)


@pytest.mark.parametrize("name", AGAIN)
def test_kept_bytes_are_those_alive_after_a_real_evaluation(name: str) -> None:
    module, inputs = real(name)
    module.enable_gradient_checkpointing()  # type: ignore[operator]
    live = LiveBytes()
    with live:
        predictions = predicted(module, inputs)
    alive = live.now - sum(t.untyped_storage().nbytes() for t in predictions)
    assert 2 * counted(name).kept == pytest.approx(alive, rel=0.05)
    total(predictions).backward()


def test_a_class_that_cannot_evaluate_again_keeps_everything() -> None:
    found = counted("LongCatAudioDiTTransformer")
    assert (found.kept, found.block, found.recompute) == (found.saved, 0, 0.0)


def test_decoding_a_sound_is_counted_as_in_a_real_one() -> None:
    torch.manual_seed(0)
    vae, latent = same(), torch.rand(1, 8, 64)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter, sdpa_kernel(SDPBackend.MATH):
        vae.decode(latent)
    found = decoding(built("AutoencoderSAME", dict(vae.config), torch.float32), latent.to("meta"))
    assert found.flops == pytest.approx(counter.get_total_flops(), rel=0.05)


@pytest.mark.parametrize(
    ("path", "billions", "decoder"),
    [(MEDIUM, 1.453, 0.852), (LONGCAT, 0.982, None), (TURBO, 1.575, None), (XL, 4.169, None)],
)
def test_known_models_have_their_published_sizes(path: str, billions: float, decoder: float | None) -> None:
    known = KNOWN[path]
    for (name, config), expected in ((known.denoiser, billions), (known.vae, decoder)):
        numbers = sum(p.numel() for p in built(name, config, torch.bfloat16).parameters())
        assert expected is None or numbers / 1e9 == pytest.approx(expected, rel=1e-3)


def test_encoders_have_the_numbers_of_their_classes() -> None:
    """T5Gemma base, UMT5 base and Qwen3-Embedding-0.6B; the classes of diffusers have the released sizes."""
    import transformers as hf
    from diffusers.pipelines.ace_step import (
        AceStepAudioTokenDetokenizer,
        AceStepAudioTokenizer,
        AceStepConditionEncoder,
    )
    from diffusers.pipelines.stable_audio_3 import StableAudio3DurationEmbedder

    gemma = {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 12,
        "head_dim": 64, "intermediate_size": 2048, "vocab_size": 256_000,
    }  # fmt: skip
    qwen = {
        "vocab_size": 151_669, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    }  # fmt: skip
    umt5 = {"d_model": 768, "d_ff": 2048, "d_kv": 64, "num_layers": 12, "num_heads": 12, "vocab_size": 256_384}
    with torch.device("meta"):
        modules: dict[int, list[nn.Module]] = {
            T5GEMMA_BASE: [hf.T5GemmaEncoderModel(hf.T5GemmaConfig(encoder=gemma, is_encoder_decoder=False))],
            UMT5_BASE: [hf.UMT5EncoderModel(hf.UMT5Config(**umt5))],
            QWEN3_EMBEDDING: [hf.Qwen3Model(hf.Qwen3Config(**qwen))],
            SA3_DURATION: [StableAudio3DurationEmbedder()],
            ACE_CONDITIONS: [AceStepConditionEncoder()],
            ACE_TOKENIZERS: [AceStepAudioTokenizer(), AceStepAudioTokenDetokenizer()],
        }
    for expected, parts in modules.items():
        # The silence of the condition encoder is a buffer.
        silence = sum(b.numel() for part in parts for n, b in part.named_buffers() if n == "silence_latent")
        assert sum(p.numel() for part in parts for p in part.parameters()) + silence == expected, parts


def test_latents_have_the_length_of_the_call_and_else_of_the_class() -> None:
    # 44100 samples a second, 4096 for a latent; 48000 and 1920; 24000 and 2048.
    assert latent_shape(KNOWN[MEDIUM], {}) == (256, 108)
    assert latent_shape(KNOWN[MEDIUM], {"duration": 30.0}) == (256, 323)
    assert latent_shape(KNOWN[XL], {}) == (64, 1500)
    assert latent_shape(KNOWN[LONGCAT], {"audio_duration_s": 10.0}) == (64, 117)
    assert latent_shape(KNOWN[LONGCAT], {"audio_duration_s": 99.0}) == latent_shape(KNOWN[LONGCAT], {}) == (64, 351)


@pytest.mark.parametrize(
    ("path", "call"), [(MEDIUM, "duration"), (TURBO, "audio_duration"), (LONGCAT, "audio_duration_s")]
)
def test_longer_sounds_take_more_memory_and_time(path: str, call: str) -> None:
    short, long = (
        estimate(recipe(model={"path": path, "train": "full", "dtype": "bfloat16", "call": {call: s}}))
        for s in (5.0, 20.0)
    )
    assert long.peak > short.peak
    assert long.iteration_seconds > 2 * short.iteration_seconds


@pytest.mark.parametrize(("turbo", "evaluations"), [(True, 1), (False, 2)])
def test_a_folder_says_whether_its_guidance_is_distilled(turbo: bool, evaluations: int, tmp_path: Path) -> None:
    files = {
        "model_index.json": {
            "_class_name": "AceStepPipeline",
            "transformer": ["diffusers", "AceStepTransformer1DModel"],
            "vae": ["diffusers", "AutoencoderOobleck"],
            "condition_encoder": ["ace_step", "AceStepConditionEncoder"],
        },
        "transformer/config.json": {"is_turbo": turbo},
        "vae/config.json": {},
        "condition_encoder/config.json": {"text_hidden_dim": 1024},
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    found = architecture_of(str(tmp_path))
    assert found.inputs["kept_width"] == 1024
    family = FAMILIES["AceStepTransformer1DModel"]
    assert family.evaluations({}, found.one_evaluation).number == evaluations


def test_messages_call_the_samples_of_a_known_model_sounds() -> None:
    assert sample_noun(recipe(model={"path": XL})) == "sound"
    assert sample_noun(recipe(model={"path": "Lightricks/LTX-2"})) == "image"
