"""`flowgrpo bench iteration`: real shapes, random weights, no weight read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from flowgrpo.bench.model_iteration import iteration
from flowgrpo.bench.timed_iterations import TimedIterations
from flowgrpo.cli.app import app
from flowgrpo.configs.load import load_image_recipe, load_recipe
from flowgrpo.estimate.known_models import masked_shapes_of
from flowgrpo.pipelines.architectures import architecture_of, built
from flowgrpo.pipelines.conformance import conform as run
from flowgrpo.pipelines.denoiser import Denoiser
from flowgrpo.pipelines.known_pipelines import KNOWN
from flowgrpo.pipelines.random_weights import WITH_RANDOM_WEIGHTS, random_pipeline
from flowgrpo.worlds.arithmetic.masked_building import build_masked_model
from flowgrpo.worlds.arithmetic.problems import build_model
from tests.text.diffusion_folders import FOLDERS

CPU = torch.device("cpu")


WITH_RANDOM = (
    "StableDiffusion3Pipeline", "FluxPipeline", "Flux2Pipeline", "Flux2KleinPipeline", "QwenImagePipeline",
    "ZImagePipeline", "WanPipeline",
)  # fmt: skip


@pytest.fixture(scope="module", params=WITH_RANDOM)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A tiny pipeline's name and its folder without any weight."""
    path = tmp_path_factory.mktemp("shapes") / request.param
    run.TINY[request.param].fresh().save_pretrained(path)
    for weights in path.rglob("*.safetensors"):
        weights.unlink()
    return request.param, path


@pytest.mark.slow
def test_a_folder_without_weights_gives_its_pipeline_with_random_ones(folder: tuple[str, Path]) -> None:
    name, path = folder
    call = dict(run.TINY[name].call)
    pipe, again = (random_pipeline(str(path), call, torch.float32, CPU, seed=1) for _ in range(2))
    assert type(pipe).__name__ == name
    shapes = {key: value.shape for key, value in run.TINY[name].fresh().transformer.state_dict().items()}
    assert {key: value.shape for key, value in pipe.transformer.state_dict().items()} == shapes
    assert all(map(torch.equal, pipe.transformer.parameters(), again.transformer.parameters()))
    assert not any(isinstance(part, nn.Module) for key, part in pipe.components.items() if "text_encoder" in key)
    denoiser = Denoiser(pipe, num_steps=2, call=call)
    denoiser.self_check(["red circle", "two stars"])
    x = torch.randn(2, *denoiser.probe.latent_shape)
    one, other = denoiser.velocity(x, 0, ["a", "a"]), denoiser.velocity(x, 0, ["a", "b"])
    assert torch.equal(one[0], other[0])
    assert not torch.equal(one[1], other[1])
    assert bool(one.any())


