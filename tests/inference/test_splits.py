"""Evaluations on held-out, test or training prompts; plans check the test prompts, and no run reads them."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.configs.sections import DataConfig
from flowgrpo.inference.evaluation import evaluate_model
from flowgrpo.training.checking import check
from flowgrpo.training.data import prompt_path
from flowgrpo.training.session import start
from tests.conftest import Command

_watched: dict[str, list[str]] = {}


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _watched and isinstance(arguments[0], str | bytes | os.PathLike):
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if path in _watched:
            _watched[path].append(path)


sys.addaudithook(_hear)  # Python cannot take a hook away; without watched files it does nothing.


@contextmanager
def opened(*files: Path) -> Iterator[list[str]]:
    """The files of a list that the code within opens, by whatever function."""
    seen: list[str] = []
    _watched.update({os.path.realpath(file): seen for file in files})
    try:
        yield seen
    finally:
        _watched.clear()


def sums(folder: Path, name: str, first: int, count: int = 4) -> Path:
    """A file of the problems k + 1 for `count` numbers from `first` on."""
    file = folder / f"{name}.jsonl"
    lines = [{"prompt": f"{k}+1=", "answer": str(k + 1)} for k in range(first, first + count)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def text_words(folder: Path, model: Path) -> list[str]:
    """Overrides of a short run of text with three prompt files."""
    files = {name: sums(folder, name, first) for name, first in (("train", 0), ("heldout", 10), ("test", 20))}
    return [
        f"model.path={model}", f"data={{train: {files['train']}, heldout: {files['heldout']}, test: {files['test']}}}",
        "rewards=[{name: digit_share}]", "rollout={prompts: 2, group: 4, batch: 8}", "generation.max_tokens=4",
        "run={iterations: 2, checkpoint_every: 1, sample_every: 1}", "evaluate={every: 1, temperature: 0.5}",
    ]  # fmt: skip


# -- where the prompts of a split come from ------------------------------------------------------------------------


def test_embedded_worlds_have_test_prompts_beside_the_heldout_ones() -> None:
    for recipe in (load_recipe("mixgrpo_flash_guard"), load_recipe("text")):
        sources = [recipe.data.source(split) for split in ("train", "heldout", "test")]
        world = "scenes" if recipe.task == "images" else "arithmetic"
        assert sources == [f"{world}:train", f"{world}:heldout", f"{world}:test"]
        assert prompt_path(str(sources[2])).is_file()


def test_test_prompts_belong_to_the_world_of_the_heldout_ones() -> None:
    assert DataConfig(train="mine.txt", heldout="arithmetic:heldout").source("test") == "arithmetic:test"
    assert DataConfig(train="arithmetic:train", heldout=None).source("test") == "arithmetic:test"
    assert DataConfig(train="scenes:train", heldout="mine.txt").source("test") is None
    assert DataConfig(train="mine.txt", heldout=None).source("test") is None
    assert DataConfig(test="mine.txt").source("test") == "mine.txt"


# -- evaluations ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_images_of_each_split_are_scored(command: Command, random_pipeline: Path) -> None:
    words = (
        "mixgrpo_flash_guard", "evaluate={prompts: 4, steps: 2}", "rewards=[{name: jpeg_incompressibility}]",
        "rollout.batch=4", "rollout.decode_batch=4",
    )  # fmt: skip
    scores = {}
    for split in ("heldout", "test", "train"):
        status, output, errors = command("evaluate", str(random_pipeline), *words, "--split", split)
        assert (status, errors) == (0, "")
        said = output.splitlines()
        assert said[0] == (
            f"{random_pipeline}: 4 prompts of scenes:{split}, 4 samples, scored by jpeg_incompressibility"
        )
        scores[split] = said[-1]
    assert len(set(scores.values())) == 3
    assert command("evaluate", str(random_pipeline), *words)[1].splitlines()[-1] == scores["heldout"]
    # A run that measures in its evaluations gives the test prompts this name.
    named = command("evaluate", str(random_pipeline), *words, "data.heldout=scenes:test")[1]
    assert named.splitlines()[-1] == scores["test"]


@pytest.mark.slow
def test_completions_of_each_split_are_scored_for_a_run(
    command: Command, random_language_folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    start(load_recipe("text", text_words(tmp_path, random_language_folder)), run).trainer(Silent()).train()
    first = {"train": "0+1=", "heldout": "10+1=", "test": "20+1="}
    for split, prompt in first.items():
        status, output, errors = command("evaluate", str(run), "--split", split, "--out", split)
        assert (status, errors) == (0, "")
        assert output.startswith(f"{run}: 4 prompts of {tmp_path / split}.jsonl, 4 samples, scored by digit_share\n")
        index = [json.loads(line) for line in (Path(split) / "index.jsonl").read_text().splitlines()]
        assert (len(index), index[0]["prompt"]) == (4, prompt)
    assert command("evaluate", str(run), "--split", "test", "evaluate.prompts=3")[1].endswith("(3 completions)\n")
    recipe = load_recipe(run / "config.yaml")
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert evaluate_model(str(run), recipe)["digit_share"][0] == last["eval/digit_share"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["arithmetic", "--split", "tset"], "--split is 'tset'; use heldout, test or train"),
        (
            ["arithmetic", "data.heldout=mine.jsonl", "--split", "test"],
            "data.test of text is null, but an evaluation needs test prompts; name a file with data.test=FILE",
        ),
        (["arithmetic", "data.test=none.jsonl", "--split", "test"], "no prompt file 'none.jsonl'"),
        (
            ["arithmetic", "data.test=''", "--split", "test"],
            "data.test of text is null, but an evaluation needs test prompts",
        ),
    ],
)
def test_a_split_that_is_not_there_is_refused_with_what_to_write(
    command: Command, words: list[str], message: str
) -> None:
    status, _, errors = command("evaluate", *words)
    assert status == 1
    assert message in errors


# -- what reads the test prompts -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_of_text_never_opens_its_test_prompts(random_language_folder: Path, tmp_path: Path) -> None:
    recipe = load_recipe("text", text_words(tmp_path, random_language_folder))
    with opened(tmp_path / "test.jsonl") as seen:
        start(recipe, tmp_path / "run").trainer(Silent()).train()
        assert seen == []
        evaluate_model(str(tmp_path / "run"), recipe)
        assert seen == []
        check(recipe, reads_test=True)
        assert seen != []
    with opened(tmp_path / "heldout.jsonl") as seen:
        check(recipe)
        assert seen != []


@pytest.mark.slow
def test_a_run_of_images_never_opens_its_test_prompts(small: list[str], tmp_path: Path) -> None:
    recipe = load_recipe("mixgrpo_flash_guard", [*small, "run.iterations=1"])
    assert recipe.data.source("test") == "scenes:test"
    with opened(prompt_path("scenes:test")) as seen:
        start(recipe, tmp_path / "run").trainer(Silent()).train()
        assert seen == []
        check(recipe, reads_test=True)
        assert seen != []


def test_a_run_without_its_test_file_is_refused_before_it_starts(tmp_path: Path) -> None:
    found = check(load_recipe("text", ["data.test=none.jsonl"]))
    assert [(fault.kind, fault.key) for fault in found.findings] == [("needed", "data.test")]
    with pytest.raises(ValueError, match=r"no prompt file 'none.jsonl' .*data\.test"):
        start(load_recipe("text", ["data.test=none.jsonl"]), tmp_path / "run")


def test_a_plan_checks_test_prompts_like_the_heldout_ones(command: Command) -> None:
    Path("plain.txt").write_text("1+1=\n")
    status, _, errors = command("plan", "text", "data.test=plain.txt")
    assert status == 1
    assert "plain.txt: " in errors
    assert "answer" in errors
    Path("talk.jsonl").write_text('{"prompt": [{"role": "user", "content": "a"}], "include": []}\n')
    status, _, errors = command("plan", "mixgrpo_flash_guard", "data.test=talk.jsonl")
    assert status == 1
    assert "talk.jsonl, line 1: prompt 1 is a conversation" in errors
    assert "note: " not in command("plan", "text")[1].replace("note: one optimizer step", "")


def test_a_plan_notes_test_prompts_that_are_in_another_file(command: Command) -> None:
    here = Path()
    sums(here, "train", 0), sums(here, "heldout", 10)
    sums(here, "test", 12)  # two of four are held out
    data = "data={train: train.jsonl, heldout: heldout.jsonl, test: test.jsonl}"
    status, output, _ = command("plan", "text", data, "rollout.prompts=2")
    assert status == 0
    assert (
        "note: 2 of 4 prompts of test.jsonl, the test prompts, are in data.heldout (heldout.jsonl) too; take them out "
        "of one of the two, or name another file with data.test"
    ) in output
    assert "data.train (" not in output
    Path("test.jsonl").write_text('{"prompt": " 0+1=  ", "answer": "1"}\n')
    assert (
        "1 of 1 prompts of test.jsonl, the test prompts, are in data.train (train.jsonl) too"
        in command("plan", "text", data, "rollout.prompts=2")[1]
    )
    # Runs that evaluate on the test prompts, for a measurement, are told so and are not refused.
    assert (
        "300 of 300 prompts of arithmetic:test, the test prompts, are in data.heldout"
        in command("plan", "text", "data.heldout=arithmetic:test")[1]
    )
