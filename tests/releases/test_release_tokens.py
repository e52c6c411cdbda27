"""Losses of language models, and their gradients by log-probs, are those of the methods' released code."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowgrpo.core.guards import stray_weights
from flowgrpo.core.likelihoods import blocks, bound_weights, upper_bound
from flowgrpo.core.objectives import policy_loss
from flowgrpo.core.surrogates import held_back, losses, reinforce
from flowgrpo.core.token_penalties import kl
from flowgrpo.core.trust_regions import dppo, spo
from tests.releases.comparing import numbers


def losses_of(asked: dict[str, Any], surrogate: Callable[..., Tensor], mask: Tensor) -> tuple[Tensor, Tensor]:
    """Losses of the tokens asked for, and their gradients."""
    logp = torch.tensor(asked["logp"]).requires_grad_(True)
    found = losses(surrogate, logp - torch.tensor(asked["old"]), torch.tensor(asked["advantage"]), logp, mask)
    return found.detach(), torch.autograd.grad(torch.where(mask, found, 0.0).sum(), logp)[0]


def test_the_pull_to_a_border_has_the_loss_of_the_release() -> None:
    asked = numbers("drpo_loss")
    everywhere = torch.ones(torch.tensor(asked["logp"]).shape, dtype=torch.bool)
    for form in asked["forms"]:
        by = "probability" if form["by_probability"] else "ratio"
        loss, slope = losses_of(asked, partial(spo, epsilon=form["epsilon"], by=by), everywhere)
        torch.testing.assert_close(loss, torch.tensor(form["loss"]), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(slope, torch.tensor(form["gradient"]), rtol=1e-5, atol=1e-5)
    turned = torch.tensor(asked["forms"][1]["gradient"]).sign() == torch.tensor(asked["advantage"])[:, None].sign()
    assert 0 < turned.sum() < turned.numel()  # some tokens are beyond the narrower border


def test_the_region_of_probabilities_is_that_of_the_release() -> None:
    asked = numbers("dppo_loss")
    logp, adv = torch.tensor(asked["logp"]), torch.tensor(asked["advantage"])
    everywhere = torch.ones(logp.shape, dtype=torch.bool)
    for form in asked["forms"]:
        options = {key: form[key] for key in ("divergence", "low", "high")}
        surrogate = partial(dppo, most=asked["most"], **options)
        held = held_back(surrogate, logp - torch.tensor(asked["old"]), adv, logp, everywhere)
        assert held is not None
        assert (~held).int().tolist() == form["kept"]
        assert held[adv > 0].any()
        assert held[adv < 0].any()
        loss, slope = losses_of(asked, surrogate, everywhere)
        torch.testing.assert_close(loss.sum().item(), form["loss"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(slope, torch.tensor(form["gradient"]), rtol=1e-5, atol=1e-5)


def test_bad_answers_off_the_policy_are_left_out_as_in_trl() -> None:
    asked = numbers("trl_masks")
    fall = torch.tensor(asked["old"]) - torch.tensor(asked["logp"])
    mask = torch.arange(fall.shape[1]) < torch.tensor(asked["lengths"])[:, None]
    found = [stray_weights(fall, torch.tensor(asked["advantage"]), mask, limit) for limit in asked["limits"]]
    assert [one[:, 0].tolist() for one in found] == asked["kept"]
    assert len({sum(kept) for kept in asked["kept"]}) > 1


def test_the_kl_times_the_ratio_is_that_of_trl() -> None:
    asked = numbers("trl_masks")
    logp = torch.tensor(asked["logp"]).requires_grad_(True)
    found = kl(logp, torch.tensor(asked["reference"]), torch.tensor(asked["old"]), kind="k3r")
    torch.testing.assert_close(found, torch.tensor(asked["kl"]), rtol=1e-5, atol=1e-5)
    slope = torch.autograd.grad(found.sum(), logp)[0]
    torch.testing.assert_close(slope, torch.tensor(asked["gradient"]), rtol=1e-5, atol=1e-5)


def test_the_bounds_of_good_and_bad_answers_have_the_loss_of_spg() -> None:
    asked = numbers("spg_bounds")
    masked, text, advantage = (torch.tensor(asked[name]) for name in ("masked", "text", "advantage"))
    text = text.bool()
    weight = torch.stack([bound_weights(rows.bool(), of) for rows, of in zip(masked, text)])
    losses_found = set()
    for form in asked["forms"]:
        logp = torch.tensor(asked["logp"]).requires_grad_(True)
        scored = torch.where(weight > 0, logp, 0.0)
        lower = (weight * scored).sum(1)
        upper = upper_bound(scored.unbind(1), weight.unbind(1), text, beta=form["beta"])
        mix = {"elbo": 0.0, "eubo": 1.0, "mix": form["mix"]}[form["kind"]]
        found = torch.where(advantage[:, None] < 0, mix * upper + (1 - mix) * lower, lower)
        loss, _ = policy_loss(found, None, advantage, text, surrogate=reinforce, reduce="token")
        torch.testing.assert_close(loss.item(), form["loss"], rtol=1e-5, atol=1e-6)
        slope = torch.autograd.grad(loss, logp)[0]
        torch.testing.assert_close(slope, torch.tensor(form["gradient"]), rtol=1e-5, atol=1e-6)
        losses_found.add(round(loss.item(), 4))
    assert len(losses_found) == 4


def test_masks_of_blocks_lie_where_spg_has_them() -> None:
    """How often each token of ten is masked; the standard error of a share among 4,000 draws is 0.008 at most."""
    asked = numbers("spg_bounds")
    text = torch.arange(12) < 10
    drawn = [blocks(12, torch.Generator().manual_seed(seed), written=text, size=4) for seed in range(2000)]
    often = torch.cat([one.masked for one in drawn]).float().mean(0)
    assert len(torch.cat([one.masked for one in drawn])) == asked["draws"]
    torch.testing.assert_close(often, torch.tensor(asked["often"]) / asked["draws"], rtol=0, atol=0.045)
