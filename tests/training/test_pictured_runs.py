"""Runs of language models that are shown pictures: exact ratios, resuming, results that load, and refused recipes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.inference.evaluation import evaluate_model
from flowgrpo.inference.exporting import export_weights
from flowgrpo.inference.text_inference import open_language_model
from flowgrpo.text.model import load_language_model
from flowgrpo.text.pictured import PicturedIds
from flowgrpo.training.checking import check
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.session import Session, start
from flowgrpo.training.text.text_task import TextTask
from tests.conftest import Command
from tests.inference.test_card_programs import performed
from tests.text.test_pictured import own_log_probs
from tests.text.tiny_seeing import OLDER, put_tiny_seeing

COLOURS = {"a": "red", "b": "lime", "c": "blue"}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return put_tiny_seeing("qwen2_5_vl", tmp_path_factory.mktemp("models") / "seeing")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts that ask for the colour of their picture, and a held-out prompt with two pictures."""
    folder = tmp_path_factory.mktemp("data")
    lines = []
    for number, (answer, colour) in enumerate([*COLOURS.items()] * 3):
        Image.new("RGB", (30 + 30 * (number % 2), 40), colour).save(folder / f"{number}.png")
        lines.append({"prompt": f"{number}=", "answer": answer, "image": f"{number}.png"})
    held = [*lines[6:], {"prompt": "from <image> to <image>", "answer": "a", "image": ["0.png", "1.png"]}]
    for name, rows in (("train", lines[:6]), ("heldout", held)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def words(model: Path, data: Path) -> list[str]:
    return [
        f"model={{path: {model}, pictures: true, lora: {{rank: 4}}}}",
        f"data={{train: {data}/train.jsonl, heldout: {data}/heldout.jsonl}}", "generation={max_tokens: 4}",
        "rollout={prompts: 4, group: 3, batch: 6}", "rewards=[{name: answer}]", "evaluate.every=1",
        "run={iterations: 2, checkpoint_every: 1}", "optimizer.learning_rate=0.01",
    ]  # fmt: skip


def trained(folder: Path, *words: str) -> list[dict[str, Any]]:
    start(load_recipe("text", list(words)), folder).trainer(Silent()).train()
    return numbers(folder)


def numbers(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


def faults(*words: str) -> list[str]:
    return check(load_recipe("text", list(words))).texts("fault")


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("model.shared_prefix=false",), ("model.gradient_checkpointing=true",)])
def test_the_first_ratio_is_exactly_one(words: list[str], tmp_path: Path, more: tuple[str, ...]) -> None:
    recipe = load_recipe("text", [*words, *more])
    trainer = Session(recipe, RunFolder.create(tmp_path / "run", "")).trainer(Silent())
    record = trainer.iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert record["sampler_gap"] < 1e-4


FORMS = {
    "turns": ["rollout.form={name: turns, begin: '', end: '-', calls: 2}"],
    "segments": ["rollout.form={name: segments, every: 2, samples: 2}", "credit=segments", "advantage=null"],
    "exits": ["rollout.form={name: exits, closing: '=', answer: 3}", "credit=exits", "advantage=null"],
    "hints": ["rollout.form={name: hints, column: answer, success: 2.0}"],
    "self_hints": ["rollout.form={name: self_hints, success: 2.0, tokens: 4}"],
    "drafts": ["rollout.form={name: drafts, count: 2}"],
    "gains": ["rollout.form={name: gains, every: 3}", "credit=gains", "advantage=null"],
}


@pytest.mark.slow
@pytest.mark.parametrize("more", FORMS.values(), ids=FORMS.keys())
def test_forms_see_the_pictures_too(words: list[str], tmp_path: Path, more: list[str]) -> None:
    longer = ["generation.max_tokens=8", "rewards=[{name: digit_share}]"]
    recipe = load_recipe("text", [*words, *longer, *more])
    trainer = Session(recipe, RunFolder.create(tmp_path / "run", "")).trainer(Silent())
    _, found = trainer.collect(0)
    assert isinstance(trainer.task, TextTask)
    policy = trainer.task.policy
    scored, mask = policy.log_probs(found, range(len(found.samples)))
    begins, compared = policy.language.model.config.vision_start_token_id, 0
    for row, ids in enumerate(found.sampled.ids):
        if OLDER and begins in ids:
            continue  # the model's own call looks for a picture after this token, and a run says where tokens are
        compared += 1
        context = found.context(row)
        assert isinstance(context, PicturedIds)
        assert scored[row, mask[row]].tolist() == pytest.approx(
            own_log_probs(policy.language, context, ids).tolist(), abs=1e-4
        )
    assert compared > len(found.samples) / 2
    record = trainer.iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert record["sampler_gap"] < 1e-4


