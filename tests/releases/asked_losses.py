"""Questions about losses: their values, and their gradients with respect to the prediction."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.releases.asking import Names, Question, drawn, table
from tests.releases.sources import (
    AWM,
    DANCE_GRPO,
    DGPO,
    EUPHONIUM,
    FLOW_DPPO,
    FLOW_FACTORY,
    FLOW_GRPO,
    G2RPO,
    NEWER_FLOW_GRPO,
    NFT,
    PREF_GRPO,
    SAGE_GRPO,
)


def pref_grpo_kl(names: Names) -> dict[str, Any]:
    """The Gaussian KL between two steps of one noise."""
    old, new, std = drawn(1), drawn(2), torch.tensor(0.37)
    return {"mean": new, "reference": old, "std": std, "kl": names["compute_kl_loss"](new, old, std)}


SIGMA = 0.6


def noised() -> dict[str, Any]:
    """Six finished images of two groups, their noise, and predictions of three policies at one noise level."""
    rows = (6, 3, 2, 2)
    old = drawn(3, *rows)
    return {
        "x0": drawn(1, *rows), "noise": drawn(2, *rows), "sigma": SIGMA, "old": old,
        "velocity": old + 0.05 * drawn(4, *rows), "reference": old + 0.05 * drawn(5, *rows),
        "advantage": 2.0 * drawn(6, 6), "group": [0, 0, 0, 1, 1, 1],
    }  # fmt: skip


def diffusion_nft_loss(names: Names) -> dict[str, Any]:
    """The loss of DiffusionNFT and its gradient."""
    given, beta, bound = noised(), 0.5, 1.5
    velocity = given["velocity"].clone().requires_grad_(True)
    made = names["run"](
        config=SimpleNamespace(beta=beta, train=SimpleNamespace(adv_clip_max=bound)),
        train_sample_batch={"advantages": given["advantage"][:, None]}, j_idx=0,
        x0=given["x0"], xt=(1 - SIGMA) * given["x0"] + SIGMA * given["noise"], t_expanded=torch.tensor(SIGMA),
        forward_prediction=velocity, old_prediction=given["old"],
    )  # fmt: skip
    made["loss"].backward()
    return {**given, "beta": beta, "bound": bound, "loss": made["loss"], "gradient": velocity.grad}


def awm_log_prob(names: Names) -> dict[str, Any]:
    """The log-prob of AWM with its generalised Huber weighting, and its gradient."""
    given, power = noised(), 0.25
    velocity = given["velocity"].clone().requires_grad_(True)
    made = names["run"](
        model_output=velocity, random_noise=given["noise"], clean_latents=given["x0"], timestep=torch.tensor(SIGMA),
        weighting="ghuber", config=SimpleNamespace(train=SimpleNamespace(ghuber_power=power)),
    )  # fmt: skip
    made["log_prob"].sum().backward()
    return {**given, "power": power, "log_prob": made["log_prob"], "gradient": velocity.grad}


def dgpo_loss(names: Names) -> dict[str, Any]:
    """The gradient of DGPO's loss, of one process and without its clip."""
    given, beta = noised(), 100.0
    velocity = given["velocity"].clone().requires_grad_(True)
    names["dist"] = SimpleNamespace(all_reduce=lambda *_, **__: None, ReduceOp=SimpleNamespace(SUM=None))
    groups = {"local_group_indices": torch.tensor(given["group"]), "num_groups": 2}
    loss = names["compute_group_dgpo_loss_allreduce"](
        velocity, given["reference"], given["noise"] - given["x0"], given["advantage"], groups, None, beta,
        group_size=3,
    )  # fmt: skip
    loss.backward()
    return {**given, "beta": beta, "gradient": velocity.grad}


