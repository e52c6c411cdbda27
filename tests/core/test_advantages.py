"""Advantages within groups, by hand, and what must not change them."""

import typing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgrpo.configs.schema import Recipe
from flowgrpo.core.advantages import (
    TRANSFORMS,
    anchored_advantages,
    filled_rewards,
    group_advantages,
    group_means,
    group_moments,
    multi_reward_advantages,
)

NAN = float("nan")
GROUPS = torch.tensor([7, 7, -2, 7, -2])
REWARDS = torch.tensor([1.0, 2.0, 5.0, 6.0, 9.0])  # group 7: 1, 2, 6 (mean 3, ss 14); group -2: 5, 9 (mean 7, ss 8)


def close(got, want, tol=1e-6):
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=got.dtype), atol=tol, rtol=tol)


@pytest.mark.parametrize(("ddof", "std7", "std2"), [(1, 7**0.5, 8**0.5), (0, (14 / 3) ** 0.5, 2.0)])
def test_mean_baseline_by_hand(ddof, std7, std2):
    got = group_advantages(REWARDS, GROUPS, ddof=ddof, eps=1e-4)
    a, b = std7 + 1e-4, std2 + 1e-4
    close(got, [-2 / a, -1 / a, -2 / b, 3 / a, 2 / b])


def test_baselines_by_hand():
    close(group_advantages(REWARDS, GROUPS, baseline="mean", scale="none"), [-2, -1, -2, 3, 2])
    close(group_advantages(REWARDS, GROUPS, baseline="loo", scale="none"), [-3, -1.5, -4, 4.5, 4])
    close(group_advantages(REWARDS, GROUPS, baseline="none", scale="none"), REWARDS)
    given_baseline = torch.tensor([0.5, 1.0, 1.5, 2.0, 2.5])
    close(group_advantages(REWARDS, GROUPS, baseline=given_baseline, scale="none"), REWARDS - given_baseline)
    lengths = torch.tensor([1, 1, 3, 2, 1])  # (1 + 2 + 12) / 4 and (15 + 9) / 4
    got = group_advantages(REWARDS, GROUPS, baseline="length", scale="none", lengths=lengths)
    close(got, REWARDS - torch.tensor([3.75, 3.75, 6.0, 3.75, 6.0]))


def test_a_given_baseline_is_one_value_per_row_or_one_per_reward():
    rewards = torch.stack([REWARDS, 2 * REWARDS], 1)
    per_row, per_reward = torch.tensor([1.0, 2, 3, 4, 5]), torch.arange(10.0).reshape(5, 2)
    close(group_advantages(rewards, GROUPS, baseline=per_row, scale="none"), rewards - per_row[:, None])
    close(group_advantages(rewards, GROUPS, baseline=per_reward, scale="none"), rewards - per_reward)
    close(group_advantages(REWARDS[:1], [0], baseline=torch.tensor([0.25]), scale="none"), [0.75])
    with pytest.raises(ValueError, match="or one per reward"):
        group_advantages(rewards, GROUPS, baseline=torch.zeros(5, 3))


def test_moments_by_hand():
    values = torch.tensor([[1.0], [4.0], [7.0], [NAN]], dtype=torch.float64)
    found = group_moments(values, torch.tensor([0, 0, 1, 2]), 3, ddof=1)
    assert found.count.tolist() == [[2], [1], [0]]
    assert found.minimum.tolist() == [[1], [7], [float("inf")]]
    assert found.offset.tolist() == [[1.5], [0], [0]]
    close(found.std, [[4.5**0.5], [0], [0]])
    assert found.degenerate.tolist() == [[False], [True], [True]]


def test_leave_one_out_is_the_mean_of_the_others():
    rewards = torch.rand(6, generator=torch.Generator().manual_seed(0))
    got = group_advantages(rewards, torch.zeros(6, dtype=torch.long), baseline="loo", scale="none")
    for i in range(6):
        close(got[i], rewards[i] - torch.cat([rewards[:i], rewards[i + 1 :]]).mean())


def test_batch_scale_divides_by_the_deviation_of_all_rewards():
    got = group_advantages(REWARDS, GROUPS, scale="batch", ddof=0, eps=0.5)
    close(got, torch.tensor([-2.0, -1, -2, 3, 2]) / (REWARDS.std(correction=0) + 0.5))


