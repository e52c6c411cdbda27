"""Advantages where completions part, by hand."""

import pytest
import torch

from flowgrpo.core.advantages import group_advantages
from flowgrpo.core.prefix_tree import anchor_prefix_advantages, prefix_tree_advantages, prefix_values

NAN = float("nan")
# 1 2 3, 1 2 4 5, 1 6 and 7: branches after "1 2", after "1", and at the start.
COMPLETIONS = [[1, 2, 3], [1, 2, 4, 5], [1, 6], [7]]
REWARDS = torch.tensor([1.0, 0, 1, 0])


def close(got, want, tol=1e-6):
    want = torch.as_tensor(want, dtype=got.dtype)
    torch.testing.assert_close(got, want, atol=tol, rtol=tol, equal_nan=True)


def test_values_of_prefixes_by_hand():
    want = [[0.5, 2 / 3, 0.5, 1, NAN], [0.5, 2 / 3, 0.5, 0, 0], [0.5, 2 / 3, 1, NAN, NAN], [0.5, 0, NAN, NAN, NAN]]
    close(prefix_values(COMPLETIONS, REWARDS, [0] * 4), want)


def test_advantages_by_hand():
    found = prefix_tree_advantages(COMPLETIONS, REWARDS, [0] * 4, ddof=0, eps=0.0)
    want = [[1, 2 / 3, 2, 0], [-1, -4 / 3, -2, -1], [1, 5 / 3, 0, 0], [-1, 0, 0, 0]]
    close(found, want)
    halved = prefix_tree_advantages(COMPLETIONS, REWARDS, [0] * 4, ddof=0, eps=0.5)
    close(halved, torch.tensor(want) / 2)
    rooted = prefix_tree_advantages(COMPLETIONS, REWARDS, [0] * 4, root=True, ddof=0, eps=0.0)
    close(rooted[:, 0], [4 / 3, -2 / 3, 4 / 3, -2])
    close(rooted[:, 1:], found[:, 1:])


def test_without_a_shared_token_it_is_grpo():
    completions = [[1, 5, 5], [2, 5], [3], [4, 5, 5]]
    rewards = torch.tensor([0.3, 0.1, 0.9, 0.2])
    found = prefix_tree_advantages(completions, rewards, [0] * 4)
    plain = group_advantages(rewards, [0] * 4)
    for row, tokens in enumerate(completions):
        close(found[row], [plain[row]] * len(tokens) + [0] * (3 - len(tokens)))


def test_other_groups_share_nothing():
    completions, rewards = [[1, 2], [1, 3], [1, 2], [1, 3]], torch.tensor([1.0, 0, 5, 9])
    groups = torch.tensor([3, 3, 1, 1])
    found = prefix_values(completions, rewards, groups)
    close(found, [[0.5, 0.5, 1], [0.5, 0.5, 0], [7, 7, 5], [7, 7, 9]])


def test_a_completion_that_ends_where_another_goes_on_is_a_branch():
    completions, rewards = [[1], [1, 2], []], torch.tensor([0.0, 1.0, 0.5])
    close(prefix_values(completions, rewards, [0] * 3), [[0.5, 0.5, NAN], [0.5, 0.5, 1], [0.5, NAN, NAN]])
    std = (1 / 6) ** 0.5
    found = prefix_tree_advantages(completions, rewards, [0] * 3, ddof=0, eps=0.0)
    close(found, [[-0.5 / std, 0], [0.5 / std, 1 / std], [0, 0]])


def test_equal_completions_never_part():
    found = prefix_tree_advantages([[1, 2], [1, 2]], torch.tensor([0.0, 1.0]), [0, 0], ddof=0, eps=0.0)
    close(found, [[-1, -1], [1, 1]])
    close(prefix_values([[1, 2], [1, 2]], torch.tensor([0.0, 1.0]), [0, 0]), [[0.5] * 3] * 2)


def test_a_reward_that_is_missing_leaves_values_and_branches():
    completions, rewards = [*COMPLETIONS, [1, 2, 3, 9]], torch.tensor([1.0, 0, 1, 0, NAN])
    values = prefix_values(completions, rewards, [0] * 5)
    close(values[:4], prefix_values(COMPLETIONS, REWARDS, [0] * 4))
    close(values[4], [0.5, 2 / 3, 0.5, 1, NAN])
    found = prefix_tree_advantages(completions, rewards, [0] * 5)
    close(found[:4], prefix_tree_advantages(COMPLETIONS, REWARDS, [0] * 4))
    assert (found[4] == 0).all()


def test_a_group_without_rewards_has_no_values():
    found = prefix_values([[1, 2], [1, 3], [1]], torch.tensor([NAN, NAN, 2.0]), [0, 0, 1])
    close(found, [[NAN] * 3, [NAN] * 3, [2, 2, NAN]])


def test_equal_rewards_get_exactly_zero():
    rewards = torch.tensor([0.1] * 4)
    assert (prefix_tree_advantages(COMPLETIONS, rewards, [0] * 4, root=True, eps=0.0) == 0).all()
    assert (prefix_tree_advantages(COMPLETIONS, REWARDS, [0, 1, 2, 3], root=True) == 0).all()


