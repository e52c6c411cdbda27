"""Sampling and evaluation outside a run are the run's own, to the last bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusion3Pipeline
from numpy.typing import NDArray
from PIL import Image

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import dump_recipe, load_recipe
from flowgrpo.inference.evaluation import evaluate_model
from flowgrpo.inference.image_samples import model_images, sample_images
from flowgrpo.inference.model_recipes import evaluation_recipe, image_recipe
from flowgrpo.inference.opening import open_images
from flowgrpo.kit.given_samples import given_samples
from flowgrpo.pipelines.conformance.conform import TINY
from flowgrpo.pipelines.policy import FlowPolicy
from flowgrpo.rewards.base import RewardError
from flowgrpo.training.data import prompt_path
from flowgrpo.training.session import start
from flowgrpo.worlds.scenes.flow import CALL
from tests.conftest import Command
from tests.training.family_runs import PROMPTS, evaluations, load_as_the_kit_does, scores_of, trained

pytestmark = pytest.mark.slow

FAMILIES = [
    ("FluxPipeline", "lora"),
    ("QwenImagePipeline", "full"),
    ("LTXPipeline", "lora"),
    ("WanPipeline, 2.2 with two experts", "lora"),
    ("StableDiffusionXLPipeline", "full"),
]
# With random weights, it leaves the range of colours.
NO_RUN = {"PRXPixelPipeline"}
TABLE = Path(__file__).resolve().parents[2] / "docs" / "pipelines.json"
EVERY = [
    (row["name"], train)
    for row in json.loads(TABLE.read_text())["results"]
    for train in ("lora", "full")
    if row["name"] not in NO_RUN
    and {"lora": "lora", "full": "saved"}[train] in {o["check"] for o in row["outcomes"] if o["status"] == "pass"}
]


def shown(path: Path) -> NDArray[np.uint8]:
    return np.asarray(Image.open(path))


def require_the_runs_own(run: Path, folder: Path) -> None:
    """Pictures of the first and the last evaluation are made again by their noise, and the scores of both as well.

    Scores tell what pictures do not: a difference of less than a colour.
    """
    for iteration, base in ((0, True), (2, False)):
        records = evaluations(run, iteration)
        assert len({record["noise"] for record in records}) == len(records) == 6
        # One sample is in a full batch, and one is in the last batch, which is not full.
        for record in (records[1], records[-1]):
            out = folder / f"{iteration}-{record['sample']}"
            [path] = sample_images(str(run), [record["prompt"]], out, noise=record["noise"], base=base)
            assert np.array_equal(shown(path), shown(run / "samples" / record["image"]))
    for line, base in ((0, True), (-1, False)):
        found = evaluate_model(str(run), load_recipe(run / "config.yaml"), base=base)
        assert {name: mean for name, (mean, _, _) in found.items()} == scores_of(run, line)
        assert found["level"][2] == 6
    first, last = (shown(run / "samples" / evaluations(run, k)[0]["image"]) for k in (0, 2))
    assert not np.array_equal(first, last)


@pytest.mark.parametrize(("name", "train"), FAMILIES)
def test_a_picture_of_a_run_is_made_again(
    name: str, train: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_as_the_kit_does(name, monkeypatch)
    require_the_runs_own(trained(name, tmp_path, train), tmp_path)


@pytest.mark.every
@pytest.mark.parametrize(("name", "train"), EVERY)
def test_so_it_is_of_every_family(name: str, train: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_as_the_kit_does(name, monkeypatch)
    require_the_runs_own(trained(name, tmp_path, train), tmp_path)


@pytest.mark.every
@pytest.mark.parametrize("name", sorted({name for name, train in EVERY if train == "full"}))
def test_so_it_is_of_full_weights_in_half_precision(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_as_the_kit_does(name, monkeypatch)
    run = trained(name, tmp_path, "full", "model.dtype=bfloat16")
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert first["ratio/first_error"] == 0.0
    require_the_runs_own(run, tmp_path)


@pytest.mark.parametrize(
    ("name", "train", "changes"),
    [
        ("FluxPipeline", "lora", ["model.dtype=bfloat16"]),
        ("SanaPipeline", "full", ["model.dtype=bfloat16"]),
        ("StableDiffusion3Pipeline", "full", ["model.dtype=bfloat16", "penalties.kl.weight=0.1"]),
        ("FluxPipeline", "full", ["model.dtype=bfloat16", "optimizer.ema={decay: 0.5, every: 1}"]),
        ("FluxPipeline", "lora", ["evaluate.steps=5", "model.release_text_encoders=false"]),
        ("FluxPipeline", "full", ["sampler.sigmas=[1.0, 0.8, 0.5, 0.2, 0.0]", "rollout.batch=3"]),
    ],
)
def test_it_is_called_as_the_run_called_it(
    name: str, train: str, changes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_as_the_kit_does(name, monkeypatch)
    require_the_runs_own(trained(name, tmp_path, train, *changes), tmp_path)


# -- the results of a run, in plain diffusers ----------------------------------------------------------------------


@pytest.fixture(scope="module", params=["lora", "full"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, small: list[str]) -> Path:
    """A short run of the scenes model with a strong learning rate, which released its text encoders."""
    folder = tmp_path_factory.mktemp("inference") / "run"
    strong = ["run.iterations=2", "optimizer={learning_rate: 0.05, ema: null}", "model.release_text_encoders=true"]
    jpeg = "evaluate.rewards=[{name: jpeg_incompressibility}]"
    # Each prompt is encoded before the text encoders are released.
    few = folder.with_name("few.jsonl")
    few.write_text("".join(prompt_path("scenes:train").read_text().splitlines(keepends=True)[:4]))
    data = f"data={{train: {few}, heldout: 'scenes:heldout'}}"
    recipe = load_recipe("mixgrpo_flash_guard", [*small, jpeg, *strong, data, f"model.train={request.param}"])
    start(recipe, folder).trainer(Silent()).train()
    return folder


def test_plain_diffusers_makes_a_runs_picture_from_its_noise(finished: Path) -> None:
    """As README says; alone, and so the same but for rounding."""
    recipe = image_recipe(str(finished))
    absent = {"text_encoder_3": None, "tokenizer_3": None}
    if (finished / "pipeline").is_dir():
        pipe = StableDiffusion3Pipeline.from_pretrained(finished / "pipeline", **absent)
    else:
        pipe = StableDiffusion3Pipeline.from_pretrained(recipe.model.path, **absent)
        pipe.load_lora_weights(finished / "lora")
    pipe.set_progress_bar_config(disable=True)
    shape = (pipe.transformer.config.in_channels, 8, 8)
    for record in evaluations(finished, 2)[:3]:
        latents = torch.randn(1, *shape, generator=torch.Generator().manual_seed(record["noise"]))
        made = pipe(record["prompt"], latents=latents, num_inference_steps=recipe.sampler.steps, **CALL).images[0]
        own = shown(finished / "samples" / record["image"]).astype(int)
        assert abs(np.asarray(made).astype(int) - own).max() <= 1


@pytest.mark.parametrize("name", ["FluxPipeline", "QwenImagePipeline", "LTXPipeline"])
def test_plain_diffusers_takes_the_noise_of_packed_states(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`latents=` in the layout of the pipeline's own loop."""
    load_as_the_kit_does(name, monkeypatch)
    run, tiny = trained(name, tmp_path, "full"), TINY[name]
    pipe = DiffusionPipeline.from_pretrained(run / "pipeline")
    pipe.set_progress_bar_config(disable=True)
    shape = open_images(str(run), image_recipe(str(run))).evaluator(PROMPTS).policy.denoiser.probe.latent_shape
    [record, *_] = evaluations(run, 2)
    latents = torch.randn(1, *shape, generator=torch.Generator().manual_seed(record["noise"]))
    made = pipe(
        prompt=[record["prompt"]], latents=latents, num_inference_steps=tiny.steps, output_type="np", **tiny.call
    )[0][0]
    picture = np.concatenate(list(made), axis=1) if made.ndim == 4 else made
    own = shown(run / "samples" / record["image"]).astype(int)
    assert abs((picture * 255).round().astype(int) - own).max() <= 1


