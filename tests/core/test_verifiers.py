"""Rewards corrected for a verifier that errs: no bias, by hand."""

import pytest
import torch

from flowgrpo.core.verifiers import corrected_rewards, forward_weights

NAN = float("nan")
FP, FN = 0.2, 0.3
VERDICTS = torch.tensor([0.0, 1.0])


def close(got, want, tol=1e-6):
    want = torch.as_tensor(want, dtype=got.dtype)
    torch.testing.assert_close(got, want, atol=tol, rtol=tol, equal_nan=True)


def mean_given_truth(weight):
    """Expected weight of a wrong sample and of a right sample, from the weights of a failed and a passed verdict."""
    return torch.stack([(1 - FP) * weight[0] + FP * weight[1], FN * weight[0] + (1 - FN) * weight[1]])


def test_backward_correction_has_no_bias():
    found = corrected_rewards(VERDICTS, false_positive=FP, false_negative=FN)
    close(found, [-0.4, 1.6])
    close(mean_given_truth(found), [0, 1])
    close(corrected_rewards(VERDICTS, false_positive=0.0, false_negative=0.0), VERDICTS)


def test_forward_correction_is_the_clean_reward_less_one_up_to_a_factor():
    found = forward_weights(VERDICTS, false_negative=FN)
    close(found, [FN - 1, FN])
    close(mean_given_truth(found), [-(1 - FP - FN), 0])


def test_both_give_the_direction_of_the_clean_gradient():
    """Three answers, the first two right, by enumeration of answers and verdicts."""
    logits = torch.tensor([0.3, -0.5, 0.9], dtype=torch.float64)
    p, truth = logits.softmax(0), torch.tensor([1, 1, 0])

    def gradient(weight):  # of each answer
        return p * weight - p * (p * weight).sum()

    clean = gradient(truth.double())
    verdicts = VERDICTS.double()
    backward = mean_given_truth(corrected_rewards(verdicts, false_positive=FP, false_negative=FN))[truth]
    close(gradient(backward), clean)
    forward = mean_given_truth(forward_weights(verdicts, false_negative=FN))[truth]
    close(gradient(forward), (1 - FP - FN) * clean)


def test_nan_stays_a_reward_and_weighs_nothing():
    verdicts = torch.tensor([[NAN, 1.0]])
    close(corrected_rewards(verdicts, false_positive=0.5, false_negative=0.0), [[NAN, 1.0]])
    close(forward_weights(verdicts, false_negative=0.5), [[0, 0.5]])
    assert forward_weights(torch.tensor([True]), false_negative=0.5).dtype == torch.float32
    assert corrected_rewards(torch.tensor([1]), false_positive=0.0, false_negative=0.5).dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: corrected_rewards(VERDICTS, false_positive=0.5, false_negative=0.5), "add up to 1.0"),
        (lambda: corrected_rewards(VERDICTS, false_positive=-0.1, false_negative=0.5), "`false_positive` is -0.1"),
        (lambda: corrected_rewards(VERDICTS, false_positive=0.1, false_negative=1.0), "`false_negative` is 1.0"),
        (lambda: forward_weights(VERDICTS, false_negative=1.0), "`false_negative` is 1.0; use 0 <= rate < 1"),
        (lambda: forward_weights(VERDICTS, false_negative=-0.1), "`false_negative` is -0.1"),
        (lambda: forward_weights(VERDICTS + 0.5, false_negative=0.1), "neither 0 nor 1"),
        (lambda: corrected_rewards(VERDICTS - 1, false_positive=0.0, false_negative=0.1), "neither 0 nor 1"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
