"""Questions about one denoising step: its mean, its noise, its log-prob, and solvers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.releases.asking import STEPS, Names, Question, drawn, table
from tests.releases.sources import (
    BRANCHGRPO,
    DANCE_GRPO,
    EUPHONIUM,
    FLOW_CPS,
    FLOW_GRPO,
    G2RPO,
    MIXGRPO,
    NEWER_FLOW_GRPO,
    SAGE_GRPO,
    TP_GRPO,
)

Stepped = Callable[[Tensor, Tensor, int, Tensor | None], tuple[Tensor, Tensor]]


def transitions(step: Stepped, eta: float, indices: range) -> dict[str, Any]:
    """Sampled steps, and their log-probs under the prediction that sampled and under another one.

    Args:
        step: `(velocity, x, index, x_next) -> (x_next, log_prob)`; draws if `x_next` is None.
        eta: noise level.
        indices: steps of the table.
    """
    rows = []
    for index in indices:
        x, old, new = drawn(1 + index), drawn(101 + index), drawn(201 + index)
        # A policy that has moved a little, as it does in a run.
        new = old + 0.01 * new
        torch.manual_seed(301 + index)
        x_next, log_prob = step(old, x, index, None)
        _, moved = step(new, x, index, x_next)
        rows.append({"index": index, "x": x, "velocity": old, "moved": new, "x_next": x_next,
                     "log_prob": log_prob, "moved_log_prob": moved})  # fmt: skip
    return {"sigmas": table(), "eta": eta, "steps": rows}


def flow_grpo_steps(names: Names) -> dict[str, Any]:
    """Flow-GRPO's step, by the scheduler's table; the step from 1 has the next level in its denominator."""
    sigmas, eta = table(), 0.7
    scheduler = SimpleNamespace(sigmas=sigmas, index_for_timestep=int)

    def step(velocity: Tensor, x: Tensor, index: int, x_next: Tensor | None) -> tuple[Tensor, Tensor]:
        made, log_prob, *_ = names["sde_step_with_logprob"](
            scheduler, velocity, [index] * len(x), x, noise_level=eta, prev_sample=x_next
        )
        return made, log_prob

    return transitions(step, eta, range(STEPS - 1))


def wan_steps(names: Names) -> dict[str, Any]:
    """Flow-GRPO's step for Wan, whose states have a dimension more. It has no noise level."""
    sigmas = table()
    scheduler = SimpleNamespace(sigmas=sigmas, index_for_timestep=int)

    def step(velocity: Tensor, x: Tensor, index: int, x_next: Tensor | None) -> tuple[Tensor, Tensor]:
        wide = None if x_next is None else x_next[:, None]
        made, log_prob, *_ = names["sde_step_with_logprob"](
            scheduler, velocity[:, None], [index] * len(x), x[:, None], wide
        )
        return made[:, 0], log_prob

    return transitions(step, 1.0, range(STEPS - 1))


def dance_grpo_steps(names: Names) -> dict[str, Any]:
    """DanceGRPO's step for FLUX."""
    sigmas, eta = table(), 0.3

    def step(velocity: Tensor, x: Tensor, index: int, x_next: Tensor | None) -> tuple[Tensor, Tensor]:
        made, _, log_prob = names["flux_step"](velocity, x, eta, sigmas, index, x_next, grpo=True, sde_solver=True)
        return made, log_prob

    return transitions(step, eta, range(STEPS - 1))


def branchgrpo_steps(names: Names) -> dict[str, Any]:
    """BranchGRPO's step without a split."""
    sigmas, eta = table(), 0.3

    def step(velocity: Tensor, x: Tensor, index: int, x_next: Tensor | None) -> tuple[Tensor, Tensor]:
        made, _, log_prob = names["flux_step_with_split"](
            velocity, x, eta, sigmas, index, x_next, grpo=True, sde_solver=True
        )
        return made, log_prob

    return transitions(step, eta, range(STEPS - 1))


def mixgrpo_steps(names: Names) -> dict[str, Any]:
    """MixGRPO's step in its window, and G²RPO's step at a split."""
    sigmas, eta = table(), 0.7

    def step(velocity: Tensor, x: Tensor, index: int, x_next: Tensor | None) -> tuple[Tensor, Tensor]:
        made, _, log_prob, *_ = names["flow_grpo_step"](velocity, x, eta, sigmas, index, x_next)
        return made, log_prob

    return transitions(step, eta, range(STEPS - 1))


def mixgrpo_solver(names: Names) -> dict[str, Any]:
    """DPM-Solver++ of second order over the whole table, without noise, from given predictions."""
    sigmas, x = table(), drawn(1)
    args = SimpleNamespace(dpm_algorithm_type="dpmsolver++", dpm_solver_order=2, dpm_solver_type="midpoint")
    state, states, velocities = names["DPMState"](order=2), [], []
    # From the second level on: at sigma 1 the released half log-SNR is infinite.
    for index in range(1, STEPS):
        velocity = drawn(101 + index)
        made, *_ = names["dpm_step"](
            args, velocity, x if not states else states[-1], index, sigmas[:-1], sigmas, dpm_state=state
        )
        velocities.append(velocity)
        states.append(made)
    return {"sigmas": sigmas, "first": 1, "x": x, "velocities": velocities, "states": states}


