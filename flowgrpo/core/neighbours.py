"""A policy over the states of a group, for trajectories that have no noise of their own (Neighbor GRPO)."""

from __future__ import annotations

import torch
from torch import Tensor


def neighbour_log_ratio(new: Tensor, old: Tensor, states: Tensor, group: Tensor, own: Tensor) -> Tensor:
    """Log importance ratio of choosing each state of the group as the next state, after the prediction has moved.

    A deterministic step has no density. Neighbor GRPO uses the probability of choosing among the neighbours' next
    states, pi(j) = softmax_j(-|x_j - x|^2 / (2 s^2)). Squares are means over the elements, and s^2 is the mean squared
    distance within a group. So one clip suits every latent size, as with log-probs that are means over elements.

    Args:
        new: [A, ...] next states of the anchors under the trained policy, with gradient.
        old: [A, ...] next states of the anchors under the policy that sampled. Where `old` equals `new`, the result is
            exactly 0.
        states: [N, ...] next states of all samples.
        group: [N] integer ids.
        own: [A] for each anchor, the row of `states` that holds the anchor's own sample.

    Returns:
        [A, N] log ratios, 0 for samples of other groups.
    """
    flat, moved, before = (t.float().flatten(1) for t in (states, new, old))
    same = group[own][:, None] == group[None, :]
    spread = _distances(flat[own], flat).where(same, 0.0).sum(1, keepdim=True) / (same.sum(1, keepdim=True) - 1)
    # |x_j|^2 is left out of |x_j - x|^2 because it is the same before and after the shift. The shift enters as a
    # difference, which is exactly 0 at rest.
    shift = moved - before.detach()
    change = (shift @ flat.T - (0.5 * shift * (moved + before.detach())).sum(1, keepdim=True)) / flat.shape[1]
    change = change / spread
    resting = -0.5 * _distances(before.detach(), flat) / spread
    resting = resting.masked_fill(~same, -torch.inf)
    shares = resting.softmax(1)
    # This is log sum_j pi_old(j) exp(change_j); log1p avoids a difference of two logarithms.
    norm = torch.log1p((shares * torch.expm1(change.where(same, 0.0))).sum(1, keepdim=True))
    return (change - norm).where(same, 0.0)


def _distances(a: Tensor, b: Tensor) -> Tensor:
    """[A, N] mean squared differences."""
    return torch.cdist(a, b).square() / a.shape[1]


def quasi_norm(advantages: Tensor, group: Tensor, *, p: float = 0.8) -> Tensor:
    """A * sqrt(G) / (sum over the group of |A|^p)^(1/p), the scale of Neighbor GRPO, which favours decided groups.

    Args:
        advantages: [N].
        group: [N] integer ids.
        p: Exponent in (0, 2].

    Returns:
        [N]; a group whose advantages are all 0 stays 0.
    """
    same = (group[:, None] == group[None, :]).to(advantages)
    total = (same @ advantages.abs() ** p) ** (1.0 / p)
    return torch.where(total > 0, advantages / total * same.sum(1).sqrt(), 0.0)
