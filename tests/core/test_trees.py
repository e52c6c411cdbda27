"""Values and advantages of a tree's nodes, by hand and by enumeration."""

import pytest
import torch

from flowgrpo.core.trees import depth_advantages, node_values

NAN = float("nan")
# Two trees: 0 -> (1 -> (3, 4, 5), 2 -> 6) and 7 -> (8, 9).
PARENT = torch.tensor([-1, 0, 0, 1, 1, 1, 2, -1, 7, 7])
LEAVES = torch.tensor([1.0, 2.0, 6.0, 7.0, 10.0, 20.0])
DEPTH = torch.tensor([0, 1, 1, 2, 2, 2, 2, 0, 1, 1])
TREE = torch.tensor([0] * 7 + [1] * 3)


def close(got, want, tol=1e-6):
    want = torch.as_tensor(want, dtype=got.dtype)
    torch.testing.assert_close(got, want, atol=tol, rtol=tol, equal_nan=True)


def test_mean_over_leaf_descendants_not_over_children():
    close(node_values(PARENT, LEAVES), [4, 3, 7, 1, 2, 6, 7, 15, 10, 20])


def test_leaf_rewards_may_be_given_per_node():
    per_node = torch.tensor([99.0, float("inf"), NAN, 1, 2, 6, 7, NAN, 10, 20])
    close(node_values(PARENT, per_node), node_values(PARENT, LEAVES))


def test_nan_leaves_are_left_out():
    rewards = LEAVES.clone()
    rewards[[2, 3, 5]] = NAN
    close(node_values(PARENT, rewards), [1.5, 1.5, NAN, 1, 2, NAN, NAN, 10, 10, NAN])
    assert node_values(PARENT, torch.full((6,), NAN)).isnan().all()


def test_any_order_of_nodes():
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    place = torch.empty_like(order)
    place[order] = torch.arange(10)
    parent = torch.where(PARENT[order] < 0, -1, place[PARENT[order]])
    per_node = torch.full((10,), NAN)
    per_node[[3, 4, 5, 6, 8, 9]] = LEAVES
    close(node_values(parent, per_node[order]), node_values(PARENT, LEAVES)[order])


def test_path_weights_by_enumeration():
    g = torch.Generator().manual_seed(1)
    log_prob = torch.randn(10, generator=g)
    beta = 0.7
    got = node_values(PARENT, LEAVES, how="path", log_prob=log_prob, beta=beta)
    leaves = [3, 4, 5, 6, 8, 9]
    for node in range(10):
        logits, rewards = [], []
        for leaf, reward in zip(leaves, LEAVES):
            path, at = 0.0, leaf
            while at not in (node, -1):
                path += float(log_prob[at])
                at = int(PARENT[at])
            if at == node:
                logits.append(beta * path)
                rewards.append(float(reward))
        weights = torch.tensor(logits).softmax(0)
        close(got[node], float((weights * torch.tensor(rewards)).sum()), 1e-5)


def test_a_path_counts_with_its_probability_by_default():
    log_prob = torch.tensor([NAN, 2.0, 1.0]).log()  # of a root it is ignored
    close(node_values(torch.tensor([-1, 0, 0]), torch.tensor([3.0, 0.0]), how="path", log_prob=log_prob), [2, 3, 0])


def test_one_node_and_none():
    nobody = torch.zeros(0, dtype=torch.long)
    for found in (
        node_values(nobody, torch.zeros(0, requires_grad=True)),
        depth_advantages(torch.zeros(0, requires_grad=True), nobody, nobody),
    ):
        assert found.shape == (0,)
        assert not found.requires_grad
    close(node_values(torch.tensor([-1]), torch.tensor([3.0])), [3])
    close(depth_advantages(torch.tensor([3.0]), [0], [0]), [0])


def test_path_with_beta_zero_or_equal_log_probs_is_the_mean_on_a_balanced_tree():
    parent = torch.tensor([-1, 0, 0, 1, 1, 2, 2])
    rewards = torch.tensor([1.0, 2.0, 3.0, 5.0])
    mean = node_values(parent, rewards)
    big = torch.full((7,), -4000.0)  # sums of log-probs underflow exp()
    close(node_values(parent, rewards, how="path", log_prob=big, beta=0.0), mean)
    close(node_values(parent, rewards, how="path", log_prob=big), mean)


def test_equal_leaves_have_equal_values_and_no_advantage():
    parent = torch.tensor([-1, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2])
    values = node_values(parent, torch.full((10,), 0.1, dtype=torch.float64))
    assert (values == values[0]).all()
    close(values[0], 0.1, 1e-15)


def test_depth_advantages_by_hand():
    values = node_values(PARENT, LEAVES)
    got = depth_advantages(values, DEPTH, TREE)
    third = torch.tensor([1.0, 2.0, 6.0, 7.0])
    want = torch.zeros(10)
    want[1:3] = torch.tensor([-1.0, 1.0]) * 0.5**0.5
    want[3:7] = (third - third.mean()) / third.std()
    want[8:] = torch.tensor([-1.0, 1.0]) * 0.5**0.5
    close(got, want)
    close(depth_advantages(values, DEPTH, TREE, ddof=0)[8:], [-1, 1])
    close(depth_advantages(values, DEPTH, TREE, eps=1.0)[1:3], torch.tensor([-2.0, 2.0]) / (8**0.5 + 1))


def test_depths_are_standardised_within_their_own_tree():
    values = node_values(PARENT, LEAVES)
    base = depth_advantages(values, DEPTH, TREE)
    close(depth_advantages(torch.where(TREE == 1, 5 * values - 3, values), DEPTH, TREE), base)
    close(depth_advantages(values, DEPTH + 4, 13 - TREE), base)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(2))
    close(depth_advantages(values[order], DEPTH[order], TREE[order]), base[order])


def test_ties_to_rounding_and_missing_values_get_no_advantage():
    values = torch.tensor([0.5, 0.5 + 1e-7, 0.5 - 1e-7, 1.0, 2.0, NAN])
    depth = torch.tensor([0, 0, 0, 1, 1, 1])
    got = depth_advantages(values, depth, torch.zeros(6, dtype=torch.long))
    assert (got[[0, 1, 2, 5]] == 0).all()
    close(got[3:5], torch.tensor([-1.0, 1.0]) * 0.5**0.5)


def test_malformed_trees_are_refused():
    with pytest.raises(ValueError, match="cycle"):
        node_values(torch.tensor([-1, 2, 1]), torch.ones(1))
    with pytest.raises(ValueError, match=r"outside -1\.\.1"):
        node_values(torch.tensor([-1, 5]), torch.ones(1))
    with pytest.raises(ValueError, match=r"outside -1\.\.0"):
        node_values(torch.tensor([-2]), torch.ones(1))
    with pytest.raises(ValueError, match=r"give \(6,\) in node order"):
        node_values(PARENT, torch.ones(4))
    with pytest.raises(ValueError, match="`log_prob`"):
        node_values(PARENT, LEAVES, how="path")
    with pytest.raises(ValueError, match="'mean' or 'path'"):
        node_values(PARENT, LEAVES, how="max")
    with pytest.raises(ValueError, match="infinite"):
        node_values(PARENT, LEAVES * float("inf"))
    with pytest.raises(ValueError, match=r"\(N,\)"):
        depth_advantages(torch.ones(2, 2), [0, 0], [0, 0])
