"""Objective `directed`: every state of a trajectory is pulled along the differences of its group's images."""

import math
from pathlib import Path

import pytest
import torch

from flowgrpo.bench.measures import Silent
from flowgrpo.configs.load import RecipeError, load_recipe
from flowgrpo.samplers.kernels import cps
from flowgrpo.training.folder.run_folder import RunFolder
from flowgrpo.training.session import Session
from flowgrpo.training.trainer import Trainer
from tests.parts.own_parts import same_when_resumed

SMALL = (
    "rollout={prompts: 2, group: 2, batch: 4}", "sampler.steps=4", "rewards=[{name: jpeg_compressibility}]",
    "data.heldout=null", "evaluate.rewards=null",
)  # fmt: skip
QUIET = ("sampler.plan={name: ode, window: all, spread: 0.3}", "sampler.kernel=flow_sde")


def words_of(model: Path, *more: str) -> list[str]:
    return [f"model.path={model}", *SMALL, *more]


def trainer_of(model: Path, folder: Path, *more: str) -> Trainer:
    return Session(load_recipe("fdfo", words_of(model, *more)), RunFolder.create(folder, "")).trainer(Silent())


@pytest.mark.parametrize("gamma", [0.0025, 0.03, 0.5])
def test_kernel_cps_is_a_step_beyond_the_next_level_and_noise_back_to_it(gamma: float) -> None:
    """The released sampler of FDFO steps to r < s, shrinks the state and adds noise, so that its level is s."""
    sigmas, eta = (0.9, 0.4, 0.0), 2.0 / math.pi * math.acos(1.0 / (1.0 + gamma))
    s = sigmas[1]
    r = s / (1.0 + gamma * (1.0 - s))
    shrunk = 1.0 / (1.0 + gamma * r)
    std, kappa = cps(sigmas, 0, eta=eta)
    # From the level t, x + (r - t) v is (1 - r) x0 + r x1, for the clean image x0 and the noise x1 that v predicts.
    assert (1.0 - s, kappa) == pytest.approx((shrunk * (1.0 - r), shrunk * r))
    assert std == pytest.approx(shrunk * r * math.sqrt((1.0 + gamma) ** 2 - 1.0))


def test_the_published_noise_is_the_released_one() -> None:
    eta = load_recipe("fdfo@published").sampler.kernel["eta"]
    assert eta == pytest.approx(2 / math.pi * math.acos(1 / 1.0025), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [(), QUIET])
def test_the_gradient_is_that_of_the_published_loss_written_out(plan, random_pipeline, tmp_path) -> None:
    """The loss of a pair: v is compared with v_old - d, at each state of both trajectories."""
    trainer = trainer_of(random_pipeline, tmp_path / "run", *plan, "optimizer.updates=1")
    _, e = trainer.collect(0)
    weights, policy = trainer.task.weights, trainer.task.policy
    with torch.no_grad():
        for parameter in weights.parameters():
            parameter.add_(0.02)
        weights.write()
    rewards = torch.tensor([0.7, 0.2, 0.1, 0.4])
    half = torch.tensor([0.25, -0.25, -0.15, 0.15])
    x = e.rollout.x.double()
    d = torch.stack([x[0] - x[1], x[1] - x[0], x[2] - x[3], x[3] - x[2]]) / 2
    d = d / (d.square().mean((1, 2, 3), keepdim=True) + 1e-6)
    losses = []
    for t in e.rollout.transitions:
        policy.bind(e.plan)
        new = policy.velocity_of(e.prompts)(t.x, t.step, t.prompt)
        for edge, state in enumerate(t.state.tolist()):
            node = int(t.node[edge])
            while (below := (e.rollout.parent == node).nonzero()).numel():
                node = int(below)
            image = e.rollout.leaf.tolist().index(node)
            target = t.velocity[state].double() - d[image]
            closer = d[image].square().mean() - (new[state].double() - target).square().mean()
            r, a = closer.exp(), half[image]
            losses.append(-a * r + a.abs() / (2 * 0.03) * (r - 1.0) ** 2)
    wanted = torch.autograd.grad(torch.stack(losses).mean(), list(weights.parameters()))

    trainer.objective.prepare(e)
    advantages = e.node_advantages(rewards - torch.tensor([0.45, 0.45, 0.25, 0.25]))
    rows = torch.tensor(float(trainer.objective.rows(e, 0, None)))
    assert rows == len(losses) == 2 * (4 - 1) * 2
    for batch in trainer.objective.batches(e, 0, None):
        outcome = trainer.objective.backward(e, batch, advantages, None, rows)
        assert outcome.error > 0
    found = [parameter.grad for parameter in weights.parameters()]
    error = torch.cat([(one - other).flatten() for one, other in zip(found, wanted)]).norm()
    assert float(error / torch.cat([one.flatten() for one in wanted]).norm()) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("plan", [(), QUIET])
def test_the_first_ratio_is_one_and_later_ratios_are_not(plan, random_pipeline, tmp_path) -> None:
    trainer = trainer_of(random_pipeline, tmp_path / "run", *plan, "optimizer.updates=2", "optimizer.epochs=2")
    found = trainer.iterate(0)
    assert found["ratio/first_error"] == 0.0
    assert found["log_ratio_sq"] > 0.0


@pytest.mark.slow
def test_a_directed_run_that_is_resumed_goes_on_as_if_it_had_not_stopped(random_pipeline, tmp_path) -> None:
    words = words_of(random_pipeline, "run.iterations=2", "run.checkpoint_every=1", "optimizer.updates=2")
    same_when_resumed("fdfo", [*words, "optimizer.cut=edges"], tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sampler.plan={name: ode}"], "objective directed trains steps, and sampler.plan ode trains none here; set"),
        (["sampler.plan={name: given}"], "objective directed trains steps, and sampler.plan given trains none here"),
        (
            ["sampler.plan={name: branch, splits: [1]}"],
            "with sampler.plan branch a state may become several images; use plan window without probe, or plan ode",
        ),
        (["sampler.plan.probe=1"], "with sampler.plan window a state may become several images"),
        (
            ["objective.surrogate={name: clip_nats, nats: 0.5}"],
            "surrogate clip_nats bounds a ratio of densities in nats, and the ratio of objective directed says how far",
        ),
        (["penalties=[{name: llds, weight: 0.1}]", "optimizer.updates=2"], "objective directed has no ratio of dens"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("fdfo", words)
    assert said in str(caught.value)
