"""Going on after damage: no damaged file is read, the run goes on from the checkpoint before, and says so."""

import importlib
import json
import shutil
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from flowgrpo.bench.interruption import contents
from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.training.folder.checkpoint import (
    DamagedCheckpoint,
    read_checkpoint,
    verify_checkpoint,
    write_checkpoint,
)
from flowgrpo.training.folder.named_files import changed_inputs, measured_inputs, with_later_imports
from flowgrpo.training.folder.resuming import changes, other_launch
from flowgrpo.training.folder.run_folder import RunFolder, read_lines
from flowgrpo.training.session import Session, start
from tests.conftest import Command


class Listening(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class State:
    def __init__(self, state: object) -> None:
        self.state = state

    def state_dict(self) -> dict:
        return {"w": self.state}

    def load_state_dict(self, state: dict) -> None:
        self.state = state["w"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "iter-000007"
    folder.mkdir()
    part = State(torch.arange(6.0))
    write_checkpoint(folder, 7, part, {"optimizer": part}, "run: {seed: 1}\n", processes=2)  # type: ignore[arg-type]
    return folder


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (8, 1, ["the run had 8 processes until iter-000007, and goes on with one, so its numbers may differ; to have 8 "
                "processes again, launch `resume` as `train` was launched (docs/scaling.md)"]),
        (1, 2, ["the run had one process until iter-000007, and goes on with 2, so its numbers may differ; to have one "
                "process again, launch `resume` as `train` was launched (docs/scaling.md)"]),
        (2, 2, []),
        (None, 2, []),
    ],
)  # fmt: skip
def test_a_resume_with_another_number_of_processes_is_told(
    checkpoint: Path, before: int | None, now: int, said: list[str]
) -> None:
    (checkpoint / "launch.json").unlink()
    if before is not None:
        (checkpoint / "launch.json").write_text(json.dumps({"processes": before}))
    assert list(other_launch(checkpoint, now)) == said


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 0.5, 1j, "a", b"a", (1, [2, {3: "b"}]), {"a", "b"}, OrderedDict(a=1), Counter("aab"),
     torch.Size([2]), torch.float16, torch.device("cpu"), torch.nn.Parameter(torch.ones(2))],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_a_checkpoint_takes_can_be_read(tmp_path: Path, value: object) -> None:
    (folder := tmp_path / "iter-000001").mkdir()
    part, again = State({"mine": [value]}), State(None)
    write_checkpoint(folder, 1, State(torch.ones(1)), {"own": part})  # type: ignore[arg-type]
    state = torch.load(folder / "own.pt", weights_only=True)
    again.load_state_dict(state)
    found = again.state["mine"][0]  # type: ignore[index]
    assert type(found) is type(value)
    assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.float32(1), r"numpy.float32 at \['w'\]\['mine'\]\[0\]"),
        (np.ones(2), r"numpy.ndarray at \['w'\]\['mine'\]\[0\]"),
        ({np.int64(3): 1}, r"numpy.int64 at \['w'\]\['mine'\]\[0\], key .*3"),
        (Path("a"), r"pathlib.*Path at"),
        ({"a": lambda: 1}, r"builtins.function at .*\[0\]\['a'\]"),
    ],
)
def test_what_no_resume_can_read_is_refused_before_a_file_is_written(
    tmp_path: Path, value: object, message: str
) -> None:
    (folder := tmp_path / "iter-000001").mkdir()
    with pytest.raises(ValueError, match=f"the state_dict\\(\\) of own has a {message}.* no resume can read; return"):
        write_checkpoint(folder, 1, State(torch.ones(1)), {"own": State({"mine": [value]})})  # type: ignore[arg-type]
    assert not list(folder.iterdir())


def test_only_named_parts_may_be_missing(checkpoint: Path) -> None:
    weights, optimizer, own = State(None), State(None), State("begun")
    weights.load_state_dict = lambda state: None  # type: ignore[method-assign]
    parts = {"optimizer": optimizer, "extensions/own": own}
    with pytest.raises(ValueError, match="holds no extensions/own; resume with the recipe of the run that wrote it"):
        read_checkpoint(checkpoint, weights, parts)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="holds no anchor; "):
        read_checkpoint(checkpoint, weights, parts | {"anchor": own}, ["extensions/own"])  # type: ignore[arg-type]
    assert read_checkpoint(checkpoint, weights, parts, ["extensions/own"]) == 7  # type: ignore[arg-type]
    assert torch.equal(optimizer.state, torch.arange(6.0))  # type: ignore[arg-type]
    assert own.state == "begun"


FILES = ("trained.safetensors", "optimizer.pt", "config.yaml", "launch.json", "state.json")


