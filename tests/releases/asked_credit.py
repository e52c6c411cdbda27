"""Questions about credit: advantages, rewards of nodes and steps, and how several rewards become one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.releases.asking import Names, Question, drawn
from tests.releases.sources import BRANCHGRPO, FLOW_GRPO, MIXGRPO, NEIGHBOURS, PREF_GRPO, TP_GRPO


def flow_grpo_advantages(names: Names) -> dict[str, Any]:
    """Advantages within prompts, by the deviation of the prompt and by the deviation of all samples."""
    prompts = ["a"] * 4 + ["b"] * 4 + ["c"] * 4
    rewards = drawn(7, 12).double().numpy()
    found = {
        scale: names["PerPromptStatTracker"](global_std=scale == "batch").update(prompts, rewards)
        for scale in ("group", "batch")
    }
    return {"prompts": prompts, "rewards": rewards, "advantages": found}


def branchgrpo_advantages(names: Names) -> dict[str, Any]:
    """Rewards of all nodes of a tree of three binary splits, and advantages among the nodes of a depth."""
    node = names["TreeNode"]
    root = node("0", torch.zeros(1))
    parents, level, log_probs = [-1], [(0, root)], drawn(9, 14)
    leaves: list[Any] = []
    order = [root]
    for depth in range(3):
        following = []
        for number, parent in level:
            for _ in range(2):
                child = node(str(len(order)), torch.zeros(1), parent=parent, step=depth + 1)
                child.log_prob = log_probs[len(order) - 1]
                parent.add_child(child)
                parents.append(number)
                following.append((len(order), child))
                order.append(child)
        level = following
    leaves = [child for _, child in level]
    rewards, found = drawn(8, len(leaves)), {}
    for weighted in (False, True):
        _, by_depth = names["compute_node_rewards_from_leaves"](root, rewards, leaves, use_prob_weighted=weighted)
        names["compute_hierarchical_advantages_by_depth"](by_depth)
        found["path" if weighted else "mean"] = {
            "values": [float(one.reward) for one in order], "advantages": [float(one.advantage) for one in order],
        }  # fmt: skip
    return {"parents": parents, "rewards": rewards, "log_probs": log_probs, "found": found}


FORMS = ("step", "total", "rest")


def tp_rewards(names: Names) -> dict[str, Any]:
    """Rewards of steps in three forms: of the paper, of the configurations, and of the released scripts.

    The last step of the window has no reward in the release, because its completion is the image itself.
    """
    # Some of the rewards are equal.
    states = torch.cat([drawn(11, 40, 6), drawn(18, 40, 6).round()])
    found = {}
    for form in FORMS:
        config = SimpleNamespace(
            turn_on_bonus_global_step=0, apply_first_step_bonus=True, use_delta_global=True, eta=1.0,
            take_delta_global_as_main=form == "total", propagate_bonus_to_future_steps=False,
            select_only_positive_intermediate_step=False, use_balanced_bonus=False,
            select_first_step_only_from_consistent_trajectory=form == "rest",
            select_inter_step_only_from_consistent_trajectory=form == "rest",
            use_sde_minus_rt=form == "rest", drop_original_reward_when_having_bonus=form == "rest",
            indicator_wo_delta_global_constraint=False,
        )  # fmt: skip
        sample = {
            "rewards": {"avg": states[:, -1]}, "ode_rewards": {"avg": states[:, 0]},
            "intermediate_results": [
                {"sde_steps_count": k, "rewards": {"avg": states[:, k]}} for k in range(1, states.shape[1] - 1)
            ],
        }  # fmt: skip
        names["run"](sample=sample, config=config, global_step=0)
        found[form] = sample["process_rewards"]
    return {"states": states, "rewards": found}


def mixed_rewards(names: Names) -> dict[str, Any]:
    """Advantages of two groups from three rewards: each whitened in its group, weighted, and added."""
    rewards, weights = drawn(12, 8, 3), {"a": 1.0, "b": 0.5, "c": 2.0}
    samples: dict[str, Any] = {"rewards": dict(zip(weights, rewards.unbind(1)))}
    args = SimpleNamespace(use_group=True, multi_reward_mix="advantage_aggr", num_generations=4, trimmed_ratio=0.0)
    names["run"](args=args, samples=samples, reward_weights=weights)
    return {
        "rewards": rewards, "weights": list(weights.values()), "groups": [0] * 4 + [1] * 4,
        "advantages": samples["advantages"],
    }  # fmt: skip


def weighted_rewards(names: Names) -> dict[str, Any]:
    """The same in Pref-GRPO: with `apply_gdpo`, the sum is whitened over all images."""
    rewards, weights = drawn(12, 8, 3), {"a": 0.4, "b": 0.6, "c": 2.0}
    found = {}
    for whitened in (False, True):
        found["whitened" if whitened else "sum"], _ = names["compute_weighted_advantages"](
            dict(zip(weights, rewards.unbind(1))), weights, gather_tensor=lambda values: values, use_group=True,
            num_generations=4, apply_gdpo=whitened,
        )  # fmt: skip
    return {"rewards": rewards, "weights": list(weights.values()), "groups": [0] * 4 + [1] * 4, "advantages": found}


def neighbours(names: Names) -> dict[str, Any]:
    """Neighbours' noises, advantages by their quasi-norm, and the loss of one anchor (not by the paper's authors)."""
    rewards, base, deltas = drawn(13, 6), drawn(14, 3, 2, 2), drawn(15, 6, 3, 2, 2)
    made = names["construct_neighbor_noises"](base, deltas, 0.3)
    # Twice the mean squared distance of the anchor's own sample to the others.
    temperature = 2.0 * float((made - made[1]).square().flatten(1).mean(1).sum()) / (len(made) - 1)
    old = made[1] + 0.1 * drawn(16, 3, 2, 2)
    new = (old + 0.01 * drawn(17, 3, 2, 2)).requires_grad_(True)
    advantages = names["quasi_norm_advantages"](rewards, p=0.8, clip=0.0)
    given = {"clip_range": 0.02, "temperature": temperature}
    loss, _ = names["neighbor_grpo_loss"](made, new, old, advantages, **given)
    loss.backward()
    return {
        "rewards": rewards, "base": base, "deltas": deltas, "sigma": 0.3, "noises": made, "p": 0.8,
        "advantages": advantages, "old": old, "new": new, **given, "loss": loss, "gradient": new.grad,
    }  # fmt: skip


TREE = ("TreeNode", "compute_node_rewards_from_leaves", "compute_hierarchical_advantages_by_depth")
NEIGHBOUR = (
    "validate_neighbor_sigma", "construct_neighbor_noises", "quasi_norm_advantages", "latent_distances",
    "softmax_distance_log_probs", "neighbor_grpo_loss",
)  # fmt: skip

CREDIT: dict[str, Question] = {
    "flow_grpo_advantages": Question(
        *FLOW_GRPO, "flow_grpo/stat_tracking.py", ("PerPromptStatTracker",), flow_grpo_advantages
    ),
    "branchgrpo_advantages": Question(*BRANCHGRPO, "fastvideo/train_branchgrpo_flux.py", TREE, branchgrpo_advantages),
    "tp_grpo_rewards": Question(*TP_GRPO, "scripts/my_train_sd3_fast_with_op3.py", (), tp_rewards, (861, 1103)),
    "mixgrpo_advantages": Question(*MIXGRPO, "fastvideo/train_grpo_flux.py", (), mixed_rewards, (428, 456)),
    "pref_grpo_advantages": Question(
        *PREF_GRPO, "fastvideo/rewards/dispatcher.py", ("compute_weighted_advantages",), weighted_rewards
    ),
    "neighbours": Question(*NEIGHBOURS, "baselines/grpo/losses.py", NEIGHBOUR, neighbours),
}
