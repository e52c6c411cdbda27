"""Objective `direct_align`: images recovered from any noise level, and the gradients of rewards there (SRPO)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from flowgrpo.configs.load import RecipeError, dump_recipe, load_recipe
from flowgrpo.core.forward_process import Noised
from flowgrpo.training.losses.direct_align import DirectAlignObjective, recovered
from flowgrpo.training.trainer import Trainer
from tests.parts.own_parts import same_when_resumed
from tests.training import test_processes
from tests.training.test_processes import run_all
from tests.training.test_reward_gradient import found_by, moved, relative_error, reward_of, trainer_of, words_of

RANGE = ("objective.lowest=0.3", "objective.highest=0.9", "objective.leap=0.1")


def objective_of(trainer: Trainer) -> DirectAlignObjective:
    assert isinstance(trainer.objective, DirectAlignObjective)
    return trainer.objective


def reward(images: Tensor, inverted: bool, place: float) -> Tensor:
    weight = images.new_tensor([0.3, -1.0, 0.7]).view(3, 1, 1)
    return ((-2.0 if inverted else 1.0) + place) * (weight * images.square()).flatten(1).mean(1)


@pytest.mark.parametrize(("sigma", "to"), [(0.9, 0.8), (0.7, 0.8), (0.2, 0.0)])
def test_a_step_with_the_exact_velocity_recovers_the_image(sigma: float, to: float) -> None:
    x0, noise = torch.randn(2, 3, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    rest = {"old": x0, "reference": None, "advantage": torch.zeros(3), "group": torch.arange(3)}
    exact = Noised(velocity=noise - x0, x0=x0, noise=noise, sigma=sigma, **rest)
    assert torch.equal(recovered(exact, to), x0)
    # Any other velocity, written out: one step of Euler, then the noise of the new level is taken away.
    other = Noised(velocity=noise, x0=x0, noise=noise, sigma=sigma, **rest)
    by_hand = (other.x + (to - sigma) * noise - to * noise) / (1 - to)
    assert torch.allclose(recovered(other, to), by_hand, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("spread", ["null", "0.5"])
def test_the_noise_is_the_one_from_which_each_image_was_made(spread: str, random_pipeline, tmp_path) -> None:
    trainer = trainer_of(random_pipeline, tmp_path, f"sampler.plan.spread={spread}", recipe="direct_align")
    _, e = trainer.collect(0)
    objective, policy = objective_of(trainer), trainer.task.policy
    for batch in objective.batches(e, 0, None):
        owners = e.rollout.leaf_prompt[batch.leaves].tolist()
        x = objective.noise_of(e, batch, e.rollout.x.shape[1:])
        policy.bind(e.plan)
        for step in range(4):
            v = policy.velocity_of(e.prompts)(x, step, owners)
            x = x + (e.plan.sigmas[step + 1] - e.plan.sigmas[step]) * v
        assert torch.allclose(x, e.rollout.x[batch.leaves], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("inversion", [False, True])
def test_the_gradient_is_that_of_step_recovery_decoder_and_reward_in_one_graph(
    inversion: bool, random_pipeline, tmp_path
) -> None:
    words = *RANGE, f"objective.inversion={json.dumps(inversion)}", "objective.times=2"
    trainer = trainer_of(random_pipeline, tmp_path, *words, reward="of_branches", recipe="direct_align")
    moved(trainer)
    rows, e = trainer.collect(0)
    policy, objective, total = trainer.task.policy, objective_of(trainer), torch.zeros(())
    levels, owners = objective.drawn_levels(e), e.rollout.leaf_prompt.tolist()
    assert [leap.inverted for leap in levels] == ([False, True] if inversion else [False]) * 2
    (first, *_) = list(objective.batches(e, 0, None))
    whole = first.__class__(torch.arange(4), first.level)
    x0, noise = e.rollout.x, objective.noise_of(e, whole, e.rollout.x.shape[1:])
    for leap in levels:
        assert min(leap.sigma, leap.to) >= 0.3
        assert max(leap.sigma, leap.to) <= 0.9
        assert abs(leap.sigma - leap.to) == pytest.approx(0.1)
        assert leap.place == pytest.approx((min(leap.sigma, leap.to) - 0.3) / 0.6)
        policy.bind(e.plan, {leap.step: leap.sigma})
        x = leap.sigma * noise + (1 - leap.sigma) * x0
        there = x + (leap.to - leap.sigma) * policy.velocity_of(e.prompts)(x, leap.step, owners)
        images = policy.denoiser.decode_with_graph((there - leap.to * noise) / (1 - leap.to), [
            rows[p].prompt for p in owners
        ])  # fmt: skip
        total = total + (1.0 if leap.inverted else -1.0) * 2.0 * reward(images, leap.inverted, leap.place).mean()
    wanted = torch.autograd.grad(total / len(levels), list(trainer.task.weights.parameters()))
    assert relative_error(found_by(trainer, e), wanted) < 1e-3


@pytest.mark.slow
def test_both_branches_pull_the_velocity_the_same_way(random_pipeline, tmp_path) -> None:
    words = "objective.inversion=true", "objective={lowest: 0.4, highest: 0.41, leap: 0.001}"
    trainer = trainer_of(random_pipeline, tmp_path, *words, reward="flat", recipe="direct_align")
    moved(trainer)
    _, e = trainer.collect(0)
    objective, found = objective_of(trainer), []
    for inverted in (False, True):
        for parameter in trainer.task.weights.parameters():
            parameter.grad = None
        for batch in [one for one in objective.batches(e, 0, None) if one.level.inverted is inverted]:
            objective.backward(e, batch, torch.zeros(len(e.rollout.parent)), None, torch.tensor(4.0))
        found.append(torch.cat([one.grad.flatten().clone() for one in trainer.task.weights.parameters()]))
    # The two levels differ by a little, so the gradients are not equal; with a wrong sign they would be opposite.
    assert float(torch.nn.functional.cosine_similarity(*found, dim=0)) > 0.9


@pytest.mark.slow
def test_the_reward_of_the_same_noises_rises(random_pipeline, tmp_path) -> None:
    words = *RANGE, "objective.times=3", "optimizer.learning_rate=0.01"
    trainer = trainer_of(random_pipeline, tmp_path, *words, reward="flat", recipe="direct_align")
    shown = [trainer.iterate(0)["reward/flat"] for _ in range(6)]
    assert sorted(shown) == shown
    assert shown[-1] > shown[0] + 5e-4


@pytest.mark.slow
def test_a_run_resumes_to_the_bit(random_pipeline, tmp_path) -> None:
    words = words_of(
        random_pipeline, tmp_path, "run={iterations: 3, checkpoint_every: 1}", "optimizer.learning_rate=0.01",
        "objective.inversion=true", "optimizer.updates=2", "penalties=[{name: kl, weight: 0.1}]", reward="of_branches",
    )  # fmt: skip
    same_when_resumed("direct_align", words, tmp_path)


@pytest.mark.slow
def test_two_processes_give_the_run_of_one(random_pipeline, tmp_path) -> None:
    """Three prompts, so that one process has more images than the other."""
    words = words_of(
        random_pipeline, tmp_path, "objective.inversion=true", "run.iterations=2", "optimizer.eps=0.01",
        "optimizer.learning_rate=0.5", f"rewards=[{{name: '{reward_of(tmp_path, 'of_branches')}', weight: 100}}]",
        *RANGE,
    )  # fmt: skip
    recipe = load_recipe("direct_align", [*words, "rollout={prompts: 3, group: 2, batch: 2, decode_batch: 2}"])
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    train = ["train", str(tmp_path / "recipe.yaml"), "--out"]
    run_all(
        [
            {"words": [*train, str(tmp_path / "one")], "log": "one", "count": 1},
            {"words": [*train, str(tmp_path / "two")], "log": "two", "count": 2},
        ],
        tmp_path,
    )
    assert json.loads((tmp_path / "two.json").read_text()) == [0, 0], (tmp_path / "two-0.txt").read_text()
    test_processes.require_equal(tmp_path / "two", tmp_path / "one")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sampler.plan={name: window}"], "and the steps of sampler.plan window add noise of their own; use plan ode"),
        (["sampler.plan.window=all"], "trains the steps of its window without noise, and objective is direct_align"),
        (["objective.leap=0.2"], "leave no room for two leaps of 0.2, one down to a noise level and one up to it; use"),
        (["objective.lowest=0.97"], "objective.lowest 0.97 is not below objective.highest 0.96; use lower and higher"),
        (["objective.highest=1.5"], "objective.highest"),
        (["objective.lowest=0"], "objective.lowest"),
        (
            ["sampler.sigmas=[0.9, 0.5, 0.2]", "sampler.steps=3"],
            "objective.highest is 0.96, and the noisiest level of the sampler is 0.9; use at most 0.9",
        ),
        (["combine=worst"], "weighted sum of the rewards as they are given, and combine is worst; use combine sum"),
        (
            ["select=[{name: extremes, keep: 2}]", "rollout.group=4"],
            "has a gradient for every image, and select is extremes; leave",
        ),
        (["penalties=[{name: llds, weight: 0.1}]", "optimizer.updates=2"], "objective direct_align has no ratio of"),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("direct_align", words)
    assert said in str(caught.value)


@pytest.mark.slow
def test_a_reward_without_a_gradient_is_refused_before_the_run(random_pipeline: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reward 'listed' has no gradient with respect to the images: it returns a"):
        trainer_of(random_pipeline, tmp_path, reward="listed", recipe="direct_align")


@pytest.mark.slow
def test_images_of_data_take_the_place_of_a_rollout(random_pipeline: Path, tmp_path: Path) -> None:
    rows = []
    for k in range(2):
        noise = np.random.default_rng(k).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((64, 64)).save(tmp_path / f"{k}.png")
        rows.append({"prompt": f"a red circle {k}", "picture": f"{k}.png"})
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trainer = trainer_of(
        random_pipeline, tmp_path, f"data.train={tmp_path / 'own.jsonl'}", "rollout.group=1",
        "sampler.plan={name: given, columns: [picture]}", "penalties=[{name: kl, weight: 0.1}]", reward="flat",
        recipe="direct_align",
    )  # fmt: skip
    first, second = trainer.iterate(0), trainer.iterate(1)
    assert first["evaluations"] == 0
    assert "preferred" not in first
    assert first["grad_norm"] > 0.0
    assert (first["kl"], second["kl"] > 0.0) == (0.0, True)
    # The noise is new in every iteration.
    batches = [next(objective_of(trainer).batches(trainer.collect(k)[1], 0, None)) for k in range(2)]
    noises = [objective_of(trainer).noise_of(trainer.collect(k)[1], batches[k], (4,)) for k in range(2)]
    assert not torch.equal(*noises)
