"""Images that rewards made of completions: in the data, the page, the exports and the page of votes."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flowgrpo.gallery.build import build_gallery, read_runs
from flowgrpo.gallery.exports import write_dataset, write_single
from flowgrpo.gallery.notes import notes_on
from tests.gallery.browser import LivePage
from tests.gallery.folders import data_of, picture, write_run, written
from tests.gallery.test_browser import CHROMIUM, needs_chromium
from tests.gallery.voting import booth, serving

RED, BLUE = (210, 20, 20), (20, 20, 210)


def made(at: int, seed: int, number: int = 0) -> dict[str, Any]:
    return {"image": f"iter-{at:06d}/eval-{seed:04d}-rendered-{number}.png"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two completions of a prompt at 0 and 10: two rewards share an image, and one of them has one of the prompt."""
    records = [
        written(
            at, 1, f"words {at} {seed}", sample=seed, rewards={"a": 0.1, "b": 0.2},
            rendered={"a": [made(at, seed)], "b": [made(at, seed)], "a / plain": [made(at, 0, 9)]},
        ) | {"seed": seed}
        for at in (0, 10) for seed in range(2)
    ]  # fmt: skip
    folder = write_run(tmp_path / "run", records)
    for at, colour in ((0, RED), (10, BLUE)):
        for name in (made(at, 0), made(at, 1), made(at, 0, 9)):
            picture(folder / "samples" / name["image"], colour, (40, 30))
    return folder


def rendered_of(page: Path, at: int) -> list[Any]:
    found: list[Any] = [one.get("rendered") for one in data_of(page)[f"r0-eval-{at:06d}-0"]["details"]]
    return found


def test_the_data_name_the_images_and_their_thumbnails(run: Path, tmp_path: Path) -> None:
    page = build_gallery(run, tmp_path / "site")
    first, second = rendered_of(page, 10)
    assert [label for label, _ in first] == ["a", "b", "a / plain"]
    assert first[0][1] == first[1][1]
    [[name, thumb, video]] = second[0][1]
    assert (name, video) == (made(10, 1)["image"], None)
    assert (page.parent / "samples" / "0" / name).is_file()
    with Image.open(page.parent / "thumbs" / thumb[:2] / f"{thumb[2:]}.webp") as small:
        assert small.convert("RGB").getpixel((3, 3)) == pytest.approx(BLUE, abs=3)
    embedded = re.search(r'id="data-thumbs">(.*?)</script>', write_single([run], tmp_path / "one.html").read_text())
    assert embedded is not None
    assert thumb in dict(json.loads(embedded[1])["images"])


def test_images_that_are_gone_or_elsewhere_are_said(run: Path, tmp_path: Path) -> None:
    (run / "samples" / made(0, 1)["image"]).unlink()
    page = build_gallery(run, tmp_path / "site")
    assert rendered_of(page, 0)[1][0] == ["a", [[None, None, None]]]
    [note] = notes_on(read_runs([run]))
    assert note.startswith(f"1 of 6 pictures of {run} are missing or damaged, the first is {run / 'samples'}")
    elsewhere = write_run(tmp_path / "served", [written(0, 1, "words", rendered={"remote": []}), written(0, 2, "x")])
    assert rendered_of(build_gallery(elsewhere), 0) == [[["remote", []]], None]


@pytest.mark.parametrize(
    "given", [[1], {"a": ["x.png"]}, {"a": [{}]}, {"a": [{"image": "../x.png"}]}, {"a": [{"image": "x.html"}]}]
)
def test_a_record_that_leads_elsewhere_is_refused(given: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [written(0, 1, "words", rendered=given)])
    with pytest.raises(ValueError, match=r"index\.jsonl, line 1: `rendered`"):
        build_gallery(folder)


def test_a_dataset_has_a_copy_of_each_image(run: Path, tmp_path: Path) -> None:
    folder = write_dataset([run], tmp_path / "set")
    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    assert all(row["rendered_a"] == row["rendered_b"] != row["rendered_a / plain"] for row in rows)
    names = {name for row in rows for key in ("rendered_a", "rendered_a / plain") for name in row[key]}
    assert {path.relative_to(folder).as_posix() for path in folder.glob("images/*")} == names
    assert len(names) == 6


def test_a_voter_sees_the_images_of_both_completions(run: Path) -> None:
    one = booth([run], run / "votes.jsonl")
    with serving(one) as client:
        shown = client.json("pairs/0")
        assert [shown[side]["rendered"] for side in ("left", "right")] == [
            ["rendered/0/left/0"],
            ["rendered/0/right/0"],
        ]
        for side in ("left", "right"):
            status, content, _ = client.get(shown[side]["rendered"][0])
            assert status == 200
            at = getattr(one.ballots[0], side).source.iteration
            with Image.open(io.BytesIO(content)) as seen:
                assert seen.convert("RGB").getpixel((3, 3)) == (BLUE if at else RED)
        for place in ("rendered/0/left/1", "rendered/0/middle/0", "rendered/9/left/0", "rendered/0/left/x"):
            assert client.get(place)[0] == 404


@pytest.mark.slow
@needs_chromium
def test_the_pages_show_the_images(run: Path, tmp_path: Path) -> None:
    (run / "samples" / made(0, 1)["image"]).unlink()
    assert CHROMIUM is not None
    page = LivePage(CHROMIUM, tmp_path / "profile", build_gallery(run).as_uri())
    try:
        # Of each completion the shared image once, and the image of the prompt; one file is missing.
        images = "[...document.querySelectorAll('.pair .made img')]"
        page.wait(f"{images}.length === 7 && {images}.every((image) => image.naturalWidth === 40)")
        assert page.value("[...document.querySelectorAll('.pair .made figcaption')].map((one) => one.textContent)") == [
            "a, b", "a / plain",
        ] * 4  # fmt: skip
        assert page.value("document.querySelector('.pair .made .absent').textContent") == "the image file is missing"
        page.value("document.querySelector('.pair .render').click()")
        page.wait("document.querySelector('dialog .made.whole img')?.naturalWidth === 40")
        assert "iter-0000" in page.value("document.querySelector('dialog .made.whole img').src")
        width = "document.querySelector('dialog .made.whole img').getBoundingClientRect().width"
        small = page.value(width)
        page.value("document.querySelector('dialog .made.whole .render').click()")
        page.wait(f"{width} > {small}")
        with serving(booth([run], run / "votes.jsonl")) as client:
            page.tell("Page.navigate", url=client.root)
            page.wait("document.querySelectorAll('#sides .made img').length >= 1")
    finally:
        page.close()
