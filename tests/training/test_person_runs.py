"""Runs that wait for a person's marks, interrupted while they wait."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from flowgrpo.rewards.person import person
from tests.conftest import Command
from tests.rewards.marking import Marker, by_content

RECIPE = """
base: default
name: by-eye
data: {heldout: null, test: null}
run: {iterations: 2, checkpoint_every: 1}
rollout: {prompts: 2, group: 4, batch: 8}
rewards: [{name: person, options: {answers: marks.jsonl}}]
"""


@pytest.mark.slow
def test_a_run_that_is_interrupted_while_it_waits_asks_about_nothing_twice(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[int] = []
    stops_at = 3

    def judge(samples):
        asked.append(len(samples))
        if len(asked) == stops_at + 1:
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait()  # the person does not answer any more
        return by_content(samples)

    monkeypatch.setattr(person, "announce", lambda url: Marker(url, judge))
    (tmp_path / "run.yaml").write_text(RECIPE)
    status, output, errors = command("train", "run.yaml", "--out", "stopped")
    assert status != 0
    assert "flowgrpo resume stopped" in output + errors
    status, _, errors = command("resume", "stopped")
    assert status == 0, errors
    assert len(asked) == 5  # four prompts; the person is asked again about the one that was not answered
    (tmp_path / "marks.jsonl").rename(tmp_path / "kept.jsonl")
    status, _, errors = command("train", "run.yaml", "--out", "whole")
    assert status == 0, errors
    assert len(asked) == 9
    texts = [(tmp_path / run / "metrics.jsonl").read_text().splitlines() for run in ("stopped", "whole")]
    one, two = (
        [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")} for line in text] for text in texts
    )
    assert one == two
    assert {line["reward/person"] for line in two} - {None}
    marks = [
        [json.loads(line)["marks"] for line in (tmp_path / name).read_text().splitlines()]
        for name in ("kept.jsonl", "marks.jsonl")
    ]
    assert marks[0] == marks[1]
