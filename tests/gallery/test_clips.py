"""The videos of a gallery: made once from the frames of a sample, and left out where they cannot be."""

import base64
import json
from pathlib import Path

import pytest
from PIL import Image

from flowgrpo.gallery import clips as making
from flowgrpo.gallery import notes
from flowgrpo.gallery.build import build_gallery, read_runs
from flowgrpo.gallery.exports import CELL, GAP, LINE, write_animation, write_sheet, write_single
from flowgrpo.gallery.notes import notes_on
from flowgrpo.media.video import can_encode
from tests.gallery.folders import Elements, add_records, data_of, files_of, film, record, write_films, write_run

pytestmark = pytest.mark.skipif(not can_encode(), reason="the package av is not installed")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_films(tmp_path / "run")


def clips(page: Path) -> set[str]:
    return {name for name in files_of(page.parent) if name.startswith("videos/")}


def named(page: Path) -> list[str]:
    data = data_of(page)
    return [name for key in ("r0-eval-000000", "r0-eval-000010") for name in data[key]["videos"]]


def length(file: Path) -> tuple[int, float]:
    """The number of frames of a video, and its frames a second."""
    import av

    with av.open(str(file)) as container:
        stream = container.streams.video[0]
        return sum(1 for _ in container.decode(stream)), float(stream.average_rate)


def test_every_sample_has_a_video_and_its_first_frame(run: Path) -> None:
    page = build_gallery(run)
    data = data_of(page)
    assert data["site"]["video"]
    assert {f"videos/{name[:2]}/{name[2:]}.webm" for name in named(page)} == clips(page)
    assert len(clips(page)) == 4
    for file in clips(page):
        assert length(page.parent / file) == (12, 16.0)
    thumb = data["r0-eval-000000"]["thumbs"][0]
    with Image.open(page.parent / "thumbs" / thumb[:2] / f"{thumb[2:]}.webp") as first:
        assert (first.size, first.convert("RGB").getcolors()) == ((16, 12), [(192, (0, 0, 0))])


def test_a_second_build_makes_no_video_again_and_a_dropped_sample_takes_its_video_along(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = build_gallery(run)
    before = files_of(page.parent)
    monkeypatch.setattr(making, "write_video", lambda *words: pytest.fail("made again"))
    build_gallery(run)
    assert files_of(page.parent) == before
    index = run / "samples" / "index.jsonl"
    index.write_text("".join(index.read_text().splitlines(keepends=True)[:3]))
    build_gallery(run)
    assert len(clips(page)) == 3


def test_the_rate_comes_from_the_option_or_the_call(run: Path) -> None:
    page = build_gallery(run, fps=4)
    assert {length(page.parent / file) for file in clips(page)} == {(12, 4.0)}
    (run / "config.yaml").write_text(json.dumps({"name": "films", "model": {"call": {"frame_rate": 24}}}))
    build_gallery(run)
    assert {length(page.parent / file) for file in clips(page)} == {(12, 24.0)}


def test_without_the_package_the_first_frame_is_shown_and_said_so(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (making, notes):
        monkeypatch.setattr(module, "can_encode", lambda: False)
    page = build_gallery(run)
    assert not data_of(page)["site"]["video"]
    assert not clips(page)
    (note,) = notes_on(read_runs([run]))
    assert note.startswith("the 4 videos of ")
    assert "pip install '.[video]'" in note


@pytest.mark.parametrize("frames", [0, 1, -3, 7, 10**9, "12", True, None])
def test_a_wrong_number_of_frames_leaves_a_picture(tmp_path: Path, frames: object) -> None:
    run = write_run(tmp_path / "run", [record(0, 1, 0, 0.5, frames=frames)])
    film(run / "samples" / "iter-000000" / "eval-1-0-0.png")
    page = build_gallery(run)
    assert not data_of(page)["site"]["video"]
    assert all(data_of(page)["r0-eval-000000"]["thumbs"])


def test_a_damaged_video_is_left_out(run: Path) -> None:
    add_records(run, [record(0, 3, 0, 0.5, frames=12)])
    (run / "samples" / "iter-000000" / "eval-3-0-0.png").write_bytes(b"no picture")
    page = build_gallery(run)
    assert data_of(page)["r0-eval-000000"]["videos"][2] is None
    assert len(clips(page)) == 4


def test_a_single_file_holds_its_videos(run: Path, tmp_path: Path) -> None:
    page = Elements(write_single([run], tmp_path / "one.html", fps=8).read_text())
    thumbs = json.loads(page.text("script", id="data-thumbs"))
    assert len(thumbs["videos"]) == 4
    (tmp_path / "a.webm").write_bytes(base64.b64decode(thumbs["videos"][0][1]))
    assert length(tmp_path / "a.webm") == (12, 8.0)
    policy = page.tags[[tag for tag, _ in page.tags].index("meta") + 1][1]["content"]
    assert policy is not None
    assert "media-src data:;" in policy


def test_a_sheet_shows_first_frames_and_an_animation_plays_the_videos(run: Path, tmp_path: Path) -> None:
    with Image.open(write_sheet([run], tmp_path / "sheet.png", None, "file", 1)) as sheet:
        assert sheet.getpixel((GAP + CELL // 2, GAP + LINE + LINE + CELL // 2)) == (0, 0, 0)
    path = write_animation([run], tmp_path / "new" / "a.mp4", None, "file", 2)
    assert length(path) == (12, 16.0)
    assert length(write_animation([run], tmp_path / "b.webm", None, "file", 2, fps=4)) == (12, 4.0)
    with Image.open(write_animation([run], tmp_path / "c.webp", None, "file", 1)) as moving:
        place, levels = (GAP + CELL // 2, GAP + LINE + LINE + CELL // 2), []
        for at in range(moving.n_frames):
            moving.seek(at)
            levels.append(moving.convert("RGB").getpixel(place))
    assert levels == [(20 * at,) * 3 for at in range(12)]
    with pytest.raises(ValueError, match="exists"):
        write_animation([run], path, None, "file", 2)
