"""`flowgrpo sample` takes size, guidance and the scale of a LoRA, and refuses what a pipeline does not take."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.core.addressing import address
from flowgrpo.inference.image_samples import sample_images
from flowgrpo.inference.model_recipes import evaluation_recipe, image_recipe
from flowgrpo.inference.opening import guidance_argument, open_images
from flowgrpo.pipelines.conformance.conform import TINY
from flowgrpo.training.session import start
from tests.conftest import Command
from tests.inference.test_inference import shown
from tests.training.family_runs import PROMPTS, load_as_the_kit_does, trained

pytestmark = pytest.mark.slow


def test_size_and_guidance_are_the_calls_own(random_pipeline: Path, tmp_path: Path, command: Command) -> None:
    words = ("sample", "a star", "--model", str(random_pipeline), "--steps", "2")
    made = {}
    for name, more in {
        "plain": (), "size": ("--height", "32", "--width", "48"), "guided": ("--guidance", "7"),
        "set": ("--set", "model.call.guidance_scale=7"),
    }.items():  # fmt: skip
        status, output, errors = command(*words, *more, "--out", name)
        assert (status, errors) == (0, "")
        made[name] = shown(tmp_path / name / "000-0.png")
        assert ("height 32, width 48" in output) == (name == "size")
    assert made["size"].shape == (32, 48, 3)
    assert np.array_equal(made["guided"], made["set"])
    assert not np.array_equal(made["guided"], made["plain"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--height", "33"), "model.call.height is 33, but this pipeline makes only multiples of 8; write 32 or 40"),
        (("--lora-scale", "0.5"), "this model has no LoRA whose scale could change"),
        (("--set", "model.call.strength=1"), "the pipeline has no argument 'strength'"),
    ],
)
def test_what_the_call_does_not_take_is_refused(
    random_pipeline: Path, command: Command, words: tuple[str, ...], said: str
) -> None:
    status, _, errors = command("sample", "a star", "--model", str(random_pipeline), *words)
    assert (status, said in " ".join(errors.split())) == (1, True), errors


@pytest.mark.parametrize("option", ["--height", "--width", "--guidance", "--lora-scale"])
def test_a_language_model_takes_none_of_them(command: Command, option: str) -> None:
    status, _, errors = command("sample", "1+1=", "--model", "arithmetic", option, "8")
    assert (status, f"{option} is not for text" in errors) == (1, True), errors


def test_the_argument_of_the_guidance_is_found(tmp_path: Path) -> None:
    for name, found in {"WanPipeline": "guidance_scale", "ChromaPipeline": "guidance_scale"}.items():
        TINY[name].fresh().save_pretrained(tmp_path / name)
        assert guidance_argument(str(tmp_path / name)) == found
    TINY["QwenImagePipeline"].fresh().save_pretrained(tmp_path / "two")
    config = tmp_path / "two" / "transformer" / "config.json"
    said = json.loads(config.read_text())
    for embeds, found in ((True, "guidance_scale"), (False, "true_cfg_scale")):
        config.write_text(json.dumps({**said, "guidance_embeds": embeds}))
        assert guidance_argument(str(tmp_path / "two")) == found
    config.write_text(json.dumps({key: value for key, value in said.items() if key != "guidance_embeds"}))
    with pytest.raises(ValueError, match=r"two kinds of guidance, guidance_scale and true_cfg_scale.*--set"):
        guidance_argument(str(tmp_path / "two"))


def test_the_scale_of_a_lora_is_that_of_plain_diffusers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_as_the_kit_does("FluxPipeline", monkeypatch)
    run = trained("FluxPipeline", tmp_path)
    made = {}
    for scale in (None, 1.0, 0.5, 0.0):
        [path] = sample_images(str(run), ["a star"], tmp_path / str(scale), seed=4, lora_scale=scale)
        made[scale] = shown(path).astype(int)
    [path] = sample_images(str(run), ["a star"], tmp_path / "base", seed=4, base=True)
    assert np.array_equal(made[1.0], made[None])
    assert np.array_equal(made[0.0], shown(path))
    assert not np.array_equal(made[0.5], made[1.0])
    tiny = TINY["FluxPipeline"]
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "pipeline")
    pipe.set_progress_bar_config(disable=True)
    pipe.load_lora_weights(run / "lora", adapter_name="mine")
    pipe.set_adapters("mine", 0.5)
    shape = open_images(str(run), image_recipe(str(run))).evaluator(PROMPTS).policy.denoiser.probe.latent_shape
    latents = torch.randn(1, *shape, generator=torch.Generator().manual_seed(address(4, 0)))
    plain = pipe(prompt=["a star"], latents=latents, num_inference_steps=tiny.steps, output_type="np", **tiny.call)[0]
    assert abs((plain[0] * 255).round().astype(int) - made[0.5]).max() <= 1


def test_a_run_of_all_weights_has_no_lora_to_scale(tmp_path: Path, random_pipeline: Path, small: list[str]) -> None:
    recipe = load_recipe("mixgrpo_flash_guard", [*small, "run.iterations=1", "model.train=full"])
    start(recipe, tmp_path / "run").trainer(Silent()).train()
    # A word that says what is trained would be ignored: the weights of the run are there.
    for refuse in (image_recipe, partial(evaluation_recipe, source=None), partial(evaluation_recipe, source="default")):
        with pytest.raises(ValueError, match=r"model\.train says which weights are trained"):
            refuse(str(tmp_path / "run"), overrides=["model.train=lora"])
    moved = image_recipe(str(tmp_path / "run"), ["model.path=scenes"])
    with pytest.raises(ValueError, match=r"run has trained whole weights; leave model\.path out, or add --base"):
        open_images(str(tmp_path / "run"), moved)
    assert Path(open_images(str(tmp_path / "run"), moved, base=True).folder).parent.name == "scenes"
    with pytest.raises(ValueError, match="has no LoRA whose scale"):
        open_images(str(tmp_path / "run"), image_recipe(str(tmp_path / "run")), lora_scale=2.0)