PAST = ["extensions=[{name: past_groups, share: 1.0}]", "objective.correction=truncate"]


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], PAST], ids=["plain", "past_groups"])
def test_a_run_goes_on_to_the_last_bit(words: list[str], tmp_path: Path, command: Command, more: list[str]) -> None:
    whole = trained(tmp_path / "whole", *words, *more)
    trained(tmp_path / "part", *words, *more, "run.iterations=1")
    assert command("resume", str(tmp_path / "part"), "run.iterations=2")[0] == 0
    assert numbers(tmp_path / "part") == whole
    scores = [line for line in whole if "eval/answer" in line]
    assert len(scores) == 3
    assert not more or [line.get("past_groups") for line in whole][:2] == [0.0, 4.0]


@pytest.mark.slow
def test_past_groups_come_back_with_their_pictures(words: list[str], tmp_path: Path) -> None:
    recipe = load_recipe("text", [*words, *PAST])
    trainer = Session(recipe, RunFolder.create(tmp_path / "run", "")).trainer(Silent())
    _, first = trainer.collect(0)
    trainer.iterate(0)
    found = trainer.extensions.samples_scored(trainer.collector.sample(1))
    assert len(found.rows) == 8
    back = {row.id: ids for row, ids in zip(found.rows[4:], found.experience.prompts[4:])}
    assert all(isinstance(ids, PicturedIds) for ids in back.values())
    assert sorted(map(list, back.values())) == sorted(map(list, first.prompts))


