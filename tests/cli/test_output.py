"""The console of the commands, on a terminal and in a notebook."""

import os
from pathlib import Path

import pytest

from flowgrpo.cli.output import make_console, output_file, output_folder, say
from flowgrpo.intake.visible import on_one_line, visible


@pytest.mark.parametrize(
    ("variables", "moves"),
    [
        ({}, True),
        ({"JPY_PARENT_PID": "7"}, False),
        ({"MPLBACKEND": "module://matplotlib_inline.backend_inline"}, False),
        ({"MPLBACKEND": "agg"}, True),
    ],
)
def test_no_line_moves_in_a_notebook_but_its_lines_have_colours(
    variables: dict[str, str], moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("JPY_PARENT_PID", "MPLBACKEND", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-color", **variables}.items():
        monkeypatch.setenv(name, value)
    console = make_console()
    monkeypatch.setattr(type(console.file), "isatty", lambda file: True, raising=False)
    assert console.is_interactive is moves
    assert console.is_terminal
    assert console.color_system is not None


def test_what_a_terminal_would_take_for_commands_is_written_as_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert visible("up \x1b[1A\x1b[M\x07 \x9b2J\u202eend") == r"up \x1b[1A\x1b[M\x07 \x9b2J\u202eend"
    assert visible("a line\n\tand é 漢字 👩‍🚀") == "a line\n\tand é 漢字 👩‍🚀"
    assert on_one_line("a\nb\r") == r"a\nb\r"
    say("a\x1b]0;own\x07")
    assert capsys.readouterr().out == "a\\x1b]0;own\\x07\n"


def test_a_place_that_may_not_be_written_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old.json").write_text("{}")
    # The superuser may write anywhere, so the answer of the system is put in its place.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    for path in (tmp_path / "new.json", tmp_path / "deep" / "new.json"):
        with pytest.raises(ValueError, match=rf"{path} cannot be made, because {tmp_path} may not be written in; name"):
            output_file(path, ".json")
        with pytest.raises(ValueError, match="may not be written in"):
            output_folder(path)
    output_file(tmp_path / "old.json", ".json")
