"""Prompt files in every format, their faults by file and line, and the order a run takes prompts in."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flowgrpo.pipelines.pictures import Picture
from flowgrpo.training.data import (
    PromptRow,
    PromptStream,
    columns_of,
    prompt_path,
    read_prompts,
    templated,
    with_pictures,
)


def written(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def refused(source: str) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        read_prompts(source)
    return str(caught.value)


def test_text_files_hold_a_prompt_a_line(tmp_path: Path):
    source = written(tmp_path, "p.txt", '  a red star \r\n\n\ttwo circles\na cross, "quoted"')
    assert read_prompts(source) == [
        PromptRow(0, "a red star"), PromptRow(1, "two circles"), PromptRow(2, 'a cross, "quoted"')
    ]  # fmt: skip


def test_jsonl_columns_keep_their_values(tmp_path: Path):
    source = written(
        tmp_path, "p.jsonl", '{"prompt": "a", "include": [{"class": "star"}], "n": 2}\n\n{"n": null, "Prompt": "b"}\n'
    )
    rows = read_prompts(source)
    assert rows[0] == PromptRow(0, "a", {"include": [{"class": "star"}], "n": 2})
    assert rows[1] == PromptRow(1, "b", {"include": None, "n": None})


def test_a_prompt_without_a_column_of_another_has_none_in_it(tmp_path: Path):
    """An iteration may have only prompts without the column, and a reward gets it all the same."""
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b", "n": 1}\n{"prompt": "c", "m": 2, "n": 3}\n', encoding="utf-8")
    first, second, third = read_prompts(str(file))
    assert columns_of([first]) == {"n": [None], "m": [None]}
    assert columns_of([second, third]) == {"n": [1, 3], "m": [None, 2]}
    mixed = tmp_path / "p.json"
    mixed.write_text('["a", {"prompt": "b", "n": 1}]', encoding="utf-8")
    assert [dict(row.columns) for row in read_prompts(str(mixed))] == [{"n": None}, {"n": 1}]


def test_json_lists_hold_objects_or_texts(tmp_path: Path):
    source = written(tmp_path, "p.json", '[{"prompt": "a", "tag": "x"},\n "b"]')
    assert read_prompts(source) == [PromptRow(0, "a", {"tag": "x"}), PromptRow(1, "b", {"tag": None})]


@pytest.mark.parametrize(("ending", "mark"), [("csv", ","), ("tsv", "\t"), ("CSV", ",")])
def test_tables_have_a_header(tmp_path: Path, ending: str, mark: str):
    lines = [["tag", "prompt"], ["x", f'"a{mark} b"'], ["", "c"]]
    source = written(tmp_path, f"p.{ending}", "\r\n".join(mark.join(line) for line in lines) + "\r\n")
    assert read_prompts(source) == [PromptRow(0, f"a{mark} b", {"tag": "x"}), PromptRow(1, "c", {"tag": ""})]


@pytest.mark.parametrize(
    ("content", "columns"),
    [
        ("prompt;color\na cat, black;red\n", {"color": "red"}),
        ('\n"prompt";"color"\n"a cat, black";"a;b"\n', {"color": "a;b"}),
        ("prompt\tcolor\na cat, black\tred\n", {"color": "red"}),
        ('prompt\n"a cat, black"\n', {}),
        ('prompt,a;b\n"a cat, black",red\n', {"a;b": "red"}),
    ],
)
def test_the_header_of_a_table_says_what_separates_its_cells(tmp_path: Path, content: str, columns: dict[str, str]):
    assert read_prompts(written(tmp_path, "p.csv", content)) == [PromptRow(0, "a cat, black", columns)]


def test_a_quoted_table_cell_may_span_lines(tmp_path: Path):
    source = written(tmp_path, "p.csv", 'prompt,n\n"two\nlines",1\nshort,2\n,3\n')
    assert "line 5" in refused(source)
    source = written(tmp_path, "q.csv", 'prompt,n\n"two\nlines",1\nshort,2\n')
    assert [row.text for row in read_prompts(source)] == ["two\nlines", "short"]


@pytest.mark.parametrize("row", ["a", "a,1,2", "a,1,2,3"])
def test_a_table_row_of_another_length_than_the_header_is_refused(tmp_path: Path, row: str):
    said = refused(written(tmp_path, "p.csv", f"prompt,n\nb,1\n\n{row}\n"))
    assert "line 4" in said
    assert f"{len(row.split(','))} cells and the header 2" in said


@pytest.mark.parametrize("name", ["p.csv", "p.jsonl", "p.txt", "p.json"])
def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path: Path, name: str):
    content = {"p.csv": "prompt\na\n", "p.jsonl": '{"prompt": "a"}\n', "p.txt": "a\n", "p.json": '["a"]'}[name]
    assert read_prompts(written(tmp_path, name, b"\xef\xbb\xbf" + content.encode())) == [PromptRow(0, "a")]


@pytest.mark.parametrize("character", ["\u2028", "\x85", "\x0b", "\x1d"])
def test_only_line_feeds_end_a_line(tmp_path: Path, character: str):
    text = f"a{character}b"
    assert [row.text for row in read_prompts(written(tmp_path, "p.txt", f"{text}\nc\n"))] == [text, "c"]
    if character >= " ":
        line = json.dumps({"prompt": text}, ensure_ascii=False)
        assert [row.text for row in read_prompts(written(tmp_path, "p.jsonl", f"{line}\n{line}\n"))] == [text, text]


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("p.jsonl", '{"prompt": "a"}\n\n{"prompt": "b"\n', ["line 3", "not JSON"]),
        ("p.jsonl", '{"prompt": "a"}\n{"text": "b", "n": 1}\n', ["line 2", "no `prompt`", "text, n"]),
        ("p.jsonl", '{"prompt": "  "}\n', ["line 1", "`prompt` is '  '"]),
        ("p.jsonl", '{"prompt": 5}\n', ["line 1", "`prompt` is 5"]),
        ("p.jsonl", '"a"\n""\n', ["line 2", "`prompt` is ''"]),
        ("p.jsonl", "[1]\n", ["line 1", "it has list"]),
        ("p.json", '[\n"a",\nb]', ["line 3", "not JSON"]),
        ("p.json", '{"prompt": "a"}', ["holds dict", "a JSON list"]),
        ("p.json", '["a", {"tag": "x"}]', ["entry 2", "no `prompt`", "tag"]),
        ("p.csv", "text,n\na,1\n", ["line 2", "no `prompt`", "text, n"]),
        ("p.csv", "prompt,n\n", ["holds no prompt"]),
        ("p.csv", 'prompt,n\na,1\n"OPEN" on a sign,2\nb,3\n', ["line 3", "not a table", "must end with one"]),
        ("p.csv", 'prompt,n\na,1\n"a sign,2\nb,3\n', ["line 3", "not a table"]),
        ("p.csv", "prompt_en,prompt_zh\na,b\n", ["line 2", "prompt_en and prompt_zh", "name one of them"]),
        ("p.txt", " \n\n", ["holds no prompt"]),
        ("p.txt", b"caf\xe9\n", ["not UTF-8", "byte 3"]),
        ("p.md", "a\n", [".txt, .jsonl, .json, .csv, .tsv or .parquet", "'.md'"]),
        ("prompts", "a\n", [".txt, .jsonl", "nothing"]),
    ],
)
def test_faults_name_file_and_line(tmp_path: Path, name: str, content: str | bytes, parts: list[str]):
    source = written(tmp_path, name, content)
    said = refused(source)
    assert source in said
    assert all(part in said for part in parts), said


def test_missing_sources_are_named(tmp_path: Path):
    assert "data.train" in refused(str(tmp_path / "none.txt"))
    assert "scenes:train, scenes:heldout or scenes:test" in refused("scenes:valid")


def test_the_embedded_sets_carry_what_the_verifier_reads():
    assert prompt_path("scenes:train").name == "train.jsonl"
    for source in ("scenes:train", "scenes:heldout", "scenes:test"):
        rows = read_prompts(source)
        assert [row.id for row in rows] == list(range(len(rows)))
        assert all(set(row.columns) == {"tag", "include"} for row in rows)


def test_columns_are_lists_with_none_where_one_is_lacking():
    rows = [PromptRow(0, "a", {"x": 1}), PromptRow(1, "b", {"y": 2}), PromptRow(2, "c", {"x": 3})]
    assert columns_of(rows) == {"x": [1, None, 3], "y": [None, 2, None]}
    assert columns_of([]) == {}


def stream(size: int = 7, seed: int = 0) -> PromptStream:
    return PromptStream([PromptRow(k, f"prompt {k}") for k in range(size)], seed)


def test_every_pass_holds_each_prompt_once_in_an_order_of_its_own():
    passes = [[row.id for row in stream().take(7 * epoch, 7)] for epoch in range(6)]
    assert all(sorted(order) == list(range(7)) for order in passes)
    assert len({tuple(order) for order in passes}) > 3
    assert any(order != sorted(order) for order in passes)


def test_random_access_equals_walking_through():
    whole = stream().take(0, 40)
    pieces = [row for first, count in ((0, 3), (3, 9), (12, 1), (13, 27)) for row in stream().take(first, count)]
    assert pieces == whole
    assert stream().take(17, 0) == []


def test_the_order_is_the_seeds():
    assert stream(seed=1).take(0, 30) == stream(seed=1).take(0, 30)
    assert stream(seed=1).take(0, 30) != stream(seed=2).take(0, 30)


TALK = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "3"}, {"role": "user", "content": "No."}]


def test_a_conversation_is_kept_and_called_by_its_last_message(tmp_path: Path):
    source = written(tmp_path, "p.jsonl", json.dumps({"prompt": TALK, "answer": 2}) + "\n")
    assert read_prompts(source) == [PromptRow(0, "No.", {"answer": 2}, tuple(TALK))]


def test_an_answer_that_is_begun_belongs_to_the_conversation(tmp_path: Path):
    [row] = read_prompts(written(tmp_path, "p.jsonl", json.dumps({"prompt": TALK[:2]}) + "\n"))
    assert (row.text, row.messages) == ("1+1=", tuple(TALK[:2]))
    wrapped = templated(row, "Think. {prompt}")
    assert (wrapped.text, [m["content"] for m in wrapped.messages or ()]) == ("Think. 1+1=", ["Think. 1+1=", "3"])


def test_a_content_in_parts_is_one_text(tmp_path: Path):
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]
    [row] = read_prompts(written(tmp_path, "p.jsonl", json.dumps({"prompt": [{"role": "user", "content": parts}]})))
    assert (row.text, row.messages) == ("1+1=", ({"role": "user", "content": "1+1="},))


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "must end with a message to be answered"),
        (TALK[1:2], "must end with a message to be answered"),
        ([*TALK[:2], TALK[1]], "must end with a message to be answered"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "video"}]}],
            "a message holds video, and a language model reads text or pictures; leave it out",
        ),
        (
            [{"role": "user", "content": [{"type": "image", "path": "a.png"}, {"type": "text", "text": "a"}]}],
            "a message holds a picture by its path; write {type: image} alone, and the path of the picture into a",
        ),
        ([{"role": "user", "content": []}], "a message of the role 'user', and its content is empty"),
        ([{"role": "user"}], "objects with `role` and `content`"),
        ([{"role": "user", "content": ""}], "a message of the role 'user', and its content is empty"),
        ([{"role": "user", "content": None}], "objects with `role` and `content`"),
        ([*TALK[:1], {"role": "assistant", "content": ""}], "its content is empty; write the beginning of the answer"),
        (
            [*TALK[:1], {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}, *TALK[:1]],
            "a message of the role 'assistant' has `tool_calls`, and only `role` and `content` are read; write it into",
        ),
        (
            [{"role": "user", "content": "a", "thinking": "b", "reasoning_content": "c"}],
            "has `thinking` and `reasoning",
        ),
        (["hello"], "objects with `role` and `content`"),
    ],
)
def test_faults_of_a_conversation_are_named(tmp_path: Path, prompt: object, said: str):
    source = written(tmp_path, "p.jsonl", json.dumps({"prompt": prompt}) + "\n")
    message = refused(source)
    assert said in message
    assert "line 1" in message


def test_a_message_may_say_nothing_and_have_empty_fields(tmp_path: Path):
    talk = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "a", "tool_calls": None, "name": "ann"},
        {"role": "assistant", "content": [], "thinking": ""},
        {"role": "tool", "content": "3"},
    ]
    (row,) = read_prompts(written(tmp_path, "p.jsonl", json.dumps({"prompt": talk}) + "\n"))
    assert row.messages is not None
    assert [message["content"] for message in row.messages] == ["", "a", "", "3"]
    assert row.text == "3"  # the message that is answered


def test_parquet_tables_are_read(tmp_path: Path):
    import pyarrow
    from pyarrow import parquet

    source = str(tmp_path / "p.parquet")
    parquet.write_table(pyarrow.table({"Prompt": ["a", "b"], "n": [1, None]}), source)
    assert read_prompts(source) == [PromptRow(0, "a", {"n": 1}), PromptRow(1, "b", {"n": None})]
    parquet.write_table(pyarrow.table({"prompt": [TALK]}), source)
    assert read_prompts(source)[0].messages == tuple(TALK)
    parquet.write_table(pyarrow.table({"text": ["a"]}), source)
    assert "row 1: no `prompt`" in refused(source)
    assert "is not a parquet file" in refused(written(tmp_path, "q.parquet", "a"))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install pyarrow" in refused(written(tmp_path, "p.parquet", "a"))


INCLUDE = [{"class": "dog", "count": 1}, {"class": "cat", "count": 2, "color": "red", "position": ["left of", 0]}]


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        (
            "evaluation_metadata.jsonl",
            json.dumps({"tag": "position", "include": INCLUDE, "prompt": "red cats left of a dog"}),
            [PromptRow(0, "red cats left of a dog", {"tag": "position", "include": INCLUDE})],
        ),
        ("ocr.txt", 'A sign that says "OPEN"', [PromptRow(0, 'A sign that says "OPEN"')]),
        ("hpdv2_anime.json", '["a", "b"]', [PromptRow(0, "a"), PromptRow(1, "b")]),
        (
            "hpdv2_train.json",
            '[{"prompt": "a", "file_path": ["1.jpg", "2.jpg"], "human_preference": [1, 0]}]',
            [PromptRow(0, "a", {"file_path": ["1.jpg", "2.jpg"], "human_preference": [1, 0]})],
        ),
        (
            "drawbench.csv",
            'Prompts,Category\nA red car.,Colors\n"A sign that says ""Hi"".",Text\n',
            [
                PromptRow(0, "A red car.", {"Category": "Colors"}),
                PromptRow(1, 'A sign that says "Hi".', {"Category": "Text"}),
            ],
        ),
        (
            "PartiPrompts.tsv",
            'Prompt\tCategory\tChallenge\tNote\n"A B" on a wall\tArtifacts\tWriting\t\nbond\tAbstract\tBasic\tis "x"\n',
            [
                PromptRow(0, '"A B" on a wall', {"Category": "Artifacts", "Challenge": "Writing", "Note": ""}),
                PromptRow(1, "bond", {"Category": "Abstract", "Challenge": "Basic", "Note": 'is "x"'}),
            ],
        ),
        (
            "test_prompts_en.csv",
            'index,prompt_en,sub_dims_en\n0,a fox,"{""Testpoints"": [""Style""]}"\n',
            [PromptRow(0, "a fox", {"index": "0", "sub_dims_en": '{"Testpoints": ["Style"]}'})],
        ),
        ("test_prompts_zh.csv", "index,prompt_zh\n7,一只狐狸\n", [PromptRow(0, "一只狐狸", {"index": "7"})]),
        ("videos.csv", "prompt_zh,prompt\n狐狸,a fox\n", [PromptRow(0, "a fox", {"prompt_zh": "狐狸"})]),
    ],
)  # fmt: skip
def test_files_of_the_field_are_read_as_they_come(tmp_path: Path, name: str, content: str, rows: list[PromptRow]):
    assert read_prompts(written(tmp_path, name, content)) == rows


def test_a_template_goes_around_the_last_message() -> None:
    plain = PromptRow(3, "2 {x} 2", {"answer": 4})
    assert templated(plain, "Think. {prompt}!") == PromptRow(3, "Think. 2 {x} 2!", {"answer": 4})
    talk = PromptRow(0, "why", {}, ({"role": "user", "content": "so"}, {"role": "user", "content": "why"}))
    found = templated(talk, "{prompt}?")
    assert found.text == "why?"
    assert found.messages == ({"role": "user", "content": "so"}, {"role": "user", "content": "why?"})
    assert talk.messages is not None
    assert talk.messages[-1]["content"] == "why"


def drawn(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (4, 2), "blue").save(folder / name)


def test_pictures_start_at_the_folder_of_the_prompt_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "files").mkdir()
    drawn(tmp_path / "files", "art/a.png", "b.png")
    source = written(tmp_path / "files", "p.csv", "prompt,image,tag\nred,art/a.png,x\nblue,b.png,y\n")
    monkeypatch.chdir(tmp_path)
    rows = with_pictures(read_prompts("files/p.csv"), "files/p.csv")
    assert [row.columns for row in rows] == [
        {"image": "files/art/a.png", "tag": "x"}, {"image": "files/b.png", "tag": "y"}
    ]  # fmt: skip
    assert rows[0].pictures == Picture(Path("files/art/a.png"))
    assert rows[0].prompt == "red"
    assert rows[0].prompt.call["image"].size == (4, 2)  # type: ignore[attr-defined]
    assert templated(rows[0], "so {prompt}").pictures == rows[0].pictures
    # From the working directory or not: the pictures are the file's.
    assert with_pictures(read_prompts(source), source)[0].pictures == Picture(tmp_path / "files" / "art" / "a.png")


def test_several_pictures_of_a_prompt_are_a_list(tmp_path: Path) -> None:
    drawn(tmp_path, "a.png", "b.png")
    lines = [{"prompt": "both", "image": ["a.png", "b.png"]}, {"prompt": "one", "image": ["a.png"]}]
    source = written(tmp_path, "p.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    both, one = with_pictures(read_prompts(source), source)
    assert both.columns["image"] == [str(tmp_path / "a.png"), str(tmp_path / "b.png")]
    assert [len(row.prompt.call["image"]) for row in (both, one)] == [2, 1]  # type: ignore[attr-defined]


def test_prompts_without_pictures_stay_as_they_are(tmp_path: Path) -> None:
    source = written(tmp_path, "p.csv", "prompt,image\nred,\nblue,\n")
    rows = read_prompts(source)
    assert with_pictures(rows, source) == rows
    assert rows[0].prompt == "red"


@pytest.mark.parametrize(
    ("second", "parts"),
    [
        ('"image": "none.png"', ["none.png does not exist", "folder of the prompt file"]),
        ('"image": "p.jsonl"', ["p.jsonl is not a picture that can be read"]),
        ('"image": "art"', ["art cannot be read"]),
        ('"image": ["a.png", 3]', ["`image` is ['a.png', 3]", "a list of paths, for every prompt"]),
        ('"image": {"bytes": null}', ["`image` is {'bytes': None}", "the path of a picture"]),
        ('"image": []', ["`image` is []"]),
        ('"n": 1', ["`image` is None", "for every prompt"]),
    ],
)
def test_faults_of_pictures_name_file_and_line(tmp_path: Path, second: str, parts: list[str]) -> None:
    drawn(tmp_path, "a.png", "art/a.png")
    source = written(tmp_path, "p.jsonl", f'{{"prompt": "x", "image": "a.png"}}\n\n{{"prompt": "y", {second}}}\n')
    with pytest.raises(ValueError, match="line 3") as caught:
        with_pictures(read_prompts(source), source)
    assert source in str(caught.value)
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize("ending", ["png", "tif"])
def test_a_picture_of_16_bits_keeps_its_greys(tmp_path: Path, ending: str):
    levels = np.linspace(0, 65_535, 600).reshape(20, 30).astype("uint16")
    Image.fromarray(levels).save(tmp_path / f"deep.{ending}")
    found = np.asarray(Picture(tmp_path / f"deep.{ending}").read())
    assert found.shape == (20, 30, 3)
    assert (found[..., 0] == levels // 257).all()


@pytest.mark.parametrize(("kind", "values"), [("float32", "0 to 1"), ("int32", "-5 to 99999")])
def test_a_picture_with_other_values_is_refused(tmp_path: Path, kind: str, values: str):
    low, high = (float(word) for word in values.split(" to "))
    Image.fromarray(np.linspace(low, high, 600).reshape(20, 30).astype(kind)).save(tmp_path / "deep.tif")
    with pytest.raises(ValueError, match=f"has values from {values}; save it with 8 or 16 bits a value"):
        Picture(tmp_path / "deep.tif").read()
