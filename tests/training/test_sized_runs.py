"""Runs on prompts of several sizes: each size is what a run of that size alone is, and nothing else changes."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image
from safetensors.torch import load_file

from flowgrpo.bench.interruption import contents
from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import dump_recipe, load_recipe
from flowgrpo.gallery.build import build_gallery
from flowgrpo.inference import image_samples
from flowgrpo.inference.evaluation import evaluate_model
from flowgrpo.inference.image_samples import sample_images
from flowgrpo.training.data import PromptRow
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.images.sized_rollout import SizedRollout
from flowgrpo.training.joined_rollouts import JoinedObjective
from flowgrpo.training.model_paths import load_pipeline
from flowgrpo.training.reporting.clock import Clock
from flowgrpo.training.session import Session, start
from flowgrpo.training.tasks import FlowTask
from flowgrpo.worlds.scenes.flow import CALL
from tests.conftest import Command

pytestmark = pytest.mark.slow
SIZES = [(32, 64), None, (64, 32), (32, 64), (48, 48), None]
REWARD = """
def level(images, **columns):
    assert images.ndim == 4
    return images.double().mean(dim=(1, 2, 3)).tolist()

def far(images, prompts, groups, height, width, **columns):
    assert all(images.shape[-2:] == (h or 64, w or 64) for h, w in zip(height, width))
    return level(images)

