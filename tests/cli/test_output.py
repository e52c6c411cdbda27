"""The console of the commands, on a terminal and in a notebook."""

import pytest

from flowgrpo.cli.output import make_console


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
