"""`flowgrpo recipes` with recipes: what one is, how two differ, and what it refuses."""

import subprocess
import sys
from pathlib import Path

import pytest

from flowgrpo.configs.load import dump_recipe, load_recipe, recipe_names
from tests.conftest import Command


def printed(command: Command, *words: str) -> list[str]:
    status, output, errors = command("recipes", *words)
    assert (status, errors) == (0, "")
    return output.splitlines()


def refused(command: Command, *words: str) -> str:
    status, output, errors = command("recipes", *words)
    assert (status, output) == (1, "")
    return errors.removeprefix("error: ").rstrip("\n")


def test_one_recipe_is_told_with_its_base_its_keys_and_what_to_run(command: Command):
    lines = printed(command, "flow_grpo")
    assert lines[0] == f"flow_grpo: {recipe_names()['flow_grpo']}"
    assert lines[1].startswith("paper: Flow-GRPO 2505.05470")
    assert "task: images (images and videos)" in lines
    assert "based on: mixgrpo_guard" in lines
    assert "published settings: flow_grpo@published" in lines
    row = next(line for line in lines if line.startswith("optimizer.updates "))
    assert row.split() == ["optimizer.updates", "1", "2"]
    assert lines[-1] == "try it: flowgrpo train flow_grpo"


def test_two_recipes_are_compared_in_a_table_of_80_columns(command: Command):
    lines = printed(command, "flow_grpo", "dance_grpo")
    assert lines[0].startswith("flow_grpo: ")
    head = next(k for k, line in enumerate(lines) if line.startswith("key "))
    assert lines[head].split() == ["key", "flow_grpo", "dance_grpo"]
    at = next(k for k, line in enumerate(lines) if line.startswith("sampler.kernel "))
    assert [line.split() for line in lines[at : at + 3]] == [
        ["sampler.kernel", "flow_sde", "dance_sde"],
        ["eta:", "0.7", "eta:", "0.5"],
        ["Kernel", "of", "the", "stochastic", "steps."],
    ]
    # The values stand below the names of the recipes.
    assert {lines[k].rindex(word) for k, word in ((head, "dance"), (at, "dance_sde"), (at + 1, "eta:"))} == {
        lines[head].index("dance_grpo")
    }


@pytest.mark.parametrize("name", recipe_names())
def test_no_line_is_longer_than_80_columns(command: Command, name: str):
    for words in ((name,), ("default", name), (name, "text")):
        assert all(len(line) <= 80 for line in printed(command, *words))


def test_overrides_change_the_recipe_before_them(command: Command):
    lines = printed(command, "flow_grpo", "run.seed=1", "flow_grpo", "run.seed=2", "rollout.group=12")
    rows = [line.split() for line in lines if line.startswith(("run.", "rollout."))]
    assert rows == [["run.seed", "1", "2"]]


def test_equal_recipes_are_told(command: Command, tmp_path: Path):
    assert printed(command, "flow_grpo", "flow_grpo")[-1] == "they are equal"
    file = tmp_path / "own.yaml"
    file.write_text("base: flow_grpo\nname: own\n")
    lines = printed(command, "flow_grpo", str(file))
    assert lines[-1] == "they are equal, but for their name or paper"
    assert "based on: flow_grpo, which is based on mixgrpo_guard" in printed(command, str(file))


def test_a_run_folder_stands_for_its_recipe(command: Command, tmp_path: Path):
    recipe = load_recipe("flow_grpo", ["rollout.group=6"])
    (tmp_path / "config.yaml").write_text(dump_recipe(recipe))
    rows = [line.split() for line in printed(command, "flow_grpo", str(tmp_path)) if line.startswith("rollout")]
    assert rows == [["rollout.group", "12", "6"]]


def test_a_run_folder_with_code_of_its_own_must_be_trusted(command: Command, tmp_path: Path):
    (tmp_path / "code.py").write_text("def half(iteration, num_steps, seed):\n    return [0]\n")
    recipe = load_recipe("flow_grpo", [f"sampler.plan.window={tmp_path / 'code.py'}:half"])
    (tmp_path / "config.yaml").write_text(dump_recipe(recipe))
    assert "names things that this machine has not used before" in refused(command, str(tmp_path))
    rows = [line for line in printed(command, str(tmp_path), "--trust") if line.startswith("sampler.plan.window")]
    assert len(rows) == 1


def test_composed_and_published_recipes_are_told_as_such(command: Command):
    assert printed(command, "flow_grpo@published")[0].startswith("flow_grpo@published: Flow-GRPO")
    lines = printed(command, "flow_grpo+sd35_medium+ocr")
    assert "based on: flow_grpo, which is based on mixgrpo_guard" in lines
    assert not any(line.startswith("published settings") for line in lines)


def test_another_task_is_said_and_what_both_have_is_compared(command: Command):
    text = " ".join(" ".join(printed(command, "flow_grpo", "text")).split())
    assert "these are of different tasks, images (images and videos) and text (language models)" in text
    assert "only text has: model.system" in text
    assert "optimizer.learning_rate" in text


def test_what_cannot_be_compared_is_refused_with_what_to_write(command: Command):
    assert "write the recipe first, as in `flowgrpo recipes default run.seed=1`" in refused(command, "run.seed=1")
    assert "3 recipes are named (default, text, masked), and two are compared; name one or two" in refused(
        command, "default", "text", "masked"
    )
    assert "no recipe or file 'flow_grp'; did you mean 'flow_grpo'?" in refused(command, "flow_grpo", "flow_grp")
    assert "unknown key 'grop'; did you mean 'group'?" in refused(command, "default", "rollout.grop=2")


@pytest.mark.slow
def test_the_list_needs_no_torch():
    code = (
        "import sys\nfrom flowgrpo.cli.app import app\n"
        "for words in (['--help'], ['recipes']):\n"
        "    try:\n        app(words)\n    except SystemExit as end:\n        assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
