"""The measurement of first runs makes real runs, times them, and scores them on held-out and on test prompts."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flowgrpo.bench import first_run as measured
from flowgrpo.bench.children import ChildFailed
from flowgrpo.cli.app import app
from flowgrpo.configs.load import load_image_recipe


def tiny(random_pipeline: Path, tmp_path: Path) -> list[str]:
    """Overrides for a run of a few seconds."""
    (tmp_path / "test.txt").write_text("a star\na red circle\n")
    return [
        f"model.path={random_pipeline}", "sampler.steps=3", "rollout={prompts: 1, group: 4, batch: 4}", "select=[]",
        "objective.times=1", "rewards=[{name: jpeg_compressibility}]", "extensions=[]", "evaluate.every=2",
        "evaluate.prompts=2", "evaluate.rewards=[{name: jpeg_compressibility}]", "evaluate.seeds=1",
        "evaluate.quick={every: 1, prompts: 1}", "run.iterations=2", f"data.test={tmp_path / 'test.txt'}",
    ]  # fmt: skip


@pytest.mark.slow
def test_runs_are_timed_and_scored_on_both_kinds_of_prompts(
    random_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    words = tiny(random_pipeline, tmp_path)
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
    assert found["failed"] == []
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.slow
def test_a_seed_that_fails_is_recorded_and_the_next_one_is_measured(
    random_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    reward = tmp_path / "luck.py"
    reward.write_text(
        "import sys\n\ndef luck(images, prompts):\n    if any('recipe-3' in word for word in sys.argv):\n"
        "        raise ValueError('seed 3 has no luck')\n    return [1.0] * len(images)\n"
    )
    words = [*tiny(random_pipeline, tmp_path), f"rewards=[{{name: '{reward}:luck'}}]"]
    done = CliRunner().invoke(app, ["bench", "first-run", *words, "--seeds", "3,4", "--out", str(tmp_path / "a.json")])
    assert isinstance(done.exception, ChildFailed)
    found = json.loads((tmp_path / "a.json").read_text())
    assert [run["seed"] for run in found["runs"]] == [4]
    assert found["gains"]["test"] == pytest.approx(found["runs"][0]["after"]["test"][0] - found["before"]["test"][0])
    (failed,) = found["failed"]
    assert failed["seed"] == 3
    assert "ended with status 1" in failed["error"]
    assert "seed 3 has no luck" in failed["error"]
    assert str(done.exception).startswith("1 of 2 seeds failed\nseed 3: ")
    # What the message names is there, and only that.
    (kept,) = tmp_path.glob("flowgrpo-bench-first-run-*/run")
    assert str(done.exception).endswith(f"\nthe files of what failed are kept in {kept.parent}")
    assert (kept / "run-3" / "config.yaml").is_file()
    assert not (kept / "run-4").exists()
    assert "mean gain of 1 of 2 seeds: " in done.output


def test_figures_are_handed_on_after_each_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(command: list[str], run: Path) -> tuple[float, list[float]]:
        if run.name == "run-1":
            raise ChildFailed("no luck")
        return 1.0, []

    monkeypatch.setattr(measured, "_timed", timed)
    monkeypatch.setattr(measured, "_score", lambda run, kind, base=False: (0.25 if base else 0.5, 0.1))
    found: list[dict[str, Any]] = []
    with pytest.raises(ChildFailed, match="1 of 3 seeds failed"):
        measured.first_run(load_image_recipe("default"), tmp_path / "new", lambda text: None, (0, 1, 2), found.append)
    assert [([run["seed"] for run in one["runs"]], len(one["failed"])) for one in found] == [
        ([0], 0), ([0], 1), ([0, 2], 1),
    ]  # fmt: skip
    assert [one["gains"] for one in found] == [{"heldout": 0.25, "test": 0.25}] * 3


def test_without_any_measured_seed_there_is_no_gain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(command: list[str], run: Path) -> tuple[float, list[float]]:
        raise ChildFailed("no luck")

    monkeypatch.setattr(measured, "_timed", timed)
    found: list[dict[str, Any]] = []
    with pytest.raises(ChildFailed, match="2 of 2 seeds failed"):
        measured.first_run(load_image_recipe("default"), tmp_path / "new", lambda text: None, (0, 1), found.append)
    assert (found[-1]["runs"], found[-1]["gains"], found[-1]["before"]) == ([], {}, {})
