"""The numbers of the methods' released code, method by method; here, the numbers of one denoising step.

The numbers stand in `numbers/`; `ask.py` asks the releases for them again. The other files of this folder compare
schedules, credit and losses. A test fails if a number is further away than rounding, or it says why the numbers differ.

What is compared:

- Flow-GRPO: the step, the step for Wan, the advantages, the loss and the KL. Flow-GRPO-Fast has the same loss on fewer
  steps.
- GRPO-Guard: the ratio and the loss, by the statements of its training script and by Pref-GRPO's.
- Flow-CPS and TP-GRPO: the step and the ratio. TP-GRPO: the rewards of steps, in three forms.
- Flow-DPPO: the loss and the mask. Flow-DPO: the loss of pairs in Flow-GRPO's repository.
- DanceGRPO: the step, the loss, and the shifted table of its scripts for FLUX.
- MixGRPO: the step, the solver, the windows, the tables of Flash, and the sum of several advantages.
- BranchGRPO: the step, the rewards and advantages of nodes, the edges of a tree and of an update, and both kinds of
  pruning.
- G²RPO: the step at a split, the ends of its branches, the sum of its advantages, and the gradient.
- SAGE-GRPO: the step, the factors of its equaliser, and its two divergences.
- Euphonium: the step, the drift of its guide, the weight of its KL, and the loss of its two advantages.
- Pref-GRPO: the KL, the loss, and the advantages of several rewards.
- DiffusionNFT: how good an image is by each mode of its advantages; verl-omni's modes too.
- DiffusionNFT, AWM, DGPO, CRD: the loss, its gradient, and the decay of the average. AWM with its KL and its trust
  term, DGPO with its clip and its KL, CRD in five forms with its KL. CRD's code is the code in Flow-Factory.
- LLaDA and Dream: the logits and the names of the weights, of a copy of the code that their weights bring. LLaDA: the
  tokens that its sampler writes in blocks without noise.
- SDAR: the logits and the names of the weights, and the tokens that its sampler writes block after block without noise.
- SPG: the loss and its gradient, with four estimates of bad answers, and how often a token is masked.
- TraceRL: which tokens each pass masks and scores.
- UniRL and verl-omni, whose configurations are converted: steps, advantages, tables, windows, the loss of DiffusionNFT,
  and how the old policy's share rises.
- Neighbor GRPO: noises, advantages and loss, of a second author; there is no code of the paper's authors.

What cannot be compared:

- TempFlow-GRPO: its repository has no code. LOOP, VGPO, AC-Flow: no public code was found.
- The repositories of SAGE-GRPO and G²RPO could be read, but not cloned. Their numbers come from statements that were
  copied by hand for the question.
- How many updates a rollout has, and of which rows, is a setting of a run, and belongs to recipes.
"""

import pytest
import torch

from flowgrpo.core.objectives import gaussian_kl
from flowgrpo.samplers.kernels import Kernel, guard_weight, jacobian, log_ratio, step
from flowgrpo.samplers.solvers import History, solve
from tests.releases.ask import QUESTIONS
from tests.releases.asking import NUMBERS
from tests.releases.comparing import ROUNDING, numbers


def test_every_question_has_its_numbers_of_its_commit() -> None:
    assert {path.stem for path in NUMBERS.iterdir()} == set(QUESTIONS)
    for name, question in QUESTIONS.items():
        assert numbers(name)["source"] == question.source


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("flow_grpo_steps", "flow_sde"),
        ("flow_grpo_wan_steps", "wan_sde"),
        ("mixgrpo_steps", "flow_sde"),
        ("dance_grpo_steps", "dance_sde"),
        ("branchgrpo_steps", "dance_sde"),
        ("g2rpo_steps", "flow_sde"),
        ("sage_grpo_steps", "sage"),
        ("euphonium_steps", "dance_sde"),
        ("unirl_flow_steps", "flow_sde"),
        ("unirl_dance_steps", "dance_sde"),
        ("verl_omni_dance_steps", "dance_sde"),
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


@pytest.mark.parametrize("name", ["flow_cps_steps", "tp_grpo_steps"])
def test_a_step_that_keeps_the_coefficients_is_the_step_of_the_release(name: str) -> None:
    """The release scores a step by its squared distance to the mean; `cps_released` is the ratio of these scores."""
    asked = numbers(name)
    for row in asked["steps"]:
        x, old, moved, x_next = (torch.tensor(row[key]) for key in ("x", "velocity", "moved", "x_next"))
        coefficients = Kernel("cps", asked["eta"]).coefficients(asked["sigmas"], row["index"])
        sampled, scored = (step(velocity, x, coefficients, x_next=x_next) for velocity in (old, moved))
        torch.testing.assert_close(sampled.mean, torch.tensor(row["mean"]), **ROUNDING)
        torch.testing.assert_close(torch.tensor(row["std"]), torch.full_like(torch.tensor(row["std"]), sampled.std))
        ratio = log_ratio(scored.mean - sampled.mean, sampled.noise, coefficients.std, form="cps_released")
        expected = torch.tensor(row["moved_log_prob"]) - torch.tensor(row["log_prob"])
        torch.testing.assert_close(ratio, expected, **ROUNDING)
    assert len(asked["steps"]) == len(asked["sigmas"]) - 2


def test_gradients_are_evened_out_as_in_the_release() -> None:
    """The release divides by the lower of two middle values, and counts the last step. Here the median is their mean.

    So the weights of the steps are the same up to one factor.
    """
    asked = numbers("sage_grpo_steps")
    kernel, steps = Kernel("sage", asked["eta"]), range(len(asked["sigmas"]) - 1)
    scales = [kernel.coefficients(asked["sigmas"], index) for index in steps]
    weights = torch.tensor([c.std * guard_weight(c) for c in scales])
    torch.testing.assert_close(1.0 / weights, torch.tensor(asked["norms"]), rtol=1e-5, atol=0.0)
    factors = weights / torch.tensor(asked["factors"])
    torch.testing.assert_close(factors, factors[:1].expand_as(factors), rtol=1e-5, atol=0.0)
    # The release's unit is the step of the lower middle norm.
    assert sorted(asked["factors"])[len(steps) // 2] == pytest.approx(1.0)


def test_a_guided_step_moves_by_the_gradient_and_the_step_size() -> None:
    """The guided mean is the mean plus scale times step size times gradient; here a guide gives noise to add.

    A drift d of the mean is the noise d / s, which is what a guide of this package returns.
    """
    asked = numbers("euphonium_steps")
    for row in asked["steps"]:
        x, velocity, gradient = (torch.tensor(row[key]) for key in ("x", "velocity", "gradient"))
        coefficients = Kernel("dance_sde", asked["eta"]).coefficients(asked["sigmas"], row["index"])
        size = coefficients.sigma - coefficients.sigma_next
        moved = step(velocity, x, coefficients, noise=asked["scale"] * size * gradient / coefficients.std)
        torch.testing.assert_close(moved.x_next, torch.tensor(row["guided"]), **ROUNDING)


def test_the_kl_of_euphonium_is_the_kl_of_two_steps() -> None:
    asked = numbers("euphonium_steps")
    for row in asked["steps"]:
        c = Kernel("dance_sde", asked["eta"]).coefficients(asked["sigmas"], row["index"])
        shift = jacobian(c.sigma, c.sigma_next, c.kappa) * torch.ones(1, 1, 1)
        found = gaussian_kl(shift, torch.zeros_like(shift), c.std).item()
        assert found == pytest.approx(row["kl_weight"], rel=1e-6)
