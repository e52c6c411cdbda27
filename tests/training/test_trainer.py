"""The whole loop on a random scenes pipeline: what a run writes, exact ratios, and resuming to the same numbers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flowgrpo.bench.interruption import contents, interruption
from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import load_recipe
from flowgrpo.configs.schema import Recipe
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.session import Session, start
from flowgrpo.training.trainer import Trainer
from flowgrpo.training.updating import learning_rate


def _records(run: Path) -> list[dict]:
    """The metrics of a run without times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


def _weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "lora" / "pytorch_lora_weights.safetensors")


def _trainer(recipe: Recipe, folder: Path) -> Trainer:
    return start(recipe, folder).trainer(Silent())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, small: list[str]) -> Path:
    """An uninterrupted run of four iterations with two optimizer steps each."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    _trainer(_two_updates(small), folder).train()
    return folder


def _two_updates(small: list[str]) -> Recipe:
    return load_recipe("mixgrpo_flash_guard", [*small, "optimizer={updates: 2, schedule: cosine, warmup: 2}"])


def test_a_run_leaves_a_complete_folder(whole: Path) -> None:
    records = _records(whole)
    assert [r["iteration"] for r in records] == [0, 1, 2, 3, 4]
    assert all("eval/gold" in records[k] for k in (0, 2, 4))
    assert all({"reward/dense", "reward/jpeg_compressibility", "reward/total"} <= r.keys() for r in records[:4])
    assert {len(r["steps"]) for r in records[:4]} == {2}
    index = [json.loads(line) for line in (whole / "samples" / "index.jsonl").read_text().splitlines()]
    assert {(r["phase"], r["iteration"]) for r in index} == {
        ("eval", 0), ("eval", 2), ("eval", 4), ("train", 0), ("train", 2),
    }  # fmt: skip
    assert all((whole / "samples" / r["image"]).is_file() for r in index)
    assert any(value.abs().max() > 0 for name, value in _weights(whole).items() if "lora_B" in name)


def test_the_ratio_is_exactly_one_before_the_first_update_and_moves_after_it(whole: Path) -> None:
    for record in _records(whole)[:4]:
        assert record["ratio/first_error"] == 0.0
        # The second optimizer step of the iteration sees a moved policy.
        assert record["log_ratio_sq"] > 0.0


def test_resuming_gives_the_same_numbers(whole: Path, small: list[str], tmp_path: Path) -> None:
    recipe = _two_updates(small)

    class Interrupted(Exception):
        pass

    class StopAfter(Silent):
        def iteration(self, record: dict) -> None:
            if record["iteration"] == 1:
                raise Interrupted

    folder = tmp_path / "run"
    trainer = start(recipe, folder).trainer(StopAfter())
    with pytest.raises(Interrupted):
        trainer.train()
    # Iteration 1 was logged but its checkpoint was not written: it must be done again, and only once.
    assert [r["iteration"] for r in _records(folder)] == [0, 1]
    again = Session(recipe, RunFolder.open(folder)).trainer(Silent())
    again.resume()
    assert again.next_iteration == 1
    again.train()
    assert _records(folder) == _records(whole)
    ours, theirs = _weights(folder), _weights(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("euphonium", ["critic.warmup=1", "sampler.plan.window={name: random, size: 1, interval: 1, stop: 3}"]),
        ("diffusion_nft", ["objective.old={decay: 0.5, every: 1, rise: 0.2}", "optimizer.updates=2"]),
        ("sage_grpo", ["sampler.plan.window={name: frozen, size: 2}", "reference={decay: 0.0, every: 3}"]),
    ],
)
def test_methods_with_a_state_of_their_own_resume_to_the_bit(
    name: str, more: list[str], small: list[str], tmp_path: Path
) -> None:
    """A critic, a sampling policy that lags behind, an anchor that moves: each is part of the checkpoint."""
    shared = [entry for entry in small if not entry.startswith("sampler.plan.window")]
    recipe = load_recipe(name, [*shared, *more])
    _trainer(recipe, tmp_path / "whole").train()

    class Interrupted(Exception):
        pass

    class StopAfter(Silent):
        def iteration(self, record: dict) -> None:
            if record["iteration"] == 2:
                raise Interrupted

    with pytest.raises(Interrupted):
        start(recipe, tmp_path / "run").trainer(StopAfter()).train()
    again = Session(recipe, RunFolder.open(tmp_path / "run")).trainer(Silent())
    again.resume()
    assert again.next_iteration == 2
    again.train()
    assert _records(tmp_path / "run") == _records(tmp_path / "whole")
    ours, theirs = _weights(tmp_path / "run"), _weights(tmp_path / "whole")
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


def test_killed_and_resumed_by_command_gives_the_same_numbers(small: list[str], tmp_path: Path) -> None:
    lines: list[str] = []
    figures = interruption(_two_updates(small), tmp_path / "runs", lines.append, kills=2)
    assert figures["different"] == []
    assert len(figures["kills"]) == 2
    assert "lora/pytorch_lora_weights.safetensors" in contents(tmp_path / "runs" / "whole")
    assert lines[-1].endswith("all equal")


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        ("constant", [1, 1, 1, 1, 1]),
        ("linear", [1, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", [1, 0.9045, 0.6545, 0.3455, 0.0955]),
        ("inverse, half: 2", [1, 2 / 3, 1 / 2, 2 / 5, 1 / 3]),
    ],
)
def test_the_learning_rate_rises_and_falls_as_the_recipe_says(
    small: list[str], schedule: str, shares: list[float]
) -> None:
    given = f"optimizer={{updates: 2, warmup: 3, learning_rate: 1.0, schedule: {schedule}}}"
    recipe = load_recipe("mixgrpo_flash_guard", [*small, given])  # 4 iterations of 2 updates
    rates = [learning_rate(recipe, taken) for taken in range(8)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, *shares], abs=1e-4)


def test_the_inverse_rate_is_the_same_in_a_longer_run(small: list[str]) -> None:
    given = [*small, "optimizer={warmup: 3, schedule: inverse, half: 2}"]
    short, long = (load_recipe("mixgrpo_flash_guard", [*given, f"run.iterations={n}"]) for n in (4, 400))
    assert [learning_rate(short, taken) for taken in range(4)] == [learning_rate(long, taken) for taken in range(4)]


@pytest.mark.parametrize(
    ("given", "words"), [("schedule: inverse", "add half"), ("schedule: cosine, half: 40", "leave half out")]
)
def test_half_belongs_to_the_inverse_rate(given: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_recipe("default", [f"optimizer={{{given}}}"])


def test_the_batch_of_the_denoiser_does_not_change_gradients(recipe: Recipe, tmp_path: Path) -> None:
    from flowgrpo.bench.measures import batches

    figures = batches(recipe, tmp_path / "run", lambda text: None)
    assert {"1", "4", "all"} == figures.keys()
    assert all(f["gradient_difference"] < 2e-5 for f in figures.values()), figures
    assert all(f["state_difference"] < 2e-5 for f in figures.values()), figures


def test_a_recipe_that_cannot_run_is_refused_before_anything_is_written(small: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for override, words in (
        ("data.train=missing.txt", "no prompt file 'missing.txt'"),
        ("model.path=./nowhere", "'./nowhere' is not a folder"),
        ("rewards=[{name: golde}]", "gold"),
        ("rollout.prompts=5000", "holds 1069 prompts"),
    ):
        with pytest.raises(ValueError, match=words):
            start(load_recipe("mixgrpo_flash_guard", [*small, override]), folder)
        assert not folder.exists()


def test_a_run_folder_is_never_overwritten(recipe: Recipe, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "mine.txt").write_text("keep")
    with pytest.raises(ValueError, match="is not empty"):
        start(recipe, folder)
    assert [p.name for p in folder.iterdir()] == ["mine.txt"]


def test_a_reward_that_raises_stops_the_run_with_its_name_and_keeps_the_sample(
    small: list[str], tmp_path: Path
) -> None:
    from flowgrpo.rewards.base import RewardError

    broken = tmp_path / "broken.py"
    broken.write_text("def picky(images, prompts, **columns):\n    raise RuntimeError('the server said no')\n")
    recipe = load_recipe(
        "mixgrpo_flash_guard", [*small, f"rewards=[{{name: '{broken}:picky'}}]", "evaluate.rewards=[{name: gold}]"]
    )
    trainer = _trainer(recipe, tmp_path / "run")
    with pytest.raises(RewardError, match="picky"):
        trainer.train()
    assert list((tmp_path / "run" / "failed").rglob("*.png"))
