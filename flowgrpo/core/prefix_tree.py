"""Credit from the prefixes that the completions of a group share (P2T and TEMPO, arXiv 2509.18314; GiGPO)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .advantages import group_moments
from .baselines import anchor_state_advantages
from .grouped import Grouped, cells, grouped, one_per_row, standardised


def _prefix_nodes(completions: Sequence[Sequence[int]], roots: Tensor) -> tuple[list[list[int]], int]:
    """Node of the prefix of t tokens of each row, for every t = 0, 1, ... at which two rows still share a prefix.

    A row that has ended before t has a node of its own at t. The last column is the first column without a shared
    prefix.
    """
    columns = [[int(root) for root in roots]]
    count = max(columns[0]) + 1
    while len(set(columns[-1])) < len(columns[-1]):
        t = len(columns)
        found: dict[tuple[int, int | None, int], int] = {}
        column = []
        for row, (node, tokens) in enumerate(zip(columns[-1], completions)):
            key = (node, int(tokens[t - 1]), -1) if t <= len(tokens) else (node, None, row)
            column.append(found.setdefault(key, count + len(found)))
        count += len(found)
        columns.append(column)
    return columns, count


def _roots(data: Grouped, contexts: Sequence[int] | None) -> Tensor:
    """[B] number of the node of each row before its first token: a group, or a context within a group."""
    return data.index if contexts is None else cells(data.index, contexts, "contexts")[0]


def _values(
    data: Grouped, completions: Sequence[Sequence[int]], contexts: Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    """Mean reward of the rows that begin with each prefix, and the number of these rows: [B, T + 1] each."""
    columns, count = _prefix_nodes(completions, _roots(data, contexts))
    nodes = torch.tensor(columns, device=data.index.device)
    depth = len(columns)
    moments = group_moments(data.values.repeat(depth, 1), nodes.flatten(), count, 0)
    mean = torch.where(moments.count > 0, moments.minimum + moments.offset, torch.nan)
    lengths = torch.tensor([len(tokens) for tokens in completions], device=data.index.device)
    steps = torch.arange(max(len(tokens) for tokens in completions) + 1, device=data.index.device)
    # Past the last shared prefix a row is alone, and its value stays its own reward.
    node = nodes[steps.clamp(max=depth - 1)].T
    beyond = steps[None, :] > lengths[:, None]
    return mean[node, 0].masked_fill(beyond, torch.nan), moments.count[node, 0]


def _prepared(completions: Sequence[Sequence[int]], rewards: Tensor, groups: Tensor | Sequence[int]) -> Grouped:
    data = grouped(rewards, groups)
    one_per_row(rewards, len(rewards), "rewards")
    if len(completions) != len(rewards):
        raise ValueError(
            f"`completions` has {len(completions)} lists of tokens for {len(rewards)} rewards; give one per reward"
        )
    return data


def prefix_values(
    completions: Sequence[Sequence[int]],
    rewards: Tensor,
    groups: Tensor | Sequence[int],
    *,
    contexts: Sequence[int] | None = None,
) -> Tensor:
    """Value of every prefix of every completion: the mean reward of the group's completions that have this prefix.

    Args:
        completions: B lists of token ids, without padding; include the token that ends a completion. Without this
            token, the end of a completion cannot be told from a prefix of a longer completion.
        rewards: [B]; a NaN enters no mean.
        groups: [B] integer ids; only completions of one group share prefixes.
        contexts: [B] ids of what precedes each completion, such as a prompt with a hint; only completions of one
            context share prefixes. All of a group have one context if left out.

    Returns:
        [B, T + 1], float32 at least: column t is for the prefix of t tokens, and T is the length of the longest
        completion. Column 0 is the mean of the group's completions of one context. NaN past the end of a completion,
        and where no reward is known.

    Raises:
        ValueError: If numbers of rows do not match, or a reward is infinite.
    """
    data = _prepared(completions, rewards, groups)
    if len(rewards) == 0:
        return torch.zeros(0, 1, dtype=data.dtype, device=rewards.device)
    return _values(data, completions, contexts)[0].to(data.dtype)


def anchor_prefix_advantages(
    completions: Sequence[Sequence[int]],
    rewards: Tensor,
    groups: Tensor | Sequence[int],
    episode: Tensor,
    *,
    contexts: Sequence[int] | None = None,
    weight: float = 1.0,
    discount: float = 1.0,
    scale: str = "group",
    eps: float = 1e-4,
    ddof: int = 1,
) -> Tensor:
    """Advantages per token: the completion's, plus a comparison of the tokens chosen after the same prefix (GiGPO).

    These are the `anchor_state_advantages` of tokens (arXiv 2505.10978). The state of a token is the prefix after which
    it was chosen. All first tokens of a group have one state, the prompt. If no other completion has the prefix of a
    token, the token keeps the completion's advantage.

    Args:
        completions: As in `prefix_values`.
        rewards: [B]; a NaN enters no comparison of tokens.
        groups: [B] integer ids; only completions of one group share states.
        episode: [B] `group_advantages` of the completions; NaN counts as 0.
        contexts: as in `prefix_values`.
        weight: Weight of the comparison by state.
        discount: Factor of a reward for every token between a token and the end, in (0, 1].
        scale: "group" divides by the standard deviation of a state's tokens, "none" does not.
        eps: Added to the standard deviation.
        ddof: 1 for the sample standard deviation, 0 for the population one.

    Returns:
        [B, T], float32 at least; 0 past the end of a completion.

    Raises:
        ValueError: As in `prefix_values` and `anchor_state_advantages`.
    """
    data = _prepared(completions, rewards, groups)
    macro = one_per_row(episode.detach(), len(rewards), "episode").to(data.dtype).nan_to_num(0.0)
    if len(rewards) == 0:
        return torch.zeros(0, 0, dtype=data.dtype, device=rewards.device)
    columns, _ = _prefix_nodes(completions, _roots(data, contexts))
    lengths = torch.tensor([len(tokens) for tokens in completions], device=rewards.device)
    steps = torch.arange(int(lengths.max()), device=rewards.device)
    inside = steps < lengths[:, None]
    found = torch.where(inside, macro[:, None], 0.0)
    # No two rows share the prefixes of the last column, nor any longer prefixes.
    states = torch.tensor(columns[:-1], device=rewards.device).reshape(-1, len(rewards)).T[:, : len(steps)]
    row, step = inside[:, : states.shape[1]].nonzero(as_tuple=True)
    left = (lengths[row] - 1 - step).to(data.values)
    returns = data.values[row, 0] * discount**left
    own = anchor_state_advantages(
        returns, data.index[row], states[row, step], macro[row], weight=weight, scale=scale, eps=eps, ddof=ddof
    )
    found[row, step] = own.to(found)
    return found


def prefix_tree_advantages(
    completions: Sequence[Sequence[int]],
    rewards: Tensor,
    groups: Tensor | Sequence[int],
    *,
    contexts: Sequence[int] | None = None,
    root: bool = False,
    eps: float = 1e-4,
    ddof: int = 1,
) -> Tensor:
    """Advantages per token: the group's, plus the gain of a token where completions branch (TEMPO, arXiv 2509.18314).

    A_t = (r - mean + g_t (V_{t+1} - V_t)) / (std + eps). Here mean and std are of the group's rewards, and V_t and
    V_{t+1} are the values of the prefixes before and after token t. The gate g_t is 1 if some completion shares the
    prefix before the token but not the prefix after it, and 0 otherwise. A completion that shares no token with another
    one has GRPO's advantage at every token. The abstract has no equation; this is its plainest form.

    Args:
        completions: As in `prefix_values`.
        rewards: [B]. A NaN enters no statistic and gets advantage 0, and its completion makes no branch.
        groups: [B] integer ids.
        contexts: as in `prefix_values`.
        root: Whether the prompt counts as a shared prefix too, so that a first token is a branch.
        eps: Added to the standard deviation.
        ddof: 1 for the sample standard deviation, 0 for the population one.

    Returns:
        [B, T], float32 at least; 0 past the end of a completion, and in groups without two different rewards.

    Raises:
        ValueError: As in `prefix_values`.
    """
    data = _prepared(completions, rewards, groups)
    if len(rewards) == 0:
        return torch.zeros(0, 0, dtype=data.dtype, device=rewards.device)
    values, below = _values(data, completions, contexts)
    branch = below[:, 1:] < below[:, :-1]
    if not root:
        branch[:, :1] = False
    gain = torch.where(branch, values.diff(dim=1), 0.0)
    moments = data.moments(ddof)
    scale = (moments.std + eps)[data.index]
    token = standardised(data.values, data.index, moments, eps) + gain / scale
    silent = values[:, 1:].isnan() | data.values.isnan() | moments.degenerate[data.index]
    return torch.where(silent, 0.0, token).to(data.dtype)
