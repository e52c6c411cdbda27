"""A checkpoint is sampled, evaluated and exported with the weights with which its run was evaluated at that moment."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

from flowgrpo.bench.interruption import contents
from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import dump_recipe, load_recipe
from flowgrpo.inference.checkpoints import find_checkpoint
from flowgrpo.inference.evaluation import evaluate_model
from flowgrpo.inference.exporting import export_weights
from flowgrpo.inference.image_samples import sample_images
from flowgrpo.text.model import load_language_model
from flowgrpo.training.folder.checkpoint import verify_checkpoint
from flowgrpo.training.session import start
from tests.conftest import Command
from tests.inference.test_inference import shown
from tests.training.family_runs import evaluations, load_as_the_kit_does, scores_of, trained

pytestmark = pytest.mark.slow

AVERAGED = "optimizer={learning_rate: 0.02, ema: {decay: 0.5, every: 1}}"
THREE = "run={iterations: 3, checkpoint_every: 1, keep: 5, sample_every: 3}"


def weights_of(folder: Path) -> dict[str, bytes]:
    """The files of an exported folder as `contents` compares them."""
    with tempfile.TemporaryDirectory() as place:
        run = Path(place)
        shutil.copytree(folder, run / "lora")
        (run / "metrics.jsonl").write_text("")
        return {name: read for name, read in contents(run).items() if name.startswith("lora/")}


def require_the_runs_own(run: Path, result: str, folder: Path) -> None:
    """The last checkpoint is the result, and an earlier one is what the run evaluated then."""
    for which in ("3", "latest"):
        export_weights(str(run), folder / which, checkpoint=which)
        assert weights_of(folder / which) == weights_of(run / result)
    for number in (1, 2):
        found = evaluate_model(str(run), load_recipe(run / "config.yaml"), checkpoint=str(number))
        assert {name: mean for name, (mean, _, _) in found.items()} == scores_of(run, number)
    assert scores_of(run, 1) != scores_of(run, 2) != scores_of(run, 3)


@pytest.mark.parametrize(
    ("train", "changes"),
    [("lora", []), ("full", []), ("lora", ["model.dtype=bfloat16"]), ("full", ["optimizer.ema=null"])],
)
def test_a_checkpoint_of_images(
    train: str, changes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_as_the_kit_does("FluxPipeline", monkeypatch)
    run = trained("FluxPipeline", tmp_path, train, AVERAGED, THREE, *changes)
    require_the_runs_own(run, {"lora": "lora", "full": "pipeline"}[train], tmp_path)
    record = evaluations(run, 2)[1]
    [path] = sample_images(str(run), [record["prompt"]], tmp_path / "one", noise=record["noise"], checkpoint="2")
    assert np.array_equal(shown(path), shown(run / "samples" / record["image"]))
    shutil.rmtree(run / {"lora": "lora", "full": "pipeline"}[train])
    [path] = sample_images(str(run), [record["prompt"]], tmp_path / "two", noise=record["noise"], checkpoint="2")
    assert np.array_equal(shown(path), shown(run / "samples" / record["image"]))
    with pytest.raises(ValueError, match=r"no trained weights yet; .*--checkpoint 3 \(there are 1, 2, 3\)"):
        sample_images(str(run), ["a star"], tmp_path / "three")


@pytest.mark.parametrize(("train", "rate"), [("lora", 0.1), ("full", 0.01)])
def test_a_checkpoint_of_text(small_text: list[str], train: str, rate: float, tmp_path: Path) -> None:
    words = [*small_text, f"model.train={train}", "evaluate.every=1", THREE]
    words += ["optimizer.ema={decay: 0.5, every: 1}", f"optimizer.learning_rate={rate}"]
    run = tmp_path / "run"
    start(load_recipe("text", words), run).trainer(Silent()).train()
    require_the_runs_own(run, {"lora": "lora", "full": "model"}[train], tmp_path)


def test_the_average_matters(small_text: list[str], tmp_path: Path) -> None:
    words = [*small_text, "optimizer.ema={decay: 0.5, every: 1}", THREE]
    run = tmp_path / "run"
    start(load_recipe("text", words), run).trainer(Silent()).train()
    (run / "config.yaml").write_text(dump_recipe(load_recipe(run / "config.yaml", ["optimizer.ema=null"])))
    export_weights(str(run), tmp_path / "plain", checkpoint="latest")
    assert weights_of(tmp_path / "plain") != weights_of(run / "lora")


def test_what_cannot_be_taken_is_said(small_text: list[str], tmp_path: Path, command: Command) -> None:
    run = tmp_path / "run"
    start(load_recipe("text", [*small_text, THREE]), run).trainer(Silent()).train()
    for which in ("4", "two", "-1", "9" * 30):
        with pytest.raises(ValueError, match=r"no checkpoint '.*'; it keeps 1, 2, 3"):
            find_checkpoint(str(run), which)
    for words, said in (
        (("sample", "1+1=", "--model", str(run), "--base", "--checkpoint", "2"), "leave one of them out"),
        (("evaluate", str(run), "--base", "--checkpoint", "2"), "leave one of them out"),
        (("evaluate", "arithmetic", "--checkpoint", "2"), "arithmetic is not a run, so it has no checkpoints"),
        (("export", "arithmetic", "--out", "new"), "arithmetic is not a run folder"),
        (("export", str(run), "--out", str(run)), f"{run} exists; name a new folder with --out"),
    ):
        status, _, errors = command(*words)
        assert (status, said in errors) == (1, True), errors
    status, output, errors = command("export", str(run), "--out", "new")
    assert (status, output, errors) == (0, "written to new\n", "")
    assert weights_of(tmp_path / "new") == weights_of(run / "lora")
    status, output, errors = command("sample", "1+1=", "--model", str(run), "--checkpoint", "2", "--out", "made")
    assert (status, errors) == (0, "")
    assert '"iteration": 2' in (tmp_path / "made" / "index.jsonl").read_text()
    file = run / "checkpoints" / "iter-000002" / "trained.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"iter-000002/trained.safetensors has \d+ bytes of"):
        export_weights(str(run), tmp_path / "damaged", checkpoint="2")
    file = run / "lora" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    damaged = "adapter_model.safetensors is cut short or damaged: it has"
    with pytest.raises(ValueError, match=rf"{damaged} .*, or take a checkpoint: --checkpoint 3"):
        export_weights(str(run), tmp_path / "damaged")
    assert not (tmp_path / "damaged").exists()
    with pytest.raises(ValueError, match=rf"{damaged} .*, or name a checkpoint of the run with --checkpoint"):
        evaluate_model(str(run), load_recipe(run / "config.yaml"))
    outside = tmp_path / "outside"
    outside.mkdir()
    (run / "checkpoints" / "iter-000009").symlink_to(outside)
    with pytest.raises(ValueError, match="links that lead out of it"):
        find_checkpoint(str(run), "latest")


def test_the_newest_checkpoint_of_a_run_that_goes_on(
    small_text: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run may remove a checkpoint, once it has a newer one, while somebody reads it."""
    run = tmp_path / "run"
    start(load_recipe("text", [*small_text, THREE]), run).trainer(Silent()).train()
    newest = run / "checkpoints" / "iter-000003"

    def removed(folder: Path) -> None:
        if newest.is_dir():
            shutil.rmtree(newest)
        verify_checkpoint(folder)

    monkeypatch.setattr("flowgrpo.inference.checkpoints.verify_checkpoint", removed)
    assert find_checkpoint(str(run), "latest").name == "iter-000002"
    second = run / "checkpoints" / "iter-000002"

    def loading(*given: object, **more: object) -> object:
        shutil.rmtree(second)
        return load_language_model(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("flowgrpo.inference.text_inference.load_language_model", loading)
    with pytest.raises(ValueError, match=r"iter-000002 is gone: the run goes on, .* or keep more .* with run\.keep"):
        evaluate_model(str(run), load_recipe(run / "config.yaml"), checkpoint="latest")