def dgpo_clipped_loss(names: Names) -> dict[str, Any]:
    """DGPO's loss with its clip and its KL, after the policy has moved away from the old one."""
    given, beta, weight, clip = noised(), 100.0, 0.02, 1e-2
    names["dist"] = SimpleNamespace(all_reduce=lambda *_, **__: None, ReduceOp=SimpleNamespace(SUM=None))
    velocity = given["velocity"].clone().requires_grad_(True)
    made = names["run"](
        model_v=velocity, old_v=given["old"], ref_old_v=given["reference"], ref_dgpo_v=given["reference"],
        target_v=given["noise"] - given["x0"], x0=given["x0"], use_old=True, accelerator=None, info={"kl_loss": []},
        sample={"advantages": given["advantage"][:, None]}, j=0,
        group_info={"local_group_indices": torch.tensor(given["group"]), "num_groups": 2},
        config=SimpleNamespace(
            train=SimpleNamespace(adv_clip_max=5, beta_dpo=beta, beta=weight), clip_range=clip, clip_dsm=True,
            clip_kl=False, sample=SimpleNamespace(num_image_per_prompt=3),
        ),
    )  # fmt: skip
    made["loss"].backward()
    return {
        **given, "beta": beta, "kl": weight, "clip": clip, "clipped": made["should_clip"].int(),
        "kl_loss": made["kl_loss"], "gradient": velocity.grad,
    }  # fmt: skip


def crd_loss(names: Names) -> dict[str, Any]:
    """The loss of CRD on the images of one prompt, in its forms; its KL, and the gradient of both together."""
    given, beta, bound, weight = noised(), 0.7, 1.5, 0.1
    found: dict[str, Any] = {**given, "group": [0] * 6, "beta": beta, "bound": bound, "kl": weight, "forms": []}
    forms = [(True, -1.0, "mse"), (False, -1.0, "mse"), (True, 0.3, "mse"), (True, -1.0, "bce"), (True, 0.3, "bce")]
    for relative, temperature, match in forms:
        velocity = given["velocity"].clone().requires_grad_(True)
        trainer = SimpleNamespace(
            adaptive_logp=relative, weight_temp=temperature, crd_loss_type=match, crd_beta=beta, kl_beta=weight,
            reward_adaptive_kl=True, training_args=SimpleNamespace(adv_clip_range=(-bound, bound)),
            accelerator=SimpleNamespace(gather=lambda value: value, device="cpu"),
        )  # fmt: skip
        trainer._compute_crd_loss = partial(names["_compute_crd_loss"], trainer)
        made = names["run"](
            self=trainer, forward_pred=velocity, old_v_pred=given["old"], ref_pred=given["reference"],
            v_target=given["noise"] - given["x0"], batch={"advantage": given["advantage"]},
        )  # fmt: skip
        made["loss"].backward()
        found["forms"].append({
            "relative": relative, "temperature": temperature, "match": match, "loss": made["policy_loss"],
            "kl_loss": made["kl_loss"], "gradient": velocity.grad,
        })  # fmt: skip
    return found


def awm_loss(names: Names) -> dict[str, Any]:
    """The whole loss of AWM at one noise level: its clip, its scaled advantage, its KL and its trust term."""
    given, power, weights = noised(), 0.25, {"kl": 0.001, "trust": 1.0}
    given["advantage"] = 3.0 * given["advantage"]
    velocity = given["velocity"].clone().requires_grad_(True)

    def log_prob(prediction: Tensor) -> Tensor:
        error = -((prediction.double() - (given["noise"].double() - given["x0"].double())) ** 2)
        mean = error.mean(dim=tuple(range(1, error.ndim)))
        made: Tensor = -SIGMA / power * ((-mean + 1e-10) ** power - 1e-10**power)
        return made

    def shaped(tensor: Tensor) -> Tensor:
        return tensor[None]

    rows = len(given["x0"])
    made = names["run"](
        sample={
            "advantages": given["advantage"][:, None], "log_probs": shaped(log_prob(velocity)),
            "old_log_probs": shaped(log_prob(given["old"])), "model_output": shaped(velocity.double()),
            "model_output_ref": shaped(given["reference"].double()), "model_output_ema": shaped(given["old"].double()),
            "std_dev_t": torch.ones(1),
        },
        accelerator=SimpleNamespace(is_main_process=False),
        config=SimpleNamespace(
            train=SimpleNamespace(
                adv_clip_max=5, advantage_max=1, loss_type="exp_first", train_timesteps=1, clip_range=1.0,
                beta=weights["kl"], kl_weight="Uniform", ema_beta=weights["trust"], kl_ema_weight="Uniform",
            )
        ),
    )  # fmt: skip
    made["loss"].backward()
    assert made["ratio"].shape == (rows,)
    return {**given, "power": power, "clip": 1.0, **weights, "loss": made["loss"], "gradient": velocity.grad}


