"""Step rewards against numbers worked out by hand."""

import math

import pytest
import torch

from flowgrpo.core.process import future_rewards, turning_point_rewards


def test_turning_points_are_where_a_step_turns_to_the_way_of_the_whole():
    """R: 1, 2, 1, 4. D = 3; d = 1, -1, 3. Step 1 turns (it begins that way), step 2 does not, step 3 does."""
    rewards = torch.tensor([[1.0, 2.0, 1.0, 4.0]])
    assert turning_point_rewards(rewards).tolist() == [[1 + 3, -1, 3 + 3]]
    assert turning_point_rewards(rewards, main="total").tolist() == [[3 + 1, 3, 3 + 3]]


def test_a_turning_point_may_have_what_is_left_in_place_of_its_gain():
    """R: 1, 2, 1, 4: step 1 rises, and the rest rises by 2, so it gets 4 - 1. The last step gets its own gain.

    R: 0, 5, 3: step 1 turns the way of the whole, but the rest falls, so it keeps its own gain.
    """
    assert turning_point_rewards(torch.tensor([[1.0, 2.0, 1.0, 4.0]]), main="rest").tolist() == [[3, -1, 3]]
    assert turning_point_rewards(torch.tensor([[0.0, 5.0, 3.0]]), main="rest").tolist() == [[5, -2]]


def test_the_gain_of_a_step_may_count_alone():
    rewards = torch.tensor([[1.0, 2.0, 1.0, 4.0], [0.0, 5.0, math.nan, 3.0]])
    found = turning_point_rewards(rewards, main="gain")
    assert found[0].tolist() == [1, -1, 3]
    assert found[1, 0] == 5
    assert found[1, 1:].isnan().all()


def test_a_falling_trajectory_turns_downwards():
    """R: 3, 4, 2, 1. D = -2; d = 1, -2, -1. Only step 2 turns: step 3 goes the same way as the one before it."""
    rewards = torch.tensor([[3.0, 4.0, 2.0, 1.0]])
    assert turning_point_rewards(rewards).tolist() == [[1, -2 - 2, -1]]


def test_a_trajectory_that_ends_where_it_began_has_no_turning_point():
    rewards = torch.tensor([[1.0, 3.0, 1.0]])
    assert turning_point_rewards(rewards).tolist() == [[2, -2]]
    assert turning_point_rewards(rewards, main="total").tolist() == [[0, 0]]


def test_one_step_is_a_turning_point_and_one_after_a_standstill_is_none():
    assert turning_point_rewards(torch.tensor([[1.0, 3.0]])).tolist() == [[2 + 2]]
    assert turning_point_rewards(torch.tensor([[1.0, 1.0, 2.0]])).tolist() == [[0, 1]]


def test_rewards_do_not_depend_on_the_other_trajectories():
    torch.manual_seed(0)
    rewards = torch.rand(7, 5)
    whole = turning_point_rewards(rewards)
    assert all(torch.equal(whole[k : k + 1], turning_point_rewards(rewards[k : k + 1])) for k in range(7))
    # A common offset of a trajectory changes no gain.
    torch.testing.assert_close(turning_point_rewards(rewards + 3.0), whole)


def test_a_missing_state_reaches_the_steps_beside_it_alone():
    found = turning_point_rewards(torch.tensor([[0.0, math.nan, 1.0, 3.0]]))
    assert found.isnan().tolist() == [[True, True, False]]


def test_future_rewards_are_discounted_means_of_what_follows():
    """Q_2 = 4; Q_1 = (2 + 4/2) / 1.5; Q_0 = (1 + 2/2 + 4/4) / 1.75. The first state's own reward counts nowhere."""
    found = future_rewards(torch.tensor([[9.0, 1.0, 2.0, 4.0]]), gamma=0.5)
    torch.testing.assert_close(found, torch.tensor([[3 / 1.75, 4 / 1.5, 4.0]]))


def test_the_ends_of_the_discount():
    rewards = torch.tensor([[9.0, 1.0, 2.0, 6.0]])
    assert future_rewards(rewards, gamma=0.0).tolist() == [[1, 2, 6]]
    assert future_rewards(rewards, gamma=1.0).tolist() == [[3, 4, 6]]
    torch.testing.assert_close(future_rewards(rewards)[:, 1:], torch.tensor([[(2 + 0.9 * 6) / 1.9, 6.0]]))


def test_equal_rewards_have_that_value_at_every_step():
    torch.testing.assert_close(future_rewards(torch.full((2, 6), 0.7), gamma=0.3), torch.full((2, 5), 0.7))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: turning_point_rewards(torch.zeros(3)), r"has shape \(3,\); give \(B, T \+ 1\)"),
        (lambda: turning_point_rewards(torch.zeros(3, 1)), r"has shape \(3, 1\)"),
        (
            lambda: turning_point_rewards(torch.zeros(1, 2), main="both"),
            "`main` is 'both'; use one of step, total, rest",
        ),
        (lambda: future_rewards(torch.zeros(1, 2), gamma=1.5), "`gamma` is 1.5; use a discount from 0 to 1"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
