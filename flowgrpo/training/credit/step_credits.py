"""Advantages of the denoising steps of images: by depth of a tree, by what a step gained, or against a critic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ...core.advantages import anchored_advantages, group_advantages
from ...core.process import future_rewards, turning_point_rewards
from ...core.trees import depth_advantages, node_values
from ...parts.needs import idle, needs
from ...parts.ranges import NotNegative, Positive, Share
from .conditions import (
    asks_critic,
    compares_itself,
    of_images,
    one_tree,
    reads_previews,
    transitions,
    undivided,
    works_on_samples,
)
from .scales import Ddof, Scale

if TYPE_CHECKING:
    from ...samplers.transitions import Rollout
    from .credits import Judged


@needs(
    of_images("use prefix"), compares_itself, one_tree,
    idle(
        "beta", where=lambda choice: choice["fusion"] != "path",
        why="only fusion path weights a leaf by the likelihood of its path",
    ),
)  # fmt: skip
def depth(
    judged: Judged,
    *,
    fusion: Literal["mean", "path"] = "mean",
    beta: NotNegative | None = None,
    eps: NotNegative = 1e-8,
    ddof: Ddof = 1,
    min_std: NotNegative = 1e-6,
) -> Tensor:
    """Rewards fused up the tree, compared among the nodes of the same depth (BranchGRPO, arXiv 2509.06040).

    Args:
        judged: of images.
        fusion: what a node is worth: the mean of the leaves below it, or with `path` the mean weighted by the
            likelihood of the paths that lead to the leaves.
        beta: for `fusion: path`; the power of the likelihood, 1 if left out.
        eps: added to the standard deviation.
        ddof: 1 for the sample standard deviation, 0 for the population one.
        min_std: nodes with a smaller standard deviation count as equal.
    """
    experience = judged.experience
    rollout = experience.rollout
    values = experience.leaf_values(judged.rewards().masked_fill(~experience.outcomes, torch.nan))
    log_prob = rollout.log_prob if fusion == "path" else None
    fused = node_values(rollout.parent, values, how=fusion, log_prob=log_prob, beta=1.0 if beta is None else beta)
    tree = rollout.prompt * (int(rollout.root.max()) + 1) + rollout.root
    return depth_advantages(fused, rollout.depth, tree, eps=eps, ddof=ddof, min_std=min_std)


@needs(of_images("use leaf"), compares_itself, reads_previews, transitions, undivided)
def turning(
    judged: Judged,
    *,
    main: Literal["step", "total", "rest", "gain"] = "step",
    scale: Scale = "group",
    eps: NotNegative = 1e-4,
    ddof: Ddof = 1,
) -> Tensor:
    """Each step's gain over its state's deterministic completion, compared within a step (TP-GRPO, arXiv 2602.06422).

    Args:
        judged: of images.
        main: `step` takes the step's own gain, and adds the gain of the whole trajectory at turning points. `total`
            takes the gain of the whole trajectory, and adds the step's own gain at turning points, which is the default
            of the released configurations. `rest` takes the step's own gain, and in its place the gain from this step
            to the image at turning points that lead the way of the rest, as the released scripts do. `gain` takes the
            step's own gain alone (DenseGRPO, arXiv 2601.20218).
        scale: what gains are divided by: the standard deviation of the group, of the batch, or nothing.
        eps: added to the standard deviation.
        ddof: 1 for the sample standard deviation, 0 for the population one.
    """
    experience = judged.experience
    nodes, rewards = step_rewards(experience.rollout, judged.rewards(previews=True))
    # The deterministic steps before the first stochastic step gain nothing, so they are no trend that could turn.
    first = experience.plan.first_stochastic or 0
    values = torch.nn.functional.pad(turning_point_rewards(rewards[:, first:], main=main), (first, 0))
    prompt = experience.rollout.prompt[nodes[:, 0]]
    return at_nodes(experience, nodes, group_advantages(values, prompt, scale=scale, eps=eps, ddof=ddof))


@needs(of_images("use leaf"), compares_itself, reads_previews, transitions)
def value(
    judged: Judged,
    *,
    gamma: Share = 0.9,
    k: Positive = 1.0,
    eps: NotNegative = 1e-4,
    ddof: Ddof = 1,
) -> Tensor:
    """Discounted rewards of the projections after a step, anchored by their level in the batch (VGPO, 2512.12387).

    Args:
        judged: of images.
        gamma: discount per step.
        k: the comparison within the group has weight min(1, k s / S), for the standard deviations s of the group and
            S of the batch.
        eps: added to standard deviations.
        ddof: 1 for the sample standard deviation, 0 for the population one.
    """
    experience = judged.experience
    nodes, rewards = step_rewards(experience.rollout, judged.rewards(previews=True, across=True))
    values = future_rewards(rewards, gamma=gamma)
    prompt = experience.rollout.prompt[nodes[:, 0]]
    return at_nodes(experience, nodes, anchored_advantages(values, prompt, k=k, eps=eps, ddof=ddof))


@needs(of_images("use leaf"), works_on_samples, asks_critic, transitions)
def critic(judged: Judged) -> Tensor:
    """The reward minus what a critic expected in the state before the step (AC-Flow, arXiv 2510.18072).

    Args:
        judged: of images. Until the critic is ready, the advantages of the samples count.
    """
    model, experience = judged.critic, judged.experience
    assert model is not None
    found = judged.of_samples()
    if not model.ready:
        return found
    returns = experience.node_advantages(model.standardise(judged.rewards()))
    for t in experience.rollout.transitions:
        expected = model.values(experience, t.x, t.coefficients.sigma, t.prompt)
        found[t.node] = returns[t.node] - expected[t.state].cpu()
    return found


@needs(of_images("use leaf"), works_on_samples, asks_critic, transitions)
def process(judged: Judged, *, weight: NotNegative = 0.5, eps: NotNegative = 1e-4, ddof: Ddof = 1) -> Tensor:
    """The image's advantage plus the advantage of the critic's value after the step (Euphonium's dual reward).

    Args:
        judged: of images.
        weight: of the critic's value, which is compared within a step and a prompt.
        eps: added to the standard deviation of the critic's values.
        ddof: of the critic's values; 1 for the sample standard deviation, 0 for the population one.
    """
    model, experience = judged.critic, judged.experience
    assert model is not None
    found = judged.of_samples()
    if not model.ready:
        return found
    for t in experience.rollout.transitions:
        prompts = tuple(t.prompt[s] for s in t.state.tolist())
        reached = model.values(experience, t.x_next, t.coefficients.sigma_next, prompts).cpu()
        found[t.node] += weight * group_advantages(reached, torch.tensor(prompts), eps=eps, ddof=ddof)
    return found


def step_rewards(rollout: Rollout, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and rewards along each chain of a rollout with probes, both [B, T + 1].

    The reward of a state is the reward of its probe. If a state has no probe and the step after it is deterministic,
    the state has the reward of the next state. The last state has the reward of the image.

    Args:
        rollout: chains with probes (`window_plan(..., probe=...)`).
        rewards: [L].
    """
    main = rollout.branch == 0
    value = torch.full((len(rollout.parent),), torch.nan, dtype=torch.float32)
    for leaf, reward in zip(rollout.leaf.tolist(), rewards.tolist()):
        node = leaf
        while not main[node]:
            node = int(rollout.parent[node])
        value[node] = reward
    chains = rollout.leaf[main[rollout.leaf]]
    columns = [chains]
    while bool((rollout.parent[columns[-1]] >= 0).all()):
        columns.append(rollout.parent[columns[-1]])
    nodes = torch.stack(columns[::-1], dim=1)
    for t in range(nodes.shape[1] - 2, -1, -1):
        here, after = nodes[:, t], nodes[:, t + 1]
        follows = value[here].isnan() & (rollout.log_prob[after] == 0)
        value[here[follows]] = value[after[follows]]
    return nodes, value[nodes]


def at_nodes(experience: Any, nodes: Tensor, advantages: Tensor) -> Tensor:
    """[N] advantages of all nodes, from the advantages [B, T] of the steps to `nodes` [B, T + 1]; 0 if not trained."""
    found = torch.zeros(len(experience.rollout.parent), dtype=torch.float32)
    for t in experience.plan.trained_steps:
        found[nodes[:, t + 1]] = advantages[:, t].float()
    return found