def flow_dpo_loss(names: Names) -> dict[str, Any]:
    """The loss of pairs in Flow-GRPO's repository, whose good images come first, and its gradient."""
    given, beta = noised(), 100.0
    velocity = given["velocity"].clone().requires_grad_(True)
    made = names["run"](
        model_pred=velocity, model_pred_ref=given["reference"], target=given["noise"] - given["x0"], bsz=3,
        config=SimpleNamespace(train=SimpleNamespace(beta=beta)),
    )  # fmt: skip
    made["loss"].backward()
    return {**given, "beta": beta, "loss": made["loss"], "gradient": velocity.grad}


def edges(rows: int, seed: int) -> dict[str, Any]:
    """States, the noise of their steps, advantages of both signs, and predictions before and after a move."""
    shape = (rows, 3, 2, 2)
    old = drawn(seed + 2, *shape)
    return {
        "x": drawn(seed, *shape), "noise": drawn(seed + 1, *shape), "old": old,
        "velocity": old + 0.02 * drawn(seed + 3, *shape), "reference": old + 0.05 * drawn(seed + 4, *shape),
        "advantage": 2.0 * drawn(seed + 5, rows),
    }  # fmt: skip


# A clip that holds some steps back and not others, for the moves that `edges` has.
BOUND = 3e-4


def flow_loss(names: Names, guard: bool, rows: int, index: int) -> dict[str, Any]:
    """One step of Flow-GRPO's training, or of GRPO-Guard's."""
    sigmas, eta, given = table(), 0.7, edges(rows, 40 + 10 * index)
    scheduler = SimpleNamespace(sigmas=sigmas, index_for_timestep=int)

    def scored(velocity: Tensor, x_next: Tensor | None) -> Any:
        more = {"return_sqrt_dt": True} if guard else {}
        return names["sde_step_with_logprob"](
            scheduler, velocity, [index] * rows, given["x"], noise_level=eta, prev_sample=x_next, **more
        )

    _, _, mean, std, *_ = scored(given["old"], None)
    x_next = mean + std * torch.sqrt(sigmas[index] - sigmas[index + 1]) * given["noise"]
    _, before, mean, *_ = scored(given["old"], x_next)
    velocity = given["velocity"].clone().requires_grad_(True)
    _, log_prob, now, std, *rest = scored(velocity, x_next)
    made = names["run"](
        sample={"advantages": given["advantage"][:, None], "log_probs": before[:, None],
                "prev_sample_mean": mean[:, None]},
        j=0, log_prob=log_prob, prev_sample_mean=now, std_dev_t=std, sqrt_dt=rest[0] if rest else None,
        prev_sample_mean_ref=scored(given["reference"], x_next)[2], info={"kl_loss": []},
        config=SimpleNamespace(
            rationorm=guard, train=SimpleNamespace(adv_clip_max=5, clip_range=BOUND, beta=0.0 if guard else 0.04)
        ),
    )  # fmt: skip
    made["policy_loss"].backward()
    return {
        **given, "index": index, "x_next": x_next, "ratio": made["ratio"], "loss": made["policy_loss"],
        "gradient": velocity.grad, **({} if guard else {"kl": made["kl_loss"]}),
    }  # fmt: skip


def flow_grpo_loss(names: Names) -> dict[str, Any]:
    """The loss of Flow-GRPO on four rows, and its KL."""
    return {"sigmas": table(), "eta": 0.7, "clip": BOUND, "steps": [flow_loss(names, False, 4, k) for k in (0, 3, 6)]}


def grpo_guard_loss(names: Names) -> dict[str, Any]:
    """The loss of GRPO-Guard on one row, and on two rows, whose bias is one number."""
    steps = [flow_loss(names, True, rows, index) for index in (0, 3, 6) for rows in (1, 2)]
    return {"sigmas": table(), "eta": 0.7, "clip": BOUND, "steps": steps}


