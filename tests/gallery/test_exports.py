"""Sheets, animations, single files, dataset folders, and following a live run."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flowgrpo.gallery.build import build_gallery
from flowgrpo.gallery.exports import CELL, GAP, LINE, write_animation, write_dataset, write_sheet, write_single
from flowgrpo.gallery.run_reading import read_run
from flowgrpo.gallery.watch import ended, watch
from flowgrpo.kit.folder import load
from flowgrpo.kit.given_samples import given_samples
from tests.gallery.folders import (
    HOSTILE,
    Elements,
    add_records,
    data_of,
    files_of,
    picture,
    record,
    write_films,
    write_run,
    written,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three prompts at 0 and 10; base images red, later ones blue."""
    records = [
        record(at, prompt, 0, at * prompt / 10, prompt=f"{prompt} {HOSTILE}") for at in (0, 10) for prompt in (1, 2, 3)
    ]
    run = write_run(tmp_path / "run", records)
    for row in records:
        picture(run / "samples" / row["image"], (0, 0, 255) if row["iteration"] else (255, 0, 0), (32, 32))
    return run


def test_sheet_shows_base_and_tuned_side_by_side(run: Path, tmp_path: Path) -> None:
    path = write_sheet([run], tmp_path / "sheet.png", None, "gained", 2)
    with Image.open(path) as sheet:
        assert sheet.format == "PNG"
        middle = GAP + LINE + LINE + CELL // 2
        row = CELL + 3 * LINE + GAP
        places = [(GAP + CELL // 2, middle), (2 * GAP + CELL + CELL // 2, middle + row)]
        assert [sheet.getpixel(place) for place in places] == [(255, 0, 0), (0, 0, 255)]
        assert sheet.height == GAP + LINE + 2 * row


@pytest.mark.parametrize(("name", "kind"), [("a.gif", "GIF"), ("a.webp", "WEBP")])
def test_animation_shows_base_and_tuned_in_turn(run: Path, tmp_path: Path, name: str, kind: str) -> None:
    path = write_animation([run], tmp_path / name, None, "gained", 3)
    with Image.open(path) as animation:
        assert (animation.format, animation.n_frames) == (kind, 2)
        found = []
        for frame in range(2):
            animation.seek(frame)
            found.append(animation.convert("RGB").getpixel((GAP + CELL // 2, GAP + LINE + CELL // 2)))
    (red, _, low), (less, _, blue) = found
    assert red > 200 > 60 > low
    assert blue > 200 > 60 > less


def test_exports_do_not_replace_anything_and_say_what_to_name(run: Path, tmp_path: Path) -> None:
    for write, name in ((write_sheet, "a.png"), (write_animation, "a.gif")):
        (tmp_path / name).write_text("mine")
        with pytest.raises(ValueError, match=r"exists; name a new file"):
            write([run], tmp_path / name, None, "gained", 2)
        with pytest.raises(ValueError, match=r"name it .*a\.(png|mp4)"):
            write([run], tmp_path / "a.bmp", None, "gained", 2)
    for whole in (write_single, write_dataset):
        with pytest.raises(ValueError, match="exists; name a new"):
            whole([run], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_text() == "mine"
    assert not list(tmp_path.glob(".*.tmp"))


def test_sheets_are_of_images(tmp_path: Path) -> None:
    run = write_run(tmp_path / "text", [written(0, 1, "six")])
    with pytest.raises(ValueError, match="is a run of text"):
        write_sheet([run], tmp_path / "sheet.png", None, "gained", 2)


def test_single_file_holds_data_and_thumbnails(run: Path, tmp_path: Path) -> None:
    page = write_single([run], tmp_path / "one.html").read_text()
    elements = Elements(page)
    blocks = {
        has["id"]: json.loads(text)
        for (tag, has), text in zip(elements.tags, elements.texts)
        if has.get("type") == "application/json"
    }
    assert {f"data-{name}" for name, _ in blocks["data-site"]["files"]} | {"data-site", "data-thumbs"} == set(blocks)
    images = dict(blocks["data-thumbs"]["images"])
    names = [
        name
        for key in blocks
        if key in ("data-r0-eval-000000", "data-r0-eval-000010")
        for name in blocks[key]["thumbs"]
    ]
    assert set(names) == set(images)
    with Image.open(io.BytesIO(base64.b64decode(images[names[0]]))) as thumbnail:
        assert (thumbnail.format, thumbnail.convert("RGB").getpixel((5, 5))) == ("WEBP", (255, 0, 0))
    assert blocks["data-r0-pairs"]["prompts"][0] == f"1 {HOSTILE}"
    assert [tag for tag, _ in elements.tags].count("script") == len(blocks) + 1
    assert "img" not in [tag for tag, _ in elements.tags]


def test_dataset_has_a_row_and_a_file_for_each_sample(run: Path, tmp_path: Path) -> None:
    add_records(run, [record(10, 4, 0, None, phase="train", columns={"tag": "x"})])
    folder = write_dataset([run], tmp_path / "set")
    rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    assert len(rows) == 7
    assert len({tuple(row) for row in rows}) == 1  # every row has every column
    assert rows[0] == {
        "file_name": "images/000000.png",
        "prompt": f"1 {HOSTILE}",
        "prompt_id": "1",
        "seed": "0",
        "run": "a run",
        "phase": "eval",
        "iteration": 0,
        "reward_gold": 0.0,
        "column_skill": "counting",
        "column_tag": None,
        "notes": "gold: found two circles",
    }
    assert set(files_of(folder)) == {"metadata.jsonl", *(row["file_name"] for row in rows)}
    with Image.open(folder / rows[1]["file_name"]) as image:
        assert image.getpixel((0, 0)) == (0, 0, 255)


def test_dataset_of_videos_says_their_frames_and_is_scored_as_videos(run: Path, tmp_path: Path) -> None:
    films = write_films(tmp_path / "films")
    folder = write_dataset([films, run], tmp_path / "set")
    rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    assert [row["frames"] for row in rows] == [12] * 4 + [1] * 6
    given = given_samples(folder)
    assert [load(one.made).shape for one in given[:4]] == [(12, 3, 12 + 2 * at, 16) for at in (0, 2, 1, 3)]
    assert {load(one.made).ndim for one in given[4:]} == {3}


def test_dataset_of_completions(tmp_path: Path) -> None:
    run = write_run(tmp_path / "text", [written(0, 1, "six\n"), written(5, 1, HOSTILE)])
    folder = write_dataset([run], tmp_path / "set")
    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    assert [row["completion"] for row in rows] == ["six\n", HOSTILE]
    assert set(files_of(folder)) == {"data.jsonl"}


def live_run(folder: Path, row: dict[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a") as log:
        log.write(json.dumps(row) + "\n")


def test_watch_builds_when_something_was_written_and_stops_at_the_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("run: {iterations: 10}\n")
    lines: list[str] = []
    counts: list[int] = []

    def wait() -> None:
        """What the run does while we wait: nothing, a first evaluation, nothing, a second, its end."""
        round_ = len(counts)
        page = run / "gallery" / "index.html"
        site = data_of(page)["site"] if page.exists() else None
        counts.append(sum(one["count"] for one in site["sets"]) if site else -1)
        assert site is None or site["live"] is True
        if round_ == 1:
            (run / "samples").mkdir()
            add_records(run, [record(0, 1, 7, 0.1)])
        if round_ == 3:
            add_records(run, [record(10, 1, 7, 0.2)])
        if round_ == 4:
            live_run(run, {"iteration": 10, "eval/gold": 0.2})
        assert round_ < 5

    page = watch([run], None, wait, lines.append)
    assert counts == [-1, -1, 1, 1, 2]
    assert len(lines) == 4  # waiting, and a line for each of three builds
    site = data_of(page)["site"]
    assert site["live"] is False
    assert [one["iteration"] for one in site["sets"]] == [0, 10]


def test_stopping_the_watch_leaves_a_page_that_looks_no_more(run: Path) -> None:
    def wait() -> None:
        raise KeyboardInterrupt

    lines: list[str] = []
    assert data_of(watch([run], None, wait, lines.append))["site"]["live"] is False
    assert lines[-1] == "no longer watching"


def test_watch_refuses_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a run folder"):
        watch([tmp_path / "missing"], None, lambda: None, print)


def test_a_run_has_ended_with_its_last_iteration(run: Path) -> None:
    assert not ended(read_run(run))
    live_run(run, {"iteration": 9})
    assert not ended(read_run(run))
    live_run(run, {"iteration": 10})
    assert ended(read_run(run))
    (run / "config.yaml").write_text("name: x\n")
    assert not ended(read_run(run))


def test_the_page_of_a_run_that_was_watched_is_the_page_of_a_build(run: Path, tmp_path: Path) -> None:
    live_run(run, {"iteration": 10})
    watched = files_of(watch([run], tmp_path / "a", lambda: None, lambda line: None).parent)
    built = files_of(build_gallery(run, tmp_path / "b").parent)
    assert watched.keys() == built.keys()
    assert {name for name in built if watched[name] != built[name]} <= {".flowgrpo-thumbnails.json"}
