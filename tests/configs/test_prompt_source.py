"""The text that names prompts: what follows the `?`, and ids of the hub."""

from pathlib import Path

import pytest

from flowgrpo.configs.prompt_source import PromptSource, prompt_source


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("prompts.txt", PromptSource("prompts.txt")),
        ("scenes:train", PromptSource("scenes:train")),
        ("set?split=train[:10%]&column=caption", PromptSource("set", split="train[:10%]", column="caption")),
        (
            "hub:owner/my-set_2.0?split=test&config=main&revision=refs/convert/parquet&image=source",
            PromptSource(
                "owner/my-set_2.0", True, "test", "main", "refs/convert/parquet", image="source"
            ),
        ),
        ("hub:squad", PromptSource("squad", True)),
    ],
)  # fmt: skip
def test_a_source_is_read_and_written_back(text: str, source: PromptSource):
    assert prompt_source(text) == source
    assert str(source) == text


def test_a_path_may_hold_a_question_mark(tmp_path: Path):
    file = tmp_path / "what?split=no.txt"
    file.write_text("a\n")
    assert prompt_source(str(file)) == PromptSource(str(file))
    file.unlink()
    assert prompt_source(str(file)).split == "no.txt"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("set?splits=test", "'splits=test' after the `?` says nothing"),
        ("set?split", "'split' after the `?` says nothing"),
        ("set?split=", "column=… (the column with the prompts)"),
        ("set?", "'' after the `?`"),
        ("set?split=a&split=b", "split stands twice"),
        ("hub:", "write hub:owner/name"),
        ("hub:a/b/c", "write hub:owner/name"),
        ("hub:../b", "write hub:owner/name"),
        ("hub:https://a/b", "write hub:owner/name"),
    ],
)
def test_faults_say_what_may_be_written(text: str, said: str):
    with pytest.raises(ValueError, match=r".") as caught:
        prompt_source(text)
    assert said in str(caught.value)
    assert repr(text) in str(caught.value)