def pref_grpo_loss(names: Names) -> dict[str, Any]:
    """The loss of Pref-GRPO on four rows, each with its own bias."""
    sigmas, eta, found = table(), 0.7, []
    for index in (0, 3, 6):
        given = edges(4, 40 + 10 * index)

        def scored(velocity: Tensor, x_next: Tensor | None) -> Any:
            return names["flow_grpo_step"](velocity, given["x"], eta, sigmas, index, x_next, return_stats=True)  # noqa: B023

        *_, mean, scale, _ = scored(given["old"], None)
        x_next = mean + scale * given["noise"]
        _, _, before, mean, *_ = scored(given["old"], x_next)
        velocity = given["velocity"].clone().requires_grad_(True)
        _, _, log_prob, now, scale, dt = scored(velocity, x_next)
        made = names["run"](
            args=SimpleNamespace(rationorm=True), new_log_probs=log_prob, prev_sample_mean=now, noise_scale=scale,
            dt=dt, adv_clip_max=5, clip_range=BOUND, _=0,
            sample={"advantages": given["advantage"], "log_probs": before[:, None], "prev_sample_mean": mean[:, None]},
        )  # fmt: skip
        made["policy_loss"].backward()
        found.append({**given, "index": index, "x_next": x_next, "ratio": made["ratio"], "loss": made["policy_loss"],
                      "gradient": velocity.grad})  # fmt: skip
    return {"sigmas": sigmas, "eta": eta, "clip": BOUND, "steps": found}


def dance_grpo_loss(names: Names) -> dict[str, Any]:
    """The loss of DanceGRPO on four rows of one step."""
    sigmas, eta, found = table(), 0.3, []
    for index in (0, 3, 6):
        given = edges(4, 40 + 10 * index)

        def scored(velocity: Tensor, x_next: Tensor | None) -> Any:
            return names["flux_step"](velocity, given["x"], eta, sigmas, index, x_next, grpo=True, sde_solver=True)  # noqa: B023

        torch.manual_seed(501 + index)
        x_next, *_, before = scored(given["old"], None)
        velocity = given["velocity"].clone().requires_grad_(True)
        *_, log_prob = scored(velocity, x_next)
        made = names["run"](
            sample={"advantages": given["advantage"], "log_probs": before[:, None]}, _=0, new_log_probs=log_prob,
            adv_clip_max=5.0, clip_range=BOUND, args=SimpleNamespace(gradient_accumulation_steps=1), train_timesteps=1,
        )  # fmt: skip
        made["loss"].backward()
        del given["noise"]
        found.append({**given, "index": index, "x_next": x_next, "ratio": made["ratio"], "loss": made["loss"],
                      "gradient": velocity.grad})  # fmt: skip
    return {"sigmas": sigmas, "eta": eta, "clip": BOUND, "steps": found}


def euphonium_loss(names: Names) -> dict[str, Any]:
    """The loss of Euphonium with an advantage of the image and one of the step, and its gradient by the log-prob."""
    rows = 24
    before, outcome, process = drawn(31, rows), 2.0 * drawn(32, rows), 2.0 * drawn(33, rows, 1)
    log_prob = (before + 5e-4 * drawn(34, rows)).requires_grad_(True)
    made = names["run"](
        sample={"log_probs": before[:, None], "image_advantages": outcome, "process_advantages": process},
        new_log_probs=log_prob, timestep_index=0, perms=torch.zeros(1, 1, dtype=torch.long), i=0, adv_clip_max=5.0,
        clip_range=BOUND, args=SimpleNamespace(gradient_accumulation_steps=1), train_timesteps=1,
        process_reward_advantage_mode="both", reward_names=["image"], reward_weights={"image": 0.7},
        outcome_reward_advantage_coef=1.0, process_reward_advantage_coef=0.5,
    )  # fmt: skip
    loss = sum(made["weighted_losses"])
    loss.backward()
    return {
        "before": before, "log_prob": log_prob, "outcome": outcome, "process": process[:, 0], "clip": BOUND,
        "weights": [0.7, 0.5], "loss": loss, "gradient": log_prob.grad,
    }  # fmt: skip