def test_the_result_of_a_run_is_a_model_folder_of_its_own(finished: Path, tmp_path: Path) -> None:
    if not (finished / "pipeline").is_dir():
        with pytest.raises(ValueError, match=r"holds a LoRA and no model.*A command that takes a run takes"):
            open_images(str(finished / "lora"), image_recipe(str(finished / "lora")))
        return
    how = ["evaluate.steps=4", "rollout.batch=6", "rollout.decode_batch=6"]
    noises = [record["noise"] for record in evaluations(finished, 2)]
    texts = [record["prompt"] for record in evaluations(finished, 2)]
    plain = model_images(str(finished / "pipeline"), texts, noises, how)
    own = np.stack([shown(finished / "samples" / record["image"]) for record in evaluations(finished, 2)])
    assert np.array_equal((plain.permute(0, 2, 3, 1) * 255).round().numpy().astype(np.uint8), own)


# -- sampling ------------------------------------------------------------------------------------------------------


def test_samples_are_written_seeded_and_never_overwritten(random_pipeline: Path, tmp_path: Path) -> None:
    texts, steps = ["a red circle", "a star"], ["evaluate.steps=2"]
    paths = sample_images(str(random_pipeline), texts, tmp_path / "one", seed=3, count=2, overrides=steps)
    assert [p.name for p in paths] == ["000-3.png", "000-4.png", "001-3.png", "001-4.png"]
    again = sample_images(str(random_pipeline), texts, tmp_path / "two", seed=3, count=2, overrides=steps)
    for one, two in zip(paths, again, strict=True):
        assert np.array_equal(shown(one), shown(two))
        assert shown(one).shape == (64, 64, 3)
    assert not np.array_equal(shown(paths[0]), shown(paths[1]))
    with pytest.raises(ValueError, match="exists; name another folder"):
        sample_images(str(random_pipeline), texts[:1], tmp_path / "one", seed=3, overrides=steps)
    sample_images(str(random_pipeline), texts[:1], tmp_path / "one", seed=9, overrides=steps)
    lines = [json.loads(line) for line in (tmp_path / "one" / "index.jsonl").read_text().splitlines()]
    listed = [(line["image"], line["prompt"], line["seed"]) for line in lines]
    assert listed == [
        ("000-3.png", "a red circle", 3), ("000-4.png", "a red circle", 4), ("001-3.png", "a star", 3),
        ("001-4.png", "a star", 4), ("000-9.png", "a red circle", 9),
    ]  # fmt: skip
    given = given_samples(tmp_path / "one")
    assert [one.prompt for one in given] == [line["prompt"] for line in lines]
    [once_more] = sample_images(
        str(random_pipeline), ["a star"], tmp_path / "four", noise=lines[2]["noise"], overrides=steps
    )
    # The image was made in a batch of four, so a number may be rounded to the next one.
    assert np.abs(shown(once_more).astype(int) - shown(paths[2])).max() <= 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "index.jsonl").write_text('{"phase": "eval"}\n')
    with pytest.raises(ValueError, match="lists samples that `sample` has not written"):
        sample_images(str(random_pipeline), texts[:1], tmp_path / "other", overrides=steps)
    with pytest.raises(ValueError, match="--noise belongs to one image"):
        sample_images(str(random_pipeline), texts[:1], tmp_path / "three", count=2, noise=1)


