"""A critic: a small network that predicts the reward of an image from its noisy latent and its prompt.

AC-Flow (2510.18072) uses the prediction as the baseline of a step. Euphonium uses the gradient of the prediction as a
drift of the sampler. The networks of both papers are not public; this one is as small as the task allows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...configs.image_recipe import CriticConfig, GuideConfig
from ...core.trees import node_values
from ...pipelines.experience import Experience
from ...samplers.plans import Plan
from ...samplers.rollout import Guide
from ...samplers.transitions import Transitions

_CONVOLUTIONS: dict[int, type[nn.Conv1d] | type[nn.Conv2d] | type[nn.Conv3d]] = {
    1: nn.Conv1d,
    2: nn.Conv2d,
    3: nn.Conv3d,
}


class _Network(nn.Module):
    """Values [N] from latents [N, C, ...] or packed latents [N, L, C], noise levels [N] and prompt features [N, F]."""

    def __init__(self, shape: Sequence[int], features: int, width: int) -> None:
        super().__init__()
        self.packed = len(shape) == 2
        channels = shape[1] if self.packed else shape[0]
        conv: Any = _CONVOLUTIONS[len(shape) - 1]
        self.first = conv(channels, width, 3, padding=1)
        self.condition = nn.Sequential(nn.Linear(features + 1, width), nn.SiLU(), nn.Linear(width, 2 * width))
        self.second = conv(width, width, 3, stride=2, padding=1)
        self.third = conv(width, width, 3, stride=2, padding=1)
        self.out = nn.Sequential(nn.LayerNorm(2 * width), nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, x: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
        x = x.transpose(1, 2) if self.packed else x
        scale, shift = self.condition(torch.cat([prompt, sigma[:, None]], dim=1)).chunk(2, dim=1)
        ones = [1] * (x.ndim - 2)
        hidden = self.first(x)
        hidden = nn.functional.silu(hidden * (1 + scale.view(*scale.shape, *ones)) + shift.view(*shift.shape, *ones))
        hidden = nn.functional.silu(self.second(hidden))
        hidden = nn.functional.silu(self.third(hidden)).flatten(2)
        return self.out(torch.cat([hidden.mean(2), hidden.amax(2)], dim=1)).squeeze(1)


def check_guide(plan: Plan) -> None:
    """Refuse a plan whose main line has no noise, because a guide moves this noise; raises ValueError."""
    if plan.first_stochastic is None:
        raise ValueError(
            "sampler.guide moves the noise of the main line, and with this sampler.plan the main line has none; use a "
            "plan with a stochastic main line, such as window or branch, or leave sampler.guide out"
        )


class Critic:
    """The network, its optimizer and the scale of the rewards.

    Args:
        settings: of the recipe.
        shape: of a latent, without batch.
        features: makes a vector [F] of a prompt.
        prompt: any prompt, for the size of the vector.
        seed: of the initial weights.
        device: of the network.
    """

    def __init__(
        self,
        settings: CriticConfig,
        shape: Sequence[int],
        features: Callable[[str], Tensor],
        prompt: str,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        if len(shape) - 1 not in _CONVOLUTIONS:
            raise ValueError(f"a critic reads latents of 2 to 4 dimensions, not {list(shape)}")
        self.settings, self.features, self.device = settings, features, torch.device(device)
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(seed)
            self.network = _Network(shape, len(features(prompt)), settings.width).to(device)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=settings.learning_rate)
        self.fits, self.mean, self.square = 0, 0.0, 0.0

    @property
    def ready(self) -> bool:
        """Whether its warm-up is over."""
        return self.fits >= max(self.settings.warmup, 1)

    def standardise(self, rewards: Tensor) -> Tensor:
        """Rewards in units of their spread over the run so far (AC-Flow's reward shaping)."""
        weight = 1.0 - 0.99**self.fits
        mean = self.mean / max(weight, 1e-9)
        std = max(self.square / max(weight, 1e-9) - mean**2, 1e-6) ** 0.5
        return (rewards - mean) / std

    def values(self, experience: Experience, x: Tensor, sigma: float, prompts: Sequence[int]) -> Tensor:
        """[N] expected standardised reward of states at a noise level; `prompts` are indices of the experience's."""
        with torch.no_grad():
            return self._values(x, sigma, [experience.prompts[p] for p in prompts])

    def fit(self, experience: Experience, rewards: Tensor) -> float:
        """Learn from the states of a rollout; returns the mean squared error of the first pass, in standardised units.

        Args:
            experience: a rollout with trained transitions.
            rewards: [L]; NaN is left out.
        """
        rewards = rewards.masked_fill(~experience.outcomes, torch.nan)
        known = rewards[~rewards.isnan()].double()
        if len(known):
            self.mean = 0.99 * self.mean + 0.01 * float(known.mean())
            self.square = 0.99 * self.square + 0.01 * float(known.square().mean())
            self.fits += 1
        rollout = experience.rollout
        target = node_values(rollout.parent, experience.leaf_values(self.standardise(rewards)))
        before = None
        for _ in range(self.settings.passes):
            errors = [self._learn(experience, t, target) for t in rollout.transitions]
            before = sum(errors) / len(errors) if before is None else before
        return before or 0.0

    def _learn(self, experience: Experience, t: Transitions, target: Tensor) -> float:
        first = torch.searchsorted(t.state.cpu(), torch.arange(len(t.x)))
        wanted = target[experience.rollout.parent[t.node[first]]].to(self.device)
        known = ~wanted.isnan()
        if not bool(known.any()):
            return 0.0
        predicted = self._values(t.x, t.coefficients.sigma, [experience.prompts[p] for p in t.prompt])
        loss = (predicted - wanted)[known].square().mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def guide(self, settings: GuideConfig, prompts: Sequence[str], plan: Plan) -> Guide | None:
        """Euphonium's drift along the gradient of the value; None during warm-up.

        The size of the drift is `settings.scale` of the noise. The paper adds a multiple of the normalised gradient to
        the mean. Here the drift is in units of the step's noise, per element, so one scale fits every step and every
        latent size.
        """
        check_guide(plan)
        if not self.ready:
            return None

        def guide(x: Tensor, v: Tensor, i: int, rows: Sequence[int]) -> Tensor:
            if i < settings.start:
                return torch.zeros_like(x, dtype=torch.float32)
            with torch.enable_grad():
                state = x.detach().float().requires_grad_()
                value = self._values(state, plan.sigmas[i], [prompts[row] for row in rows])
                (gradient,) = torch.autograd.grad(value.sum(), state)
            size = gradient.flatten(1).square().mean(1).sqrt().clamp(min=1e-12)
            return settings.scale * gradient / size.view(-1, *[1] * (x.ndim - 1))

        return guide

    def _values(self, x: Tensor, sigma: float, prompts: Sequence[str]) -> Tensor:
        features = torch.stack([self.features(prompt) for prompt in prompts]).to(self.device)
        x = x.to(self.device)
        found: Tensor = self.network(x.float(), torch.full((len(x),), sigma, device=self.device), features)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs to continue without a difference."""
        return {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scale": [self.fits, self.mean, self.square],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.fits, self.mean, self.square = state["scale"]
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
