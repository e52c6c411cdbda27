"""Transition kernels: every stochastic denoising step is one Gaussian with two numbers.

Notation: ``x_sigma = (1 - sigma) x0 + sigma n``, the model predicts the velocity ``v = n - x0``, and
``x0_hat = x - sigma v``, ``x1_hat = x + (1 - sigma) v`` are the predicted clean and noise end points. A step
from ``sigma`` to ``sigma_next < sigma`` (``delta`` is their difference) is, for every published sampler,

    mean = (1 - sigma_next) x0_hat + kappa x1_hat,        x_next = mean + std * noise,

so a kernel is only the pair ``(std, kappa)``. Kernels of a reverse SDE (Flow, Dance, Wan, SAGE) have
``kappa = sigma_next - std**2 / (2 sigma)``; CPS, DDIM and Precise have ``kappa**2 + std**2 = sigma_next**2``.

Log-probabilities are averaged, not summed, over the ``D`` elements of a latent, as in the code of every paper. So a
ratio here is the true transition ratio to the power ``1/D``, and clip ranges are given on this scale.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..parts.ranges import NotNegative, Share

SAGE_SIGMA_CAP = 0.997
_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


@dataclass(frozen=True)
class Coefficients:
    """One transition, as float64 scalars shared by every sample of the step.

    Attributes:
        std: standard deviation of one element of ``x_next``, step size included; 0 for a deterministic step.
        kappa: weight of the predicted noise in the mean.
        sigma: noise level at which the step starts, in (0, 1].
        sigma_next: noise level at which the step ends, in [0, sigma).
    """

    std: float
    kappa: float
    sigma: float
    sigma_next: float


def _reverse_sde(sigma: float, sigma_next: float, variance: float) -> tuple[float, float]:
    return math.sqrt(variance), sigma_next - variance / (2.0 * sigma)


def ode(sigmas: Sequence[float], i: int) -> tuple[float, float]:
    """``(std, kappa)`` of the probability-flow ODE, the Euler step."""
    return 0.0, sigmas[i + 1]


def flow_sde(sigmas: Sequence[float], i: int, *, eta: NotNegative = 0.7) -> tuple[float, float]:
    """``(std, kappa)`` of Flow-GRPO (arXiv:2505.05470): ``std**2 = eta**2 delta sigma / (1 - sigma)``.

    The formula diverges at ``sigma = 1``. Where sigma equals 1, the released code uses ``sigmas[1]`` in the
    denominator. So the released code still explodes for a table that starts at 0.9999. Here the denominator of the
    first step is ``max(1 - sigma, delta)``. At sigma 1 it gives the released code's number (``std = eta``). Below 1 it
    is continuous, with ``std <= eta sqrt(sigma)``, and for a table that starts lower it is the plain formula. Later
    steps are unchanged.

    Options:
        eta: noise level; 0 makes the step deterministic.
    """
    sigma, sigma_next = sigmas[i], sigmas[i + 1]
    delta = sigma - sigma_next
    denominator = max(1.0 - sigma, delta) if i == 0 else 1.0 - sigma
    return _reverse_sde(sigma, sigma_next, eta**2 * delta * sigma / denominator)


def dance_sde(sigmas: Sequence[float], i: int, *, eta: NotNegative = 0.3) -> tuple[float, float]:
    """``(std, kappa)`` of DanceGRPO, BranchGRPO (arXiv:2505.07818, 2509.06040): constant diffusion.

    Options:
        eta: noise level; 0 makes the step deterministic.
    """
    sigma, sigma_next = sigmas[i], sigmas[i + 1]
    return _reverse_sde(sigma, sigma_next, eta**2 * (sigma - sigma_next))


def wan_sde(sigmas: Sequence[float], i: int, *, eta: NotNegative = 1.0) -> tuple[float, float]:
    """``(std, kappa)`` of Flow-GRPO's Wan script: diffusion linear in ``sigma``.

    The diffusion is ``sigmas[-1]`` at ``sigma = 0`` and ``sigmas[1]`` at ``sigma = 1``. The script has no noise level;
    here `eta` multiplies the diffusion, and 1 is the published sampler.

    Options:
        eta: factor of the diffusion; 1 is the published sampler.
    """
    sigma, sigma_next = sigmas[i], sigmas[i + 1]
    diffusion = eta * (sigmas[-1] + (sigmas[1] - sigmas[-1]) * sigma)
    return _reverse_sde(sigma, sigma_next, diffusion**2 * (sigma - sigma_next))


def cps(sigmas: Sequence[float], i: int, *, eta: Share = 0.7) -> tuple[float, float]:
    """``(std, kappa)`` of coefficients-preserving sampling (arXiv:2509.05952).

    ``std = sigma_next sin(eta pi/2)``, so the step to 0 is deterministic. The kernel preserves the coefficients of the
    interpolation, but not its marginal: every step draws a fixed share of the noise anew, even a very short step.

    Options:
        eta: angle by which the noise is turned, as a share of a right angle; 1 draws all of the noise anew.
    """
    angle = 0.5 * math.pi * eta
    return sigmas[i + 1] * math.sin(angle), sigmas[i + 1] * math.cos(angle)


def sage(sigmas: Sequence[float], i: int, *, eta: NotNegative = 0.7) -> tuple[float, float]:
    """``(std, kappa)`` of SAGE-GRPO (arXiv:2603.21872): Flow-GRPO's variance, integrated over the step.

    ``std**2 = eta**2 (ln[(1 - sigma_next) / (1 - sigma)] - delta)`` with ``sigma`` capped at 0.997. In a fine table, a
    step may also end above the cap. There the released code takes the root of a negative number. Here the variance is
    at least 0, so such a step is deterministic. All other steps are as published.

    Options:
        eta: noise level; 0 makes the step deterministic.
    """
    sigma, sigma_next = sigmas[i], sigmas[i + 1]
    integral = math.log((1.0 - sigma_next) / (1.0 - min(sigma, SAGE_SIGMA_CAP)))
    return _reverse_sde(sigma, sigma_next, max(0.0, eta**2 * (integral - (sigma - sigma_next))))


def ddim(sigmas: Sequence[float], i: int, *, eta: Share = 1.0) -> tuple[float, float]:
    """``(std, kappa)`` of DDIM (arXiv:2010.02502, Eq. 16) in the coordinates of flow matching.

    With the noise-to-signal ratio ``r = sigma / (1 - sigma)``: ``std**2 = eta**2 sigma_next**2 (1 - (r_next / r)**2)``,
    ``kappa**2 + std**2 = sigma_next**2``. With `eta` 1 this is the posterior of DDPM. The step to 0 is deterministic.

    Options:
        eta: noise level; 0 is the deterministic sampler, 1 the posterior of DDPM.
    """
    sigma, sigma_next = sigmas[i], sigmas[i + 1]
    shrunk = sigma_next * (1.0 - sigma) / ((1.0 - sigma_next) * sigma)
    std = eta * sigma_next * math.sqrt(1.0 - shrunk**2)
    return std, math.sqrt(max(0.0, sigma_next**2 - std**2))


def precise(sigmas: Sequence[float], i: int, *, eta: NotNegative = 1.5) -> tuple[float, float]:
    """``(std, kappa)`` of Precise (arXiv:2605.23522): Flow-GRPO's SDE, solved exactly for a fixed clean prediction.

    With the noise-to-signal ratio ``r = sigma / (1 - sigma)``: ``rho = (r_next / r)**(eta**2 / 2)``, ``std**2 =
    sigma_next**2 (1 - rho**2)``, ``kappa = sigma_next rho``. So the noise of a step has the size that the next level
    asks for, however long the step is. An eta of the square root of 2 is the posterior of DDPM. From ``sigma = 1`` all
    noise is drawn anew, and the step to 0 is deterministic.

    Options:
        eta: noise level; 0 makes the step deterministic. The released command has 1.5.
    """
    sigma, sigma_next = sigmas[i], sigmas[i + 1]
    rho = (sigma_next * (1.0 - sigma) / ((1.0 - sigma_next) * sigma)) ** (0.5 * eta**2)
    return sigma_next * math.sqrt(1.0 - rho**2), sigma_next * rho


KernelFunction = Callable[..., tuple[float, float]]

STOCHASTIC: dict[str, KernelFunction] = {
    kernel.__name__: kernel for kernel in (flow_sde, dance_sde, wan_sde, cps, sage, ddim, precise)
}
"""The kernels that a recipe may choose for its stochastic steps."""

KERNELS: dict[str, KernelFunction] = {"ode": ode, **STOCHASTIC}


@dataclass(frozen=True)
class Kernel:
    """A kernel with its noise level.

    Attributes:
        name: a key of `KERNELS`; or, with `function`, the name in pictures and messages.
        eta: noise level; None takes the default of the function.
        function: `(sigmas, i) -> (std, kappa)`, used in place of the function called `name`.
        exact: whether the step to level 0 can be scored and trained. A step of tokens can. A Gaussian step to 0 is too
            narrow for its storage.

    Raises:
        ValueError: if the name is unknown and there is no function.
    """

    name: str
    eta: float | None = None
    function: KernelFunction | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        if self.function is None and self.name not in KERNELS:
            raise ValueError(f"unknown kernel '{self.name}'; use one of {', '.join(KERNELS)}")

    def coefficients(self, sigmas: Sequence[float], i: int) -> Coefficients:
        """The transition of step `i` of a table of ``T + 1`` noise levels.

        Args:
            sigmas: the whole table, decreasing; kernels may look at its first and last levels.
            i: step in ``0 .. T - 1``, which goes from ``sigmas[i]`` to ``sigmas[i + 1]``.

        Raises:
            ValueError: if there is no such step, the levels do not decrease within [0, 1], or the kernel gives numbers
                that are not finite, or not two numbers.
        """
        if not 0 <= i < len(sigmas) - 1:
            raise ValueError(f"no step {i} in a table of {len(sigmas)} levels; use 0 to {len(sigmas) - 2}")
        levels = [float(sigma) for sigma in sigmas]
        if not 0.0 <= levels[i + 1] < levels[i] <= 1.0:
            raise ValueError(f"step {i}: sigma {levels[i]} to {levels[i + 1]}; use levels falling within [0, 1]")
        if self.function is not None:
            found = self.function(levels, i)
            try:
                std, kappa = map(float, found)
            except (TypeError, ValueError):
                raise ValueError(
                    f"kernel '{self.name}' has to give two numbers, (std, kappa); it gave {found!r}"
                ) from None
        else:
            function = KERNELS[self.name]
            std, kappa = function(levels, i) if self.eta is None else function(levels, i, eta=self.eta)
        if not (0.0 <= std < math.inf and math.isfinite(kappa)):
            raise ValueError(
                f"kernel '{self.name}': step {i} from {levels[i]:g} to {levels[i + 1]:g} has std {std} and kappa "
                f"{kappa}; give a finite std of at least 0, and a finite kappa"
            )
        return Coefficients(std=std, kappa=kappa, sigma=levels[i], sigma_next=levels[i + 1])


def jacobian(sigma: float, sigma_next: float, kappa: float) -> float:
    """``J = d mean / d velocity = -sigma (1 - sigma_next) + kappa (1 - sigma)``, one number for all elements.

    It is negative for every kernel. For Flow-SDE below ``sigma = 1`` it is ``-delta (1 + eta**2 / 2)``.
    """
    return -sigma * (1.0 - sigma_next) + kappa * (1.0 - sigma)


def guard_weight(coefficients: Coefficients) -> float:
    """GRPO-Guard's step weight ``1 / |J|`` (arXiv:2510.22319), which gives all steps gradients of one scale.

    The paper divides by ``delta``. For Flow-SDE, ``|J|`` is ``delta`` times the constant ``1 + eta**2 / 2`` (times 1 on
    the step from ``sigma = 1``). For the other kernels only ``1 / |J|`` cancels the step's scale.
    """
    return 1.0 / abs(jacobian(coefficients.sigma, coefficients.sigma_next, coefficients.kappa))


@dataclass(frozen=True)
class Step:
    """One scored transition of ``N`` samples.

    Attributes:
        x_next: [N, ...], storage dtype, detached: the state that the model sees next.
        mean: [N, ...], float32, with gradients to the velocity.
        std: standard deviation of every element; 0 for a deterministic step.
        noise: [N, ...], float32, detached: ``(x_next - mean) / std`` of the rounded state; 0 if std is 0.
        log_prob: [N], float32, mean over the elements of a sample; NaN where std is 0.
    """

    x_next: Tensor
    mean: Tensor
    std: float
    noise: Tensor
    log_prob: Tensor


def row_mean(values: Tensor) -> Tensor:
    """[N, ...] -> [N], the mean over all dimensions but the first, the batch."""
    return values.flatten(1).mean(dim=1) if values.ndim > 1 else values


def _mean(velocity: Tensor, x: Tensor, c: Coefficients) -> Tensor:
    return (1.0 - c.sigma_next) * (x - c.sigma * velocity) + c.kappa * (x + (1.0 - c.sigma) * velocity)


def step(
    velocity: Tensor,
    x: Tensor,
    coefficients: Coefficients,
    *,
    noise: Tensor | None = None,
    x_next: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Step:
    """Sample a transition (give `noise`) or score a stored one again (give `x_next`), in float32.

    A sampled state is rounded to its storage dtype *before* its log-probability is taken. In both modes the next state
    is data: gradients reach `velocity` only through the mean. So scoring the returned `x_next` with the same velocity
    gives the same log-probability, to the last bit.

    A deterministic step (std 0) has no density. Its `log_prob` is NaN, so that a use of it is noticed, and its `noise`
    is 0. For such a step, a given `noise` has no effect, and a given `x_next` is returned unchanged.

    Args:
        velocity: [N, ...], the model's prediction ``n - x0``, any float dtype.
        x: [N, ...], the state at ``coefficients.sigma``.
        coefficients: the transition, from `Kernel.coefficients`.
        noise: [N, ...], standard normal.
        x_next: [N, ...], the stored state at ``coefficients.sigma_next``.
        dtype: storage dtype of a sampled state; by default the dtype of `x`.

    Raises:
        ValueError: if shapes differ, both `noise` and `x_next` are given, or a stochastic step has neither.
    """
    for name, tensor in (("velocity", velocity), ("noise", noise), ("x_next", x_next)):
        if tensor is not None and tensor.shape != x.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, x has {tuple(x.shape)}; make them equal")
    if noise is not None and x_next is not None:
        raise ValueError("give noise (to sample) or x_next (to score a stored transition), not both")
    std = coefficients.std
    if std > 0.0 and noise is None and x_next is None:
        raise ValueError(f"a step with std {std:.3g} needs noise (to sample) or x_next (to score)")

    mean = _mean(velocity.float(), x.float(), coefficients)
    if x_next is None:
        sampled = mean if noise is None or std == 0.0 else mean + std * noise.float()
        action = sampled.detach().to(x.dtype if dtype is None else dtype)
    else:
        action = x_next.detach()
    if std == 0.0:
        undefined = torch.full((x.shape[0],), math.nan, dtype=torch.float32, device=x.device)
        return Step(action, mean, std, torch.zeros_like(mean), undefined)
    residual = (action.float() - mean) / std
    log_prob = -0.5 * row_mean(residual.square()) - math.log(std) - _LOG_SQRT_2PI
    return Step(action, mean, std, residual.detach(), log_prob)


RATIO_FORMS = ("gaussian", "guard", "cps_released")


def log_ratio(delta_mean: Tensor, noise: Tensor, std: float, *, form: str = "gaussian") -> Tensor:
    """Log of the policy ratio from the shift of the mean, without subtracting two log-probabilities.

    A difference of float32 log-probabilities has an error of 4e-8, which is 2 % of a clip range of 2e-6. The direct
    forms have no such error. ``s`` is the std, ``e`` is the stored noise and ``d`` is the shift ``mean_new -
    mean_old``:

    - ``gaussian``: ``mean(e d) / s - mean(d**2) / (2 s**2)``, the log of the density ratio, averaged over elements;
    - ``guard``: ``mean(e d)``, the ratio normalisation of GRPO-Guard (arXiv:2510.22319, Eq. 8), with mean zero;
    - ``cps_released``: ``2 s mean(e d) - mean(d**2)``, from the released CPS log-prob ``-(x_next - mean)**2``. It is
      ``2 s**2`` times the ``gaussian`` form, so the two forms need different clip ranges.

    Args:
        delta_mean: [N, ...], the shift of the mean, differentiable.
        noise: [N, ...], `Step.noise` of the transition as it was sampled.
        std: standard deviation of the transition, above 0.
        form: one of `RATIO_FORMS`.

    Returns:
        [N] float32; each row depends on its own sample only.

    Raises:
        ValueError: if the form is unknown, the step is deterministic, or shapes differ.
    """
    if form not in RATIO_FORMS:
        raise ValueError(f"unknown ratio form '{form}'; use one of {', '.join(RATIO_FORMS)}")
    if not std > 0.0:
        raise ValueError(f"std is {std}: a deterministic step has no ratio; leave it out of training")
    if delta_mean.shape != noise.shape:
        raise ValueError(f"delta_mean has shape {tuple(delta_mean.shape)} but noise has {tuple(noise.shape)}")
    shift = delta_mean.float()
    correlation = row_mean(noise.float() * shift)
    if form == "guard":
        return correlation
    squared = row_mean(shift.square())
    if form == "cps_released":
        return 2.0 * std * correlation - squared
    return correlation / std - squared / (2.0 * std**2)
