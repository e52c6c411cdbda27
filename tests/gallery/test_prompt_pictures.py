"""Prompts that have pictures, and equal words: what tells them apart, and where their pictures are shown."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from flowgrpo.gallery.build import build_gallery, read_runs
from flowgrpo.gallery.exports import write_animation, write_sheet, write_single
from flowgrpo.gallery.favourites import write_favourites
from flowgrpo.gallery.vote_pairs import ballots_of, sources_of
from flowgrpo.kit.given_samples import given_samples
from flowgrpo.votes.preferences import read_preferences
from tests.gallery.browser import LivePage
from tests.gallery.folders import data_of, picture, record, write_run
from tests.gallery.test_browser import CHROMIUM, needs_chromium
from tests.gallery.voting import booth, serving

WORDS = "make it a cartoon"
COLOURS = {"cat": (210, 20, 20), "dog": (20, 210, 20), "cow": (20, 20, 210)}


def pictured(folder: Path, animals: list[str], name: str = "a run", seeds: int = 2) -> Path:
    """A run that edits the picture of each animal, evaluated at 0 and 10."""
    records = [
        record(
            at, prompt, seed, 0.1 * prompt + at / 100, prompt=WORDS, sample=2 * prompt + seed,
            pictures=[f"prompts/{animal}.webp"], columns={"image": f"photos/{animal}.jpg", "animal": animal},
        )
        for at in (0, 10) for prompt, animal in enumerate(animals) for seed in range(seeds)
    ]  # fmt: skip
    run = write_run(folder, records, name=name)
    for animal in animals:
        picture(run / "samples" / "prompts" / f"{animal}.webp", COLOURS[animal], (40, 30))
    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return pictured(tmp_path / "run", ["cat", "dog"])


def test_the_data_name_the_pictures_of_each_prompt(run: Path, tmp_path: Path) -> None:
    page = build_gallery(run, tmp_path / "site")
    pairs = data_of(page)["r0-pairs"]
    assert pairs["prompts"] == [WORDS, WORDS]
    assert [[name for name, _ in some] for some in pairs["pictures"]] == [["prompts/cat.webp"], ["prompts/dog.webp"]]
    for [(name, thumb)], animal in zip(pairs["pictures"], ("cat", "dog")):
        assert (page.parent / "samples" / "0" / name).is_file()
        with Image.open(page.parent / "thumbs" / thumb[:2] / f"{thumb[2:]}.webp") as small:
            assert small.convert("RGB").getpixel((3, 3)) == pytest.approx(COLOURS[animal], abs=3)
    single = write_single([run], tmp_path / "one.html").read_text()
    embedded = re.search(r'id="data-thumbs">(.*?)</script>', single)
    assert embedded is not None
    kept = dict(json.loads(embedded[1])["images"])
    assert all(thumb in kept for [(_, thumb)] in pairs["pictures"])


def test_a_picture_that_is_gone_is_left_out(run: Path) -> None:
    (run / "samples" / "prompts" / "cat.webp").unlink()
    assert [len(some) for some in data_of(build_gallery(run))["r0-pairs"]["pictures"]] == [0, 1]


@pytest.mark.parametrize("given", ["cat.webp", ["../../secret.png"], ["/etc/x.png"], [3], {"a": 1}])
def test_pictures_that_lead_elsewhere_are_refused(tmp_path: Path, given: Any) -> None:
    run = write_run(tmp_path / "run", [record(0, 1, 0, 0.5, pictures=given)])
    with pytest.raises(ValueError, match=r"index\.jsonl, line 1: `pictures`"):
        build_gallery(run)


def test_runs_are_matched_by_the_pictures_of_equal_words(run: Path, tmp_path: Path) -> None:
    other = pictured(tmp_path / "other", ["cow", "cow", "dog"], "other")
    runs = read_runs([run, other])
    ballots, _ = ballots_of(sources_of(runs, "last"), "x")
    assert len(ballots) == 2
    for ballot in ballots:
        assert ballot.left.shot.pictures == ballot.right.shot.pictures == ("prompts/dog.webp",)


def test_samples_of_other_pictures_are_no_samples_of_one_prompt(run: Path, tmp_path: Path) -> None:
    ballots, _ = ballots_of(sources_of(read_runs([run]), "base"), "x")
    assert sorted(ballot.left.shot.prompt_id for ballot in ballots) == ["0", "1"]
    assert all(ballot.left.shot.prompt_id == ballot.right.shot.prompt_id for ballot in ballots)

    # Two pairs have these words and this seed: the first is about the cat, and the second about the dog.
    place = {"phase": "eval", "prompt": WORDS, "seed": "1", "sample": 1, "iteration": None}
    runs = [{"id": "x", "name": "n", "folder": "run", "marks": [{**place, "favourite": True, "note": "", "time": ""}]}]
    marks, votes = tmp_path / "marks.json", tmp_path / "favourites.jsonl"
    marks.write_text(json.dumps({"flowgrpo": "marks", "version": 1, "runs": runs}))
    assert write_favourites([run], marks, votes) == 1
    [one] = read_preferences(votes)
    assert [Path(side).name for side in (one.chosen, one.rejected)] == ["eval-1-1-3.png", "eval-1-0-2.png"]

    groups = [sample.group for sample in given_samples(run)]
    assert len(set(groups)) == 4  # two prompts at two evaluations
    assert all(groups.count(group) == 2 for group in groups)


def test_a_sheet_and_an_animation_begin_with_the_pictures(run: Path, tmp_path: Path) -> None:
    plain = pictured(tmp_path / "plain", ["cat", "dog"])
    for line in (index := plain / "samples" / "index.jsonl").read_text().splitlines():
        assert "pictures" in json.loads(line)
    index.write_text(index.read_text().replace('"pictures"', '"former"'))
    sheets = [write_sheet([one], tmp_path / f"{one.name}.png", None, "gained", 4) for one in (run, plain)]
    with Image.open(sheets[0]) as wide, Image.open(sheets[1]) as narrow:
        assert wide.width > narrow.width
        seen = wide.convert("RGB").getpixel((100, 130))
        assert any(seen == pytest.approx(colour, abs=3) for colour in COLOURS.values())
    films = [write_animation([one], tmp_path / f"{one.name}.webp", None, "gained", 4) for one in (run, plain)]
    with Image.open(films[0]) as long, Image.open(films[1]) as short:
        assert (getattr(long, "n_frames", 1), getattr(short, "n_frames", 1)) == (3, 2)


def test_a_voter_sees_the_pictures_of_the_prompt(run: Path) -> None:
    one = booth([run], run / "votes.jsonl")
    with serving(one) as client:
        for number, ballot in enumerate(one.ballots):
            shown = client.json(f"pairs/{number}")
            assert shown["pictures"] == [f"prompts/{number}/0"]
            status, content, _ = client.get(shown["pictures"][0])
            assert status == 200
            with Image.open(io.BytesIO(content)) as seen:
                animal = Path(ballot.left.shot.pictures[0]).stem
                assert seen.convert("RGB").getpixel((3, 3)) == pytest.approx(COLOURS[animal], abs=3)
            assert not re.search(r"cat|dog|iter-", json.dumps(shown))
        assert [client.get(place)[0] for place in ("prompts/0/1", "prompts/99/0", "prompts/0/x")] == [404] * 3


@pytest.mark.slow
@needs_chromium
def test_the_pages_show_the_pictures(run: Path, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    address = build_gallery(run).as_uri()
    page = LivePage(CHROMIUM, tmp_path / "profile", address)
    try:
        images = "[...document.querySelectorAll('.pair .given img')]"
        page.wait(f"{images}.length === 4 && {images}.every((image) => image.naturalWidth === 40)")
        page.value("document.querySelector('.pair .prompt').click()")
        whole = "document.querySelector('dialog .given.whole img')"
        page.wait(f"{whole}?.naturalWidth === 40")
        animal = page.value(f"{whole}.src.match(/prompts\\/(\\w+)\\.webp/)[1]")
        assert f"--image 'photos/{animal}.jpg'" in page.value("document.querySelector('pre.command').textContent")
        with serving(booth([run], run / "votes.jsonl")) as client:
            page.tell("Page.navigate", url=client.root)
            page.wait("document.querySelector('#given:not([hidden]) img')?.naturalWidth === 40")
    finally:
        page.close()
