"""TensorBoard has the metrics and the samples of a run, and a run names its own metrics."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.reporting.own_metrics import own_metrics
from flowgrpo.training.session import Session, start


@pytest.mark.parametrize("task", ["images", "text"])
def test_tensorboard_has_samples(task: str, tmp_path: Path, small: list[str], random_language_folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words: list[Any] = [*small, "run.iterations=1", "run.trackers=[tensorboard]"]
    if task == "text":
        reward = tmp_path / "size.py"
        reward.write_text("def size(completions, **columns):\n    return [float(len(t)) for t in completions]\n")
        words = [
            f"model.path={random_language_folder}", "rollout={prompts: 2, group: 2, batch: 4}", "run.iterations=1",
            "generation.max_tokens=3", f"rewards=[{{name: '{reward}:size'}}]", "evaluate={prompts: 2}",
            "run.trackers=[tensorboard]",
        ]  # fmt: skip
    start(load_recipe("mixgrpo_flash_guard" if task == "images" else "text", words), tmp_path / "run").trainer(
        Silent()
    ).train()
    # The settings that it was started with are in a separate file.
    tags: dict[str, set[str]] = {"images": set(), "tensors": set(), "scalars": set()}
    for events in (tmp_path / "run").rglob("events.out.tfevents.*"):
        found = EventAccumulator(str(events))
        found.Reload()
        for kind, names in tags.items():
            names.update(found.Tags()[kind])
    if task == "images":
        # A step's images have numbers behind their tag.
        assert {"samples/eval", "samples/train"} <= {"/".join(tag.split("/")[:2]) for tag in tags["images"]}
    else:
        assert {"samples/eval/text_summary", "samples/train/text_summary"} <= tags["tensors"]
    assert "reward/total" in tags["scalars"]
    evaluations = [
        [event.step for event in found.Scalars(tag)]
        for events in (tmp_path / "run").rglob("events.out.tfevents.*")
        if (found := EventAccumulator(str(events)).Reload())
        for tag in found.Tags()["scalars"]
        if tag.startswith("eval/")
    ]
    assert evaluations, "no evaluation"
    assert all(steps == [0, 1] for steps in evaluations), "the last evaluation is missing"


@pytest.mark.slow
def test_tensorboard_has_each_iteration_of_a_resumed_run_once(tmp_path: Path, small: list[str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = [*small, "run.trackers=[tensorboard]", "run.checkpoint_every=2"]
    folder = tmp_path / "run"
    start(load_recipe("mixgrpo_flash_guard", [*words, "run.iterations=3"]), folder).trainer(Silent()).train()
    shutil.rmtree(folder / "checkpoints" / "iter-000003")
    session = Session(load_recipe("mixgrpo_flash_guard", words), RunFolder.open(folder))
    trainer = session.trainer(Silent())
    trainer.resume()
    trainer.train()
    [events] = {path.parent for path in folder.rglob("events.out.tfevents.*") if not path.parent.name[0].isdigit()}
    found = EventAccumulator(str(events)).Reload()
    for tag in found.Tags()["scalars"]:
        steps = [event.step for event in found.Scalars(tag)]
        assert steps == sorted(set(steps)), tag
    assert [event.step for event in found.Scalars("reward/total")] == [0, 1, 2, 3]


def test_metrics_of_a_part_are_numbers_and_have_names_of_their_own() -> None:
    found = own_metrics("extension a", {"x": torch.tensor(2.0), "y": float("nan"), "z": None, "n": np.float64(3)}, {})
    assert found == {"x": 2.0, "y": None, "z": None, "n": 3.0}
    with pytest.raises(ValueError, match=r"record\(\) of extension a gives 'iteration', which the run records itself"):
        own_metrics("extension a", {"iteration": 7}, {"iteration": 0})
    with pytest.raises(ValueError, match="gives 'x' as Tensor; give one number for a name"):
        own_metrics("extension a", {"x": torch.zeros(2)}, {})
    with pytest.raises(ValueError, match="has to give a mapping of names to numbers; it gave NoneType"):
        own_metrics("the advantage", None, {})