def test_a_checkpoint_as_it_was_written_is_whole(checkpoint: Path) -> None:
    assert {path.name for path in checkpoint.iterdir()} == set(FILES)
    verify_checkpoint(checkpoint)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut", "emptied", "missing", "longer"])
def test_a_damaged_file_is_named(checkpoint: Path, name: str, damage: str) -> None:
    file = checkpoint / name
    whole = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes({"cut": whole[:-1], "emptied": b"", "longer": whole + b"x"}[damage])
    if name == "state.json" and damage == "cut":  # the end of its line
        verify_checkpoint(checkpoint)
        file.write_bytes(whole[:-2])
    with pytest.raises(DamagedCheckpoint, match=name.replace(".", r"\.")):
        verify_checkpoint(checkpoint)


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_found(checkpoint: Path, name: str) -> None:
    """In state.json, some changes only move white space, and do not change the content."""
    file = checkpoint / name
    whole = file.read_bytes()
    read = json.loads(whole) if name == "state.json" else None
    for place in range(0, len(whole), max(1, len(whole) // 150)):
        for bit in (0, 3, 6):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            found = fault_of(checkpoint)
            if found is None:
                assert read is not None
                assert json.loads(file.read_bytes()) == read
            else:
                assert str(checkpoint) in found


def fault_of(checkpoint: Path) -> str | None:
    try:
        verify_checkpoint(checkpoint)
    except DamagedCheckpoint as fault:
        return str(fault)
    return None


def test_an_empty_folder_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "iter-000001").mkdir()
    with pytest.raises(DamagedCheckpoint, match=r"iter-000001/state\.json is missing"):
        verify_checkpoint(tmp_path / "iter-000001")


def test_a_checkpoint_of_another_iteration_is_damaged(checkpoint: Path) -> None:
    moved = checkpoint.rename(checkpoint.with_name("iter-000008"))
    with pytest.raises(DamagedCheckpoint, match="belongs to iteration 7"):
        verify_checkpoint(moved)


# -- runs ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def words(small_text: list[str]) -> list[str]:
    return [*small_text, "rollout={prompts: 2, group: 2, batch: 4, tokens: 60}", "generation.max_tokens=3"]


@pytest.fixture
def finished(words: list[str], tmp_path: Path) -> Path:
    start(load_recipe("text", words), tmp_path / "run").trainer(Silent()).train()
    return tmp_path / "run"


def resumed(run: Path, *more: str) -> Listening:
    folder = RunFolder.open(run)
    heard = Listening()
    trainer = Session(load_recipe(folder.config, more), folder).trainer(heard)
    trainer.resume()
    trainer.train()
    return heard


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def empty_folder(file: Path) -> None:
    shutil.rmtree(file.parent)
    file.parent.mkdir()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "damage"),
    [("trained.safetensors", flip), ("optimizer.pt", cut), ("state.json", cut), ("state.json", empty_folder)],
)
def test_the_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    finished: Path, name: str, damage: Callable[[Path], None]
) -> None:
    before = contents(finished)
    newest = finished / "checkpoints" / "iter-000004"
    damage(newest / name)
    left = {path.name: path.read_bytes() for path in newest.iterdir()}
    heard = resumed(finished)
    [note] = heard.notes
    assert str(newest / name) in note
    assert "kept as damaged-iter-000004" in note
    assert contents(finished) == before
    aside = finished / "checkpoints" / "damaged-iter-000004"
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == left
    verify_checkpoint(newest)


@pytest.mark.slow
def test_without_a_whole_checkpoint_nothing_is_dropped(finished: Path) -> None:
    for checkpoint in RunFolder.open(finished).list_checkpoints():
        flip(checkpoint / "trained.safetensors")
    before = (finished / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"no whole checkpoint.*damaged-iter-000003.*would drop 5 iterations"):
        resumed(finished)
    assert (finished / "metrics.jsonl").read_bytes() == before
    assert len(list((finished / "checkpoints").glob("damaged-*"))) == 2


