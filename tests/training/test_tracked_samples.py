"""Trackers get some samples of a run: images with captions, completions as a table or as text, each as it can."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flowgrpo.training.reporting.tracked_samples import NUMBERS_ONLY, SHOWN, give_samples, shown_samples

RECORDS = [
    {"prompt": "2+2", "rewards": {"right": 1.0, "other": None}},
    {"prompt": "a\nb", "rewards": {"right": 0.25, "long": -2.0}},
]


class Recording:
    """A tracker that takes everything."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.given: list[tuple[dict[str, Any], int | None, dict[str, Any]]] = []

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.given.append((values, step, {}))

    def log_images(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        self.given.append((values, step, options))


class Tables(Recording):
    def log_table(self, table_name: str, columns: Any, data: Any, step: int) -> None:
        self.given.append(({table_name: (columns, data)}, step, {}))


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package in the place of wandb, which no test installs."""
    fake = SimpleNamespace(
        Image=lambda image, caption: ("image", image, caption), Table=lambda columns, data: ("table", columns, data)
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)


def given(tracker: Any, samples: Any, records: Any = RECORDS, iteration: int = 3) -> Any:
    give_samples(tracker, shown_samples("eval", iteration, samples, records))
    return tracker.given


def test_images_are_spread_over_the_call() -> None:
    samples = torch.linspace(0, 1, 40).reshape(40, 1, 1, 1).expand(40, 3, 2, 2)
    [(values, step, _)] = given(Recording("comet_ml"), samples, [{}] * 40, 7)
    assert step == 7
    images = values["samples/eval"]
    assert len(images) == SHOWN
    assert images[0].shape == (2, 2, 3)
    assert images[0].dtype == np.uint8
    found = [int(image[0, 0, 0]) for image in images]
    assert found == sorted(set(found))
    assert found[0] == 0
    assert found[-1] > 220


def test_a_video_is_its_frames_side_by_side() -> None:
    [(values, _, _)] = given(Recording("comet_ml"), torch.zeros(2, 5, 3, 4, 6))
    assert [image.shape for image in values["samples/eval"]] == [(4, 30, 3)] * 2


def test_captions_of_wandb_have_prompt_and_rewards(wandb: None) -> None:
    [(values, step, _)] = given(Recording("wandb"), torch.rand(2, 3, 4, 4))
    assert step is None, "W&B refuses a step below its last one"
    assert values["iteration"] == 3
    assert [caption for _, _, caption in values["samples/eval"]] == ["2+2\nright 1", "a\nb\nright 0.25, long -2"]
    assert [image.shape for _, image, _ in values["samples/eval"]] == [(4, 4, 3)] * 2


TABLE = [
    "prompt", "completion", "reward/right", "reward/other", "reward/long"
], [["2+2", "four", 1.0, None, None], ["a\nb", "c", 0.25, None, -2.0]]  # fmt: skip


def test_completions_are_a_table_in_wandb(wandb: None) -> None:
    assert given(Recording("wandb"), ["four", "c"]) == [({"iteration": 3, "samples/eval": ("table", *TABLE)}, None, {})]


def test_completions_are_a_table_where_a_tracker_takes_tables() -> None:
    assert given(Tables("clearml"), ["four", "c"]) == [({"samples/eval": TABLE}, 3, {})]


def test_tensorboard_has_prompts_and_rewards_beside_the_images() -> None:
    images, texts = given(Recording("tensorboard"), torch.rand(2, 3, 4, 4))
    assert images[0]["samples/eval"].shape == (2, 4, 4, 3)
    assert images[1:] == (3, {"dataformats": "NHWC"})
    lines = [line.strip() for line in texts[0]["samples/eval"].splitlines()]
    assert lines == [
        "image 0", "prompt: 2+2", "rewards: right 1", "",
        "image 1", "prompt: a", "b", "rewards: right 0.25, long -2",
    ]  # fmt: skip


def test_completions_are_no_markup() -> None:
    [(values, step, _)] = given(Recording("tensorboard"), ["# four\n<script>"], RECORDS[:1])
    assert step == 3
    lines = values["samples/eval"].splitlines()
    assert all(line.startswith("    ") for line in lines)
    assert [line.strip() for line in lines] == ["prompt: 2+2", "rewards: right 1", "", "# four", "<script>"]


@pytest.mark.parametrize("name", sorted(NUMBERS_ONLY))
def test_trackers_of_numbers_get_no_text(name: str) -> None:
    assert given(Recording(name), ["four", "c"]) == []


def test_a_tracker_without_images_gets_none() -> None:
    class Numbers:
        name = "numbers"
        given = ()

    assert given(Numbers(), torch.rand(2, 3, 4, 4)) == ()
