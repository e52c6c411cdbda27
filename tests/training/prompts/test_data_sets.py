"""Data sets of the library `datasets`: real ones are read, and what a stranger may have written is refused."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from flowgrpo.training.data import PromptRow, column_names, read_prompts

ROWS = [
    {"prompt": "a red star", "n": 1, "tags": ["x", "y"], "include": [{"class": "star", "count": 1}], "score": 0.5},
    {"prompt": "two circles", "n": None, "tags": [], "include": [{"class": "circle", "count": 2}], "score": None},
    {"prompt": "a cross", "n": 3, "tags": ["z"], "include": [], "score": 0.25},
]
EXPECTED = [
    PromptRow(k, row["prompt"], {name: row[name] for name in row if name != "prompt"}) for k, row in enumerate(ROWS)
]


def made(rows: list[dict[str, Any]] = ROWS) -> datasets.Dataset:
    return datasets.Dataset.from_list(rows)


def refused(source: str) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        read_prompts(source)
    return str(caught.value)


def sharded(folder: Path, split: str, rows: list[dict[str, Any]], count: int) -> None:
    """The layout of the hub, with `count` files of equal length."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for k in range(count):
        part = rows[k * len(rows) // count : (k + 1) * len(rows) // count]
        made(part).to_parquet(folder / "data" / f"{split}-{k:05d}-of-{count:05d}.parquet")


def test_one_set_is_the_same_in_every_form(tmp_path: Path):
    made().save_to_disk(tmp_path / "disk")
    datasets.DatasetDict(train=made(ROWS[:1]), test=made()).save_to_disk(tmp_path / "splits")
    sharded(tmp_path / "hub", "test", ROWS, 3)
    made().to_parquet(tmp_path / "file.parquet")
    (tmp_path / "lines").mkdir()
    for name in ("lines/test.jsonl", "file.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "arrow").mkdir()
    shutil.copy(tmp_path / "disk" / "data-00000-of-00001.arrow", tmp_path / "arrow" / "test.arrow")
    for source in (
        "disk", "splits?split=test", "hub", "hub?split=test", "file.parquet", "lines", "file.jsonl", "arrow"
    ):  # fmt: skip
        rows = read_prompts(str(tmp_path / source))
        assert rows == EXPECTED, source
        assert [row.id for row in rows] == [0, 1, 2]
        assert all(str(tmp_path) in row.place for row in rows)
        assert column_names(rows) == ["n", "tags", "include", "score"]


def test_shards_keep_their_order_and_places_name_the_file(tmp_path: Path):
    rows = [{"prompt": f"prompt {k}"} for k in range(24)]
    sharded(tmp_path, "train", rows, 12)
    found = read_prompts(str(tmp_path))
    assert [row.text for row in found] == [row["prompt"] for row in rows]
    assert found[21].place == f"{tmp_path}/data/train-00010-of-00012.parquet, row 2"
    (tmp_path / "data" / "train-00010-of-00012.parquet").unlink()
    assert "1 of 12 files data/train-…-of-00012 are missing" in refused(str(tmp_path))


@pytest.mark.parametrize(
    ("split", "texts"),
    [
        ("train[:2]", ["p0", "p1"]),
        ("train[8:]", ["p8", "p9"]),
        ("train[-1:]", ["p9"]),
        ("train[10%:30%]", ["p1", "p2"]),
    ],
)
def test_a_split_may_have_a_range(tmp_path: Path, split: str, texts: list[str]):
    rows = [{"prompt": f"p{k}", "n": k} for k in range(10)]
    made(rows).save_to_disk(tmp_path / "disk")
    sharded(tmp_path / "hub", "train", rows, 2)
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for folder in ("disk", "hub", "lines"):
        found = read_prompts(f"{tmp_path / folder}?split={split}")
        assert [row.text for row in found] == texts
        assert [row.id for row in found] == list(range(len(texts)))
        assert [row.columns["n"] for row in found] == [int(text[1:]) for text in texts]
        number = int(texts[0][1:])
        assert found[0].place.endswith(f" {number % 5 + 1 if folder == 'hub' else number + 1}")


def test_splits_and_ranges_that_are_not_there_are_named(tmp_path: Path):
    datasets.DatasetDict(train=made(), test=made()).save_to_disk(tmp_path / "disk")
    for split in ("train", "test"):
        sharded(tmp_path / "hub", split, ROWS, 1)
    for folder in ("disk", "hub"):
        source = str(tmp_path / folder)
        assert f"has the splits train, test; write one of them, as in {source}?split=train" in refused(source)
        assert f"{source}?column=n&split=train" in refused(f"{source}?column=n")
        assert "has no split 'dev'; it has train, test" in refused(f"{source}?split=dev")
        assert "holds no prompt; test has 3" in refused(f"{source}?split=test[3:]")
        assert "no range of 3 rows" in refused(f"{source}?split=test[a:]")


def test_the_column_of_prompts_can_be_named(tmp_path: Path):
    rows = [{"caption": "a dog", "prompt": "draw"}, {"caption": "a cat", "prompt": "paint"}]
    made(rows).save_to_disk(tmp_path / "disk")
    made(rows).to_parquet(tmp_path / "p.parquet")
    (tmp_path / "p.csv").write_text("caption,prompt\na dog,draw\na cat,paint\n")
    for name in ("disk", "p.parquet", "p.csv"):
        source = str(tmp_path / name)
        assert read_prompts(f"{source}?column=caption") == [
            PromptRow(0, "a dog", {"prompt": "draw"}), PromptRow(1, "a cat", {"prompt": "paint"})
        ]  # fmt: skip
        assert read_prompts(source)[1] == PromptRow(1, "paint", {"caption": "a cat"})
        assert "no column 'text' (it has caption, prompt)" in refused(f"{source}?column=text")
    made([{"caption": "a"}]).save_to_disk(tmp_path / "other")
    assert "no `prompt` (it has caption); say which column holds the prompts, as in ?column=caption" in refused(
        str(tmp_path / "other")
    )


CARD = """---
license: mit
configs:
- config_name: small
  data_files: small/*.jsonl
- config_name: large
  data_dir: big
  data_files:
  - split: train
    path: [one.csv, two.csv]
  - split: test
    path: "t*.csv"
---
# A data set
"""


def with_card(folder: Path, card: str = CARD) -> str:
    (folder / "small").mkdir(parents=True)
    (folder / "big").mkdir()
    (folder / "README.md").write_text(card)
    (folder / "small" / "x.jsonl").write_text('{"prompt": "s"}\n')
    for name in ("one", "two", "three"):
        (folder / "big" / f"{name}.csv").write_text(f"prompt\n{name}\n")
    return str(folder)


def test_the_card_says_which_files_belong_to_a_configuration(tmp_path: Path):
    source = with_card(tmp_path / "set")

    def texts(words: str) -> list[str]:
        return [row.text for row in read_prompts(f"{source}?{words}")]

    assert texts("config=small") == ["s"]
    assert texts("config=large&split=train") == ["one", "two"]
    assert texts("config=large&split=test") == ["three", "two"]
    assert "has the configurations small, large; write one of them, as in config=small" in refused(source)
    assert "no configuration 'huge'; it has small, large" in refused(f"{source}?config=huge")
    other = with_card(tmp_path / "other", CARD.replace("config_name: small", "config_name: small\n  default: true"))
    assert [row.text for row in read_prompts(other)] == ["s"]
    made().save_to_disk(tmp_path / "disk")
    assert "leave config out" in refused(f"{tmp_path / 'disk'}?config=main")


@pytest.mark.parametrize(
    "path", ["../secret.jsonl", "/etc/*.jsonl", "https://example.org/x.jsonl", "zip://x.jsonl::small.zip", "~/x.jsonl"]
)
def test_the_card_of_a_stranger_names_no_file_elsewhere(tmp_path: Path, path: str):
    (tmp_path / "secret.jsonl").write_text('{"prompt": "secret"}\n')
    source = with_card(tmp_path / "set", CARD.replace("small/*.jsonl", json.dumps(path)))
    assert "README.md names" in refused(f"{source}?config=small")
    inside = with_card(tmp_path / "two", CARD.replace("data_dir: big", f"data_dir: {json.dumps(path)}"))
    assert "README.md names" in refused(f"{inside}?config=large&split=train")


def test_the_card_of_a_stranger_takes_neither_time_nor_memory(tmp_path: Path):
    bomb = "\n".join(
        ["---", "a0: &a0 [x, x]"] + [f"a{k}: &a{k} [*a{k - 1}, *a{k - 1}]" for k in range(1, 40)] + ["---"]
    )
    assert "multiply to more than" in refused(with_card(tmp_path / "set", bomb))


@pytest.mark.parametrize("name", ["../secret.arrow", "{}/secret.arrow", "deep/secret.arrow", "none.arrow"])
def test_a_saved_set_names_no_file_elsewhere(tmp_path: Path, name: str):
    made().save_to_disk(tmp_path / "set")
    (tmp_path / "set" / "deep").mkdir()
    for folder in (tmp_path, tmp_path / "set" / "deep"):
        shutil.copy(tmp_path / "set" / "data-00000-of-00001.arrow", folder / "secret.arrow")
    name = name.format(tmp_path)
    state = tmp_path / "set" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "_data_files": [{"filename": name}]}))
    assert f"names the file {name!r}, which is not in the folder" in refused(str(tmp_path / "set"))


