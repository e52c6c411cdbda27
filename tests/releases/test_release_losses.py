"""Losses, and their gradients, are those of the methods' released code, or a test here says otherwise."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flowgrpo.convert.verl_omni_methods import TRANSFORMS as TRANSFORMS_OF
from flowgrpo.core.advantages import TRANSFORMS, goodness, group_advantages
from flowgrpo.core.forward_process import Noised, awm, crd, dgpo, diffusion_nft, flow_dpo
from flowgrpo.core.objectives import gaussian_kl, policy_loss
from flowgrpo.core.penalties import Edges, adaptive_kl, kl, stepwise
from flowgrpo.core.surrogates import clip
from flowgrpo.samplers.kernels import Coefficients, Kernel, guard_weight, log_ratio, step
from flowgrpo.training.losses.transition import TransitionObjective
from tests.releases.comparing import ROUNDING, numbers


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


@pytest.mark.parametrize("name", ["diffusion_nft_loss", "unirl_nft_loss"])
def test_negative_aware_fine_tuning_has_the_loss_of_the_release(name: str) -> None:
    asked = numbers(name)
    rows, velocity = images(asked)
    loss = diffusion_nft(rows, beta=asked["beta"], bound=asked["bound"])[0].mean()
    assert loss.item() == pytest.approx(asked["loss"], rel=1e-6)
    torch.testing.assert_close(gradient(loss, velocity), torch.tensor(asked["gradient"]), **ROUNDING)


@pytest.mark.parametrize("name", ["verl_omni_goodness", "diffusion_nft_goodness"])
def test_a_transform_and_a_bound_say_how_good_an_image_is_as_in_the_release(name: str) -> None:
    """In verl-omni's own modes, also with bounds below 1, at which a whole advantage of 1 is out of bounds."""
    asked = numbers(name)
    for form in asked["forms"]:
        chosen = TRANSFORMS_OF.get(form["mode"])
        advantages = torch.tensor(asked["advantages"])
        found = goodness(advantages if chosen is None else TRANSFORMS[chosen](advantages), form["bound"])
        torch.testing.assert_close(found, torch.tensor(form["good"]), **ROUNDING)
    assert {form["mode"] for form in asked["forms"]} - {"all"} >= set(TRANSFORMS_OF) - {"continuous"}


def test_advantage_weighted_matching_has_the_log_prob_of_the_release() -> None:
    """With a surrogate that returns its log-prob, the loss is the log-prob."""
    asked = numbers("awm_log_prob")
    rows, velocity = images(asked)
    found = awm(rows, surrogate=lambda log_ratio, adv, logp, mask: logp, power=asked["power"])[0]
    torch.testing.assert_close(found, torch.tensor(asked["log_prob"]), **ROUNDING)
    torch.testing.assert_close(gradient(found.sum(), velocity), torch.tensor(asked["gradient"]), **ROUNDING)


def test_centred_reward_distillation_has_the_loss_of_the_release() -> None:
    asked = numbers("crd_loss")
    # The release gives bad images a weight of 1e-4 in place of the weight of the KL.
    least = 1e-4 / asked["kl"]
    for form in asked["forms"]:
        rows, velocity = images(asked)
        loss = crd(
            rows, beta=asked["beta"], bound=asked["bound"], relative=form["relative"],
            temperature=form["temperature"] if form["temperature"] > 0 else None,
            match={"mse": "squares", "bce": "logistic"}[form["match"]],
        )[0].mean()  # fmt: skip
        penalty = asked["kl"] * adaptive_kl(between(rows), bound=asked["bound"], least=least).mean()
        assert loss.item() == pytest.approx(form["loss"], rel=1e-6)
        assert penalty.item() == pytest.approx(form["kl_loss"], rel=1e-6)
        torch.testing.assert_close(gradient(loss + penalty, velocity), torch.tensor(form["gradient"]), **ROUNDING)


def test_group_preference_optimisation_has_the_gradient_of_the_release() -> None:
    """The release differentiates A l, and this package -A exp(l_old - l): the gradients are equal at a ratio of 1."""
    asked = numbers("dgpo_loss")
    rows, velocity = images(asked | {"old": asked["velocity"]})
    loss = dgpo(rows, beta=asked["beta"])[0].mean()
    torch.testing.assert_close(gradient(loss, velocity), torch.tensor(asked["gradient"]), **ROUNDING)


