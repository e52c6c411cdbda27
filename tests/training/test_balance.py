"""BAPO's bounds, searched over all batches of an optimizer step, and what they do to the loss."""

import math

import pytest
import torch

from flowgrpo.configs.load import load_recipe
from flowgrpo.configs.sections import BalanceConfig
from flowgrpo.training.balance import Balance

SETTINGS = BalanceConfig(lower=(0.5, 0.8), upper=(1.5, 2.5), lower_step=0.3, upper_step=1.0)


def test_bounds_follow_the_contributions_of_a_step() -> None:
    """Pairs (0.5, 1.5), (0.5, 2.5), (0.8, 2.5); a good token of ratio 2 and two bad ones of 0.6 and 1."""
    balance = Balance(SETTINGS)
    good = torch.tensor([[math.log(2.0)]]), torch.tensor([1.0])
    bad = torch.tensor([[math.log(0.6), 0.0]]), torch.tensor([-1.0])
    sums = balance.nothing(torch.device("cpu"))
    for log_ratio, advantage in (good, bad):
        sums += balance.contributions(log_ratio, advantage, None)
    assert torch.allclose(sums, torch.tensor([[0.0, 1.6], [2.0, 3.6], [2.0, 3.0]]).double())
    balance.settle(sums)
    # 2 of 3.6 is more than 0.4, so the lower bound stays. At 1.5 the good token would have had no gradient.
    metrics = balance.metrics(torch.tensor(3.0))
    assert {name: (value[0] / value[1]).item() for name, value in metrics.items()} == pytest.approx(
        {"bound/lower": 0.5, "bound/upper": 2.5}
    )
    leaf = good[0].clone().requires_grad_()
    balance.surrogate(leaf, good[1], leaf, torch.ones(1, 1)).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.item() == pytest.approx(-2.0)


def test_without_a_step_the_bounds_are_the_first() -> None:
    balance = Balance(SETTINGS)
    leaf = torch.tensor([[math.log(2.0)]], requires_grad=True)
    balance.surrogate(leaf, torch.ones(1), leaf, torch.ones(1, 1)).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.item() == 0.0


def test_bounds_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match=r"objective\.balance: bounds are lower=\(1\.2, 1\.3\)"):
        Balance(BalanceConfig(lower=(1.2, 1.3)))


@pytest.mark.parametrize(
    ("base", "lines", "message"),
    [
        ("text", ["objective.balance={}", "optimizer.updates=2"], "the bounds of surrogate bapo, not of clip"),
        ("text", ["objective.surrogate=bapo", "objective.balance={}"], "never leaves"),
        (
            "text",
            ["objective.surrogate=bapo", "objective.balance={}", "optimizer.updates=2",
             "objective.level=sequence"],
            "counts tokens",
        ),
        ("text", ["penalties=[{name: llds, weight: 0.1}]"], "With one optimizer step per rollout"),
        (
            "text", ["penalties=[{name: llds, weight: 0.1}]", "objective=answers", "optimizer.epochs=2"],
            "token penalty llds works on tokens",
        ),
        ("text", ["penalties=[{name: kl, weight: 0.1, rows: good}]"], "'rows' is an option of penalty llds"),
        ("text", ["penalties=[{name: kl, weight: 1}, {name: kl, weight: 2}]"], "penalties has kl more than once"),
        ("text", ["penalties=[kl]"], r"penalties\.0\.weight: .*missing"),
        ("mixgrpo_guard", ["penalties.llds.weight=0.1", "optimizer.epochs=2"], "guard is not the ratio of its dens"),
        ("diffusion_nft", ["penalties.llds.weight=0.1", "optimizer.epochs=2"], "penalty llds needs steps with noise"),
        ("diffusion_nft", ["objective.balance={}", "optimizer.epochs=2"], "'balance' is an option of objective trans"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(base: str, lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe(base, lines)
