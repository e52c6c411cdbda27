"""Questions about the tools whose configurations are converted: what their settings do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.releases.asked_losses import SIGMA, noised
from tests.releases.asked_steps import transitions
from tests.releases.asking import STEPS, Names, Question, drawn, table
from tests.releases.sources import FLOW_DPPO as UNIRL
from tests.releases.sources import NFT, VERL_OMNI

PROMPTS = ["a"] * 4 + ["b"] * 4 + ["c"] * 4


def unirl_advantages(names: Names) -> dict[str, Any]:
    """Advantages of UniRL by the deviation of the group, of all samples, with all samples, and without a deviation."""
    names["_hydrate_tensor_meta"] = lambda value: value
    names["_track_with_field"] = lambda track, field, value: value
    rewards = drawn(7, 12)
    track = SimpleNamespace(rewards=rewards, sample_ids=list(range(12)), parent_ids=PROMPTS)
    forms: dict[str, dict[str, Any]] = {
        "group": {}, "batch": {"use_global_std": True}, "global": {"scope": "global"}, "none": {"normalize": False},
    }  # fmt: skip
    found = {name: names["compute_advantages"](track, **options) for name, options in forms.items()}
    return {"prompts": PROMPTS, "rewards": rewards, "advantages": found}


def verl_omni_advantages(names: Names) -> dict[str, Any]:
    """Advantages of verl-omni by the deviation of the group, of all samples, and without a deviation."""
    rewards = drawn(7, 12)
    forms = {"group": (True, False), "batch": (True, True), "none": (False, True)}
    found = {}
    for name, (by_std, whole) in forms.items():
        made = names["run"](
            sample_level_rewards=rewards[:, None], index=PROMPTS, epsilon=1e-4, norm_adv_by_std_in_grpo=by_std,
            global_std=whole, defaultdict=defaultdict,
        )  # fmt: skip
        found[name] = made["scores"][:, 0]
    return {"prompts": PROMPTS, "rewards": rewards, "advantages": found}


def unirl_steps(names: Names, eta: float) -> dict[str, Any]:
    """The step of one of UniRL's strategies."""
    sigmas = torch.as_tensor(table())

    def step(velocity: Tensor, x: Tensor, index: int, x_next: Tensor | None) -> tuple[Tensor, Tensor]:
        made, mean, std = names["step"](
            None, velocity, x, sigmas[index], sigmas[index + 1], eta=eta, prev_sample=x_next, sigma_max=sigmas[1]
        )
        log_prob: Tensor = names["compute_log_prob"](None, made, mean, std_var=std)
        return made, log_prob.flatten(1).mean(1)

    return transitions(step, eta, range(STEPS - 1))


def verl_omni_dance_steps(names: Names) -> dict[str, Any]:
    """verl-omni's step of DanceGRPO, by its statements."""
    sigmas, eta = torch.as_tensor(table()), 0.3

    def step(velocity: Tensor, x: Tensor, index: int, x_next: Tensor | None) -> tuple[Tensor, Tensor]:
        scheduler = SimpleNamespace(sigmas=sigmas, step_index=index)
        made = names["sample_previous_step"](
            scheduler, sample=x, model_output=velocity, timestep=None, noise_level=eta, prev_sample=x_next,
            sde_type="dance_sde", generator=None, return_logprobs=True, include_logprob_normalizer=True,
        )  # fmt: skip
        return made[0], made[1]

    return transitions(step, eta, range(STEPS - 1))


def unirl_nft_loss(names: Names) -> dict[str, Any]:
    """UniRL's loss of DiffusionNFT and its gradient."""
    given, beta, bound = noised(), 0.5, 1.5
    velocity = given["velocity"].clone().requires_grad_(True)
    clipped = torch.clamp(given["advantage"], -bound, bound)
    made = names["run"](
        self=SimpleNamespace(config=SimpleNamespace(beta=beta, adv_clip_max=bound, use_adaptive_weight=True)),
        x0=given["x0"], xt=(1 - SIGMA) * given["x0"] + SIGMA * given["noise"], t_exp=torch.tensor(SIGMA),
        new_pred=velocity, old_pred=given["old"], r=clipped / bound / 2 + 0.5,
    )  # fmt: skip
    made["total"].backward()
    return {**given, "beta": beta, "bound": bound, "loss": made["total"], "gradient": velocity.grad}


def unirl_windows(names: Names) -> dict[str, Any]:
    """The steps of UniRL's windows by iteration: of a range, and sliding with an overlap."""
    slides = names["WindowScheduler"](
        10,
        names["WindowConfig"](
            strategy="progressive", window_size=4, iters_per_window=5, overlap_size=1, roll_back=True
        ),
    )
    of_range = names["AllSDEScheduler"](10, timestep_fraction=[0.0, 0.5], num_sde_steps=3)
    whole = names["AllSDEScheduler"](12, timestep_fraction=0.5)

    def steps(scheduler: Any, iterations: Sequence[int]) -> list[list[int]]:
        return [sorted(scheduler.get_sde_indices(number)) for number in iterations]

    return {
        "slides": steps(slides, range(30)), "of_range": steps(of_range, range(30)), "whole": steps(whole, range(2)),
    }  # fmt: skip


