"""The message for a path that is no run folder."""

import os
from pathlib import Path

from flowgrpo.intake.run_folders import no_run


def run(folder: Path, age: int = 0) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("name: x\n")
    os.utime(folder / "config.yaml", (1000 - age, 1000 - age))
    return folder


def test_a_folder_of_runs_lists_the_newest(tmp_path: Path) -> None:
    for age, name in enumerate(("d", "b", "c", "a", "e")):
        run(tmp_path / "runs" / name, age)
    runs = tmp_path / "runs"
    assert no_run(runs) == (
        f"{runs} is not a run folder (no config.yaml); it holds runs, so name one: {runs}/d, {runs}/b, {runs}/c or 2 "
        "older ones"
    )


def test_a_misspelt_name_is_led_to_the_run(tmp_path: Path) -> None:
    run(tmp_path / "first")
    assert no_run(tmp_path / "frist").endswith(f"; did you mean {tmp_path}/first?")
    assert no_run(tmp_path / "other").endswith("; give one that `flowgrpo train` wrote")
    assert no_run(str(tmp_path / "absent" / "x")).endswith("; give one that `flowgrpo train` wrote")
