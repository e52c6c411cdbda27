"""Credit on a tree of denoising states: leaf rewards are fused up to every node and compared within a depth."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .advantages import as_precise, group_index, group_moments, sum_by_group
from .baselines import anchor_state_advantages
from .grouped import one_per_row


def _depths_and_roots(parent: Tensor) -> tuple[Tensor, Tensor]:
    """Depth below the root, and the root, of every node; [N] each."""
    nodes = torch.arange(len(parent), device=parent.device)
    if bool(((parent >= len(parent)) | (parent < -1)).any()):
        raise ValueError(f"`parent` holds an index outside -1..{len(parent) - 1}; use -1 for a root")
    depth = torch.zeros_like(parent)
    top = nodes
    for _ in range(len(parent)):
        above = parent[top]
        climbing = above >= 0
        if not bool(climbing.any()):
            return depth, top
        depth = depth + climbing
        top = torch.where(climbing, above, top)
    raise ValueError("`parent` holds a cycle: some node is its own ancestor, so it is below no root")


def _spread_leaf_rewards(parent: Tensor, leaf_rewards: Tensor) -> Tensor:
    """Rewards at every node, float64 [N], NaN at inner nodes."""
    inner = torch.zeros_like(parent, dtype=torch.bool)
    inner[parent[parent >= 0]] = True
    rewards = as_precise(leaf_rewards)
    leaves = int((~inner).sum())
    if rewards.shape == parent.shape:
        return rewards.masked_fill(inner, torch.nan)
    if rewards.shape != (leaves,):
        raise ValueError(
            f"`leaf_rewards` has shape {tuple(leaf_rewards.shape)} but {leaves} of {len(parent)} nodes are "
            f"leaves; give ({leaves},) in node order, or ({len(parent)},)"
        )
    spread = rewards.new_full(parent.shape, torch.nan)
    spread[~inner] = rewards
    return spread


def node_values(
    parent: Tensor,
    leaf_rewards: Tensor,
    *,
    how: str = "mean",
    log_prob: Tensor | None = None,
    beta: float = 1.0,
) -> Tensor:
    """Fuse leaf rewards up to every node: V(n) = sum over its leaves of w r (BranchGRPO, arXiv 2509.06040).

    `how="mean"` gives all leaves below a node the same weight. `how="path"` has w proportional to exp(beta * log p(leaf
    | n)), where log p(leaf | n) is the log-prob of the path from n down to the leaf; beta = 0 is the mean. A leaf whose
    reward is NaN is left out. A node that has no other leaf gets NaN.

    Args:
        parent: [N] index of each node's parent, -1 for a root; in any order, and with several trees in one tensor.
        leaf_rewards: [L], the rewards of the leaves in node order; or [N], where the values of inner nodes are ignored.
        how: "mean" or "path".
        log_prob: [N] log-prob of the edge into each node, for "path"; the value of a root is ignored. With log-probs
            averaged over latent elements the weights are nearly uniform, as in the published method.
        beta: Inverse temperature of "path".

    Returns:
        Values [N], in the dtype of `leaf_rewards` (float32 at least).

    Raises:
        ValueError: For a malformed tree, an unknown `how`, an infinite reward, or shapes that do not match.
    """
    if how not in ("mean", "path"):
        raise ValueError(f"`how` is {how!r}; use 'mean' or 'path'")
    dtype = torch.promote_types(leaf_rewards.dtype, torch.float32)
    if parent.numel() == 0:
        return leaf_rewards.detach().to(dtype)
    depth, root = _depths_and_roots(parent)
    rewards = _spread_leaf_rewards(parent, leaf_rewards.to(parent.device))
    if bool(rewards.isinf().any()):
        raise ValueError("`leaf_rewards` holds an infinite value; use NaN for a leaf without a reward")
    edge = torch.zeros_like(rewards)
    if how == "path":
        if log_prob is None or log_prob.shape != parent.shape:
            raise ValueError(
                f"how='path' needs `log_prob` of shape ({len(parent)},), the log-prob of the edge into each node"
            )
        edge = beta * as_precise(log_prob.to(parent.device))
    # Rewards are taken relative to the lowest of their tree. So equal rewards give the same value at every node, to the
    # last bit.
    base = rewards.new_full(rewards.shape, torch.inf)
    base = base.scatter_reduce(0, root, rewards.where(~rewards.isnan(), torch.inf), "amin")[root]
    value = (rewards - base).nan_to_num(0.0)
    log_mass = torch.where(rewards.isnan(), -torch.inf, 0.0).to(rewards.dtype)
    for level in range(int(depth.max()), 0, -1):
        child = (depth == level).nonzero().squeeze(1)
        value, log_mass = _fuse(parent[child], value, log_mass, edge[child] + log_mass[child], value[child])
    return torch.where(log_mass.isneginf(), torch.nan, value + base).to(dtype)


def _fuse(
    parents: Tensor, value: Tensor, log_mass: Tensor, arriving: Tensor, child_value: Tensor
) -> tuple[Tensor, Tensor]:
    """Give `parents` the mean of `child_value` weighted by exp(`arriving`), and the log of the sum of the weights."""
    peak = torch.full_like(log_mass, -torch.inf).scatter_reduce(0, parents, arriving, "amax")
    peak = torch.where(peak.isneginf(), 0.0, peak)
    weight = (arriving - peak[parents]).exp()
    total = sum_by_group(weight, parents, len(value))
    mean = sum_by_group(weight * child_value, parents, len(value)) / total
    touched = total > 0
    return torch.where(touched, mean, value), torch.where(touched, total.log() + peak, log_mass)


def _paths(parent: Tensor, leaf: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of `leaf` [L] and nodes, [S] each: a pair for every leaf and every node on its path, except the root."""
    rows, nodes = torch.arange(len(leaf), device=leaf.device), leaf
    found = []
    while len(nodes):
        below = parent[nodes] >= 0
        rows, nodes = rows[below], nodes[below]
        found.append((rows, nodes))
        nodes = parent[nodes]
    # Both are empty by now. They are joined in so that an empty list of leaves works too.
    return torch.cat([rows, *(r for r, _ in found)]), torch.cat([nodes, *(n for _, n in found)])


