"""Losses of language models, and their gradients by log-probs, are those of the methods' released code."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowgrpo.core.surrogates import losses
from flowgrpo.core.trust_regions import spo
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
