"""Kernels against the step formulas of each method, and the identities of ratios and gradients."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowgrpo.samplers.kernels import (
    KERNELS,
    SAGE_SIGMA_CAP,
    Coefficients,
    Kernel,
    guard_weight,
    jacobian,
    log_ratio,
    step,
)
from flowgrpo.samplers.schedules import shifted_sigmas

# The table of diffusers' StableDiffusion3Pipeline (shift 3, 10 steps), which shifts sigma_min twice.
SD3 = (1.0, 0.96013, 0.91335, 0.85769, 0.79037, 0.70728, 0.60215, 0.46488, 0.27805, 0.00893, 0.0)
STOCHASTIC = [name for name in KERNELS if name != "ode"]
SHAPE = (3, 4, 5, 6)


def draw(seed: int, *, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def flow_grpo_step(x, v, sigmas, i, eta):
    """Flow-GRPO's published update, and the std of its noise."""
    sigma, dt = sigmas[i], sigmas[i + 1] - sigmas[i]
    std = eta * math.sqrt(sigma / (1 - (sigmas[1] if sigma == 1 else sigma)))
    mean = x * (1 + std**2 / (2 * sigma) * dt) + v * (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
    return mean, std * math.sqrt(-dt)


def wan_step(x, v, sigmas, i, eta):
    """The update of Flow-GRPO's Wan script."""
    sigma, dt = sigmas[i], sigmas[i + 1] - sigmas[i]
    std = eta * (sigmas[-1] + (sigmas[1] - sigmas[-1]) * sigma)
    mean = x * (1 + std**2 / (2 * sigma) * dt) + v * (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
    return mean, std * math.sqrt(-dt)


def dance_step(x, v, sigmas, i, eta):
    """DanceGRPO's published update."""
    sigma, dsigma = sigmas[i], sigmas[i + 1] - sigmas[i]
    clean = x - sigma * v
    score = -(x - (1 - sigma) * clean) / sigma**2
    return x + dsigma * v - 0.5 * eta**2 * score * dsigma, eta * math.sqrt(-dsigma)


def cps_step(x, v, sigmas, i, eta):
    """The published update of coefficients-preserving sampling."""
    sigma, sigma_next = sigmas[i], sigmas[i + 1]
    std = sigma_next * math.sin(eta * math.pi / 2)
    clean, noise = x - sigma * v, x + (1 - sigma) * v
    return (1 - sigma_next) * clean + math.sqrt(sigma_next**2 - std**2) * noise, std


def sage_step(x, v, sigmas, i, eta):
    """SAGE-GRPO's published update, for tables on which it is defined."""
    sigma, sigma_next = sigmas[i], sigmas[i + 1]
    dt = sigma_next - sigma
    variance = eta**2 * (dt + math.log((1 - sigma_next) / (1 - min(sigma, 0.997))))
    score = -(x + (1 - sigma) * v) / sigma
    return x + dt * v + 0.5 * variance * score, math.sqrt(variance)


def ddim_step(x, v, sigmas, i, eta):
    """DDIM's published update of a variance-preserving state, from that of flow matching and back."""
    (a, b, size), (a_next, b_next, size_next) = (
        ((1 - s) / math.hypot(1 - s, s), s / math.hypot(1 - s, s), math.hypot(1 - s, s)) for s in sigmas[i : i + 2]
    )
    epsilon = x + (1 - sigmas[i]) * v
    # The clean prediction is published as (z - b epsilon) / a, which nothing is at a = 0.
    clean = (x / size - b * epsilon) / a if a else x - v
    std = eta * math.sqrt(b_next**2 / b**2 * (1 - a**2 / a_next**2))
    mean = a_next * clean + math.sqrt(b_next**2 - std**2) * epsilon
    return mean * size_next, std * size_next


def precise_step(x, v, sigmas, i, eta):
    """The reverse SDE of Flow-GRPO, integrated in 40,000 short steps that hold the predicted clean latent fixed.

    With x = (1 - s) c + n, the noise n has the drift g² n / (2 s²) + n / s in falling s, and the diffusion g.
    """
    sigma, sigma_next = sigmas[i], sigmas[i + 1]
    clean, noise = x - sigma * v, sigma * (x + (1 - sigma) * v)
    if sigma == 1.0:
        return (1 - sigma_next) * clean, sigma_next
    scale, variance, count = 1.0, 0.0, 40_000
    # Equal steps of the logarithm of the signal-to-noise ratio are short at both ends.
    ends = [math.log(s / (1 - s)) for s in (sigma, max(sigma_next, 1e-9))]
    levels = [1 / (1 + math.exp(-(ends[0] + (ends[1] - ends[0]) * k / count))) for k in range(count + 1)]
    for s, s_next in pairwise(levels):
        middle, ds = 0.5 * (s + s_next), s - s_next
        g2 = eta**2 * middle / (1 - middle)
        factor = math.exp(-(g2 / (2 * middle**2) + 1 / middle) * ds)
        scale, variance = scale * factor, variance * factor**2 + g2 * ds
    return (1 - sigma_next) * clean + scale * noise, math.sqrt(variance) if sigma_next else 0.0


PUBLISHED = {
    "flow_sde": flow_grpo_step,
    "wan_sde": wan_step,
    "dance_sde": dance_step,
    "cps": cps_step,
    "sage": sage_step,
    "ddim": ddim_step,
    "precise": precise_step,
}
ROUNDING = {"precise": {"rel": 2e-4, "abs": 1e-6}}


@pytest.mark.parametrize("name", STOCHASTIC)
@pytest.mark.parametrize("sigmas", [SD3, shifted_sigmas(20, 5.0), shifted_sigmas(6, 1.0)], ids=len)
def test_every_method_is_the_unified_step(name: str, sigmas: tuple[float, ...]) -> None:
    x, v = draw(0), draw(1)
    for i in range(len(sigmas) - 1):
        c = Kernel(name, 0.6).coefficients(sigmas, i)
        mean, std = PUBLISHED[name](x.double(), v.double(), sigmas, i, 0.6)
        assert c.std == pytest.approx(std, **ROUNDING.get(name, {"rel": 1e-9, "abs": 1e-15}))
        got = step(v, x, c, noise=torch.zeros_like(x)).mean
        torch.testing.assert_close(got.double(), mean, rtol=0, atol=2e-4 if name in ROUNDING else 1e-6)


@pytest.mark.parametrize("name", list(KERNELS))
def test_without_noise_every_kernel_is_the_euler_step(name: str) -> None:
    x, v = draw(2), draw(3)
    for i in range(len(SD3) - 1):
        c = Kernel(name, None if name == "ode" else 0.0).coefficients(SD3, i)
        taken = step(v, x, c)
        assert c.std == 0.0
        assert taken.log_prob.isnan().all()
        assert (taken.noise == 0).all()
        torch.testing.assert_close(taken.x_next, x + (SD3[i + 1] - SD3[i]) * v, rtol=0, atol=1e-6)


def test_excess_variance_of_one_step() -> None:
    """Flow and Dance add ``delta^2 g^2 / sigma (1 + g^2 / 4 sigma)`` to the variance, CPS nothing."""
    for i in range(1, len(SD3) - 1):
        delta, sigma = SD3[i] - SD3[i + 1], SD3[i]
        for name, g2 in (("flow_sde", 0.49 * sigma / (1 - sigma)), ("dance_sde", 0.49)):
            c = Kernel(name, 0.7).coefficients(SD3, i)
            excess = c.kappa**2 + c.std**2 - SD3[i + 1] ** 2
            assert excess == pytest.approx(delta**2 * g2 / sigma * (1 + g2 / (4 * sigma)), rel=1e-6)
        c = Kernel("cps", 0.7).coefficients(SD3, i)
        assert c.kappa**2 + c.std**2 == pytest.approx(SD3[i + 1] ** 2, abs=1e-15)
    late = Kernel("flow_sde", 0.7).coefficients(SD3, 8)
    assert math.hypot(late.kappa, late.std) == pytest.approx(0.240, abs=5e-4)
    assert late.kappa == pytest.approx(-0.082, abs=5e-4)


@pytest.mark.parametrize(
    ("name", "eta", "first", "last"),
    [
        ("flow_sde", 0.7, 0.057, 1.487),
        ("dance_sde", 0.3, 0.666, 1.931),
        ("cps", 0.7, 0.047, 34.3),
        ("sage", 0.7, 0.036, 1.96),
    ],
)
def test_gradient_scale_of_the_density(name: str, eta: float, first: float, last: float) -> None:
    kernel = Kernel(name, eta)
    scales = []
    for i in range(9):
        c = kernel.coefficients(SD3, i)
        scales.append(-jacobian(c.sigma, c.sigma_next, c.kappa) / c.std)
    assert scales == sorted(scales)
    assert scales[0] == pytest.approx(first, rel=0.01)
    assert scales[-1] == pytest.approx(last, rel=0.01)


def test_gradient_scale_of_the_released_cps_log_prob() -> None:
    steps = [Kernel("cps", 0.7).coefficients(SD3, i) for i in range(9)]
    scales = [2 * c.std * -jacobian(c.sigma, c.sigma_next, c.kappa) for c in steps]
    assert [scales[0], max(scales), scales[-1]] == pytest.approx([0.068, 0.216, 0.004], abs=5e-4)


def test_flow_sde_jacobian_is_a_constant_multiple_of_the_step_length() -> None:
    for i in range(10):
        c = Kernel("flow_sde", 0.7).coefficients(SD3, i)
        factor = 1.0 if i == 0 else 1.0 + 0.7**2 / 2
        assert jacobian(c.sigma, c.sigma_next, c.kappa) == pytest.approx(-factor * (SD3[i] - SD3[i + 1]))


@given(
    name=st.sampled_from(sorted(KERNELS)),
    eta=st.floats(0.0, 1.0),
    levels=st.tuples(st.floats(1e-3, 1.0), st.floats(0.0, 0.999)),
    first=st.booleans(),
)
def test_jacobian_is_the_derivative_of_the_mean(name, eta, levels, first) -> None:
    sigma, sigma_next = levels[0], levels[0] * levels[1]
    table = (sigma, sigma_next) if first else (1.0, (1.0 + sigma) / 2, sigma, sigma_next)
    if not all(a > b for a, b in pairwise(table)):
        return
    c = Kernel(name, None if name == "ode" else eta).coefficients(table, len(table) - 2)
    assert math.isfinite(c.std)
    assert math.isfinite(c.kappa)
    analytic = jacobian(c.sigma, c.sigma_next, c.kappa)
    assert analytic < 0
    v = torch.zeros(1, 1, requires_grad=True)
    step(v, torch.zeros(1, 1), c, x_next=torch.zeros(1, 1)).mean.sum().backward()
    assert v.grad is not None
    assert v.grad.item() == pytest.approx(analytic, rel=1e-4, abs=1e-6 * (1 + abs(c.kappa)))


def test_ddim_is_the_posterior_of_ddpm() -> None:
    """By hand, from a = .8 and b = .6 to a = .96 and b = .28: std² = .28² / .6² (1 - .8² / .96²) = .06654."""
    c = Kernel("ddim").coefficients((0.6 / 1.4, 0.28 / 1.24, 0.0), 0)
    assert c.std * 1.24 == pytest.approx(math.sqrt(0.0665432))
    assert c.kappa * 1.24 == pytest.approx(math.sqrt(0.0784 - 0.0665432))
    assert Kernel("ddim", 0.5).coefficients((0.6 / 1.4, 0.28 / 1.24, 0.0), 0).std == pytest.approx(0.5 * c.std)
    first, last = (Kernel("ddim").coefficients((1.0, 0.5, 0.0), i) for i in (0, 1))
    assert (first.std, first.kappa) == (0.5, 0.0)
    assert (last.std, last.kappa) == (0.0, 0.0)


def test_precise_holds_ddpm_and_keeps_the_size_of_the_noise() -> None:
    """An eta of the square root of 2 is DDPM's posterior, and mean and noise have the next level's size together."""
    for i in range(len(SD3) - 1):
        found, posterior = (
            Kernel(name, eta).coefficients(SD3, i) for name, eta in (("precise", 2**0.5), ("ddim", 1.0))
        )
        assert (found.std, found.kappa) == pytest.approx((posterior.std, posterior.kappa), abs=1e-12)
        other = Kernel("precise", 0.7).coefficients(SD3, i)
        assert other.std**2 + other.kappa**2 == pytest.approx(SD3[i + 1] ** 2, abs=1e-15)
    # Two steps of one clean prediction are one long step: the noise that is left multiplies.
    kernel, table = Kernel("precise", 0.7), (0.9, 0.6, 0.2)
    first, second, both = (kernel.coefficients(*one) for one in ((table, 0), (table, 1), ((0.9, 0.2), 0)))
    assert first.kappa / 0.6 * second.kappa / 0.2 == pytest.approx(both.kappa / 0.2)


def test_flow_sde_noise_is_bounded_and_continuous_at_the_start() -> None:
    for start in (1.0, 1.0 - 1e-7, 0.9999, 0.999, 0.98):
        c = Kernel("flow_sde", 0.7).coefficients((start, 0.96, 0.5, 0.0), 0)
        assert c.std <= 0.7 * math.sqrt(start) + 1e-12
    exact = Kernel("flow_sde", 0.7).coefficients((1.0, 0.96, 0.0), 0)
    assert exact.std == pytest.approx(0.7, abs=1e-12)
    near = Kernel("flow_sde", 0.7).coefficients((1.0 - 1e-7, 0.96, 0.0), 0)
    assert near.std == pytest.approx(exact.std, abs=1e-5)
    low = Kernel("flow_sde", 0.7).coefficients((0.6, 0.5, 0.0), 0)
    assert low.std**2 == pytest.approx(0.49 * 0.1 * 0.6 / 0.4)


def test_sage_variance_is_never_negative_on_a_fine_table() -> None:
    table = shifted_sigmas(1000, 3.0)
    steps = [Kernel("sage", 0.7).coefficients(table, i) for i in range(1000)]
    assert all(math.isfinite(c.std) and c.std >= 0 for c in steps)
    capped = [c for c in steps if c.sigma_next >= SAGE_SIGMA_CAP]
    assert len(capped) == 8
    assert all(c.std == 0 for c in capped)
    assert all(c.std > 0 for c in steps if c.sigma <= SAGE_SIGMA_CAP)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", STOCHASTIC)
def test_scoring_a_stored_step_again_is_bit_equal(name: str, storage: torch.dtype) -> None:
    x, v = draw(4, dtype=storage), draw(5, dtype=storage)
    for i in range(8):
        c = Kernel(name).coefficients(SD3, i)
        sampled = step(v, x, c, noise=draw(10 + i))
        again = step(v, x, c, x_next=sampled.x_next)
        assert sampled.x_next.dtype == storage
        assert torch.equal(sampled.log_prob, again.log_prob)
        assert torch.equal(sampled.noise, again.noise)
        assert sampled.log_prob.dtype == torch.float32


def test_storage_dtype_can_differ_from_the_state() -> None:
    c = Kernel("flow_sde").coefficients(SD3, 2)
    wide = step(draw(5), draw(4), c, noise=draw(6))
    narrow = step(draw(5), draw(4), c, noise=draw(6), dtype=torch.bfloat16)
    assert torch.equal(narrow.x_next, wide.x_next.bfloat16())
    assert not torch.equal(narrow.noise, wide.noise)
    torch.testing.assert_close(wide.noise, draw(6), rtol=0, atol=1e-5)
    torch.testing.assert_close(narrow.mean + narrow.std * narrow.noise, narrow.x_next.float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_log_prob_is_the_mean_reduced_gaussian_density(name: str) -> None:
    x, v = draw(7), draw(8)
    c = Kernel(name).coefficients(SD3, 3)
    sampled = step(v, x, c, noise=draw(9))
    density = torch.distributions.Normal(sampled.mean.double(), c.std)
    expected = density.log_prob(sampled.x_next.double()).flatten(1).mean(1)
    torch.testing.assert_close(sampled.log_prob.double(), expected, rtol=1e-6, atol=1e-6)


def test_log_prob_gradient_is_the_score_of_the_policy() -> None:
    """``d log_prob / d v = J noise / (std D)``: the action is data, the gradient flows through the mean."""
    x = draw(11)
    for name in STOCHASTIC:
        c = Kernel(name).coefficients(SD3, 4)
        v = draw(12).requires_grad_()
        sampled = step(v, x, c, noise=draw(13))
        sampled.log_prob.sum().backward()
        scale = jacobian(c.sigma, c.sigma_next, c.kappa) / (c.std * x[0].numel())
        assert v.grad is not None
        torch.testing.assert_close(v.grad, scale * sampled.noise, rtol=1e-4, atol=1e-7)
        assert not sampled.x_next.requires_grad


def shifted_policy(name: str, i: int, scale: float) -> tuple[Coefficients, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A transition sampled by an old policy, and the float64 means of the old and of a moved one."""
    x, v = draw(20).double(), draw(21).double()
    c = Kernel(name).coefficients(SD3, i)
    old = (1 - c.sigma_next) * (x - c.sigma * v) + c.kappa * (x + (1 - c.sigma) * v)
    new = old + scale * draw(22).double()
    return c, old, new, old + c.std * draw(23).double()


@pytest.mark.parametrize("name", STOCHASTIC)
def test_log_ratio_is_the_difference_of_log_densities(name: str) -> None:
    for i, scale in ((0, 1e-2), (4, 1e-3), (8, 1e-4)):
        c, old, new, action = shifted_policy(name, i, scale)
        direct = log_ratio(new - old, (action - old) / c.std, c.std)
        log_prob = [torch.distributions.Normal(m, c.std).log_prob(action) for m in (new, old)]
        expected = (log_prob[0] - log_prob[1]).flatten(1).mean(1)
        torch.testing.assert_close(direct.double(), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_guard_form_is_the_debiased_scaled_log_ratio(name: str) -> None:
    """RatioNorm, ``(log_prob - log_prob_old + mean(d^2) / 2 s^2) s``, is ``mean(noise d)``."""
    c, old, new, action = shifted_policy(name, 5, 1e-2)
    noise, shift = (action - old) / c.std, new - old
    log_prob = [torch.distributions.Normal(m, c.std).log_prob(action).flatten(1).mean(1) for m in (new, old)]
    bias = shift.square().flatten(1).mean(1) / (2 * c.std**2)
    expected = torch.exp((log_prob[0] - log_prob[1] + bias) * c.std)
    got = torch.exp(log_ratio(shift, noise, c.std, form="guard"))
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=0)


def test_released_cps_form_is_a_scaled_density() -> None:
    c, old, new, action = shifted_policy("cps", 5, 1e-2)
    noise = (action - old) / c.std
    released = log_ratio(new - old, noise, c.std, form="cps_released")
    expected = ((action - old).square() - (action - new).square()).flatten(1).mean(1)
    torch.testing.assert_close(released.double(), expected, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(released, 2 * c.std**2 * log_ratio(new - old, noise, c.std))


@pytest.mark.parametrize("form", ["gaussian", "guard", "cps_released"])
def test_rows_of_the_log_ratio_do_not_mix(form: str) -> None:
    shift, noise = 0.1 * draw(30), draw(31)
    whole = log_ratio(shift, noise, 0.3, form=form)
    assert whole.shape == (SHAPE[0],)
    for row in range(SHAPE[0]):
        alone = log_ratio(shift[row : row + 1], noise[row : row + 1], 0.3, form=form)
        torch.testing.assert_close(whole[row : row + 1], alone)
    assert log_ratio(torch.zeros(SHAPE), noise, 0.3, form=form).tolist() == [0.0] * SHAPE[0]


@pytest.mark.parametrize(
    ("form", "weight_by", "low", "high"),
    [
        ("gaussian", "none", 24.0, 28.0),
        ("guard", "none", 7.0, 10.0),
        ("guard", "delta", 1.2, 1.3),
        ("guard", "j", 1, 1.001),
    ],
)
def test_spread_of_the_gradient_over_the_steps(form: str, weight_by: str, low: float, high: float) -> None:
    """Flow-GRPO's gradient varies 26-fold over SD3's first nine steps; GRPO-Guard's hardly at all."""
    x, noise, norms = draw(40), draw(41), []
    for i in range(9):
        c = Kernel("flow_sde", 0.7).coefficients(SD3, i)
        old = step(draw(42), x, c, noise=noise)
        v = draw(42).requires_grad_()
        shift = step(v, x, c, x_next=old.x_next).mean - old.mean
        weight = {"none": 1.0, "delta": 1 / (c.sigma - c.sigma_next), "j": guard_weight(c)}[weight_by]
        (weight * log_ratio(shift, old.noise, c.std, form=form).sum()).backward()
        assert v.grad is not None
        norms.append(v.grad.norm().item())
    assert low <= max(norms) / min(norms) <= high


def test_guard_weight_evens_every_kernel() -> None:
    for name in STOCHASTIC:
        for i in range(9):
            c = Kernel(name).coefficients(SD3, i)
            scale = abs(jacobian(c.sigma, c.sigma_next, c.kappa))
            assert guard_weight(c) * scale == pytest.approx(1.0)


def test_a_deterministic_step_ignores_noise_and_keeps_a_given_state() -> None:
    x, v = draw(50), draw(51)
    c = Kernel("cps", 0.8).coefficients(SD3, 9)
    assert c.std == 0.0
    assert torch.equal(step(v, x, c, noise=draw(52)).x_next, step(v, x, c).x_next)
    kept = step(v, x, c, x_next=draw(53))
    assert torch.equal(kept.x_next, draw(53))
    assert kept.log_prob.isnan().all()


def test_errors_say_what_to_write() -> None:
    with pytest.raises(ValueError, match="flow_sde"):
        Kernel("flow")
    with pytest.raises(ValueError, match=r"kernel 'mine': step 0 from 1 to .* has std nan"):
        Kernel("mine", function=lambda sigmas, i: (math.nan, 0.0)).coefficients(SD3, 0)
    for i in (-1, 10):
        with pytest.raises(ValueError, match="use 0 to 9"):
            Kernel("ode").coefficients(SD3, i)
    with pytest.raises(ValueError, match="falling"):
        Kernel("ode").coefficients((0.5, 0.5), 0)
    c = Kernel("flow_sde").coefficients(SD3, 1)
    with pytest.raises(ValueError, match="noise"):
        step(draw(0), draw(1), c)
    with pytest.raises(ValueError, match="not both"):
        step(draw(0), draw(1), c, noise=draw(2), x_next=draw(3))
    with pytest.raises(ValueError, match="velocity has shape"):
        step(draw(0)[:1], draw(1), c, noise=draw(2))
    with pytest.raises(ValueError, match="deterministic"):
        log_ratio(draw(0), draw(1), 0.0)
    with pytest.raises(ValueError, match="guard"):
        log_ratio(draw(0), draw(1), 0.1, form="ratio_norm")
    with pytest.raises(ValueError, match="noise has"):
        log_ratio(draw(0), draw(1)[:1], 0.1)
