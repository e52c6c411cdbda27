"""Videos of samples: names, rate and what is refused."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from flowgrpo.inference.animations import Animation
from flowgrpo.inference.image_samples import sample_images
from flowgrpo.media.video import can_encode
from flowgrpo.pipelines.conformance.videos import VIDEOS

FILM = torch.linspace(0, 1, 4).view(4, 1, 1, 1).expand(4, 3, 6, 8)


def test_one_sample_has_the_name_and_several_have_names_of_their_own(tmp_path: Path):
    one = Animation(tmp_path / "a.gif", [Path("000-3.png")])
    assert one.files == [tmp_path / "a.gif"]
    two = Animation(tmp_path / "new" / "a.gif", [Path("000-3.png"), Path("001-3.png")])
    said: list[str] = []
    two.write({0: FILM, 1: 1 - FILM}, {"frame_rate": 5}, said.append)
    assert said == [f"video {tmp_path / 'new' / name}" for name in ("a-000-3.gif", "a-001-3.gif")]
    for name, first in (("a-000-3.gif", 0), ("a-001-3.gif", 255)):
        with Image.open(tmp_path / "new" / name) as film:
            assert (film.n_frames, film.size) == (4, (256, 192))
            assert film.convert("RGB").getpixel((9, 9)) == (first,) * 3
            film.seek(1)
            film.load()
            assert film.info["duration"] == 200


def test_files_are_checked_before_anything_is_made(tmp_path: Path):
    (tmp_path / "a-000-3.gif").write_text("mine")
    with pytest.raises(ValueError, match=r"a-000-3\.gif exists"):
        Animation(tmp_path / "a.gif", [Path("000-3.png"), Path("001-3.png")])
    with pytest.raises(ValueError, match=r"--fps is 0; give frames a second from 0\.1 to 240"):
        Animation(tmp_path / "b.gif", [Path("000-3.png")], rate=0)


def test_pictures_that_do_not_move_are_no_video(tmp_path: Path):
    with pytest.raises(ValueError, match="--animation can be left out"):
        Animation(tmp_path / "a.gif", [Path("000-3.png")]).write({0: FILM[0]}, {}, print)
    assert not (tmp_path / "a.gif").exists()


@pytest.mark.slow
@pytest.mark.skipif(not can_encode(), reason="the package av is not installed")
def test_a_pipeline_makes_a_video(tmp_path: Path):
    import av

    tiny = VIDEOS["WanPipeline"]
    tiny.fresh().save_pretrained(tmp_path / "wan")
    overrides = [f"model.call.{key}={value}" for key, value in tiny.call.items()] + ["evaluate.steps=2"]
    (picture,) = sample_images(
        str(tmp_path / "wan"), ["a cup"], tmp_path / "out", overrides=overrides, animation=tmp_path / "cup.mp4", fps=10
    )
    with Image.open(picture) as strip, av.open(str(tmp_path / "cup.mp4")) as film:
        assert strip.size == (5 * 32, 32)
        found = [frame.to_image() for frame in film.decode(video=0)]
        assert float(film.streams.video[0].average_rate) == 10
        assert [frame.size for frame in found] == [(256, 256)] * 5
        for at, frame in enumerate(found):
            own = strip.crop((32 * at, 0, 32 * at + 32, 32)).convert("L").resize((1, 1), Image.Resampling.BOX)
            assert (
                abs(frame.convert("L").resize((1, 1), Image.Resampling.BOX).getpixel((0, 0)) - own.getpixel((0, 0)))
                < 16
            )
