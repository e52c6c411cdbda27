"""Advantages, and the rewards of nodes and steps, are those of the methods' released code, or a test says otherwise."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flowgrpo.core.advantages import anchored_advantages, group_advantages, multi_reward_advantages
from flowgrpo.core.neighbours import neighbour_log_ratio, quasi_norm
from flowgrpo.core.process import turning_point_rewards
from flowgrpo.core.surrogates import clip
from flowgrpo.core.trees import depth_advantages, node_values
from tests.releases.comparing import ROUNDING, numbers


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_advantages_of_prompts_are_those_of_the_release(scale: str) -> None:
    asked = numbers("flow_grpo_advantages")
    groups = [ord(prompt) for prompt in asked["prompts"]]
    rewards = torch.tensor(asked["rewards"], dtype=torch.float64)
    found = group_advantages(rewards, groups, scale=scale, ddof=0, eps=1e-4)
    torch.testing.assert_close(found, torch.tensor(asked["advantages"][scale], dtype=torch.float64), **ROUNDING)


def advantages_of_tool(name: str) -> tuple[Tensor, list[int], dict[str, Tensor]]:
    """The rewards that a tool was asked for, their groups, and its advantages by setting."""
    asked = numbers(name)
    groups = [ord(prompt) for prompt in asked["prompts"]]
    return torch.tensor(asked["rewards"]), groups, {k: torch.tensor(v) for k, v in asked["advantages"].items()}


def test_advantages_of_verl_omni_are_those_of_its_converted_scripts() -> None:
    rewards, groups, expected = advantages_of_tool("verl_omni_advantages")
    for scale, released in expected.items():
        found = group_advantages(rewards, groups, scale=scale, ddof=1, eps=1e-4)
        torch.testing.assert_close(found, released, **ROUNDING)


def test_advantages_of_unirl_are_those_of_its_converted_files() -> None:
    """UniRL adds 1e-8 to a group's variance, here to its deviation: they differ where all rewards are nearly equal."""
    rewards, groups, expected = advantages_of_tool("unirl_advantages")
    by_group = group_advantages(rewards, groups, scale="group", ddof=0, eps=1e-8)
    by_all = group_advantages(rewards, groups, scale="batch", ddof=1, eps=1e-8)
    torch.testing.assert_close(by_group, expected["group"], **ROUNDING)
    torch.testing.assert_close(by_all, expected["batch"], **ROUNDING)
    torch.testing.assert_close(group_advantages(rewards, groups, scale="none"), expected["none"], **ROUNDING)


def test_advantages_of_unirl_with_all_answers_are_anchored_ones_with_no_weight_of_the_group() -> None:
    rewards, groups, expected = advantages_of_tool("unirl_advantages")
    found = anchored_advantages(rewards, groups, k=1e-9, eps=1e-8, ddof=1)
    torch.testing.assert_close(found, expected["global"], **ROUNDING)


def tree(asked: dict[str, Any], how: str) -> tuple[Tensor, Tensor]:
    """Values and advantages of the nodes of the tree that was asked about."""
    parents, log_probs = torch.tensor(asked["parents"]), torch.tensor([0.0, *asked["log_probs"]])
    values = node_values(parents, torch.tensor(asked["rewards"]), how=how, log_prob=log_probs)
    depth = torch.tensor([0, 1, 1, *[2] * 4, *[3] * 8])
    return values, depth_advantages(values, depth, torch.zeros_like(depth))


def test_a_tree_has_the_values_and_advantages_of_the_release() -> None:
    asked = numbers("branchgrpo_advantages")
    values, advantages = tree(asked, "mean")
    torch.testing.assert_close(values, torch.tensor(asked["found"]["mean"]["values"]), **ROUNDING)
    torch.testing.assert_close(advantages, torch.tensor(asked["found"]["mean"]["advantages"]), **ROUNDING)


def test_weights_by_likelihood_are_those_of_the_release_at_the_last_split() -> None:
    """Above the last split, the release weights a child by its own edge alone; the paper weights whole paths."""
    asked = numbers("branchgrpo_advantages")
    values, expected = tree(asked, "path")[0], torch.tensor(asked["found"]["path"]["values"])
    torch.testing.assert_close(values[3:], expected[3:], **ROUNDING)
    assert (values[:3] - expected[:3]).abs().min() > 1e-3
    edge = torch.tensor(asked["log_probs"])[:2].softmax(0)
    torch.testing.assert_close((edge * expected[1:3]).sum(), expected[0], **ROUNDING)


