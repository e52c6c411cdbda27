"""The memory of a prompt's rewards: by hand, and through a checkpoint."""

import io
import math

import pytest
import torch

from flowgrpo.core.advantages import group_advantages
from flowgrpo.core.trackers import CumulativeStandardiser, PromptTable, ValueTracker, smoothed_advantages

NAN = float("nan")


def close(got, want, tol=1e-6):
    torch.testing.assert_close(got, torch.as_tensor(want, dtype=got.dtype), atol=tol, rtol=tol)


def reloaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_table_keeps_rows_by_id():
    table = PromptTable([0.5, -1.0])
    close(table.read(torch.tensor([3, 3])), [[0.5, -1], [0.5, -1]])
    table.write(torch.tensor([7, -2]), torch.tensor([[1.0, 2], [3, 4]], dtype=torch.float64))
    table.write(torch.tensor([5, 7]), torch.tensor([[5.0, 6], [7, 8]], dtype=torch.float64))
    ids = torch.tensor([9, 7, 5, -2, -9, 6])
    close(table.read(ids), [[0.5, -1], [7, 8], [5, 6], [3, 4], [0.5, -1], [0.5, -1]])
    close(table.read(torch.tensor([-1])), [[0.5, -1]])
    other = PromptTable([0.5, -1.0])
    other.load_state_dict(reloaded(table.state_dict()))
    close(other.read(ids), table.read(ids))
    other.load_state_dict(reloaded(PromptTable([0.5, -1.0]).state_dict()))
    close(other.read(ids), [[0.5, -1]] * 6)
    with pytest.raises(ValueError, match=r"this tracker keeps 1 numbers per prompt; load the state of the same kind"):
        PromptTable([0.0]).load_state_dict(table.state_dict())


def test_smoothing_takes_the_smaller_blend_by_hand():
    new, total = torch.tensor([-1.0, 1.0, 0.0]), torch.tensor([-2.0, 0.5, 3.0])
    visits = torch.tensor([4.0, 4.0, 3.0])
    # (3 new + total) / 4 and (new + 3 total) / 4: -5/4 against -7/4; 7/8 against 5/8; 1 against 2.
    close(smoothed_advantages(new, total, visits), [-1.25, 0.625, 1.0])
    close(smoothed_advantages(new, total, torch.ones(3)), [-1, 0.5, 0])


def test_cumulative_standardisation_by_hand():
    standardiser = CumulativeStandardiser(ddof=0, eps=0.0)
    close(standardiser.advantages(torch.tensor([0.0, 1]), [3, 3]), [-1, 1])
    # All right now; among 0 1 1 1 the mean is 3/4 and the variance 3/16.
    close(standardiser.advantages(torch.tensor([1.0, 1]), [3, 3]), [0.25 / (3 / 16) ** 0.5 / 2] * 2)
    # Among 0 1 1 1 0 1: mean 2/3, variance 2/9.
    total = torch.tensor([-2 / 3, 1 / 3]) / (2 / 9) ** 0.5
    new = torch.tensor([-1.0, 1])
    want = [(2 * new + total)[0] / 3, (new + 2 * total)[1] / 3]
    close(standardiser.advantages(torch.tensor([0.0, 1]), [3, 3]), want)


def test_a_single_sample_is_remembered_by_hand():
    # Among 1 3 5 the mean is 3 and the sample deviation 2; among 3 5 they are 4 and 2^0.5.
    standardiser = CumulativeStandardiser(eps=0.0)
    close(standardiser.advantages(torch.tensor([1.0]), [3]), [0])
    close(standardiser.advantages(torch.tensor([3.0, 5.0]), [3, 3]), [-(0.5**0.5) / 2, (0.5**0.5 + 1) / 2])


@pytest.mark.parametrize("ddof", [0, 1])
def test_statistics_are_those_of_all_samples_so_far(ddof):
    g = torch.Generator().manual_seed(0)
    standardiser, seen = CumulativeStandardiser(ddof=ddof, eps=0.1), {}
    for visit in range(1, 5):
        rewards = 1e4 + torch.randn(9, generator=g, dtype=torch.float64)
        rewards[2] = NAN
        prompts = torch.tensor([4, 4, 4, 4, 11, 11, 11, 11, 20 + visit])
        found = standardiser.advantages(rewards, prompts)
        for i, prompt in enumerate(prompts.tolist()):
            now = rewards[(prompts == prompt) & ~rewards.isnan()]
            everything = torch.cat([*seen.get(prompt, []), now])
            if i == 2 or len(everything) == 1:
                assert found[i] == 0
                continue
            new, total = (
                (rewards[i] - s.mean()) / (s.std(correction=ddof) + 0.1) if len(s) > 1 else torch.zeros(())
                for s in (now, everything)
            )
            visits = torch.tensor(float(visit))
            close(found[i], smoothed_advantages(new.double(), total.double(), visits), 1e-6)
        for prompt in (4, 11):
            seen.setdefault(prompt, []).append(rewards[(prompts == prompt) & ~rewards.isnan()])