def test_group_preference_optimisation_is_clipped_as_in_the_release() -> None:
    """After a move, an image that is not clipped has the gradient of the release times its ratio."""
    asked = numbers("dgpo_clipped_loss")
    rows, velocity = images(asked)
    loss, ratio = dgpo(rows, beta=asked["beta"], surrogate=partial(clip, low=asked["clip"], high=asked["clip"]))
    penalty = kl(between(rows)).mean()
    assert penalty.item() == pytest.approx(asked["kl_loss"], rel=1e-6)
    own = torch.autograd.grad(loss.mean(), velocity, retain_graph=True)[0] / ratio.exp().view(-1, 1, 1, 1)
    found = own + asked["kl"] * gradient(penalty, velocity)
    torch.testing.assert_close(found, torch.tensor(asked["gradient"]), **ROUNDING)
    clipped = torch.tensor(asked["clipped"]).bool()
    assert clipped.any()
    assert not clipped.all()
    assert bool((own[clipped] == 0).all())


def between(rows: Noised) -> Edges:
    """What penalties read of noised images."""
    assert rows.reference is not None
    reference = rows.reference
    return Edges(
        step=0, std=None, shift=rows.velocity - rows.old, log_ratio=torch.zeros(len(rows.x0), 1),
        advantage=rows.advantage, mask=None, to_reference=lambda: rows.velocity - reference,
        to_guided=lambda: rows.velocity,
    )  # fmt: skip


def test_advantage_weighted_matching_has_the_whole_loss_of_the_release() -> None:
    """The release divides the clamped advantage by its clamp, and adds a KL and a pull to an average of the weights."""
    asked = numbers("awm_loss")
    rows, velocity = images(asked | {"advantage": [min(max(a, -5.0), 5.0) / 5.0 for a in asked["advantage"]]})
    surrogate = partial(clip, low=asked["clip"], high=asked["clip"])
    loss = awm(rows, surrogate=surrogate, power=asked["power"])[0]
    whole = (loss + asked["kl"] * kl(between(rows)) + asked["trust"] * stepwise(between(rows))).mean()
    assert whole.item() == pytest.approx(asked["loss"], rel=1e-6)
    torch.testing.assert_close(gradient(whole, velocity), torch.tensor(asked["gradient"]), **ROUNDING)


def test_preferences_of_pairs_have_the_loss_of_the_release() -> None:
    """There the good images come first. Here a pair is the best and the worst image of a group of two."""
    asked = numbers("flow_dpo_loss")
    pairs = {"group": [0, 1, 2, 0, 1, 2], "advantage": [1.0] * 3 + [-1.0] * 3}
    rows, velocity = images(asked | pairs)
    loss = flow_dpo(rows, beta=asked["beta"])[0].sum() / 3
    assert loss.item() == pytest.approx(asked["loss"], rel=1e-6)
    torch.testing.assert_close(gradient(loss, velocity), torch.tensor(asked["gradient"]), **ROUNDING)


def scored(asked: dict[str, Any], row: dict[str, Any], kernel: str) -> tuple[Tensor, Tensor, Tensor, Coefficients]:
    """The velocity, the shift of the mean, the noise of the sampled step, and its coefficients."""
    velocity = torch.tensor(row["velocity"]).requires_grad_(True)
    x, old, x_next = (torch.tensor(row[key]) for key in ("x", "old", "x_next"))
    c = Kernel(kernel, asked["eta"]).coefficients(asked["sigmas"], row["index"])
    before = step(old, x, c, x_next=x_next)
    return velocity, step(velocity, x, c, x_next=x_next).mean - before.mean, before.noise, c


def clipped_loss(asked: dict[str, Any], row: dict[str, Any], ratio: Tensor, weight: float = 1.0) -> Tensor:
    """The loss of one step of every row."""
    surrogate = partial(clip, low=asked["clip"], high=asked["clip"])
    advantage = torch.tensor(row["advantage"]).clamp(-5.0, 5.0)
    return policy_loss(
        ratio[:, None], torch.zeros_like(ratio)[:, None], advantage, surrogate=surrogate,
        weight=torch.full_like(advantage, weight),
    )[0]  # fmt: skip


# A log-prob of the releases has an error of 1e-7, which a clip of 3e-4 makes visible in the loss.
NEARLY = {"rtol": 1e-4, "atol": 2e-6}


@pytest.mark.parametrize(("name", "kernel"), [("flow_grpo_loss", "flow_sde"), ("dance_grpo_loss", "dance_sde")])
def test_a_step_has_the_loss_and_the_gradient_of_the_release(name: str, kernel: str) -> None:
    asked, silent = numbers(name), []
    for row in asked["steps"]:
        velocity, shift, noise, c = scored(asked, row, kernel)
        ratio = log_ratio(shift, noise, c.std)
        torch.testing.assert_close(ratio.exp(), torch.tensor(row["ratio"]), **ROUNDING)
        loss = clipped_loss(asked, row, ratio)
        silent += (torch.tensor(row["gradient"]).abs().flatten(1).amax(1) == 0).tolist()
        assert loss.item() == pytest.approx(row["loss"], rel=1e-5, abs=1e-6)
        torch.testing.assert_close(gradient(loss, velocity), torch.tensor(row["gradient"]), **NEARLY)
    # The clip holds some rows back.
    assert 0 < sum(silent) < len(silent)


