"""A model card says what was trained, with its scores; the hub can read it; and it names no folder of the machine."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowgrpo.configs.load import dump_recipe, load_image_recipe, load_recipe
from flowgrpo.configs.schema import AnyRecipe
from flowgrpo.inference.exporting import add_card
from flowgrpo.training.folder.model_card import (
    CARD,
    FORMER,
    CardFacts,
    base_model,
    card_text,
    former_card,
    plain_line,
    write_card,
)
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.result_card import Known, write_result_card

SECRET = "/home/jane/secret"


def images(*words: str) -> AnyRecipe:
    return load_recipe("default", list(words))


def text(*words: str) -> AnyRecipe:
    return load_recipe("text", list(words))


def line(iteration: int, mean: float | None, error: float | None, name: str = "gold") -> dict[str, Any]:
    return {"iteration": iteration, f"eval/{name}": mean, f"eval_error/{name}": error}


def head_of(card: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(card.split("---\n")[1])
    return found


def program(card: str) -> str:
    found = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    assert found is not None
    compile(found[1], "card", "exec")
    return found[1]


def table(card: str, section: str) -> dict[str, list[str]]:
    """The rows of a section's table by their first cell."""
    rows = card.partition(f"## {section}\n")[2].partition("\n## ")[0].splitlines()
    cells = [re.split(r"(?<!\\)\|", row)[1:-1] for row in rows if row.startswith("| ") and "---" not in row]
    return {first.strip(): [cell.strip() for cell in rest] for first, *rest in cells}


LORA = CardFacts("lora", 40, train=1069, heldout=96)


def test_the_scores_are_those_before_and_after_with_their_errors() -> None:
    metrics = [line(0, 0.25, 0.0312), {"iteration": 0, "reward/total": 0.1}, line(20, 0.5, 0.03), line(40, 0.75, None)]
    card = card_text(images(), metrics, LORA)
    assert table(card, "Scores")["gold"] == ["0.25 ± 0.031", "0.75"]
    assert "chosen by the first of these rewards" in card


def test_scores_of_a_share_of_the_trained_weights_say_so() -> None:
    said = "The trained weights made a share of 0.8 of the steps, and the base model made the last ones"
    metrics = [line(0, 0.25, 0.03), line(40, 0.75, 0.03)]
    assert said in card_text(images("evaluate.trained_share=0.8"), metrics, LORA)
    assert "share of" not in card_text(images(), metrics, LORA)


def test_of_the_best_weights_the_scores_are_those_of_that_evaluation() -> None:
    metrics = [line(0, 0.25, 0.03), line(20, 0.5, 0.04), line(40, 0.125, 0.05)]
    card = card_text(images(), metrics, CardFacts("lora", 20))
    assert table(card, "Scores")["gold"] == ["0.25 ± 0.03", "0.5 ± 0.04"]
    assert table(card, "Training")["iterations"][0].startswith("20 of ")


def test_weights_that_no_score_chose_are_not_said_to_be_chosen() -> None:
    card = card_text(images(), [line(0, None, None), line(40, None, None)], LORA)
    assert table(card, "Scores")["gold"] == ["–", "–"]
    assert "chosen by" not in card


def test_a_first_or_last_evaluation_at_another_time_is_said() -> None:
    card = card_text(images("evaluate.results=last"), [line(10, 0.25, 0.03), line(30, 0.5, 0.04)], LORA)
    assert "The last evaluation was after 30 iterations." in card
    assert "The first evaluation was after 10 iterations." in card
    assert "chosen by" not in card


def test_scores_of_another_measure_are_not_those_before() -> None:
    metrics = [line(0, 0.25, 0.03), line(20, 0.5, 0.04), line(40, 0.75, 0.03)]
    card = card_text(images(), metrics, CardFacts("lora", 40, alike_since=20))
    assert table(card, "Scores")["gold"] == ["0.5 ± 0.04", "0.75 ± 0.03"]
    assert "The first evaluation was after 20 iterations." in card


