"""Questions about losses of whole answers, of pairs, of three answers or of single ones, and about distillation."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.releases.asking import Names, Question, drawn
from tests.releases.sources import TRL

PAIRS = 5
FORMS: list[dict[str, Any]] = [
    {"loss_type": "sigmoid"}, {"loss_type": "hinge", "beta": 0.7}, {"loss_type": "ipo"},
    {"loss_type": "exo_pair", "label_smoothing": 1e-3}, {"loss_type": "exo_pair", "label_smoothing": 0.2},
    {"loss_type": "nca_pair"}, {"loss_type": "robust", "label_smoothing": 0.2}, {"loss_type": "bco_pair"},
    {"loss_type": "sppo_hard"}, {"loss_type": "apo_zero"}, {"loss_type": "apo_down"},
    {"loss_type": "discopop", "beta": 0.05}, {"loss_type": "sigmoid_norm", "beta": 5.0},
    {"loss_type": "sigmoid", "f_divergence_type": "forward_kl"},
    {"loss_type": "sigmoid", "f_divergence_type": "js_divergence"},
    {"loss_type": "sigmoid", "f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.4},
]  # fmt: skip
"""What is asked of the loss of DPO."""


def answers() -> dict[str, Tensor]:
    """Log-probs of the better answers of some pairs, then of the worse ones, and their numbers of tokens."""
    logp = -12 + 4 * drawn(21, 2 * PAIRS)
    lengths = torch.tensor([7, 3, 12, 5, 9, 4, 8, 6, 11, 2])
    return {"logp": logp, "reference": logp + 2 * drawn(22, 2 * PAIRS), "lengths": lengths}


def trl_dpo_losses(names: Names) -> dict[str, Any]:
    """The losses of TRL's DPOTrainer and their gradients."""
    given, found = answers(), []
    chosen, rejected = given["reference"].chunk(2)
    mask = (torch.arange(int(given["lengths"].max())) < given["lengths"][:, None]).int()
    for form in FORMS:
        logp = given["logp"].clone().requires_grad_(True)
        settings = {"beta": 0.3, "label_smoothing": 0.0, "f_divergence_type": "reverse_kl", "use_weighting": False}
        settings |= form
        made = names["run"](
            self=SimpleNamespace(
                **settings, loss_types=[form["loss_type"]], loss_weights=[1.0], args=SimpleNamespace(discopop_tau=0.05)
            ),
            chosen_logps=logp[:PAIRS], rejected_logps=logp[PAIRS:], ref_chosen_logps=chosen,
            ref_rejected_logps=rejected, completion_mask=mask, device="cpu",
        )  # fmt: skip
        made["loss"].backward()
        found.append({**form, "beta": settings["beta"], "loss": made["per_sequence_loss"], "gradient": logp.grad})
    return {**given, "forms": found}


def trl_cpo_losses(names: Names) -> dict[str, Any]:
    """The losses of TRL's CPOTrainer without the term of fine-tuning: CPO, SimPO and AlphaPO."""
    given, found = answers(), []
    forms: list[dict[str, Any]] = [
        {"loss_type": "sigmoid", "label_smoothing": 0.1},
        {"loss_type": "simpo", "simpo_gamma": 0.5, "beta": 2.0},
        {"loss_type": "simpo", "simpo_gamma": 0.1, "alpha": 0.25, "beta": 2.5},
        {"loss_type": "simpo", "simpo_gamma": 0.1, "alpha": -0.5, "beta": 2.5},
    ]
    for form in forms:
        settings = {"beta": 0.3, "label_smoothing": 0.0, "alpha": 0.0, "simpo_gamma": 0.0} | form
        logp = given["logp"].clone().requires_grad_(True)
        # The trainer has means over tokens for SimPO.
        read = logp / given["lengths"] if form["loss_type"] == "simpo" else logp
        trainer = SimpleNamespace(**settings, accelerator=SimpleNamespace(device="cpu"))
        loss = names["cpo_loss"](trainer, read[:PAIRS], read[PAIRS:])[0]
        loss.sum().backward()
        found.append({**settings, "loss": loss, "gradient": logp.grad})
    return {**given, "forms": found}


def trl_odds_ratio(names: Names) -> dict[str, Any]:
    """The odds ratio of TRL's ORPOTrainer, on means over tokens, and its gradient."""
    given, beta = answers(), 0.2
    logp = given["logp"].clone().requires_grad_(True)
    mean = logp / given["lengths"]
    trainer = SimpleNamespace(beta=beta, accelerator=SimpleNamespace(device="cpu"))
    loss = -names["odds_ratio_loss"](trainer, mean[:PAIRS], mean[PAIRS:])[0]
    loss.sum().backward()
    return {**given, "beta": beta, "loss": loss, "gradient": logp.grad}


