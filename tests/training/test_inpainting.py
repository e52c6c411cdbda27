"""Runs of another class of a model's folder, with a mask for each prompt."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import diffusers
import pytest
from PIL import Image

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import dump_recipe, load_recipe
from flowgrpo.configs.schema import Recipe
from flowgrpo.inference.evaluation import evaluate_model
from flowgrpo.pipelines.arguments import Parameters
from flowgrpo.pipelines.capture import ConditionedPrompt
from flowgrpo.pipelines.conformance.conditioned import mask, picture
from flowgrpo.pipelines.conformance.conform import check_folder
from flowgrpo.pipelines.conformance.images import sd3_parts
from flowgrpo.pipelines.conformance.tiny import Tiny
from flowgrpo.pipelines.pictures import Picture
from flowgrpo.training.checking import check
from flowgrpo.training.data import Data, PromptStream, read_prompts, with_conditions
from flowgrpo.training.images import conditioning
from flowgrpo.training.images.conditioning import call_parameters, take_pictures
from flowgrpo.training.recipe_models import call_faults
from flowgrpo.training.session import start
from tests.training import ranks
from tests.training.test_sharding import FSDP, require_equal

KIND = "StableDiffusion3InpaintPipeline"
CALL = {"strength": 1.0, "height": 16, "width": 16, "guidance_scale": 4.0, "max_sequence_length": 16}
REWARD = """
SEEN = []

def kept(images, prompts, mask_image, **columns):
    SEEN.extend(mask_image)
    return images.mean(dim=(1, 2, 3))
"""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inpainting")
    picture().save(folder / "room.png")
    mask().save(folder / "right.png")
    mask().rotate(90).save(folder / "upper.png")
    rows = [
        {"prompt": text, "image": "room.png", "mask_image": f"{part}.png"}
        for text, part in (("a cup", "right"), ("a star", "upper"))
    ]
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose class makes pictures of prompts alone."""
    folder = tmp_path_factory.mktemp("model") / "sd3"
    Tiny(lambda: diffusers.StableDiffusion3Pipeline(**sd3_parts(16))).fresh().save_pretrained(folder)
    return folder


