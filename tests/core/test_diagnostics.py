"""Statistics of a step, by hand, and as sums over batches."""

import pytest
import torch

from flowgrpo.core.advantages import group_advantages
from flowgrpo.core.diagnostics import degenerate_groups, rank_correlations, step_statistics, summarise
from flowgrpo.core.objectives import held_columns, policy_loss

NAN = float("nan")


def divide(pair: torch.Tensor) -> torch.Tensor:
    """A metric [sum, count] as a mean."""
    return pair[0] / pair[1]


def test_statistics_by_hand():
    log_ratio = torch.tensor([0.5, 0.1, -0.5, 0.3, -0.5, 9.0, NAN])
    step = torch.tensor([0, 0, 0, 2, 2, 2, 1])
    adv = torch.tensor([1.0, 1.0, 2.0, -1.0, -3.0, 0.0, 1.0])
    mask = ~log_ratio.isnan()
    held = torch.tensor([True, False, False, False, True, True, True])
    stats = step_statistics(log_ratio, step, adv, mask, held, 3)
    want = torch.zeros(3, 2, 5)
    # e^0.5 = 1.6487213, e^0.1 = 1.1051709, e^-0.5 = 0.6065307, e^0.3 = 1.3498588.
    want[0, 0] = torch.tensor([3, 0.1, 0.51, 1, 3.3604229 - 3 - 0.1])
    want[2, 1] = torch.tensor([2, -0.2, 0.34, 1, 1.9563895 - 2 + 0.2])
    torch.testing.assert_close(stats, want.to(stats), atol=1e-7, rtol=0)
    summary = summarise(stats)
    torch.testing.assert_close(summary["log_ratio_mean_pos"][0].item(), 0.1 / 3)
    torch.testing.assert_close(summary["log_ratio_var_neg"][2].item(), 0.16, atol=1e-7, rtol=0)
    assert summary["clip_share_neg"][2] == 0.5
    torch.testing.assert_close(summary["ratio_mean"][0].item(), 1.1201410, atol=1e-7, rtol=0)
    torch.testing.assert_close(summary["ratio_mean_neg"][2].item(), 0.9781947, atol=1e-7, rtol=0)
    torch.testing.assert_close(summary["approx_kl"][2].item(), 0.0781947, atol=1e-7, rtol=0)
    assert summary["approx_kl_pos"].isnan().tolist() == [False, True, True]
    assert summary["count"].tolist() == [3, 0, 2]
    assert summary["clip_share"].isnan().tolist() == [False, True, False]


def test_statistics_add_over_micro_batches_and_agree_with_the_loss():
    g = torch.Generator().manual_seed(0)
    log_ratio = 0.3 * torch.randn(8, 4, generator=g)
    adv, steps = torch.randn(8, generator=g), torch.arange(4)
    held = held_columns(log_ratio, torch.zeros(8, 4), adv)
    assert 0 < held.sum() < 32
    whole = step_statistics(log_ratio, steps, adv[:, None], None, held, 4)
    parts = [
        step_statistics(log_ratio[rows], steps, adv[rows, None], None, held[rows], 4)
        for rows in (slice(0, 3), slice(3, 8))
    ]
    torch.testing.assert_close(sum(parts), whole)
    summary = summarise(whole)
    torch.testing.assert_close(summary["log_ratio_mean"].float(), log_ratio.mean(0))
    torch.testing.assert_close(summary["log_ratio_var"].float(), log_ratio.var(0, correction=0))
    torch.testing.assert_close(summary["ratio_mean"].float(), log_ratio.exp().mean(0))
    _, metrics = policy_loss(log_ratio, torch.zeros(8, 4), adv)
    torch.testing.assert_close((whole[..., 4].sum() / whole[..., 0].sum()).float(), divide(metrics["approx_kl"]))
    for i, name in enumerate(("clip_share_pos", "clip_share_neg")):
        torch.testing.assert_close(whole[:, i, [3, 0]].sum(0).float(), metrics[name])


def test_statistics_show_the_left_shift_that_guard_removes():
    """Mean-reduced Gaussian log-ratios average -mean(dmu^2) / (2 s^2) < 0; RatioNorm's average is 0."""
    g = torch.Generator().manual_seed(1)
    noise = torch.randn(64, 3, 256, generator=g, dtype=torch.float64)
    std = torch.tensor([1.0, 0.3, 0.1], dtype=torch.float64)
    shift = 0.05
    plain = (noise * shift / std[:, None]).mean(-1) - shift**2 / (2 * std**2)
    guard = (noise * shift).mean(-1)
    signs = torch.ones(64, 1).cumsum(0) % 2 - 0.5
    before, after = (summarise(step_statistics(x, torch.arange(3), signs, None, None, 3)) for x in (plain, guard))
    torch.testing.assert_close(before["log_ratio_mean"], -(shift**2) / (2 * std**2), rtol=0.1, atol=2e-3)
    assert before["log_ratio_var"][2] > 50 * before["log_ratio_var"][0]
    assert after["log_ratio_mean"].abs().max() < 1e-3
    assert after["log_ratio_var"].max() < 1.5 * after["log_ratio_var"].min()


