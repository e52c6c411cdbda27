"""Models of other noise processes as flow-matching velocities.

A model of the variance-preserving process (DDPM, arXiv:2006.11239) is trained on `z = a x0 + b n` with
`a**2 + b**2 = 1`. Division by `a + b` gives `x = (1 - sigma) x0 + sigma n` with `sigma = b / (a + b)`, which is the
state of flow matching. After this change of coordinates, every kernel, plan, solver and ratio is valid as it stands.

In these coordinates the velocity is `n - x0`, where `n` and `x0` are the model's predictions. Euler's step is DDIM's
step with eta 0 (arXiv:2010.02502, Eq. 12). DDIM's step with any eta is the kernel `ddim`.

A model of EDM (arXiv:2206.00364) has states `z = x0 + s n`, with levels s up to 80. Division by `1 + s` gives the same
x with `sigma = s / (1 + s)`.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from diffusers import DDIMScheduler
from diffusers.schedulers import KarrasDiffusionSchedulers
from torch import Tensor

PREDICTIONS = ("epsilon", "v_prediction", "sample")


def state_norm(sigma: float) -> float:
    """`1 / (a + b)`: the factor from z to x at a noise level; between 0.7 and 1, and 1 at the levels 0 and 1."""
    return math.hypot(1.0 - sigma, sigma)


class NoiseProcess:
    """The noise levels on which a model of the variance-preserving process was trained, and what it predicts.

    Attributes:
        prediction: one of `PREDICTIONS`.
        levels: [N] float32, sigma of each training timestep, strictly rising.

    Args:
        shipped: scheduler of the pipeline. If its solver is not DDIM, the timesteps are still DDIM's.

    Raises:
        ValueError: a prediction, a solver or an option cannot be converted to flow matching.
    """

    def __init__(self, shipped: Any) -> None:
        name, config = type(shipped).__name__, shipped.config
        self.prediction: str = config["prediction_type"]
        if self.prediction not in PREDICTIONS:
            raise ValueError(
                f"{name} has prediction_type {self.prediction!r}; use a pipeline with flow_prediction, or one of "
                f"{', '.join(PREDICTIONS)}"
            )
        for option in ("clip_sample", "thresholding"):
            if config.get(option):
                raise ValueError(
                    f"{name} has {option}, which clips the clean prediction at each step. A rollout does not clip. If "
                    f"the pipeline denoises latents, load it with {option}=False in its scheduler"
                )
        self._scheduler = _ddim(shipped)
        alphas = self._scheduler.alphas_cumprod.double()
        a, b = alphas.sqrt(), (1.0 - alphas).sqrt()
        self.levels: Tensor = (b / (a + b)).float()

    def table(self, request: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Sigmas [T+1], the last one 0, and integer timesteps [T].

        The last step always ends at the data, so that no noise is left in the decoded latent. This holds even if the
        configuration ends the last step at the first noise level (`set_alpha_to_one` off).

        Args:
            request: arguments of the pipeline's `set_timesteps`.

        Raises:
            ValueError: the request is not a number of steps, or the model predicts noise and the table begins at pure
                noise.
        """
        if "num_inference_steps" not in request or {"timesteps", "sigmas"} & request.keys():
            raise ValueError(f"a pipeline that predicts {self.prediction} takes num_inference_steps, not a table")
        scheduler = copy.deepcopy(self._scheduler)
        scheduler.set_timesteps(request["num_inference_steps"])
        timesteps = scheduler.timesteps.cpu()
        sigmas = torch.cat([self.levels[timesteps], torch.zeros(1)])
        if self.prediction == "epsilon" and float(sigmas[0]) >= 1.0:
            raise ValueError(
                "the scheduler begins at pure noise (rescale_betas_zero_snr). There, a prediction of the noise says "
                "nothing about the image. Turn rescale_betas_zero_snr off, or use a model with v_prediction"
            )
        return sigmas, timesteps

    def timesteps_at(self, sigmas: Tensor) -> Tensor:
        """Timesteps [T] of sigmas [T]; a sigma between two levels of training has a fractional timestep.

        Raises:
            ValueError: a level is above the last level of training.
        """
        if float(sigmas.max()) > float(self.levels[-1]):
            raise ValueError(
                f"sigmas begin at {float(sigmas.max()):.4g}, and this model was trained up to "
                f"{float(self.levels[-1]):.4g}; begin there or below"
            )
        known = self.levels.double().numpy()
        found = torch.from_numpy(np.interp(sigmas.double().numpy(), known, np.arange(len(known))))
        return found.long() if torch.equal(found, found.round()) else found.float()

    def levels_of(self, sigmas: Tensor) -> Tensor:
        """The levels [N] that the pipeline reads from its scheduler. DDIM's pipelines read timesteps only."""
        return sigmas

    def first_std(self, sigma: float) -> float:
        """Standard deviation of the pipeline's first state at its first noise level."""
        return 1.0

    def norm(self, sigma: float) -> float:
        """The factor from z to x at a noise level."""
        return state_norm(sigma)

    def entered(self, x: Tensor, sigma: float) -> Tensor:
        """The state z of the pipeline for a state x of flow matching, in the dtype of x."""
        return (x.float() / state_norm(sigma)).to(x.dtype)

    def velocity(self, prediction: Tensor, x: Tensor, sigma: float) -> Tensor:
        """`n - x0` in float32, from the model's prediction at a state x [N, ...] of flow matching."""
        prediction, x = prediction.float(), x.float()
        if self.prediction == "epsilon":
            return (prediction - x) / (1.0 - sigma)
        if self.prediction == "sample":
            return (x - prediction) / sigma
        norm = state_norm(sigma)
        return prediction / norm + (2.0 * sigma - 1.0) / norm**2 * x