def unirl_levels(names: Names) -> dict[str, Any]:
    """UniRL's noise levels with a shift."""
    return {
        "tables": [
            {"shift": shift, "steps": steps, "sigmas": names["get_sigma_schedule"](steps, shift)}
            for shift in (1.0, 3.0, 5.0)
            for steps in (4, 10)
        ]
    }


def unirl_klein_levels(names: Names) -> dict[str, Any]:
    """UniRL's exponent of the shift of FLUX.2 klein."""
    grid = [(256, 4), (1024, 10), (4096, 10), (4400, 50)]
    return {"grid": grid, "mu": [names["compute_empirical_mu"](*place) for place in grid]}


def verl_omni_goodness(names: Names) -> dict[str, Any]:
    """How good images are, from 0 to 1, by their advantages, by the mode of advantages and the bound."""
    advantages = torch.tensor([-10.0, -5.0, -1.3, -0.2, 0.0, 0.4, 1.0, 4.7, 5.0, 10.0])
    modes = ("continuous", "positive_only", "negative_only", "one_only", "binary")
    to_share = names["_advantage_to_reward_prob"]
    return {
        "advantages": advantages,
        "forms": [
            {"mode": mode, "bound": bound, "good": to_share(advantages, adv_clip_max=bound, adv_mode=mode)}
            for mode in modes
            for bound in (0.5, 1.0, 5.0)
        ],
    }  # fmt: skip


def diffusion_nft_goodness(names: Names) -> dict[str, Any]:
    """The same of the code of DiffusionNFT."""
    advantages, bound = torch.tensor([-10.0, -5.0, -1.3, -0.2, 0.0, 0.4, 1.0, 4.7, 5.0, 10.0]), 5.0
    found = []
    for mode in ("all", "positive_only", "negative_only", "one_only", "binary"):
        config = SimpleNamespace(train=SimpleNamespace(adv_clip_max=bound, adv_mode=mode))
        made = names["run"](config=config, train_sample_batch={"advantages": advantages[:, None]}, j_idx=0)
        found.append({"mode": mode, "bound": bound, "good": made["r"]})
    return {"advantages": advantages, "forms": found}


def verl_omni_decays(names: Names) -> dict[str, Any]:
    """The share of the old policy that stays, by iteration."""
    kinds = ("copy", "linear_to_0_5", "delayed_linear_to_0_999")
    names["OLD_POLICY_DECAY_SCHEDULES"] = names["run"]()["OLD_POLICY_DECAY_SCHEDULES"]
    return {kind: [names["old_policy_decay"](step, kind) for step in range(1, 260, 7)] for kind in kinds}


KERNELS = "unirl/sde/kernels.py"
DANCE, FLOW = (
    tuple(f"{name}.{method}" for method in ("step", "compute_log_prob"))
    for name in ("DanceSDEStrategy", "FlowSDEStrategy")
)
OF_TOOLS: dict[str, Question] = {
    "unirl_advantages": Question(
        *UNIRL, "unirl/types/rollout_resp.py", ("RolloutTrack.compute_advantages",), unirl_advantages
    ),
    "unirl_flow_steps": Question(*UNIRL, KERNELS, FLOW, partial(unirl_steps, eta=0.7)),
    "unirl_dance_steps": Question(*UNIRL, KERNELS, DANCE, partial(unirl_steps, eta=0.3)),
    "unirl_nft_loss": Question(
        *UNIRL,
        "unirl/algorithms/diffusionnft.py",
        (),
        unirl_nft_loss,
        block=("DiffusionNFT._compute_loss_at_t", "beta", "total"),
    ),
    "unirl_levels": Question(*UNIRL, "unirl/sde/runtime.py", ("get_sigma_schedule",), unirl_levels),
    "unirl_klein_levels": Question(
        *UNIRL, "unirl/models/flux2_klein/flux2_klein_utils.py", ("compute_empirical_mu",), unirl_klein_levels
    ),
    "unirl_windows": Question(
        *UNIRL,
        "unirl/utils/scheduler_utils.py",
        ("AllSDEScheduler", "WindowScheduler", "WindowConfig"),
        unirl_windows,
        package=("misc.py",),
    ),
    "verl_omni_advantages": Question(
        *VERL_OMNI,
        "verl_omni/trainer/diffusion/diffusion_algos.py",
        (),
        verl_omni_advantages,
        statements=("compute_flow_grpo_outcome_advantage", 1, 6),
    ),
    "verl_omni_goodness": Question(
        *VERL_OMNI,
        "verl_omni/trainer/diffusion/diffusion_algos.py",
        ("DiffusionNFTLoss._advantage_to_reward_prob",),
        verl_omni_goodness,
    ),
    "diffusion_nft_goodness": Question(*NFT, "scripts/train_nft_sd3.py", (), diffusion_nft_goodness, (910, 929)),
    "verl_omni_dance_steps": Question(
        *VERL_OMNI,
        "verl_omni/pipelines/schedulers/flow_match_sde.py",
        ("FlowMatchSDEDiscreteScheduler.sample_previous_step",),
        verl_omni_dance_steps,
    ),
    "verl_omni_decays": Question(
        *VERL_OMNI,
        "verl_omni/trainer/diffusion/diffusion_trainer_utils.py",
        ("old_policy_decay",),
        verl_omni_decays,
        (20, 24),
    ),
}
