"""Deterministic solvers for the steps that are not trained.

Both solvers are pure functions of the velocity, the state and an explicit `History`. So a tree executor can keep one
history per node, index it when nodes branch, and start again from any stored state.

For ``x_sigma = (1 - sigma) x0 + sigma n`` the first-order DPM-Solver++ step is the Euler step: with
``lam = log(1 - sigma) - log(sigma)`` and ``h = lam_next - lam``, ``(1 - sigma_next)(1 - exp(-h))`` equals
``1 - sigma_next / sigma``. In this form, no term is infinite at ``sigma = 1`` or at the end.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor


@dataclass(frozen=True)
class History:
    """The data of the previous step that a multistep solver needs; empty at the start of a trajectory.

    Attributes:
        x0: [N, ...], float32, the clean prediction of the last evaluated state.
        lam: half log-SNR ``log(1 - sigma) - log(sigma)`` of that state; -inf at ``sigma = 1``.
    """

    x0: Tensor | None = None
    lam: float | None = None

    def select(self, index: Tensor) -> "History":
        """The history of the rows `index` [M] (integers, repeats allowed), for nodes that branch or are regrouped."""
        return self if self.x0 is None else History(self.x0[index], self.lam)


Solver = Callable[[Tensor, Tensor, float, float, History], Tensor]


def half_log_snr(sigma: float) -> float:
    """``log(1 - sigma) - log(sigma)`` for sigma in (0, 1]; -inf at 1."""
    return -math.inf if sigma >= 1.0 else math.log1p(-sigma) - math.log(sigma)


def euler(velocity: Tensor, x: Tensor, sigma: float, sigma_next: float, history: History) -> Tensor:
    """``x + (sigma_next - sigma) v``; first order, ignores the history."""
    return x + (sigma_next - sigma) * velocity


def dpmpp_2m(velocity: Tensor, x: Tensor, sigma: float, sigma_next: float, history: History) -> Tensor:
    """DPM-Solver++(2M), data prediction, midpoint form (arXiv:2211.01095, Algorithm 2).

    The step is ``r x + (1 - r) (m0 + (m0 - m1) / (2 r0))`` with ``r = sigma_next / sigma``. ``m0`` and ``m1`` are the
    current and the previous clean predictions. ``r0`` is the length of the previous step divided by the length of this
    step, both in half log-SNR. Without a history, the step is of first order. A previous state at ``sigma = 1`` is
    infinitely far away in half log-SNR, so it corrects nothing.
    """
    clean = x - sigma * velocity
    ratio = sigma_next / sigma
    target = clean
    if history.x0 is not None and history.lam is not None:
        lam = half_log_snr(sigma)
        last_step = lam - history.lam
        if not last_step > 0.0:
            raise ValueError(
                f"the history was observed at half log-SNR {history.lam:.4g}, this step starts at {lam:.4g}; "
                "carry the history of a noisier state, or an empty History()"
            )
        inverse_r0 = (half_log_snr(sigma_next) - lam) / last_step
        target = clean + 0.5 * inverse_r0 * (clean - history.x0)
    return ratio * x + (1.0 - ratio) * target


SOLVERS: dict[str, Solver] = {"euler": euler, "dpmpp_2m": dpmpp_2m}


def observe(velocity: Tensor, x: Tensor, sigma: float) -> History:
    """The history after an evaluation at `sigma`, also for a stochastic step, which no solver takes.

    Args:
        velocity: [N, ...], any float dtype.
        x: [N, ...], the state at which the velocity was evaluated.
        sigma: noise level in (0, 1].
    """
    return History(x.float() - sigma * velocity.float(), half_log_snr(sigma))


def named_solver(solver: str | Solver) -> Solver:
    """The solver of this name; a function is returned as it is.

    Raises:
        ValueError: if the solver is unknown.
    """
    if callable(solver):
        return solver
    if solver not in SOLVERS:
        raise ValueError(f"unknown solver '{solver}'; use one of {', '.join(SOLVERS)}")
    return SOLVERS[solver]


def called(solver: str | Solver) -> str:
    """The name of a solver in pictures."""
    while isinstance(solver, partial):
        solver = solver.func
    return solver if isinstance(solver, str) else getattr(solver, "__name__", "solver")


def solve(
    solver: str | Solver,
    velocity: Tensor,
    x: Tensor,
    sigma: float,
    sigma_next: float,
    history: History,
    last: bool = False,
) -> tuple[Tensor, History]:
    """One deterministic step, in float32.

    Args:
        solver: a key of `SOLVERS`, or a function with the signature of a `Solver`.
        velocity: [N, ...], the prediction at `x`, any float dtype.
        x: [N, ...], the state at `sigma`.
        sigma: noise level in (0, 1].
        sigma_next: next noise level, in [0, sigma). At 0 the result is exactly the clean prediction.
        history: history of the previous step; ``History()`` at the start.
        last: whether this is the final step of a trajectory, which is of first order.

    Returns:
        ``x_next`` [N, ...] float32, and the history for the next step.

    Raises:
        ValueError: if the solver is unknown, the noise levels do not decrease within [0, 1], or the history is not of a
            noisier state.
    """
    function = named_solver(solver)
    if not 0.0 <= sigma_next < sigma <= 1.0:
        raise ValueError(f"step from sigma {sigma} to {sigma_next}; sigmas must decrease within [0, 1]")
    current = observe(velocity, x, sigma)
    if sigma_next == 0.0 and current.x0 is not None:
        return current.x0, current
    used = History() if last else history
    return function(velocity.float(), x.float(), sigma, sigma_next, used), current
