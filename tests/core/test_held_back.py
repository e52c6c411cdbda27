"""A surrogate reports the entries that its bound leaves without a gradient; the report is compared with autograd."""

from functools import partial

import pytest
import torch
from torch import Tensor

from flowgrpo.core.diagnostics import step_statistics
from flowgrpo.core.objectives import held_columns, policy_loss
from flowgrpo.core.pooled_ratios import per_unit
from flowgrpo.core.surrogates import LOG_LIMIT, clip, gmpo, held_back, pooled_per_column
from flowgrpo.core.surrogates_by_name import SURROGATES

ROWS, COLUMNS = 40, 6
RANDOM = torch.Generator().manual_seed(0)
UNITS = torch.tensor([0, 0, 1, 1, 1, 2]).expand(ROWS, COLUMNS)
ENTROPY = torch.rand(ROWS, COLUMNS, generator=RANDOM)
SPREAD = 1.0 + torch.rand(ROWS, COLUMNS, generator=RANDOM)
CASES = {
    **SURROGATES,
    "clip_nats": partial(SURROGATES["clip_nats"], nats=12.0, elements=40),
    "clip/higher": partial(clip, low=0.1, high=0.6),
    "clip/dual": partial(clip, dual=1.5),
    "clip/dual within": partial(clip, high=1.0, dual=1.5),
    "dcpo/most": partial(SURROGATES["dcpo"], most=1.3),
    "clip/unbounded": partial(clip, low=float("inf"), high=float("inf")),
    "cispo/low": partial(SURROGATES["cispo"], low=0.2, high=1.3),
    "gmpo/bound twice": partial(partial(gmpo, low=0.1, high=0.1), high=0.8),
    "bapo/tensors": partial(SURROGATES["bapo"], lower=1 / SPREAD, upper=SPREAD),
    "dhpo/tokens": partial(SURROGATES["dhpo"], mix=0.0),
    "dhpo/rows": partial(SURROGATES["dhpo"], mix=1.0, row_low=0.2, row_high=0.3),
    "dhpo/both": partial(SURROGATES["dhpo"], mix=(UNITS / 2).double(), row_low=0.2, row_high=0.3),
    "units": per_unit(partial(clip, low=0.3), UNITS),
    "sspo": partial(SURROGATES["sspo"], units=UNITS, entropy=ENTROPY, mean_entropy=0.5),
    "hapo": partial(SURROGATES["hapo"], entropy=ENTROPY, mean_entropy=0.5),
    "dppo/kl": partial(SURROGATES["dppo"], low=0.02, high=0.1, divergence="kl"),
    "dppo/most": partial(SURROGATES["dppo"], most=1.1),
    "cppo/budget": partial(SURROGATES["cppo"], bound=0.1, last=0.5, budget=0.01),
    "spo/probability": partial(SURROGATES["spo"], epsilon=0.05, by="probability"),
    "capo": partial(SURROGATES["capo"], curvature=ENTROPY / 2, limit=0.2),
}
BOUNDED = ("clip", "clip_nats", "gmpo", "bapo", "dcpo", "rec", "dhpo", "units", "sspo", "hapo", "capo", "dppo", "cppo")
LIMITED = ("sapo", "r2vpo", "nft", "spo", "spo/probability")
"""Beyond the limit of what is computed they have no gradient."""