@pytest.mark.parametrize("form", ["step", "total", "rest"])
def test_rewards_of_steps_are_those_of_the_release(form: str) -> None:
    """The release has no reward for the last step; its state without noise is the image itself."""
    asked = numbers("tp_grpo_rewards")
    found = turning_point_rewards(torch.tensor(asked["states"]), main=form)
    torch.testing.assert_close(found[:, :-1], torch.tensor(asked["rewards"][form]), **ROUNDING)


def whitened(asked: dict[str, Any]) -> Tensor:
    """[B, K] each reward whitened in its group."""
    return group_advantages(torch.tensor(asked["rewards"]), asked["groups"], ddof=1, eps=1e-8)


def test_several_rewards_are_added_as_in_mixgrpo() -> None:
    """MixGRPO adds whitened rewards. This package whitens the sum again (GDPO); the order of images is the same."""
    asked = numbers("mixgrpo_advantages")
    total = whitened(asked) @ torch.tensor(asked["weights"])
    torch.testing.assert_close(total, torch.tensor(asked["advantages"]), **ROUNDING)
    rewards, groups = torch.tensor(asked["rewards"]), asked["groups"]
    found = multi_reward_advantages(rewards, groups, asked["weights"], how="gdpo", ddof=1, eps=1e-8)
    torch.testing.assert_close(found, total / total.std(), **ROUNDING)


def test_several_rewards_are_whitened_as_in_pref_grpo() -> None:
    asked = numbers("pref_grpo_advantages")
    rewards, groups = torch.tensor(asked["rewards"]), asked["groups"]
    found = multi_reward_advantages(rewards, groups, asked["weights"], how="gdpo", ddof=1, eps=1e-8)
    torch.testing.assert_close(found, torch.tensor(asked["advantages"]["whitened"]), **ROUNDING)
    total = whitened(asked) @ torch.tensor(asked["weights"])
    torch.testing.assert_close(total, torch.tensor(asked["advantages"]["sum"]), **ROUNDING)


def test_advantages_by_a_quasi_norm_are_those_of_a_second_author() -> None:
    asked = numbers("neighbours")
    rewards, group = torch.tensor(asked["rewards"]), torch.zeros(6, dtype=torch.long)
    found = quasi_norm(rewards - rewards.mean(), group, p=asked["p"])
    torch.testing.assert_close(found, torch.tensor(asked["advantages"]), **ROUNDING)


def test_a_choice_among_neighbours_has_the_loss_of_a_second_author() -> None:
    """There the temperature is given. It is asked with the temperature that this package takes from the group."""
    asked = numbers("neighbours")
    states, old = torch.tensor(asked["noises"]), torch.tensor(asked["old"])
    new = torch.tensor(asked["new"]).requires_grad_(True)
    group, own = torch.zeros(6, dtype=torch.long), torch.tensor([1])
    ratio = neighbour_log_ratio(new[None], old[None], states, group, own)
    bound, advantages = asked["clip_range"], torch.tensor(asked["advantages"])[None]
    everywhere = torch.ones_like(ratio, dtype=torch.bool)
    loss = clip(ratio, advantages, ratio, everywhere, low=bound, high=bound).mean()
    assert loss.item() == pytest.approx(asked["loss"], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(torch.autograd.grad(loss, new)[0], torch.tensor(asked["gradient"]), rtol=1e-4, atol=1e-6)


def test_neighbours_share_a_noise_as_with_a_second_author() -> None:
    """A spread of 0.3145 is the sigma of 0.3: each noise has a share of sigma of its own, and keeps unit variance."""
    asked = numbers("neighbours")
    sigma, base, deltas = asked["sigma"], torch.tensor(asked["base"]), torch.tensor(asked["deltas"])
    spread = sigma / (1.0 - sigma**2) ** 0.5
    found = (base + spread * deltas) / (1.0 + spread**2) ** 0.5
    assert spread == pytest.approx(0.3145, abs=1e-4)
    torch.testing.assert_close(found, torch.tensor(asked["noises"]), **ROUNDING)