def recipe_of(model: Path, prompts: Path, *more: str, base: str = "mixgrpo") -> Recipe:
    return load_recipe(
        base,
        [
            f"model={{path: {model}, pipeline: {KIND}, call: {json.dumps(CALL)}}}",
            f"data={{train: {prompts / 'p.jsonl'}, heldout: {prompts / 'p.jsonl'}}}",
            "sampler={steps: 4, plan: {window: {size: 2}}}",
            "rollout={prompts: 2, group: 2, batch: 4, decode_batch: 4}",
            f"rewards=[{{name: '{prompts / 'reward.py'}:kept'}}]",
            "evaluate={every: 1, prompts: 2, rewards: null}",
            "run={iterations: 1, sample_every: 1}",
            *more,
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("train", ["lora", "full"])
def test_a_run_with_a_mask_for_each_prompt(model: Path, prompts: Path, tmp_path: Path, train: str) -> None:
    run = tmp_path / "run"
    trainer = start(recipe_of(model, prompts, f"model.train={train}"), run).trainer(Silent())
    trainer.train()
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert first["ratio/first_error"] == 0.0
    assert first["grad_norm"] > 0
    seen = trainer.rewards.rewards[0]._owner.__globals__["SEEN"]
    assert set(seen) == {str(prompts / "right.png"), str(prompts / "upper.png")}
    index = [json.loads(line) for line in (run / "samples" / "index.jsonl").read_text().splitlines()]
    assert {len(record["pictures"]) for record in index} == {2}  # the picture and its mask

    result = run / ("lora" if train == "lora" else "pipeline")
    card = (result / "README.md").read_text()
    assert f"from diffusers import {KIND}\n" in card
    assert 'image=load_image("picture.png"),\n    mask_image=load_image("mask_image.png"),' in card
    if train == "full":  # the folder stays one of its own class, and every class of its weights can load it
        assert json.loads((result / "model_index.json").read_text())["_class_name"] == "StableDiffusion3Pipeline"
        getattr(diffusers, KIND).from_pretrained(result)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert evaluate_model(str(run), load_recipe(run / "config.yaml"))["kept"][0] == last["eval/kept"]


@pytest.mark.slow
def test_processes_with_a_shard_each_meet_masks_at_different_times(model: Path, prompts: Path, tmp_path: Path) -> None:
    """A first look at a mask may evaluate the denoiser, and each process has prompts of its own."""
    rows = []
    for number in range(5):
        name = tmp_path / f"{number}.png"
        painted = Image.new("L", (16, 16))
        painted.paste(255, (2 * number, 0, 16, 16))  # the first mask keeps nothing
        painted.save(name)
        rows.append({"prompt": f"a cup {number}", "image": str(prompts / "room.png"), "mask_image": str(name)})
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = recipe_of(
        model, prompts, "model.train=full", f"data={{train: {tmp_path / 'p.jsonl'}, heldout: {tmp_path / 'p.jsonl'}}}",
        "rollout={prompts: 3, group: 2, batch: 4, decode_batch: 4}", "run.iterations=2", "evaluate.prompts=1",
        "optimizer.eps=0.01",
    )  # fmt: skip
    (tmp_path / "r.yaml").write_text(dump_recipe(recipe))
    words = ["train", str(tmp_path / "r.yaml"), "--out"]
    jobs = [
        {"words": [*words, str(tmp_path / "two")], "log": str(tmp_path / "2"), "count": 2, "environment": FSDP},
        {"words": [*words, str(tmp_path / "one")], "log": str(tmp_path / "1"), "count": 1},
    ]
    ranks.run_all(jobs, patience=300)
    assert json.loads((tmp_path / "2.json").read_text()) == [0, 0]
    require_equal(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
def test_a_critic_learns_from_prompts_with_pictures(model: Path, prompts: Path, tmp_path: Path) -> None:
    recipe = recipe_of(model, prompts, base="ac_flow")
    start(recipe, tmp_path / "run").trainer(Silent()).train()
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["critic/error"] > 0.0


@pytest.mark.slow
def test_a_folder_is_checked_as_another_class(model: Path) -> None:
    given = {**CALL, "image": picture(), "mask_image": mask()}
    result = check_folder(str(model), given, lambda outcome: None, steps=3, device="cpu", pipeline=KIND)
    assert result.passed, result.outcomes


def test_masks_are_taken_once_and_their_prompts_differ(prompts: Path, tmp_path: Path) -> None:
    rows = read_prompts(str(prompts / "p.jsonl"))
    data = Data(PromptStream(rows, 0), rows)
    parameters = parameters_in(tmp_path)
    for _ in range(2):
        take_pictures(data, recipe_of(tmp_path, prompts), CALL, parameters)
    one, two = (row.prompt for row in data.train.rows)
    assert isinstance(one, ConditionedPrompt)
    assert isinstance(two, ConditionedPrompt)
    assert set(one.call) == {"image", "mask_image"}
    assert one.call["mask_image"].convert("L").tobytes() == mask().tobytes()
    assert one.mark != two.mark
    assert data.train.rows[0].columns["mask_image"] == str(prompts / "right.png")


def parameters_in(folder: Path) -> Parameters:
    """Parameters of the call of `KIND`, for the folder of another class."""
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusion3Pipeline"}))
    found = call_parameters(str(folder), KIND)
    assert found is not None
    return found


@pytest.mark.parametrize(("columns", "missing"), [({}, "mask_image"), ({"mask_image": "right.png"}, "image")])
@pytest.mark.parametrize("which", ["train", "heldout"])
def test_prompts_without_a_picture_that_the_class_cannot_do_without_are_refused(
    which: str, columns: dict[str, str], missing: str, prompts: Path, tmp_path: Path
) -> None:
    """The class has None as the default of both pictures."""
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a cup", **columns}) + "\n")
    mask().save(tmp_path / "right.png")
    recipe = recipe_of(tmp_path, prompts, f"data.{which}={tmp_path / 'p.jsonl'}")
    files = (recipe.data.train, str(recipe.data.heldout))
    train, heldout = (read_prompts(file) for file in files)
    data, call = Data(PromptStream(train, 0), heldout), dict(CALL)
    with pytest.raises(ValueError, match=rf"needs .*for each prompt.*p\.jsonl.* a column `{missing}`"):
        take_pictures(data, recipe, call, parameters_in(tmp_path))
    one = picture()
    take_pictures(data, recipe, {**call, "image": one, "mask_image": mask()}, parameters_in(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("lacks", ["mask_image", "image"])
def test_a_plan_misses_pictures_of_test_prompts_too(model: Path, prompts: Path, tmp_path: Path, lacks: str) -> None:
    columns = {"image": str(prompts / "room.png"), "mask_image": str(prompts / "right.png")}
    row = {"prompt": "a cup", **{name: path for name, path in columns.items() if name != lacks}}
    (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
    recipe = recipe_of(model, prompts, f"data.test={tmp_path / 't.jsonl'}", "rewards=[{name: jpeg_compressibility}]")
    assert check(recipe).texts("fault") == []
    [fault] = check(recipe, reads_test=True).texts("fault")
    assert re.search(rf"needs .*for each prompt.*t\.jsonl.* a column `{lacks}`", fault)
    (tmp_path / "t.jsonl").write_text(json.dumps({"prompt": "a cup", **columns}) + "\n")
    assert check(recipe, reads_test=True).texts("fault") == []


def test_columns_of_paths_may_have_the_names_of_an_image_folder(prompts: Path, tmp_path: Path) -> None:
    row = {"prompt": "a cup", "image_file_name": "room.png", "mask_image_file_name": "right.png"}
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    for name in ("room", "right"):
        shutil.copy(prompts / f"{name}.png", tmp_path)
    recipe = recipe_of(tmp_path, prompts, f"data={{train: {tmp_path / 'p.jsonl'}, heldout: null}}")
    data = Data(PromptStream(read_prompts(recipe.data.train), 0), [])
    for _ in range(2):
        take_pictures(data, recipe, CALL, parameters_in(tmp_path))
    [found] = data.train.rows
    assert isinstance(found.prompt, ConditionedPrompt)
    assert set(found.prompt.call) == {"image", "mask_image"}
    assert found.columns["image"] == str(tmp_path / "room.png")
    assert found.columns["mask_image"] == str(tmp_path / "right.png")
    (tmp_path / "right.png").unlink()
    with pytest.raises(ValueError, match=r"p\.jsonl, line 1: the picture \S*right\.png does not exist"):
        with_conditions(read_prompts(recipe.data.train), recipe.data.train, ["mask_image"])


@pytest.mark.parametrize("value", [0, 1, 127])
def test_a_mask_that_paints_nothing_is_refused_with_its_line(value: int, prompts: Path, tmp_path: Path) -> None:
    """Masks of other tools often have the number of a class in place of white."""
    for name in ("room", "right"):
        shutil.copy(prompts / f"{name}.png", tmp_path)
    none = Image.new("L", (16, 16))
    none.paste(value, (8, 0, 16, 16))
    none.save(tmp_path / "none.png")
    rows = [{"prompt": "a cup", "image": "room.png", "mask_image": f"{name}.png"} for name in ("right", "none")]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = recipe_of(tmp_path, prompts, f"data={{train: {tmp_path / 'p.jsonl'}, heldout: null}}")
    data = Data(PromptStream(read_prompts(recipe.data.train), 0), [])
    said = rf"p\.jsonl, line 2: the mask \S*none\.png paints nothing: its largest value is {value} of 255"
    with pytest.raises(ValueError, match=said):
        take_pictures(data, recipe, CALL, parameters_in(tmp_path))


def test_of_many_masks_some_are_read(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditioning, "MASKS_READ", 3)
    seen: list[Path] = []
    read = Picture.read
    monkeypatch.setattr(Picture, "read", lambda picture: (seen.append(picture.path), read(picture))[1])
    shutil.copy(prompts / "room.png", tmp_path)
    for number in range(7):
        mask().save(tmp_path / f"{number}.png")
    rows = [{"prompt": "a cup", "image": "room.png", "mask_image": f"{number}.png"} for number in range(7)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = recipe_of(tmp_path, prompts, f"data={{train: {tmp_path / 'p.jsonl'}, heldout: null}}")
    data = Data(PromptStream(read_prompts(recipe.data.train), 0), [])
    for _ in range(2):  # a run makes the check twice, with the same prompts
        take_pictures(data, recipe, CALL, parameters_in(tmp_path))
    assert [path.name for path in seen] == ["0.png", "3.png", "6.png"]


def test_pictures_and_masks_of_a_data_set_are_taken_together(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the columns of pictures hold is known only while the columns are those of the data set."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stored = {name: {"bytes": (prompts / f"{name}.png").read_bytes(), "path": None} for name in ("room", "right")}
    columns = {"prompt": ["a cup"], "image": [stored["room"]], "mask_image": [stored["right"]]}
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), tmp_path / "p.parquet")
    recipe = recipe_of(tmp_path, prompts, f"data={{train: {tmp_path / 'p.parquet'}, heldout: null}}")
    data = Data(PromptStream(read_prompts(recipe.data.train), 0), [])
    for _ in range(2):
        take_pictures(data, recipe, CALL, parameters_in(tmp_path))
    (row,) = data.train.rows
    assert [picture.path.read_bytes() for picture in (*row.shown, row.conditions["mask_image"])] == [
        kept["bytes"] for kept in stored.values()
    ]


def test_a_strength_below_1_is_refused_also_where_it_is_the_default(tmp_path: Path) -> None:
    parameters = parameters_in(tmp_path)
    given = {name: value for name, value in CALL.items() if name != "strength"}
    assert list(call_faults(tmp_path, parameters, CALL)) == []
    [fault] = call_faults(tmp_path, parameters, given)
    assert re.match(r"model\.call\.strength is 0\.6, the default of the pipeline, .*write strength: 1\.0", fault)
    [fault] = call_faults(tmp_path, parameters, {**given, "strength": 0.9})
    assert fault.startswith("model.call.strength is 0.9, and below 1")
    (tmp_path / "flowgrpo.json").write_text(json.dumps({"call": {"strength": 1.0}}))
    assert list(call_faults(tmp_path, parameters, given)) == []


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (["right.png", "upper.png"], r"p\.jsonl, line 2: `mask_image` is a list of 2 pictures; write the path of one"),
        ("no.png", r"p\.jsonl, line 2: the picture \S*no\.png does not exist"),
        (None, r"p\.jsonl, line 2: `mask_image` is None; write the path of a picture for every prompt"),
        (3, r"p\.jsonl, line 2: `mask_image` is 3; write the path of a picture"),
    ],
)
def test_a_mask_that_is_no_picture_is_refused(value: object, said: str, prompts: Path, tmp_path: Path) -> None:
    mask().save(tmp_path / "right.png")
    written = [{"prompt": "a cup", "mask_image": "right.png"}, {"prompt": "a star", "mask_image": value}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    source = str(tmp_path / "p.jsonl")
    with pytest.raises(ValueError, match=said):
        with_conditions(read_prompts(source), source, ["mask_image"])
