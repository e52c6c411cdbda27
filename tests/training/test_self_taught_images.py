"""Models of images that teach themselves: whose weights the teacher has, and what it reads or sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import RecipeError, dump_recipe, load_recipe
from flowgrpo.pipelines.conformance.conditioned import mask, picture
from flowgrpo.pipelines.conformance.conform import TINY
from flowgrpo.pipelines.conformance.images import sd3_parts
from flowgrpo.pipelines.conformance.tiny import Tiny
from flowgrpo.training.checking import check
from flowgrpo.training.data import Data, PromptStream, read_prompts
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.images.conditioning import call_parameters, take_pictures
from flowgrpo.training.prompt_embeddings import kept_prompts, met_prompts
from flowgrpo.training.session import Session
from flowgrpo.training.trainer import Trainer
from tests.parts.own_parts import same_when_resumed
from tests.training import test_sharding
from tests.training.test_inpainting import CALL, KIND
from tests.training.test_processes import Runs, printed, require_equal, run_all, statuses

SMALL = (
    "rollout={prompts: 2, group: 2, batch: 4}", "sampler.steps=4", "rewards=[{name: jpeg_compressibility}]",
    "data.heldout=null", "evaluate.rewards=null",
)  # fmt: skip
TAUGHT = "model.teachers=[{template: '{detailed}', weights: WEIGHTS}]"
KLEIN = "Flux2KleinPipeline"


def prompts_in(folder: Path, rows: list[dict[str, Any]] | None = None) -> Path:
    """Two prompts. The column of the first has the prompt's own words, and the column of the second has other words."""
    rows = rows or [{"prompt": "a star", "detailed": "a star"}, {"prompt": "a ring", "detailed": "a large blue ring"}]
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def words_of(model: Path, prompts: Path, weights: str, *more: str) -> list[str]:
    reference = "{decay: 0.5, every: 1}" if weights == "reference" else "null"
    taught = TAUGHT.replace("WEIGHTS", weights)
    return [f"model.path={model}", *SMALL, f"data.train={prompts}", taught, f"reference={reference}", *more]


def trainer_of(model: Path, folder: Path, weights: str, *more: str) -> Trainer:
    recipe = load_recipe("d_opsd", words_of(model, prompts_in(folder), weights, *more))
    return Session(recipe, RunFolder.create(folder / "run", "")).trainer(Silent())


def moved(trainer: Trainer) -> None:
    """Move the trained weights far from their start."""
    with torch.no_grad():
        for parameter in trainer.task.weights.parameters():
            parameter.add_(0.05)
    trainer.task.weights.write()


def distances(trainer: Trainer) -> dict[str, list[float]]:
    """The largest distance of each trained step from its teacher's, by prompt."""
    _, e = trainer.collect(0)
    found: dict[str, list[float]] = {text: [] for text in e.prompts}
    for transitions, batch in trainer.objective.batches(e, 0, None):
        apart = trainer.task.policy.score(e, transitions, batch).to_teacher().abs().flatten(1).amax(1)
        for edge, value in zip(transitions.state[transitions.edges_of(batch)].tolist(), apart.tolist()):
            found[e.prompts[transitions.prompt[edge]]].append(value)
    return found


@pytest.mark.parametrize("train", ["lora", "full"])
@pytest.mark.parametrize("weights", ["start", "reference", "present"])
def test_a_teacher_with_the_same_words_and_weights_is_the_model_to_the_last_bit(
    weights: str, train: str, random_pipeline: Path, tmp_path: Path
) -> None:
    """Before the first update all weights are the same, so only other words make a distance."""
    trainer = trainer_of(random_pipeline, tmp_path, weights, f"model.train={train}")
    found = distances(trainer)
    assert {text: len(values) for text, values in found.items()} == {"a star": 6, "a ring": 6}
    assert found["a star"] == [0.0] * 6
    assert min(found["a ring"]) > 1e-4