def test_the_kl_of_flow_grpo_lacks_the_step_size() -> None:
    """The release divides by twice the squared diffusion; here the KL is exact, and larger by 1 over the step size."""
    asked = numbers("flow_grpo_loss")
    for row in asked["steps"]:
        x, velocity, reference, x_next = (torch.tensor(row[key]) for key in ("x", "velocity", "reference", "x_next"))
        c = Kernel("flow_sde", asked["eta"]).coefficients(asked["sigmas"], row["index"])
        means = [step(v, x, c, x_next=x_next).mean[:, None] for v in (velocity, reference)]
        found = gaussian_kl(*means, c.std).mean().item()
        assert found * (c.sigma - c.sigma_next) == pytest.approx(row["kl"], rel=1e-5)


@pytest.mark.parametrize("name", ["grpo_guard_loss", "pref_grpo_loss"])
def test_a_guarded_step_has_the_loss_and_the_gradient_of_the_release(name: str) -> None:
    """The releases divide the loss by the step size, and here the weight is exact for every kernel.

    GRPO-Guard's release averages the bias over the rows of a micro-batch, so its rows are compared one by one.
    """
    asked, seen = numbers(name), []
    for row in asked["steps"]:
        if name == "grpo_guard_loss" and len(row["x"]) > 1:
            continue
        velocity, shift, noise, c = scored(asked, row, "flow_sde")
        ratio = log_ratio(shift, noise, c.std, form="guard")
        torch.testing.assert_close(ratio.exp(), torch.tensor(row["ratio"]), **ROUNDING)
        size = c.sigma - c.sigma_next
        loss = clipped_loss(asked, row, ratio, guard_weight(c))
        # Below sigma 1, the exact weight is 1 / (1 + eta² / 2) of 1 over the step size.
        factor = 1.0 if c.sigma == 1.0 else 1.0 + asked["eta"] ** 2 / 2.0
        assert guard_weight(c) * size * factor == pytest.approx(1.0, rel=1e-6)
        assert loss.item() * factor == pytest.approx(row["loss"], rel=1e-4, abs=1e-6)
        torch.testing.assert_close(
            gradient(loss, velocity) * factor, torch.tensor(row["gradient"]), rtol=1e-4, atol=1e-5
        )
        seen.append(row["index"])
    assert seen == [0, 3, 6]


def test_the_released_guard_has_one_bias_for_a_micro_batch() -> None:
    asked = numbers("grpo_guard_loss")
    for row in asked["steps"]:
        _, shift, noise, c = scored(asked, row, "flow_sde")
        bias = shift.detach().square().flatten(1).mean(1) / (2.0 * c.std)
        own = log_ratio(shift, noise, c.std, form="guard").detach()
        torch.testing.assert_close((own - bias + bias.mean()).exp(), torch.tensor(row["ratio"]), **ROUNDING)


def test_two_advantages_are_clipped_apart_in_the_release() -> None:
    """Euphonium adds the clipped losses of the image's and of the step's advantage. Here the advantages are added.

    The losses are the same where the two advantages have one sign.
    """
    asked = numbers("euphonium_loss")
    log_prob = torch.tensor(asked["log_prob"]).requires_grad_(True)
    ratio = log_prob - torch.tensor(asked["before"])
    parts = [torch.tensor(asked[key]) for key in ("outcome", "process")]
    losses = [clipped_loss(asked, {"advantage": part.tolist()}, ratio) for part in parts]
    loss = sum(weight * each for weight, each in zip(asked["weights"], losses))
    assert isinstance(loss, Tensor)
    assert loss.item() == pytest.approx(asked["loss"], rel=1e-5)
    expected = torch.tensor(asked["gradient"])
    torch.testing.assert_close(torch.autograd.grad(loss, log_prob, retain_graph=True)[0], expected, **NEARLY)
    total = sum(weight * part for weight, part in zip(asked["weights"], parts))
    assert isinstance(total, Tensor)
    together = torch.autograd.grad(clipped_loss(asked, {"advantage": total.tolist()}, ratio), log_prob)[0]
    alike = parts[0] * parts[1] > 0
    torch.testing.assert_close(together[alike], expected[alike], **NEARLY)
    assert (together - expected)[~alike].abs().max() > 1e-2