def test_without_evaluations_there_are_no_scores() -> None:
    assert "## Scores" not in card_text(images(), [{"iteration": 0, "reward/total": 0.1}], LORA)


@pytest.mark.parametrize("mean", [float("nan"), "much", None, 10**400, True])
def test_a_score_of_a_strange_run_does_no_harm(mean: Any) -> None:
    assert "## Scores" in card_text(images(), [line(0, mean, mean)], LORA)


def test_the_table_says_what_was_trained() -> None:
    recipe = images(
        "model.path=owner/model", "model.dtype=bfloat16", "model.train=lora", "model.lora={rank: 8, alpha: 24}",
        "run.seed=7",
        "rewards=[{name: gold, options: {dense: true}, label: dense}, {name: jpeg_compressibility, weight: 0.1}]",
        "rollout={prompts: 6, group: 12}", "optimizer={learning_rate: 2e-4, updates: 3, epochs: 2, ema: null}",
        "optimizer.schedule=constant",
    )  # fmt: skip
    rows = {key: cells[0] for key, cells in table(card_text(recipe, [], LORA), "Training").items() if key}
    assert rows["base model"] == "owner/model"
    assert rows["trained"] == "a LoRA of rank 8 and alpha 24, computed in bfloat16"
    assert rows["rewards"] == "dense, jpeg_compressibility × 0.1"
    assert rows["iterations"] == f"40 of {recipe.run.iterations}, each with 6 prompts × 12 images"
    assert rows["optimizer"] == "AdamW, learning rate 0.0002 (constant), 6 steps an iteration"
    assert rows["average of the weights"] == "none"
    assert rows["seed"] == "7"
    assert rows["training prompts"] == "scenes:train (1,069)"
    assert rows["held-out prompts"] == f"scenes:heldout (96), {recipe.evaluate.seeds} samples of each"
    assert rows["objective"].startswith("forward (diffusion_nft)")


def test_a_card_says_which_scouts_chose_the_images() -> None:
    recipe = images("rollout={prompts: 6, group: 4, scouts: {group: 9, steps: 3, keep: widest}}")
    rows = {key: cells[0] for key, cells in table(card_text(recipe, [], LORA), "Training").items() if key}
    assert rows["iterations"] == (
        f"40 of {recipe.run.iterations}, each with 6 prompts × 4 images, whose seeds 9 scouts a prompt, of 3 steps, "
        "have chosen (widest)"
    )


def test_a_card_says_who_taught_and_whether_rewards_did() -> None:
    facts = CardFacts("lora", 3)
    teachers = "model.teachers=[{name: sums, path: /data/runs/large}, {name: words, path: Qwen/Qwen2.5-7B-Instruct}]"
    distilled = ["objective={name: distilled, direction: forward}", teachers]
    card = card_text(text(*distilled), [], facts)
    assert "It was trained on what its teachers predict by flowgrpo." in card
    assert "| objective | distilled |" in card
    assert "| teachers | large, Qwen/Qwen2.5-7B-Instruct |" in card
    assert "| rewards | answer, only reported |" in card
    assert "- distillation\n" in card
    assert "reinforcement-learning" not in card
    both = card_text(text(*distilled, "objective.both=true"), [], facts)
    assert "It was trained on rewards and what its teachers predict by flowgrpo." in both
    assert "- reinforcement-learning\n" in both
    assert "| objective | distilled (clip) |" in both
    form = "rollout={group: 1, form: {name: given, columns: [solution]}}"
    given = card_text(text(*distilled, form), [], facts)
    assert "what its teachers predict for samples that the data give by flowgrpo" in given
    assert "teach" not in card_text(text(), [], facts)


def test_a_card_says_that_a_model_of_images_taught_itself() -> None:
    card = card_text(load_image_recipe("d_opsd"), [], LORA)
    assert "It was trained on what the model itself predicts when it knows more by flowgrpo." in card
    assert "| teacher | the model itself, with an average of its weights (decay 0.99) |" in card
    assert "| teachers |" not in card
    assert "- distillation\n" in card
    both = "model.teachers=[{name: a, path: owner/other}, {name: b, template: '{detailed}'}]"
    mixed = card_text(load_image_recipe("d_opsd", [both, "reference=null"]), [], LORA)
    assert "| teachers | owner/other |" in mixed
    assert "| teacher | the model itself, with the weights of the start |" in mixed