def rollout() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-ratios, advantages (some are 0), log-probs and a mask."""
    g = torch.Generator().manual_seed(1)
    log_ratio = 0.8 * torch.randn(ROWS, COLUMNS, generator=g, dtype=torch.float64)
    adv = torch.randn(ROWS, COLUMNS, generator=g, dtype=torch.float64)
    adv[::7] = 0.0
    logp = -3 * torch.rand(ROWS, COLUMNS, generator=g, dtype=torch.float64)
    return log_ratio, adv, logp, torch.rand(ROWS, COLUMNS, generator=g) < 0.8


def slopes(surrogate, log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
    """Derivative of the loss by the log-prob of each entry, which moves its log-ratio as well."""
    shift = torch.zeros_like(logp, requires_grad=True)
    loss = surrogate(log_ratio + shift, adv, logp + shift, mask)
    return torch.autograd.grad(loss.sum(), shift)[0]


@pytest.mark.parametrize("name", CASES)
def test_what_is_held_back_has_no_gradient_and_all_else_has_one(name: str):
    log_ratio, adv, logp, mask = rollout()
    flat = slopes(CASES[name], log_ratio, adv, logp, mask) == 0
    held = held_back(CASES[name], log_ratio, adv, logp, mask)
    assert held is not None
    assert torch.equal((held & mask), flat & (adv != 0) & mask)
    assert bool(held.any()) == (name.startswith(BOUNDED) and name != "clip/unbounded")
    # An advantage for each row.
    rows = held_back(CASES[name], log_ratio, adv[:, 0], logp, mask)
    assert torch.equal(
        rows & mask, (slopes(CASES[name], log_ratio, adv[:, :1], logp, mask) == 0) & (adv[:, :1] != 0) & mask
    )  # type: ignore[operator]


@pytest.mark.parametrize("name", LIMITED)
def test_beyond_the_limit_of_what_is_computed(name: str):
    log_ratio, adv, logp, mask = rollout()
    far = log_ratio.sign() * (LOG_LIMIT + 1)
    held = held_back(CASES[name], far, adv, logp, mask)
    assert held is not None
    assert torch.equal(held, (slopes(CASES[name], far, adv, logp, mask) == 0) & (adv != 0) & (far > 0))
    assert bool(held.any())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_shares_by_step_are_those_of_the_loss(name: str, level: str):
    """A surrogate that pools by itself works on tokens."""
    log_ratio, adv, logp, mask = rollout()
    old = logp - log_ratio
    held = held_columns(logp, old, adv, mask, surrogate=CASES[name], level=level)
    assert not held[~mask].any()
    metrics = policy_loss(logp, old, adv, mask, surrogate=CASES[name], level=level)[1]
    statistics = step_statistics(log_ratio, torch.arange(COLUMNS), adv, mask, held, COLUMNS)
    for sign, share in enumerate(("clip_share_pos", "clip_share_neg")):
        assert statistics[:, sign, [3, 0]].sum(0).tolist() == metrics[share].tolist()
    if level == "sequence" and name == "clip":
        pooled = pooled_per_column(log_ratio, mask)
        assert torch.equal(held, (slopes(clip, pooled, adv, logp, mask) == 0) & (adv != 0) & mask)


def test_gmpo_bounds_the_log_ratio_and_cispo_holds_nothing_back():
    """These were once counted as clips of the ratio at 1.4 and 6, because of the names of their hyper-parameters."""
    log_ratio, adv = torch.tensor([[0.39, 0.41, 2.0]]), torch.ones(1, 3)
    zeros = torch.zeros(1, 3)
    assert held_columns(log_ratio, zeros, adv, surrogate=gmpo).tolist() == [[False, True, True]]
    assert not held_columns(log_ratio, zeros, adv, surrogate=SURROGATES["cispo"]).any()
    assert held_columns(-log_ratio, zeros, -adv, surrogate=SURROGATES["bapo"]).tolist() == [[False, False, True]]


def test_a_surrogate_of_ones_own_is_differentiated():
    log_ratio = torch.tensor([[0.3, 0.9, -0.9]])
    adv, zeros = torch.tensor([[1.0, 1.0, 0.0]]), torch.zeros(1, 3)

    def own(log_ratio: Tensor, adv: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
        return -adv * log_ratio.clamp(-0.5, 0.5).exp()

    assert held_back(own, log_ratio, adv, log_ratio, adv) is None
    assert held_columns(log_ratio, zeros, adv, surrogate=own).tolist() == [[False, True, False]]
    assert held_columns(log_ratio, zeros, adv, surrogate=per_unit(own, torch.zeros(1, 3, dtype=torch.long))).any() == 0
