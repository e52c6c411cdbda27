"""GiGPO by hand: steps from one state are compared with each other, in a tree and after the prefixes of completions."""

import pytest
import torch

from flowgrpo.core.advantages import group_advantages
from flowgrpo.core.prefix_tree import anchor_prefix_advantages
from flowgrpo.core.trees import anchor_tree_advantages

NAN = float("nan")
HALF = 2**-0.5
IDS = [[5, 6, 3], [5, 7, 3], [8, 3], [8, 3]]
ONE = torch.tensor([1.0, 0.0, 0.0, 0.0])
ALL = torch.zeros(4, dtype=torch.long)
# Two splits: the root, its children 1 and 2, and two leaves below each.
PARENT = torch.tensor([-1, 0, 0, 1, 1, 2, 2])
LEAF = torch.tensor([3, 4, 5, 6])


def episode(rewards: torch.Tensor = ONE, groups: torch.Tensor = ALL) -> torch.Tensor:
    return group_advantages(rewards, groups, eps=0.0)


def tokens(**more: object) -> list[list[float]]:
    return anchor_prefix_advantages(IDS, ONE, ALL, episode(), eps=0.0, **more).tolist()


def edges(rewards: torch.Tensor = ONE, **more: object) -> list[float]:
    return anchor_tree_advantages(PARENT, LEAF, rewards, ALL, episode(rewards), eps=0.0, **more).tolist()


def test_tokens_are_compared_after_the_prefix_that_they_share() -> None:
    """All begin from the prompt: 3/2, and -1/2 twice. After token 5, rewards 1 and 0 differ; after 8, none differ."""
    assert tokens() == [
        pytest.approx(row) for row in ([3, 1.5 + HALF, 1.5], [-1, -0.5 - HALF, -0.5], [-1, -0.5, 0], [-1, -0.5, 0])
    ]  # fmt: skip
    assert tokens(weight=0.0) == [
        pytest.approx(row) for row in ([1.5] * 3, [-0.5] * 3, [-0.5, -0.5, 0], [-0.5, -0.5, 0])
    ]  # fmt: skip


def test_a_reward_is_worth_less_the_later_it_comes() -> None:
    """The first has 1/4 at the prompt (mean 1/16), and 1/2 after token 5 (mean 1/4); nothing is divided."""
    found = tokens(discount=0.5, scale="none", weight=2.0)
    assert found[0] == pytest.approx([1.5 + 2 * 3 / 16, 1.5 + 2 / 4, 1.5])
    assert found[1] == pytest.approx([-0.5 - 2 / 16, -0.5 - 2 / 4, -0.5])
    assert found[2] == pytest.approx([-0.5 - 2 / 16, -0.5, 0])
    # A long success comes later than a short one, so its first token is worth less.
    longer = anchor_prefix_advantages(
        [[1, 2, 3], [1, 3]], torch.ones(2), [0, 0], torch.zeros(2), discount=0.5, scale="none"
    )
    assert longer.tolist() == [[-0.125, -0.25, 0], [0.125, 0.25, 0]]


def test_only_completions_of_one_group_share_states() -> None:
    found = anchor_prefix_advantages([[5], [5], [5], [5]], ONE, [0, 0, 1, 1], episode(), eps=0.0)
    assert found[:, 0].tolist() == pytest.approx([1.5 + HALF, -0.5 - HALF, -0.5, -0.5])
    # No two completions are of one group, so they keep their own advantages.
    assert anchor_prefix_advantages([[5, 6], [5]], ONE[:2], [0, 1], torch.tensor([3.0, 4.0])).tolist() == [
        [3, 3],
        [4, 0],
    ]
    assert anchor_prefix_advantages([], torch.zeros(0), [], torch.zeros(0)).shape == (0, 0)


def test_a_completion_without_a_reward_is_compared_with_none() -> None:
    rewards = torch.tensor([1.0, 0.0, NAN])
    episodes = torch.tensor([2.0, -2.0, NAN], requires_grad=True)
    found = anchor_prefix_advantages([[5], [5], [5, 6, 7, 8, 9]], rewards, [0] * 3, episodes, eps=0.0)
    assert found.tolist() == [pytest.approx([first, 0, 0, 0, 0]) for first in (2 + HALF, -2 - HALF, 0)]
    assert not found.requires_grad


