"""Losses of whole answers have the numbers and the gradients of TRL's trainers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from flowgrpo.core.answer_losses import dpo, kto, optimal, simpo
from flowgrpo.core.distillation import early_weights
from flowgrpo.core.preference_losses import (
    apo,
    bco,
    cpo,
    discopop,
    dpo_norm,
    exo,
    f_dpo,
    hinge,
    ipo,
    nca,
    orpo,
    robust,
    sppo,
    tpo,
)
from tests.releases.comparing import numbers

Loss = Callable[..., Tensor]
CLOSE = {"rtol": 2e-5, "atol": 1e-5}
WITH_REFERENCE: dict[str, Loss] = {
    "sigmoid": dpo, "hinge": hinge, "exo_pair": exo, "nca_pair": nca, "robust": robust, "bco_pair": bco,
    "sppo_hard": sppo, "apo_zero": partial(apo, anchor="zero"), "apo_down": partial(apo, anchor="down"),
    "discopop": discopop,
}  # fmt: skip
"""Losses of TRL's DPO that need no lengths."""
DIVERGENCES = {"forward_kl": "forward", "js_divergence": "jsd", "alpha_divergence": "alpha"}


def asked_of(name: str) -> tuple[dict[str, Any], Tensor, Tensor, Tensor, Tensor]:
    """What was asked, log-probs with a gradient, those of the reference, lengths and pairs."""
    asked = numbers(name)
    logp = torch.tensor(asked["logp"]).requires_grad_(True)
    pairs = torch.arange(len(logp)).view(2, -1).T
    return asked, logp, torch.tensor(asked["reference"]), torch.tensor(asked["lengths"]), pairs


def require_equal(loss: Tensor, theirs: Any, logp: Tensor, gradient: Any, count: int = 1) -> None:
    torch.testing.assert_close(loss.detach(), torch.tensor(theirs), **CLOSE)
    slope = torch.autograd.grad(loss.sum() / count, logp)[0]
    torch.testing.assert_close(slope, torch.tensor(gradient), **CLOSE)


@pytest.mark.parametrize("place", range(16))
def test_losses_of_pairs_are_those_of_dpo(place: int) -> None:
    asked, logp, reference, lengths, pairs = asked_of("trl_dpo_losses")
    assert len(asked["forms"]) == 16
    form = asked["forms"][place]
    kind, options = form["loss_type"], {"beta": form["beta"]}
    options |= {"smoothing": form["label_smoothing"]} if "label_smoothing" in form else {}
    if divergence := DIVERGENCES.get(form.get("f_divergence_type", "")):
        more = {"alpha": form["f_alpha_divergence_coef"]} if divergence == "alpha" else {}
        loss = f_dpo(logp, reference, pairs, divergence=divergence, **options, **more)  # type: ignore[arg-type]
    elif kind in ("ipo", "sigmoid_norm"):
        loss = {"ipo": ipo, "sigmoid_norm": dpo_norm}[kind](logp, reference, lengths, pairs, **options)
    else:
        loss = WITH_REFERENCE[kind](logp, reference, pairs, **options)
    require_equal(loss, form["loss"], logp, form["gradient"], len(pairs))


@pytest.mark.parametrize("place", range(4))
def test_losses_without_a_reference_are_those_of_cpo(place: int) -> None:
    asked, logp, _, lengths, pairs = asked_of("trl_cpo_losses")
    assert len(asked["forms"]) == 4
    form = asked["forms"][place]
    if form["loss_type"] == "sigmoid":
        loss = cpo(logp, lengths, pairs, beta=form["beta"], alpha=0.0, smoothing=form["label_smoothing"])
    else:
        loss = simpo(logp, lengths, pairs, beta=form["beta"], margin=form["simpo_gamma"], alpha=form["alpha"])
    require_equal(loss, form["loss"], logp, form["gradient"])


def test_the_odds_ratio_is_that_of_orpo() -> None:
    asked, logp, _, lengths, pairs = asked_of("trl_odds_ratio")
    both = orpo(logp, lengths, pairs, weight=asked["beta"])
    require_equal(both - orpo(logp, lengths, pairs, weight=0.0), asked["loss"], logp, asked["gradient"])


@pytest.mark.parametrize("place", range(2))
def test_the_preference_beside_a_gold_answer_is_that_of_tpo(place: int) -> None:
    asked, logp, _, lengths, pairs = asked_of("trl_tpo_losses")
    form = asked["forms"][place]
    options = {"mean": True, "margin": form["tpo_l_gamma"]} if form["loss_type"] == "tpo-l" else {}
    # A gold answer of each prompt stands in front, and has no term of its own at alpha 0.
    gold, count = torch.zeros(len(pairs)), len(pairs)
    loss = tpo(
        torch.cat([gold, logp]), torch.cat([gold + 3, lengths]),
        torch.cat([gold + 1, gold, gold - 1]), torch.arange(count).repeat(3), beta=form["beta"], alpha=0.0, **options,
    )  # fmt: skip
    require_equal(loss, form["loss"], logp, form["gradient"], count)


@pytest.mark.parametrize("place", range(2))
def test_good_and_bad_answers_have_the_loss_of_kto(place: int) -> None:
    asked, logp, reference, _, pairs = asked_of("trl_kto_losses")
    form = asked["forms"][place]
    good = torch.tensor([1.0] * len(pairs) + [0.0] * len(pairs))
    loss = kto(
        logp, reference, good, torch.tensor(form["drift"]), beta=asked["beta"], desirable=asked["desirable"],
        undesirable=asked["undesirable"],
    )  # fmt: skip
    require_equal(loss, form["loss"], logp, form["gradient"])


def test_the_regression_on_the_optimal_advantage_is_that_of_trl() -> None:
    asked, logp, reference, _, _ = asked_of("trl_optimal_loss")
    advantage = torch.tensor(asked["rewards"]) - torch.tensor(asked["value"])
    loss = optimal(logp, reference, advantage, beta=asked["beta"]).mean()
    require_equal(loss, asked["loss"], logp, asked["gradient"])


def test_early_tokens_count_as_in_iw_opd() -> None:
    asked = numbers("trl_early_weights")
    logp, teacher, rollout = (torch.tensor(asked[name]) for name in ("logp", "teacher", "rollout"))
    mask = torch.arange(logp.shape[1]) < torch.tensor(asked["lengths"])[:, None]
    gap = teacher - rollout
    loss = torch.where(mask, -logp * early_weights(gap, mask, gamma=asked["gamma"]) * gap, 0.0).sum()
    torch.testing.assert_close(loss.item(), asked["loss"], **CLOSE)
