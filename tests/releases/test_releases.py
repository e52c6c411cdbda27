"""Kernels, solvers, windows, advantages and penalties give the numbers of the methods' released code.

The numbers stand in `numbers/`; `ask.py` asks the releases for them again.
"""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from flowgrpo.core.advantages import group_advantages
from flowgrpo.core.forward_process import Noised, awm, dgpo, diffusion_nft
from flowgrpo.core.objectives import gaussian_kl
from flowgrpo.core.trees import depth_advantages, node_values
from flowgrpo.samplers.kernels import Kernel, log_ratio, step
from flowgrpo.samplers.solvers import History, solve
from flowgrpo.samplers.windows import decay, exp_decay, progressive
from tests.releases.ask import NUMBERS, QUESTIONS

WINDOWS = {"progressive": progressive, "decay": decay, "exp_decay": exp_decay}
# Sums and differences of float32 numbers of order 1.
ROUNDING = {"rtol": 1e-6, "atol": 1e-6}


def numbers(name: str) -> dict[str, Any]:
    return json.loads((NUMBERS / f"{name}.json").read_text(encoding="utf-8"))


def test_every_question_has_its_numbers_of_its_commit() -> None:
    assert {path.stem for path in NUMBERS.iterdir()} == set(QUESTIONS)
    for name, question in QUESTIONS.items():
        assert numbers(name)["source"] == question.source


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("flow_grpo_steps", "flow_sde"),
        ("mixgrpo_steps", "flow_sde"),
        ("dance_grpo_steps", "dance_sde"),
        ("branchgrpo_steps", "dance_sde"),
    ],
)
def test_a_step_has_the_density_and_the_ratio_of_the_release(name: str, kernel: str) -> None:
    asked = numbers(name)
    for row in asked["steps"]:
        x, old, moved, x_next = (torch.tensor(row[key]) for key in ("x", "velocity", "moved", "x_next"))
        coefficients = Kernel(kernel, asked["eta"]).coefficients(asked["sigmas"], row["index"])
        sampled, scored = (step(velocity, x, coefficients, x_next=x_next) for velocity in (old, moved))
        for mine, theirs in ((sampled, row["log_prob"]), (scored, row["moved_log_prob"])):
            torch.testing.assert_close(mine.log_prob, torch.tensor(theirs), **ROUNDING)
        ratio = log_ratio(scored.mean - sampled.mean, sampled.noise, coefficients.std)
        expected = torch.tensor(row["moved_log_prob"]) - torch.tensor(row["log_prob"])
        torch.testing.assert_close(ratio, expected, **ROUNDING)
    assert len(asked["steps"]) == len(asked["sigmas"]) - 2


