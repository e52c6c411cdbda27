"""`flowgrpo watch`: the figures of a run and its gallery, from its beginning to its end."""

import json
import os
import socket
import subprocess
import sys
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Command
from tests.gallery.folders import add_records, data_of, record

CONFIG = {"name": "a run", "run": {"iterations": 4}, "evaluate": {"every": 2, "quick": None}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has just begun: a recipe and the lock of its process."""
    folder = tmp_path / "run"
    (folder / "samples").mkdir(parents=True)
    (folder / "config.yaml").write_text(json.dumps(CONFIG))
    lock(folder)
    return folder


def lock(folder: Path, process: object = 4321, host: object = None) -> None:
    note = {"process": process, "host": socket.gethostname() if host is None else host, "since": "today"}
    (folder / ".flowgrpo-lock").write_text(json.dumps(note))


def log(run: Path, *records: dict[str, Any]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in records)


def iteration(number: int, **more: Any) -> dict[str, Any]:
    return {"iteration": number, "reward/total": number / 10, "reward/gold": number / 10, "time/rest": 2.0, **more}


@pytest.fixture
def watching(command: Command, run: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """A function that watches the run. Between two readings of the run, the next of the given functions is called.

    After the last function the process of the run is gone. The result has the lines that were printed.
    """

    def watch(*events: Callable[[], object], words: tuple[str, ...] = (), gone: bool = True) -> list[str]:
        waiting = list(events)

        def sleep(seconds: float) -> None:
            assert waiting, "it still waits although the run is over"
            waiting.pop(0)()

        def kill(process: int, number: int) -> None:
            assert (process, number) == (4321, 0)
            if gone and not waiting:
                raise ProcessLookupError

        monkeypatch.setattr("flowgrpo.cli.watching.time.sleep", sleep)
        monkeypatch.setattr("flowgrpo.cli.watching.os.kill", kill)
        status, output, errors = command("watch", "run", *words)
        assert (status, errors) == (0, "")
        assert not waiting
        return output.splitlines()

    return watch


def test_a_run_is_followed_from_before_its_first_sample_to_its_end(run: Path, watching: Callable[..., list[str]]):
    pages: list[bool] = []

    def samples(at: int) -> None:
        add_records(run, [record(at, 0, 0, at / 10)])

    def look() -> None:
        pages.append(data_of(run / "gallery" / "index.html")["site"]["live"])

    lines = watching(
        lambda: None,
        lambda: samples(0),
        lambda: log(run, iteration(0, **{"eval/gold": 0.25, "eval_error/gold": 0.1}), iteration(1)),
        look,
        lambda: log(run, iteration(2, **{"eval/gold": 0.5}), iteration(3), {"iteration": 4, "eval/gold": 0.75}),
        lambda: (run / "lora").mkdir(),
    )
    page = (run / "gallery" / "index.html").resolve().as_uri()
    assert lines == [
        "run: 0 of 4 iterations are done",
        f"gallery: {page}",
        "held-out after 0 iterations: gold 0.2500",
        "iteration  reward  trend held-out s/iter   left",
        "      1/4  0.0000      ·   0.2500   2.00   0:06",
        "      2/4  0.1000      ·   0.2500   2.00   0:04",
        "held-out after 2 iterations: gold 0.5000",
        "      3/4  0.2000      ·   0.5000   2.00   0:02",
        "      4/4  0.3000      ·   0.5000   2.00   0:00",
        "held-out after 4 iterations: gold 0.7500  ▁▅█",
        "the run has ended; trained weights: run/lora",
    ]
    # The open page renews itself while the run goes on, and no longer afterwards.
    assert pages == [True]
    assert data_of(run / "gallery" / "index.html")["site"]["live"] is False


def test_only_the_last_iterations_of_the_past_are_printed_and_the_trend_knows_the_others(
    run: Path, watching: Callable[..., list[str]]
):
    (run / "config.yaml").write_text(json.dumps({**CONFIG, "run": {"iterations": 20}}))
    log(run, *(iteration(k) for k in range(12)))
    lines = watching(lambda: None, words=("--last", "2"))
    assert lines[0] == "run: 12 of 20 iterations are done"
    assert [line.split()[0] for line in lines[2:4]] == ["11/20", "12/20"]
    assert lines[3].split()[2] == "↑0.600"
    assert lines[4] == "the run was interrupted; go on with `flowgrpo resume run`"
    assert len(lines) == 5


def test_an_iteration_without_a_total_or_without_any_score_counts(run: Path, watching: Callable[..., list[str]]):
    """A reward may score no sample of an iteration; its mean and the total are then null."""
    none = {"reward/total": None}
    log(run, iteration(0, **none), iteration(1), iteration(2, **none, **{"reward/gold": None}))
    lines = watching(lambda: log(run, iteration(3, **none), {"iteration": 4, "eval/gold": 0.75}))
    assert lines[0] == "run: 3 of 4 iterations are done"
    assert [line.split()[0] for line in lines if "/4 " in line] == ["1/4", "2/4", "3/4", "4/4"]


def test_a_resumed_run_that_went_back_is_followed(run: Path, watching: Callable[..., list[str]]):
    def back() -> None:
        (run / "metrics.jsonl").write_text(json.dumps(iteration(0)) + "\n")

    log(run, *(iteration(k) for k in range(3)))
    lines = watching(back, lambda: log(run, iteration(1)), lambda: None)
    assert lines[-3] == "the run went back to iteration 1"
    assert lines[-2].split()[0] == "2/4"


def test_a_run_has_ended_when_its_lock_is_free_though_its_notebook_lives_on(
    run: Path, watching: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
):
    held = iter([True, False])
    monkeypatch.setattr("flowgrpo.training.folder.lock.held", lambda folder: next(held))

    def results() -> None:
        log(run, {"iteration": 4, "eval/gold": 0.5})
        (run / "lora").mkdir()

    # The lock is not asked before the results are there. The gallery may still be in the making then.
    lines = watching(lambda: None, lambda: results(), lambda: None, lambda: None, gone=False)
    assert lines[-1] == "the run has ended; trained weights: run/lora"


def test_ctrl_c_ends_the_watching_alone(run: Path, watching: Callable[..., list[str]]):
    def interrupt() -> None:
        raise KeyboardInterrupt

    add_records(run, [record(0, 0, 0, 0.0)])
    lines = watching(lambda: None, interrupt, gone=False)
    assert lines[-1] == "no longer watching; the run goes on"
    assert data_of(run / "gallery" / "index.html")["site"]["live"] is False


def test_of_a_run_on_another_machine_the_metrics_tell_the_end(run: Path, watching: Callable[..., list[str]]):
    lock(run, host="elsewhere")
    log(run, iteration(3))
    lines = watching(lambda: None, lambda: log(run, {"iteration": 4, "eval/gold": 0.75}))
    assert "held-out after 4 iterations: gold 0.7500" in lines


@pytest.mark.parametrize("note", ["", "[]", "null", '{"process": "x", "host": 3}', '{"process": -1}', "\xff"])
def test_a_lock_that_says_nothing_is_no_reason_to_end(run: Path, watching: Callable[..., list[str]], note: str):
    (run / ".flowgrpo-lock").write_text(note, encoding="latin-1")
    lines = watching(lambda: None, lambda: log(run, {"iteration": 4}))
    assert lines[-1] == "the run has made its final evaluation"


def test_names_in_the_metrics_cannot_command_a_terminal(run: Path, watching: Callable[..., list[str]]):
    log(run, iteration(0, **{"reward/\x1b[2Jred": 1.0, "symptom/\x1b[2J": 3, "symptom/diversity": 6, "eval/\x07": 1}))
    lines = watching(lambda: None)
    assert not {"\x1b", "\x07"} & set("".join(lines))
    assert "warning: diversity for 6 iterations" in lines


def test_the_page_is_opened_once_if_asked(
    run: Path, watching: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
):
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    add_records(run, [record(0, 0, 0, 0.0)])
    watching(lambda: None, lambda: add_records(run, [record(2, 0, 0, 0.0)]), lambda: None, words=("--open",))
    assert opened == [(run / "gallery" / "index.html").resolve().as_uri()]


def test_what_is_no_run_is_refused(command: Command, tmp_path: Path):
    for folder in ("nothing", "."):
        status, _, errors = command("watch", folder)
        assert status == 1
        assert "not a run folder" in errors
    assert "--every is nan" in command("watch", ".", "--every", "nan")[2]


@pytest.mark.slow
def test_a_training_in_another_process_is_followed_to_its_end(command: Command, monkeypatch: pytest.MonkeyPatch):
    words = ["run.iterations=3", "evaluate.prompts=8", "rollout.prompts=2", "evaluate.every=2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-m", "flowgrpo", "train", "text", *words, "--out", "run"],
        env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    # The first line comes before the folder, and the second line when the lock has its process.
    said = [process.stdout.readline() for _ in range(2)]

    def sleep(seconds: float) -> None:
        said.extend([process.stdout.readline()] if process.poll() is None else [])  # type: ignore[union-attr]

    monkeypatch.setattr("flowgrpo.cli.watching.time.sleep", sleep)
    status, output, errors = command("watch", "run")
    said += process.stdout.read().splitlines()
    assert (status, errors, process.wait(60)) == (0, "", 0)
    rows = [line.split()[:2] for line in "\n".join(said).splitlines() if "/3 " in line]
    assert [line.split()[:2] for line in output.splitlines() if "/3 " in line] == rows
    assert len(rows) == 3
    assert output.splitlines()[-1] == "the run has ended; trained weights: run/model"
