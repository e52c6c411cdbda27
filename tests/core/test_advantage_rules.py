"""The rules that every advantage obeys: order and names of rows, missing scores, groups without a signal, types."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgrpo.core.advantages import group_advantages
from flowgrpo.core.baselines import (
    anchor_state_advantages,
    beta_advantages,
    stratified_advantages,
    virtual_maximum_advantages,
)
from flowgrpo.core.bounded_terms import bounded_shaping, positive_only_advantages
from flowgrpo.core.outcomes import consistency_advantages, quantile_advantages
from flowgrpo.core.prefix_tree import prefix_tree_advantages
from flowgrpo.core.trackers import CumulativeStandardiser

NAN = float("nan")


def anchor(rewards, groups, extra):
    return anchor_state_advantages(rewards, groups, extra, torch.zeros(len(rewards)), eps=0.0)


def auxiliary(rewards, groups, extra):
    return positive_only_advantages(rewards, extra, extra > 0, groups, weight=0.5, eps=0.0)


def shaped(rewards, groups, extra):
    signal = extra.float().masked_fill(rewards.isnan(), NAN)
    return bounded_shaping(group_advantages(rewards, groups, eps=0.0), signal, groups)


def tree(rewards, groups, extra):
    completions = [[1, i] if i else [2] for i in extra.tolist()]
    return prefix_tree_advantages(completions, rewards, groups, eps=0.0).sum(1)


# Functions of rewards, groups and an integer 0..2 per row.
CASES = {
    "virtual_maximum": lambda r, g, x: virtual_maximum_advantages(r, g, maximum=4.0, eps=0.0),
    "stratified": lambda r, g, x: stratified_advantages(r, g, x, eps=0.0),
    "beta": lambda r, g, x: beta_advantages((r > 1).float().masked_fill(r.isnan(), NAN), g),
    "anchor_state": anchor,
    "consistency": lambda r, g, x: consistency_advantages(r, g, eps=0.0),
    "quantile": lambda r, g, x: quantile_advantages(r, g, low=0.4, eps=0.0),
    "positive_only": auxiliary,
    "bounded_shaping": shaped,
    "prefix_tree": tree,
    "cumulative": lambda r, g, x: CumulativeStandardiser(eps=0.0).advantages(r, g),
}
ROWS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.25, 0.5, 1.5, 4.0, NAN]), st.integers(0, 2)),
    min_size=2,
    max_size=14,
)
every_case = pytest.mark.parametrize("case", CASES)


def close(got, want, tol=1e-5):
    torch.testing.assert_close(got, want, atol=tol, rtol=tol)


def columns(rows):
    groups, rewards, extra = zip(*rows)
    return torch.tensor(rewards), torch.tensor(groups), torch.tensor(extra)


@every_case
@settings(max_examples=40, deadline=None)
@given(rows=ROWS, rng=st.randoms(use_true_random=False))
def test_neither_the_order_of_rows_nor_the_names_of_groups_matter(case, rows, rng):
    rewards, groups, extra = columns(rows)
    found = CASES[case](rewards, groups, extra)
    order = list(range(len(rows)))
    rng.shuffle(order)
    relabelled = torch.tensor([90, -5, 17, 3])[groups]
    close(CASES[case](rewards[order], relabelled[order], extra[order]), found[order])


@every_case
@settings(max_examples=40, deadline=None)
@given(rows=ROWS)
def test_a_reward_that_is_nan_leaves_every_statistic_and_gets_zero(case, rows):
    rewards, groups, extra = columns([*rows, (0, 1.5, 1), (0, 0.25, 1), (1, NAN, 1)])
    known = ~rewards.isnan()
    found = CASES[case](rewards, groups, extra)
    assert (found[~known] == 0).all()
    close(found[known], CASES[case](rewards[known], groups[known], extra[known]))


@pytest.mark.parametrize("case", [name for name in CASES if name not in ("virtual_maximum", "consistency")])
def test_groups_without_a_signal_get_exactly_zero(case):
    rewards = torch.tensor([1.1] * 7 + [0.3] + [0.2, 1.9])
    groups = torch.tensor([0] * 7 + [1] + [2, 2])
    found = CASES[case](rewards, groups, torch.zeros(10, dtype=torch.long))
    assert (found[:8] == 0).all()
    assert (found[8:] != 0).all()


@pytest.mark.parametrize("case", ["stratified", "anchor_state", "consistency", "quantile", "prefix_tree", "cumulative"])
def test_scale_and_shift_of_the_rewards_do_not_matter(case):
    g = torch.Generator().manual_seed(0)
    rewards, groups = torch.rand(12, generator=g), torch.randint(0, 3, (12,), generator=g)
    extra = torch.randint(0, 3, (12,), generator=g)
    close(CASES[case](4 * rewards + 8, groups, extra), CASES[case](rewards, groups, extra), 1e-4)


@every_case
def test_results_are_float32_at_least_and_carry_no_gradient(case):
    groups, extra = torch.tensor([0, 0, 1, 1]), torch.tensor([1, 1, 0, 0])
    rewards = torch.tensor([0.0, 2.0, 1.0, 3.0])
    found = CASES[case](rewards.clone().requires_grad_(), groups, extra)
    assert not found.requires_grad
    assert found.dtype == torch.float32
    assert CASES[case](rewards.bfloat16(), groups, extra).dtype == torch.float32
    if case != "beta":  # the case makes its own binary rewards, float32
        double = CASES[case](rewards.double(), groups, extra)
        assert double.dtype == torch.float64
        close(double.float(), found)
    assert CASES[case](torch.zeros(0), torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long)).numel() == 0


@every_case
def test_one_group_id_per_row(case):
    with pytest.raises(ValueError, match=r"give one (group id|value) per row"):
        CASES[case](torch.zeros(3), torch.zeros(2, dtype=torch.long), torch.zeros(3, dtype=torch.long))