def g2rpo_loss(names: Names) -> dict[str, Any]:
    """The loss of G²RPO: branches of three steps, judged by two rewards at two granularities."""
    sigmas, eta, splits, branches, shape = table(), 0.7, [0, 2, 4], 4, (1, 3, 4)
    main, old = ([drawn(60 + k + first, *shape) for k in splits] for first in (0, 10))
    velocities = [(v + 0.02 * drawn(80 + k, *shape)).requires_grad_(True) for k, v in zip(splits, old)]
    torch.manual_seed(601)
    sampled = [
        names["flow_grpo_step"](v.repeat(branches, 1, 1), x.repeat(branches, 1, 1), eta, sigmas, k, None)
        for v, x, k in zip(old, main, splits)
    ]
    rewards = [[drawn(90 + 10 * kind + grain, branches, len(splits)) for grain in range(2)] for kind in range(2)]
    predictions, nothing = iter(velocities), torch.zeros(branches, 1)
    names["get_pred"] = lambda *_: next(predictions)
    names["dist"] = SimpleNamespace(all_reduce=lambda *_, **__: None, ReduceOp=SimpleNamespace(AVG=None))
    names["run"](
        samples={
            "all_rewards": rewards[0], "all_rewards_2": rewards[1], "timesteps": torch.zeros(branches, len(splits)),
            "latents": torch.stack([x.repeat(branches, 1, 1) for x in main], dim=1),
            "next_latents": torch.stack([made[0] for made in sampled], dim=1),
            "log_probs": torch.stack([made[2] for made in sampled], dim=1),
            **dict.fromkeys(("encoder_hidden_states", "pooled_prompt_embeds", "text_ids", "image_ids"), nothing),
        },
        args=SimpleNamespace(
            num_generations=branches, clip_range=BOUND, adv_clip_max=5.0, eta=eta, eta_step_list=splits
        ),
        sigma_schedule=sigmas, transformer=None, total_loss=0.0,
    )  # fmt: skip
    return {
        "sigmas": sigmas, "eta": eta, "clip": BOUND, "splits": splits, "rewards": rewards, "x": main, "old": old,
        "velocity": velocities, "x_next": [made[0] for made in sampled], "gradient": [v.grad for v in velocities],
    }  # fmt: skip


def flow_dppo_loss(names: Names) -> dict[str, Any]:
    """Flow-DPPO's loss of sampled steps, of which some have moved further than the threshold."""
    rows, std, threshold = 8, 0.4, 2e-3
    shape = (rows, 1, 3, 2, 2)
    noise, shift = drawn(21, *shape), 0.03 * drawn(22, *shape)
    mean, advantage = drawn(23, *shape), 2.0 * drawn(24, rows, 1)
    moved = (mean + shift).requires_grad_(True)
    x_next = mean + std * noise

    def log_prob(centre: Tensor) -> Tensor:
        made: Tensor = (-((x_next - centre) ** 2) / (2 * std**2)).mean(dim=(2, 3, 4))
        return made

    each, metrics = names["_flowdppo_kl_adv_loss"](
        new_logp=log_prob(moved), old_logp=log_prob(mean), new_means=moved, old_means=mean, advantages=advantage,
        sigma_t=torch.full((1, 1, 1, 1, 1), std), kl_mask_threshold=threshold,
    )  # fmt: skip
    each.mean().backward()
    return {
        "mean": mean, "shift": moved.detach() - mean, "noise": noise, "std": std, "advantage": advantage,
        "threshold": threshold, "loss": each.mean(), "masked": metrics["masked_fraction"], "gradient": moved.grad,
    }  # fmt: skip


