"""Sampling and evaluation outside a run agree with the run's own."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flowgrpo.configs.load import load_recipe
from flowgrpo.core.addressing import address
from flowgrpo.training.bench import Silent
from flowgrpo.training.checking import read_data
from flowgrpo.training.inference import evaluate_model, generate, open_model, sample_images
from flowgrpo.training.samples import EVALUATION_SEED
from flowgrpo.training.session import start

JPEG = "evaluate.rewards=[{name: jpeg_incompressibility}]"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, small: list[str]) -> tuple[Path, list[dict]]:
    """A short run with a strong learning rate, and what it evaluated."""
    seen: list[dict] = []

    class Watching(Silent):
        def evaluation(self, iteration: int, record: dict) -> None:
            seen.append(record)

    folder = tmp_path_factory.mktemp("inference") / "run"
    strong = ["run.iterations=2", "optimizer={learning_rate: 0.05, ema: null}"]
    recipe = load_recipe("default", [*small, JPEG, *strong])
    start(recipe, folder).trainer(Watching()).train()
    return folder, seen


def _evaluated(folder: Path, iteration: int) -> torch.Tensor:
    """Images [N, 3, 64, 64] that a run saved of one evaluation."""
    files = sorted((folder / "samples" / f"iter-{iteration:06d}").glob("eval-*.png"))
    pixels = np.stack([np.asarray(Image.open(file)) for file in files])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255


def test_an_image_of_the_index_is_made_again(finished: tuple[Path, list[dict]], tmp_path: Path) -> None:
    folder, _ = finished
    records = [json.loads(line) for line in (folder / "samples" / "index.jsonl").read_text().splitlines()]
    last = [r for r in records if r["phase"] == "eval" and r["iteration"] == 2]
    assert len({r["noise"] for r in last}) == len(last)
    steps = load_recipe(folder / "config.yaml").sampler.steps
    for number, record in enumerate(last[:2]):
        [path] = sample_images(
            str(folder), [record["prompt"]], tmp_path / str(number), steps=steps, seed=0, count=1, noise=record["noise"]
        )
        own, again = (np.asarray(Image.open(p), dtype=int) for p in (folder / "samples" / record["image"], path))
        assert abs(own - again).max() <= 1
    with pytest.raises(ValueError, match="--noise is of one image"):
        sample_images(str(folder), ["a star"], tmp_path, steps=steps, seed=0, count=2, noise=1)


def test_a_plain_pipeline_with_the_saved_lora_does_as_the_run_did(
    finished: tuple[Path, list[dict]], small: list[str], random_pipeline: Path
) -> None:
    folder, seen = finished
    recipe = load_recipe("default", [*small, JPEG])
    name = "jpeg_incompressibility"
    rows = read_data(recipe).heldout
    texts = [row.text for row in rows for _ in range(2)]
    keys = [address(address(EVALUATION_SEED, 2, row.id), 0, seed) for row in rows for seed in range(2)]
    own = []
    for model, evaluated, iteration in ((str(random_pipeline), seen[0], 0), (str(folder), seen[-1], 2)):
        mean, error, count = evaluate_model(model, recipe)[name]
        assert count == 6
        assert mean == pytest.approx(evaluated[f"eval/{name}"], abs=0.02)
        assert error > 0
        images = generate(*open_model(model), texts, keys, steps=recipe.sampler.steps)
        torch.testing.assert_close(images, _evaluated(folder, iteration), atol=1.5 / 255, rtol=0)
        own.append(images)
    assert (own[0] - own[1]).abs().max() > 15 / 255


def test_samples_are_written_seeded_and_never_overwritten(random_pipeline: Path, tmp_path: Path) -> None:
    options = {"steps": 2, "seed": 3, "count": 2}
    paths = sample_images(str(random_pipeline), ["a red circle", "a star"], tmp_path / "one", **options)
    assert [p.name for p in paths] == ["000-3.png", "000-4.png", "001-3.png", "001-4.png"]
    again = sample_images(str(random_pipeline), ["a red circle", "a star"], tmp_path / "two", **options)
    for one, two in zip(paths, again, strict=True):
        assert Image.open(one).tobytes() == Image.open(two).tobytes()
        assert Image.open(one).size == (64, 64)
    assert Image.open(paths[0]).tobytes() != Image.open(paths[1]).tobytes()
    with pytest.raises(ValueError, match="exists; name another folder"):
        sample_images(str(random_pipeline), ["a red circle"], tmp_path / "one", **options)


def test_an_image_does_not_depend_on_the_batch_beside_it(random_pipeline: Path) -> None:
    pipe, call = open_model(str(random_pipeline))
    together = generate(pipe, call, ["a red circle", "a star"], [5, 6], steps=2)
    alone = generate(pipe, call, ["a star"], [6], steps=2)
    torch.testing.assert_close(together[1:], alone, atol=1e-4, rtol=0)


def test_an_unfinished_run_says_how_to_go_on(tmp_path: Path, small: list[str]) -> None:
    (tmp_path / "config.yaml").write_text(f"model: {{path: {small[0].partition('=')[2]}, call: {{}}}}\n")
    with pytest.raises(ValueError, match="no trained weights yet; finish it with `flowgrpo resume"):
        open_model(str(tmp_path))
