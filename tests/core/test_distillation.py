"""The divergence from a teacher over its likeliest tokens and one bin for the rest: values and gradients by hand."""

import math

import pytest
import torch

from flowgrpo.core.distillation import Direction, coarse_divergence, early_weights

STUDENT = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
TEACHER = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)


def test_over_all_tokens_it_is_the_kl():
    want = 0.25 * math.log(2)  # 1/2 log 2 + 1/4 log 1 - 1/4 log 2
    for direction in ("reverse", "forward"):
        found = coarse_divergence(STUDENT.log(), TEACHER.log(), direction=direction)
        assert float(found) == pytest.approx(want, abs=1e-9)
    far = torch.tensor([0.9, 0.1], dtype=torch.float64)
    near = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert float(coarse_divergence(far.log(), near.log())) == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2))
    want = 0.5 * math.log(5 / 9) + 0.5 * math.log(5)
    assert float(coarse_divergence(far.log(), near.log(), direction="forward")) == pytest.approx(want)


def test_other_tokens_are_one_bin():
    """Of three tokens only the last is told: 0.25 against 0.5, and the rest 0.75 against 0.5."""
    found = coarse_divergence(STUDENT[2:].log(), TEACHER[2:].log())
    assert float(found) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    assert 0 < float(found) < float(coarse_divergence(STUDENT.log(), TEACHER.log()))


def test_the_forward_gradient_is_student_minus_teacher():
    logits = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    target = TEACHER.log().requires_grad_()
    coarse_divergence(logits.log_softmax(0), target, direction="forward").backward()
    torch.testing.assert_close(logits.grad, logits.detach().softmax(0) - TEACHER)
    assert target.grad is None


def test_the_reverse_gradient_by_hand():
    logits = STUDENT.log().requires_grad_()
    coarse_divergence(logits.log_softmax(0), TEACHER.log()).backward()
    lead = (STUDENT / TEACHER).log()
    torch.testing.assert_close(logits.grad, STUDENT * (lead - (STUDENT * lead).sum()))


def test_tokens_without_probability_leave_it_finite():
    target = torch.tensor([0.0, -math.inf])
    student = torch.tensor([0.5, 0.5]).log().requires_grad_()
    forward = coarse_divergence(student, target, direction="forward")
    assert forward.item() == pytest.approx(math.log(2), abs=1e-4)
    forward.backward()
    assert bool(torch.isfinite(student.grad).all())
    with pytest.raises(ValueError, match=r"`log_probs` has shape \(2,\) and `target` \(3,\)"):
        coarse_divergence(student, torch.zeros(3))


def test_jensen_and_shannon_by_hand():
    """A mixture of 0.7 x 0.9 + 0.3 x 0.5 = 0.78 and 0.22."""
    student, teacher = (torch.tensor(p, dtype=torch.float64) for p in ([0.9, 0.1], [0.5, 0.5]))
    found = coarse_divergence(student.log(), teacher.log(), direction="jsd", beta=0.3)
    of_teacher = 0.5 * math.log(0.5 / 0.78) + 0.5 * math.log(0.5 / 0.22)
    of_student = 0.9 * math.log(0.9 / 0.78) + 0.1 * math.log(0.1 / 0.22)
    assert float(found) == pytest.approx(0.3 * of_teacher + 0.7 * of_student)


@pytest.mark.parametrize(("beta", "direction"), [(1e-7, "forward"), (1 - 1e-7, "reverse")])
def test_near_its_ends_it_is_a_kl(beta: float, direction: Direction) -> None:
    def gradient(direction: Direction, beta: float, share: float) -> torch.Tensor:
        logits = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
        found = coarse_divergence(logits.log_softmax(0), TEACHER.log(), direction=direction, beta=beta) / share
        found.backward()
        assert logits.grad is not None
        return torch.cat([logits.grad, found.detach()[None]])

    close = gradient("jsd", beta, min(beta, 1 - beta))
    torch.testing.assert_close(close, gradient(direction, 0.5, 1.0), atol=1e-5, rtol=0.0)


def test_it_is_bounded_where_the_supports_differ():
    """Two distributions without a common token are log 2 apart, and the gradient stays finite."""
    student = torch.tensor([0.0, -math.inf]).requires_grad_()
    found = coarse_divergence(student, torch.tensor([-math.inf, 0.0]), direction="jsd")
    assert found.item() == pytest.approx(math.log(2), abs=1e-4)
    found.backward()
    assert bool(torch.isfinite(student.grad).all())
    with pytest.raises(ValueError, match=r"`beta` is 1; give a number between 0 and 1"):
        coarse_divergence(student, student, direction="jsd", beta=1)


def test_weights_fall_from_the_first_token_to_the_last() -> None:
    """The sizes are 1, 3 and 1, of a sum of 5, and the second row has none."""
    gap = torch.tensor([[1.0, -3.0, 1.0, 9.0], [0.0, 0.0, 0.0, 0.0]], requires_grad=True)
    mask = torch.tensor([[True, True, True, False], [True, True, True, True]])
    found = early_weights(gap, mask, gamma=0.5)
    assert not found.requires_grad
    torch.testing.assert_close(found[0, :3], torch.tensor([1.5, 1.4, 1.1]))
    torch.testing.assert_close(found[1], torch.full((4,), 1.5))
    torch.testing.assert_close(early_weights(gap, mask, gamma=0.0), torch.ones(2, 4))