def test_a_teacher_reads_its_words_with_the_weights_that_it_is_given(random_pipeline: Path, tmp_path: Path) -> None:
    """The start stays, the average lags behind, and the present weights are the model's own."""
    texts = ("a star", "a large blue ring")
    seen: dict[str, torch.Tensor] = {}
    for weights in ("start", "reference", "present"):
        folder = tmp_path / weights
        folder.mkdir()
        trainer = trainer_of(random_pipeline, folder, weights)
        moved(trainer)
        policy = trainer.task.policy
        policy.bind(trainer.task.plan_for(0))
        x = torch.randn(2, *policy.denoiser.probe.latent_shape, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            seen["own"] = policy.velocity_of(texts)(x, 1, range(2))
            with policy.as_teacher("teacher"):
                seen[weights] = policy.velocity_of(texts)(x, 1, range(2))
            with trainer.task.weights.reference():
                seen["base"] = policy.velocity_of(texts)(x, 1, range(2))
    assert torch.equal(seen["present"], seen["own"])
    assert torch.equal(seen["start"], seen["base"])
    # The average has seen no step yet, and is still what the weights were when the run began.
    assert torch.equal(seen["reference"], seen["base"])
    assert not torch.equal(seen["own"], seen["base"])


def test_the_loss_is_the_squared_distance_of_the_velocities(random_pipeline: Path, tmp_path: Path) -> None:
    trainer = trainer_of(random_pipeline, tmp_path, "reference")
    trainer.iterate(0)
    _, e = trainer.collect(1)
    assert e.contexts == tuple("a star" if text == "a star" else "a large blue ring" for text in e.prompts)
    policy, total, count = trainer.task.policy, 0.0, 0
    policy.bind(e.plan)
    for t in e.rollout.transitions:
        with torch.no_grad():
            own = policy.velocity_of(e.prompts)(t.x, t.step, t.prompt)
            with trainer.averages["anchor"].applied():
                taught = policy.velocity_of(e.contexts)(t.x, t.step, t.prompt)
        total += float((own - taught).double().square().flatten(1).mean(1)[t.state].sum())
        count += len(t.state)
    record = trainer.update(e, torch.zeros(len(e.rollout.parent)))
    assert count == 2 * 2 * 3
    assert record["taught"] == record["loss"] == pytest.approx(total / count, rel=1e-4)
    assert total > 0


@pytest.mark.parametrize("weights", ["reference", "present"])
def test_a_run_resumes_to_the_last_bit(weights: str, random_pipeline: Path, tmp_path: Path) -> None:
    more = ("run.iterations=2", "run.checkpoint_every=1", "optimizer.updates=2", "optimizer.learning_rate=0.01")
    words = words_of(random_pipeline, prompts_in(tmp_path), weights, *more, "model.release_text_encoders=true")
    same_when_resumed("d_opsd", words, tmp_path)


def test_only_a_teacher_that_reads_something_else_reads_it(random_pipeline: Path, tmp_path: Path) -> None:
    """Of two teachers, one reads the prompts, and before the first update it is the model itself."""
    prompts = prompts_in(tmp_path, [
        {"prompt": "a star", "teacher": "plain"}, {"prompt": "a ring", "teacher": "wordy", "size": "large"},
    ])  # fmt: skip
    teachers = "model.teachers=[{name: plain}, {name: wordy, template: '{prompt}, {size}'}]"
    words = words_of(random_pipeline, prompts, "start", teachers)
    trainer = Session(load_recipe("d_opsd", words), RunFolder.create(tmp_path / "run", "")).trainer(Silent())
    found = distances(trainer)
    # Each teacher's states are a batch of their own, so the last bits differ.
    assert max(found["a star"]) < 1e-6
    assert min(found["a ring"]) > 1e-4


def test_what_teachers_read_is_encoded_before_the_text_encoders_go(tmp_path: Path) -> None:
    file = prompts_in(tmp_path)
    data = Data(PromptStream(read_prompts(str(file)), 0), [])
    recipe = load_recipe("d_opsd", [f"data.train={file}", "data.templates=['{prompt}, small']", "data.heldout=null"])
    found = {row.text for row in met_prompts(recipe, data)}
    assert found == {"a star", "a ring", "a star, small", "a ring, small", "a large blue ring"}
    with_teacher, without = kept_prompts(recipe, 3), kept_prompts(load_recipe("diffusion_opd", []), 3)
    assert with_teacher is not None
    assert without is not None
    assert with_teacher - without == 2 * 24


# -- several processes ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The same run in one process and in two, of a LoRA and of all weights, which two processes cut into shards."""
    folder = tmp_path_factory.mktemp("taught")
    rows = [("a star", "a red star", "near"), ("a ring", "two rings", "far"), ("a cross", "a blue cross", "near")]
    prompts = prompts_in(folder, [{"prompt": a, "detailed": b, "teacher": c} for a, b, c in rows])
    level = folder / "level.py"
    level.write_text("def level(images, **columns):\n    return images.mean(dim=(1, 2, 3)).tolist()\n")
    detailed = "template: '{detailed}', weights: reference"
    words = words_of(
        random_pipeline, prompts, "reference", f"model.teachers=[{{name: near, {detailed}}}, {{name: far}}]",
        "rollout={prompts: 3, group: 2, batch: 2, decode_batch: 2}", f"rewards=[{{name: '{level}:level'}}]",
        "optimizer={eps: 0.01, learning_rate: 0.5, weight_decay: 0.0, ema: {decay: 0.5, every: 1}}",
        "run={iterations: 2, checkpoint_every: 1, sample_every: 1, seed: 0}",
    )  # fmt: skip
    found, jobs = Runs(logs=folder), list[dict[str, Any]]()
    for train, environment in (("lora", {}), ("full", test_sharding.FSDP)):
        (folder / f"{train}.yaml").write_text(dump_recipe(load_recipe("d_opsd", [*words, f"model.train={train}"])))
        for count in (1, 2):
            name = f"{train}-{count}"
            made = {1: found.one, 2: found.two}[count]
            made[train] = folder / name
            command = ["train", str(folder / f"{train}.yaml"), "--out", str(folder / name)]
            jobs.append(
                {"words": command, "log": name, "count": count, "environment": environment if count > 1 else {}}
            )
    run_all(jobs, folder)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("train", ["lora", "full"])
def test_two_processes_give_the_run_of_one(train: str, runs: Runs) -> None:
    """One process has prompts of both teachers, and the other has prompts of one of them."""
    assert statuses(runs, f"{train}-1") == [0], printed(runs, f"{train}-1", 0)
    assert statuses(runs, f"{train}-2") == [0, 0], printed(runs, f"{train}-2", 0) + printed(runs, f"{train}-2", 1)
    same = require_equal if train == "lora" else test_sharding.require_equal
    same(runs.two[train], runs.one[train])


# -- pictures ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def klein(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("klein") / "pipeline"
    TINY[KLEIN].fresh().save_pretrained(folder)
    return folder


def pictured(folder: Path, key: str = "target") -> Path:
    picture().resize((64, 64)).save(folder / "a.png")
    picture().rotate(90).resize((96, 64)).save(folder / "b.png")
    return prompts_in(folder, [{"prompt": "a cup", key: "a.png"}, {"prompt": "a star", key: ["b.png", "a.png"]}])


def seeing(model: Path, prompts: Path, call: dict[str, Any], *more: str) -> list[str]:
    return [
        f"model.path={model}", f"model.call={json.dumps(call)}", *SMALL, f"data.train={prompts}",
        "model.teachers=[{image: target, weights: reference}]", "sampler.plan.window=all", *more,
    ]  # fmt: skip


@pytest.mark.slow
def test_a_teacher_sees_pictures_that_the_model_does_not_see(klein: Path, tmp_path: Path) -> None:
    prompts = pictured(tmp_path)
    more = ("run.iterations=2", "run.checkpoint_every=1", "optimizer.learning_rate=0.01")
    words = seeing(klein, prompts, TINY[KLEIN].call, *more)
    recipe = load_recipe("d_opsd", words)
    trainer = Session(recipe, RunFolder.create(tmp_path / "first", "")).trainer(Silent())
    _, e = trainer.collect(0)
    assert all(type(text) is str for text in e.prompts)
    shown = {str(text): text.call["image"] for text in e.contexts}  # type: ignore[attr-defined]
    assert len(shown["a star"]) == 2
    assert shown["a cup"].size == (64, 64)
    found = distances(trainer)
    assert min(value for values in found.values() for value in values) > 1e-5
    same_when_resumed("d_opsd", words, tmp_path)


@pytest.mark.slow
def test_a_picture_must_not_set_the_size_of_the_states(klein: Path, tmp_path: Path) -> None:
    call = {k: v for k, v in TINY[KLEIN].call.items() if k not in ("height", "width")}
    [fault] = check(load_recipe("d_opsd", seeing(klein, pictured(tmp_path), call))).texts("fault")
    assert "would set the size of its states; set model.call.height and model.call.width" in fault
    own = seeing(klein, pictured(tmp_path), TINY[KLEIN].call)
    [fault] = check(load_recipe("d_opsd", [*own, "model.teachers=[{image: image}]", "reference=null"])).texts("fault")
    assert "model.teachers.0.image is image, and the model sees the pictures of this column itself" in fault
    [fault] = check(load_recipe("d_opsd", [*own, "model.teachers=[{image: other}]", "reference=null"])).texts("fault")
    assert "there is no column 'other'" in fault


@pytest.mark.slow
def test_pictures_that_become_part_of_the_samples_are_refused(tmp_path: Path) -> None:
    """The states of the model hold its own picture where the mask is black, and a teacher would hold another there."""
    Tiny(lambda: StableDiffusion3Pipeline(**sd3_parts(16))).fresh().save_pretrained(tmp_path / "model")
    picture().save(tmp_path / "a.png")
    mask().save(tmp_path / "mask.png")
    picture().rotate(90).save(tmp_path / "b.png")
    row = {"image": "a.png", "mask_image": "mask.png", "target": "b.png"}
    prompts = prompts_in(tmp_path, [{"prompt": text, **row} for text in ("a cup", "a star")])
    words = seeing(tmp_path / "model", prompts, CALL, f"model.pipeline={KIND}")
    recipe = load_recipe("d_opsd", words)
    check(recipe).require()
    with pytest.raises(
        ValueError, match=r"teachers\.0\.image: StableDiffusion3InpaintPipeline makes the pictures a part"
    ):
        Session(recipe, RunFolder.create(tmp_path / "run", "")).trainer(Silent())


def test_a_pipeline_that_takes_no_picture_has_no_teacher_that_sees(tmp_path: Path) -> None:
    prompts = pictured(tmp_path)
    words = [f"data.train={prompts}", "model.teachers=[{image: target, weights: reference}]", "rollout.prompts=2"]
    recipe = load_recipe("d_opsd", words)
    [fault] = check(recipe).texts("fault")
    assert fault.startswith("model.teachers.0.image is target, and the pipeline takes no picture; leave it out and")
    parameters = call_parameters("flowgrpo/worlds/scenes/pipeline")
    assert parameters is not None
    with pytest.raises(ValueError, match="takes no picture"):
        take_pictures(Data(PromptStream(read_prompts(str(prompts)), 0), []), recipe, {}, parameters)


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["reference=null"], r"teachers\.0\.weights is reference, and the recipe has no section reference; write one"),
        (["model.teachers=[{template: '{detailed}'}]"], "no part of this recipe compares with the reference; leave"),
        (["model.teachers=[{weights: present}]", "reference=null"], "predict what the model predicts, and teach noth"),
        (["model.teachers=[{lora: a, weights: present, template: '{a}'}]"], "a has weights of its own; leave one of"),
        (["model.teachers=[{template: ' {prompt} '}]"], "is what the model reads itself; write more into it"),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load_recipe("d_opsd", words)


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"prompt": "a ring"}, "has nothing in column 'detailed'; fill in the column, or leave the prompt out"),
        ({"prompt": "a ring", "detailed": " "}, "has nothing in column 'detailed'"),
        ({"prompt": "a ring", "detailed": ["blue"]}, "column 'detailed' of .*line 2.* is \\['blue'\\]; write the text"),
        ({"prompt": "a ring", "detailed": "a ring"}, "gives the very words of all 2 prompts of .*name a column with"),
    ],
)
def test_each_prompt_must_have_what_its_teacher_reads(second: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = prompts_in(tmp_path, [{"prompt": "a star", "detailed": "a star"}, second])
    with pytest.raises(ValueError, match=said):
        check(load_recipe("d_opsd", [f"data.train={file}", "rollout.prompts=2"])).require()


def test_a_template_names_a_column_that_there_is(tmp_path: Path) -> None:
    words = [f"data.train={prompts_in(tmp_path)}", "rollout.prompts=2", "model.teachers.0.template='{prompt} {long}'"]
    with pytest.raises(ValueError, match=r"the template has \{long\}, and .*line 1.* has no column 'long'; add"):
        check(load_recipe("d_opsd", words)).require()