def test_the_second_order_solver_goes_where_the_release_goes() -> None:
    asked = numbers("mixgrpo_solver")
    x, history = torch.tensor(asked["x"]), History()
    for offset, (velocity, expected) in enumerate(zip(asked["velocities"], asked["states"], strict=True)):
        index = asked["first"] + offset
        sigma, following = asked["sigmas"][index : index + 2]
        x, history = solve("dpmpp_2m", torch.tensor(velocity), x, sigma, following, history)
        torch.testing.assert_close(x, torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert following == 0.0


def test_windows_move_as_in_the_release_until_the_end_of_the_schedule() -> None:
    """After that, the release shortens its window, or leaves it empty; here it starts over."""
    for schedule in numbers("mixgrpo_windows")["schedules"]:
        size = schedule["group_size"]
        window = WINDOWS[schedule["sample_strategy"]]
        options = {"size": size, "interval": schedule["iters_per_group"]}
        options["stride"] = 1 if schedule["prog_overlap"] else size
        found = [list(window(k, schedule["max_timesteps"] + 1, 0, **options)) for k in range(len(schedule["windows"]))]
        assert found == schedule["windows"], schedule["sample_strategy"]


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_advantages_of_prompts_are_those_of_the_release(scale: str) -> None:
    asked = numbers("flow_grpo_advantages")
    groups = [ord(prompt) for prompt in asked["prompts"]]
    rewards = torch.tensor(asked["rewards"], dtype=torch.float64)
    found = group_advantages(rewards, groups, scale=scale, ddof=0, eps=1e-4)
    torch.testing.assert_close(found, torch.tensor(asked["advantages"][scale], dtype=torch.float64), **ROUNDING)


def tree(asked: dict[str, Any], how: str) -> tuple[Tensor, Tensor]:
    """Values and advantages of the nodes of the tree that was asked about."""
    parents, log_probs = torch.tensor(asked["parents"]), torch.tensor([0.0, *asked["log_probs"]])
    values = node_values(parents, torch.tensor(asked["rewards"]), how=how, log_prob=log_probs)
    depth = torch.tensor([0, 1, 1, *[2] * 4, *[3] * 8])
    return values, depth_advantages(values, depth, torch.zeros_like(depth))


def test_a_tree_has_the_values_and_advantages_of_the_release() -> None:
    asked = numbers("branchgrpo_advantages")
    values, advantages = tree(asked, "mean")
    torch.testing.assert_close(values, torch.tensor(asked["found"]["mean"]["values"]), **ROUNDING)
    torch.testing.assert_close(advantages, torch.tensor(asked["found"]["mean"]["advantages"]), **ROUNDING)


def test_weights_by_likelihood_are_those_of_the_release_at_the_last_split() -> None:
    """Above the last split, the release weights a child by its own edge alone; the paper weights whole paths."""
    asked = numbers("branchgrpo_advantages")
    values, expected = tree(asked, "path")[0], torch.tensor(asked["found"]["path"]["values"])
    torch.testing.assert_close(values[3:], expected[3:], **ROUNDING)
    assert (values[:3] - expected[:3]).abs().min() > 1e-3
    edge = torch.tensor(asked["log_probs"])[:2].softmax(0)
    torch.testing.assert_close((edge * expected[1:3]).sum(), expected[0], **ROUNDING)


def test_the_kl_of_two_steps_is_that_of_the_release() -> None:
    asked = numbers("pref_grpo_kl")
    mean, reference = (torch.tensor(asked[key])[:, None] for key in ("mean", "reference"))
    assert gaussian_kl(mean, reference, asked["std"]).mean().item() == pytest.approx(asked["kl"], rel=1e-6)


def images(asked: dict[str, Any]) -> tuple[Noised, Tensor]:
    """Noised images, and the prediction whose gradient is asked for."""
    velocity = torch.tensor(asked["velocity"]).requires_grad_(True)
    rows = Noised(
        velocity=velocity, old=torch.tensor(asked["old"]), reference=torch.tensor(asked["reference"]),
        x0=torch.tensor(asked["x0"]), noise=torch.tensor(asked["noise"]), sigma=asked["sigma"],
        advantage=torch.tensor(asked["advantage"]), group=torch.tensor(asked["group"]),
    )  # fmt: skip
    return rows, velocity


def gradient(value: Tensor, velocity: Tensor) -> Tensor:
    return torch.autograd.grad(value, velocity)[0]


def test_negative_aware_fine_tuning_has_the_loss_of_the_release() -> None:
    asked = numbers("diffusion_nft_loss")
    rows, velocity = images(asked)
    loss = diffusion_nft(rows, beta=asked["beta"], bound=asked["bound"])[0].mean()
    assert loss.item() == pytest.approx(asked["loss"], rel=1e-6)
    torch.testing.assert_close(gradient(loss, velocity), torch.tensor(asked["gradient"]), **ROUNDING)


def test_advantage_weighted_matching_has_the_log_prob_of_the_release() -> None:
    """With a surrogate that returns its log-prob, the loss is the log-prob."""
    asked = numbers("awm_log_prob")
    rows, velocity = images(asked)
    found = awm(rows, surrogate=lambda log_ratio, adv, logp, mask: logp, power=asked["power"])[0]
    torch.testing.assert_close(found, torch.tensor(asked["log_prob"]), **ROUNDING)
    torch.testing.assert_close(gradient(found.sum(), velocity), torch.tensor(asked["gradient"]), **ROUNDING)


def test_group_preference_optimisation_has_the_gradient_of_the_release() -> None:
    """The release differentiates A l, and this package -A exp(l_old - l): the gradients are equal at a ratio of 1."""
    asked = numbers("dgpo_loss")
    rows, velocity = images(asked | {"old": asked["velocity"]})
    loss = dgpo(rows, beta=asked["beta"])[0].mean()
    torch.testing.assert_close(gradient(loss, velocity), torch.tensor(asked["gradient"]), **ROUNDING)
