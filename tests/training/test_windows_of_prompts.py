"""Each prompt of an iteration trains a window of its own: Flash-GRPO's draw."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.images.sized_rollout import SizedRollout
from flowgrpo.training.session import Session
from flowgrpo.training.trainer import Trainer

APART = "sampler.plan.each=prompt"


def trainer_of(model: Path, folder: Path, *more: str) -> Trainer:
    words = [
        f"model.path={model}", "rollout={prompts: 6, group: 2, batch: 4}", "sampler.steps=6", "data.heldout=null",
        "rewards=[{name: jpeg_compressibility}]", "optimizer={updates: 2, ema: null}", *more,
    ]  # fmt: skip
    return Session(load_recipe("flash_grpo", words), RunFolder.create(folder, "")).trainer(Silent())


def told(record: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in record.items() if not k.startswith("time/")}


@pytest.mark.slow
def test_each_prompt_trains_the_step_that_it_draws(random_pipeline: Path, tmp_path: Path) -> None:
    trainer = trainer_of(random_pipeline, tmp_path / "run", APART)
    joined = trainer.collect(0)[1]
    assert isinstance(joined, SizedRollout)
    drawn = {place: steps for places, (_, steps) in zip(joined.prompts, joined.kinds) for place in places}
    keys = [trainer.collector._key(0, place, 0) for place in range(6)]
    assert drawn == {k: trainer.task.plan_for(0, key).trained_steps for k, key in enumerate(keys)}  # type: ignore[attr-defined]
    assert len(set(drawn.values())) > 1
    for part, (_, steps) in zip(joined.rounds, joined.kinds):
        assert {t.step for t in part.rollout.transitions} == set(steps)  # type: ignore[attr-defined]
    assert Counter(joined.prompt_of_sample) == dict.fromkeys(range(6), 2)
    record = trainer.iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert sum(entry["count"] for entry in record["steps"].values()) == 6 * 2


@pytest.mark.slow
def test_if_only_one_step_can_be_drawn_nothing_changes(random_pipeline: Path, tmp_path: Path) -> None:
    one = "sampler.plan.window.stop=1"
    mine = trainer_of(random_pipeline, tmp_path / "mine", one, APART)
    theirs = trainer_of(random_pipeline, tmp_path / "theirs", one)
    assert [told(mine.iterate(k)) for k in range(2)] == [told(theirs.iterate(k)) for k in range(2)]
    pairs = zip(mine.task.weights.parameters(), theirs.task.weights.parameters())
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sampler.plan.window.interval=2"], "window random stays for several iterations or is not drawn"),
        (["sampler.plan.window={name: progressive, interval: 1}"], "use one of random, subset, spaced, with interval"),
        (["sampler.plan.flash_ratio=0.5"], "flash_ratio is for one window; leave flash_ratio out"),
        (["optimizer={updates: 2, cut: edges}"], "optimizer.cut edges deals out batches of one rollout"),
    ],
)
def test_what_has_one_window_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_recipe("flash_grpo", [APART, *words])
