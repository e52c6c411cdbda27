"""The run folder: nothing half-written, nothing overwritten, and rewinding to a checkpoint."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flowgrpo.configs.trust import check_acts
from flowgrpo.configs.yaml_text import parse_yaml
from flowgrpo.inference.model_recipes import is_run
from flowgrpo.intake import ledger
from flowgrpo.training.folder.run_folder import RunFolder, save_image, write_atomically, write_text


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "runs" / "one", "name: test\n")


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_new_run_has_its_config_and_folders(run: RunFolder):
    assert run.config.read_text() == "name: test\n"
    assert run.samples.is_dir()
    assert run.checkpoints.is_dir()
    assert RunFolder.open(run.path).path == run.path


def test_an_empty_folder_may_become_a_run(tmp_path: Path):
    assert RunFolder.create(tmp_path, "x").config.exists()


def test_what_a_kill_left_of_the_config_does_not_bar_the_folder(tmp_path: Path):
    (tmp_path / ".config.yaml.123.tmp").write_text("na", encoding="utf-8")
    assert RunFolder.create(tmp_path, "x").config.read_text(encoding="utf-8") == "x"


def test_a_run_is_never_overwritten(run: RunFolder):
    with pytest.raises(ValueError, match=r"not empty.*flowgrpo resume"):
        RunFolder.create(run.path, "other")
    assert run.config.read_text() == "name: test\n"


def test_a_file_is_no_place_for_a_run(tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(ValueError, match=r"is a file; name a new folder"):
        RunFolder.create(file, "x")
    assert file.read_text() == "mine"


def test_only_runs_are_opened(tmp_path: Path):
    with pytest.raises(ValueError, match="not a run folder"):
        RunFolder.open(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_what_was_there(tmp_path: Path):
    target = tmp_path / "result.txt"

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(target, fail)
    assert not target.exists()
    write_text(target, "whole")
    with pytest.raises(OSError, match="disk full"):
        write_atomically(target, fail)
    assert target.read_text() == "whole"


def test_while_writing_the_final_name_still_holds_the_old_text(tmp_path: Path):
    target = tmp_path / "result.txt"
    write_text(target, "old")
    seen = []

    def write(temporary: Path) -> None:
        temporary.write_text("new")
        seen.append(target.read_text())

    write_atomically(target, write)
    assert seen == ["old"]
    assert target.read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["result.txt"]


def test_metrics_are_appended(run: RunFolder):
    run.log({"iteration": 0, "reward/total": 0.5})
    run.log({"iteration": 1, "kl": None})
    assert lines(run.metrics) == [{"iteration": 0, "reward/total": 0.5}, {"iteration": 1, "kl": None}]


def test_numbers_that_json_lacks_are_refused_whole(run: RunFolder):
    run.log({"iteration": 0})
    with pytest.raises(ValueError, match="JSON"):
        run.log({"iteration": 1, "kl": float("nan")})
    assert lines(run.metrics) == [{"iteration": 0}]


def test_rewinding_drops_later_records_and_a_line_cut_by_a_crash(run: RunFolder):
    for iteration in range(6):
        run.log({"iteration": iteration})
        run.save_samples("train", iteration, torch.zeros(1, 3, 2, 2), [{"prompt": "a"}])
    for file in (run.metrics, run.index):
        with file.open("a") as handle:
            handle.write('{"iteration": 2, "rew')
    run.rewind(3)
    assert [record["iteration"] for record in lines(run.metrics)] == [0, 1, 2]
    assert [record["iteration"] for record in lines(run.index)] == [0, 1, 2]
    run.log({"iteration": 3})
    assert [record["iteration"] for record in lines(run.metrics)] == [0, 1, 2, 3]


def test_a_cut_record_goes_even_if_it_reads_as_json(run: RunFolder):
    """Without the line end, `12` may be the beginning of `120`."""
    run.log({"iteration": 0})
    with run.metrics.open("a") as handle:
        handle.write('{"iteration": 1}')
    run.rewind(5)
    assert lines(run.metrics) == [{"iteration": 0}]


def test_rewinding_a_run_without_records_makes_none(run: RunFolder):
    run.rewind(0)
    assert not run.metrics.exists()
    assert not run.index.exists()


def test_samples_are_images_with_a_record_each(run: RunFolder):
    levels = torch.tensor([0.0, 0.2, 1.5]).view(3, 1, 1, 1).expand(3, 3, 4, 5)
    run.save_samples("eval", 12, levels, [{"prompt": p, "seed": 7} for p in "abc"])
    records = lines(run.index)
    assert [record["prompt"] for record in records] == ["a", "b", "c"]
    assert records[1] == {
        "phase": "eval", "iteration": 12, "prompt": "b", "seed": 7, "image": "iter-000012/eval-0001.png"
    }  # fmt: skip
    pictures = [np.asarray(Image.open(run.samples / record["image"])) for record in records]
    assert all(picture.shape == (4, 5, 3) for picture in pictures)
    assert [int(picture.max()) for picture in pictures] == [0, 51, 255]
    assert [int(picture.min()) for picture in pictures] == [0, 51, 255]


def test_samples_and_records_must_be_as_many(run: RunFolder):
    with pytest.raises(ValueError, match="argument"):
        run.save_samples("train", 0, torch.zeros(2, 3, 2, 2), [{"prompt": "a"}])
    assert not run.index.exists()


def test_a_video_is_its_frames_side_by_side_in_order(tmp_path: Path):
    frames = torch.linspace(0, 1, 4).view(4, 1, 1, 1).expand(4, 3, 2, 3).bfloat16()
    save_image(tmp_path / "v.png", frames)
    picture = np.asarray(Image.open(tmp_path / "v.png"))
    assert picture.shape == (2, 12, 3)
    assert picture[0, ::3, 0].tolist() == [0, 85, 170, 255]


def test_the_record_of_a_video_says_how_many_frames_it_has(run: RunFolder):
    run.save_samples("eval", 0, torch.rand(2, 7, 3, 4, 6), [{"prompt": "a"}, {"prompt": "b"}])
    assert [record["frames"] for record in lines(run.index)] == [7, 7]
    with Image.open(run.samples / lines(run.index)[1]["image"]) as strip:
        assert strip.size == (42, 4)


def test_an_image_keeps_rows_columns_and_channels_apart(tmp_path: Path):
    image = torch.arange(3 * 2 * 4).view(3, 2, 4) / 255
    save_image(tmp_path / "i.png", image)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "i.png")), (image * 255).round().byte().permute(1, 2, 0))
    assert [path.name for path in tmp_path.iterdir()] == ["i.png"]


def checkpoint(run: RunFolder, iteration: int, keep: int = 2, text: str = "state") -> Path:
    return run.save_checkpoint(iteration, lambda folder: write_text(folder / "state", text), keep)


def names(run: RunFolder) -> list[str]:
    return [path.name for path in run.list_checkpoints()]


def test_the_newest_checkpoints_are_kept(run: RunFolder):
    for iteration in (5, 10, 15, 100):
        checkpoint(run, iteration)
    assert names(run) == ["iter-000015", "iter-000100"]
    checkpoint(run, 105, keep=3)
    checkpoint(run, 110, keep=1)
    assert names(run) == ["iter-000110"]
    assert (run.checkpoints / "iter-000110" / "state").read_text() == "state"


def test_a_checkpoint_that_fails_is_none_and_drops_none(run: RunFolder):
    checkpoint(run, 5, keep=1)

    def fail(folder: Path) -> None:
        (folder / "state").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        run.save_checkpoint(10, fail, 1)
    assert names(run) == ["iter-000005"]


def test_leftovers_of_a_crash_are_neither_listed_nor_mixed_in(run: RunFolder):
    leftover = run.checkpoints / ".tmp-000010"
    leftover.mkdir()
    (leftover / "stale").write_text("old")
    (run.checkpoints / "iter-000099").write_text("a file, not a checkpoint")
    assert names(run) == []
    made = checkpoint(run, 10)
    assert [path.name for path in made.iterdir()] == ["state"]
    assert names(run) == ["iter-000010"]


def test_a_checkpoint_made_again_replaces_the_first(run: RunFolder):
    checkpoint(run, 5, text="first")
    assert (checkpoint(run, 5, text="second") / "state").read_text() == "second"
    assert names(run) == ["iter-000005"]


def test_checkpoints_are_in_the_order_of_their_numbers(run: RunFolder):
    for iteration in (999_998, 999_999, 1_000_000):
        checkpoint(run, iteration)
    assert names(run) == ["iter-999999", "iter-1000000"]


@pytest.mark.parametrize("step", range(4))
def test_a_checkpoint_is_there_wherever_its_replacement_ends(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, step: int
):
    """A kill is simulated by an exception, after which nothing more runs, not even cleanup."""
    checkpoint(run, 5, text="first")
    done: list[str] = []

    class Killed(BaseException):
        pass

    def counted(work: Callable[..., object]) -> Callable[..., object]:
        def call(*given: object, **named: object) -> object:
            if len(done) == step:
                raise Killed
            done.append(work.__name__)
            return work(*given, **named)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", counted(os.replace))
        patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
        with pytest.raises(Killed):
            run.save_checkpoint(5, lambda folder: (folder / "state").write_text("second"), 2)
    again = RunFolder.open(run.path)
    again.claim()
    assert names(again) == ["iter-000005"]
    assert (again.checkpoints / "iter-000005" / "state").read_text() in ("first", "second")
    assert [path.name for path in run.checkpoints.iterdir()] == ["iter-000005"]


def test_lines_that_cannot_be_read_are_left_out_and_kept_aside(run: RunFolder):
    run.metrics.write_text('{"iteration": 0}\nnot json\n{"rewards": 1}\n{"iteration": 1}\n{"iter', encoding="utf-8")
    before = run.metrics.read_text(encoding="utf-8")
    run.rewind(9)
    assert [record["iteration"] for record in lines(run.metrics)] == [0, 1]
    assert (run.path / "damaged-metrics.jsonl").read_text(encoding="utf-8") == before
    [note] = run.notes
    assert "cannot read line 2, 3" in note
    assert "damaged-metrics.jsonl" in note


def test_a_new_run_is_trusted_where_it_was_made_and_says_if_that_cannot_be_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = "rewards: [{name: mine.py:score, options: {}}]\n"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ledger, "_here", set())
    run = RunFolder.create(tmp_path / "first", config)
    assert run.notes == []
    ledger._here.clear()
    check_acts(run.config, parse_yaml(config, "config.yaml"))
    shutil.rmtree(tmp_path / "state")
    (tmp_path / "state").write_text("no folder")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "state"))
    with pytest.raises(ValueError, match=r"run the reward mine\.py:score"):
        check_acts(run.config, parse_yaml(config, "config.yaml"))
    run = RunFolder.create(tmp_path / "second", config)
    assert len(run.notes) == 1
    assert "--trust" in run.notes[0]
    # The process itself remembers, so nothing fails before its end.
    check_acts(run.config, parse_yaml(config, "config.yaml"))


def test_a_run_that_could_not_begin_leaves_its_folder_free(tmp_path: Path):
    for there in (False, True):
        path = tmp_path / f"run-{there}"
        if there:
            path.mkdir()
        run = RunFolder.create(path, "x")
        (path / "run.log").write_text("a line\n")
        run.abandon()
        assert path.exists() == there
        assert not there or list(path.iterdir()) == []
        RunFolder.create(path, "y").release()


def test_any_process_of_a_launch_can_free_the_folder(tmp_path: Path):
    first = RunFolder.create(tmp_path / "run", "x")
    RunFolder.open(tmp_path / "run").abandon()
    assert list((tmp_path / "run").iterdir()) == []
    first.release()
    RunFolder.create(tmp_path / "run", "y").release()


def test_processes_of_a_launch_can_free_the_folder_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The other process removes everything between the look of this one and its first removal."""
    first = RunFolder.create(tmp_path / "run", "x")
    (first.path / "run.log").write_text("a line\n")
    other = RunFolder.open(first.path)
    look = first.release

    def releasing() -> None:
        look()
        other.abandon()

    monkeypatch.setattr(first, "release", releasing)
    first.abandon()
    assert not first.path.exists()


@pytest.mark.parametrize("name", ["checkpoints/iter-000001", "samples/index.jsonl", "metrics.jsonl", "my notes.txt"])
def test_a_run_that_has_begun_is_never_removed(name: str, tmp_path: Path):
    run = RunFolder.create(tmp_path / "run", "x")
    (run.path / name).write_text("something")
    run.abandon()
    assert (run.path / name).read_text() == "something"
    assert run.config.read_text() == "x"


@pytest.mark.parametrize("part", ["checkpoints/iter-000004", "recipes/iter-000003"])
def test_a_part_of_a_run_is_no_run(part: str, tmp_path: Path):
    run = RunFolder.create(tmp_path / "run", "x")
    inner = run.path / part
    inner.mkdir(parents=True)
    (inner / "config.yaml").write_text("x")
    message = f"is a part of the run {re.escape(str(run.path.resolve()))}; give the folder of the run"
    message += "; a checkpoint is chosen with --checkpoint 4$" if "iter-000004" in part else "$"
    with pytest.raises(ValueError, match=message):
        RunFolder.open(inner)
    with pytest.raises(ValueError, match=message):
        is_run(str(inner))
    assert list(inner.iterdir()) == [inner / "config.yaml"]
    assert is_run(str(run.path))