def naive(completions, rewards, groups, row, t):
    """Rewards of the completions of the row's group that begin with its first t tokens."""
    prefix = completions[row][:t]
    return [r for c, r, g in zip(completions, rewards.tolist(), groups) if g == groups[row] and c[:t] == prefix]


@pytest.mark.parametrize("seed", range(5))
def test_against_enumeration(seed):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (14,), generator=g).tolist()
    completions = [torch.randint(0, 2, (n,), generator=g).tolist() for n in lengths]
    rewards, groups = torch.rand(14, generator=g, dtype=torch.float64), torch.randint(0, 2, (14,), generator=g).tolist()
    values = prefix_values(completions, rewards, groups)
    found = prefix_tree_advantages(completions, rewards, groups, root=True, eps=0.3)
    for row, tokens in enumerate(completions):
        peers = torch.tensor(naive(completions, rewards, groups, row, 0))
        for t in range(len(tokens)):
            here, after = (naive(completions, rewards, groups, row, k) for k in (t, t + 1))
            close(values[row, t], sum(here) / len(here))
            gain = sum(after) / len(after) - sum(here) / len(here) if len(after) < len(here) else 0.0
            close(found[row, t], (rewards[row] - peers.mean() + gain) / (peers.std() + 0.3))
        close(values[row, len(tokens)], sum(after) / len(after))
        assert values[row, len(tokens) + 1 :].isnan().all()
        assert (found[row, len(tokens) :] == 0).all()


def test_the_gains_of_a_path_add_up_to_its_outcome():
    completions = [[1, 2, 3], [1, 2, 4], [1, 5, 3], [6, 5, 4]]
    rewards = torch.tensor([0.3, 0.9, 0.1, 0.5])
    rooted = prefix_tree_advantages(completions, rewards, [0] * 4, root=True, eps=0.0)
    plain = group_advantages(rewards, [0] * 4, eps=0.0)
    close((rooted - plain[:, None]).sum(1), plain, 1e-5)


def test_order_names_and_scale_do_not_matter():
    groups, order = torch.tensor([5, 5, 5, 2, 2]), [4, 2, 0, 3, 1]
    completions, rewards = [[1, 2], [1, 3], [1, 2, 4], [8], [8, 8]], torch.tensor([0.5, 0.1, 0.9, 0.3, 0.2])
    found = prefix_tree_advantages(completions, rewards, groups, eps=0.0)
    moved = prefix_tree_advantages([completions[i] for i in order], 3 * rewards[order] + 2, -groups[order], eps=0.0)
    close(moved, found[order], 1e-5)


def test_no_rows_and_types():
    assert prefix_values([], torch.zeros(0), []).shape == (0, 1)
    assert prefix_tree_advantages([], torch.zeros(0), []).shape == (0, 0)
    assert prefix_tree_advantages([[], []], torch.tensor([0.0, 1.0]), [0, 0]).shape == (2, 0)
    assert prefix_values(COMPLETIONS, REWARDS.long(), [0] * 4).dtype == torch.float32
    assert not prefix_tree_advantages(COMPLETIONS, REWARDS.clone().requires_grad_(), [0] * 4).requires_grad


@pytest.mark.parametrize("function", [prefix_values, prefix_tree_advantages])
def test_bad_input_is_named(function):
    with pytest.raises(ValueError, match="`completions` has 1 lists of tokens for 2 rewards; give one per reward"):
        function([[1]], torch.zeros(2), [0, 0])
    with pytest.raises(ValueError, match="one group id per row"):
        function([[1], [2]], torch.zeros(2), [0])
    with pytest.raises(ValueError, match=r"`rewards` has shape \(2, 1\)"):
        function([[1], [2]], torch.zeros(2, 1), [0, 0])


def test_other_contexts_share_nothing():
    """The first two rows follow one context, and the last two another; the group is compared as a whole."""
    completions, rewards = [[1, 2], [1, 3], [1, 2], [1, 3]], torch.tensor([1.0, 0, 5, 9])
    contexts = [4, 4, 0, 0]
    found = prefix_values(completions, rewards, [0] * 4, contexts=contexts)
    close(found, [[0.5, 0.5, 1], [0.5, 0.5, 0], [7, 7, 5], [7, 7, 9]])
    apart = prefix_tree_advantages(completions, rewards, [0] * 4, contexts=contexts, ddof=0, eps=0.0)
    plain = group_advantages(rewards, [0] * 4, ddof=0, eps=0.0)
    close(apart[:, 0], plain)
    assert not torch.allclose(apart, prefix_tree_advantages(completions, rewards, [0] * 4, ddof=0, eps=0.0))
    # A token alone in its state keeps the advantage of its completion.
    one = anchor_prefix_advantages(completions, rewards, [0] * 4, plain, contexts=[0, 1, 2, 3])
    close(one, plain[:, None].expand(4, 2))