def test_the_first_visit_is_grpo_and_one_without_rewards_is_none():
    g = torch.Generator().manual_seed(1)
    rewards, prompts = torch.rand(12, generator=g), torch.randint(0, 3, (12,), generator=g)
    close(CumulativeStandardiser().advantages(rewards, prompts), group_advantages(rewards, prompts), 1e-5)
    standardiser, other = CumulativeStandardiser(), CumulativeStandardiser()
    for tracked in (standardiser, other):
        tracked.advantages(rewards, prompts)
    assert (other.advantages(torch.full((3,), NAN), [0, 1, 2]) == 0).all()
    close(standardiser.advantages(rewards.flip(0), prompts), other.advantages(rewards.flip(0), prompts))
    first = CumulativeStandardiser()
    first.advantages(torch.full((12,), NAN), prompts)
    close(first.advantages(rewards, prompts), group_advantages(rewards, prompts), 1e-5)


def test_rewards_that_never_differ_get_exactly_zero():
    standardiser = CumulativeStandardiser(eps=0.0)
    for size in (3, 7, 1, 5):
        assert (standardiser.advantages(torch.full((size,), 0.1), [0] * size) == 0).all()


def test_a_standardiser_is_saved_and_resumes():
    standardiser, other = CumulativeStandardiser(), CumulativeStandardiser()
    rewards, prompts = torch.tensor([0.0, 1, 0.5, 0.7]), torch.tensor([8, 8, 2, 2])
    standardiser.advantages(rewards, prompts)
    other.load_state_dict(reloaded(standardiser.state_dict()))
    assert torch.equal(other.advantages(rewards * 2, prompts), standardiser.advantages(rewards * 2, prompts))


def rate(a, b):
    return a / (a + b)


def test_a_running_success_rate_by_hand():
    tracker = ValueTracker(half_life=0.1)  # 8 samples' worth to begin with: 4 and 4
    close(tracker.values([1, 2]), [0.5, 0.5])
    tracker.update(torch.tensor([1.0, 0.0]), [1, 2])
    close(tracker.values([1, 2]), [rate(0.96 * 4 + 1, 0.96 * 4), rate(0.96 * 4, 0.96 * 4 + 1)])
    tracker = ValueTracker(prior=0.25, half_life=0.1, low=0.25, high=0.9)  # 1/3 and 1
    tracker.update(torch.tensor([1.0]), [1], torch.tensor([0.1]))
    close(tracker.values([1]), [rate(0.5 / 3 + 1, 0.5)])
    tracker.update(torch.tensor([0.5]), [1], torch.tensor([100.0]))
    close(tracker.values([1]), [rate(0.25 * (0.5 / 3 + 1) + 0.5, 0.25 * 0.5 + 0.5)])
    tracker.update(torch.tensor([0.0]), [1], torch.tensor([-3.0]))
    a, b = 0.25 * (0.5 / 3 + 1) + 0.5, 0.25 * 0.5 + 0.5
    close(tracker.values([1]), [rate(0.9 * a, 0.9 * b + 1)])


def test_defaults_of_a_tracker_by_hand():
    tracker = ValueTracker()
    found = tracker.advantages(torch.tensor([1.0, 0.0, 0.5]), [1, 2, 3])
    close(found, [0.5 / (0.5 + 1e-4), -0.5 / (0.5 + 1e-4), 0])
    # A divergence of log2(1 / 0.9) half-lives of 0.06 leaves nine tenths.
    tracker = ValueTracker()
    tracker.update(torch.tensor([1.0]), [1], torch.tensor([0.06 * math.log2(1 / 0.9)]))
    close(tracker.values([1]), [rate(0.9 * 4 + 1, 0.9 * 4)])


def test_several_samples_of_a_prompt_decay_it_once():
    tracker = ValueTracker(half_life=1.0, low=0.1, high=0.9)
    rewards = torch.tensor([1.0, NAN, 0.0, 1.0])
    tracker.update(rewards, [5, 5, 5, 6], torch.tensor([1.0, NAN, 2.0, 1.0]))
    start = 0.5 / 0.9
    decay = 2**-1.5  # of their mean divergence
    close(tracker.values([5, 6]), [0.5, rate(start / 2 + 1, start / 2)])
    rows = tracker.state_dict()["rows"]
    close(rows[0], [decay * start + 1, decay * start + 1])
    tracker.update(torch.tensor([NAN]), [5], torch.tensor([9.0]))
    close(tracker.state_dict()["rows"][0], rows[0])


