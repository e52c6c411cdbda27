"""Questions about losses of language models: their values, and their gradients by the log-probs of tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.releases.asking import Names, Question, drawn
from tests.releases.sources import FLOW_DPPO, STABLE_RL, TRL


def tokens(rows: int = 6, length: int = 9) -> dict[str, Any]:
    """Log-probs of answers before and after a move, some of them large, and advantages of both signs."""
    old = -2.0 * drawn(1, rows, length).abs()
    return {
        "old": old, "logp": torch.minimum(old + 0.7 * drawn(2, rows, length), torch.tensor(-1e-3)),
        "advantage": 2.0 * drawn(3, rows), "lengths": [9, 7, 4, 1, 8, 2],
    }  # fmt: skip


def drpo_loss(names: Names) -> dict[str, Any]:
    """The losses of DRPO and of SPO in UniRL, at the published threshold and at one that tokens cross."""
    given = tokens()
    found: dict[str, Any] = {**given, "forms": []}
    for by_probability in (True, False):
        for epsilon in (12.5, 0.1):
            logp = given["logp"].clone().requires_grad_(True)
            loss, _ = names["_drpo_loss"](
                new_logp=logp, old_logp=given["old"], epsilon=epsilon, mu_weighted=by_probability,
                advantages=given["advantage"][:, None].expand_as(logp),
            )  # fmt: skip
            loss.sum().backward()
            found["forms"].append(
                {"by_probability": by_probability, "epsilon": epsilon, "loss": loss, "gradient": logp.grad}
            )
    return found


def dppo_loss(names: Names) -> dict[str, Any]:
    """The masks of DPPO, and the gradient of its loss, for both divergences of two outcomes and two sets of bounds."""
    given = tokens()
    found: dict[str, Any] = {**given, "most": 1.5, "forms": []}
    everywhere = torch.ones_like(given["logp"])
    for divergence, low, high in (("tv", 0.15, 0.15), ("tv", 0.02, 0.1), ("kl", 0.05, 0.05), ("kl", 0.2, 0.01)):
        logp = given["logp"].clone().requires_grad_(True)
        config = {"clip_ratio": 0.2, "clip_ratio_low": low, "clip_ratio_high": high}
        advantage = given["advantage"][:, None].expand_as(logp)
        kept = names["_compute_token_mask_for_policy_loss"](
            rollout_log_prob=given["old"], old_log_prob=given["old"], log_prob=logp, advantages=advantage,
            response_mask=everywhere, loss_mode=f"dppo_binary_{divergence}", config=SimpleNamespace(**config),
        )  # fmt: skip
        names["verl_F"] = SimpleNamespace(masked_mean=lambda *_: torch.zeros(()))
        names["agg_loss"] = lambda loss_mat, **_: loss_mat.sum()
        settings = {"global_batch_info": {}, "get": {"clip_ratio_c": found["most"]}.get}
        loss, _ = names["compute_policy_loss_with_mask"](
            old_log_prob=given["old"], log_prob=logp, advantages=advantage, response_mask=everywhere, mask=kept,
            rollout_log_prob=given["old"], entropy=everywhere, topk_kl=everywhere, topk_tv=everywhere,
            config=SimpleNamespace(**settings),
        )  # fmt: skip
        loss.backward()
        found["forms"].append({
            "divergence": divergence, "low": low, "high": high, "kept": kept.int(), "loss": loss, "gradient": logp.grad,
        })  # fmt: skip
    return found


def trl_masks(names: Names) -> dict[str, Any]:
    """Which answers are kept as not too far off the policy, and the KL times the ratio with its gradient."""
    given = tokens() | {"advantage": [-1.0, 1.0, -1.0, 0.0, -1.0, -1.0], "limits": [-0.1, 0.05, 0.2]}
    lengths = torch.tensor(given["lengths"])[:, None]
    mask = (torch.arange(given["logp"].shape[1]) < lengths).int()
    found: dict[str, Any] = {**given, "kept": [], "reference": given["old"] + 0.5 * drawn(4, *mask.shape)}
    for limit in given["limits"]:
        kept = names["get_off_policy_mask"](
            torch.tensor(given["advantage"])[:, None], given["logp"], given["old"], mask, limit
        )
        found["kept"].append(kept[:, 0])
    logp = given["logp"].clone().requires_grad_(True)
    made = names["run"](
        self=SimpleNamespace(beta=0.1, args=SimpleNamespace(use_bias_correction_kl=True)), per_token_logps=logp,
        inputs={"ref_per_token_logps": found["reference"]}, coef_1=(logp - given["old"]).exp(),
    )  # fmt: skip
    made["per_token_kl"].sum().backward()
    return {**found, "kl": made["per_token_kl"], "gradient": logp.grad}


TRAINER, OFF_POLICY = "trl/trainer/grpo_trainer.py", ("GRPOTrainer.get_off_policy_mask",)
MASKED = ("_compute_token_mask_for_policy_loss", "compute_policy_loss_with_mask")
TOKENS: dict[str, Question] = {
    "drpo_loss": Question(*FLOW_DPPO, "unirl/algorithms/drpo.py", ("_drpo_loss",), drpo_loss),
    "dppo_loss": Question(*STABLE_RL, "verl/trainer/ppo/core_algos.py", MASKED, dppo_loss),
    "trl_masks": Question(*TRL, TRAINER, OFF_POLICY, trl_masks, (3069, 3076)),
}