def test_branches_have_the_advantages_and_the_gradient_of_the_release() -> None:
    """The release adds the advantages of rewards and granularities up, and one update has all splits."""
    asked, held = numbers("g2rpo_loss"), 0
    groups = [0] * len(asked["rewards"][0][0])
    each = [group_advantages(torch.tensor(r), groups, ddof=1, eps=1e-8) for kind in asked["rewards"] for r in kind]
    advantages = torch.stack(each).sum(0).clamp(-5.0, 5.0)
    for column, index in enumerate(asked["splits"]):
        c = Kernel("flow_sde", asked["eta"]).coefficients(asked["sigmas"], index)
        x, old, x_next = (torch.tensor(asked[key][column]) for key in ("x", "old", "x_next"))
        velocity = torch.tensor(asked["velocity"][column]).requires_grad_(True)
        means = [step(v.expand_as(x_next), x.expand_as(x_next), c, x_next=x_next) for v in (velocity, old)]
        ratio = log_ratio(means[0].mean - means[1].mean, means[1].noise, c.std)
        row = {"advantage": advantages[:, column].tolist()}
        loss = clipped_loss(asked, row, ratio) / len(asked["splits"])
        torch.testing.assert_close(gradient(loss, velocity), torch.tensor(asked["gradient"][column]), **NEARLY)
        held += int(((ratio.exp() - 1.0).abs() > asked["clip"]).sum())
    assert 0 < held < advantages.numel()


def test_the_two_divergences_of_sage_are_ours_up_to_their_estimates() -> None:
    """The release adds 1e-6 to the variance of the first, and takes one sample of the second, whose mean is ours."""
    asked = numbers("sage_grpo_kl")
    mean, anchor, old, noise = (torch.tensor(asked[key]) for key in ("mean", "anchor", "old", "noise"))
    mean.requires_grad_(True)
    std, (first, second) = asked["std"], asked["weights"]

    def edges(drawn: Tensor) -> Edges:
        shift = mean - old
        ratio = log_ratio(shift, drawn, std)[:, None]
        return Edges(
            step=0, std=std, shift=shift, log_ratio=ratio, advantage=torch.zeros(len(mean)), mask=None,
            to_reference=lambda: mean - anchor, to_guided=lambda: mean,
        )  # fmt: skip

    moving = kl(edges(noise)).mean() * std**2 / (std**2 + 1e-6)
    sampled = -edges(noise).log_ratio.mean()
    for found, key in ((moving, "moving"), (sampled, "step"), (first * moving + second * sampled, "sum")):
        # The release subtracts log-probs of about 0.5 in float32, so its estimate is rounded to 3e-8.
        assert found.item() == pytest.approx(asked[key], rel=1e-6, abs=6e-8)
        torch.testing.assert_close(
            torch.autograd.grad(found, mean, retain_graph=True)[0],
            torch.tensor(asked[f"{key}_gradient"]),
            rtol=1e-5,
            atol=1e-7,
        )
    # Over a noise and its opposite, the mean of the release's estimate is our divergence.
    both = -(edges(noise).log_ratio + edges(-noise).log_ratio).mean() / 2
    torch.testing.assert_close(stepwise(edges(noise)).mean(), both)
    assert abs(stepwise(edges(noise)).mean().item() - asked["step"]) > 1e-4


def test_a_trust_region_has_the_loss_and_the_mask_of_the_release() -> None:
    asked = numbers("flow_dppo_loss")
    shift = torch.tensor(asked["shift"])[:, 0].requires_grad_(True)
    noise, std = torch.tensor(asked["noise"])[:, 0], asked["std"]
    advantage = torch.tensor(asked["advantage"])
    ratio = log_ratio(shift, noise, std)[:, None]
    divergence = shift.detach().square().flatten(1).mean(1)[:, None] / (2.0 * std**2)
    elements = shift[0].numel()
    objective: Any = SimpleNamespace(trust_nats=asked["threshold"] * elements, elements=elements)
    trusted = TransitionObjective._trusted(objective, ratio, advantage, divergence)
    assert isinstance(trusted, Tensor)
    surrogate = partial(clip, low=torch.inf, high=torch.inf)
    loss = policy_loss(ratio, torch.zeros_like(ratio), advantage, surrogate=surrogate, weight=trusted)[0]
    assert 0.0 < 1.0 - trusted.mean().item() == pytest.approx(asked["masked"])
    assert loss.item() == pytest.approx(asked["loss"], rel=1e-5)
    found = gradient(loss, shift)
    torch.testing.assert_close(found, torch.tensor(asked["gradient"])[:, 0], rtol=1e-5, atol=1e-6)