def test_the_baseline_is_from_before_the_batch_and_the_scale_from_all_of_it():
    tracker = ValueTracker()
    tracker.start([1, 2], torch.tensor([0.8, 0.4]))
    before = tracker.state_dict()
    rewards, prompts = torch.tensor([1.0, 0.0, NAN]), torch.tensor([1, 2, 3])
    close(tracker.advantages(rewards, prompts, ddof=0, eps=0.0), [1, -1, 0], 1e-5)  # 0.2 and -0.4 about -0.1
    close(tracker.values([1, 2, 3]), [rate(0.96 * 6.4 + 1, 0.96 * 1.6), rate(0.96 * 3.2, 0.96 * 4.8 + 1), 0.5])
    tracker.load_state_dict(before)
    close(tracker.advantages(rewards, prompts, ddof=0, eps=0.3), [0.5, -0.5, 0], 1e-5)
    tracker.load_state_dict(before)
    close(tracker.advantages(rewards, prompts, ddof=1, eps=0.0)[0], 0.3 / (0.18**0.5), 1e-5)
    # No groups are needed: a single sample of a prompt learns.
    found = tracker.advantages(torch.tensor([1.0, 1, 0]), [7, 8, 9])
    assert found[0] == found[1] > 0 > found[2]
    assert (ValueTracker().advantages(torch.ones(3), [1, 2, 3]) == 0).all()


def test_a_tracker_follows_a_permutation_and_forgets_towards_the_present():
    g = torch.Generator().manual_seed(0)
    rewards, prompts = torch.rand(10, generator=g), torch.randint(0, 4, (10,), generator=g)
    order = torch.randperm(10, generator=g)
    one, other = ValueTracker(), ValueTracker()
    divergence = 0.1 * torch.rand(10, generator=g)
    found = one.advantages(rewards, prompts, divergence)
    close(other.advantages(rewards[order], prompts[order], divergence[order]), found[order])
    close(one.values(range(4)), other.values(range(4)))
    for _ in range(300):
        one.update(torch.ones(1), [0], torch.zeros(1))
    # The longest memory is 1 / (1 - 0.96) = 25 samples.
    assert float(one.values([0])) > 0.999
    close(one.state_dict()["rows"][0].sum(), 25.0, 1e-3)


def test_prompts_of_uncertain_outcome_are_drawn_more_often():
    tracker = ValueTracker()
    tracker.start([1, 2, 3], torch.tensor([0.5, 0.9, 1.0]))
    raw = torch.tensor([0.55, 0.35, 0.05])
    close(tracker.sampling_weights([1, 2, 3]), raw / raw.sum(), 1e-5)
    raw = torch.tensor([0.6, 0.4, 0.1])
    close(tracker.sampling_weights([1, 2, 3], floor=0.1), raw / raw.sum(), 1e-5)


def test_a_tracker_is_saved_and_resumes():
    tracker, other = ValueTracker(), ValueTracker()
    tracker.update(torch.tensor([1.0, 0.3]), [4, 1])
    other.load_state_dict(reloaded(tracker.state_dict()))
    assert torch.equal(
        other.advantages(torch.tensor([1.0, 0.0]), [1, 9]), tracker.advantages(torch.tensor([1.0, 0.0]), [1, 9])
    )
    assert torch.equal(other.values([1, 4, 9]), tracker.values([1, 4, 9]))


def test_advantages_of_a_tracker_carry_no_gradient():
    found = ValueTracker().advantages(torch.tensor([1.0, 0.0], requires_grad=True), [0, 1])
    assert not found.requires_grad
    assert found.dtype == torch.float32
    assert ValueTracker().advantages(torch.zeros(2, dtype=torch.float64), [0, 1]).dtype == torch.float64


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: CumulativeStandardiser().advantages(torch.zeros(2), [0]), "`rewards` has shape"),
        (lambda: CumulativeStandardiser().advantages(torch.zeros(2, 1), [0, 0]), r"`rewards` has shape \(2, 1\)"),
        (lambda: CumulativeStandardiser().advantages(torch.tensor([math.inf]), [0]), "an infinite value"),
        (lambda: ValueTracker(prior=1.0), "`prior` is 1.0; use a success rate between 0 and 1"),
        (lambda: ValueTracker(half_life=0.0), "`half_life` is 0.0; use a divergence above 0"),
        (lambda: ValueTracker(high=1.0), "`high` is 1.0; use 0 <= low <= high < 1"),
        (lambda: ValueTracker(low=0.9, high=0.8), "`low` is 0.9 and `high` is 0.8"),
        (lambda: ValueTracker(low=-0.1), "`low` is -0.1"),
        (lambda: ValueTracker().start([1], torch.tensor([1.5])), "a rate outside 0..1"),
        (lambda: ValueTracker().start([1], torch.tensor([NAN])), "a rate outside 0..1"),
        (lambda: ValueTracker().start([1, 1], torch.zeros(2)), "`prompts` holds an id twice"),
        (lambda: ValueTracker().start([1, 2], torch.zeros(1)), "`values` has shape"),
        (lambda: ValueTracker().update(torch.tensor([1.5]), [0]), "a value outside 0..1; scale rewards"),
        (lambda: ValueTracker().update(torch.tensor([-0.5]), [0]), "a value outside 0..1"),
        (lambda: ValueTracker().update(torch.ones(1), [0], torch.ones(2)), "`divergence` has shape"),
        (lambda: ValueTracker().update(torch.ones(1), [0], torch.tensor([NAN])), "`divergence` is NaN where"),
        (lambda: ValueTracker().advantages(torch.ones(2), [0]), "`rewards` has shape"),
        (lambda: ValueTracker().sampling_weights([0], floor=0.0), "`floor` is 0.0; use a number above 0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
