"""The importance ratio of the denoising steps' transitions. Most methods of the GRPO family train it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from torch import Tensor

from ...configs.sections import BalanceConfig, VarianceConfig
from ...core.objectives import held_columns, policy_loss
from ...core.offpolicy import r2vpo, ratio_variance
from ...core.surrogates import clip
from ...parts.choice import Choice, Of
from ...parts.needs import needs
from ...parts.ranges import Positive
from ...parts.traits import offering
from ..balance import Balance
from ..controls import moves
from .edges import EdgeObjective
from .objective import ObjectiveSetting

if TYPE_CHECKING:
    from ...pipelines.experience import Experience
    from ...pipelines.scored_edges import ScoredEdges

Surrogate = Annotated[Callable[..., Tensor], Of("surrogate", "clip")]


def _noisy(recipe: Any, choice: Choice) -> list[str]:
    plan = recipe.sampler.plan
    if not offering(plan, "noiseless"):
        return []
    return [
        f"sampler.plan {plan.short} has no stochastic step, so no transition has a density; use objective neighbour or "
        "forward, or another plan"
    ]


def _ratio_of_a_kernel(recipe: Any, choice: Choice) -> list[str]:
    """Needs of ratio `guard` and ratio `cps_released`: they are not ratios of densities of the sampled step."""
    kernel, ratio, weight = recipe.sampler.kernel.name, choice["ratio"], choice["weight"]
    faults = []
    if ratio == "guard" and kernel == "cps" and weight == "none":
        faults.append(
            "objective.ratio guard with kernel cps needs objective.weight guard, because scales differ by step"
        )
    if ratio != "cps_released":
        return faults
    if kernel != "cps":
        faults.append(f"objective.ratio cps_released belongs to kernel cps, not {kernel}; use gaussian")
    if weight in ("guard", "equalise", "rectify"):
        faults.append(
            f"objective.weight {weight} evens the gradient of a density, and the released CPS log-prob is not a "
            "density: it lacks the division by 2 s²; use weight none, or ratio gaussian"
        )
    if choice["trust_nats"] is not None:
        faults.append("objective.trust_nats bounds a divergence of densities; use ratio gaussian with it")
    return faults


@needs(
    _noisy,
    _ratio_of_a_kernel,
    moves("balance", "bapo", "the bounds", "lower", "upper"),
    moves("variance", "r2vpo", "the price", "lam"),
)
class TransitionObjective(EdgeObjective):
    """A surrogate of the importance ratio of each step's transition (Flow-GRPO 2505.05470 and later methods).

    Args:
        setting: of the run.
        surrogate: The surrogate of the ratio.
        ratio: `gaussian`: the transition's own ratio, to the power 1/D for latents of D elements. `guard`: the ratio of
            GRPO-Guard (2510.22319, Eq. 8). `cps_released`: the ratio of the CPS code.
        weight: The weight of a step: `guard` is 1/|J|, `noise` is s over its mean (TempFlow-GRPO), `equalise` is s/|J|
            over its median (SAGE-GRPO). `rectify` is s/|J| over its mean over the steps from which the window is drawn
            (Flash-GRPO, 2605.15980), so that windows of one step count as their steps deserve.
        trust_nats: Flow-DPPO (2606.11025): a step whose divergence is at least this many nats, and that would move
            further away, is left out. No step is left out if the option is left out.
        balance: For surrogate `bapo`: search its bounds at each optimizer step; fixed if left out.
        variance: For surrogate `r2vpo`: move its `lam` until the ratio's variance is at a target; fixed if left out.
    """

    def __init__(
        self,
        setting: ObjectiveSetting,
        *,
        surrogate: Surrogate = clip,
        ratio: Literal["gaussian", "guard", "cps_released"] = "guard",
        weight: Literal["none", "guard", "noise", "equalise", "rectify"] = "guard",
        trust_nats: Positive | None = None,
        balance: BalanceConfig | None = None,
        variance: VarianceConfig | None = None,
    ) -> None:
        super().__init__(setting)
        self.surrogate, self.trust_nats = surrogate, trust_nats
        self.balance = None if balance is None else Balance(balance)
        self._moved = False

    def prepare(self, experience: Experience) -> None:
        """Start a rollout. Nothing is computed, because the rollout has recorded everything."""
        self._moved = False
        if self.controls.variance is not None:
            self.surrogate = partial(r2vpo, lam=self.controls.variance.value)

    def measure(self, experience: Experience, part: int, advantages: Tensor, keep: Tensor | None) -> Tensor | None:
        """Contributions of trained edges to the gradient under each pair of bounds; None if bounds are not searched."""
        if self.balance is None:
            return None
        moved, self._moved = self._moved, True
        total = self.balance.nothing(self.policy.device)
        for transitions, states in self.batches(experience, part, keep):
            node = transitions.node[transitions.edges_of(states)]
            # Until the weights move, every ratio is 1.
            log_ratio = torch.zeros(len(node), 1, device=self.policy.device)
            if moved:
                with torch.no_grad():
                    scored = self.policy.score(experience, transitions, states)
                node, log_ratio = scored.node, scored.log_ratio
            mask = None if keep is None else keep[node].to(log_ratio.device)[:, None]
            total += self.balance.contributions(log_ratio, advantages[node], mask)
        return total

    def settle(self, sums: Tensor) -> None:
        """Choose the bounds by the contributions."""
        assert self.balance is not None
        self.balance.settle(sums)
        self.surrogate = self.balance.surrogate

    def loss(
        self, scored: ScoredEdges, advantage: Tensor, mask: Tensor | None, penalty: Tensor | None, rows: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of the surrogate, weighted by step."""
        return policy_loss(
            scored.log_ratio,
            torch.zeros_like(scored.log_ratio),
            advantage,
            mask,
            surrogate=self.surrogate,
            weight=scored.weight * self._trusted(scored.log_ratio, advantage[:, None], scored.divergence),
            penalty=penalty,
            reduce="token",
            denom=rows,
        )

    def more_metrics(self, scored: ScoredEdges, mask: Tensor | None, metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """The bounds that were found, and the variance of the ratio."""
        found = {} if self.balance is None else self.balance.metrics(metrics["loss"][1])
        if self.controls.variance is not None:
            detached = scored.log_ratio.detach()
            found["ratio_variance"] = ratio_variance(detached, torch.ones_like(detached) if mask is None else mask)
        return found

    def held(self, scored: ScoredEdges, advantage: Tensor, mask: Tensor | None) -> Tensor:
        """[E, 1] bool: edges that the surrogate leaves without a gradient."""
        detached = scored.log_ratio.detach()
        return held_columns(detached, torch.zeros_like(detached), advantage, mask, surrogate=self.surrogate)

    def _trusted(self, log_ratio: Tensor, advantage: Tensor, divergence: Tensor) -> Tensor | float:
        """Flow-DPPO's mask (2606.11025): 0 where a step has moved too far and would move further."""
        if self.trust_nats is None:
            return 1.0
        outward = (log_ratio.detach() * advantage) > 0
        return (~(outward & (divergence >= self.trust_nats / self.elements))).float()