def test_lengths_do_not_count_for_missing_rewards_and_zero_lengths_fall_back_to_the_mean():
    rewards = torch.tensor([1.0, 3.0, NAN, 1.0, 3.0])
    groups = torch.tensor([0, 0, 0, 1, 1])
    lengths = torch.tensor([3.0, 1.0, 100.0, 0.0, 0.0])
    got = group_advantages(rewards, groups, baseline="length", scale="none", lengths=lengths)
    close(got, [-0.5, 1.5, 0, -1, 1])
    got = group_advantages(rewards[:2], [0, 0], baseline="length", scale="none", lengths=torch.tensor([0.25, 0.5]))
    close(got, [1 - 7 / 3, 3 - 7 / 3])


def test_nan_leaves_all_statistics():
    rewards = torch.tensor([1.0, NAN, 2.0, 6.0, NAN])
    groups = torch.tensor([0, 0, 0, 0, 1])
    for options in ({}, {"scale": "batch"}, {"baseline": "loo"}, {"baseline": "none", "scale": "none"}):
        got = group_advantages(rewards, groups, **options)
        kept = [0, 2, 3]
        assert got[1] == 0
        assert got[4] == 0
        close(got[kept], group_advantages(rewards[kept], groups[kept], **options))


@pytest.mark.parametrize("baseline", ["mean", "loo", "length"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_groups_without_a_signal_get_exactly_zero(baseline, scale, eps):
    rewards = torch.tensor([0.1] * 7 + [0.3] + [0.2, 0.9])
    groups = torch.tensor([0] * 7 + [1] + [2, 2])
    lengths = torch.arange(1, 11)
    got = group_advantages(rewards, groups, baseline=baseline, scale=scale, eps=eps, lengths=lengths)
    assert (got[:8] == 0).all()
    assert (got[8:] != 0).all()


@pytest.mark.parametrize("scale", ["group", "batch"])
@pytest.mark.parametrize("baseline", ["mean", "none", torch.full((6,), 0.2)])
def test_equal_rewards_have_no_scale_so_no_advantage(scale, baseline):
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    got = group_advantages(torch.full((6,), 0.7), groups, scale=scale, baseline=baseline, eps=0.0)
    assert (got == 0).all()


def test_variance_is_two_pass():
    rewards = torch.tensor([1e6, 1e6 + 1, 1e6 + 2])  # one-pass float32 sums of squares lose all digits here
    close(group_advantages(rewards, torch.zeros(3, dtype=torch.long), eps=0.0), [-1, 0, 1])


ROWS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.5, NAN])), min_size=2, max_size=14)


@settings(max_examples=60, deadline=None)
@given(ROWS, st.randoms(use_true_random=False), st.sampled_from(["mean", "loo"]))
def test_permutation_relabelling_and_affine_invariance(rows, rng, baseline):
    groups = torch.tensor([g for g, _ in rows])
    rewards = torch.tensor([r for _, r in rows])
    base = group_advantages(rewards, groups, eps=0.0, baseline=baseline)
    order = list(range(len(rows)))
    rng.shuffle(order)
    relabelled = torch.tensor([90, -5, 17, 3])[groups]
    close(group_advantages(rewards[order], relabelled[order], eps=0.0, baseline=baseline), base[order], 1e-5)
    close(group_advantages(4 * rewards + 8, groups, eps=0.0, baseline=baseline), base, 1e-5)
    assert not base.isnan().any()
    for g in groups.unique():
        assert abs(float(base[groups == g].sum())) < 1e-4


def test_trailing_rewards_are_independent_and_integers_become_floats():
    rewards = torch.stack([REWARDS, REWARDS.flip(0)], 1)
    got = group_advantages(rewards, GROUPS)
    close(got[:, 1], group_advantages(REWARDS.flip(0), GROUPS))
    assert group_advantages(REWARDS.long(), GROUPS).dtype == torch.float32
    assert group_advantages(REWARDS.double(), GROUPS.tolist()).dtype == torch.float64
    assert not group_advantages(REWARDS.clone().requires_grad_(), GROUPS).requires_grad
    assert group_advantages(torch.zeros(0), torch.zeros(0)).shape == (0,)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"baseline": "median"}, "`baseline` is 'median'"),
        ({"scale": "std"}, "`scale` is 'std'"),
        ({"baseline": "length"}, "needs `lengths`"),
        ({"baseline": torch.zeros(4)}, "one value per row"),
    ],
)
def test_user_errors_say_what_to_write(options, words):
    with pytest.raises(ValueError, match=words):
        group_advantages(REWARDS, GROUPS, **options)
    with pytest.raises(ValueError, match="one group id per row"):
        group_advantages(REWARDS, GROUPS[:3])
    with pytest.raises(ValueError, match="infinite"):
        group_advantages(torch.tensor([1.0, float("inf")]), torch.tensor([0, 0]))