class ExplodingProcess:
    """The process of EDM (arXiv:2206.00364): states `x0 + s n`, and predictions of the noise n.

    Cosmos-Predict2 is trained on it. Its pipelines give `(z - x0) / s` to their scheduler, and read s from there.

    Args:
        shipped: scheduler of the pipeline.
    """

    def __init__(self, shipped: Any) -> None:
        self._scheduler = copy.deepcopy(shipped)

    def table(self, request: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Sigmas [T+1], the last one 0, and timesteps [T].

        The pipelines repeat their least level, 0.002, at the end, so their last step does nothing. Here it ends at 0.

        Args:
            request: arguments of the pipeline's `set_timesteps`.
        """
        scheduler = copy.deepcopy(self._scheduler)
        scheduler.set_timesteps(**request)
        levels = scheduler.sigmas.cpu().double()
        return (levels / (1.0 + levels)).float(), scheduler.timesteps.cpu()

    def timesteps_at(self, sigmas: Tensor) -> Tensor:
        """Timesteps [T] of sigmas [T], which the pipelines hand to their scheduler only.

        Raises:
            ValueError: a sigma is 1, so its level would be infinite.
        """
        if float(sigmas.max()) >= 1.0:
            raise ValueError("sigmas begin at 1, and the noise levels of this model are finite; begin below 1")
        return self.levels_of(sigmas)

    def levels_of(self, sigmas: Tensor) -> Tensor:
        """The levels s [N] that the pipeline reads from its scheduler."""
        return (sigmas.double() / (1.0 - sigmas.double())).float()

    def norm(self, sigma: float) -> float:
        """The factor `1 / (1 + s)` from z to x at a noise level."""
        return 1.0 - sigma

    def first_std(self, sigma: float) -> float:
        """Standard deviation of the pipeline's first state, which is its level."""
        return sigma / (1.0 - sigma)

    def entered(self, x: Tensor, sigma: float) -> Tensor:
        """The state z of the pipeline for a state x of flow matching, in the dtype of x."""
        return (x.float() / self.norm(sigma)).to(x.dtype)

    def velocity(self, prediction: Tensor, x: Tensor, sigma: float) -> Tensor:
        """`n - x0` in float32, from the model's prediction at a state x [N, ...] of flow matching."""
        return (prediction.float() - x.float()) / (1.0 - sigma)


def process_of(shipped: Any) -> NoiseProcess | ExplodingProcess | None:
    """The noise process of a pipeline by its scheduler; None for flow matching.

    Raises:
        ValueError: the scheduler is of a process that cannot be converted to flow matching.
    """
    if shipped.config.get("prediction_type", "flow_prediction") != "flow_prediction":
        return NoiseProcess(shipped)
    # Levels of flow matching end at 1.
    exploding = float(shipped.config.get("sigma_max") or 0.0) > 1.0
    return ExplodingProcess(shipped) if exploding and hasattr(shipped, "set_begin_index") else None


def _ddim(shipped: Any) -> Any:
    """A DDIM scheduler with the noise levels of a pipeline's own scheduler."""
    name = type(shipped).__name__
    alphas = getattr(shipped, "alphas_cumprod", None)
    if name.endswith("DDIMScheduler"):
        return copy.deepcopy(shipped)
    if name in KarrasDiffusionSchedulers.__members__ and alphas is not None:
        known = inspect.signature(DDIMScheduler.__init__).parameters
        made = DDIMScheduler(**{key: value for key, value in shipped.config.items() if key in known})
        # Some solvers end a zero-terminal table slightly above 0, so the comparison has a tolerance.
        if torch.allclose(made.alphas_cumprod, alphas.cpu().float(), rtol=1e-5, atol=1e-6):
            return made
    raise ValueError(
        f"the noise levels of {name} (prediction_type {shipped.config['prediction_type']!r}) differ from DDIM's; if "
        "the model allows DDIM, load the pipeline with the DDIM scheduler of its family (DDIMScheduler, "
        "CogVideoXDDIMScheduler), made by from_config from the config of the present scheduler"
    )