@pytest.mark.parametrize(
    ("more", "weights"),
    [
        ("frozen: true", "the weights of the start"),
        ("ema: {decay: 0.95}", "an average of its weights (decay 0.95)"),
        ("top: 5", "its present weights"),
    ],
)
def test_a_card_says_that_a_model_taught_itself(more: str, weights: str) -> None:
    shown = "extensions=[{name: teacher, template: '{answer} {prompt}', failed: false}]"
    card = card_text(text(shown, f"objective={{name: distilled, others: none, {more}}}"), [], CardFacts("model", 3))
    assert "It was trained on what the model itself predicts when it knows more by flowgrpo." in card
    assert f"| teacher | the model itself, with {weights} |" in card
    assert "| rewards | answer, only reported |" in card
    assert "- distillation\n" in card
    assert "reinforcement-learning" not in card


@pytest.mark.parametrize(
    ("recipe", "kind", "library", "task", "relation"),
    [
        (images, "lora", "diffusers", "text-to-image", "adapter"),
        (images, "pipeline", "diffusers", "text-to-image", "finetune"),
        (text, "lora", "peft", "text-generation", "adapter"),
        (text, "model", "transformers", "text-generation", "finetune"),
    ],
)
def test_the_head_is_what_the_hub_reads(recipe: Any, kind: str, library: str, task: str, relation: str) -> None:
    head = head_of(card_text(recipe("model.path=owner/model"), [], CardFacts(kind, 1)))
    assert (head["library_name"], head["pipeline_tag"]) == (library, task)
    assert (head["base_model"], head["base_model_relation"]) == ("owner/model", relation)
    assert "flowgrpo" in head["tags"]
    assert ("lora" in head["tags"]) == (kind == "lora")
    assert "license" not in head  # left to whoever publishes it


@pytest.mark.parametrize(
    ("video", "pictures", "task"),
    [(True, False, "text-to-video"), (False, True, "image-to-image"), (True, True, "image-to-video")],
)
def test_the_task_of_videos_and_pictures(video: bool, pictures: bool, task: str) -> None:
    names = ("image",) if pictures else ()
    card = card_text(images(), [], CardFacts("pipeline", 1, video=video, pictures=names))
    assert head_of(card)["pipeline_tag"] == task
    assert ("export_to_video(" in program(card)) == video
    assert ("load_image(" in program(card)) == pictures


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("stabilityai/stable-diffusion-3.5-medium", ("stabilityai/stable-diffusion-3.5-medium", True)),
        (f"{SECRET}/models/sd3", ("sd3", False)),
        (f"{SECRET}/models/sd3/", ("sd3", False)),
        ("C:\\Users\\jane\\sd3", ("sd3", False)),
        ("./sd3", ("sd3", False)),
        ("scenes", ("scenes", False)),
        ("arithmetic:untrained", ("arithmetic:untrained", False)),
        (f"{SECRET}/hub/models--Qwen--Qwen3-0.6B/snapshots/abc", ("Qwen/Qwen3-0.6B", True)),
        (f"{SECRET}/hub/models--o--a--b/snapshots/abc", ("o/a--b", True)),
    ],
)
def test_a_base_model_has_a_name_and_no_folders(path: str, name: tuple[str, bool]) -> None:
    assert base_model(path) == name


def test_a_folder_that_looks_like_a_name_on_the_hub_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "sd3").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert base_model("models/sd3") == ("sd3", False)


def test_the_result_of_a_run_has_the_name_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "first" / "pipeline").mkdir(parents=True)
    result = tmp_path / "first" / "pipeline"
    assert base_model(str(result)) == ("pipeline", False)
    (tmp_path / "first" / "config.yaml").write_text("name: first\n")
    assert base_model(str(result)) == base_model(f"{result}/") == ("first/pipeline", False)
    monkeypatch.chdir(tmp_path / "first")
    assert base_model("pipeline") == ("first/pipeline", False)


