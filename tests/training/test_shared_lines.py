"""One advantage, one objective and one subset of a rollout, chosen by the same recipe lines for images and for text."""

from pathlib import Path

import pytest
import torch

from flowgrpo.configs.load import load_recipe
from flowgrpo.training.bench import Silent
from flowgrpo.training.credit import kept_nodes, total_reward
from flowgrpo.training.run_folder import RunFolder
from flowgrpo.training.session import Session
from flowgrpo.training.trainer import Trainer

ROLLOUT = ["rollout.prompts=2", "rollout.group=4", "rollout.batch=8", "data.heldout=null"]


@pytest.fixture(params=["images", "text"])
def lines(
    request: pytest.FixtureRequest, random_pipeline: Path, random_language_folder: Path, tmp_path: Path
) -> tuple[str, list[str]]:
    """A recipe, and what makes it small."""
    if request.param == "images":
        own = [f"model.path={random_pipeline}", "sampler.steps=4", "sampler.window={kind: all}",
               "rewards=[{name: jpeg_compressibility}]", "objective.clip_nats=null"]  # fmt: skip
        return "default", [*ROLLOUT, *own]
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def weight(completions, **columns):\n    return [sum(map(ord, text)) / 500 for text in completions]\n"
    )
    own = [f"model.path={random_language_folder}", f"rewards=[{{name: '{reward}:weight'}}]", "generation.max_tokens=6",
           "objective.options={}"]  # fmt: skip
    return "text", [*ROLLOUT, *own]


def trainer_of(lines: tuple[str, list[str]], folder: Path, *more: str) -> Trainer:
    return Session(load_recipe(lines[0], [*lines[1], *more]), RunFolder.create(folder, "")).trainer(Silent())


@pytest.mark.parametrize("surrogate", ["sapo", "nft", "dcpo", "opmd", "regression"])
def test_objectives(lines: tuple[str, list[str]], tmp_path: Path, surrogate: str) -> None:
    trainer = trainer_of(lines, tmp_path / "run", f"objective.surrogate={surrogate}", "optimizer.epochs=2")
    record = trainer.iterate(0)
    assert record["ratio/first_error"] == 0.0
    assert record["grad_norm"] > 0


def test_advantages(lines: tuple[str, list[str]], tmp_path: Path) -> None:
    found = {}
    for name, options in (
        ("group", "{}"), ("anchored", "{k: 0.5}"), ("virtual_maximum", "{maximum: 9}"), ("quantile", "{low: 0.3}"),
    ):  # fmt: skip
        trainer = trainer_of(
            lines, tmp_path / name, f"advantage.estimator={name}", f"advantage.estimator_options={options}",
            "advantage.clamp=null",
        )  # fmt: skip
        rows, e = trainer.collect(0)
        scores = trainer.score(trainer.rewards, rows, e)
        values = trainer.advantages(scores, e)
        found[name] = values[e.rollout.leaf] if hasattr(e, "rollout") else values
    # The virtual sample is better than all others, so every sample is below the mean of five.
    assert (found["virtual_maximum"] < 0).all()
    assert float(found["group"].sum()) == pytest.approx(0, abs=1e-4)
    assert len({tuple(v.tolist()) for v in found.values()}) == 4


@pytest.mark.parametrize("choice", ["extremes", "best", "widest"])
def test_subsets_of_a_rollout(lines: tuple[str, list[str]], tmp_path: Path, choice: str) -> None:
    trainer = trainer_of(lines, tmp_path / "run", f"advantage.select={{keep: 2, choice: {choice}}}")
    rows, e = trainer.collect(0)
    scores = trainer.score(trainer.rewards, rows, e)
    keep = kept_nodes(e, scores, trainer.recipe.advantage)
    assert keep is not None
    mine = keep[e.rollout.leaf] if hasattr(e, "rollout") else keep
    assert mine.sum() == 4
    total = total_reward(scores)
    for group in (0, 1):
        values, chosen = total[e.groups == group], mine[e.groups == group]
        if choice == "widest":
            # Of all pairs, the one that is farthest apart.
            assert float(values[chosen].max() - values[chosen].min()) == float(values.max() - values.min())
        if choice == "best":
            assert float(values[chosen].sum()) == pytest.approx(float(values.topk(2).values.sum()))
    whole, part = (trainer.objective.rows(e, 0, k) for k in (None, keep))
    assert 0 < part < whole
    record = trainer.update(e, trainer.advantages(scores, e), keep)
    assert record["ratio/first_error"] == 0.0


def test_options_of_another_estimator_are_refused(lines: tuple[str, list[str]], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="another estimator than group"):
        trainer_of(lines, tmp_path / "one", "advantage.estimator_options={k: 1}")
    with pytest.raises(ValueError, match="does not take"):
        trainer_of(lines, tmp_path / "two", "advantage.estimator=beta", "advantage.estimator_options={k: 1}")
    assert torch.is_grad_enabled()
