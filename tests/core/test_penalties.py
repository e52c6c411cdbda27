"""Penalties of images and of tokens, by hand, and the recipes that can have them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.core import token_penalties
from flowgrpo.core.penalties import (
    Edges,
    adaptive_kl,
    distil,
    gated_kl,
    kl,
    llds,
    stepwise,
    taught,
    trust_region,
    w2,
)  # fmt: skip

MOVED = torch.tensor([[[1.0, 2.0], [3.0, 0.0]], [[2.0, 2.0], [0.0, 0.0]]])  # mean squares 3.5 and 2


def edges(**changes: Any) -> Edges:
    """Two edges; what the penalties compare with has moved by `MOVED`, by two times and by three times as much."""
    given: dict[str, Any] = {
        "step": 0, "std": 0.5, "shift": MOVED, "log_ratio": torch.tensor([[-0.5], [-0.25]]),
        "advantage": torch.tensor([-1.0, 1.0]), "mask": None,
        "to_reference": lambda: 2 * MOVED, "to_guided": lambda: 3 * MOVED,
    }  # fmt: skip
    return Edges(**given | changes)


def close(got: torch.Tensor, want: list[Any]) -> None:
    torch.testing.assert_close(got, torch.tensor(want))


def test_penalties_of_steps_are_mean_squares_over_twice_the_variance() -> None:
    close(stepwise(edges()), [7.0, 4.0])
    close(kl(edges()), [28.0, 16.0])
    close(distil(edges()), [63.0, 36.0])
    close(w2(edges()), [14.0, 8.0])  # the distance does not depend on the noise


def test_a_teacher_is_compared_by_the_step_or_by_the_velocity() -> None:
    far = edges(to_teacher=lambda: 2 * MOVED, scale=-0.5)
    close(taught(far), [28.0, 16.0])
    close(taught(far, of="velocity"), [56.0, 32.0])  # the velocities differ by -4 times MOVED
    # A step without noise counts as one of standard deviation 1: half the mean square.
    close(taught(edges(std=1.0, to_teacher=lambda: 2 * MOVED)), [7.0, 4.0])
    with pytest.raises(ValueError, match="finished images have no teacher"):
        taught(edges())


def test_only_marked_images_have_the_gated_kl() -> None:
    moved = (2 * MOVED).requires_grad_()
    marked = edges(to_reference=lambda: moved, marks={"suspect": torch.tensor([0.0, 2.0], dtype=torch.float64)})
    found = gated_kl(marked)
    close(found.detach(), [0.0, 32.0])
    found.sum().backward()
    assert moved.grad is not None
    assert not moved.grad[0].any()
    assert moved.grad[1].any()


def test_a_mark_that_nothing_makes_is_refused() -> None:
    with pytest.raises(ValueError, match="reads the mark 'suspect', and no extension marks anything; add the"):
        gated_kl(edges())
    with pytest.raises(ValueError, match="the marks are other; add the extension"):
        gated_kl(edges(marks={"other": torch.ones(2)}))


def test_predictions_of_images_are_compared_by_their_mean_square() -> None:
    close(kl(edges(std=None)), [14.0, 8.0])


def test_within_the_radius_an_image_is_free_and_beyond_it_counts_the_rest() -> None:
    moved = (2 * MOVED).requires_grad_()
    found = trust_region(edges(std=None, to_reference=lambda: moved), radius=10.0)
    close(found.detach(), [4.0, 0.0])
    found.sum().backward()
    assert moved.grad is not None
    close(moved.grad[1], [[0.0, 0.0], [0.0, 0.0]])
    # The mean of four squares has a gradient of 2 / 4 of each number.
    close(moved.grad[0], MOVED[0].tolist())
    close(trust_region(edges(), radius=0.0), [28.0, 16.0])


def test_the_adaptive_kl_is_stronger_for_better_images() -> None:
    """The KL is 28 and 16; with a bound of 2, advantages of -1 and 1 are a quarter and three quarters good."""
    close(adaptive_kl(edges(), bound=2.0, least=0.0), [7.0, 12.0])
    close(adaptive_kl(edges(), bound=2.0, least=0.5), [17.5, 14.0])
    close(adaptive_kl(edges(advantage=torch.tensor([-9.0, 9.0]))), [0.028, 16.0])


def test_a_step_that_became_less_likely_is_penalised_by_its_drop() -> None:
    close(llds(edges()), [0.5, 0.25])
    close(llds(edges(), rows="good"), [0.0, 0.25])
    close(llds(edges(log_ratio=torch.tensor([[-0.5], [0.25]]))), [0.5, 0.0])
    close(llds(edges(mask=torch.tensor([[False], [True]]))), [0.0, 0.25])


def test_penalties_of_tokens() -> None:
    logp, old = torch.tensor([[-1.0, -2.0], [-1.0, -1.0]]), torch.tensor([[-0.5, -1.0], [-0.5, -0.5]])
    mask, adv = torch.ones(2, 2, dtype=torch.bool), torch.tensor([1.0, -1.0])
    close(token_penalties.llds(logp, old, mask, adv), [[0.5, 1.0], [0.5, 0.5]])
    close(token_penalties.llds(logp, old, mask, adv, rows="good"), [[0.5, 1.0], [0.0, 0.0]])
    close(token_penalties.kl(logp, old, logp), [[0.125, 0.5], [0.125, 0.125]])
    close(token_penalties.kl(logp, old, logp, kind="k3+")[0], [math.exp(0.5) - 1.5, math.e - 2])
    doubled = token_penalties.kl(logp, old, logp - math.log(2), kind="k3r")[0]
    close(doubled, [2 * (math.exp(0.5) - 1.5), 2 * (math.e - 2)])
    assert token_penalties.kl(logp, logp - 1, logp - 800, kind="k3r").isfinite().all()


@pytest.mark.parametrize("moved", [0.0, 1.0])
def test_the_kl_with_the_ratio_has_the_exact_gradient_after_the_policy_has_moved(moved: float) -> None:
    """The mean over all five tokens, each as likely as under the policy that sampled, is taken without drawing."""
    g = torch.Generator().manual_seed(3)
    sampled, reference, step = torch.randn(3, 5, generator=g, dtype=torch.float64)
    scores = (sampled + moved * step).requires_grad_()
    logp, old, ref = (one.log_softmax(0) for one in (scores, sampled, reference))
    exact = (logp.exp() * (logp - ref)).sum()
    wanted = torch.autograd.grad(exact, scores, retain_graph=True)[0]
    found, plain = (
        torch.autograd.grad(
            (old.exp() * token_penalties.kl(logp, ref, old, kind=kind)).sum(), scores, retain_graph=True
        )[0]
        for kind in ("k3r", "k2")
    )
    torch.testing.assert_close(found, wanted)
    estimate = (old.exp() * token_penalties.kl(logp, ref, old, kind="k3r")).sum()
    torch.testing.assert_close(estimate, exact)
    # The kinds without the ratio are exact before the policy moves alone.
    assert torch.allclose(plain, wanted) == (moved == 0.0)


def test_a_recipe_has_penalties_of_steps_only_if_it_trains_steps_by_their_densities() -> None:
    load_recipe("mixgrpo", ["penalties=[{name: w2, weight: 0.1}]"])
    with pytest.raises(RecipeError, match="penalty w2 needs steps with noise"):
        load_recipe("diffusion_nft", ["penalties=[{name: w2, weight: 0.1}]"])
    guarded = ["penalties=[{name: llds, weight: 0.1}]", "optimizer.updates=2"]
    load_recipe("mixgrpo", [*guarded, "objective.ratio=gaussian"])
    with pytest.raises(RecipeError, match=r"objective\.ratio guard is not the ratio of its densities"):
        load_recipe("mixgrpo", [*guarded, "objective.ratio=guard"])