@pytest.mark.parametrize("kind", ["lora", "pipeline"])
def test_no_folder_of_the_machine_is_named(kind: str) -> None:
    recipe = images(
        f"model.path={SECRET}/sd3", f"data={{train: {SECRET}/train.txt, heldout: {SECRET}/heldout.txt}}",
        f"rewards=[{{name: '{SECRET}/mine.py:taste'}}]", "model.train=lora",
        f"model.lora.start={SECRET}/old/lora.safetensors",
        f"evaluate.rewards=[{{name: '{SECRET}/mine.py:taste'}}]",
    )  # fmt: skip
    facts = CardFacts(kind, 1, call={"negative_prompt": f"not {SECRET}", "image": f"{SECRET}/a.png", "height": 64})
    card = card_text(recipe, [line(0, 0.5, 0.1, "mine.py:taste")], facts)
    assert "secret" not in card
    assert "jane" not in card
    assert "train.txt" in card
    assert "mine.py:taste" in card
    assert "base_model" not in head_of(card)  # the hub does not know it
    if kind == "lora":
        assert 'BASE = "sd3"  # the base model; write the path of its folder, or its name on the hub' in program(card)


def test_of_text_no_folder_is_named_and_no_system_message() -> None:
    recipe = text(f"model.path={SECRET}/qwen", "model.system=be secret", "model.train=lora")
    card = card_text(recipe, [], CardFacts("lora", 1, chat=True))
    assert "secret" not in card
    assert "apply_chat_template" in program(card)
    assert "had a system message" in card
    assert 'messages = [{"role": "system", "content": "the system message of the run"}, {"role": "user"' in card


def test_of_text_the_program_ends_where_the_run_did() -> None:
    words = ("model.chat_template_kwargs={enable_thinking: false}", "generation.stop=['</a>', '\"']")
    shown = program(card_text(text(*words), [], CardFacts("model", 1, chat=True)))
    assert "options |= {'enable_thinking': False}" in shown
    assert """do_sample=False, stop_strings=['</a>', '"'], tokenizer=tokenizer)""" in shown


def test_names_of_a_stranger_do_not_break_the_card() -> None:
    name = "a | b\n---\n# c `d` <script>"
    recipe = images().model_copy(update={"name": name})
    card = card_text(recipe, [line(0, 0.5, 0.1, "x | y")], LORA)
    assert head_of(card)["library_name"] == "diffusers"
    assert card.splitlines().count("---") == 2
    assert "<script>" not in card.replace("\\<", "")
    assert table(card, "Scores") == {"x \\| y": ["0.5 ± 0.1", "0.5 ± 0.1"], "reward": ["before", "after"]}
    hostile = images().model_copy(update={"model": images().model.model_copy(update={"path": '/x/a"\nimport os\n"'})})
    assert "\nimport os" not in program(card_text(hostile, [], LORA))


def test_a_text_is_put_on_one_line() -> None:
    assert plain_line("a\n b |c") == "a b \\|c"


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_card_that_nobody_changed_is_replaced(tmp_path: Path) -> None:
    assert former_card(tmp_path) is None
    write_card(tmp_path, "one\n")
    assert former_card(tmp_path) is None
    write_card(tmp_path, "two\n", former_card(tmp_path))
    assert (tmp_path / CARD).read_text().startswith("two\n")
    assert not (tmp_path / FORMER).exists()


@pytest.mark.parametrize("mine", ["one, and my words\n", "", "mine alone"])
def test_a_card_that_a_person_changed_is_kept(tmp_path: Path, mine: str) -> None:
    write_card(tmp_path, "one\n")
    changed = (tmp_path / CARD).read_text().replace("one\n", mine) if "one" in mine else mine
    (tmp_path / CARD).write_text(changed)
    write_card(tmp_path, "two\n", former_card(tmp_path))
    assert (tmp_path / FORMER).read_text() == changed
    assert (tmp_path / CARD).read_text().startswith("two\n")
    # And again, when the folder is replaced by a longer run.
    kept = former_card(tmp_path)
    (tmp_path / FORMER).unlink()
    write_card(tmp_path, "three\n", kept)
    assert (tmp_path / FORMER).read_text() == changed


