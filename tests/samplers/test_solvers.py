"""Solvers against exact solutions of the probability-flow ODE."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from flowgrpo.samplers.schedules import shifted_sigmas
from flowgrpo.samplers.solvers import SOLVERS, History, observe, solve

MEAN, VARIANCE = 1.0, 0.25


def gaussian_velocity(x: Tensor, sigma: float) -> Tensor:
    """Exact velocity of data ``N(MEAN, VARIANCE)``."""
    spread = (1 - sigma) ** 2 * VARIANCE + sigma**2
    return -MEAN + (sigma - (1 - sigma) * VARIANCE) / spread * (x - (1 - sigma) * MEAN)


def gaussian_solution(x: Tensor, sigma: float, sigma_next: float) -> Tensor:
    """The ODE keeps the quantile: ``(x - (1 - sigma) MEAN) / std(sigma)`` is constant."""
    before, after = (math.sqrt((1 - s) ** 2 * VARIANCE + s**2) for s in (sigma, sigma_next))
    return (1 - sigma_next) * MEAN + after / before * (x - (1 - sigma) * MEAN)


def mixture_velocity(x: Tensor, sigma: float) -> Tensor:
    """Exact velocity of the data ``0.3 N(-1, 0.04) + 0.7 N(0.8, 0.16)``; nonlinear in x."""
    weights, means = torch.tensor([0.3, 0.7], dtype=x.dtype), torch.tensor([-1.0, 0.8], dtype=x.dtype)
    variances = torch.tensor([0.04, 0.16], dtype=x.dtype)
    spread = (1 - sigma) ** 2 * variances + sigma**2
    centred = x[..., None] - (1 - sigma) * means
    posterior = torch.softmax(weights.log() - 0.5 * spread.log() - centred**2 / (2 * spread), dim=-1)
    velocities = -means + (sigma - (1 - sigma) * variances) / spread * centred
    return (posterior * velocities).sum(-1)


def runge_kutta(velocity, x: Tensor, sigma: float, sigma_next: float, num_steps: int) -> Tensor:
    h = (sigma_next - sigma) / num_steps
    for k in range(num_steps):
        s = sigma + k * h
        k1 = velocity(x, s)
        k2 = velocity(x + h / 2 * k1, s + h / 2)
        k3 = velocity(x + h / 2 * k2, s + h / 2)
        k4 = velocity(x + h * k3, s + h)
        x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return x


def integrate(name: str, velocity, x: Tensor, sigmas, last: bool = False) -> Tensor:
    history = History()
    for i, (sigma, sigma_next) in enumerate(pairwise(sigmas)):
        final = last and i == len(sigmas) - 2
        x, history = solve(name, velocity(x, sigma), x, sigma, sigma_next, history, final)
    return x


def log_snr_table(num_steps: int, start: float, end: float) -> list[float]:
    low, high = (math.log((1 - s) / s) for s in (start, end))
    return [1 / (1 + math.exp(low + (high - low) * k / num_steps)) for k in range(num_steps + 1)]


START = torch.linspace(-2.0, 2.0, 9).reshape(9, 1)


@pytest.mark.parametrize(("name", "order"), [("euler", 1.0), ("dpmpp_2m", 2.0)])
@pytest.mark.parametrize("problem", ["gaussian", "mixture"])
def test_order_of_convergence(name: str, order: float, problem: str) -> None:
    start, end = 0.95, 0.1
    if problem == "gaussian":
        velocity, exact = gaussian_velocity, gaussian_solution(START.double(), start, end)
    else:
        velocity, exact = mixture_velocity, runge_kutta(mixture_velocity, START.double(), start, end, 400)
    counts = (16, 32, 64, 128)
    errors = [
        (integrate(name, velocity, START, log_snr_table(n, start, end)).double() - exact).abs().max().item()
        for n in counts
    ]
    slope = math.log(errors[0] / errors[-1]) / math.log(counts[-1] / counts[0])
    assert slope == pytest.approx(order, abs=0.25)


def test_the_reference_solution_solves_the_ode() -> None:
    numeric = runge_kutta(gaussian_velocity, START.double(), 0.95, 0.1, 200)
    torch.testing.assert_close(numeric, gaussian_solution(START.double(), 0.95, 0.1), rtol=0, atol=1e-8)


@pytest.mark.parametrize("problem", ["gaussian", "mixture"])
def test_second_order_is_closer_over_the_whole_range(problem: str) -> None:
    velocity = gaussian_velocity if problem == "gaussian" else mixture_velocity
    sigmas = shifted_sigmas(12, 3.0)
    exact = runge_kutta(velocity, START.double(), 1.0, 0.0, 1000)
    errors = {
        name: (integrate(name, velocity, START, sigmas, last=True).double() - exact).abs().mean().item()
        for name in SOLVERS
    }
    assert errors["dpmpp_2m"] < 0.7 * errors["euler"]


def test_dpmpp_2m_is_the_published_formula() -> None:
    """``(s'/s) x - (1 - s')(e^-h - 1)(m0 + (m0 - m1) / (2 r0))`` with ``h`` and ``r0`` in half log-SNR."""
    x, v, m1 = (torch.randn(4, 3, generator=torch.Generator().manual_seed(k)) for k in range(3))
    before, sigma, sigma_next = 0.9, 0.7, 0.4
    lam_before, lam, lam_next = (math.log(1 - s) - math.log(s) for s in (before, sigma, sigma_next))
    h, h0 = lam_next - lam, lam - lam_before
    m0 = x - sigma * v
    factor = -(1 - sigma_next) * (math.exp(-h) - 1)
    expected = sigma_next / sigma * x + factor * (m0 + 0.5 * (m0 - m1) / (h0 / h))
    got, history = solve("dpmpp_2m", v, x, sigma, sigma_next, History(m1, lam_before))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(history.x0, m0)
    assert history.lam == pytest.approx(lam)


@pytest.mark.parametrize("history", [History(), "last"])
@pytest.mark.parametrize(("sigma", "sigma_next"), [(1.0, 0.9), (0.7, 0.2), (0.3, 0.0)])
def test_first_order_is_the_euler_step(history, sigma: float, sigma_next: float) -> None:
    x, v = (torch.randn(4, 3, generator=torch.Generator().manual_seed(k)) for k in range(2))
    last = history == "last"
    used = History(torch.ones(4, 3), -50.0) if last else history
    euler, _ = solve("euler", v, x, sigma, sigma_next, History())
    multistep, _ = solve("dpmpp_2m", v, x, sigma, sigma_next, used, last)
    torch.testing.assert_close(multistep, euler, rtol=0, atol=1e-6)
    torch.testing.assert_close(euler, x + (sigma_next - sigma) * v, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", sorted(SOLVERS))
@pytest.mark.parametrize("sigmas", [(1.0, 0.0), (1.0, 0.5, 0.0), (1.0, 0.9999999, 1e-7, 0.0)], ids=len)
@pytest.mark.parametrize("last", [True, False])
def test_the_trajectory_ends_at_the_clean_prediction(name: str, sigmas, last: bool) -> None:
    x = START
    history = History()
    for i, (sigma, sigma_next) in enumerate(pairwise(sigmas)):
        v = gaussian_velocity(x, sigma)
        clean = x - sigma * v
        x, history = solve(name, v, x, sigma, sigma_next, history, last and i == len(sigmas) - 2)
        assert x.isfinite().all()
    assert torch.equal(x, clean)


def test_a_state_at_full_noise_corrects_nothing_after_it() -> None:
    x, v = (torch.randn(4, 3, generator=torch.Generator().manual_seed(k)) for k in range(2))
    seen = observe(v, x, 1.0)
    assert seen.lam == -math.inf
    after, _ = solve("dpmpp_2m", v, x, 0.9, 0.8, seen)
    plain, _ = solve("dpmpp_2m", v, x, 0.9, 0.8, History())
    assert torch.equal(after, plain)


def test_observed_history_is_that_of_a_solver_step() -> None:
    """A stochastic step leaves the same memory behind as a deterministic one."""
    x, v = (torch.randn(4, 3, generator=torch.Generator().manual_seed(k)).bfloat16() for k in range(2))
    _, solved = solve("dpmpp_2m", v, x, 0.8, 0.7, History())
    seen = observe(v, x, 0.8)
    assert seen.lam == solved.lam
    assert seen.x0 is not None
    assert solved.x0 is not None
    assert torch.equal(seen.x0, solved.x0)
    assert seen.x0.dtype == torch.float32


def test_branched_rows_continue_as_if_alone() -> None:
    x, v, v2 = (torch.randn(3, 5, generator=torch.Generator().manual_seed(k)) for k in range(3))
    index = torch.tensor([2, 0, 0, 1])
    x2, history = solve("dpmpp_2m", v, x, 0.9, 0.8, History())
    whole, _ = solve("dpmpp_2m", v2, x2, 0.8, 0.6, history)
    branched, _ = solve("dpmpp_2m", v2[index], x2[index], 0.8, 0.6, history.select(index))
    torch.testing.assert_close(branched, whole[index], rtol=0, atol=0)
    assert History().select(index) == History()


def test_errors_say_what_to_write() -> None:
    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="euler, dpmpp_2m"):
        solve("heun", x, x, 1.0, 0.5, History())
    for sigma, sigma_next in ((0.5, 0.5), (0.5, 0.6), (1.1, 0.5), (0.5, -0.1), (math.nan, 0.1)):
        with pytest.raises(ValueError, match="must decrease"):
            solve("euler", x, x, sigma, sigma_next, History())
    with pytest.raises(ValueError, match="noisier"):
        solve("dpmpp_2m", x, x, 0.5, 0.4, observe(x, x, 0.3))
