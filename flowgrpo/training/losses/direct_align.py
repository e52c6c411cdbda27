"""The objective that follows the gradients of the rewards at images recovered from any noise level (Direct-Align)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...core.addressing import address
from ...core.forward_process import Noised
from ...parts.choice import Choice
from ...parts.needs import Need, needs, one_round
from ...parts.ranges import Count, Fraction, Inside
from ...parts.traits import offering
from ...samplers.moves import GaussianMoves
from .forward import ForwardObjective, ImagesAtLevel, drawing
from .noise_levels import NoiseLevel
from .objective import ObjectiveSetting
from .reward_gradient import differentiated, weighted_sum

if TYPE_CHECKING:
    from ...pipelines.experience import Experience


@dataclass(frozen=True)
class Leap(NoiseLevel):
    """A step of Euler between two noise levels, after which the image is recovered.

    Attributes:
        to: the noise level at which the step ends, below 1.
        place: where the lower one of both levels lies in the range of the objective, in [0, 1].
    """

    to: float
    place: float

    @property
    def inverted(self) -> bool:
        """Whether the step goes towards noise."""
        return self.to > self.sigma


def _one_noise(recipe: Any, choice: Choice) -> list[str]:
    plan = recipe.sampler.plan
    if offering(plan, "noiseless") or offering(plan, "given"):
        return []
    return [
        f"objective {choice.short} needs the one noise from which each image was made, and the steps of sampler.plan "
        f"{plan.short} add noise of their own; use plan ode"
    ]


def _room(recipe: Any, choice: Choice) -> list[str]:
    low, high, leap = choice["lowest"], choice["highest"], choice["leap"]
    faults, sigmas = [], recipe.sampler.sigmas
    if low + 2.0 * leap > high:
        faults.append(
            f"objective.lowest {low:g} and objective.highest {high:g} leave no room for two leaps of {leap:g}, one "
            f"down to a noise level and one up to it; use objective.leap {max(high - low, 0.0) / 2:g} at most"
            if high > low
            else f"objective.lowest {low:g} is not below objective.highest {high:g}; use lower and higher noise levels"
        )
    if sigmas and high > sigmas[0]:
        faults.append(_beyond(high, sigmas[0]))
    return faults


def _beyond(high: float, first: float) -> str:
    return f"objective.highest is {high:g}, and the noisiest level of the sampler is {first:g}; use at most {first:g}"


@needs(
    _one_noise,
    _room,
    weighted_sum,
    one_round("takes the gradients of one rollout"),
    Need("select", ([],), "has a gradient for every image", mend="leave select out"),
)
class DirectAlignObjective(ForwardObjective):
    """The gradients of the rewards at images that one step recovers from any noise level; the rewards need a gradient.

    Direct-Align of SRPO (2509.06942). A finished image x0 is noised again, to x = σ ε + (1 - σ) x0, with the very noise
    ε from which it was made. The policy takes one step of Euler to the level σ'. From there the image comes back in
    closed form, because ε is known:

        x0' = (x + (σ' - σ) v(x, σ) - σ' ε) / (1 - σ') = x0 + (σ - σ') / (1 - σ') ((ε - x0) - v(x, σ))

    So x0' is x0 plus a small share of the error of the velocity, and it is a clear image even where x is nearly noise.
    The rewards are differentiated there, through the pipeline's own decoder. The gradient goes through one call of the
    denoiser, whose input has none.

    In each iteration a level is drawn for all images. The step goes down to this level, from a level above. With
    `inversion`, a second step goes up to it, from a level below. There the rewards have the opposite sign: what the
    policy adds on its way to noise should look worse. Both branches pull the velocity the same way where the rewards
    are the same, so `inversion` is for a reward that tells the branches apart, such as `relative`. The released code
    advises to begin without it.

    Rewards may read two columns here: `inverted`, and `noisiness` from 0 at the lowest level of the range to 1 at the
    highest. Images of data (plan `given`) get noise of their own.

    The defaults are the range and the distance of the released code, rounded, for steps with a shift of 3. Near the
    ends of the range, the released code shortens the leaps; here a level is drawn only where both leaps fit. Its bound
    of the reward (ReFL's hinge at 0.7) is above all rewards of HPSv2, so it is left out.

    Args:
        setting: of the run.
        lowest: The least noisy level of the range.
        highest: The noisiest level of the range.
        leap: The difference of the two noise levels of a step.
        times: How many levels are drawn in an iteration, one in each of as many equal parts of the range.
        inversion: Whether each level also gets a step towards noise, with the opposite sign of the rewards.
    """

    trains = "recovered"

    def __init__(
        self,
        setting: ObjectiveSetting,
        *,
        lowest: Inside = 0.75,
        highest: Fraction = 0.96,
        leap: Inside = 0.02,
        times: Count = 1,
        inversion: bool = False,
    ) -> None:
        super().__init__(setting, times=times, noise="image")
        self.lowest, self.highest, self.leap, self.inversion = lowest, highest, leap, inversion
        # Every update evaluates its own images alone, and no earlier prediction is compared with.
        self.has_ratio, self.several, self.apart = False, False, True
        assert setting.rewards is not None
        self.rewards = setting.rewards

    def drawn_levels(self, experience: Experience) -> Sequence[Leap]:
        """The steps of this rollout, the same for all its prompts, on every process.

        Raises:
            ValueError: the range begins above the noisiest level of the rollout.
        """
        if self.highest > experience.plan.sigmas[0]:
            raise ValueError(_beyond(self.highest, experience.plan.sigmas[0]))
        assert self.times is not None
        low, high = self.lowest + self.leap, self.highest - self.leap
        places = torch.rand(self.times, generator=drawing(experience), dtype=torch.float64)
        found = []
        for number, place in enumerate(places.tolist()):
            level = high - (high - low) * (number + place) / self.times
            found.append(self._leap(experience, number, level + self.leap, level))
            if self.inversion:
                found.append(self._leap(experience, number, level - self.leap, level))
        return found

    def _leap(self, experience: Experience, number: int, sigma: float, to: float) -> Leap:
        # A sum may be rounded past the end of the range.
        sigma = min(max(sigma, self.lowest), self.highest)
        levels = list(pairwise(experience.plan.sigmas))
        step = next(k for k, (_, below) in enumerate(levels) if sigma > below)
        place = (min(sigma, to) - self.lowest) / (self.highest - self.lowest)
        return Leap(step, sigma, (step, number, int(to > sigma)), to, place)

    def noise_of(self, experience: Experience, batch: ImagesAtLevel, shape: Sequence[int]) -> Tensor:
        """[N, *shape] the noise from which each image was made, float32."""
        rollout = experience.rollout
        nodes = rollout.leaf[batch.leaves]
        owners = [experience.keys[p] for p in rollout.prompt[nodes].tolist()]
        keys = [address(key, 0, root) for key, root in zip(owners, rollout.root[nodes].tolist())]
        moves = GaussianMoves(shape, torch.float32, torch.device("cpu"), 1.0)
        return moves.start(keys, [address(key, 0, -1) for key in owners], experience.plan.root_spread)

    def losses(self, experience: Experience, batch: ImagesAtLevel, noised: Noised) -> tuple[Tensor, Tensor]:
        """[N] rewards of the recovered images with the opposite sign, with the exact gradient; and log ratios of 0."""
        leap, v = batch.level, noised.velocity.float()
        assert isinstance(leap, Leap)
        share = (leap.sigma - leap.to) / (1.0 - leap.to)
        clean = recovered(noised, leap.to)
        rows = [experience.rows[p] for p in experience.rollout.leaf_prompt[batch.leaves].tolist()]
        columns = {"inverted": leap.inverted, "noisiness": leap.place}
        values, slopes = differentiated(self.policy, self.rewards, clean, rows, experience.rows, columns)
        sign = 1.0 if leap.inverted else -1.0
        along = -sign * share * (slopes * v).flatten(1).sum(1)
        return sign * values + along - along.detach(), torch.zeros_like(values)


def recovered(noised: Noised, to: float) -> Tensor:
    """[N, ...] clean latents after one step of Euler to a noise level, float32, without gradient (2509.06942).

    They are exactly x0 if the velocity is exactly noise - x0.

    Args:
        noised: N images at one noise level, with the policy's velocities.
        to: the noise level at which the step ends, below 1.
    """
    x0 = noised.x0.float()
    error = (noised.noise - x0) - noised.velocity.detach().float()
    return x0 + (noised.sigma - to) / (1.0 - to) * error
