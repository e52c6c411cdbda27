"""Prompt files with pictures, through a run on a tiny pipeline that edits pictures."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.configs.schema import Recipe
from flowgrpo.inference.evaluation import evaluate_model
from flowgrpo.inference.image_samples import sample_images
from flowgrpo.pipelines import encodings
from flowgrpo.pipelines.capture import ConditionedPrompt
from flowgrpo.pipelines.conformance.conditioned import picture
from flowgrpo.pipelines.conformance.conform import TINY
from flowgrpo.pipelines.pictures import Picture
from flowgrpo.training.data import Data, PromptRow, PromptStream, read_prompts, with_pictures
from flowgrpo.training.images.conditioning import call_parameters, take_pictures
from flowgrpo.training.model_paths import call_arguments
from flowgrpo.training.session import start
from flowgrpo.training.trainer import Trainer
from tests.conftest import Command

pytestmark = pytest.mark.slow

KIND = "FluxKontextPipeline"
REWARD = """
from PIL import Image

SEEN = []

def close_to_source(images, prompts, image, **columns):
    SEEN.extend(zip(prompts, image))
    sources = [Image.open(path).convert("RGB").resize((images.shape[-1], images.shape[-2])) for path in image]
    return [-abs(float(own.mean()) - sum(s.resize((1, 1)).getpixel((0, 0))) / 765) for own, s in zip(images, sources)]
