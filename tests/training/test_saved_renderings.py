"""Images that rewards made of completions, in the folder of a run: each once, and the fields that name them."""

from pathlib import Path

import torch
from PIL import Image

from flowgrpo.training.folder.rendered_images import write_rendered


def test_equal_images_are_written_once(tmp_path: Path) -> None:
    red, blue = torch.zeros(3, 2, 2, dtype=torch.uint8), torch.zeros(3, 2, 2, dtype=torch.uint8)
    red[0], blue[2] = 255, 255
    video = torch.stack([red, blue])
    rendered = {
        "one": [[red, blue], [red], None],
        "two": [[red.clone(), blue], [video], None],
        "served": [[], None, None],
    }
    first, second, third = write_rendered(tmp_path, "iter-000003/eval", rendered, [4, 7, 9])
    names = [f"iter-000003/eval-0004-rendered-{k}.png" for k in range(2)]
    pair = [{"image": name} for name in names]
    assert first == {"rendered": {"one": pair, "two": pair, "served": []}}
    moving = {"image": "iter-000003/eval-0007-rendered-0.png", "frames": 2}
    assert second == {"rendered": {"one": pair[:1], "two": [moving]}}
    assert third == {}
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/*")} == {*names, moving["image"]}
    with Image.open(tmp_path / str(moving["image"])) as strip:
        assert (strip.size, strip.getpixel((0, 0)), strip.getpixel((3, 0))) == ((4, 2), (255, 0, 0), (0, 0, 255))