@pytest.mark.slow
def test_removed_checkpoints_are_missed(finished: Path, command: Command) -> None:
    shutil.rmtree(finished / "checkpoints")
    before = (finished / "metrics.jsonl").read_bytes()
    status, _, errors = command("resume", str(finished))
    assert status == 1
    assert f"error: {finished / 'checkpoints'} holds no whole checkpoint" in errors
    assert "--out NEW" in errors
    assert (finished / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_run_that_ended_before_its_first_checkpoint_begins_again(finished: Path) -> None:
    before = contents(finished)
    shutil.rmtree(finished / "checkpoints")
    RunFolder.open(finished).rewind(1)
    heard = resumed(finished)
    [note] = heard.notes
    assert "iteration 0 is done again" in note
    assert contents(finished) == before


@pytest.mark.slow
def test_a_changed_recipe_is_said_key_by_key(finished: Path) -> None:
    config = finished / "config.yaml"
    config.write_text(config.read_text().replace("learning_rate: 0.01", "learning_rate: 0.02"), encoding="utf-8")
    heard = resumed(finished)
    [note] = heard.notes
    assert "optimizer.learning_rate 0.01 → 0.02" in note
    # A comment changes nothing.
    config.write_text("# mine\n" + config.read_text(), encoding="utf-8")
    newest = RunFolder.open(finished).list_checkpoints()[-1]
    assert "learning_rate: 0.01" in (newest / "config.yaml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["prompts.jsonl", "mine.py", "lengths/signs.py", "lengths/late.py", None])
def test_files_that_have_changed_are_said(
    words: list[str], changed: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"text": f"{number}+1="}) + "\n" for number in range(3)]
    Path("prompts.jsonl").write_text("".join(rows), encoding="utf-8")
    # A module keeps its name in this process, so each case has a package of its own.
    beside = f"lengths_{tmp_path.name}"
    Path(beside).mkdir()
    Path(beside, "signs.py").write_text("def signed(text):\n    return -len(text)\n")
    Path(beside, "late.py").write_text("def late(text):\n    return 0 * -len(text)\n")
    written = "-len(text) * 0 + signed(text) + late(text)"
    Path("mine.py").write_text(
        f"from {beside}.signs import signed\n\n"
        f"def short(completions):\n    from {beside}.late import late\n"
        f"    return [{written} for text in completions]\n"
    )
    more = [
        "data={train: 'prompts.jsonl?column=text', heldout: null}",
        "rewards=[{name: 'mine.py:short'}]",
        f"name={'n' * 5000}",
    ]
    start(load_recipe("text", [*words, *more]), tmp_path / "run").trainer(Silent()).train()
    if changed is not None:
        changed = changed.replace("lengths", beside)
        Path(changed).write_text(Path(changed).read_text().replace("+", "-").replace("-len", "len"), encoding="utf-8")
    # Another process would not have called the reward yet.
    monkeypatch.delitem(sys.modules, f"{beside}.late")
    heard = resumed(tmp_path / "run", "run.iterations=5")
    said = [note for note in heard.notes if "read other contents of" in note]
    keys = {
        "prompts.jsonl": "prompts.jsonl (data.train)",
        "mine.py": "mine.py (rewards.0.name)",
        f"{beside}/signs.py": f"signs.py (module {beside}.signs)",
        f"{beside}/late.py": f"late.py (module {beside}.late)",
    }
    assert len(said) == (changed is not None)
    assert all(keys[str(changed)] in note for note in said)
    # The checkpoint of the longer run is of the new files.
    assert not any("read other contents of" in note for note in resumed(tmp_path / "run").notes)