def cps_steps(names: Names, **choice: str) -> dict[str, Any]:
    """The step of Flow-CPS: the only step of its repository, and a choice in others.

    Its log-prob is the squared distance to the mean, without a density's constants.
    """
    sigmas, eta = table(), 0.7
    scheduler = SimpleNamespace(sigmas=sigmas, index_for_timestep=int)

    def step(velocity: Tensor, x: Tensor, index: int, x_next: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        made: tuple[Tensor, Tensor, Tensor, Tensor] = names["sde_step_with_logprob"](
            scheduler, velocity, [index] * len(x), x, noise_level=eta, prev_sample=x_next, **choice
        )
        return made

    found = transitions(lambda *given: step(*given)[:2], eta, range(STEPS - 1))
    for row in found["steps"]:
        _, _, row["mean"], row["std"] = step(row["velocity"], row["x"], row["index"], row["x_next"])
    return found


def sage_steps(names: Names) -> dict[str, Any]:
    """SAGE-GRPO's step, and the factors that even its gradients out."""
    sigmas, eta = table(), 0.5

    def step(velocity: Tensor, x: Tensor, index: int, x_next: Tensor | None) -> tuple[Tensor, Tensor]:
        scheduler = SimpleNamespace(sigmas=sigmas, step_index=index, _step_index=index)
        made, _, log_prob, *_ = names["sde_step_with_logprob"](
            scheduler, velocity, x, sigmas[index], eta, x_next, sde_solver=True, sde_type="sage_grpo"
        )
        return made, log_prob

    found = transitions(step, eta, range(STEPS - 1))
    scheduler = SimpleNamespace(sigmas=sigmas)
    scheduler.compute_log_prob_grad_norms = lambda **given: names["compute_log_prob_grad_norms"](scheduler, **given)
    given = {"eta": eta, "device": "cpu", "sde_type": "sage_grpo", "sde_solver": True}
    # The last step ends at 0 and is trained by the release, so all steps have a factor.
    found["factors"] = names["compute_grad_balancing_factors"](scheduler, **given)
    found["norms"] = names["compute_log_prob_grad_norms"](scheduler, **given)
    return found


def euphonium_steps(names: Names) -> dict[str, Any]:
    """Euphonium's step, with the log-prob of the unguided mean, and the next state of the guided mean without noise."""
    sigmas, eta, scale = table(), 0.25, 0.01

    def step(velocity: Tensor, x: Tensor, index: int, x_next: Tensor | None) -> tuple[Tensor, Tensor]:
        made, _, log_prob = names["flux_step"](
            velocity, x, eta, sigmas, index, x_next, grpo=True, sde_solver=True, use_reward_gradient=False
        )
        return made, log_prob

    found = transitions(step, eta, range(STEPS - 1))
    for row in found["steps"]:
        index, row["gradient"] = row["index"], drawn(401 + row["index"])
        guided, _ = names["flux_step"](
            row["velocity"], row["x"], eta, sigmas, index, None, grpo=False, sde_solver=True,
            reward_gradient=row["gradient"], reward_gradient_scale=scale, normalize_reward_gradient=False,
            use_delta_t_for_gradient_scaling=True,
        )  # fmt: skip
        row["guided"] = guided
        # The weight of the squared distance of two velocities in the KL of a step.
        row["kl_weight"] = names["compute_trajectory_kl_weight_v2"](sigmas, index, eta=eta)
    return {**found, "scale": scale}


SAMPLING = "fastvideo/utils/sampling_utils.py"
SOLVER = (
    "DPMState", "dpm_step", "convert_model_output", "dpm_solver_first_order_update",
    "multistep_dpm_solver_second_order_update", "_sigma_to_alpha_sigma_t",
)  # fmt: skip
FLOW_STEP = ("sde_step_with_logprob",)
WAN = "flow_grpo/diffusers_patch/wan_pipeline_with_logprob.py"
PATCHED = "flow_grpo/diffusers_patch/sd3_sde_with_logprob.py"
SAGE = tuple(
    f"FlowMatchDiscreteScheduler.{name}"
    for name in ("sde_step_with_logprob", "compute_log_prob_grad_norms", "compute_grad_balancing_factors")
)
GUIDED = "euphonium/grpo/grpo_sampling/flux_step.py"
DIVERGENCE = ("euphonium/grpo/grpo_training/kl_divergence.py", ("compute_trajectory_kl_weight_v2",))

STEPS_OF: dict[str, Question] = {
    "flow_grpo_steps": Question(*FLOW_GRPO, PATCHED, FLOW_STEP, flow_grpo_steps),
    "flow_grpo_wan_steps": Question(*NEWER_FLOW_GRPO, WAN, FLOW_STEP, wan_steps),
    "flow_cps_steps": Question(*FLOW_CPS, PATCHED, FLOW_STEP, cps_steps),
    "tp_grpo_steps": Question(*TP_GRPO, PATCHED, FLOW_STEP, partial(cps_steps, sde_type="cps")),
    "dance_grpo_steps": Question(*DANCE_GRPO, "fastvideo/train_grpo_flux.py", ("flux_step",), dance_grpo_steps),
    "mixgrpo_steps": Question(*MIXGRPO, SAMPLING, ("flow_grpo_step",), mixgrpo_steps),
    "g2rpo_steps": Question(*G2RPO, "fastvideo/train_g2rpo_hps_clip.py", ("flow_grpo_step",), mixgrpo_steps),
    "mixgrpo_solver": Question(*MIXGRPO, SAMPLING, SOLVER, mixgrpo_solver),
    "branchgrpo_steps": Question(
        *BRANCHGRPO, "fastvideo/train_branchgrpo_flux.py", ("flux_step_with_split",), branchgrpo_steps
    ),
    "sage_grpo_steps": Question(*SAGE_GRPO, "hyvideo/schedulers/scheduling_flow_match_discrete.py", SAGE, sage_steps),
    "euphonium_steps": Question(*EUPHONIUM, GUIDED, ("flux_step",), euphonium_steps, beside=DIVERGENCE),
}
