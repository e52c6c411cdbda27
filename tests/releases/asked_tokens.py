"""Questions about losses of language models: their values, and their gradients by the log-probs of tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.releases.asking import Names, Question, drawn
from tests.releases.sources import FLOW_DPPO, SPG, STABLE_RL, TRL


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


def spg_bounds(names: Names) -> dict[str, Any]:
    """Losses of SPG and their gradients, for four estimates of bad answers, and how often tokens are masked.

    The model knows two tokens: all answers consist of the one, and the other has the rest of the probability.
    """
    rows, prompt, length, mask, end = 4, 3, 12, 2, [12, 7, 4, 10]
    logp = -2.0 * drawn(1, rows, 2, length).abs() - 0.05
    text = (torch.arange(length) < torch.tensor(end)[:, None]).int()
    ids, advantage = torch.zeros(rows, prompt + length, dtype=torch.long), torch.tensor([0.8, -0.5, 0.3, -0.6])
    names["set_seed"] = torch.manual_seed
    args = SimpleNamespace(
        forward_type="block_random", num_t=2, min_t=0, max_t=1, block_length=4, use_mask_prompt=True, cfg_scale=0.0,
        p_mask_prompt=0.15, mask_id=mask,
    )  # fmt: skip
    seen: list[torch.Tensor] = []

    def forward(*given: Any, **options: Any) -> Any:
        seen.append(names["forward_process"](self, *given, **options)[0])
        return seen[-1], torch.ones_like(seen[-1], dtype=torch.bool)

    self = SimpleNamespace(args=args, forward_process=forward)
    self.get_logits = lambda *given: names["get_logits"](self, *given)
    found: dict[str, Any] = {"logp": logp, "text": text, "advantage": advantage, "forms": []}
    for kind, beta, mix in (("elbo", 1.5, 0.5), ("eubo", 1.0, 0.5), ("eubo", 2.0, 0.5), ("mix", 1.5, 0.25)):
        args.logp_estimation, args.eubo_beta, args.mix_weight = kind, beta, mix
        leaf = logp.clone().requires_grad_(True)
        known = torch.stack([leaf, (-leaf.exp()).log1p(), torch.full_like(leaf, -torch.inf)], dim=-1)
        made = SimpleNamespace(logits=torch.cat([torch.zeros(rows, 2, prompt, 3), known], dim=2).flatten(0, 1))
        per_seq = names["_get_per_seq_logps"](
            self, lambda *_, made=made, **__: made, ids[None], length, [7], torch.ones(rows, prompt), text,
            advantage > 0,
        )  # fmt: skip
        loss = names["run"](inputs={"advantages": advantage}, per_seq_logps=per_seq, completion_mask=text)["loss"]
        loss.backward()
        found["forms"].append({"kind": kind, "beta": beta, "mix": mix, "loss": loss, "gradient": leaf.grad})
    found["masked"] = (seen[0] == mask)[:, :, prompt:].int()
    often = torch.zeros(length)
    for seed in range(2000):
        noisy, _ = names["forward_process"](
            self, ids[-1:], torch.arange(prompt + length) < prompt, mask, seed=seed, completion_mask=text[-1:]
        )
        often += (noisy == mask)[0, :, prompt:].sum(0)
    return {**found, "often": often, "draws": 4000}


TRAINER, OFF_POLICY = "trl/trainer/grpo_trainer.py", ("GRPOTrainer.get_off_policy_mask",)
MASKED = ("_compute_token_mask_for_policy_loss", "compute_policy_loss_with_mask")
SPG_METHODS = ("SPGTrainer.forward_process", "SPGTrainer.get_logits", "SPGTrainer._get_per_seq_logps")
TOKENS: dict[str, Question] = {
    "drpo_loss": Question(*FLOW_DPPO, "unirl/algorithms/drpo.py", ("_drpo_loss",), drpo_loss),
    "dppo_loss": Question(*STABLE_RL, "verl/trainer/ppo/core_algos.py", MASKED, dppo_loss),
    "spg_bounds": Question(
        *SPG, "spg/spg_trainer.py", SPG_METHODS, spg_bounds, statements=("SPGTrainer.compute_loss", 11, 14)
    ),
    "trl_masks": Question(*TRL, TRAINER, OFF_POLICY, trl_masks, (3069, 3076)),
}