def test_an_image_does_not_depend_on_the_batch_beside_it(random_pipeline: Path) -> None:
    how = ["evaluate.steps=2"]
    together = model_images(str(random_pipeline), ["a red circle", "a star"], [5, 6], how)
    alone = model_images(str(random_pipeline), ["a star"], [6], how)
    torch.testing.assert_close(together[1:], alone, atol=1e-4, rtol=0)


def test_images_are_not_written_among_the_files_of_a_run(finished: Path) -> None:
    with pytest.raises(ValueError, match=r"so it is a run folder; name another folder with --out, such as .*/sampled"):
        sample_images(str(finished), ["a red circle"], finished)


def test_a_noise_that_is_none_of_the_runs_is_said_to_be_made_alone(finished: Path, tmp_path: Path) -> None:
    said: list[str] = []
    sample_images(str(finished), ["a red circle"], tmp_path, noise=1, say=said.append)
    assert said == [
        f"1 image(s) by {finished}: float32, 4 steps, batch 6",
        "no image of the run's evaluations has this prompt and noise; the image is made alone",
        str(tmp_path / "000-1.png"),
    ]


def test_an_unfinished_run_says_how_to_go_on(tmp_path: Path, small: list[str]) -> None:
    recipe = load_recipe("mixgrpo_flash_guard", small)
    (tmp_path / "config.yaml").write_text(dump_recipe(recipe))
    with pytest.raises(ValueError, match="no trained weights yet; finish it with `flowgrpo resume"):
        open_images(str(tmp_path), recipe)