def test_a_ratio_that_did_not_move_has_no_divergence_and_a_small_one_half_its_square():
    """r - 1 - log r is (log r)^2 / 2 to second order, also where a difference of r and 1 has lost it."""
    log_ratio = torch.tensor([0.0, 0.0, 1e-7, -1e-7])
    summary = summarise(step_statistics(log_ratio, torch.tensor([0, 0, 1, 1]), torch.ones(4), None, None, 2))
    assert (summary["ratio_mean"][0], summary["approx_kl"][0]) == (1, 0)
    torch.testing.assert_close(summary["approx_kl"][1].item(), 5e-15, rtol=1e-4, atol=0)


def test_rounding_makes_no_variance_negative():
    stats = torch.zeros(1, 2, 5)
    stats[0, 0] = torch.tensor([1.0, 1.0, 1.0 - 1e-6, 0.0, 0.0])
    assert summarise(stats)["log_ratio_var"].tolist() == [0.0]


def test_statistics_refuse_shapes_and_steps_that_do_not_fit():
    with pytest.raises(ValueError, match=r"outside 0\.\.1"):
        step_statistics(torch.zeros(2), torch.tensor([0, 2]), torch.ones(2), None, None, 2)
    with pytest.raises(ValueError, match="`adv` has shape"):
        step_statistics(torch.zeros(2, 3), torch.arange(3), torch.ones(2), None, None, 3)
    with pytest.raises(ValueError, match="`held` has shape"):
        step_statistics(torch.zeros(2), torch.tensor([0, 1]), torch.ones(2), None, torch.ones(3), 2)


def test_degenerate_groups_are_those_that_get_no_advantage():
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.5, 0.7, 0.2, NAN, 0.3, NAN, NAN, 0.9])
    groups = torch.tensor([5, 5, 5, 2, 2, 8, 8, 8, 1, 4, 4])
    assert degenerate_groups(rewards, groups).tolist() == [3, 5]
    adv = group_advantages(rewards, groups)
    silent = [int(g) for g in groups.unique() if (adv[groups == g] == 0).all()]
    assert silent == [1, 4, 5]


def test_a_group_with_one_informative_reward_is_not_degenerate():
    rewards = torch.tensor([[1.0, 0.0], [1.0, 1.0], [2.0, 3.0], [2.0, 3.0]])
    assert degenerate_groups(rewards, torch.tensor([0, 0, 1, 1])).tolist() == [1, 2]


def test_one_sample_is_a_degenerate_group_and_none_is_no_group():
    assert degenerate_groups(torch.tensor([0.5]), [3]).tolist() == [1, 1]
    assert degenerate_groups(torch.zeros(0), torch.zeros(0)).tolist() == [0, 0]


def test_rank_correlations_by_hand() -> None:
    """1 - 6 Σd² / (n (n² - 1)) without equal values: the differences of ranks are 1, 1, 0, 0 in the second group."""
    first = torch.tensor([3.0, 10.0, 1.0, 1.0, 2.0, 3.0, 4.0, 7.0])
    second = torch.tensor([0.3, 0.4, 0.0, 20.0, 10.0, 30.0, 40.0, 1.0])
    found = rank_correlations(first, second, [0, 0, 0, 5, 5, 5, 5, 9])
    assert found[:2].tolist() == pytest.approx([1.0, 1.0 - 6 * 2 / (4 * 15)])
    assert found[2].isnan()
    assert rank_correlations(first, -second, [0, 0, 0, 5, 5, 5, 5, 9])[0] == pytest.approx(-1.0)


def test_rank_correlations_give_equal_values_their_mean_rank_and_leave_nan_out() -> None:
    """Ranks 1.5, 1.5, 3 and 1, 2, 3: the covariance is 1.5 of √(1.5 · 2)."""
    first = torch.tensor([1.0, 1.0, 2.0, torch.nan, 8.0, 5.0, 5.0])
    second = torch.tensor([1.0, 2.0, 3.0, 0.0, torch.nan, 1.0, 2.0])
    found = rank_correlations(first, second, [0, 0, 0, 0, 0, 1, 1])
    assert float(found[0]) == pytest.approx(1.5 / 3.0**0.5)
    assert found[1].isnan()
