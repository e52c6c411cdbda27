"""The record of a rollout: parts, origins, credit and groups on trees of toy states, without a model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from flowgrpo.pipelines.experience import Experience, part_of
from flowgrpo.rewards.runner import RewardBatch
from flowgrpo.samplers.kernels import Kernel
from flowgrpo.samplers.plans import Plan, StepPlan, branch_plan, spine_plan, window_plan
from flowgrpo.samplers.rollout import RolloutRunner
from flowgrpo.samplers.schedules import shifted_sigmas
from flowgrpo.training.credit.credits import Judged
from flowgrpo.training.credit.step_credits import depth

FIVE = shifted_sigmas(5, 3.0)
FLOW = Kernel("flow_sde", 0.7)


def grown(plan: Plan, prompts: int = 2) -> Experience:
    rollout = RolloutRunner(lambda x, i, rows: 0.5 * x, plan, (4,)).run(range(prompts))
    return Experience(rollout, plan, ("",) * prompts, torch.zeros(len(rollout.leaf), 3, 1, 1), 1)


def below(experience: Experience) -> dict[int, list[int]]:
    """Positions of the leaves below each node."""
    found: dict[int, list[int]] = {}
    for position, node in enumerate(experience.rollout.leaf.tolist()):
        while node >= 0:
            found.setdefault(node, []).append(position)
            node = int(experience.rollout.parent[node])
    return found


@pytest.mark.parametrize(("prompts", "updates"), [(8, 1), (8, 3), (5, 5), (2, 4)])
def test_parts_cut_the_prompts_evenly(prompts: int, updates: int) -> None:
    parts = [part_of(prompts, updates, k) for k in range(updates)]

    assert [p for low, high in parts for p in range(low, high)] == list(range(prompts))
    sizes = [high - low for low, high in parts]
    assert max(sizes) - min(sizes) <= 1


def test_where_an_image_comes_from() -> None:
    experience = replace(grown(branch_plan(FIVE, (0, 2), FLOW, width=3, roots=2)), keys=(5, 6))
    origins = experience.origins()
    assert len(origins) == 2 * 2 * 9
    first = origins[:9]
    assert [o["path"] for o in first] == [[[0, a], [2, b]] for a in range(3) for b in range(3)]
    assert len({o["noise"] for o in first}) == 1
    assert len({o["noise"] for o in origins}) == 4
    assert all(o["path"] == [] for o in grown(Plan(FIVE, (StepPlan(),) * 5, roots=3)).origins())


@pytest.mark.parametrize("roots", [1, 2])
def test_credit_of_a_node_is_the_mean_of_its_leaves(roots: int) -> None:
    experience = grown(branch_plan(FIVE, (0, 2), FLOW, width=3, roots=roots))
    leaf = torch.randn(len(experience.rollout.leaf), generator=torch.Generator().manual_seed(0))
    values = experience.node_advantages(leaf)

    leaves = below(experience)
    assert len(leaves) == len(values)
    for node, positions in leaves.items():
        torch.testing.assert_close(values[node], leaf[positions].mean())
    assert torch.equal(values[experience.rollout.leaf], leaf)


def by_depth(experience: Experience, rewards: torch.Tensor) -> torch.Tensor:
    scores = RewardBatch(rewards[:, None], ("reward",), torch.ones(1), {}, {}, {})
    return depth(Judged(experience, scores, None))


@pytest.mark.parametrize("roots", [1, 2])
def test_credit_by_depth_is_standardised_within_each_depth_of_each_tree(roots: int) -> None:
    experience = grown(branch_plan(FIVE, (0, 2), FLOW, width=3, roots=roots))
    rollout = experience.rollout
    rewards = torch.randn(len(rollout.leaf), generator=torch.Generator().manual_seed(0))
    values, means = by_depth(experience, rewards), experience.node_advantages(rewards)

    for prompt in range(2):
        for root in range(roots):
            for level in range(6):
                here = (rollout.prompt == prompt) & (rollout.root == root) & (rollout.depth == level)
                assert here.sum() == (1, 3, 3, 9, 9, 9)[level]
                fused = means[here]
                expected = torch.zeros(1) if level == 0 else (fused - fused.mean()) / fused.std()
                torch.testing.assert_close(values[here], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["leaf", "depth"])
def test_credit_leaves_out_what_has_no_reward(how: Any) -> None:
    experience = grown(branch_plan(FIVE, (0,), FLOW, width=3), prompts=1)
    rollout = experience.rollout
    rewards = torch.tensor([1.0, torch.nan, 3.0])
    values = by_depth(experience, rewards) if how == "depth" else experience.node_advantages(rewards)

    first = values[rollout.depth == 1]
    known = first[[0, 2]]
    scale = 1 if how == "leaf" else math.sqrt(2)
    torch.testing.assert_close(known, torch.tensor([1.0, 3.0]) if how == "leaf" else torch.tensor([-1.0, 1.0]) / scale)
    assert first[1].isnan() if how == "leaf" else first[1] == 0


def test_groups_of_chains_and_trees_are_their_prompts() -> None:
    for plan in (window_plan(FIVE, (1, 2), FLOW, samples=3), branch_plan(FIVE, (0, 2), FLOW, roots=2)):
        experience = grown(plan)
        assert torch.equal(experience.groups, experience.rollout.leaf_prompt)


SIDE = StepPlan(side=2, side_kernel=FLOW)
NOISY = StepPlan(kernel=FLOW, children=2, side=3, side_kernel=FLOW, trained=True)


@pytest.mark.parametrize(
    ("plan", "sizes"),
    [
        (spine_plan(FIVE, (0, 1, 3), FLOW, branches=4), [4, 4, 4]),
        (spine_plan(FIVE, (0, 2), FLOW, branches=2, roots=3), [6, 6]),
        (spine_plan(FIVE, (1, 2), FLOW, branches=2, main_leaf=True), [1, 2, 2]),
        # Branches that are only probed, and branches of a main line that branches itself.
        (Plan(FIVE, (SIDE, replace(SIDE, trained=True), *[StepPlan()] * 3), main_leaf=False), [2, 2]),
        (Plan(FIVE, (SIDE, *[StepPlan()] * 4)), [1, 2]),
        (Plan(FIVE, (NOISY, NOISY, *[StepPlan()] * 3)), [3, 4, 6]),
    ],
)
def test_side_branches_are_compared_with_those_of_their_own_step(plan: Plan, sizes: list[int]) -> None:
    experience = grown(plan)
    groups, prompts = experience.groups.tolist(), experience.prompt_of_sample
    members = {g: [k for k, other in enumerate(groups) if other == g] for g in set(groups)}

    assert sorted(len(m) for m in members.values()) == sorted(sizes * 2)
    assert all(len({prompts[k] for k in m}) == 1 for m in members.values())


def test_branches_of_one_group_left_at_one_step() -> None:
    """On a spine the nodes with several children are the main line; the last of them is where a leaf left it."""
    experience = grown(spine_plan(FIVE, (0, 1, 3), FLOW, branches=4))
    rollout = experience.rollout
    children = torch.bincount(rollout.parent[rollout.parent >= 0], minlength=len(rollout.parent))
    left = []
    for node in rollout.leaf.tolist():
        while children[node] <= 1:
            node = int(rollout.parent[node])
        left.append((int(rollout.prompt[node]), int(rollout.depth[node])))

    assert set(left) == {(p, step) for p in range(2) for step in (0, 1, 3)}
    assert len(set(zip(left, experience.groups.tolist()))) == len(set(left)) == len(set(experience.groups.tolist()))