def test_sum_normalises_the_weighted_sum():
    rewards = torch.stack([REWARDS, REWARDS.square()], 1)
    got = multi_reward_advantages(rewards, GROUPS, torch.tensor([2.0, -0.5]), ddof=0)
    close(got, group_advantages(2 * REWARDS - 0.5 * REWARDS.square(), GROUPS, ddof=0))


def test_one_reward_one_row_and_no_row_at_all():
    close(multi_reward_advantages(REWARDS[:, None], GROUPS, [3.0], eps=0.0), group_advantages(REWARDS, GROUPS, eps=0.0))
    close(multi_reward_advantages(torch.tensor([[2.0, 3.0]]), [0], [1.0, 2.0], baseline="none", scale="none"), [8.0])
    close(multi_reward_advantages(torch.tensor([[2.0]]), [0], [3.0], baseline="none", scale="none"), [6.0])
    for how in ("sum", "gdpo"):
        assert multi_reward_advantages(torch.zeros(0, 1), torch.zeros(0), [1.0], how=how).shape == (0,)


def test_a_missing_reward_neither_favours_nor_harms_its_row():
    groups = torch.zeros(4, dtype=torch.long)
    rewards = torch.tensor([[1.0, 10.0], [2.0, NAN], [3.0, 30.0], [NAN, NAN]])
    got = multi_reward_advantages(rewards, groups, [1.0, 1.0], scale="none")
    close(got, [-1 - 10, 0, 1 + 10, 0])
    # A reward absent from a whole group leaves that group to the others.
    rewards[:, 1] = NAN
    close(multi_reward_advantages(rewards, groups, [1.0, 5.0]), group_advantages(rewards[:, 0], groups))


def test_what_one_row_alone_knows_stands_for_its_group_and_what_none_knows_for_nothing():
    got = multi_reward_advantages(torch.tensor([[1.0, 10.0], [2.0, NAN]]), [0, 0], [1.0, 1.0], scale="none")
    close(got, [-0.5, 0.5])
    unknown = torch.tensor([[1.0, NAN], [3.0, NAN]])
    close(multi_reward_advantages(unknown, [0, 0], [1.0, 5.0], baseline="none", scale="none"), [1, 3])


def test_a_missing_reward_has_the_mean_of_its_group_or_of_the_wider_one():
    rewards = torch.tensor([[1.0, NAN], [3.0, 5.0], [NAN, NAN], [NAN, 7.0]])
    filled = torch.tensor([[1.0, 5.0], [3.0, 5.0], [NAN, NAN], [NAN, 7.0]])
    torch.testing.assert_close(filled_rewards(rewards, [0, 0, 0, 1]), filled, equal_nan=True)
    filled[3, 0] = 2.0
    torch.testing.assert_close(filled_rewards(rewards, [0, 0, 0, 1], wider=[4] * 4), filled, equal_nan=True)
    assert filled_rewards(torch.zeros(0, 2), [], wider=[]).shape == (0, 2)


def test_a_group_that_lacks_a_reward_is_at_the_mean_of_all_where_the_deviation_is_over_all():
    """The mean of the reward that the second group lacks is 6. Without a baseline, the reward adds nothing there."""
    rewards = torch.tensor([[0.0, 4.0], [2.0, 8.0], [1.0, NAN], [3.0, NAN]])
    options = {"scale": "batch", "ddof": 0, "eps": 0.0}
    got = multi_reward_advantages(rewards, [0, 0, 1, 1], [1.0, 1.0], **options)
    close(got, torch.tensor([-3.0, 3, -1, 1]) / 5.25**0.5)  # sums 4, 10, 7, 9: mean 7.5, squares 21
    got = multi_reward_advantages(rewards, [0, 0, 1, 1], [1.0, 1.0], baseline="none", **options)
    close(got, torch.tensor([4.0, 10, 1, 3]) / 11.25**0.5)  # mean 4.5, squares 45


