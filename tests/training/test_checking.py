"""The check of `plan` and every run: presets pass, and what only a network or a file could show is no fault."""

import io
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from flowgrpo.configs.load import RecipeError, load_recipe, recipe_names
from flowgrpo.training import checking, prompt_lengths, recipe_models
from flowgrpo.training.checking import check
from flowgrpo.training.model_paths import language_folder


@pytest.mark.parametrize("name", recipe_names())
def test_every_preset_passes_without_a_model_of_its_paper(name: str):
    assert check(load_recipe(name)).texts("fault", "needed", "unknown") == []
    try:
        published = load_recipe(f"{name}@published")
    except RecipeError:
        return
    found = check(published)
    assert found.texts("fault") == []
    lacking = ("data.", "rewards", "evaluate.rewards", "model.teachers.", "penalties.data")
    assert all(finding.key.startswith(lacking) for finding in found.findings if finding.kind == "needed")


def test_what_is_needed_is_a_fault_of_a_run():
    found = check(load_recipe("mixgrpo_flash_guard", ["data.train=none.txt", "rewards=[{name: golf}]"]))
    assert [finding.kind for finding in found.findings] == ["needed", "fault"]
    with pytest.raises(ValueError, match=r"(?s)none.txt.*golf"):
        found.require()
    found.excuse({"data.train"})
    assert [finding.kind for finding in found.findings] == ["excused", "fault"]


@pytest.mark.parametrize(
    ("name", "words", "noted"),
    [
        ("default", ["optimizer.learning_rate=1e-3"], True),
        ("default", ["optimizer.learning_rate=1e-3", "model.train=lora"], False),
        ("default", [], False),
        ("text_digits", [], False),  # trains an untrained model
    ],
)
def test_a_rate_for_a_lora_is_noted_for_full_weights(name: str, words: list[str], noted: bool):
    notes = check(load_recipe(name, words)).texts("note")
    assert any("optimizer.learning_rate 0.001 is a rate for a LoRA" in note for note in notes) == noted


@pytest.mark.parametrize(
    ("words", "small", "noted"),
    [
        ([], 1, True),
        ([], checking.SMALL_MODEL, False),
        (["optimizer.learning_rate=1e-5"], 1, False),
        (["model.train=lora"], 1, False),
    ],
)
def test_the_rate_of_the_small_model_is_noted_for_all_weights_of_a_larger_one(
    words: list[str], small: int, noted: bool, random_pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "SMALL_MODEL", small)
    notes = check(load_recipe("default", [f"model.path={random_pipeline}", *words])).texts("note")
    assert any(f"all weights of {random_pipeline}" in note and "model.train=lora" in note for note in notes) == noted


@pytest.mark.parametrize("name", ["text", "masked"])
def test_so_it_is_for_language_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def noted(*words: str) -> bool:
        notes = check(load_recipe(name, words)).texts("note")
        return any("0.00035 suits the small model of the package; a large model needs about 1e-6" in n for n in notes)

    assert not noted()
    monkeypatch.setattr(checking, "SMALL_MODEL", 1)
    assert noted()
    assert not noted("model.train=lora")
    assert not noted("optimizer.learning_rate=1e-6")


@pytest.mark.parametrize("name", ["default", "text", "masked"])
def test_a_lost_minus_in_the_rate_is_noted(name: str) -> None:
    def noted(*words: str) -> bool:
        return any("and no model learns at it" in note for note in check(load_recipe(name, words)).texts("note"))

    assert noted("optimizer.learning_rate=1e5")
    assert not noted()


ABOUT_PICTURES = ["rewards=[{name: jpeg_compressibility}]", "rollout.prompts=1"]


def test_columns_that_are_left_out_are_noted(tmp_path: Path):
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, "PNG")
    picture = {"bytes": file.getvalue(), "path": None}
    datasets.Dataset.from_list([{"prompt": "a", "image": picture, "n": 1, "raw": b"x"}]).save_to_disk(tmp_path / "set")
    found = check(load_recipe("default", [f"data.train={tmp_path / 'set'}", *ABOUT_PICTURES]))
    assert [text for text in found.texts("note") if "columns of" in text] == [
        f"{tmp_path / 'set'} has columns of pictures, sounds or bytes, which rewards do not get: image, raw",
    ]


def test_prompts_that_stand_twice_and_lines_of_json_are_noted(tmp_path: Path):
    rows = [{"prompt": "a", "n": 1}, {"prompt": "a ", "n": 1}, {"prompt": "a", "n": 2}, {"prompt": "b", "n": 1}]
    (tmp_path / "p.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "p.txt").write_text("".join(f"{json.dumps(row)}\n" for row in rows[2:]))
    small = [*ABOUT_PICTURES, "rollout.prompts=2", "data.heldout=null"]
    notes = check(load_recipe("default", [f"data.train={tmp_path / 'p.jsonl'}", *small])).texts("note")
    assert f"1 of 4 prompts of {tmp_path / 'p.jsonl'} are there already, with the same columns" in notes
    notes = check(load_recipe("default", [f"data.train={tmp_path / 'p.txt'}", *small])).texts("note")
    assert (
        f"{tmp_path / 'p.txt'}: 2 of 2 prompts look like JSON, and a .txt file has a prompt a line; name a file "
        in str(notes)
    )
    assert not any("there already" in note for note in notes)


def test_of_a_long_file_some_prompts_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompt_lengths, "MOST", 4)
    monkeypatch.setattr(recipe_models, "MOST_ENCODED", 10)
    long = "a red star " * 20
    (tmp_path / "p.txt").write_text("".join(f"{long if k in (3, 4) else 'a'}\n" for k in range(11)))
    words = [f"data.train={tmp_path / 'p.txt'}", "model.release_text_encoders=true", *ABOUT_PICTURES]
    recipe = load_recipe("default", words)
    notes = check(recipe).texts("note")
    # Prompts 0, 3, 6 and 9 are looked at.
    assert any("1 of 4 prompts" in note and "(of 11, the others were not looked at)" in note for note in notes)
    assert any(note.startswith("11 prompts") and "release_text_encoders" in note for note in notes)
    (tmp_path / "p.txt").write_text("a\n" * 4)
    assert not any("others" in note or "encoded" in note for note in check(recipe).texts("note"))


