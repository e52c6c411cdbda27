"""The embedded arithmetic: training, held-out and test problems, files as shipped, a tokenizer that can be saved."""

import json
from collections import Counter
from importlib import resources
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flowgrpo.text.model import load_language_model, reinitialise
from flowgrpo.worlds.arithmetic.problems import (
    HELDOUT,
    LONG,
    TRAIN,
    WIDTH,
    ArithmeticSettings,
    build_arithmetic,
    long_problems,
    problems,
    same_problem,
    shipped,
    split_problems,
    write_problem_files,
)


def test_every_problem_once_with_the_right_answer() -> None:
    found = problems()
    assert len(found) == len(dict(found)) == 2 * 100 * 100
    for prompt, answer in found[:500]:
        left, sign, right = prompt.removesuffix("=").partition("+" if "+" in prompt else "-")
        assert int(answer) == (int(left) + int(right) if sign == "+" else int(left) - int(right))
        assert len(prompt) + len(answer) + 1 <= WIDTH


def test_the_three_parts_share_nothing() -> None:
    parts = split_problems()
    assert [len(part) for part in parts[1:]] == [TRAIN, HELDOUT]
    assert len(set().union(*(set(part) for part in parts))) == sum(len(part) for part in parts) == 20_000


def test_the_files_are_those_the_package_ships(tmp_path: Path) -> None:
    write_problem_files(tmp_path)
    folder = resources.files("flowgrpo.worlds.arithmetic") / "data"
    names = {f"{long}{name}.jsonl" for long in ("", "long_") for name in ("train", "heldout", "test")}
    assert {path.name for path in folder.iterdir()} == {path.name for path in tmp_path.iterdir()} == names
    for name in names:
        assert (tmp_path / name).read_text() == (folder / name).read_text()
        first = json.loads((tmp_path / name).read_text().splitlines()[0])
        assert first.keys() == {"prompt", "answer"}


def test_long_problems_are_new_and_have_no_negative_answer() -> None:
    found = long_problems()
    assert {name: len(rows) for name, rows in found.items()} == LONG
    every = [row for rows in found.values() for row in rows]
    assert len(dict(every)) == len(every)
    assert not dict(every).keys() & dict(problems()).keys()
    for prompt, answer in every[:200]:
        left, sign, right = prompt.removesuffix("=").partition("+" if "+" in prompt else "-")
        assert int(answer) == (int(left) + int(right) if sign == "+" else int(left) - int(right)) >= 0
        assert 100 <= min(int(left), int(right)) <= max(int(left), int(right)) < 10_000


def test_test_problems_are_in_no_other_file_with_their_numbers_in_either_order() -> None:
    sets = {name: {same_problem(prompt) for prompt, _ in rows} for name, rows in shipped().items()}
    assert not sets["test"] & (sets["train"] | sets["heldout"])
    assert not {prompt for prompt, _ in shipped()["train"]} & {prompt for prompt, _ in shipped()["heldout"]}
    assert same_problem("7+12=") == same_problem("12+7=") != same_problem("12-7=")
    assert all(dict(problems())[prompt] == answer for prompt, answer in shipped()["test"])


def test_test_problems_are_made_up_like_the_heldout_ones() -> None:
    kinds = {name: Counter(("+" in p, len(answer)) for p, answer in rows) for name, rows in shipped().items()}
    assert kinds["test"] == kinds["heldout"]
    assert len(set(shipped()["test"])) == len(shipped()["test"]) == HELDOUT
    assert shipped(1)["test"] != shipped(0)["test"]


def test_a_build_loads_like_any_other_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    lines: list[str] = []
    build_arithmetic(folder, ArithmeticSettings(seed=1, steps=100, batch=8), lines.append)
    assert len(lines) == 1
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("12-3=").input_ids
    assert len(ids) == 5
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "12-3="
    assert tokenizer("é").input_ids == [tokenizer.unk_token_id]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    language = load_language_model(str(folder))
    assert language.ends == (tokenizer.eos_token_id,)
    assert language.pad == tokenizer.pad_token_id
    with pytest.raises(ValueError, match="already holds a model"):
        build_arithmetic(folder, ArithmeticSettings(), lines.append)


def test_equal_seeds_build_equal_models(tmp_path: Path) -> None:
    settings = ArithmeticSettings(seed=2, steps=3, batch=4)
    for name in ("one", "two"):
        build_arithmetic(tmp_path / name, settings, lambda line: None)
        torch.manual_seed(99)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


def test_reinitialising_draws_from_its_seed_alone(random_language_folder: Path) -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    states = []
    for seed in (1, 1, 2):
        language = load_language_model(str(random_language_folder))
        reinitialise(language, seed)
        states.append(language.model.state_dict())
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(states[0][name], states[1][name])
    assert not torch.equal(states[0][name], states[2][name])
    assert torch.equal(torch.random.get_rng_state(), before)
