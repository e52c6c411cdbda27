"""Pictures that a data set holds: they become files with the same bytes, and only where a pipeline takes pictures."""

import io
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from flowgrpo.training.data import read_prompts, with_pictures, with_targets

COLOURS = ("red", "green", "blue")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "flowgrpo" / "pictures"


def png(colour: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (6, 4), colour).save(file, "PNG")
    return file.getvalue()


def made(column: str = "image", values: list[Any] | None = None) -> datasets.Dataset:
    held = [{"bytes": png(colour), "path": f"{colour}.png"} for colour in COLOURS] if values is None else values
    feature: Any = datasets.Image()
    feature = datasets.List(feature) if isinstance(held[0], list) else feature
    table = {
        "prompt": [f"make it {colour}" for colour in COLOURS[: len(held)]],
        "n": list(range(len(held))),
        column: held,
    }
    features = datasets.Features({"prompt": datasets.Value("string"), "n": datasets.Value("int64"), column: feature})
    return datasets.Dataset.from_dict(table, features=features)


@pytest.mark.parametrize("form", ["disk", "parquet"])
@pytest.mark.parametrize(("column", "words"), [("image", ""), ("source", "?image=source")])
def test_pictures_become_files_with_the_same_bytes(tmp_path: Path, cache: Path, form: str, column: str, words: str):
    if form == "disk":
        made(column).save_to_disk(tmp_path / "set")
    else:
        (tmp_path / "set").mkdir()
        made(column).to_parquet(tmp_path / "set" / "train.parquet", batch_size=2)
    source = f"{tmp_path / 'set'}{words}"
    rows = read_prompts(source)
    assert [set(row.columns) for row in rows] == [{"n"}] * 3
    assert not cache.exists()
    found = with_pictures(rows, source)
    for k, (row, colour) in enumerate(zip(found, COLOURS)):
        assert row.columns["n"] == k
        assert Path(row.columns["image"]).read_bytes() == png(colour)
        assert Path(row.columns["image"]).is_relative_to(cache)
        assert row.prompt.call["image"].getpixel((0, 0)) == Image.new("RGB", (1, 1), colour).getpixel((0, 0))  # type: ignore[attr-defined]
    before = {file: file.stat().st_mtime_ns for file in cache.rglob("*.png")}
    assert len(before) == 3
    part = with_pictures(read_prompts(f"{source}{'&' if words else '?'}split=train[1:]"), source)
    assert [row.columns["image"] for row in part] == [row.columns["image"] for row in found[1:]]
    assert {file: file.stat().st_mtime_ns for file in cache.rglob("*.png")} == before


def test_several_pictures_of_a_prompt_are_a_list(tmp_path: Path):
    values = [[{"bytes": png("red"), "path": None}, {"bytes": png("blue"), "path": "x.jpg"}], [{"bytes": png("red")}]]
    made(values=values).save_to_disk(tmp_path / "set")
    both, one = with_pictures(read_prompts(str(tmp_path / "set")), str(tmp_path / "set"))
    assert [len(row.prompt.call["image"]) for row in (both, one)] == [2, 1]  # type: ignore[attr-defined]
    assert both.columns["image"][0] == one.columns["image"][0]
    assert Path(both.columns["image"][1]).suffix == ".jpg"


@pytest.mark.parametrize("shows", [True, False])
def test_targets_of_a_data_set_stay_targets_beside_pictures_for_the_pipeline(tmp_path: Path, shows: bool):
    targets = [{"bytes": png(colour), "path": None} for colour in reversed(COLOURS)]
    both = made().add_column("target_image", targets, feature=datasets.Image())
    source = str(tmp_path / "set")
    both.save_to_disk(source)
    rows = read_prompts(source)
    found = with_targets(with_pictures(rows, source) if shows else rows, source, rows)
    assert [Path(row.columns["target_image"]).read_bytes() for row in found] == [png(one) for one in reversed(COLOURS)]
    assert [row.target is not None and row.pictures is not None for row in found] == [shows] * 3
    if shows:
        assert [Path(row.columns["image"]).read_bytes() for row in found] == [png(colour) for colour in COLOURS]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "row 2: `image` holds no picture"),
        ({"bytes": b"no picture", "path": "a.png"}, "is not a picture that can be read"),
        ({"bytes": None, "path": "none.png"}, "none.png does not exist"),
    ],
)
def test_faults_of_pictures_name_the_row(tmp_path: Path, value: Any, said: str):
    file = str(tmp_path / "p.parquet")
    images = [{"bytes": png("red"), "path": None}, value]
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "image": images}), file)
    with pytest.raises(ValueError, match="row 2") as caught:
        with_pictures(read_prompts(file), file)
    assert said in str(caught.value)


def test_a_column_of_paths_starts_at_the_folder(tmp_path: Path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.png").write_bytes(png("red"))
    (tmp_path / "set" / "train.jsonl").write_text('{"prompt": "x", "file": "a.png"}\n')
    source = f"{tmp_path / 'set'}?image=file"
    (row,) = with_pictures(read_prompts(source), source)
    assert row.columns["image"] == str(tmp_path / "set" / "a.png")
    other = f"{tmp_path / 'set'}?image=photo"
    with pytest.raises(ValueError, match="there is no column 'photo'"):
        with_pictures(read_prompts(other), other)
    made("photo").save_to_disk(tmp_path / "disk")
    with pytest.raises(ValueError, match="no column 'file'; its columns of pictures are photo"):
        with_pictures(read_prompts(f"{tmp_path / 'disk'}?image=file"), f"{tmp_path / 'disk'}?image=file")
    assert with_pictures(read_prompts(str(tmp_path / "disk")), str(tmp_path / "disk"))[0].pictures is None
