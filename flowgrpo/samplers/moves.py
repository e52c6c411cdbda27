"""How the executor moves states: the Gaussian steps of latents. `unmasking` has the steps of masked tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .kernels import Coefficients, step
from .solvers import History, Solver, observe, solve
from .transitions import narrowed


@dataclass(frozen=True)
class Moved:
    """Moved next states of E edges.

    Attributes:
        x: [E, ...] next states, storage dtype.
        log_prob: [E] float32 log-density of each edge.
        token_log_prob: [E, L] float32 log-prob of each token that the edge reveals, 0 elsewhere; None for latents.
    """

    x: Tensor
    log_prob: Tensor
    token_log_prob: Tensor | None = None


class Moves(Protocol):
    """The first states of a rollout, and one step of some states. All randomness follows from the keys.

    Attributes:
        keeps_states: whether a rollout keeps the state of every node, because states are small.
    """

    keeps_states: bool

    def start(self, keys: Sequence[int], common: Sequence[int], spread: float | None) -> Tensor:
        """[len(keys), ...] first states.

        Args:
            keys: a seed for each state.
            common: a seed for each prompt, for what its states share.
            spread: see `Plan.root_spread`.
        """

    def sample(
        self,
        prediction: Tensor,
        x: Tensor,
        coefficients: Coefficients,
        keys: Sequence[int],
        common: Sequence[int],
        spread: float | None,
        shift: Tensor | None,
    ) -> Moved:
        """A stochastic step of E edges.

        Args:
            prediction: [E, ...] the model's prediction at the states.
            x: [E, ...] the states from which the edges start.
            coefficients: the transition.
            keys: a seed for each edge.
            common: a seed for each parent, for what its children share.
            spread: see `StepPlan.spread`.
            shift: [E, ...] a guide's shift of the noise, or None.
        """

    def solve(
        self,
        solver: str | Solver,
        prediction: Tensor,
        x: Tensor,
        sigma: float,
        sigma_next: float,
        history: History,
        last: bool,
    ) -> Tensor:
        """[N, ...] next states of a deterministic step, storage dtype; the arguments are as for `solvers.solve`."""

    def observe(self, prediction: Tensor, x: Tensor, sigma: float) -> History:
        """What a later deterministic step needs of this evaluation."""

    def kept(self, prediction: Tensor) -> Tensor:
        """[N, ...] what a record keeps of the prediction of the policy that samples."""


class GaussianMoves:
    """Moves of latents: noise of the kernels, and the solvers.

    Args:
        shape: shape of one state.
        dtype: storage dtype of the states.
        device: device of the states.
        initial_std: standard deviation of the initial noises.
    """

    keeps_states = False

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, initial_std: float) -> None:
        self.shape, self.dtype, self.device, self.initial_std = tuple(shape), dtype, device, initial_std

    def start(self, keys: Sequence[int], common: Sequence[int], spread: float | None) -> Tensor:
        """Initial noises."""
        return (self.initial_std * self._noise(keys, common, spread)).to(self.dtype)

    def sample(
        self,
        prediction: Tensor,
        x: Tensor,
        coefficients: Coefficients,
        keys: Sequence[int],
        common: Sequence[int],
        spread: float | None,
        shift: Tensor | None,
    ) -> Moved:
        """A step of the kernel."""
        noise = self._noise(keys, common, spread)
        if shift is not None:
            noise = noise + shift
        taken = step(prediction, x, coefficients, noise=noise, dtype=self.dtype)
        return Moved(taken.x_next, taken.log_prob)

    def solve(
        self,
        solver: str | Solver,
        prediction: Tensor,
        x: Tensor,
        sigma: float,
        sigma_next: float,
        history: History,
        last: bool,
    ) -> Tensor:
        """A step of the solver."""
        return solve(solver, prediction, x, sigma, sigma_next, history, last=last)[0].to(self.dtype)

    def observe(self, prediction: Tensor, x: Tensor, sigma: float) -> History:
        """The clean prediction, for solvers of several steps."""
        return observe(prediction, x, sigma)

    def kept(self, prediction: Tensor) -> Tensor:
        """The prediction, from which the ratio follows."""
        return narrowed(prediction)

    def _noise(self, keys: Sequence[int], common: Sequence[int], spread: float | None) -> Tensor:
        """Noise of siblings [len(keys), ...]: independent, or partly shared among the siblings of one parent."""
        own = draw_noise(self.shape, keys, self.device)
        if spread is None:
            return own
        shared = draw_noise(self.shape, common, self.device)
        repeated = shared.repeat_interleave(len(keys) // len(common), dim=0)
        return (repeated + spread * own) / (1.0 + spread**2) ** 0.5


def draw_noise(shape: Sequence[int], keys: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Standard normal noise [len(keys), *shape], float32; each row is a function of its key alone."""
    rows = [torch.randn(tuple(shape), generator=torch.Generator().manual_seed(key)) for key in keys]
    return torch.stack(rows).to(device)