@pytest.mark.parametrize(("weights", "want"), [([1.0, 0.0], [0.5, 1.75]), ([0.0, 2.0], [12.0, 44.0])])
def test_a_given_baseline_of_a_reward_without_weight_is_left_out_with_it(weights, want):
    rewards, baseline = torch.tensor([[1.0, 10.0], [2.0, 30.0]]), torch.tensor([[0.5, 4.0], [0.25, 8.0]])
    options = {"how": "each", "scale": "none"}
    close(multi_reward_advantages(rewards, [0, 0], weights, baseline=baseline, **options), want)
    # A column for all rewards, and one value for each row, are a baseline of every reward.
    for one in (torch.tensor([[0.5], [0.25]]), torch.tensor([0.5, 0.25])):
        got = multi_reward_advantages(rewards, [0, 0], weights, baseline=one, **options)
        close(got, (rewards - torch.tensor([[0.5], [0.25]])) @ torch.tensor(weights))


def test_gdpo_whitens_a_sum_of_zero_and_equal_sums_that_are_not_zero():
    """Without a baseline the sums are 0, 1, 3, 3, with mean 7/4 and sample deviation 3/2."""
    rewards = torch.tensor([[0.0], [1.0], [3.0], [3.0]])
    got = multi_reward_advantages(rewards, [0, 0, 1, 1], [1.0], how="gdpo", baseline="none", scale="none", eps=0.0)
    close(got, torch.tensor([-1.75, -0.75, 1.25, 1.25]) / 1.5)


def test_gdpo_whitens_the_sum_of_separately_normalised_rewards():
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    rewards = torch.rand(6, 2, generator=torch.Generator().manual_seed(1)) * torch.tensor([1.0, 100.0])
    parts = group_advantages(rewards, groups)
    total = parts[:, 0] + 2 * parts[:, 1]
    want = (total - total.mean()) / (total.std() + 1e-4)
    got = multi_reward_advantages(rewards, groups, [1.0, 2.0], how="gdpo")
    close(got, want, 1e-5)
    rescaled = multi_reward_advantages(rewards * torch.tensor([1.0, 50.0]), groups, [1.0, 2.0], how="gdpo", eps=0)
    close(rescaled, multi_reward_advantages(rewards, groups, [1.0, 2.0], how="gdpo", eps=0), 1e-5)


def test_each_adds_separately_normalised_rewards_and_does_not_whiten():
    """In the first group both rewards have deviation 1, and the second row lacks one of them."""
    rewards = torch.tensor([[1.0, 10.0], [2.0, NAN], [3.0, 12.0], [5.0, 7.0], [5.0, 9.0], [NAN, NAN]])
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    half = 0.5**0.5
    got = multi_reward_advantages(rewards, groups, [1.0, 3.0], how="each", eps=0.0)
    # Two values that differ have sample advantages of ±1/√2.
    close(got, [-1 - 3 * half, 0, 1 + 3 * half, -3 * half, 3 * half, 0])
    assert got.dtype == torch.float32
    assert multi_reward_advantages(torch.zeros(0, 1), torch.zeros(0), [1.0], how="each").shape == (0,)


def test_gdpo_separates_reward_combinations_that_a_sum_makes_alike():
    rewards = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])  # rows 0 and 1 have equal sums
    groups = torch.zeros(4, dtype=torch.long)
    summed = multi_reward_advantages(rewards, groups, [1.0, 1.0])
    decoupled = multi_reward_advantages(rewards, groups, [1.0, 1.0], how="gdpo")
    assert summed[0] == summed[1]
    assert abs(decoupled[0] - decoupled[1]) > 0.1


@pytest.mark.parametrize("how", ["sum", "each", "gdpo"])
def test_rewards_combined_leave_silent_rows_exactly_zero(how):
    rewards = torch.tensor([[0.1, 0.7]] * 3 + [[0.2, 0.1], [0.3, 0.9], [0.7, 0.4], [NAN, NAN]])
    groups = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    got = multi_reward_advantages(rewards, groups, [0.3, 0.6], how=how)
    assert (got[[0, 1, 2, 6]] == 0).all()
    close(got[3:6], multi_reward_advantages(rewards[:6], groups[:6], [0.3, 0.6], how=how)[3:])
    with pytest.raises(ValueError, match="one weight per reward"):
        multi_reward_advantages(rewards, groups, [1.0], how=how)
    with pytest.raises(ValueError, match="'sum', 'each' or 'gdpo'"):
        multi_reward_advantages(rewards, groups, [1.0, 1.0], how="mean")