far.remote = True
"""


def written(folder: Path, sizes: list[Any], name: str = "p.jsonl") -> Path:
    folder.mkdir(exist_ok=True)
    with (folder / name).open("w") as file:
        for k, size in enumerate(sizes):
            own = {} if size is None else {"height": size[0], "width": size[1]}
            file.write(json.dumps({"prompt": f"a red star and {k} circles", "n": k, **own}) + "\n")
    return folder / name


@pytest.fixture
def words(small: list[str], tmp_path: Path) -> list[str]:
    (tmp_path / "reward.py").write_text(REWARD)
    return [
        *small, "sampler.plan.shared_noise=false", "rollout={prompts: 3, group: 3, batch: 3, decode_batch: 3}",
        f"rewards=[{{name: '{tmp_path / 'reward.py'}:level'}}]", "evaluate={every: 2, prompts: 6, seeds: 2}",
        "optimizer={updates: 2, learning_rate: 0.01, ema: {decay: 0.5}}",
        "run={iterations: 2, checkpoint_every: 1, keep: 9, sample_every: 1, seed: 0}",
    ]  # fmt: skip


def trained(folder: Path, recipe: str, words: list[str], file: Path, *more: str) -> Path:
    found = load_recipe(recipe, [*words, f"data.train={file}", f"data.heldout={file}", *more])
    start(found, folder).trainer(Silent()).train()
    return folder


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "lora" / "pytorch_lora_weights.safetensors")


@pytest.mark.parametrize("recipe", ["mixgrpo_flash_guard", "default", "neighbor_grpo"])
def test_every_image_has_its_size_and_the_ratio_is_exactly_1(tmp_path: Path, words: list[str], recipe: str):
    more = ["sampler.plan.window=null"] if recipe != "mixgrpo_flash_guard" else []
    words = [word for word in words if not (more and word.startswith("sampler"))]
    once = ["optimizer.updates=1", "model.train=lora"] if recipe == "default" else []
    run = trained(tmp_path / "run", recipe, words, written(tmp_path, SIZES), *once)
    records = lines(run, "samples/index.jsonl")
    assert {record["phase"] for record in records} == {"train", "eval"}
    for record in records:
        size = SIZES[record["prompt_id"]] or (64, 64)
        image = Image.open(run / "samples" / record["image"])
        assert (image.height, image.width) == size
        assert record["columns"]["n"] == record["prompt_id"]
    done = [record for record in lines(run, "metrics.jsonl") if "ratio/first_error" in record]
    assert len(done) == 2
    assert all(record["ratio/first_error"] == 0.0 for record in done)
    assert any(float(value.abs().max()) > 0 for name, value in weights(run).items() if "lora_B" in name)
    page = build_gallery(run)
    assert page.is_file()


@pytest.mark.parametrize("objective", ["transition", "forward"])
def test_suspects_and_novel_images_are_found_among_all_sizes(tmp_path: Path, words: list[str], objective: str):
    (tmp_path / "reward.py").write_text(
        REWARD + "\ndef dark(images, **columns):\n    return [-x for x in level(images)]\n"
    )
    more = [
        f"rewards=[{{name: '{tmp_path / 'reward.py'}:level'}}, {{name: '{tmp_path / 'reward.py'}:dark', weight: 0}}]",
        "extensions=[{name: suspects, light: [dark]}, {name: novelty, features: pixels}]", f"objective={objective}",
        "penalties=[{name: gated_kl, weight: 1.0}]", "sampler.plan.window=all", "optimizer.learning_rate=0.001",
    ]  # fmt: skip
    run = trained(tmp_path / "run", "flow_grpo", words, written(tmp_path, SIZES), *more)
    done = [record for record in lines(run, "metrics.jsonl") if "ratio/first_error" in record]
    # The brightest of nine images is the only one above the quantile.
    assert [record["suspects/marked"] for record in done] == [pytest.approx(1 / 9), pytest.approx(1 / 9)]
    assert all(record["novelty/distance"] > 0 for record in done)
    assert done[1]["gated_kl"] > 0


def test_prompts_of_one_size_are_a_run_of_that_size(tmp_path: Path, words: list[str]):
    file, plain = written(tmp_path, [(32, 48)] * 6), written(tmp_path / "plain", [None] * 6)
    by_columns = trained(tmp_path / "columns", "mixgrpo_flash_guard", words, file)
    by_call = trained(tmp_path / "call", "mixgrpo_flash_guard", words, plain, "model.call={height: 32, width: 48}")
    for name, value in weights(by_call).items():
        assert torch.equal(weights(by_columns)[name], value), name
    for ours, theirs in zip(lines(by_columns, "metrics.jsonl"), lines(by_call, "metrics.jsonl"), strict=True):
        assert {k: v for k, v in ours.items() if not k.startswith("time/")} == {
            k: v for k, v in theirs.items() if not k.startswith("time/")
        }


def test_sizes_of_held_out_prompts_leave_the_training_as_it_is(tmp_path: Path, words: list[str]):
    # Credit by depth reads one rollout of all prompts, and evaluations have no credit.
    words = [word for word in words if not word.startswith(("sampler", "rollout", "optimizer"))]
    words += ["rollout={prompts: 2, group: 16, batch: 16, decode_batch: 16}", "optimizer={cut: prompts, updates: 1}"]
    heldout = f"data.heldout={written(tmp_path / 'heldout', SIZES)}"
    run = trained(tmp_path / "run", "branchgrpo", words, written(tmp_path, [None] * 6), heldout, "run.iterations=1")
    shown = [record for record in lines(run, "samples/index.jsonl") if record["phase"] == "eval"]
    assert {Image.open(run / "samples" / record["image"]).size for record in shown} == {
        (64, 32), (64, 64), (32, 64), (48, 48)
    }  # fmt: skip


def task_of(words: list[str], file: Path, *more: str) -> FlowTask:
    recipe = load_recipe("mixgrpo_flash_guard", [*words, f"data.train={file}", "data.heldout=null", *more])
    task = Session(recipe).task
    assert isinstance(task, FlowTask)
    return task


def test_a_prompt_gets_the_images_that_it_gets_alone(tmp_path: Path, words: list[str]):
    file = written(tmp_path, SIZES)
    recipe = load_recipe("mixgrpo_flash_guard", [*words, f"data.train={file}", "data.heldout=null"])
    session = Session(recipe)
    task, rows = session.task, session.data.train.rows
    clock, keys = Clock(task.device, task.clock_parts), list(range(100, 106))
    chunks: list[Any] = []
    with torch.no_grad():
        mixed = task.rollout(rows, keys, 0, clock, (2, 3), chunks.append)
    assert isinstance(mixed, SizedRollout)
    assert [size for size, _ in mixed.kinds] == [(32, 64), None, (64, 32), (48, 48)]
    assert sorted(mixed.prompt_of_sample) == sorted([0, 1, 2, 3, 4, 5] * 3)
    task.compare_with(nullcontext)
    objective = task.objective(task.recipe, None)
    objective.prepare(mixed)
    assert isinstance(objective, JoinedObjective)
    for own, (size, _), part in zip(objective._each(mixed), mixed.kinds, mixed.rounds):
        height, width = size or (64, 64)
        assert own.elements == part.rollout.x[0].numel() == 8 * height * width // 64
        assert own.policy.reference is nullcontext
    for place, (row, key) in enumerate(zip(rows, keys)):
        call = dict(zip(("height", "width"), row.size or (64, 64)))
        one = written(tmp_path / "one", [None])
        alone = task_of(words, one, f"model.call={json.dumps(call)}", "rollout.prompts=1", "optimizer.updates=1")
        with torch.no_grad():
            found = alone.rollout([type(row)(0, row.text)], [key], 0, clock, ())
        mine = [image for image, owner in zip(mixed.samples, mixed.prompt_of_sample) if owner == place]
        assert torch.equal(torch.stack(mine), found.samples)


def test_the_noise_levels_of_a_size_are_the_pipelines_own(tmp_path: Path, random_pipeline: Path, words: list[str]):
    folder = tmp_path / "pipeline"
    shutil.copytree(random_pipeline, folder)
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=3.0, max_image_seq_len=64, base_image_seq_len=4
    )
    scheduler.save_pretrained(folder / "scheduler")
    source = [f"model.path={folder}", f"data.train={written(tmp_path, SIZES)}", "data.heldout=null"]
    session = Session(load_recipe("mixgrpo_guard", [*words, *source]))
    task, rows = session.task, session.data.train.rows
    assert isinstance(task, FlowTask)
    with torch.no_grad():
        mixed = task.rollout(rows, list(range(6)), 0, Clock(task.device, task.clock_parts), ())
    tables = {size: part.plan.sigmas for (size, _), part in zip(mixed.kinds, mixed.rounds)}
    assert len(set(tables.values())) == 3  # 32 × 64 and 64 × 32 have as many latents
    pipe = load_pipeline(str(folder), torch.float32)
    for size, sigmas in tables.items():
        height, width = size or (64, 64)
        call = {**CALL, "height": height, "width": width, "num_inference_steps": 4, "output_type": "latent"}
        pipe("a red star", **call)
        assert tuple(pipe.scheduler.sigmas.tolist()) == sigmas


def test_an_interrupted_run_goes_on_to_the_last_bit(tmp_path: Path, words: list[str], command: Command):
    file = written(tmp_path, SIZES)
    reward = tmp_path / "reward.py"
    both = f"rewards=[{{name: '{reward}:level'}}, {{name: '{reward}:far', weight: 0.5}}]"
    run = trained(tmp_path / "run", "mixgrpo_flash_guard", words, file, "rollout.chunk=1", both)
    # A reward that runs elsewhere gets the chunks while the rest is sampled.
    for record in lines(run, "samples/index.jsonl"):
        assert record["rewards"]["far"] == record["rewards"]["level"]
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "lora")
    shutil.rmtree(copy / "checkpoints" / "iter-000002")
    assert command("resume", str(copy))[0] == 0
    assert contents(copy) == contents(run)


def test_pictures_and_scores_of_a_run_are_made_again(tmp_path: Path, words: list[str]):
    run = trained(tmp_path / "run", "mixgrpo_flash_guard", words, written(tmp_path, SIZES), "rollout.batch=2")
    records = [r for r in lines(run, "samples/index.jsonl") if r["phase"] == "eval" and r["iteration"] == 2]
    assert len(records) == 12
    for record in records[::3]:
        [path] = sample_images(str(run), [record["prompt"]], tmp_path / str(record["sample"]), noise=record["noise"])
        assert path.read_bytes() == (run / "samples" / record["image"]).read_bytes()
    found = evaluate_model(str(run), load_recipe(run / "config.yaml"), out=tmp_path / "evaluated")
    assert found["level"][0] == lines(run, "metrics.jsonl")[-1]["eval/level"]
    for record, again in zip(records, lines(tmp_path, "evaluated/index.jsonl"), strict=True):
        picture, other = (run / "samples" / record.pop("image"), tmp_path / "evaluated" / again.pop("image"))
        assert again == record
        assert picture.read_bytes() == other.read_bytes()


def test_a_picture_is_made_with_those_of_its_size(monkeypatch: pytest.MonkeyPatch):
    recipe = load_recipe("default", ["rollout={batch: 2, decode_batch: 2, group: 2}", "evaluate.seeds=1"])
    rows = [PromptRow(k, f"p{k}", size=size) for k, size in enumerate(SIZES)]
    monkeypatch.setattr(image_samples, "read_heldout", lambda recipe: rows)

    class Opened:
        sized = staticmethod(list)
        illustrated = staticmethod(lambda rows, source: rows)

    Opened.recipe = recipe  # type: ignore[attr-defined]
    keys = image_samples.evaluation_noises(rows, 1)
    for asked, together in ((3, [0, 3]), (1, [1, 5]), (4, [4])):
        said: list[str] = []
        found = image_samples._company(Opened(), f"p{asked}", keys[asked], None, said.append)  # type: ignore[arg-type]
        prompts, noises, [place], sizes = found
        assert prompts == [f"p{k}" for k in together]
        assert noises == [keys[k] for k in together]
        assert together[place] == asked
        assert sizes == [SIZES[k] for k in together]


def test_sample_makes_each_prompt_of_a_file_in_its_size(
    tmp_path: Path, random_pipeline: Path, words: list[str], command: Command
):
    file = written(tmp_path, SIZES[:3])
    given = ["sample", "--file", str(file), "--model", str(random_pipeline), "--steps", "2", "--set", "rollout.batch=2"]
    status, _, errors = command(*given, "--out", "mixed", "--count", "2")
    assert status == 0, errors
    for k, size in enumerate(SIZES[:3]):
        for seed in range(2):
            image = Image.open(tmp_path / "mixed" / f"{k:03d}-{seed}.png")
            assert (image.height, image.width) == (size or (64, 64))
    # What the command line says comes first.
    assert command(*given, "--out", "one", "--height", "32", "--width", "32")[0] == 0
    assert {Image.open(path).size for path in (tmp_path / "one").glob("*.png")} == {(32, 32)}
    wrong = written(tmp_path, [(32, 33)], "wrong.jsonl")
    status, _, errors = command("sample", "--file", str(wrong), "--model", str(random_pipeline), "--out", "none")
    assert status == 1
    assert f"{wrong}, line 1: width is 33" in errors


def test_rounds_and_templates_hold_every_size(tmp_path: Path, words: list[str]):
    budget = "rollout={prompts: 3, group: 3, batch: 3, decode_batch: 3, budget: {choice: variance, rounds: 2, most: 4}}"
    run = trained(
        tmp_path / "run", "mixgrpo_flash_guard", words, written(tmp_path, SIZES), budget, "optimizer.updates=1"
    )
    first = lines(run, "metrics.jsonl")[0]
    assert first["ratio/first_error"] == 0.0
    assert first["samples"] == 18
    for record in lines(run, "samples/index.jsonl"):
        image = Image.open(run / "samples" / record["image"])
        assert (image.height, image.width) == (SIZES[record["prompt_id"]] or (64, 64))
    assert dump_recipe(load_recipe(run / "config.yaml"))
    assert RunFolder.open(run).list_checkpoints()
