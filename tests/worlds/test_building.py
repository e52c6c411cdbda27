"""Building of the embedded world: a whole build at the smallest scale, and what happens around interruptions."""

import json
import math
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

from flowgrpo.inference.image_samples import model_images
from flowgrpo.training.data import read_prompts
from flowgrpo.worlds import building as build
from flowgrpo.worlds.building import Measured, build_all, correlation, scaled_settings
from flowgrpo.worlds.scenes.flow import BuildSettings
from flowgrpo.worlds.scenes.proxy_scorer import Proxy

SCALE = 1e-6
MEASURED = Measured(24, 0.5, 0.1, {"colors": 0.5}, None, 0.25)


def silent(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("the denoiser is built with torch 2.9 or newer")
    out = tmp_path_factory.mktemp("build") / "scenes"
    lines: list[str] = []
    build_all(out, seed=3, scale=SCALE, report=lines.append)
    return out, lines


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the parts made, by stand-ins that write one file each."""
    made: list[str] = []

    def stand_in(name: str) -> Any:
        def write(folder: Path, *arguments: Any, **keywords: Any) -> None:
            folder.mkdir(exist_ok=True)
            (folder / "file").write_text(name)
            made.append(name)

        return write

    monkeypatch.setattr(build, "train_flow", stand_in("denoiser"))
    monkeypatch.setattr(build, "continue_flow", lambda source, *rest: stand_in("pipeline")(*rest))
    monkeypatch.setattr(build, "train_proxy", stand_in("proxy"))
    monkeypatch.setattr(build, "measure", lambda out, share: MEASURED)
    return made


@pytest.mark.slow
def test_the_folder_holds_what_the_package_ships(built: tuple[Path, list[str]]) -> None:
    out, _ = built
    assert sorted(path.name for path in out.iterdir()) == ["build.json", "data", "denoiser", "pipeline", "proxy"]
    shipped = resources.files("flowgrpo.worlds.scenes") / "data"
    for name in ("train.jsonl", "heldout.jsonl", "test.jsonl"):
        assert (out / "data" / name).read_text() == (shipped / name).read_text()
    images = model_images(str(out / "pipeline"), ["a red circle"], [1], ["evaluate.steps=1"])
    assert images.shape == (1, 3, 64, 64)
    assert Proxy(str(out / "proxy"))(images, ["a red circle"]).isfinite().all()
    settings = json.loads((out / "pipeline" / "flowgrpo.json").read_text())["build"]
    assert settings == vars(scaled_settings(3, SCALE))
    assert settings["seed"] == 3
    assert not [file for file in out.rglob("*.json") if str(out) in file.read_text()]


@pytest.mark.slow
def test_it_is_measured_on_every_skill(built: tuple[Path, list[str]]) -> None:
    out, lines = built
    record = json.loads((out / "build.json").read_text())
    assert (record["seed"], record["scale"], record["finished"]) == (3, SCALE, True)
    measured = record["measured"]
    rows = read_prompts(str(out / "data" / "heldout.jsonl"))[: measured["images"]]
    assert measured["images"] == 24
    assert set(measured["gold_by_skill"]) == {row.columns["tag"] for row in rows}
    # The six skills take turns, so four rows of each.
    assert measured["gold"] == pytest.approx(sum(measured["gold_by_skill"].values()) / 6)
    assert any(line.startswith("gold ") and "24 held-out prompts" in line for line in lines)


@pytest.mark.slow
def test_a_finished_build_is_refused(built: tuple[Path, list[str]]) -> None:
    with pytest.raises(ValueError, match="finished build"):
        build_all(built[0], seed=3, scale=SCALE, report=silent)


def test_foreign_folders_files_and_scales_are_refused_untouched(tmp_path: Path, calls: list[str]) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        build_all(tmp_path, seed=0, scale=1.0, report=silent)
    with pytest.raises(ValueError, match="is a file"):
        build_all(tmp_path / "mine.txt", seed=0, scale=1.0, report=silent)
    for scale in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="scale"):
            build_all(tmp_path / "new", seed=0, scale=scale, report=silent)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert calls == []


def test_an_interrupted_build_continues_with_the_part_it_was_in(
    tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(folder: Path, *arguments: Any) -> None:
        folder.mkdir()
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(build, "train_flow", interrupted)
        with pytest.raises(KeyboardInterrupt):
            build_all(out, seed=1, scale=0.5, report=silent)
    assert calls == ["proxy"]
    assert not (out / "denoiser").exists()
    for seed, scale in ((2, 0.5), (1, 1.0)):
        with pytest.raises(ValueError, match=r"seed 1 and scale 0\.5"):
            build_all(out, seed=seed, scale=scale, report=silent)
    lines: list[str] = []
    build_all(out, seed=1, scale=0.5, report=lines.append)
    assert calls == ["proxy", "denoiser", "pipeline"]
    assert [path.name for path in (out / "pipeline").iterdir()] == ["file"]
    assert sorted(path.name for path in out.iterdir()) == ["build.json", "data", "denoiser", "pipeline", "proxy"]
    assert "proxy: already complete" in lines
    assert json.loads((out / "build.json").read_text())["measured"]["correlation_partial"] == 0.25


def test_an_empty_folder_is_used(tmp_path: Path, calls: list[str]) -> None:
    build_all(tmp_path, seed=0, scale=1.0, report=silent)
    assert sorted(calls) == ["denoiser", "pipeline", "proxy"]


def test_full_scale_is_the_shipped_setting_and_small_scales_still_fill_a_batch() -> None:
    assert scaled_settings(7, 1.0) == BuildSettings(seed=7)
    half = scaled_settings(0, 0.5)
    assert (half.steps, half.vae_steps, half.scenes, half.second_steps) == (2_100, 1_000, 30_000, 750)
    least = scaled_settings(0, SCALE)
    assert least.scenes >= least.batch
    assert min(least.steps, least.vae_steps, least.warmup, least.second_steps) >= 1


def test_correlation_by_hand() -> None:
    x = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    assert correlation(x, 3 - 2 * x) == pytest.approx(-1)
    # Deviations (-4, -1, 5)/3 and (-1, 2, -1)/3: product sum (4 - 2 - 5)/9, squares 42/9 and 6/9.
    assert correlation(x, torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)) == pytest.approx(-3 / math.sqrt(42 * 6))
    assert correlation(x, torch.ones(3, dtype=torch.float64)) is None
    assert correlation(x[:1], x[:1]) is None
