"""`docs/measure_gpu.py`: the commands of the page of the GPU in one process."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.test_docs import script
from tests.text.test_families import folder_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def page_script() -> ModuleType:
    return script("measure_gpu")


def test_the_page_has_commands_that_measure(page_script: ModuleType) -> None:
    every = page_script.commands()
    assert len(every) > 10
    assert all(words[:3] == ["flowgrpo", "bench", "iteration"] or words[0] == "python" for words in every)
    assert all((ROOT / words[1]).is_file() for words in every if words[0] == "python")


def test_commands_are_chosen_by_number_range_and_word(page_script: ModuleType) -> None:
    every = [["flowgrpo", "bench", "a"], ["flowgrpo", "bench", "b"], ["python", "tests/c.py"], ["flowgrpo", "d"]]
    assert page_script.chosen(every, ["4", "2-3", "c.py", "4"]) == [3, 1, 2]
    assert page_script.chosen(every, ["bench"]) == [0, 1]
    for wrong in ("5", "3-5", "0", "4-2", "nothing"):
        with pytest.raises(ValueError, match=f"'{wrong}' is no command of the page; it has the numbers 1 to 4"):
            page_script.chosen(every, [wrong])


def test_the_commands_of_a_page_are_read(page_script: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```sh\nflowgrpo bench iteration 'a b' c\nflowgrpo train\n```\ntext\n```sh\npython tests/x.py\n```\n"
    )
    assert page_script.commands(page) == [["flowgrpo", "bench", "iteration", "a b", "c"], ["python", "tests/x.py"]]


@pytest.mark.slow
def test_commands_run_one_after_another_and_a_failure_stops_none(
    page_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    found = [
        ["flowgrpo", "bench", "iteration", "text", "model.path=nothing/there", "--out", "a/one.json"],
        [
            "flowgrpo", "bench", "iteration", "text", f"model.path={folder_of('llama', tmp_path)}",
            "rollout={prompts: 1, group: 2}", "generation={max_tokens: 4, max_prompt_tokens: 4}", "--repeats", "1",
            "--out", "a/two.json",
        ],
        ["python", "tests/optimizer_speed.py", "--repeats", "1"],
    ]  # fmt: skip
    monkeypatch.setattr(page_script, "commands", lambda: found)
    assert page_script.main(["1-3", "--out", str(tmp_path / "figures")]) == 1
    said = capsys.readouterr()
    assert json.loads((tmp_path / "figures" / "two.json").read_text())["completions"] == 2
    assert not (tmp_path / "a").exists()
    assert "nothing/there is not on this machine" in said.err
    assert said.out.splitlines()[-1] == "failed: 1"
    assert "ratio" in said.out
    assert page_script.main(["2", "3", "--minutes", "0"]) == 0
    assert capsys.readouterr().out == "not begun for lack of time: 2, 3\n"