def test_captions_beside_a_rollout_are_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recipe_models, "MOST_ENCODED", 10)
    file, size = tmp_path / "images.jsonl", (32, 32)
    Image.new("RGB", size).save(tmp_path / "a.png")
    rows = [{"prompt": "a red star " * (20 if k == 3 else 1), "image": "a.png"} for k in range(11)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"penalties.data={{source: '{file}', column: image, weight: 0.1}}", "model.release_text_encoders=true"]
    notes = check(load_recipe("ddrl", [*words, "rollout.prompts=6", "run.iterations=2"])).texts("note")
    assert any(note.startswith(f"1 of 11 prompts of {file} are longer than the") for note in notes), notes
    assert any(note.startswith(f"11 prompts of {file} are encoded before") for note in notes)
    plain = load_recipe("ddrl", [*words, "rollout.prompts=6", "run.iterations=1"])
    assert not any("are encoded before" in note for note in check(plain).texts("note"))


def test_lengths_of_heldout_prompts_are_those_of_the_call_of_evaluations(monkeypatch: pytest.MonkeyPatch):
    limits = {}

    def note(folder: Path, source: str, texts: list[str], call: dict[str, Any], parameters: Any) -> list[str]:
        limits[source] = call.get("max_sequence_length")
        return []

    monkeypatch.setattr(recipe_models, "long_prompts", note)
    words = ["model.call.max_sequence_length=16", "evaluate.call={max_sequence_length: 8}"]
    assert check(load_recipe("ddrl", words)).texts("fault") == []
    assert limits == {"scenes:train": 16, "scenes:heldout": 8, "scenes:pairs": 16}


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("pref_grpo", ["rollout.budget={choice: variance, rounds: 2}"], "win_rate compares whole groups"),
        ("pref_grpo", ["data.templates=['{prompt}', 'a {prompt}']"], "win_rate compares whole groups"),
        ("mixgrpo", ["model.variant=slice", "sampler.shift=3"], "model.variant slice works with the pipeline's own"),
        ("mixgrpo", ["model.call.negative_prompt=[a, b]"], "model.call.negative_prompt is a list, and it is the text"),
        ("text", ["model.system=be brief"], "model.system is given, but the tokenizer of arithmetic has no chat"),
        ("masked", ["model.chat=true"], "model.chat is true, but the tokenizer of arithmetic:masked has no chat"),
    ],
)
def test_what_a_run_would_refuse_with_its_model_loaded_is_told_before(name: str, words: list[str], said: str):
    faults = check(load_recipe(name, words)).texts("fault")
    assert any(said in fault for fault in faults), faults


@pytest.mark.parametrize(
    ("prompt", "words", "said"),
    [
        (
            [{"role": "user", "content": "1+2="}],
            [],
            "prompts are conversations, but the tokenizer has no chat template",
        ),
        (
            "1+2+" * 20,
            ["generation.max_prompt_tokens=40"],
            "prompt 1 has 80 tokens; generation.max_prompt_tokens is 40",
        ),
        ("1+2+" * 20, ["generation.max_prompt_tokens=80"], None),
        ("1+2=", ["generation.max_prompt_tokens=3"], "prompt 1 has 4 tokens; generation.max_prompt_tokens is 3"),
    ],
)
def test_prompts_of_text_are_checked_with_the_tokenizer_alone(
    prompt: Any, words: list[str], said: str | None, tmp_path: Path
) -> None:
    rows = [{"prompt": prompt, "answer": "3"}] + [{"prompt": "2+1=", "answer": "3"}] * 7
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = check(load_recipe("text", [f"data.train={tmp_path}/train.jsonl", "data.heldout=null", *words]))
    faults = [text for text in found.texts("fault") if "tokens" in text or "conversations" in text]
    assert len(faults) == (said is not None)
    assert all(str(said) in text for text in faults)


@pytest.mark.parametrize("stored", [True, False])
def test_a_plan_tells_how_many_prompts_are_left_out(
    stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model of the hub, only if its tokenizer is on this machine."""
    from transformers import AutoTokenizer

    train = tmp_path / "train.jsonl"
    train.write_text("".join(json.dumps({"prompt": text, "answer": "3"}) + "\n" for text in ["1+2="] * 8 + ["1" * 99]))
    words = [
        f"data.train={train}", "data.heldout=null", "rollout.prompts=2",
        "generation={max_prompt_tokens: 9, long_prompts: drop}"
    ]  # fmt: skip
    said = (
        f"1 of 9 prompts of {train} are left out, because they have more than 9 tokens (generation.max_prompt_tokens)"
    )
    found = check(load_recipe("text", words), fetches=False)
    assert found.texts("note").count(said) == 1
    assert found.data is not None
    assert len(found.data.train.rows) == 9
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = language_folder("arithmetic")
    real = AutoTokenizer.from_pretrained

    def loaded(path: str, **options: Any) -> Any:
        assert options.pop("local_files_only")
        return real(folder if stored else path, local_files_only=True, **options)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", loaded)
    of_the_hub = check(load_recipe("text", [*words, "model.path=somebody/something"]), fetches=False)
    assert of_the_hub.texts("note").count(said) == stored
    assert of_the_hub.texts("fault") == []
