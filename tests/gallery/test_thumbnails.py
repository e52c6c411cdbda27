"""Thumbnails: small, written once, named by what they show."""

import io
from pathlib import Path

import pytest
from PIL import Image

from flowgrpo.gallery.thumbnails import CACHE, Thumbnails, small_size
from tests.gallery.folders import picture


@pytest.mark.parametrize(
    ("size", "small"),
    [
        ((64, 64), (64, 64)),
        ((1024, 1024), (256, 256)),
        ((1024, 512), (256, 128)),
        ((4096, 512), (1024, 128)),
        ((512, 9000), (58, 1024)),
        ((1, 100_000), (1, 1024)),
        ((300, 3), (300, 3)),
    ],
)
def test_sizes(size: tuple[int, int], small: tuple[int, int]) -> None:
    assert small_size(*size) == small


def test_small_images_are_kept_to_the_pixel_and_large_ones_made_small(tmp_path: Path) -> None:
    tiny, large = tmp_path / "tiny.png", tmp_path / "large.png"
    Image.effect_noise((40, 30), 60).convert("RGB").save(tiny)
    Image.effect_noise((700, 350), 60).convert("RGB").save(large)
    made = Thumbnails(tmp_path / "out").make([tiny, large])
    with Image.open(tmp_path / "out" / made[tiny].file) as small, Image.open(tiny) as whole:
        assert small.tobytes() == whole.tobytes()
    with Image.open(tmp_path / "out" / made[large].file) as small:
        assert small.size == (256, 128)
    assert (made[large].width, made[large].height) == (700, 350)


def test_colours_are_means_of_an_eighth_by_an_eighth(tmp_path: Path) -> None:
    image = Image.new("RGB", (16, 16), (10, 20, 30))
    image.paste((110, 20, 30), (0, 0, 1, 2))  # half of the first square
    image.save(tmp_path / "a.png")
    colours = Thumbnails(tmp_path / "out").make([tmp_path / "a.png"])[tmp_path / "a.png"].colours
    assert len(colours) == 192
    assert tuple(colours[:6]) == (60, 20, 30, 10, 20, 30)


def test_what_an_image_shows_names_its_thumbnail(tmp_path: Path) -> None:
    for name, colour in (("a", (1, 2, 3)), ("b", (1, 2, 3)), ("c", (4, 5, 6))):
        picture(tmp_path / f"{name}.png", colour)
    made = Thumbnails(tmp_path / "out").make(tmp_path / f"{name}.png" for name in "abc")
    names = [thumbnail.name for thumbnail in made.values()]
    assert names[0] == names[1] != names[2]
    assert len(list((tmp_path / "out").rglob("*.webp"))) == 2


def test_known_images_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / f"{number}.png" for number in range(3)]
    for number, path in enumerate(paths):
        picture(path, (number, 0, 0))
    first = Thumbnails(tmp_path / "out")
    before = first.make(paths)
    first.save()
    drawn: list[Path] = []
    draw = Thumbnails._draw

    def watched(self: Thumbnails, path: Path, name: str, frames: int) -> object:
        drawn.append(path)
        return draw(self, path, name, frames)

    monkeypatch.setattr(Thumbnails, "_draw", watched)
    assert Thumbnails(tmp_path / "out").make(paths) == before
    assert drawn == []
    picture(paths[1], (77, 7, 7), (8, 8))
    (tmp_path / "out" / before[paths[2]].file).unlink()
    again = Thumbnails(tmp_path / "out").make(paths)
    assert sorted(drawn) == paths[1:]
    assert again[paths[1]].name != before[paths[1]].name
    assert again[paths[2]] == before[paths[2]]


@pytest.mark.parametrize(
    "spoiled", ["", "[]", "{", '{"format": "thumb-0"}', '{"format": "thumb-2", "seen": {"a": 1}, "known": {}}']
)
def test_a_spoiled_cache_is_no_cache(tmp_path: Path, spoiled: str) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / CACHE).write_text(spoiled)
    assert Thumbnails(tmp_path).make([tmp_path / "a.png"])[tmp_path / "a.png"] is not None


def test_what_is_no_image_has_no_thumbnail(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(buffer, "PNG")
    (tmp_path / "cut.png").write_bytes(buffer.getvalue()[:500])
    (tmp_path / "text.png").write_text("no image")
    paths = [tmp_path / "cut.png", tmp_path / "text.png", tmp_path / "missing.png"]
    assert Thumbnails(tmp_path / "out").make(paths) == dict.fromkeys(paths)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "1", "CMYK"])
def test_every_mode_is_read(tmp_path: Path, mode: str) -> None:
    path = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    Image.new(mode, (20, 10)).save(path)
    thumbnail = Thumbnails(tmp_path / "out").make([path])[path]
    with Image.open(tmp_path / "out" / thumbnail.file) as small:
        assert small.size == (20, 10)