def anchor_tree_advantages(
    parent: Tensor,
    leaf: Tensor,
    rewards: Tensor,
    groups: Tensor | Sequence[int],
    episode: Tensor,
    *,
    weight: float = 1.0,
    discount: float = 1.0,
    scale: str = "group",
    eps: float = 1e-4,
    ddof: int = 1,
) -> Tensor:
    """Advantages of edges: the advantages of their leaves, plus a comparison of the edges from one node (GiGPO).

    These are the `anchor_state_advantages` of the steps on the way to every leaf (arXiv 2505.10978). The state is the
    node from which a step starts. Leaves may share a step, so an edge has the mean over the leaves below it.

    Args:
        parent: [N] index of each node's parent, -1 for a root; in any order, and with several trees in one tensor.
        leaf: [L] node ids.
        rewards: [L]; a NaN enters no comparison of steps.
        groups: [L] integer ids; leaves of a tree that are not of one group are not compared.
        episode: [L] `group_advantages` of the leaves; NaN counts as 0.
        weight: Weight of the comparison by state.
        discount: Factor of a reward for every step between a step and the leaf, in (0, 1].
        scale: "group" divides by the standard deviation of a state's steps, "none" does not.
        eps: Added to the standard deviation.
        ddof: 1 for the sample standard deviation, 0 for the population one.

    Returns:
        [N], float32 at least, for the edge into each node; 0 for roots, and for nodes above none of the leaves.

    Raises:
        ValueError: For a malformed tree, or as in `anchor_state_advantages`.
    """
    depth, _ = _depths_and_roots(parent)
    for values, name in ((rewards, "rewards"), (episode, "episode")):
        one_per_row(values, len(leaf), name)
    ids = one_per_row(torch.as_tensor(groups, device=leaf.device), len(leaf), "groups")
    row, node = _paths(parent, leaf)
    left = as_precise(depth[leaf[row]] - depth[node])
    own = anchor_state_advantages(
        as_precise(rewards)[row] * discount**left, ids[row], parent[node], as_precise(episode)[row],
        weight=weight, scale=scale, eps=eps, ddof=ddof,
    )  # fmt: skip
    total, count = (sum_by_group(v, node, len(parent)) for v in (as_precise(own), torch.ones_like(left)))
    return (total / count.clamp(min=1)).to(torch.promote_types(rewards.dtype, torch.float32))


def depth_advantages(
    values: Tensor,
    depth: Tensor | Sequence[int],
    tree: Tensor | Sequence[int],
    *,
    eps: float = 1e-8,
    ddof: int = 1,
    min_std: float = 1e-6,
) -> Tensor:
    """Standardise node values among the nodes of one depth of one tree (BranchGRPO, arXiv 2509.06040).

    The edge into a node is trained with that node's advantage. The advantage is 0 if a depth has only one node, or if
    its standard deviation is below `min_std`. Otherwise a small `eps` could turn rounding errors into advantages of
    order 1.

    Args:
        values: [N]; NaN where a value is unknown. A NaN is left out and gets advantage 0.
        depth: [N] integer depth of each node.
        tree: [N] integer id of each node's tree (its prompt's root).
        eps: Added to the standard deviation.
        ddof: 1 for the sample standard deviation, 0 for the population one.
        min_std: Smallest standard deviation that counts as a signal.

    Returns:
        Advantages [N], float32 at least, without a gradient.

    Raises:
        ValueError: If shapes do not match or a value is infinite.
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    if values.dim() != 1:
        raise ValueError(f"`values` has shape {tuple(values.shape)}; give one value per node, (N,)")
    if values.numel() == 0:
        return values.detach().to(dtype)
    if bool(values.isinf().any()):
        raise ValueError("`values` holds an infinite value; use NaN for a node without a value")
    level, num_levels = group_index(depth, len(values), values.device)
    tree_index, num_trees = group_index(tree, len(values), values.device)
    index = tree_index * num_levels + level
    precise = as_precise(values)[:, None]
    moments = group_moments(precise, index, num_trees * num_levels, ddof)
    std = moments.std[index]
    silent = precise.isnan() | moments.degenerate[index] | (std < min_std)
    centred = precise - moments.minimum[index] - moments.offset[index]
    return torch.where(silent, 0.0, centred / (std + eps)).squeeze(1).to(dtype)