def test_code_of_an_own_package_is_watched_with_what_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that is installed in editable mode lies in a folder of its own, and any of its modules may change."""
    name = f"own_{tmp_path.name}"
    package = tmp_path / "src" / name
    package.mkdir(parents=True)
    for module in ("__init__", "scores", "beside", "late", "unused"):
        (package / f"{module}.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(package.parent)
    for module in ("", ".scores", ".beside"):
        importlib.import_module(f"{name}{module}")
    recipe = f"rewards: [{{name: '{name}.scores:x'}}, {{name: 'json:loads'}}, {{name: '{name}.unused:x'}}]\n"
    first = measured_inputs(recipe)
    assert list(first) == ["rewards.0.name", f"module {name}", f"module {name}.beside"]
    importlib.import_module(f"{name}.late")
    (package / "beside.py").write_text("x = 2\n")  # after its import, so the run has not read this
    inputs = with_later_imports(recipe, first)
    assert inputs == {**first, f"module {name}.late": first["rewards.0.name"]}
    (tmp_path / "inputs.json").write_text(json.dumps(inputs))
    monkeypatch.delitem(sys.modules, f"{name}.late")
    for changed, key in (("scores", "rewards.0.name"), ("late", f"module {name}.late")):
        before = (package / f"{changed}.py").read_text()
        (package / f"{changed}.py").write_text("x = 3\n")
        [said] = changed_inputs(recipe, measured_inputs(recipe), tmp_path)
        assert f"{package / 'beside.py'} (module {name}.beside)" in said
        assert f"{package / changed}.py ({key})" in said
        (package / f"{changed}.py").write_text(before)
    # Another recipe does not run this code.
    assert not [*changed_inputs("rewards: [{name: gold}]\n", {}, tmp_path)]


def test_a_reward_that_an_installed_package_declares_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"warm_{tmp_path.name}"
    file = tmp_path / f"{module}.py"
    file.write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    info = tmp_path / f"{module}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {module}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[flowgrpo.rewards]\nwarm_one = {module}:x\n")
    assert measured_inputs("rewards: [{name: warm_one}]\n") == {}
    importlib.import_module(module)
    assert [*measured_inputs("rewards: [{name: warm_one}, {name: cold}]\n")] == ["rewards.0.name"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "said"), [(None, "is missing (0 to 3)"), ([0, 2], "lacks 2 of them (1, 3)"), ([0, 1, 2, 3, 4], None)]
)
def test_metrics_that_are_gone_are_missed(finished: Path, kept: list[int] | None, said: str | None) -> None:
    metrics = finished / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    if kept is None:
        metrics.unlink()
    else:
        metrics.write_text("".join(f"{lines[k]}\n" for k in kept), encoding="utf-8")
    heard = resumed(finished)
    assert [said in note for note in heard.notes if said] == ([True] if said else [])
    assert len(heard.notes) == (1 if said else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drop", "said"), [(None, "is missing"), (1, "lacks 1 of them"), (0, None)], ids=["gone", "cut", "whole"]
)
def test_samples_that_are_gone_are_missed(finished: Path, drop: int | None, said: str | None) -> None:
    index = finished / "samples" / "index.jsonl"
    newest = int(RunFolder.open(finished).list_checkpoints()[-1].name.removeprefix("iter-"))
    lines = index.read_text().splitlines(keepends=True)
    before = [line for line in lines if json.loads(line)["iteration"] < newest]
    assert len(before) < len(lines)  # the last evaluation is made again, and is not missed
    if drop is None:
        index.unlink()
    else:
        index.write_text("".join(before[drop:]), encoding="utf-8")
    heard = resumed(finished)
    assert [f"{len(before)} samples were saved" in note and said in note for note in heard.notes if said] == (
        [True] if said else []
    )
    assert len(heard.notes) == (1 if said else 0)
    again = index.read_text().splitlines(keepends=True)
    assert again == lines[len(before) if drop is None else drop :]


@pytest.mark.slow
def test_a_checkpoint_of_an_older_version_says_nothing_of_samples(finished: Path) -> None:
    newest = RunFolder.open(finished).list_checkpoints()[-1]
    (newest / "samples.json").unlink()
    state = json.loads((newest / "state.json").read_text())
    del state["files"]["samples.json"]
    (newest / "state.json").write_text(json.dumps(state), encoding="utf-8")
    (finished / "samples" / "index.jsonl").unlink()
    assert resumed(finished).notes == []


def test_the_recipe_of_a_checkpoint_that_multiplies_is_refused(checkpoint: Path) -> None:
    """A plain reader of YAML would walk through 9^8 entries, or through a list within itself for ever."""
    rows = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    for text, said in (("\n".join(rows), "anchors multiply"), ("a: &a {b: *a}", "contains itself")):
        (checkpoint / "config.yaml").write_text(text)
        with pytest.raises(ValueError, match=rf"iter-000007/config.yaml.*{said}"):
            changes(checkpoint / "config.yaml", "run: {seed: 1}\n")


def test_state_that_is_nested_too_deeply_is_damage(checkpoint: Path) -> None:
    (checkpoint / "state.json").write_text("[" * 100_000)
    with pytest.raises(DamagedCheckpoint, match="levels deep"):
        verify_checkpoint(checkpoint)


def test_a_deep_line_of_metrics_is_left_out(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", "run: {}\n")
    run.metrics.write_text('{"iteration": 0}\n{"iteration": ' + "[" * 100_000 + "\n" + '{"iteration": 1}\n')
    assert [record["iteration"] for record in run.read_metrics()] == [0, 1]
    assert read_lines(run.metrics)[1] == [2]


@pytest.mark.parametrize("number", ["1e999", "-1", "10000001", "1000000000000", "null"])
def test_a_checkpoint_of_an_iteration_that_no_run_has_is_damaged(checkpoint: Path, number: str) -> None:
    state = checkpoint / "state.json"
    state.write_text(state.read_text().replace('"iteration": 7', f'"iteration": {number}'))
    if number.isdecimal():
        checkpoint = checkpoint.rename(checkpoint.with_name(f"iter-{number}"))
    with pytest.raises(DamagedCheckpoint, match=r"state\.json"):
        verify_checkpoint(checkpoint)
