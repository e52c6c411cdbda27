"""The measurement of first runs makes real runs, times them, and scores them on held-out and on test prompts."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flowgrpo.cli.app import app


@pytest.mark.slow
def test_runs_are_timed_and_scored_on_both_kinds_of_prompts(random_pipeline: Path, tmp_path: Path) -> None:
    (tmp_path / "test.txt").write_text("a star\na red circle\n")
    words = [
        f"model.path={random_pipeline}", "sampler.steps=3", "rollout={prompts: 1, group: 4, batch: 4}", "select=[]",
        "objective.times=1", "rewards=[{name: jpeg_compressibility}]", "extensions=[]", "evaluate.every=2",
        "evaluate.prompts=2", "evaluate.rewards=[{name: jpeg_compressibility}]", "evaluate.seeds=1",
        "evaluate.quick={every: 1, prompts: 1}", "run.iterations=2", f"data.test={tmp_path / 'test.txt'}",
    ]  # fmt: skip
    done = CliRunner().invoke(app, ["bench", "first-run", *words, "--seeds", "3,4", "--out", str(tmp_path / "a.json")])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "a.json").read_text())
    assert [run["seed"] for run in found["runs"]] == [3, 4]
    for run in found["runs"]:
        # The base, and both iterations.
        assert len(run["figures_after"]) == 3
        assert 0 < run["figures_after"][0] <= run["figures_after"][-1] <= run["seconds"] + 0.2
        assert set(run["after"]) == set(found["before"]) == {"heldout", "test"}
        assert run["after"]["test"] != run["after"]["heldout"]
    gains = [run["after"]["test"][0] - found["before"]["test"][0] for run in found["runs"]]
    assert found["gains"]["test"] == pytest.approx(sum(gains) / 2)
    assert "first held-out figure after" in done.output