ANCHORED = torch.tensor([0.0, 2.0, 4.0, 4.0], dtype=torch.float64)  # mean 2.5, squares 6.25 + 0.25 + 2.25 + 2.25 = 11


def test_anchored_advantages_by_hand():
    """a is s / S in the first group, and 0 in the second group, where all rewards are equal."""
    pairs = torch.tensor([0, 0, 1, 1])
    whole = 2.75**0.5
    a, level = 1 / whole, [-2.5 / whole, -0.5 / whole, 1.5 / whole]
    got = anchored_advantages(ANCHORED, pairs, eps=0.0, ddof=0)
    close(got, [-a + (1 - a) * level[0], a + (1 - a) * level[1], level[2], level[2]], tol=1e-12)
    close(anchored_advantages(ANCHORED / 8, pairs, eps=0.0, ddof=0), got, tol=1e-12)
    # Twice as soon: a is 2 s / S = 1.2, but 1 at most, so the first group is compared within itself only.
    close(anchored_advantages(ANCHORED, pairs, k=2.0, eps=0.0, ddof=0), [-1.0, 1.0, level[2], level[2]], tol=1e-12)


def test_anchored_advantages_take_sample_deviations_and_a_small_eps():
    own, whole = 2**0.5, (11 / 3) ** 0.5
    a, level = own / whole, [x / (whole + 1e-4) for x in (-2.5, -0.5, 1.5)]
    first = [-a / (own + 1e-4) + (1 - a) * level[0], a / (own + 1e-4) + (1 - a) * level[1]]
    close(anchored_advantages(ANCHORED, torch.tensor([0, 0, 1, 1])), [*first, level[2], level[2]], tol=1e-12)


def test_anchored_advantages_of_equal_values_are_zero_and_columns_are_apart():
    pairs = torch.tensor([0, 0, 1, 1])
    assert not anchored_advantages(torch.full((4,), 0.3), pairs).any()
    assert anchored_advantages(torch.zeros(0, 2), torch.zeros(0, dtype=torch.long)).shape == (0, 2)
    both = anchored_advantages(torch.stack([ANCHORED, -3 * ANCHORED], 1), pairs)
    close(both[:, 0], anchored_advantages(ANCHORED, pairs), tol=1e-12)
    close(both[:, 1], anchored_advantages(-3 * ANCHORED, pairs), tol=1e-12)


def test_a_sum_of_rewards_is_not_rounded_before_it_is_compared() -> None:
    """One reward is ten thousand for all samples; the other differs by less than float32 can resolve next to it."""
    small = torch.tensor([0.0, 1e-4, 2e-4, 3e-4])
    found = multi_reward_advantages(
        torch.stack([torch.full((4,), 1e4), small], dim=1), torch.zeros(4, dtype=torch.long), torch.ones(2), how="sum"
    )
    torch.testing.assert_close(found, group_advantages(small, torch.zeros(4, dtype=torch.long)), rtol=1e-4, atol=0)


def test_means_of_groups_leave_out_what_is_unknown() -> None:
    """(1 + 3) / 2 in the first group, without the NaN, which stays; 5 alone in the second; columns are apart."""
    values = torch.tensor([[1.0, 0.0], [5.0, 1.0], [3.0, 4.0], [torch.nan, 5.0]])
    found = group_means(values, [0, 1, 0, 0])
    assert found[:3].tolist() == [[2.0, 3.0], [5.0, 1.0], [2.0, 3.0]]
    assert bool(found[3, 0].isnan())
    assert float(found[3, 1]) == 3.0


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("positive", [0.0, 0.0, 0.0, 0.5, 3.0]),
        ("negative", [-2.0, -0.5, 0.0, 0.0, 0.0]),
        ("one", [0.0, 0.0, 0.0, 1.0, 1.0]),
        ("sign", [-1.0, -1.0, 0.0, 1.0, 1.0]),
        ("exponential", [-7.38905609893065, -1.6487212707001282, -1.0, -0.6065306597126334, -0.049787068367863944]),
    ],
)
def test_transforms_by_hand(name, wanted):
    close(TRANSFORMS[name](torch.tensor([-2.0, -0.5, 0.0, 0.5, 3.0])), wanted)


def test_a_recipe_may_name_every_transform():
    choices, _ = typing.get_args(Recipe.model_fields["transform"].annotation)
    assert set(typing.get_args(choices)) == set(TRANSFORMS)
