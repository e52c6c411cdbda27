"""Videos as files: frames, size, colours, rate, and what is refused."""

from pathlib import Path

import pytest
from PIL import Image, ImageChops

from flowgrpo.media import video
from flowgrpo.media.video import can_encode, check_rate, check_video, enlarged, frames_of, rate_of, write_video

needs_av = pytest.mark.skipif(not can_encode(), reason="the package av is not installed")
COLOURS = [(220, 40, 40), (40, 200, 60), (50, 60, 220), (240, 240, 240), (10, 10, 10)]


def frames(size: tuple[int, int] = (16, 12)) -> list[Image.Image]:
    return [Image.new("RGB", size, colour) for colour in COLOURS]


def read(path: Path) -> tuple[list[Image.Image], float, str]:
    """The frames, the duration in seconds and the codec of a video."""
    import av

    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        colours = {"format": "rgb24", "src_colorspace": "ITU709", "dst_color_range": "JPEG"}
        found = [frame.reformat(**colours).to_image() for frame in container.decode(stream)]
        return found, container.duration / 1e6, stream.codec_context.name


@needs_av
@pytest.mark.parametrize(("suffix", "codec"), [(".mp4", "h264"), (".webm", "vp9")])
def test_a_browser_gets_every_frame_in_its_colours_for_the_right_time(tmp_path: Path, suffix: str, codec: str):
    path = tmp_path / f"a{suffix}"
    write_video(path, frames(), rate=10)
    found, seconds, name = read(path)
    assert len(found) == 5
    assert codec in name
    assert seconds == pytest.approx(0.5, abs=0.01)
    assert found[0].size == (256, 192)  # 16 times
    for frame, colour in zip(found, COLOURS):
        middle = frame.getpixel((128, 96))
        assert all(abs(a - b) <= 6 for a, b in zip(middle, colour)), (middle, colour)
    assert list(tmp_path.iterdir()) == [path]


@needs_av
@pytest.mark.parametrize("suffix", [".mp4", ".webm"])
def test_an_odd_size_repeats_its_last_row_and_column(tmp_path: Path, suffix: str):
    picture = Image.new("RGB", (301, 255), (200, 30, 30))
    write_video(tmp_path / f"a{suffix}", [picture, picture], rate=2)
    (first, _), _, _ = read(tmp_path / f"a{suffix}")
    assert first.size == (302, 256)
    assert all(abs(a - b) <= 8 for a, b in zip(first.getpixel((301, 255)), (200, 30, 30)))


@pytest.mark.parametrize("suffix", [".webp", ".gif"])
def test_pictures_that_move_need_no_package(tmp_path: Path, suffix: str):
    write_video(tmp_path / f"a{suffix}", frames(), rate=4)
    with Image.open(tmp_path / f"a{suffix}") as found:
        assert found.n_frames == 5
        assert found.info["loop"] == 0
        found.seek(1)
        found.load()
        assert found.info["duration"] == 250


def test_small_frames_grow_by_a_whole_factor_and_keep_their_pixels():
    frame = Image.effect_noise((100, 70), 60).convert("RGB")
    large = enlarged(frame)
    assert large.size == (200, 140)
    assert ImageChops.difference(large.resize((100, 70), Image.Resampling.NEAREST), frame).getbbox() is None
    assert enlarged(Image.new("RGB", (832, 480))).size == (832, 480)


def test_frames_of_a_strip_come_in_order():
    strip = Image.new("RGB", (12, 5))
    for at, colour in enumerate(COLOURS[:3]):
        strip.paste(colour, (4 * at, 0, 4 * at + 4, 5))
    assert [frame.getcolors() for frame in frames_of(strip, 3)] == [[(20, colour)] for colour in COLOURS[:3]]
    for count in (0, -1, 5, 13):
        with pytest.raises(ValueError, match="cannot hold"):
            frames_of(strip, count)


@pytest.mark.parametrize(
    ("call", "rate"),
    [({"frame_rate": 24}, 24), ({"fps": 7.5}, 7.5), ({}, 16), (None, 16), ({"fps": "x"}, 16), ({"fps": True}, 16),
     ({"fps": 1e9}, 16)],
)  # fmt: skip
def test_the_call_says_how_fast_a_video_is(call: object, rate: float):
    assert rate_of(call) == rate


def test_what_cannot_be_written_is_refused_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=r"name it .*a\.mp4, or one of \.mp4, \.webm, \.webp or \.gif"):
        check_video(tmp_path / "a.avi")
    (tmp_path / "b.gif").write_text("mine")
    with pytest.raises(ValueError, match="exists"):
        check_video(tmp_path / "b.gif")
    monkeypatch.setattr(video, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install '\.\[video\]'"):
        check_video(tmp_path / "c.mp4")
    check_video(tmp_path / "c.webp")
    for rate in (0, -1, float("nan"), 1e3):
        with pytest.raises(ValueError, match="--fps"):
            check_rate(rate, "--fps")


def test_frames_of_two_sizes_leave_no_file(tmp_path: Path):
    for wrong in ([], [Image.new("RGB", (4, 4)), Image.new("RGB", (4, 6))]):
        with pytest.raises(ValueError, match="frames of one size"):
            write_video(tmp_path / "a.gif", wrong, rate=4)
    assert not list(tmp_path.iterdir())
