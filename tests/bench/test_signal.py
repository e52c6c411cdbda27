"""`flowgrpo bench signal`: how much of a batch's gradient is signal."""

from pathlib import Path

import pytest
import torch

from flowgrpo.bench.signal import signal, signal_share
from flowgrpo.configs.load import load_image_recipe


def test_equal_gradients_are_all_signal_and_orthogonal_ones_none() -> None:
    assert signal_share(torch.tensor([[1.0, 2.0]] * 4)).value == pytest.approx(1.0)
    assert signal_share(torch.tensor([[1.0, 2.0]] * 4)).error == pytest.approx(0.0, abs=1e-9)
    assert signal_share(torch.eye(3)).value == pytest.approx(0.0)
    assert signal_share(torch.zeros(3, 2)).value == 0.0


def test_the_share_and_its_error_by_hand() -> None:
    """Inner products of 1, 1, -1: 1·1 - 1 - 1 over three pairs is -1/3 of a mean square of 1.

    Left out in turn: the pairs (1, -1), (1, -1) and (1, 1), whose shares are -1, -1, 1; their mean is -1/3, the sum of
    squares about it 24/9, and the error √(2/3 · 24/9) = 4/3.
    """
    found = signal_share(torch.tensor([[1.0], [1.0], [-1.0]]))
    assert found.value == pytest.approx(-1 / 3)
    assert found.error == pytest.approx(4 / 3)


def test_the_share_is_of_a_batch_whatever_their_number() -> None:
    """A mean of 1 under noise of variance 3 is a quarter of the mean square."""
    drawn = 1.0 + 3**0.5 * torch.randn(400, 50, generator=torch.Generator().manual_seed(0))
    for count in (100, 400):
        found = signal_share(drawn[:count])
        assert abs(found.value - 0.25) < 4 * found.error < 0.1


@pytest.mark.parametrize("mean", [0.0, 0.5])
def test_the_error_is_the_spread_of_shares(mean: float) -> None:
    """Shares of many sets of 12 batches spread as their errors say, with signal and without; a jackknife says 1.5."""
    generator = torch.Generator().manual_seed(0)
    found = [signal_share(mean + torch.randn(12, 40, generator=generator)) for _ in range(300)]
    spread = torch.tensor([one.value for one in found]).std()
    said = torch.tensor([one.error for one in found]).square().mean().sqrt()
    assert 0.9 < said / spread < 1.3


def test_the_error_has_no_unit_and_does_not_vanish() -> None:
    drawn = torch.randn(6, 30, generator=torch.Generator().manual_seed(1))
    one, thousandfold = signal_share(drawn), signal_share(1000 * drawn)
    assert one.error > 0
    assert thousandfold.error == pytest.approx(one.error)


def test_two_gradients_are_refused() -> None:
    with pytest.raises(ValueError, match="use 3 or more"):
        signal_share(torch.ones(2, 4))


@pytest.mark.slow
def test_a_recipe_is_measured_by_the_steps_that_it_trains(tmp_path: Path) -> None:
    small = [
        "rollout.prompts=4",
        "rollout.group=4",
        "sampler.steps=4",
        "sampler.plan.window={name: progressive, size: 1}",
    ]
    recipe = load_image_recipe(
        "mixgrpo_flash_guard", [*small, "sampler.plan.window.interval=3", "sampler.plan.window.stop=2"]
    )
    lines: list[str] = []
    found, again = (signal(recipe, tmp_path / name, lines.append, batches=7) for name in ("one", "two"))
    assert {steps: row["batches"] for steps, row in found["steps"].items()} == {"0": 4, "1": 3}
    assert found["images"] == 16
    for steps, row in found["steps"].items():
        assert row["plain"] == again["steps"][steps]["plain"]
        assert row["scaled"] != row["plain"]
        assert -1.0 <= row["scaled"][0] <= 1.0
    assert sum("±" in line for line in lines) == 4


@pytest.mark.slow
def test_steps_with_too_few_batches_are_named_and_left_out(tmp_path: Path) -> None:
    small = ["rollout.prompts=1", "rollout.group=2", "sampler.steps=3", "sampler.plan.window={name: frozen, size: 1}"]
    lines: list[str] = []
    found = signal(load_image_recipe("mixgrpo_flash_guard", small), tmp_path / "run", lines.append, 2)
    assert found["steps"] == {}
    assert "too few" in lines[-1]


@pytest.mark.slow
def test_the_gradient_is_of_the_images_that_the_selection_keeps(tmp_path: Path) -> None:
    """The two images of a group are the best and the worst, so a selection of both changes nothing; of one, it does."""
    small = ["rollout.prompts=2", "rollout.group=2", "sampler.steps=3", "penalties=[]"]
    recipes = {
        name: load_image_recipe("default", [*small, f"select={chosen}"])
        for name, chosen in (
            ("all", "[]"),
            ("both", "[{name: extremes, keep: 2}]"),
            ("best", "[{name: best, keep: 1}]"),
        )
    }
    found = {
        name: signal(recipe, tmp_path / name, str, batches=3)["steps"]["noised images"]["plain"]
        for name, recipe in recipes.items()
    }
    assert found["both"] == found["all"] != found["best"]


@pytest.mark.slow
def test_an_objective_that_measures_something_before_its_batches_is_measured_too(tmp_path: Path) -> None:
    """DRaFT differentiates the rewards of the finished images first."""
    small = ["rollout.prompts=2", "sampler.steps=2", "sampler.plan.window={name: last, size: 1}"]
    found = signal(load_image_recipe("draft", small), tmp_path / "run", lambda line: None, batches=3)
    assert {steps: row["batches"] for steps, row in found["steps"].items()} == {"1": 3}