def test_edges_are_compared_with_those_from_the_same_node() -> None:
    """The leaves have 3/2 and -1/2 thrice, from the root as in the group; below node 1 the leaves differ by 1."""
    assert edges() == pytest.approx([0, 1, -1, 1.5 + HALF, -0.5 - HALF, -0.5, -0.5])
    assert edges(weight=0.0) == pytest.approx([0, 0.5, -0.5, 1.5, -0.5, -0.5, -0.5])
    # A step earlier a reward is half as much; equal deviations are divided away.
    assert edges(discount=0.5) == pytest.approx(edges())
    halved = edges(discount=0.5, scale="none")
    assert halved == pytest.approx([0, 0.5 + (0.375 - 0.125) / 2, -0.5 - 0.125, 2.0, -1.0, -0.5, -0.5])


def test_chains_that_part_at_one_state_are_told_apart_there_alone() -> None:
    """One root, a step that all share, and then three chains of two steps."""
    parent = torch.tensor([-1, 0, 1, 1, 1, 2, 3, 4])
    rewards = torch.tensor([1.0, 0.0, 2.0])
    found = anchor_tree_advantages(
        parent, torch.tensor([5, 6, 7]), rewards, [0] * 3, episode(rewards, torch.zeros(3)), eps=0.0
    )
    # The shared step has the mean of all, which is 0.
    assert found.tolist() == pytest.approx([0, 0, 0, -2, 2, 0, -1, 1])


def test_defaults_discount_nothing_and_divide_by_the_deviation() -> None:
    """Rewards 1 and 0 have a deviation of sqrt(1/2), to which 1e-4 is added."""
    own = 0.5 / (HALF + 1e-4)
    two, nothing = torch.tensor([1.0, 0.0]), torch.zeros(2)
    found = anchor_prefix_advantages([[5, 7], [6, 7]], two, [0, 0], nothing)
    assert found.tolist() == [pytest.approx([own, 0]), pytest.approx([-own, 0])]
    edges_of_two = anchor_tree_advantages(torch.tensor([-1, 0, 0, 1, 2]), torch.tensor([3, 4]), two, [0, 0], nothing)
    assert edges_of_two.tolist() == pytest.approx([0, own, -own, 0, 0])
    population = anchor_prefix_advantages([[5], [6]], two, [0, 0], nothing, eps=0.0, ddof=0)
    assert population[:, 0].tolist() == pytest.approx([1, -1])
    plain = {"scale": "none"}
    assert anchor_prefix_advantages([[5, 7], [6, 7]], two, [0, 0], nothing, **plain)[:, 0].tolist() == [0.5, -0.5]
    edges_of_two = anchor_tree_advantages(
        torch.tensor([-1, 0, 0, 1, 2]), torch.tensor([3, 4]), two, [0, 0], nothing, eps=0.0, ddof=0, **plain
    )
    assert edges_of_two.tolist() == [0, 0.5, -0.5, 0, 0]


def test_a_tree_without_leaves_has_no_advantages() -> None:
    nothing = torch.zeros(0)
    assert anchor_tree_advantages(PARENT, LEAF[:0], nothing, [], nothing).tolist() == [0.0] * 7


def test_leaves_without_a_reward_and_other_groups_are_left_out() -> None:
    rewards = torch.tensor([1.0, 0.0, NAN, 4.0])
    found = anchor_tree_advantages(PARENT, LEAF, rewards, [0, 0, 0, 1], torch.tensor([1.0, -1.0, NAN, 0.0]), eps=0.0)
    # From the root only the first two are compared; a node above other nodes has their mean.
    assert found.tolist() == pytest.approx([0, 0, 0, 1 + HALF, -1 - HALF, 0, 0])
    assert anchor_tree_advantages(torch.tensor([-1]), torch.tensor([0]), ONE[:1], [0], ONE[:1]).tolist() == [0]


@pytest.mark.parametrize(
    ("parent", "leaf", "rewards", "groups", "message"),
    [
        ([-1, 0], [1, 1], [1.0], [0, 0], "`rewards` has shape"),
        ([-1, 0], [1], [1.0], [0, 1], "`groups` has shape"),
        ([1, 0], [1], [1.0], [0], "holds a cycle"),
        ([-1, 0], [1], [float("inf")], [0], "infinite"),
    ],
)
def test_trees_that_do_not_fit_are_refused(
    parent: list[int], leaf: list[int], rewards: list[float], groups: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        anchor_tree_advantages(
            torch.tensor(parent), torch.tensor(leaf), torch.tensor(rewards), groups, torch.zeros(len(leaf))
        )
    with pytest.raises(ValueError, match="`completions` has 1 lists"):
        anchor_prefix_advantages([[1]], torch.zeros(2), [0, 0], torch.zeros(2))
