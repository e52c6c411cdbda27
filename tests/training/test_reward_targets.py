"""Objective `reward_targets`: late predictions are fitted to images that rewards have moved (DiffusionOPSD)."""

from pathlib import Path

import pytest
import torch

from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.core.nearby_targets import target_loss
from tests.parts.own_parts import same_when_resumed
from tests.training.test_reward_gradient import moved, relative_error, trainer_of, values, words_of

LATE = "sampler.plan.window={name: frozen, start: 2, size: 1}"


@pytest.mark.slow
def test_the_gradient_is_that_of_the_loss_written_out(random_pipeline: Path, tmp_path: Path) -> None:
    """The policy that sampled has other weights than the policy that is trained."""
    trainer = trainer_of(
        random_pipeline, tmp_path, LATE, "objective={radius: 0.2, ascents: 1, old: null}", recipe="diffusion_opsd"
    )
    moved(trainer)
    _, e = trainer.collect(0)
    moved(trainer)
    policy, objective = trainer.task.policy, trainer.objective
    advantages = torch.linspace(-3.0, 3.0, len(e.rollout.parent))
    objective.prepare(e)
    rows, total, count = torch.tensor(float(objective.rows(e, 0, None))), torch.zeros(()), 0
    for transitions, batch in e.batches(0):
        policy.bind(e.plan)
        sigma, x = transitions.coefficients.sigma, transitions.x[batch]
        assert sigma == e.plan.sigmas[2]
        owners = transitions.prompt[batch]
        clean = (x - sigma * transitions.velocity[batch]).requires_grad_()
        prompts = [e.rows[p] for p in owners]
        images = policy.denoiser.decode_with_graph(clean, [row.prompt for row in prompts])
        scored = 2.0 * values(images, [row.text for row in prompts])
        (slope,) = torch.autograd.grad(scored.sum(), clean)
        clean = clean.detach()
        norms = [one.flatten(1).norm(dim=1).view(-1, 1, 1, 1) for one in (clean, slope)]
        rise = 0.2 * norms[0] * slope / norms[1]
        now = x - sigma * policy.velocity_of(e.prompts)(x, transitions.step, owners)
        nodes = transitions.node[transitions.edges_of(batch)]
        total = total + target_loss(now - clean, rise, -rise, advantages[nodes]).sum()
        count += len(owners)
    assert count == int(rows) == 4
    parameters = list(trainer.task.weights.parameters())
    wanted = torch.autograd.grad(total / rows, parameters)
    for batch in list(objective.batches(e, 0, None)):
        objective.backward(e, batch, advantages, None, rows)
    assert relative_error([one.grad for one in parameters], wanted) < 1e-3


@pytest.mark.slow
def test_a_resumed_run_equals_an_unbroken_one(random_pipeline: Path, tmp_path: Path) -> None:
    words = words_of(random_pipeline, tmp_path, LATE, "run={iterations: 2, checkpoint_every: 1}")
    same_when_resumed("diffusion_opsd", words, tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["optimizer.epochs=2"],
            r"makes its targets anew in each pass .* optimizer\.epochs is 2; use optimizer\.epochs 1",
        ),
        (["sampler.plan.window=null"], "objective reward_targets trains steps, and sampler.plan ode trains none here"),
        (["sampler.plan=window"], "differentiates steps without noise, and sampler.plan window has steps with noise"),
        (["combine=worst"], "takes the gradient of the weighted sum of the rewards as they are given"),
        (["objective.radius=1.5"], "radius"),
    ],
)
def test_what_does_not_fit_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load_recipe("diffusion_opsd", words)