@pytest.mark.slow
def test_drawing_weights_leaves_the_random_state_and_the_default_format_alone(folder: tuple[str, Path]) -> None:
    before = torch.get_rng_state()
    pipe = random_pipeline(str(folder[1]), {}, torch.bfloat16, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() == torch.float32
    assert pipe.vae.dtype == torch.bfloat16


OTHERS = [model for model in KNOWN if architecture_of(model).denoiser[0] not in WITH_RANDOM_WEIGHTS]


@pytest.mark.parametrize("model", OTHERS)
def test_other_denoisers_are_refused(model: str) -> None:
    name = architecture_of(model).denoiser[0]
    with pytest.raises(ValueError, match=f"there are no random weights for a {name}; use a model with one of SD3"):
        random_pipeline(model, {}, torch.bfloat16, torch.device("meta"))


WITH_PICTURES = [model for model in KNOWN if "-I2V-" in model]


@pytest.mark.parametrize("model", WITH_PICTURES)
def test_models_that_take_a_picture_are_refused(model: str) -> None:
    with pytest.raises(
        ValueError, match=r"takes a picture with the state \(36 channels, and the autoencoder makes 16\)"
    ):
        random_pipeline(model, {}, torch.bfloat16, torch.device("meta"))


EDITS = [model for model in KNOWN if KNOWN[model].inputs.get("picture_tokens")]


@pytest.mark.parametrize("model", EDITS)
def test_random_weights_of_a_pipeline_that_edits_pictures_are_refused(model: str) -> None:
    with pytest.raises(
        ValueError, match="no random weights for a pipeline that edits a picture; use the text-to-image"
    ):
        random_pipeline(model, {}, torch.bfloat16, torch.device("meta"))


@pytest.mark.slow
@pytest.mark.parametrize("model", [model for model in KNOWN if model not in OTHERS + WITH_PICTURES + EDITS])
def test_every_known_transformer_has_a_class_that_takes_its_parts(model: str) -> None:
    """At real size on `meta`, everything that the pipeline's constructor and the first self-check need exists."""
    name, config = architecture_of(model).denoiser
    with torch.device("meta"):
        pipe = random_pipeline(model, {}, torch.bfloat16, torch.device("meta"))
    expected = sum(p.numel() for p in built(name, config, torch.bfloat16).parameters())
    assert sum(p.numel() for p in pipe.transformer.parameters()) == expected


@pytest.mark.slow
def test_an_iteration_is_measured_by_the_command_with_no_prompt_or_reward_of_the_recipe_at_hand(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tiny"
    run.TINY["StableDiffusion3Pipeline"].fresh().save_pretrained(path)
    words = ["flow_grpo_fast+sd35_medium+pickscore+gpus1", f"model.path={path}", "rollout.prompts=2", "rollout.group=2"]
    words += ["model.call={height: 16, width: 16, guidance_scale: 1.0}", "model.dtype=float32", "evaluate.steps=2"]
    words += ["sampler.steps=4", "sampler.plan.window={size: 1, stop: 2}", "optimizer.updates=1"]
    result = CliRunner().invoke(app, ["bench", "iteration", *words, "--out", str(tmp_path / "figures.json")])
    assert result.exit_code == 0, result.output
    assert "StableDiffusion3Pipeline" in result.output
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["images"] == 4
    assert len(found["seconds"]) == 3
    assert found["first_error"] == 0
    assert "ratio before the first update: exactly 1" in result.output
    assert all(found["part_seconds"][name] > 0 and found["tflops"][name] > 0 for name in ("sampling", "training"))
    assert sum(found["part_seconds"].values()) <= sum(found["seconds"]) / 3
    assert found["peak_bytes"] > 0
    assert found["peaks"] == {}
    assert sum(found["shares"].values()) == pytest.approx(1.0)
    assert found["parameters"] > sum(
        p.numel() for p in run.TINY["StableDiffusion3Pipeline"].fresh().transformer.parameters()
    )


def test_a_model_of_unknown_size_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="someone/else"):
        iteration(load_image_recipe("mixgrpo_flash_guard", ["model.path=someone/else"]), tmp_path / "run", print, 3)


SMALL = ["rollout={prompts: 2, group: 4, batch: 8, tokens: 4096}", "generation={max_tokens: 12, max_prompt_tokens: 20}"]


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    """A folder with nothing but the configuration of a small language model."""
    path = tmp_path / "shapes"
    build_model(1000, width=32, layers=2, heads=2).config.save_pretrained(path)
    return path


def measured(tmp_path: Path, *words: str) -> tuple[dict[str, Any], str]:
    """The figures and the output of the command for a recipe of text."""
    out = tmp_path / "figures.json"
    result = CliRunner().invoke(
        app, ["bench", "iteration", "text", *SMALL, *words, "--repeats", "2", "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    return json.loads(out.read_text()), result.output


@pytest.mark.slow
def test_a_language_model_is_measured_with_no_weight_prompt_or_reward_of_the_recipe_at_hand(
    shapes: Path, tmp_path: Path
) -> None:
    rewards = "rewards=[{name: math_answer, options: {answer: missing}}]"
    found, said = measured(tmp_path, f"model.path={shapes}", "data.train=none.txt", "data.heldout=none.txt", rewards)
    assert found["class"] == "Olmo2ForCausalLM"
    assert found["parameters"] == sum(p.numel() for p in build_model(1000, width=32, layers=2, heads=2).parameters())
    assert (found["completions"], found["prompt_tokens"], len(found["seconds"])) == (8, 20, 2)
    assert all(80 < tokens <= 96 for tokens in found["tokens"])
    assert found["first_error"] == 0
    assert all(norm > 0 for norm in found["grad_norm"])
    assert all(found["part_seconds"][name] > 0 for name in ("sampling", "training"))
    assert sum(found["part_seconds"].values()) <= sum(found["seconds"]) / 2
    assert found["tflops"]["training"] > 0
    assert (found["peaks"], found["estimated_peaks"]) == ({}, {})
    assert "8 completions of" in said
    assert "after prompts of 20" in said
    assert "ratio before the first update: exactly 1" in said


@pytest.mark.slow
def test_prompts_have_the_length_of_the_longest_prompt_of_the_recipe(tmp_path: Path) -> None:
    found, _ = measured(tmp_path)
    assert found["prompt_tokens"] == len("47+85=")


@pytest.mark.slow
def test_completions_count_although_none_ends(shapes: Path, tmp_path: Path) -> None:
    found, _ = measured(tmp_path, f"model.path={shapes}", "objective.drop_truncated=true")
    assert all(norm > 0 for norm in found["grad_norm"])


@pytest.mark.slow
def test_equal_commands_measure_equal_work(shapes: Path, tmp_path: Path) -> None:
    one, other = (measured(tmp_path, f"model.path={shapes}", "model.train=lora")[0] for _ in range(2))
    assert one["grad_norm"] == other["grad_norm"]
    assert one["tokens"] == other["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "kind"), [("masked", "llada"), ("diffu_grpo", "dream"), ("masked", "bert")])
def test_a_masked_model_is_measured_with_its_configuration_alone(recipe: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    if kind == "bert":
        build_masked_model(300, width=32, layers=2, heads=2).config.save_pretrained(path)
    else:
        masked_shapes_of(str(FOLDERS[kind](tmp_path / "whole"))).save_pretrained(path)
    words = [f"model.path={path}", "data.train=none.txt", "data.heldout=none.txt", "sampler.steps=4"]
    words += ["generation={tokens: 8, max_prompt_tokens: 20}", "rollout={prompts: 2, group: 4, batch: 8}"]
    out = tmp_path / "figures.json"
    result = CliRunner().invoke(app, ["bench", "iteration", recipe, *words, "--repeats", "2", "--out", str(out)])
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert found["class"] == {"llada": "LLaDAModelLM", "dream": "DreamModel", "bert": "BertForMaskedLM"}[kind]
    assert (found["completions"], found["prompt_tokens"], len(found["seconds"])) == (8, 20, 2)
    # The completions of a prompt begin as one state.
    assert found["states"] == [2 * (1 + 3 * 4)] * 2
    assert found["first_error"] == 0
    assert all(norm > 0 for norm in found["grad_norm"])
    assert "8 completions of 8 tokens after prompts of 20" in result.output


@pytest.mark.parametrize(
    ("recipe", "words", "said"),
    [
        ("text", ["generation.engine=vllm"], "generation.engine is vllm, which reads real weights; write"),
        ("text", ["model.path=someone/else"], "the configuration of someone/else is not on this machine"),
        ("masked", ["model.path=someone/else"], "the configuration of someone/else is not on this machine"),
    ],
)
def test_what_cannot_be_measured_is_refused(recipe: str, words: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        iteration(load_recipe(recipe, words), tmp_path / "run", print, 1)


@pytest.mark.parametrize(("seconds", "said"), [([1.0, 3.0], "2.00"), ([1.0, 2.0, 6.0], "2.00")])
def test_an_even_number_of_iterations_has_its_median(seconds: list[float], said: str) -> None:
    lines: list[str] = []
    timed = TimedIterations(CPU, [{}] * len(seconds), {"rest": seconds}, seconds, 0.0, {})
    timed.tell_times(lines.append, "24 images")
    assert lines[0].startswith(f"an iteration: {said} s for 24 images, median of {len(seconds)} (1.00 to ")
