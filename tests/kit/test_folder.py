"""Folders of pictures: prompts, sizes, transparency, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from flowgrpo.kit.folder import chosen, materials, prompt_of, read_folder
from flowgrpo.rewards.pixels import load_picture


def paint(path: Path, colour: object, size: tuple[int, int] = (8, 4), mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)
    return path


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("a_red_circle-3.png", "a red circle"),
        ("a red circle (2).jpg", "a red circle"),
        ("two-cats.png", "two cats"),
        ("000-0.png", "000 0"),
        ("7.png", "7"),
    ],
)
def test_a_file_name_is_a_prompt(name: str, prompt: str):
    assert prompt_of(Path(name)) == prompt


def test_prompts_come_from_names(tmp_path: Path):
    paint(tmp_path / "b_cat-1.png", "red")
    paint(tmp_path / "deep" / "a_dog.jpeg", "blue")
    (tmp_path / "notes.txt").write_text("no picture")
    (tmp_path / "._b_cat-1.png").write_bytes(b"\x00\x05\x16\x07")  # macOS keeps facts about a file so
    paint(tmp_path / ".ipynb_checkpoints" / "c.png", "red")
    pictures = read_folder(tmp_path)
    assert [(p.path.name, p.prompt, p.size) for p in pictures] == [
        ("b_cat-1.png", "b cat", (4, 8)), ("a_dog.jpeg", "a dog", (4, 8)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metadata.jsonl", '{"file_name": "x.png", "prompt": "a cat", "tag": "animals"}\n'),
        ("metadata.csv", "file_name,prompt,tag\nx.png,a cat,animals\n"),
        ("index.jsonl", '{"image": "x.png", "prompt": "a cat", "seed": 0, "columns": {"tag": "animals"}}\n'),
    ],
)
def test_prompts_and_columns_come_from_metadata(name: str, text: str, tmp_path: Path):
    paint(tmp_path / "x.png", "red")
    paint(tmp_path / "not listed.png", "red")
    (tmp_path / name).write_text(text)
    (picture,) = read_folder(tmp_path)
    assert (picture.prompt, picture.columns) == ("a cat", {"tag": "animals"})


def test_a_video_in_the_index_of_a_run_has_its_frames(tmp_path: Path):
    Image.new("RGB", (12, 4), "red").save(tmp_path / "x.png")
    record = {"image": "x.png", "prompt": "a cat", "seed": 0, "frames": 3, "columns": {}}
    (tmp_path / "index.jsonl").write_text(json.dumps(record) + "\n")
    (picture,) = read_folder(tmp_path)
    assert (picture.frames, picture.size) == (3, (4, 4))
    (material,) = materials([picture])
    assert material.samples.shape == (1, 3, 3, 4, 4)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "metadata.jsonl",
            '{"file_name": "x.png", "prompt": "a cat", "frames": 3}\n{"file_name": "x.png", "prompt": "b"}',
        ),
        ("metadata.csv", "file_name,prompt,frames\nx.png,a cat,3\nx.png,b,\n"),
        (
            "metadata.jsonl",
            '{"file_name": "x.png", "prompt": "a", "frames": 3}\n{"file_name": "x.png", "prompt": "b", "frames": 1}',
        ),
    ],
)
def test_a_list_of_ones_own_says_how_many_frames_a_video_has(name: str, text: str, tmp_path: Path):
    paint(tmp_path / "x.png", "red", (12, 4))
    (tmp_path / name).write_text(text)
    assert [(picture.frames, picture.size) for picture in read_folder(tmp_path)] == [(3, (4, 4)), (1, (4, 12))]


@pytest.mark.parametrize("inner", [{}, {"columns": {}}])
@pytest.mark.parametrize(
    ("frames", "said"),
    [
        (5, r".*x\.png is 12 pixels wide and cannot hold 5 frames of equal width"),
        (0, "`frames` is 0; write how many frames of a video stand side by side"),
        (2.5, "`frames` is 2.5; write how many"),
        (True, "`frames` is True; write how many"),
        ("gold", "`frames` is 'gold'; .*or give the column another name"),
    ],
)
def test_a_wrong_number_of_frames_is_named_with_its_line(frames: object, said: str, inner: object, tmp_path: Path):
    paint(tmp_path / "x.png", "red", (12, 4))
    rows = [{"image": "x.png", "prompt": "a", **inner}, {"image": "x.png", "prompt": "b", "frames": frames, **inner}]
    (tmp_path / "index.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=rf"index\.jsonl, line 2: {said}"):
        read_folder(tmp_path)


def test_files_of_videos_are_refused_with_what_to_give_instead(tmp_path: Path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a_cat.MP4").write_bytes(b"\0\0\0 ftypisom")
    instead = "save the frames of a video side by side in one picture, and give their number in a column `frames`"
    with pytest.raises(ValueError, match=rf"holds no picture .*; .*a_cat\.MP4 is a video: {instead}"):
        read_folder(tmp_path)
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"prompt": "a cat", "file_name": "deep/a_cat.MP4"}) + "\n")
    with pytest.raises(ValueError, match=rf"metadata\.jsonl, line 1: .*a_cat\.MP4 is a video; {instead}"):
        read_folder(tmp_path)


def test_transparent_parts_lie_over_white(tmp_path: Path):
    path = paint(tmp_path / "x.png", (255, 0, 0, 0), mode="RGBA")
    (picture,) = read_folder(tmp_path)
    assert picture.transparent
    assert torch.equal(load_picture(path), torch.ones(3, 4, 8))
    half = load_picture(paint(tmp_path / "y.png", (255, 0, 0, 51), mode="RGBA"))
    assert half[:, 0, 0].tolist() == pytest.approx([1.0, 0.8, 0.8])


def test_a_turned_photograph_is_turned_back(tmp_path: Path):
    image = Image.new("RGB", (8, 4), "red")
    image.putpixel((0, 0), (255, 255, 255))
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "x.png", exif=exif)
    (picture,) = read_folder(tmp_path)
    loaded = load_picture(picture.path)
    assert tuple(loaded.shape[1:]) == picture.size == (8, 4)
    assert loaded[:, 0, -1].tolist() == [1, 1, 1]


def test_sizes_come_apart_and_prompts_stay_together(tmp_path: Path):
    for k in range(5):
        paint(tmp_path / f"cat_{k}.png", "red")
    paint(tmp_path / "dog_0.png", "red", (6, 6))
    paint(tmp_path / "dog_1.png", "red")
    parts = list(materials(read_folder(tmp_path), most=2))
    assert [len(part) for part in parts] == [5, 1, 1]
    assert [tuple(part.images.shape[-2:]) for part in parts] == [(4, 8), (4, 8), (6, 6)]
    assert set(parts[0].prompts) == {"cat"}
    assert "no prompt comes twice" in parts[2].source


def test_whole_prompts_are_chosen(tmp_path: Path):
    for prompt in range(10):
        for k in range(4):
            paint(tmp_path / f"{'abcdefghij'[prompt]}_{k}.png", "red")
    some = chosen(read_folder(tmp_path), 8)
    assert [picture.prompt for picture in some] == ["a"] * 4 + ["f"] * 4


def test_what_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match="is not a folder"):
        read_folder(tmp_path / "none")
    with pytest.raises(ValueError, match="holds no picture"):
        read_folder(tmp_path)
    (tmp_path / "x.png").write_text("no picture")
    with pytest.raises(ValueError, match=r"x\.png is not a picture"):
        read_folder(tmp_path)
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"prompt": "a cat", "seed": 1}) + "\n")
    with pytest.raises(ValueError, match="prompt 1 names no file"):
        read_folder(tmp_path)
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"prompt": "a cat", "file_name": "y.png"}) + "\n")
    with pytest.raises(ValueError, match=r"there is no file .*y\.png"):
        read_folder(tmp_path)
    deep = paint(tmp_path / "deep.png", 70, mode="I;16")
    with pytest.raises(ValueError, match="8 bits"):
        load_picture(deep)
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"prompt": "a cat", "file_name": "deep.png"}) + "\n")
    with pytest.raises(
        ValueError, match=r"metadata\.jsonl, line 1: .*deep\.png has pixels of mode I(;16)?; save it with 8"
    ):
        read_folder(tmp_path)
    cut = paint(tmp_path / "cut.png", "red", (300, 300))
    cut.write_bytes(cut.read_bytes()[:-60])
    with pytest.raises(ValueError, match="cannot be read"):
        load_picture(cut)
