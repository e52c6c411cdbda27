"""No room on the disk: one sentence names the file and what is needed, and earlier files stay whole."""

import errno
import json
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from flowgrpo.gallery.page_files import write_whole
from flowgrpo.gallery.thumbnails import Thumbnails
from flowgrpo.training.folder.checkpoint import verify_checkpoint, write_checkpoint
from flowgrpo.training.folder.files import NoRoom, explained, write_text, writing
from flowgrpo.training.folder.run_folder import RunFolder, save_image
from flowgrpo.weights import saving
from tests.conftest import Command

LIMIT = 200_000


@pytest.fixture
def limited() -> Iterator[None]:
    """Limit the size of files of this process; the libraries then fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Part:
    def __init__(self, count: int) -> None:
        self.value = torch.zeros(count)

    def state_dict(self) -> dict:
        return {"value": self.value}

    def load_state_dict(self, state: object) -> None:
        pass


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", "name: test\n")


def save(run: RunFolder, iteration: int, weights: int, optimizer: int) -> None:
    def write(folder: Path) -> None:
        parts = {"optimizer": Part(optimizer)}
        write_checkpoint(folder, iteration, Part(weights), parts)  # type: ignore[arg-type]

    run.save_checkpoint(iteration, write, keep=1)


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize(
    ("weights", "optimizer", "name"), [(100_000, 1, "trained.safetensors"), (1, 100_000, "optimizer.pt")]
)
def test_a_checkpoint_without_room_names_its_file_and_need_and_leaves_the_last_one(
    run: RunFolder, weights: int, optimizer: int, name: str
) -> None:
    save(run, 1, 10, 10)
    with pytest.raises(NoRoom) as failed:
        save(run, 2, weights, optimizer)
    assert str(failed.value.filename).endswith(name)
    assert failed.value.needed == 4 * 100_001
    assert "; 0.4 MiB are needed" in explained(failed.value).replace("allows; ", "; ")
    assert [path.name for path in run.checkpoints.iterdir()] == ["iter-000001"]
    verify_checkpoint(run.checkpoint(1))


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    """Not its temporary sibling, which nobody knows."""
    with pytest.raises(FileNotFoundError) as failed:
        write_text(tmp_path / "gone" / "x.yaml", "x")
    assert explained(failed.value) == f"{tmp_path / 'gone' / 'x.yaml'}: No such file or directory"


@pytest.mark.usefixtures("limited")
def test_texts_lines_and_pictures_without_room_leave_no_temporary(run: RunFolder, tmp_path: Path) -> None:
    for work in (
        lambda: write_text(tmp_path / "out" / "long.txt", "x" * 2 * LIMIT),
        lambda: save_image(tmp_path / "out" / "noise.png", torch.rand(3, 400, 400)),
    ):
        (tmp_path / "out").mkdir(exist_ok=True)
        with pytest.raises(NoRoom, match="out/"):
            work()
        assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(NoRoom, match=r"metrics\.jsonl"):
        run.log({"iteration": 0, "note": "x" * 2 * LIMIT})
    run.rewind(1)
    assert run.metrics.read_text(encoding="utf-8") == ""


@pytest.mark.usefixtures("limited")
def test_the_writers_of_libraries_say_the_same(tmp_path: Path) -> None:
    for name, write in {
        "a.safetensors": lambda path: save_file({"a": torch.zeros(100_000)}, path),
        "a.pt": lambda path: torch.save(torch.zeros(100_000), path),
    }.items():
        with pytest.raises(NoRoom, match=name), writing(tmp_path / name):
            write(tmp_path / name)


@pytest.mark.parametrize(
    "words",
    [
        "Error while serializing: I/O error: File too large (os error 27)",
        'Error while serializing: IoError(Os { code: 27, kind: FileTooLarge, message: "File too large" })',
    ],
)
def test_safetensors_says_it_in_two_ways(tmp_path: Path, words: str) -> None:
    with pytest.raises(NoRoom) as failed, writing(tmp_path / "a.safetensors"):
        raise RuntimeError(words)
    assert failed.value.errno == 27


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "the disk is full: no room to write {file}, "),
        (errno.EDQUOT, "the quota leaves no room to write {file}"),
        (errno.EFBIG, "{file} is larger than the file system"),
    ],
)
def test_errors_are_sentences_with_the_path(tmp_path: Path, number: int, words: str) -> None:
    file = tmp_path / "gone" / "x.png"
    text = explained(OSError(number, os.strerror(number), str(file)))
    assert text.startswith(words.format(file=file))
    assert "Errno" not in text


def test_other_errors_name_the_file_first(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"), writing(tmp_path):
        raise ValueError("mine")
    with pytest.raises(PermissionError, match=r"x\.txt") as failed, writing(tmp_path / "x.txt"):
        raise PermissionError(errno.EACCES, "Permission denied")
    assert explained(failed.value) == f"{tmp_path / 'x.txt'}: Permission denied"


def test_the_copy_of_a_folder_says_the_same(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "a.txt").write_text("a")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(NoRoom, match="result"), writing(tmp_path / "result"):
        shutil.copytree(tmp_path / "from", tmp_path / "to", copy_function=full)


def test_a_message_of_ours_passes_even_if_a_missing_file_caused_it(tmp_path: Path) -> None:
    missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "gone")
    with pytest.raises(ValueError, match="give the folder"), writing(tmp_path):
        raise ValueError("give the folder of a run") from missing


def test_a_folder_that_cannot_be_written_names_its_cause(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        folder.mkdir()
        (folder / "data.jsonl").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="dataset") as failed:
        write_whole(tmp_path / "dataset", full)
    assert failed.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())


def test_a_thumbnail_without_room_is_no_unreadable_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match=r"\.webp") as failed:
        Thumbnails(tmp_path / "gallery").make([tmp_path / "a.png"])
    assert failed.value.errno == errno.ENOSPC
    assert not list((tmp_path / "gallery").rglob("*.tmp"))


def test_a_result_that_cannot_be_flushed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapter.safetensors").write_bytes(b"1")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"adapter\.safetensors"):
        saving._flush(tmp_path)


@pytest.mark.slow
def test_the_command_says_how_the_run_goes_on(
    small_text: list[str], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, records: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("flowgrpo.training.folder.run_folder.append_lines", full)
    words = ("data.heldout=null", "extensions=[]", "run.iterations=1")
    status, _, errors = command("train", "text", *small_text, *words, "--out", "run")
    assert status == 1
    assert "Traceback" not in errors
    assert errors.startswith("error: the disk is full: no room to write run/samples/index.jsonl, ")
    assert "are free in " in errors
    assert errors.rstrip().endswith("; make room; then: go on with `flowgrpo resume run`")
    assert json.loads((tmp_path / "run" / ".flowgrpo-lock").read_text())["process"] == os.getpid()
