"""A converted file becomes a recipe that `flowgrpo plan` accepts, with every setting in one of three lists."""

import copy
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowgrpo.configs.load import load_recipe
from flowgrpo.convert.converting import convert_file, recipe_name
from flowgrpo.parts.choice import plain
from tests.conftest import Command
from tests.convert.samples_of_tools import BASE, CONFIGS, FLOW_FACTORY, TRL, UNIRL, VERL_OMNI

FILES = {
    "base.py": BASE,
    "mine.py": CONFIGS,
    "factory.yaml": FLOW_FACTORY,
    "trl.yaml": TRL,
    "unirl.yaml": UNIRL,
    "omni.sh": VERL_OMNI,
}
SOURCES = ("mine.py:whole", "mine.py:fast", "factory.yaml", "trl.yaml", "unirl.yaml", "omni.sh")
FUNCTIONS = """
def wonder(images, prompts, **columns):
    return [0.0] * len(prompts)

def nice(images, prompts, **columns):
    return [0.0] * len(prompts)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the small configurations of the tools."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def parted(lines: list[str]) -> dict[str, list[str]]:
    """The three lists by their headings."""
    found: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("  "):
            list(found.values())[-1].append(line.strip())
        else:
            found[line] = []
    return found


@pytest.mark.parametrize("source", SOURCES)
def test_plan_accepts_the_recipe(source: str, folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    status, output, errors = command("convert", source, "--out", "new/mine.yaml", "--gpus", "8")
    assert (status, errors) == (0, "")
    recipe = load_recipe("new/mine.yaml")
    for file in {recipe.data.train, recipe.data.heldout} - {None}:
        if str(file).startswith("hub:"):
            continue
        Path(str(file)).parent.mkdir(parents=True, exist_ok=True)
        Path(str(file)).write_text(
            "".join(json.dumps({"prompt": f'{k} with "words"'}) + "\n" for k in range(64))
            if str(file).endswith("jsonl")
            else "".join(f'{k} with "words"\n' for k in range(64)),
            encoding="utf-8",
        )
    (folder / "my_rewards.py").write_text(FUNCTIONS, encoding="utf-8")
    status, output, errors = command("plan", "new/mine.yaml")
    assert (status, errors) == (0, ""), errors
    assert output.startswith(f"{recipe.name}: ")
    assert "not checked" in output  # the model is a hub id


def dotted(held: Any, name: str = "") -> Iterator[str]:
    """The dotted keys of a mapping."""
    if not isinstance(held, dict):
        yield name
        return
    for key, value in held.items():
        yield from dotted(value, f"{name}.{key}" if name else key)


@pytest.mark.parametrize("source", SOURCES)
def test_every_key_of_the_file_is_in_one_list(source: str, folder: Path) -> None:
    found = parted(convert_file(str(folder / source), gpus=8).lines)
    named = " ".join(line for lines in found.values() for line in lines)
    if source.startswith("mine"):
        keys = ["train.beta", "sample.sde_window_size", "reward_fn", "prompt_fn", "seed", "train.timestep_fraction"]
    elif source == "omni.sh":
        keys = re.findall(r"^ +[+']*([a-z_]+\.[\w.]+)=", VERL_OMNI, re.MULTILINE)
        assert len(keys) == 40
    else:
        keys = list(dotted(yaml.safe_load(FILES[source])))
    assert [key for key in keys if key not in named] == []
    assert list(found)[:2] == ["carried over:", "without effect here:"]
    assert list(found)[2] in ("not carried over:", "everything else was carried over")


@pytest.mark.parametrize("source", SOURCES)
def test_the_base_changes_the_length_of_the_recipe_and_nothing_else(source: str, folder: Path) -> None:
    from flowgrpo.convert import converting

    def written(bases: bool) -> str:
        with pytest.MonkeyPatch.context() as patch:
            if not bases:
                patch.setattr("flowgrpo.convert.recipe_text._above", lambda *args: None)
            return converting.convert_file(str(folder / source), gpus=8).recipe

    short, long = written(True), written(False)
    assert "base: " in short
    assert "base: " not in long
    assert short.count("\n") < long.count("\n")
    for name, text in (("short.yaml", short), ("long.yaml", long)):
        (folder / name).write_text(text, encoding="utf-8")
    one, other = plain(load_recipe(folder / "short.yaml")), plain(load_recipe(folder / "long.yaml"))
    # Only the base names the papers of its method.
    assert {**one, "paper": ""} == {**other, "paper": ""}


def test_a_value_that_no_recipe_may_have_is_not_carried_over(folder: Path) -> None:
    (folder / "trl.yaml").write_text(TRL + "temperature: -1\n", encoding="utf-8")
    converted = convert_file(str(folder / "trl.yaml"), gpus=1)
    assert any(line.startswith("temperature -1") for line in parted(converted.lines)["not carried over:"])
    assert "temperature" not in yaml.safe_load(converted.recipe).get("generation", {})


def test_settings_that_do_not_go_together_are_an_error_that_says_why(folder: Path) -> None:
    (folder / "trl.yaml").write_text(TRL.replace("num_generations: 8", "num_generations: 1"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"trl\.yaml: its settings do not go together here:\n.*a group of one has no"):
        convert_file(str(folder / "trl.yaml"), gpus=1)


def test_an_existing_file_is_never_overwritten(folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "mine.yaml").write_text("mine", encoding="utf-8")
    status, _, errors = command("convert", "factory.yaml", "--out", "mine.yaml")
    assert status == 1
    assert "exists" in errors
    assert (folder / "mine.yaml").read_text(encoding="utf-8") == "mine"


def test_without_out_the_recipe_alone_is_the_output(
    folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    status, output, errors = command("convert", "factory.yaml")
    assert status == 0
    assert yaml.safe_load(output)["name"] == "mine"
    assert "carried over:" in errors


def test_what_is_not_carried_over_stands_in_the_recipe(folder: Path) -> None:
    converted = convert_file(str(folder / "factory.yaml"))
    comments = " ".join(line.lstrip("#- ") for line in converted.recipe.splitlines() if line.startswith("#"))
    for line in parted(converted.lines)["not carried over:"]:
        assert line in comments


def test_a_secret_is_shown_nowhere(folder: Path) -> None:
    converted = convert_file(str(folder / "trl.yaml"))
    assert "hf_secret" not in converted.recipe + "\n".join(converted.lines)
    assert any("hub_token '(hidden)'" in line for line in converted.lines)


def test_names_from_a_file_lead_nowhere() -> None:
    assert recipe_name("../../etc/x y") == "etc-x-y"
    assert recipe_name("...") == "converted"


def test_a_line_break_in_a_key_stays_in_its_comment(folder: Path) -> None:
    given = yaml.safe_load(TRL) | {"evil\nrewards: [{name: os:system}]": 1, "run_name": "x\nname: y"}
    (folder / "evil.json").write_text(json.dumps(given), encoding="utf-8")
    recipe = yaml.safe_load(convert_file(str(folder / "evil.json")).recipe)
    assert "os:system" not in str(recipe)
    assert recipe["name"] == "x-name-y"


def test_code_of_another_tool_is_never_named_in_a_recipe(folder: Path) -> None:
    text = TRL.replace("think_format_reward", "os.system")
    (folder / "trl.yaml").write_text(text, encoding="utf-8")
    rewards = yaml.safe_load(convert_file(str(folder / "trl.yaml")).recipe)["rewards"]
    assert rewards[0]["name"] == "my_rewards.py:system"


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        ("base: default\n", "a.yaml", "recipe of flowgrpo already"),
        ("sampler: {}\nrollout: {}\n", "a.yaml", "recipe of flowgrpo already"),
        ("one: 1\n", "a.yaml", "none of flow-factory, flow_grpo, trl, unirl, verl-omni"),
        ("[1, 2]", "a.json", "not a mapping"),
        ("{", "a.json", "not JSON"),
        ("x", "training_args.bin", "pickle"),
        ("trl grpo --beta 0", "run.sh", "is a shell script, and convert reads only the scripts of verl-omni"),
        ("python3 -m verl_omni.trainer.main_omni a.b=1", "run.sh", "which trains a language model that hears and sees"),
        ("bash other.sh actor_rollout_ref.rollout.n=8", "run.sh", "has no command `python3 -m verl_omni.trainer"),
        ("a: &a [*a]", "a.yaml", "a.yaml"),
        ("[" * 200, "a.yaml", "levels deep"),
        ("1: 2\n", "a.yaml", "not text"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(text: str, name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=says):
        convert_file(str(tmp_path / name))


def test_the_tool_can_be_said(tmp_path: Path) -> None:
    (tmp_path / "few.yaml").write_text("temperature: 0.9\n", encoding="utf-8")
    with pytest.raises(ValueError, match="say which with --from"):
        convert_file(str(tmp_path / "few.yaml"))
    assert "temperature: 0.9" in convert_file(str(tmp_path / "few.yaml"), "trl").recipe
    with pytest.raises(ValueError, match="--from is 'verl'"):
        convert_file(str(tmp_path / "few.yaml"), "verl")


JUNK = (None, True, 0, -1, 1e30, -2.5, "", "x", "1e-3", [], {}, [1, 2], ["a", None], {"a": 1}, [[1]], 10**40)


JUNK_OF = {"factory.yaml": "flow-factory", "trl.yaml": "trl", "unirl.yaml": "unirl"}


@pytest.mark.parametrize("source", JUNK_OF)
def test_whatever_a_value_is_the_answer_is_a_recipe_or_a_message(source: str, folder: Path) -> None:
    chance = random.Random(5)
    given = yaml.safe_load(FILES[source])
    refused = 0
    for _ in range(60):
        changed = copy.deepcopy(given)
        for _ in range(2):
            place = chance.choice(
                [changed, *(value for value in changed.values() if isinstance(value, dict) and value)]
            )
            place[chance.choice(list(place))] = chance.choice(JUNK)
        (folder / "junk.json").write_text(json.dumps(changed), encoding="utf-8")
        try:
            convert_file(str(folder / "junk.json"), JUNK_OF[source], gpus=2)
        except ValueError:
            refused += 1
    assert 0 < refused < 60