"""


@pytest.fixture(scope="module")
def kontext(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kontext")
    TINY[KIND].fresh().save_pretrained(folder / "pipeline")
    (folder / "prompts" / "pictures").mkdir(parents=True)
    for name, phase in (("stripes", 0), ("dots", 5)):
        picture(16, phase).save(folder / "prompts" / "pictures" / f"{name}.png")
    rows = [("make it red", "stripes"), ("make it red", "dots"), ("a star", "stripes")]
    written = [{"prompt": text, "image": f"pictures/{name}.png", "tag": name} for text, name in rows]
    (folder / "prompts" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    (folder / "reward.py").write_text(REWARD)
    return folder


def recipe_of(folder: Path, *more: str) -> Recipe:
    call = {k: v for k, v in TINY[KIND].call.items() if k != "image"}
    prompts = folder / "prompts" / "train.jsonl"
    return load_recipe(
        "mixgrpo_flash_guard",
        [
            f"model={{path: {folder / 'pipeline'}, call: {json.dumps(call)}}}",
            f"data={{train: {prompts}, heldout: {prompts}}}",
            "sampler.steps=4",
            "sampler.plan.window={name: progressive, size: 2, stride: 1, interval: 1, start: 0, stop: 3}",
            "rollout={prompts: 3, group: 2, batch: 4, decode_batch: 4}",
            f"rewards=[{{name: '{folder / 'reward.py'}:close_to_source'}}]",
            "evaluate={every: 1, prompts: 3, rewards: null}",
            "run={iterations: 1, checkpoint_every: 1, sample_every: 1, seed: 0}",
            *more,
        ],
    )


def trainer_of(recipe: Recipe, folder: Path) -> Trainer:
    return start(recipe, folder).trainer(Silent())


@pytest.mark.parametrize("released", ["true", "false"])
def test_a_run_on_prompts_with_pictures(kontext: Path, tmp_path: Path, released: str) -> None:
    trainer = trainer_of(recipe_of(kontext, f"model.release_text_encoders={released}"), tmp_path / "run")
    pipe = trainer.task.policy.denoiser.pipe  # type: ignore[attr-defined]
    encoded: list[torch.Tensor] = []
    own = pipe.vae.encode
    pipe.vae.encode = lambda x, *args, **kwargs: encoded.append(x) or own(x, *args, **kwargs)
    trainer.train()
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["ratio/first_error"] == 0.0
    assert first["grad_norm"] > 0
    # There are two pictures, and the self-check has seen one of them. No step and no group encodes them again.
    assert len(encoded) <= 2

    index = [json.loads(line) for line in (tmp_path / "run" / "samples" / "index.jsonl").read_text().splitlines()]
    pictures = kontext / "prompts" / "pictures"
    for record in index:
        path = pictures / f"{record['columns']['tag']}.png"
        assert record["columns"]["image"] == str(path)
        [copy] = record["pictures"]
        with Image.open(tmp_path / "run" / "samples" / copy) as kept, Image.open(path) as given:
            assert kept.convert("RGB").tobytes() == given.convert("RGB").tobytes()
    assert {record["prompt"] for record in index} == {"make it red", "a star"}
    seen = trainer.rewards.rewards[0]._owner.__globals__["SEEN"]
    assert ("make it red", str(pictures / "dots.png")) in seen
    assert ("make it red", str(pictures / "stripes.png")) in seen
    assert (tmp_path / "run" / "lora").is_dir()


def test_samples_depend_on_the_picture(kontext: Path, tmp_path: Path) -> None:
    trainer = trainer_of(recipe_of(kontext, "model.release_text_encoders=false"), tmp_path / "run")
    stripes, dots = trainer.data.heldout[:2]
    images = trainer.task.evaluation([stripes, dots, stripes], [5, 5, 5], trainer.clock).samples
    each = images.chunk(3)
    assert torch.equal(each[0], each[2])
    assert not torch.equal(each[0], each[1])


def test_one_picture_for_all_prompts(kontext: Path) -> None:
    path = kontext / "prompts" / "pictures" / "dots.png"
    call = call_arguments(str(kontext / "pipeline"), {"image": str(path), "negative_prompt": "logo.png"})
    assert call["image"].tobytes() == Image.open(path).convert("RGB").tobytes()
    assert call["negative_prompt"] == "logo.png"
    with pytest.raises(
        ValueError, match=r"model\.call\.image: the picture nowhere\.png does not exist; paths start at the work"
    ):
        call_arguments(str(kontext / "pipeline"), {"image": "nowhere.png"})


def test_a_picture_of_a_run_is_made_again_from_the_picture_of_its_prompt(kontext: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer_of(recipe_of(kontext, "run.iterations=1"), run).train()
    index = [json.loads(line) for line in (run / "samples" / "index.jsonl").read_text().splitlines()]
    for record in [line for line in index if line["phase"] == "eval" and line["iteration"] == 1]:
        out = tmp_path / str(record["sample"])
        [path] = sample_images(str(run), [record["prompt"]], out, noise=record["noise"])
        own, again = (Image.open(file).tobytes() for file in (run / "samples" / record["image"], path))
        assert own == again
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    [(name, (mean, _, _))] = evaluate_model(str(run), load_recipe(run / "config.yaml")).items()
    assert mean == last[f"eval/{name}"]


def test_a_prompt_of_the_command_line_shows_pictures(kontext: Path, tmp_path: Path, command: Command) -> None:
    run = tmp_path / "run"
    trainer_of(recipe_of(kontext, "run.iterations=1"), run).train()
    index = [json.loads(line) for line in (run / "samples" / "index.jsonl").read_text().splitlines()]
    records = [line for line in index if line["phase"] == "eval" and line["iteration"] == 1][:2]
    assert {record["prompt"] for record in records} == {"make it red"}

    def sampled(name: str, *words: str) -> list[bytes]:
        status, _, errors = command("sample", "--model", str(run), *words, "--out", str(tmp_path / name))
        assert status == 0, errors
        lines = [json.loads(line) for line in (tmp_path / name / "index.jsonl").read_text().splitlines()]
        return [Image.open(tmp_path / name / line["image"]).tobytes() for line in lines]

    def shown(record: dict[str, Any], noise: int) -> list[str]:
        return ["make it red", "--image", record["columns"]["image"], "--noise", str(noise)]

    noises = [record["noise"] for record in records]
    for number, record in enumerate(records):
        [made] = sampled(f"own{number}", *shown(record, noises[number]))
        assert made == Image.open(run / "samples" / record["image"]).tobytes()
    # The noise of one prompt with the picture of the other is no image of the run.
    [mixed] = sampled("mixed", *shown(records[0], noises[1]))
    assert mixed not in {Image.open(run / "samples" / record["image"]).tobytes() for record in records}

    prompts = kontext / "prompts" / "train.jsonl"
    first, second, _ = sampled("file", "--file", str(prompts))
    [alone] = sampled("words", "make it red", "--image", str(prompts.parent / "pictures" / "stripes.png"))
    assert first == alone
    assert second != alone


def test_pictures_on_the_command_line_that_cannot_be_shown(kontext: Path, tmp_path: Path, command: Command) -> None:
    given = str(kontext / "prompts" / "pictures" / "dots.png")
    for words, message in (
        (["--model", "scenes", "--image", given], "the pipeline takes no picture; leave out --image"),
        (
            ["--model", str(kontext / "pipeline"), "--image", "none.png"],
            "the picture none.png does not exist; paths start at the working directory",
        ),
        (["--model", "scenes", "--task", "masked", "--image", given], "makes images; leave --task out"),
    ):
        status, _, errors = command("sample", "a star", *words, "--out", str(tmp_path / "no"))
        assert status == 1
        assert message in errors
    assert not (tmp_path / "no").exists()


# -- which prompts get their pictures ------------------------------------------------------------------------------


def data_of(source: Path) -> Data:
    rows = read_prompts(str(source))
    return Data(PromptStream(rows, 0), rows)


def parameters_of(kind: str | list[str], folder: Path) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": kind}))
    return call_parameters(str(folder))


def test_a_pipeline_that_takes_no_picture_leaves_the_column_to_rewards(kontext: Path, tmp_path: Path) -> None:
    data = data_of(kontext / "prompts" / "train.jsonl")
    take_pictures(data, recipe_of(kontext), {}, parameters_of("StableDiffusion3Pipeline", tmp_path / "sd3"))
    assert data.train.rows[0].columns["image"] == "pictures/stripes.png"
    assert data.train.rows[0].prompt == "make it red"
    assert not isinstance(data.train.rows[0].prompt, ConditionedPrompt)


def test_pictures_are_taken_once_however_often_asked(kontext: Path, tmp_path: Path) -> None:
    data, recipe = data_of(kontext / "prompts" / "train.jsonl"), recipe_of(kontext)
    for _ in range(2):
        take_pictures(data, recipe, {}, parameters_of(KIND, tmp_path / "kontext"))
    row = data.train.rows[1]
    assert row.columns["image"] == str(kontext / "prompts" / "pictures" / "dots.png")
    assert isinstance(row.prompt, ConditionedPrompt)
    assert row.prompt.call["image"].tobytes() == picture(16, 5).tobytes()


def test_a_pipeline_that_needs_pictures_says_so_before_it_is_loaded(kontext: Path, tmp_path: Path) -> None:
    source = tmp_path / "plain.txt"
    source.write_text("a star\n")
    data = data_of(source)
    recipe = recipe_of(kontext, f"data={{train: {source}, heldout: {source}}}")
    parameters = parameters_of("WanImageToVideoPipeline", tmp_path / "wan")
    with pytest.raises(ValueError, match=r"plain\.txt names none; give the file a column `image`"):
        take_pictures(data, recipe, {}, parameters)
    take_pictures(data, recipe, {"image": picture()}, parameters)


def test_pictures_of_different_sizes_need_a_size_for_the_samples(kontext: Path, tmp_path: Path) -> None:
    for name, size in (("a", 16), ("b", 24)):
        picture(size).save(tmp_path / f"{name}.png")
    source = tmp_path / "p.csv"
    source.write_text("prompt,image\nx,a.png\ny,b.png\n")
    recipe = recipe_of(kontext, f"data={{train: {source}, heldout: null}}")
    parameters = parameters_of(KIND, tmp_path / "kontext")
    with pytest.raises(ValueError, match=r"2 different sizes.*set model\.call\.height and model\.call\.width"):
        take_pictures(data_of(source), recipe, {}, parameters)
    take_pictures(data_of(source), recipe, {"height": 16, "width": 16}, parameters)


def test_a_pipeline_that_takes_its_size_from_the_picture_needs_pictures_of_one_shape(
    kontext: Path, tmp_path: Path
) -> None:
    for name, size in (("a", (32, 16)), ("b", (64, 32)), ("c", (16, 32))):
        Image.new("RGB", size).save(tmp_path / f"{name}.png")
    parameters = parameters_of("HunyuanVideo15ImageToVideoPipeline", tmp_path / "hunyuan")
    source = tmp_path / "p.csv"
    recipe = recipe_of(kontext, f"data={{train: {source}, heldout: null}}")
    source.write_text("prompt,image\nx,a.png\ny,b.png\n")
    take_pictures(data_of(source), recipe, {}, parameters)
    source.write_text("prompt,image\nx,a.png\ny,b.png\nz,c.png\n")
    said = r"2 different shapes: \S+p\.csv, line 2 \(32 × 16 pixels\), \S+p\.csv, line 4 \(16 × 32.*to one size"
    with pytest.raises(ValueError, match=said):
        take_pictures(data_of(source), recipe, {}, parameters)


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        ("WanImageToVideoPipeline", True),
        ("LTXImageToVideoPipeline", True),
        ("HunyuanVideo15ImageToVideoPipeline", True),
        ("Flux2KleinPipeline", False),
        ("QwenImageEditPlusPipeline", False),
    ],
)
def test_a_pipeline_that_takes_one_picture_refuses_a_list(
    kind: str, refused: bool, kontext: Path, tmp_path: Path
) -> None:
    source = tmp_path / "p.jsonl"
    path = str(kontext / "prompts" / "pictures" / "dots.png")
    source.write_text(json.dumps({"prompt": "x", "image": [path, path]}) + "\n")
    parameters, call = parameters_of(kind, tmp_path / "pipeline"), {"height": 16, "width": 16}
    recipe = recipe_of(kontext, f"data={{train: {source}, heldout: null}}")
    if not refused:
        return take_pictures(data_of(source), recipe, call, parameters)
    with pytest.raises(
        ValueError, match=r"p\.jsonl, line 1: 2 pictures in a list, .* takes one picture; write one path"
    ):
        take_pictures(data_of(source), recipe, call, parameters)


def test_a_class_that_is_not_in_the_library_is_looked_at_when_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"_class_name is 'MyOwnPipeline', which diffusers \S+ does not have"):
        parameters_of("MyOwnPipeline", tmp_path / "wrong")
    with pytest.raises(ValueError, match=r"no file .*mine\.py"):
        parameters_of(["mine", "MyOwnPipeline"], tmp_path / "own")
    (tmp_path / "own" / "mine.py").touch()
    assert call_parameters(str(tmp_path / "own")) is None
    assert call_parameters("owner/name") is None
    known = parameters_of(KIND, tmp_path / "known")
    assert isinstance(known["image"], inspect.Parameter)


# -- pictures in files ---------------------------------------------------------------------------------------------


def test_a_picture_is_turned_as_its_camera_says_and_has_no_transparency(tmp_path: Path) -> None:
    wide = Image.new("RGB", (6, 4), "red")
    exif = wide.getexif()
    exif[0x0112] = 6
    wide.save(tmp_path / "turned.jpg", exif=exif)
    turned = Picture(tmp_path / "turned.jpg")
    assert turned.size == (4, 6)
    assert turned.read().size == (4, 6)
    Image.new("RGBA", (2, 2), (0, 255, 0, 128)).save(tmp_path / "clear.png")
    assert Picture(tmp_path / "clear.png").read().mode == "RGB"


def test_a_damaged_picture_is_named(tmp_path: Path) -> None:
    whole = tmp_path / "whole.png"
    picture(64).save(whole)
    (tmp_path / "half.png").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    half = Picture(tmp_path / "half.png", "p.csv, line 3")
    assert half.size == (64, 64)
    with pytest.raises(ValueError, match=r"p\.csv, line 3: the picture .*half\.png is damaged"):
        half.read()
    row = PromptRow(0, "x", pictures=half)
    with pytest.raises(ValueError, match="line 3"):
        _ = row.prompt


def test_an_address_is_no_path_and_a_path_starts_where_it_is_written(tmp_path: Path) -> None:
    source = tmp_path / "p.jsonl"
    for path, said in (
        (
            "https://example.com/a.png",
            r"p\.jsonl, line 1: the picture https://example\.com/a\.png is an address.*downl",
        ),
        ("a.png", r"line 1: the picture \S+a\.png does not exist; paths start at the folder of the prompt file"),
    ):
        source.write_text(json.dumps({"prompt": "x", "image": path}) + "\n")
        with pytest.raises(ValueError, match=said):
            with_pictures(read_prompts(str(source)), str(source))


def test_a_rollout_of_many_prompts_keeps_the_encodings_of_all() -> None:
    pipe = TINY[KIND].fresh()
    known = encodings.encodings_of(pipe)
    calls: list[int] = []
    own = pipe.vae.encode
    pipe.vae.encode = lambda *args, **kwargs: calls.append(1) or own(*args, **kwargs)
    known.hold(100)
    for _ in range(2):
        with known.active():
            for number in range(100):
                pipe.vae.encode(torch.full((1, 3, 16, 16), number / 100))
    assert len(calls) == 100
