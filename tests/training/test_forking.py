"""A fork goes on from a checkpoint of another run as that run did, or with other keys; the other run stays as it is."""

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import Command

pytestmark = pytest.mark.slow


@pytest.fixture
def run(command: Command, small_text: list[str], tmp_path: Path) -> Path:
    """A finished run of four iterations with a checkpoint before each; its samples are saved at every second one."""
    status, output, errors = command("train", "text", *small_text, "run.keep=9", "--out", "run")
    assert status == 0, output + errors
    return tmp_path / "run"


def content(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def metrics(run: Path) -> list[dict[str, object]]:
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "iter-000004" / "trained.safetensors")


def test_without_changes_it_makes_the_same_numbers_and_leaves_the_run_alone(command: Command, run: Path) -> None:
    before = content(run)
    status, output, errors = command("fork", "run", "--checkpoint", "2", "--out", "again")
    assert status == 0, errors
    assert "again is the run of run before iteration 2; go on with `flowgrpo resume again`" in output
    new = run.with_name("again")
    assert [line["iteration"] for line in metrics(new)] == [0, 1]
    assert [path.name for path in (new / "checkpoints").iterdir()] == ["iter-000002"]
    assert not (new / "lora").exists()
    status, output, errors = command("resume", "again")
    assert status == 0, errors
    assert "resumed before iteration 2" in output
    assert "samples" not in output
    assert "changed" not in output
    assert metrics(new) == metrics(run)
    assert (new / "samples" / "index.jsonl").read_bytes() == (run / "samples" / "index.jsonl").read_bytes()
    assert all(torch.equal(tensor, weights(run)[name]) for name, tensor in weights(new).items())
    assert content(run) == before


def test_with_other_keys_it_is_another_run_from_there_on(command: Command, run: Path) -> None:
    status, _, errors = command("fork", "run", "optimizer.learning_rate=0.05", "run.iterations=3", "--checkpoint", "2")
    assert status == 0, errors
    new = run.with_name("run-fork-2")
    status, output, errors = command("resume", str(new))
    assert status == 0, errors
    assert "the recipe has changed since iter-000002 was written: optimizer.learning_rate 0.01 → 0.05" in output
    mine, own = metrics(run), metrics(new)
    assert own[:2] == mine[:2]
    # The samples of iteration 2 are from before the first step at the new rate.
    assert (own[2]["reward/nines"], own[2]["grad_norm"]) == (mine[2]["reward/nines"], mine[2]["grad_norm"])
    then, now = (load_file(folder / "checkpoints" / "iter-000003" / "trained.safetensors") for folder in (run, new))
    assert any(not torch.equal(tensor, now[name]) for name, tensor in then.items())
    assert own[-1]["iteration"] == 3
    assert sorted(path.name for path in (new / "recipes").iterdir()) == ["iter-000000", "iter-000002"]


def test_a_part_that_the_run_had_not_begins_anew(command: Command, run: Path) -> None:
    status, _, errors = command("fork", "run", "extensions=[{name: curriculum}]", "--checkpoint", "2", "--out", "ext")
    assert status == 0, errors
    status, output, errors = command("resume", "ext")
    assert status == 0, errors
    assert "note: the run that was forked had no extensions/curriculum, so this begins anew" in output
    assert (run.with_name("ext") / "checkpoints" / "iter-000003" / "extensions" / "curriculum.pt").is_file()


def test_what_cannot_go_on_is_refused_and_makes_no_folder(command: Command, run: Path) -> None:
    def refused(*words: str) -> str:
        there = sorted(path.name for path in run.parent.iterdir())
        status, _, errors = command("fork", *words)
        assert status == 1
        assert sorted(path.name for path in run.parent.iterdir()) == there
        return " ".join(errors.split())

    assert "no checkpoint '7'; it keeps 1, 2, 3, 4" in refused("run", "--checkpoint", "7")
    assert "run.iterations is 4, and 4 iterations are done" in refused("run")
    assert "write run.iterations=8 or another number, or name an earlier checkpoint" in refused("run")
    assert "model.lora would make other weights" in refused("run", "model.lora.rank=2", "--checkpoint", "2")
    assert "has no average of the weights; leave optimizer.ema as it is" in refused(
        "run", "optimizer.ema={decay: 0.9}", "--checkpoint", "2"
    )
    assert "did you mean 'learning_rate'?" in refused("run", "optimizer.learning_rat=1", "--checkpoint", "2")
    assert "run exists; name a new folder with --out" in refused("run", "--checkpoint", "2", "--out", "run")
    assert "is not a run folder" in refused("reward.py")


@pytest.mark.parametrize("full", [True, False])
def test_an_interrupted_copy_says_why_and_leaves_no_folder(
    command: Command, run: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    checkpoint, copied = run / "checkpoints" / "iter-000002", shutil.copytree

    def fails(source: Path, target: Path) -> None:
        def copy(file: str, into: str) -> None:
            if full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), into)
            shutil.rmtree(checkpoint, ignore_errors=True)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file)

        copied(source, target, copy_function=copy)

    there = sorted(path.name for path in run.parent.iterdir())
    monkeypatch.setattr("flowgrpo.training.folder.forking.shutil.copytree", fails)
    status, _, errors = command("fork", "run", "--checkpoint", "2", "--out", "new")
    assert status == 1
    said = "the disk is full: no room to write" if full else "iter-000002 is gone: the run goes on, and has removed it"
    assert said in " ".join(errors.split())
    assert sorted(path.name for path in run.parent.iterdir()) == there


def test_the_best_weights_so_far_go_along(command: Command, run: Path) -> None:
    for iteration, there in ((1, True), (3, False)):
        (run / "best").mkdir(exist_ok=True)
        (run / "best" / "weights").write_text("kept")
        (run / "best.json").write_text(json.dumps({"iteration": iteration, "score": 1.0, "measure": {}}))
        status, _, errors = command("fork", "run", "--checkpoint", "2", "--out", f"new-{iteration}")
        assert status == 0, errors
        new = run.with_name(f"new-{iteration}")
        assert ((new / "best" / "weights").exists(), (new / "best.json").exists()) == (there, there)