def test_an_adapter_of_another_rank_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_as_the_kit_does("FluxPipeline", monkeypatch)
    run = trained("FluxPipeline", tmp_path)
    with pytest.raises(ValueError, match=r"is not the adapter that model\.lora .*\[2, 32\] in the file, and \[3, 32\]"):
        open_images(str(run), image_recipe(str(run), ["model.lora.rank=3"]))


# -- which recipe --------------------------------------------------------------------------------------------------


def test_of_a_named_recipe_a_run_takes_what_is_scored_and_not_how_it_samples(tmp_path: Path, small: list[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    own = load_recipe(
        "mixgrpo_flash_guard", [*small, "model.dtype=bfloat16", "rollout.batch=5", "model.call={guidance_scale: 3}"]
    )
    (run / "config.yaml").write_text(dump_recipe(own))
    assert evaluation_recipe(str(run), None, []) == own
    named = evaluation_recipe(str(run), "flow_grpo", ["evaluate.prompts=7", "model.call.guidance_scale=4"])
    asked = load_recipe("flow_grpo", ["evaluate.prompts=7"])
    assert (named.data, named.rewards, named.evaluate) == (asked.data, asked.rewards, asked.evaluate)
    assert (named.sampler, named.rollout) == (own.sampler, own.rollout)
    assert named.model == own.model.model_copy(update={"call": {"guidance_scale": 4}})
    with pytest.raises(ValueError, match=r"makes images, but text is a recipe of text"):
        evaluation_recipe(str(run), "text", [])


def test_rewards_that_would_not_score_the_evaluation_are_refused(tmp_path: Path, small: list[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    recipe = load_recipe("mixgrpo_flash_guard", small)
    (run / "config.yaml").write_text(dump_recipe(recipe))
    other = "rewards=[{name: jpeg_compressibility}]"
    with pytest.raises(ValueError, match=r"evaluate\.rewards .* \(gold\); write evaluate\.rewards in place of rewards"):
        evaluation_recipe(str(run), None, [other])
    found = evaluation_recipe(str(run), None, [other, "evaluate.rewards=null"])
    assert (found.rewards[0].name, found.evaluate.rewards) == ("jpeg_compressibility", None)
    assert evaluation_recipe(str(run), None, [f"evaluate.{other}"]).evaluate.rewards == found.rewards


def test_a_plain_model_needs_a_recipe_and_the_embedded_one_has_its_own(random_pipeline: Path) -> None:
    with pytest.raises(ValueError, match="it has no prompts and rewards for an evaluation; name a recipe"):
        evaluation_recipe(str(random_pipeline), None, ["evaluate.prompts=1"])
    assert evaluation_recipe("scenes", None, []).name == "default"
    assert evaluation_recipe("arithmetic", None, []).name == "text"
    assert evaluation_recipe(str(random_pipeline), "default", ["model.dtype=bfloat16"]).model.dtype == "bfloat16"


def test_the_command_says_at_once_what_it_does_and_how_far_it_is(command: Command, finished: Path) -> None:
    status, output, errors = command("evaluate", str(finished))
    assert (status, errors) == (0, "")
    said = output.splitlines()
    assert said[0] == f"{finished}: 3 prompts of scenes:heldout, 6 samples, scored by jpeg_incompressibility"
    assert said[1] == "float32, 4 steps, batch 6"
    assert said[2].startswith("6 of 6 samples, ")
    assert said[3] == "scoring 6 samples"
    assert said[4].startswith("jpeg_incompressibility: ")
    assert said[4].endswith("(6 images)")
    again = command("evaluate", str(finished), "evaluate.prompts=2", "rollout.batch=1", "model.dtype=bfloat16")[1]
    assert again.splitlines()[1:2] == ["bfloat16, 4 steps, batch 1"]
    assert "(4 images)" in again
    [record, *_] = evaluations(finished, 2)
    words = ("sample", record["prompt"], "--model", str(finished), "--noise", str(record["noise"]), "--out", "again")
    assert "made with the 5 other image(s) of its batch" in command(*words)[1]
    own = finished / "samples" / record["image"]
    assert np.array_equal(shown(Path(f"again/000-{record['noise']}.png")), shown(own))
    words = ("sample", "a star", "--model", str(finished), "--batch", "2", "--dtype", "bfloat16", "--steps", "3")
    said = command(*words, "--set", "model.call.guidance_scale=2.0", "--out", "other")[1].splitlines()
    assert said[0] == f"1 image(s) by {finished}: bfloat16, 3 steps, batch 2, guidance_scale 2.0"


def test_an_evaluation_keeps_its_images_with_their_rewards(finished: Path, tmp_path: Path, command: Command) -> None:
    status, output, errors = command("evaluate", str(finished), "--out", "kept")
    assert (status, errors) == (0, "")
    assert output.endswith("written to kept/index.jsonl\n")
    lines = [json.loads(line) for line in (tmp_path / "kept" / "index.jsonl").read_text().splitlines()]
    own = evaluations(finished, 2)
    assert len(lines) == len(own) > 1
    for line, record in zip(lines, own):
        assert {**line, "image": ""} == {**record, "image": ""}
        assert line["rewards"]["jpeg_incompressibility"] > 0
        assert np.array_equal(shown(tmp_path / "kept" / line["image"]), shown(finished / "samples" / record["image"]))
    status, _, errors = command("evaluate", str(finished), "--out", "kept")
    assert (status, "index.jsonl exists; name another folder with --out" in errors) == (1, True)
    for place, words in (
        ("samples/iter-000002", "eval-0000.png exists; name another"),
        ("", "so it is a run folder; name"),
    ):
        status, _, errors = command("evaluate", str(finished), "--base", "--out", str(finished / place))
        assert (status, words in errors) == (1, True)


def interrupted_after(monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
    """End the next command after some batches of images, as Ctrl-C does."""
    decode, made = FlowPolicy.decode, []

    def counted(self: FlowPolicy, *given: object, **more: object) -> torch.Tensor:
        if len(made) == batches:
            raise KeyboardInterrupt
        made.append(1)
        return decode(self, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(FlowPolicy, "decode", counted)


def test_what_was_sampled_before_an_interruption_is_kept(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ["rollout.batch=2", "rollout.decode_batch=1"]
    own = evaluation_recipe(str(finished), None, small)
    whole, kept = tmp_path / "whole", tmp_path / "kept"
    evaluate_model(str(finished), own, out=whole)
    interrupted_after(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        evaluate_model(str(finished), own, out=kept)
    lines, scored = ([json.loads(line) for line in (folder / "index.jsonl").open()] for folder in (kept, whole))
    assert (len(lines), len(scored)) == (4, 6)
    for line, other in zip(lines, scored):
        assert line["rewards"] == {}
        assert {**line, "rewards": 0, "sub_scores": 0} == {**other, "rewards": 0, "sub_scores": 0}
        assert (kept / line["image"]).read_bytes() == (whole / other["image"]).read_bytes()
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        sample_images(str(finished), ["a star", "a box"], tmp_path / "new", count=2, overrides=small, say=said.append)
    assert not (tmp_path / "new").is_dir() or not list((tmp_path / "new").iterdir())
    monkeypatch.undo()
    interrupted_after(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        sample_images(str(finished), ["a star", "a box"], tmp_path / "new", count=2, overrides=small, say=said.append)
    names = ["000-0.png", "000-1.png"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [*names, "index.jsonl"]
    assert len((tmp_path / "new" / "index.jsonl").read_text().splitlines()) == 2
    assert said[-2:] == [str(tmp_path / "new" / name) for name in names]


def test_a_reward_that_fails_costs_no_samples(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def broken(images, **_):\n    raise RuntimeError('no')\n")
    recipe = evaluation_recipe(str(finished), None, [f"evaluate.rewards=[{{name: '{tmp_path}/mine.py:broken'}}]"])
    said: list[str] = []
    with pytest.raises(RewardError, match="RuntimeError: no"):
        evaluate_model(str(finished), recipe, out=tmp_path / "kept", say=said.append)
    assert said[-1] == f"{tmp_path}/kept/index.jsonl lists the samples without rewards"
    lines = [json.loads(line) for line in (tmp_path / "kept" / "index.jsonl").open()]
    assert [line["rewards"] for line in lines] == [{}] * 6
    assert all((tmp_path / "kept" / line["image"]).is_file() for line in lines)


@pytest.mark.parametrize("words", [("--seed", "99999999999999999999"), ("--seed", "-1"), ("--noise", str(2**63))])
def test_a_seed_beyond_the_range_is_refused(words: tuple[str, ...], command: Command) -> None:
    status, _, errors = command("sample", "a red circle", *words)
    assert status
    assert f"Invalid value for '{words[0]}'" in errors
