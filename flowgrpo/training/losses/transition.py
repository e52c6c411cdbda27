"""The ratio of the steps' own transitions: what most methods of the GRPO family train."""

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
    from ...pipelines.policy import Experience, ScoredEdges

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
    """What the two ratios need that are no densities of the sampled step."""
    kernel, ratio, weight = recipe.sampler.kernel.name, choice["ratio"], choice["weight"]
    faults = []
    if ratio == "guard" and kernel == "cps" and weight == "none":
        faults.append("objective.ratio guard with kernel cps needs objective.weight guard: scales differ by step")
    if ratio != "cps_released":
        return faults
    if kernel != "cps":
        faults.append(f"objective.ratio cps_released belongs to kernel cps, not {kernel}; use gaussian")
    if weight in ("guard", "equalise"):
        faults.append(
            f"objective.weight {weight} evens the gradient of a density, and the released CPS log-prob is none: it "
            "lacks the division by 2 s²; use weight none, or ratio gaussian"
        )
    if choice["trust_nats"] is not None:
        faults.append("objective.trust_nats is a divergence of densities; use ratio gaussian with it")
    return faults


@needs(
    _noisy,
    _ratio_of_a_kernel,
    moves("balance", "bapo", "the bounds", "lower", "upper"),
    moves("variance", "r2vpo", "the price", "lam"),
)
class TransitionObjective(EdgeObjective):
    """The ratio of the steps' own transitions under a surrogate (Flow-GRPO 2505.05470 and what came of it).

    Args:
        setting: of the run.
        surrogate: Of the ratio.
        ratio: `gaussian`: the transition's own, to the power 1/D for latents of D elements. `guard`: GRPO-Guard's
            (2510.22319, Eq. 8). `cps_released`: that of the CPS code.
        weight: Of a step: `guard` is 1/|J|, `noise` s over its mean (TempFlow-GRPO), `equalise` s/|J| over its median
            (SAGE-GRPO).
        trust_nats: Flow-DPPO (2606.11025): steps that moved further and still move away are left out; none if left out.
        balance: Surrogate `bapo`: search its bounds at each optimizer step; fixed if left out.
        variance: Surrogate `r2vpo`: move its `lam` until the ratio's variance is at a target; fixed if left out.
    """

    def __init__(
        self,
        setting: ObjectiveSetting,
        *,
        surrogate: Surrogate = clip,
        ratio: Literal["gaussian", "guard", "cps_released"] = "guard",
        weight: Literal["none", "guard", "noise", "equalise"] = "guard",
        trust_nats: Positive | None = None,
        balance: BalanceConfig | None = None,
        variance: VarianceConfig | None = None,
    ) -> None:
        super().__init__(setting)
        self.surrogate, self.trust_nats = surrogate, trust_nats
        self.balance = None if balance is None else Balance(balance)
        self._moved = False

    def prepare(self, experience: Experience) -> None:
        """Nothing is computed: the rollout has recorded it."""
        self._moved = False
        if self.controls.variance is not None:
            self.surrogate = partial(r2vpo, lam=self.controls.variance.value)

    def measure(self, experience: Experience, part: int, advantages: Tensor, keep: Tensor | None) -> Tensor | None:
        """Contributions of trained edges to the gradient under each pair of bounds, where the recipe searches them."""
        if self.balance is None:
            return None
        moved, self._moved = self._moved, True
        total = self.balance.nothing(self.policy.device)
        for transitions, states in self.batches(experience, part, keep):
            node = transitions.node[transitions.edges_of(states)]
            # Before the weights move every ratio is 1.
            log_ratio = torch.zeros(len(node), 1, device=self.policy.device)
            if moved:
                with torch.no_grad():
                    scored = self.policy.score(experience, transitions, states)
                node, log_ratio = scored.node, scored.log_ratio
            mask = None if keep is None else keep[node].to(log_ratio.device)[:, None]
            total += self.balance.contributions(log_ratio, advantages[node], mask)
        return total

    def settle(self, sums: Tensor) -> None:
        """Take the bounds that the contributions ask for."""
        assert self.balance is not None
        self.balance.settle(sums)
        self.surrogate = self.balance.surrogate

    def loss(
        self, scored: ScoredEdges, advantage: Tensor, mask: Tensor | None, penalty: Tensor | None, rows: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The surrogate's, weighted by step."""
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
        """Bounds of the ratio that were found, and its variance."""
        found = {} if self.balance is None else self.balance.metrics(metrics["loss"][1])
        if self.controls.variance is not None:
            detached = scored.log_ratio.detach()
            found["ratio_variance"] = ratio_variance(detached, torch.ones_like(detached) if mask is None else mask)
        return found

    def held(self, scored: ScoredEdges, advantage: Tensor, mask: Tensor | None) -> Tensor:
        """What the surrogate holds back."""
        detached = scored.log_ratio.detach()
        return held_columns(detached, torch.zeros_like(detached), advantage, mask, surrogate=self.surrogate)

    def _trusted(self, log_ratio: Tensor, advantage: Tensor, divergence: Tensor) -> Tensor | float:
        """Flow-DPPO's mask (2606.11025): 0 where a step has moved too far and would move further."""
        if self.trust_nats is None:
            return 1.0
        outward = (log_ratio.detach() * advantage) > 0
        return (~(outward & (divergence >= self.trust_nats / self.elements))).float()
