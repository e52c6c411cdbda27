"""Training on given images: they are a rollout without steps, scored and trained as samples are."""

from __future__ import annotations

import inspect
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.pipelines.conformance.conform import TINY
from flowgrpo.pipelines.denoiser import Denoiser
from flowgrpo.pipelines.policy import FlowPolicy
from flowgrpo.training.checking import check
from flowgrpo.training.data import read_prompts, with_given
from flowgrpo.training.folder.model_card import CardFacts, card_text
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.images.conditioning import illustrated
from flowgrpo.training.planning import forecast, nfe_of
from flowgrpo.training.session import Session
from flowgrpo.training.trainer import Trainer
from flowgrpo.weights.trained import LoraSpec, TrainedWeights
from tests.training import ranks


def picture(path: Path, seed: int, size: tuple[int, int] = (64, 64)) -> None:
    noise = np.random.default_rng(seed).integers(0, 256, (size[1] // 8, size[0] // 8, 3), dtype=np.uint8)
    Image.fromarray(noise).resize(size, Image.Resampling.NEAREST).save(path)


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """A file of three pairs, of pictures of several sizes."""
    folder = tmp_path / "pairs"
    folder.mkdir()
    rows = []
    for k, size in enumerate([(64, 64), (128, 64), (64, 96)]):
        row: dict[str, Any] = {"prompt": f"a red circle {k}", "better": 0.5 + k, "worse": 0.25}
        for n, word in enumerate(("chosen", "rejected")):
            picture(folder / f"{word}-{k}.png", 10 * k + n, size)
            row[word] = f"{word}-{k}.png"
        rows.append(row)
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def words(model: Path, file: Path, *more: str) -> list[str]:
    return [
        f"model.path={model}", f"data.train={file}", "data.heldout=null", "rollout.prompts=3", "sampler.steps=4",
        "objective.times=null", "optimizer.ema=null", *more,
    ]  # fmt: skip


def trainer_of(folder: Path, overrides: list[str]) -> Trainer:
    return Session(load_recipe("diffusion_dpo", overrides), RunFolder.create(folder, "")).trainer(Silent())


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.task.weights.named_parameters().items()}


@pytest.mark.slow
def test_given_samples_are_trained_without_sampling(random_pipeline: Path, pairs: Path, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "run", words(random_pipeline, pairs))
    first, second = trainer.iterate(0), trainer.iterate(1)

    assert first["evaluations"] == 0
    assert first["reward/given"] == 0.5
    # At rest the policy prefers neither, and each image has half of the pair's log 2.
    assert first["preferred"] == 0.5
    assert first["loss"] == pytest.approx(math.log(2) / 2, rel=1e-5)
    assert first["ratio/first_error"] == 0.0
    assert second["loss"] < first["loss"]
    assert second["preferred"] > 0.9
    lines = [json.loads(line) for line in (tmp_path / "run/samples/index.jsonl").read_text().splitlines()]
    assert [line["rewards"]["given"] for line in lines] == [1.0, 0.0] * 3
    assert not any("noise" in line for line in lines)
    for line in lines:
        word = "chosen" if line["rewards"]["given"] else "rejected"
        shown = Image.open(tmp_path / "run/samples" / line["image"])
        assert shown.size == (64, 64)
        source = Image.open(pairs.parent / line["columns"][word]).convert("RGB")
        if source.size == (64, 64):
            assert np.abs(np.asarray(shown, dtype=int) - np.asarray(source, dtype=int)).max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_run_says_how_well_images_come_back_and_whether_the_call_guides(
    scale: float, random_pipeline: Path, pairs: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(tmp_path / "run", words(random_pipeline, pairs, f"model.call.guidance_scale={scale}"))
    said = list(trainer.task.describe())
    fidelity = trainer.task.fidelity  # type: ignore[attr-defined]
    assert f"given images come back from their latents with {fidelity:.1f} dB (PSNR, the first prompt)" in said
    # A VAE of random weights loses everything.
    assert fidelity < 15
    assert any(line.startswith("note: this is very little") for line in said)
    assert any("the loss trains its guided velocity" in line for line in said) == (scale > 1)


@pytest.mark.slow
def test_chunks_of_given_samples_change_nothing(random_pipeline: Path, pairs: Path, tmp_path: Path) -> None:
    whole = trainer_of(tmp_path / "whole", words(random_pipeline, pairs, "rollout.decode_batch=2"))
    parts = trainer_of(tmp_path / "parts", words(random_pipeline, pairs, "rollout.decode_batch=2", "rollout.chunk=1"))
    _, one = whole.collect(0)
    _, two = parts.collect(0)
    assert torch.equal(one.rollout.x, two.rollout.x)
    assert torch.equal(one.samples, two.samples)
    for name in ("parent", "depth", "prompt", "root", "branch", "stride", "leaf"):
        assert torch.equal(getattr(one.rollout, name), getattr(two.rollout, name)), name
    assert one.given() == two.given() == {"given_place": [0, 1] * 3, "given_places": [2] * 6}
    whole.iterate(0)
    parts.iterate(0)
    one_weights, two_weights = weights_of(whole), weights_of(parts)
    assert all(torch.equal(one_weights[name], two_weights[name]) for name in one_weights)


@pytest.mark.slow
def test_a_run_on_two_processes_equals_a_run_on_one(random_pipeline: Path, pairs: Path, tmp_path: Path) -> None:
    # A batch holds the same states on one process and on two.
    same = ("rollout.batch=2", "rollout.decode_batch=2", "run.iterations=2", "run.sample_every=1")
    more = words(random_pipeline, pairs, *same)
    ranks.run_all(
        [
            {"words": ["train", "diffusion_dpo", "--out", str(tmp_path / name), *more], "count": count, "log": log}
            for name, count, log in (("one", 1, str(tmp_path / "log1")), ("two", 2, str(tmp_path / "log2")))
        ]
    )
    runs = [RunFolder.open(tmp_path / name) for name in ("one", "two")]
    one, two = ([line for line in run.read_metrics() if "loss" in line] for run in runs)
    assert [line["preferred"] for line in one] == [line["preferred"] for line in two]
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=1e-5)
    shown = [
        [(row["prompt"], row["rewards"], (run.path / "samples" / row["image"]).read_bytes()) for row in index_of(run)]
        for run in runs
    ]
    assert shown[0] == shown[1]
    assert len(shown[0]) == 2 * 6


def index_of(run: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.index.read_text().splitlines()]


@pytest.mark.slow
def test_a_resumed_run_on_given_samples_equals_an_unbroken_one(random_pipeline: Path, pairs: Path, command) -> None:
    run = {"iterations": 3, "checkpoint_every": 1, "sample_every": 1, "keep": 3}
    more = [*words(random_pipeline, pairs), f"run={json.dumps(run)}"]
    assert command("train", "diffusion_dpo", "--out", "one", *more)[0] == 0
    assert command("train", "diffusion_dpo", "--out", "two", *more)[0] == 0
    shutil.rmtree(Path("two/checkpoints/iter-000003"))
    shutil.rmtree(Path("two/checkpoints/iter-000002"))
    assert command("resume", "two")[0] == 0
    states = [(Path(name) / "checkpoints/iter-000003/trained.safetensors").read_bytes() for name in ("one", "two")]
    assert states[0] == states[1]


@pytest.mark.slow
def test_scores_of_the_data_are_the_rewards(random_pipeline: Path, pairs: Path, tmp_path: Path) -> None:
    reward = "rewards=[{name: given, options: {scores: [better, worse]}}]"
    trainer = trainer_of(tmp_path / "run", words(random_pipeline, pairs, reward))
    rows, experience = trainer.collect(0)
    scores = trainer.score(trainer.rewards, rows, experience).values[:, 0].tolist()
    assert scores == [value for row in rows for value in (row.columns["better"], row.columns["worse"])]


@pytest.mark.slow
def test_a_model_reward_may_rank_the_given_samples(random_pipeline: Path, pairs: Path, tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path / "run", words(random_pipeline, pairs, "rewards=[{name: jpeg_compressibility}]", "rollout.group=2")
    )
    assert trainer.iterate(0)["preferred"] == 0.5


@pytest.mark.slow
def test_matching_learns_the_given_samples(random_pipeline: Path, pairs: Path, tmp_path: Path) -> None:
    more = ["objective.loss=matching", "sampler.plan.columns=[chosen]", "rollout.group=1"]
    trainer = trainer_of(tmp_path / "run", words(random_pipeline, pairs, *more))
    losses = [trainer.iterate(k)["loss"] for k in range(6)]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_guidance_is_not_told_where_rows_say_nothing_of_it(tmp_path: Path) -> None:
    """Mochi's states are evaluated in two steps, of one row each, and nothing guides."""
    for name, scale, told in (("MochiPipeline", 1.0, False), ("FluxPipeline", 3.5, False), ("SanaPipeline", 4.0, True)):
        tiny = TINY[name]
        call = {**tiny.call, "guidance_scale": scale, "negative_prompt": "ugly"}
        denoiser = Denoiser(pipe := tiny.fresh(), num_steps=4, call=call)
        denoiser.self_check(["a cat"])
        policy = FlowPolicy(denoiser, TrainedWeights.lora(pipe, LoraSpec(rank=2, alpha=2.0), seed=0))
        assert policy.guides("a cat") == told, name
        # FLUX.1 reads a negative prompt only with a true_cfg_scale.
        assert policy.unread("a cat") == (["negative_prompt"] if name == "FluxPipeline" else []), name


@pytest.mark.slow
def test_given_videos_are_trained(tmp_path: Path) -> None:
    tiny = TINY["WanPipeline"]
    tiny.fresh().save_pretrained(tmp_path / "model")
    for n, word in enumerate(("chosen", "rejected")):
        picture(tmp_path / f"{word}.png", n, (5 * 40, 40))
    row = {"prompt": "a cat", "chosen_file_name": "chosen.png", "rejected_file_name": "rejected.png"}
    frames = {"chosen_frames": 5, "rejected_frames": 5}
    file = tmp_path / "metadata.jsonl"
    file.write_text(json.dumps(row | frames) + "\n")
    call = json.dumps({name: value for name, value in tiny.call.items() if isinstance(value, (int, float))})
    more = words(tmp_path / "model", file, "rollout.prompts=1", f"model.call={call}")
    trainer = trainer_of(tmp_path / "run", more)
    _, experience = trainer.collect(0)
    assert experience.samples.shape[:3] == (2, 5, 3)
    assert trainer.iterate(0)["loss"] == pytest.approx(math.log(2) / 2, rel=1e-4)
    file.write_text(json.dumps(row | {"chosen_frames": 4, "rejected_frames": 4}) + "\n")
    with pytest.raises(ValueError, match=r"makes videos of 5 frames .* and the data give a video of 4 frames"):
        trainer_of(tmp_path / "other", more)


def test_a_recipe_on_given_samples_says_what_it_costs(tmp_path: Path) -> None:
    recipe = load_recipe("diffusion_dpo")
    found = forecast(recipe)
    assert (found.counts[0].evaluations, found.counts[0].leaves, found.images) == (0, 2, 32)
    nfe = nfe_of(recipe, found)
    assert (nfe.old, nfe.theta) == (0, 3)


@pytest.mark.slow
def test_plan_says_that_nothing_is_sampled_and_draws_no_tree(command) -> None:
    status, said, _ = command("plan", "diffusion_dpo")
    assert status == 0
    assert "nothing is sampled: the images are in the columns chosen, rejected of scenes:pairs" in said
    status, _, told = command("plan", "diffusion_dpo", "--draw")
    assert status != 0
    assert "the plan takes its images from the data, so there is nothing to sample and no tree" in told


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["rollout.group=4"], r"rollout\.group is 4, and sampler\.plan\.columns names 2: chosen, rejected; write"),
        (["sampler.plan.columns=[a, a]"], r"name one column or more, each once"),
        (["sampler.plan.columns=[]"], r"name one column or more, each once"),
    ],
)
def test_columns_that_do_not_fit_are_refused(more: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        forecast(load_recipe("diffusion_dpo", more))


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (
            ["objective=transition"],
            "plan given samples nothing, so there are no steps to train, and objective is trans",
        ),
        (
            ["sampler.solver=dpmpp_2m"],
            r"sampler\.solver is dpmpp_2m, and plan given takes no step, so it has no effect",
        ),
        (["sampler.kernel=cps"], r"sampler\.kernel is cps.* no step of plan given draws noise, so it has no effect"),
        (
            ["rollout.budget={}"],
            r"plan given trains on the samples of the data, and rollout\.budget samples a prompt in",
        ),
    ],
)
def test_what_cannot_go_with_given_samples_is_refused(more: list[str], why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        load_recipe("diffusion_dpo", more)


def test_the_card_of_a_result_says_that_samples_were_given() -> None:
    said = "It was trained on samples that the data give, and that rewards rank, by flowgrpo."
    assert said in card_text(load_recipe("diffusion_dpo"), [], CardFacts("lora", 6))
    assert said in card_text(load_recipe("text_dpo"), [], CardFacts("model", 6))
    assert said not in card_text(load_recipe("flow_dpo"), [], CardFacts("lora", 6))


def faults(*more: str) -> list[str]:
    return check(load_recipe("diffusion_dpo", list(more))).texts("fault")


@pytest.mark.slow
def test_faults_of_the_data_are_told_before_the_run(pairs: Path) -> None:
    assert faults(f"data.train={pairs}", "rollout.prompts=3") == []
    (pairs.parent / "rejected-1.png").unlink()
    (gone,) = faults(f"data.train={pairs}", "rollout.prompts=3")
    assert "line 2: the picture" in gone
    assert "rejected-1.png does not exist" in gone
    (absent,) = faults(f"data.train={pairs}", "rollout.prompts=3", "sampler.plan.columns=[chosen, other]")
    assert "no column 'other' of images (it has better, chosen, rejected, worse)" in absent
    (pairs.parent / "words.txt").write_text("a dot\na star\n")
    [alone] = faults(f"data.train={pairs.parent / 'words.txt'}", "rollout.prompts=2")
    assert "no column 'chosen' of images (it has no column but the prompt); " in alone
    (evaluated,) = faults("evaluate.rewards=[{name: given}]")
    assert "reward 'given' reads how the data rank given samples, and these samples are not given" in evaluated


@pytest.mark.parametrize("name", ["image", "image_file_name"])
def test_a_pipeline_that_edits_is_not_shown_the_picture_that_it_learns(name: str, pairs: Path) -> None:
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    pairs.write_text("".join(json.dumps({"prompt": row["prompt"], name: row["chosen"]}) + "\n" for row in rows))
    found = with_given(read_prompts(str(pairs)), str(pairs), ["image"])
    assert [(len(row.given), dict(row.columns)) for row in found] == [(1, {})] * 3
    # A pipeline that needs a picture says so, in the place of being shown the solution.
    needs = {"image": inspect.Parameter("image", inspect.Parameter.POSITIONAL_OR_KEYWORD)}
    with pytest.raises(ValueError, match="the pipeline needs a picture for each prompt"):
        illustrated(found, str(pairs), {}, needs)


def test_a_number_of_frames_divides_the_width(pairs: Path) -> None:
    rows = [row.with_columns({"chosen_frames": 3}) for row in read_prompts(str(pairs))]
    with pytest.raises(ValueError, match=r"`chosen_frames` is 3, and the picture is 64 pixels wide"):
        with_given(rows, str(pairs), ["chosen", "rejected"])


def test_pictures_of_a_table_are_read(pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pick-a-Pic keeps the bytes of its pictures; `datasets.Image` keeps bytes and paths."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    held = [(pairs.parent / f"{word}-0.png").read_bytes() for word in ("chosen", "rejected")]
    table = pa.table(
        {
            "caption": ["a cat"],
            "jpg_0": pa.array([held[0]], pa.binary()),
            "jpg_1": [{"bytes": held[1], "path": "x.png"}],
            "label_0": [1.0],
            "label_1": [0.0],
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "pick.parquet")
    source = f"{tmp_path / 'pick.parquet'}?column=caption"
    (row,) = with_given(read_prompts(source), source, ["jpg_0", "jpg_1"])
    assert row.text == "a cat"
    assert [sample.picture.path.read_bytes() for sample in row.given] == held
    assert dict(row.columns) == {"label_0": 1.0, "label_1": 0.0}