@pytest.mark.parametrize(
    ("kind", "column", "words", "shown"),
    [
        ("WanImageToVideoPipeline", "image", [], True),
        ("WanImageToVideoPipeline", "frame", [], True),  # the source of the prompts names the column
        ("WanImageToVideoPipeline", "other", ["model.call.image=one.png"], True),
        # FLUX.2 makes images from words too, and Stable Diffusion 3 leaves the column to rewards.
        ("Flux2Pipeline", "other", [], False),
        ("Flux2Pipeline", "image", [], True),
        ("StableDiffusion3Pipeline", "image", [], False),
    ],
)
def test_a_card_of_an_export_knows_whether_samples_have_pictures(
    kind: str, column: str, words: list[str], shown: bool, tmp_path: Path
) -> None:
    for folder in ("pipeline", "out"):
        (tmp_path / folder).mkdir()
    (tmp_path / "pipeline" / "model_index.json").write_text(json.dumps({"_class_name": kind}))
    # The picture is not there any more.
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "x", column: "gone.png"}) + "\n")
    source = f"{tmp_path / 'p.jsonl'}" + ("?image=frame" if column == "frame" else "")
    recipe = images(f"model={{path: {tmp_path / 'pipeline'}}}", f"data={{train: '{source}', heldout: null}}", *words)
    add_card(tmp_path / "out", recipe, tmp_path / "run", 1)
    card = (tmp_path / "out" / CARD).read_text()
    assert ("image=load_image(" in program(card)) == shown
    assert head_of(card)["pipeline_tag"] == ("image-to-image" if shown else "text-to-image")


def test_a_negative_prompt_that_is_left_out_is_said() -> None:
    for text, said in (("blue", True), ("", False), (None, False)):
        card = card_text(images(), [], CardFacts("lora", 1, call={"negative_prompt": text}))
        assert ("The run had a `negative_prompt`" in card) == said
        # Without a negative prompt, some classes have no guidance.
        remark = "  # the run had another negative_prompt" if said else ""
        assert (f'    negative_prompt="",{remark}\n' in program(card)) == (text is not None)
    call = {"negative_prompt_2": "blue", "prompt_2": "red", "negative_prompt": " "}
    card = card_text(images(), [], CardFacts("lora", 1, call=call))
    assert "The run had a `negative_prompt_2`" in card
    assert '    negative_prompt_2="",  # the run had another negative_prompt_2\n' in program(card)
    assert '    negative_prompt=" ",\n' in program(card)
    assert "blue" not in card
    assert "red" not in program(card)


def test_a_card_says_what_was_changed_in_the_middle_of_a_run(tmp_path: Path) -> None:
    def recipe(*words: str) -> str:
        return dump_recipe(images("data.train=/home/jane/secret/a.txt", "optimizer.learning_rate=1e-4", *words))

    for start, words in {
        0: [],
        5: ["optimizer.learning_rate=1e-5", "run.iterations=90"],
        9: ["optimizer.learning_rate=1e-5", "data.train=/home/jane/secret/b.txt", "evaluate.prompts=4"],
        40: ["optimizer.learning_rate=3e-3"],
    }.items():
        folder = tmp_path / "recipes" / f"iter-{start:06d}"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(recipe(*words))
    (tmp_path / "lora").mkdir()
    write_result_card(tmp_path / "lora", "lora", images(), RunFolder(tmp_path), 40, Known())

    card = (tmp_path / "lora" / CARD).read_text()
    assert table(card, "Training")["changed in the middle"] == [
        "after 5 iterations optimizer.learning_rate 0.0001 → 1e-05; after 9 iterations data.train"
    ]