def sage_grpo_kl(names: Names) -> dict[str, Any]:
    """The two divergences of SAGE-GRPO on three rows of one step, and their sum, with the gradients of all three."""
    std, weights, shape = 0.3, (1.0, 0.1), (3, 2, 4, 4)
    old, noise = drawn(701, *shape), drawn(703, *shape)
    anchor = old + 0.1 * drawn(702, *shape)
    mean = (old + 0.05 * drawn(704, *shape)).requires_grad_(True)
    x_next = old + std * noise

    def log_prob(of: Tensor) -> Tensor:
        return -((x_next - of).square() / (2.0 * std**2)).flatten(1).mean(1)

    controller = SimpleNamespace(update=lambda _: None)
    made = names["run"](
        prev_means=mean, prev_means_ref=anchor, std_devs=torch.full((3,), std), device="cpu", use_dual_kl=True,
        sample={"log_probs": log_prob(old)[:, None]}, j=0, new_log_probs=log_prob(mean), dual_moving_weight=weights[0],
        dual_step_weight=weights[1], kl_w=1e-5, args=SimpleNamespace(_kl_controller=controller),
    )  # fmt: skip
    found = {"std": std, "weights": weights, "mean": mean, "anchor": anchor, "old": old, "noise": noise}
    for key, name in (("moving", "kl_loss"), ("step", "kl_stepwise"), ("sum", "effective_kl")):
        found |= {key: made[name], f"{key}_gradient": torch.autograd.grad(made[name], mean, retain_graph=True)[0]}
    return found


PATCHED = ("flow_grpo/diffusers_patch/sd3_sde_with_logprob.py", ("sde_step_with_logprob",))
GUARDED = "scripts/train_sd3_GRPO_Guard.py"
MATCHING = "advantage_weighted_matching/scripts/train_sd3_awm.py"
DIRECT, GROUPED = "scripts/train_sd3_dgpo.py", ("compute_group_dgpo_loss_allreduce",)
STEP = ("fastvideo/grpo/steps.py", ("flow_grpo_step",))

LOSSES: dict[str, Question] = {
    "flow_grpo_loss": Question(*FLOW_GRPO, "scripts/train_sd3.py", (), flow_grpo_loss, (881, 899), beside=PATCHED),
    "grpo_guard_loss": Question(*NEWER_FLOW_GRPO, GUARDED, (), grpo_guard_loss, (910, 939), beside=PATCHED),
    "pref_grpo_loss": Question(*PREF_GRPO, "fastvideo/train_flux.py", (), pref_grpo_loss, (723, 756), beside=STEP),
    "dance_grpo_loss": Question(
        *DANCE_GRPO, "fastvideo/train_grpo_flux.py", ("flux_step",), dance_grpo_loss, (589, 603)
    ),
    "euphonium_loss": Question(*EUPHONIUM, "euphonium/grpo/grpo_training/trainer.py", (), euphonium_loss, (407, 479)),
    "g2rpo_loss": Question(
        *G2RPO,
        "fastvideo/train_g2rpo_hps_clip.py",
        ("flow_grpo_step",),
        g2rpo_loss,
        statements=("train_one_step", 19, 28),
    ),
    "flow_dppo_loss": Question(
        *FLOW_DPPO, "unirl/algorithms/flowdppo.py", ("_gaussian_kl_div", "_flowdppo_kl_adv_loss"), flow_dppo_loss
    ),
    "flow_dpo_loss": Question(*FLOW_GRPO, "scripts/train_sd3_dpo.py", (), flow_dpo_loss, (926, 939)),
    "diffusion_nft_loss": Question(*NFT, "scripts/train_nft_sd3.py", (), diffusion_nft_loss, (908, 962)),
    "awm_log_prob": Question(*AWM, MATCHING, (), awm_log_prob, (238, 251)),
    "crd_loss": Question(
        *FLOW_FACTORY, "src/flow_factory/trainers/crd.py", ("CRDTrainer._compute_crd_loss",), crd_loss, (754, 824)
    ),
    "awm_loss": Question(*AWM, MATCHING, (), awm_loss, (1293, 1354)),
    "dgpo_loss": Question(*DGPO, DIRECT, GROUPED, dgpo_loss),
    "dgpo_clipped_loss": Question(*DGPO, DIRECT, GROUPED, dgpo_clipped_loss, (1127, 1158)),
    "sage_grpo_kl": Question(
        *SAGE_GRPO, "hyvideo/utils/grpo_utils.py", (), sage_grpo_kl, block=("train_one_step", "mu_diff_sq", "kl_beta")
    ),
    "pref_grpo_kl": Question(*PREF_GRPO, "fastvideo/grpo/kl.py", ("compute_kl_loss",), pref_grpo_kl),
}
