"""Runs whose completions come about in stages: the same in two processes as in one, and readable as a gallery."""

from pathlib import Path

import pytest

from tests.training.test_text_processes import both, lines_of, overrides  # noqa: F401

pytestmark = pytest.mark.slow


def test_two_processes_continue_the_same_segments(overrides: list[str], tmp_path: Path) -> None:  # noqa: F811
    lines = ["rollout.form={name: segments, every: 2, below: 1.0, samples: 2}", "credit=segments", "advantage=null"]
    both([*overrides, "extensions=[]", *lines], tmp_path)
    saved = lines_of(tmp_path / "one" / "samples" / "index.jsonl")
    continued = [line for line in saved if "token" in line]
    assert continued
    assert all(isinstance(line["completion"], str) for line in continued)