def test_a_saved_set_that_is_damaged_is_refused(tmp_path: Path):
    made([{"prompt": "a" * 100}] * 50).save_to_disk(tmp_path / "set")
    file = tmp_path / "set" / "data-00000-of-00001.arrow"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert str(tmp_path / "set") in refused(str(tmp_path / "set"))
    # Not UTF-8: a reader that does not look would make a text of it, or crash.
    file.write_bytes(whole.replace(b"a" * 8, b"\xff" * 8))
    assert "is damaged" in refused(str(tmp_path / "set"))
    (tmp_path / "set" / "state.json").write_text("[" * 1000)
    assert "state.json" in refused(str(tmp_path / "set"))


def test_no_program_of_a_data_set_is_run(tmp_path: Path):
    folder = tmp_path / "set"
    sharded(folder, "train", ROWS, 1)
    for name in ("set.py", "data/train.py", "train.py"):
        (folder / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert read_prompts(str(folder)) == EXPECTED
    shutil.rmtree(folder / "data")
    assert "no prompts that can be read" in refused(str(folder))
    assert not (tmp_path / "ran").exists()


def test_columns_that_a_run_cannot_keep_are_left_out(tmp_path: Path):
    table = pyarrow.table(
        {
            "prompt": ["a", "b"],
            "raw": [b"1", b"2"],
            "time": pyarrow.array([1, 2], pyarrow.timestamp("s")),
            "nested": [[{"raw": b"1"}], []],
            "kept": pyarrow.array(["x", "y"]).dictionary_encode(),
            "gone": [float("nan"), 1.5],
        }
    )
    parquet.write_table(table, tmp_path / "p.parquet")
    datasets.Dataset(table).save_to_disk(tmp_path / "disk")
    for name in ("p.parquet", "disk"):
        rows = read_prompts(str(tmp_path / name))
        assert [dict(row.columns) for row in rows] == [{"kept": "x", "gone": None}, {"kept": "y", "gone": 1.5}]
        assert rows[0].columns.table.left_out == ("time", "nested")  # type: ignore[attr-defined]
        assert "raw" not in rows[0].columns
        with pytest.raises(KeyError):
            rows[0].columns["raw"]


@pytest.mark.parametrize("value", [float("inf"), [1.0, float("-inf")], {"a": [float("inf")]}])
def test_a_number_that_is_not_finite_is_refused(tmp_path: Path, value: Any):
    parquet.write_table(pyarrow.table({"prompt": ["a"], "n": [value]}), tmp_path / "p.parquet")
    assert "a number of column 'n' is not finite" in refused(str(tmp_path / "p.parquet"))


@pytest.mark.parametrize(
    ("prompts", "row"),
    [
        (["x", None], 2),
        (["x", "  "], 2),
        (["a\0b"], 1),
        ([5], 1),
        ([["x"]], 1),
        ([[{"role": "user", "content": ""}]], 1),
    ],
)
def test_faults_of_a_prompt_name_the_row(tmp_path: Path, prompts: list[Any], row: int):
    parquet.write_table(pyarrow.table({"prompt": prompts}), tmp_path / "p.parquet")
    assert f"p.parquet, row {row}: `prompt`" in refused(str(tmp_path / "p.parquet")).replace("the conversation in ", "")


def test_what_cannot_be_a_data_set_is_named(tmp_path: Path):
    assert "no prompts that can be read" in refused(str(tmp_path))
    (tmp_path / "a.png").write_bytes(b"")
    assert "a folder like a data set of the hub" in refused(str(tmp_path))
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n')
    assert [row.text for row in read_prompts(str(tmp_path))] == ["a"]
    (tmp_path / "train.csv").write_text("prompt\nb\n")
    assert "files of several kinds (.csv, .jsonl)" in refused(str(tmp_path))
    (tmp_path / "train.csv").unlink()
    assert "is a file, and split belongs to data sets" in refused(f"{tmp_path / 'train.jsonl'}?split=train")
    (tmp_path / "empty").mkdir()
    made([{"prompt": "a"}]).select([]).to_parquet(tmp_path / "empty" / "train.parquet")
    assert "holds no prompt" in refused(str(tmp_path / "empty"))
    assert "for a data set of the hub write hub:owner/name" in refused("owner/name")


def test_json_files_of_data_sets_may_hold_a_line_each(tmp_path: Path):
    (tmp_path / "train.json").write_text('{"prompt": "a"}\n{"prompt": "b", "n": 1}\n')
    assert read_prompts(str(tmp_path)) == [PromptRow(0, "a", {"n": None}), PromptRow(1, "b", {"n": 1})]
    (tmp_path / "train.json").write_text('[{"prompt": "a"}, "b"]')
    assert [row.text for row in read_prompts(str(tmp_path))] == ["a", "b"]
    assert "not JSON" in refused_line(tmp_path)


def refused_line(folder: Path) -> str:
    (folder / "train.json").write_text('{"prompt": "a"}\n{"prompt": "b"\n')
    said = refused(str(folder))
    assert "line 2" in said
    return said


def test_without_the_library_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made().save_to_disk(tmp_path / "disk")
    sharded(tmp_path / "hub", "train", ROWS, 1)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for source in (tmp_path / "disk", tmp_path / "hub", "hub:owner/name"):
        assert "pip install datasets" in refused(str(source))
    # A file needs no library.
    assert read_prompts(str(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet")) == EXPECTED
