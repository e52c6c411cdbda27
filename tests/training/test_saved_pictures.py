"""Copies of the pictures of prompts in a run folder: their names, their size, and what happens to bad ones."""

from pathlib import Path

import pytest
from PIL import Image

from flowgrpo.pipelines.pictures import Picture
from flowgrpo.training.folder.prompt_pictures import EXACT, SIDE, PromptPictures
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.prompts.prompt_rows import PromptRow


def row(*paths: Path) -> PromptRow:
    found = tuple(map(Picture, paths))
    return PromptRow(0, "p", pictures=found[0] if len(found) == 1 else found)


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    (tmp_path / "samples").mkdir()
    return tmp_path / "samples"


def test_equal_pictures_have_one_copy_and_a_large_one_is_made_smaller(samples: Path, tmp_path: Path) -> None:
    Image.new("RGB", (EXACT, 3), (10, 20, 30)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes())
    Image.new("RGB", (3000, 1500), (200, 0, 0)).save(tmp_path / "large.jpg")
    kept = PromptPictures(samples)
    assert kept.of(PromptRow(0, "no picture")) == []
    first, second, large = kept.of(row(tmp_path / "a.png", tmp_path / "b.png", tmp_path / "large.jpg"))
    assert first == second
    assert sorted(path.name for path in (samples / "prompts").iterdir()) == sorted(
        Path(name).name for name in (first, large)
    )
    with Image.open(samples / first) as exact, Image.open(samples / large) as small:
        assert exact.convert("RGB").getcolors() == [(EXACT * 3, (10, 20, 30))]
        assert small.size == (SIDE, SIDE // 2)
    written = (samples / first).stat().st_mtime_ns
    assert PromptPictures(samples).of(row(tmp_path / "a.png")) == [first]
    assert (samples / first).stat().st_mtime_ns == written


def test_a_picture_that_is_gone_is_named(samples: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the picture .*gone\.png cannot be read: No such file"):
        PromptPictures(samples).of(row(tmp_path / "gone.png"))
    (tmp_path / "bad.png").write_text("no picture")
    with pytest.raises(ValueError, match=r"bad\.png is not a picture"):
        PromptPictures(samples).of(row(tmp_path / "bad.png"))
    assert not list(samples.rglob("*.webp*"))


def test_what_a_killed_process_left_of_a_copy_is_removed(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", "")
    run.release()
    left = run.samples / "prompts" / ".0123.webp.99.tmp"
    left.parent.mkdir()
    left.write_bytes(b"half")
    RunFolder.open(tmp_path / "run").claim()
    assert not left.exists()