def trl_tpo_losses(names: Names) -> dict[str, Any]:
    """The preference in the losses of TRL's TPOTrainer, without the term of fine-tuning."""
    given, found = answers(), []
    for form in ({"loss_type": "sigmoid", "beta": 0.2}, {"loss_type": "tpo-l", "beta": 2.0, "tpo_l_gamma": 0.5}):
        logp = given["logp"].clone().requires_grad_(True)
        mask = (torch.arange(int(given["lengths"].max())) < given["lengths"][:, None]).int()
        made = names["run"](
            self=SimpleNamespace(**form, label_smoothing=0.0), n_branches=2, shift_completion_mask=mask,
            per_token_logps=mask * (logp / given["lengths"])[:, None],
        )  # fmt: skip
        made["loss"].backward()
        found.append({**form, "loss": made["per_sequence_loss"], "gradient": logp.grad})
    return {**given, "forms": found}


def trl_kto_losses(names: Names) -> dict[str, Any]:
    """The losses of TRL's KTOTrainer for answers of which the first half is good, and their gradient."""
    given, found = answers(), []
    good, bad = given["reference"].chunk(2)
    for form in ({"loss_type": "kto", "drift": 0.6}, {"loss_type": "apo_zero_unpaired", "drift": 0.0}):
        logp = given["logp"].clone().requires_grad_(True)
        made = names["run"](
            self=SimpleNamespace(beta=0.3, desirable_weight=1.5, undesirable_weight=0.5, **form),
            kl=torch.tensor([form["drift"]]), chosen_logps=logp[:PAIRS], rejected_logps=logp[PAIRS:],
            ref_chosen_logps=good, ref_rejected_logps=bad,
        )  # fmt: skip
        made["losses"].sum().backward()
        found.append({**form, "loss": made["losses"], "gradient": logp.grad})
    return {**given, "beta": 0.3, "desirable": 1.5, "undesirable": 0.5, "forms": found}


def trl_optimal_loss(names: Names) -> dict[str, Any]:
    """The loss of TRL's A2POTrainer and its gradient."""
    given, beta = answers(), 0.02
    logp, rewards, value = given["logp"].clone().requires_grad_(True), drawn(23, 2 * PAIRS), drawn(24, 2 * PAIRS)
    made = names["run"](
        self=SimpleNamespace(args=SimpleNamespace(beta2=beta)), policy_logps=logp,
        inputs={"ref_logps": given["reference"], "rewards": rewards, "v_star": value},
    )  # fmt: skip
    made["loss"].backward()
    return {
        **given, "beta": beta, "rewards": rewards, "value": value, "loss": made["loss"], "gradient": logp.grad
    }  # fmt: skip


def trl_early_weights(names: Names) -> dict[str, Any]:
    """The loss of TRL's IWOPDTrainer."""
    logp, teacher, rollout = -drawn(31, 2, 6).abs(), -drawn(32, 2, 6).abs(), -drawn(33, 2, 6).abs()
    labels = torch.tensor([[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, -100, -100]])
    # Two tokens: the first one was drawn, and the other has the rest of the probability.
    logits = torch.stack([logp, (-logp.expm1()).log()], -1)
    trainer = SimpleNamespace(
        temperature=1.0, iw_opd_gamma=0.5, iw_opd_epsilon=1e-8, model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    loss = names["_compute_iw_opd_loss"](
        trainer, logits, torch.zeros_like(labels), labels, teacher, rollout, num_items_in_batch=1
    )
    return {"logp": logp, "teacher": teacher, "rollout": rollout, "lengths": [6, 4], "gamma": 0.5, "loss": loss}


HERE = "trl/experimental/"

PREFERENCES: dict[str, Question] = {
    "trl_dpo_losses": Question(
        *TRL, "trl/trainer/dpo_trainer.py", (), trl_dpo_losses, statements=("DPOTrainer._compute_loss", 17, 22)
    ),
    "trl_cpo_losses": Question(*TRL, f"{HERE}cpo/cpo_trainer.py", ("CPOTrainer.cpo_loss",), trl_cpo_losses),
    "trl_odds_ratio": Question(
        *TRL, f"{HERE}orpo/orpo_trainer.py", ("log1mexp", "ORPOTrainer.odds_ratio_loss"), trl_odds_ratio
    ),
    "trl_tpo_losses": Question(
        *TRL, f"{HERE}tpo/tpo_trainer.py", (), trl_tpo_losses, statements=("TPOTrainer._compute_loss", 13, 18)
    ),
    "trl_kto_losses": Question(
        *TRL, "trl/trainer/kto_trainer.py", (), trl_kto_losses, statements=("KTOTrainer._compute_loss", 24, 26)
    ),
    "trl_early_weights": Question(
        *TRL, f"{HERE}iw_opd/iw_opd_trainer.py", ("IWOPDTrainer._compute_iw_opd_loss",), trl_early_weights
    ),
    "trl_optimal_loss": Question(
        *TRL, f"{HERE}a2po/a2po_trainer.py", (), trl_optimal_loss, statements=("A2POTrainer.compute_loss", 2, 4)
    ),
}  # fmt: skip