@pytest.mark.slow
def test_a_teacher_sees_the_pictures_once(words: list[str], data: Path, tmp_path: Path) -> None:
    lines = [{"prompt": f"{k} <image>=", "answer": "a", "image": str(data / f"{k}.png")} for k in range(4)]
    (tmp_path / "marked.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = load_recipe("text", [
        *words, f"data.train={tmp_path}/marked.jsonl", "rewards=[{name: digit_share}]", "objective=distilled",
        "extensions=[{name: teacher, template: '{prompt}{solution} {prompt}', success: -1.0, failed: false}]",
    ])  # fmt: skip
    trainer = Session(recipe, RunFolder.create(tmp_path / "run", "")).trainer(Silent())
    record = trainer.iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert record["taught"] == 1.0
    assert record["distillation"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("sign", ["<image>", "<|image_pad|>", "<|video_pad|>", "\ufffc"])
def test_words_of_a_column_stand_for_no_picture(words: list[str], data: Path, tmp_path: Path, sign: str) -> None:
    lines = [{"prompt": f"<image> {k}=", "answer": f"see {sign} a", "image": str(data / f"{k}.png")} for k in range(4)]
    (tmp_path / "signs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    more = [f"data.train={tmp_path}/signs.jsonl", *FORMS["hints"]]
    trainer = Session(load_recipe("text", [*words, *more]), RunFolder.create(tmp_path / "run", "")).trainer(Silent())
    assert trainer.iterate(0)["ratio/first_error"] == 0.0
    assert isinstance(trainer.task, TextTask)
    language = trainer.task.policy.language
    assert not set(language.tokenizer.encode(language.words(f"see {sign} a"))) & set(language.unsaid)


def test_the_sign_of_a_picture_in_a_prompt_is_told(words: list[str], data: Path, tmp_path: Path) -> None:
    line = {"prompt": "<|image_pad|>=", "answer": "a", "image": str(data / "0.png")}
    (tmp_path / "sign.jsonl").write_text(4 * (json.dumps(line) + "\n"))
    recipe = load_recipe("text", [*words, f"data.train={tmp_path}/sign.jsonl"])
    with pytest.raises(ValueError, match=r"prompt 1: a prompt has <\|image_pad\|> in its words; write <image> for the"):
        Session(recipe, RunFolder.create(tmp_path / "run", "")).trainer(Silent())


@pytest.mark.slow
def test_a_run_is_evaluated_and_sampled_as_it_evaluates_itself(
    words: list[str], data: Path, tmp_path: Path, command: Command
) -> None:
    run = tmp_path / "run"
    last = trained(run, *words)[-1]
    recipe = load_recipe(str(run / "config.yaml"), [])
    assert evaluate_model(str(run), recipe)["answer"][0] == last["eval/answer"]
    status, _, errors = command(
        "sample", "--file", str(data / "heldout.jsonl"), "--model", str(run), "--temperature", "0", "--out",
        str(tmp_path / "sampled"),
    )  # fmt: skip
    assert status == 0, errors
    index = [json.loads(line) for line in (run / "samples" / "index.jsonl").read_text().splitlines()]
    made = [json.loads(line) for line in (tmp_path / "sampled" / "index.jsonl").read_text().splitlines()]
    last_lines = [line for line in index if line["iteration"] == 2 and line["phase"] == "eval"]
    assert [line["completion"] for line in made] == [line["completion"] for line in last_lines]
    assert [len(line["pictures"]) for line in last_lines] == [1, 1, 1, 2]
    assert all((run / "samples" / name).is_file() for line in index for name in line["pictures"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_program_of_the_card_loads_the_result(
    words: list[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    run = tmp_path / "run"
    trained(run, *words, f"model.train={kind}", *(["model.lora={}"] if kind == "full" else []))
    result = run / ("lora" if kind == "lora" else "model")
    Image.new("RGB", (40, 40), "red").save(model.parent / "picture.png")
    names = performed(result, monkeypatch, model.parent)
    assert "pipeline_tag: image-text-to-text" in (result / "README.md").read_text()
    assert names["answer"].shape[0] in range(1, 5)
    own = open_language_model(str(run), load_recipe(str(run / "config.yaml"), []))  # type: ignore[arg-type]
    with torch.no_grad():
        theirs, mine = (m(**names["inputs"]).logits for m in (names["model"], own.model))
    torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_merged_export_loads_with_its_processor(words: list[str], tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "merged"
    trained(run, *words)
    export_weights(str(run), out, merge=True)
    model, processor = AutoModelForImageTextToText.from_pretrained(out), AutoProcessor.from_pretrained(out)
    own = open_language_model(str(run), load_recipe(str(run / "config.yaml"), []))  # type: ignore[arg-type]
    talk = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "1="}]}]
    text = processor.apply_chat_template(talk, add_generation_prompt=True)
    inputs = processor(text=[text], images=[[Image.new("RGB", (40, 40), "blue")]], return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, own.model(**inputs).logits, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_it_learns_what_only_the_pictures_tell(data: Path, tmp_path: Path) -> None:
    model = put_tiny_seeing("qwen2_5_vl", tmp_path / "model", spread=0.1)
    rows = [json.loads(line) | {"prompt": "?"} for line in (data / "train.jsonl").read_text().splitlines()]
    for row in rows:
        row["image"] = str(data / row["image"])
    (tmp_path / "same.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    last = trained(
        tmp_path / "run", f"model={{path: {model}, pictures: true, train: full}}",
        f"data={{train: {tmp_path}/same.jsonl, heldout: {tmp_path}/same.jsonl}}", "generation={max_tokens: 1}",
        "rollout={prompts: 6, group: 48, batch: 288}", "rewards=[{name: answer}]", "run={iterations: 60}",
        "optimizer={learning_rate: 0.003, schedule: constant}", "evaluate={every: 60, seeds: 1}",
    )[-1]  # fmt: skip
    assert last["eval/answer"] > 0.6  # one answer for all pictures would get a third


def test_recipes_that_hide_pictures_are_refused(words: list[str]) -> None:
    for word, message in (
        ("generation.engine=vllm", "generation.engine vllm gets prompts without pictures; use engine transformers"),
        ("model.chat=false", "model.pictures shows pictures through the chat template, and model.chat is false"),
    ):
        with pytest.raises((RecipeError, ValueError), match=message):
            load_recipe("text", [*words, word])


def test_prompts_without_pictures_are_refused(words: list[str], data: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.jsonl"
    plain.write_text('{"prompt": "1=", "answer": "a"}\n' * 4)
    [fault] = faults(*words, f"data.train={plain}")
    assert f"{plain}: the prompts have no column `image`, and model.pictures is true; give each prompt" in fault
    plain.write_text('{"prompt": "1=", "answer": "a", "image": "none.png"}\n' * 4)
    [fault] = faults(*words, f"data.train={plain}")
    assert "none.png does not exist" in fault


def test_pictures_within_a_conversation_have_their_places(words: list[str], data: Path, tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "from "}, {"type": "image", "text": None}, {"type": "text", "text": " to "}]
    talk = [{"role": "user", "content": [*parts, {"type": "image"}]}]
    row = {"prompt": talk, "answer": "a", "image": [str(data / "0.png"), str(data / "1.png")]}
    (tmp_path / "talk.jsonl").write_text((json.dumps(row) + "\n") * 4)
    named = f"data={{train: {tmp_path}/talk.jsonl, heldout: {data}/heldout.jsonl}}"
    trainer = Session(load_recipe("text", [*words, named]), RunFolder.create(tmp_path / "run", "")).trainer(Silent())
    [mine], [same] = trainer.data.train.rows[:1], trainer.data.heldout[-1:]
    assert mine.text == "from <image> to <image>"
    assert isinstance(trainer.task, TextTask)
    language = trainer.task.policy.language
    assert language.encode(mine.text, mine.messages, mine.pictures) == language.encode(same.text, None, same.pictures)
    [fault] = faults(*words, named, "model.pictures=false", "model.path=arithmetic")
    assert "a message holds image, and a language model reads text; leave it out, or write model.pictures" in fault


def test_a_model_of_text_is_refused(words: list[str]) -> None:
    [fault] = faults(*words, "model.path=arithmetic")
    assert "which is not a language model that is shown pictures; use a model that is one, or leave out" in fault


def test_a_plan_counts_the_tokens_of_pictures(words: list[str], command: Command, tmp_path: Path) -> None:
    recipe = load_recipe("text", words)
    status, output, errors = command("plan", "text", *words)
    assert status == 0, errors
    task = start(recipe, tmp_path / "run").task
    assert isinstance(task, TextTask)
    rows = check(recipe).require().train.rows
    longest = max(len(task.policy.language.encode(row.text, row.messages, row.pictures)) for row in rows)
    assert f"after prompts of {longest} tokens" in output


def test_prompts_with_other_pictures_are_other_prompts(words: list[str], data: Path, tmp_path: Path) -> None:
    for folder, colour in (("train", "red"), ("test", "blue")):
        (tmp_path / folder).mkdir()
        Image.new("RGB", (40, 40), colour).save(tmp_path / folder / "1.png")
        row = json.dumps({"prompt": "what?", "answer": "a", "image": f"{folder}/1.png"}) + "\n"
        (tmp_path / f"{folder}.jsonl").write_text(row * 4)
    apart = f"data={{train: {tmp_path}/train.jsonl, heldout: {tmp_path}/test.jsonl}}"
    assert not [
        note for note in check(load_recipe("text", [*words, apart])).texts("note") if "are in data.train" in note
    ]
    same = f"data={{train: {tmp_path}/train.jsonl, heldout: {tmp_path}/train.jsonl}}"
    for more in ((), ("evaluate.prompts=4",)):
        notes = check(load_recipe("text", [*words, same, *more])).texts("note")
        assert [note for note in notes if note.startswith("4 of 4 prompts of")]


def test_marks_that_do_not_fit_are_found_by_the_plan(words: list[str], data: Path, tmp_path: Path) -> None:
    file = tmp_path / "marks.jsonl"
    file.write_text((json.dumps({"prompt": "<image>1=<image>", "image": str(data / "0.png")}) + "\n") * 4)
    [fault] = faults(*words, f"data.train={file}")
    assert f"{file}, line 1: a prompt has 2 times <image> and 1 picture; write <image> once for each picture" in fault
    file.write_text((json.dumps({"prompt": "1=", "answer": "a", "image": str(data / "0.png")}) + "\n") * 4)
    [fault] = faults(*words, f"data.train={file}", "data.templates=['<image> {prompt} <image>']")
    assert "a prompt has 2 times <image> and 1 picture" in fault


@pytest.mark.parametrize("asked", ["", "?image=images"])
def test_pictures_may_be_in_a_column_images(words: list[str], data: Path, tmp_path: Path, asked: str) -> None:
    file = tmp_path / "many.jsonl"
    file.write_text((json.dumps({"prompt": "1=", "answer": "a", "images": [str(data / "0.png")]}) + "\n") * 4)
    found = check(load_recipe("text", [*words, f"data.train={file}{asked}"]))
    assert found.texts("fault") == []
    row = found.require().train.rows[0]
    assert isinstance(row.pictures, tuple)
    assert dict(row.columns) == {"answer": "a", "image": [str(data / "0.png")]}
    [fault] = faults(*words, f"data.train={file}{asked}", "model={path: arithmetic, pictures: false}")
    assert "the prompts have a column 'images', which rewards receive anyway; rename it" in fault


def test_a_model_that_may_see_and_is_shown_nothing_gets_a_note(words: list[str], tmp_path: Path) -> None:
    folder = put_tiny_seeing("gemma3", tmp_path / "gemma3")
    named = f"model={{path: {folder}, pictures: %s, lora: {{rank: 4}}}}"
    notes = check(load_recipe("text", [*words, named % "false"])).texts("note")
    assert [note for note in notes if "is not shown the pictures; write model.pictures: true if it should be" in note]
    assert not [note for note in check(load_recipe("text", [*words, named % "true"])).texts("note") if "shown" in note]


@pytest.mark.slow
def test_a_model_outside_a_run_is_shown_the_pictures_of_a_file(data: Path, tmp_path: Path, command: Command) -> None:
    folder, found = put_tiny_seeing("gemma3", tmp_path / "gemma3"), []
    for number in ("0", "4"):
        file = tmp_path / f"{number}.jsonl"
        file.write_text(json.dumps({"prompt": "1=", "image": str(data / f"{number}.png")}) + "\n")
        out = tmp_path / f"out-{number}"
        status, _, errors = command(
            "sample", "--file", str(file), "--model", str(folder), "--out", str(out), "--max-tokens", "8",
            "--count", "4",
        )  # fmt: skip
        assert status == 0, errors
        found.append([json.loads(line)["completion"] for line in (out / "index.jsonl").read_text().splitlines()])
    assert found[0] != found[1]


@pytest.mark.slow
def test_a_prompt_of_the_command_line_shows_pictures(data: Path, model: Path, tmp_path: Path, command: Command) -> None:
    found = []
    for number in ("0", "4"):
        out = tmp_path / number
        words = ["a question", "--model", str(model), "--image", str(data / f"{number}.png"), "--count", "4"]
        status, _, errors = command("sample", *words, "--max-tokens", "8", "--out", str(out))
        assert status == 0, errors
        found.append([json.loads(line)["completion"] for line in (out / "index.jsonl").read_text().splitlines()])
    assert found[0] != found[1]
    for words, message in (
        (["--image", "none.png"], "--image: the picture none.png does not exist"),
        (
            ["--image", str(data / "0.png"), "--model", "arithmetic"],
            "arithmetic is not shown pictures; leave out --image",
        ),
        (["--image", str(data / "0.png"), "--model", "scenes"], "the pipeline takes no picture; leave out --image"),
    ):
        status, _, errors = command(
            "sample", "a question", "--model", str(model), *words, "--out", str(tmp_path / "no")
        )
        assert status == 1
        assert message in errors


def test_a_hub_id_says_how_its_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowgrpo.text.seeing_types.configuration", lambda path, local=False: {"model_type": path[3:]})
    with pytest.raises(
        ValueError, match=r"me/qwen2_vl is a language model that is shown pictures; write model\.pictures"
    ):
        load_language_model("me/qwen2_vl")
    with pytest.raises(ValueError, match="me/llama is not a language model that is shown pictures; leave out"):
        load_language_model("me/llama", pictures=True)
