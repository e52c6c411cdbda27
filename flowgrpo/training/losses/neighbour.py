"""The objective of trajectories without noise: the ratio of a choice among the next states of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from ...core.diagnostics import step_statistics
from ...core.neighbours import neighbour_log_ratio, quasi_norm
from ...core.objectives import held_columns, policy_loss
from ...core.surrogates import clip
from ...parts.choice import Choice, Of
from ...parts.needs import Need, needs
from ...parts.traits import offering, whole_groups
from .objective import ObjectiveSetting, Outcome, Unmeasured

if TYPE_CHECKING:
    from ...pipelines.policy import Experience
    from ...samplers.transitions import Transitions

    Batch = tuple[Transitions, slice]

Surrogate = Annotated[Callable[..., Tensor], Of("surrogate", "clip")]
Exponent = Annotated[float, Field(gt=0, le=2)]


def _without_penalties(recipe: Any, choice: Choice) -> list[str]:
    if not recipe.penalties:
        return []
    named = ", ".join(penalty.short for penalty in recipe.penalties)
    return [f"objective {choice.short} chooses among states and accepts no penalty; leave {named} out of penalties"]


def _of_neighbours(recipe: Any, choice: Choice) -> list[str]:
    plan = recipe.sampler.plan
    if offering(plan, "neighbours"):
        return []
    told = f"objective {choice.short}"
    if offering(plan, "noiseless"):
        return [
            f"{told} trains the steps of the plan's window, and sampler.plan.window is left out; set "
            "sampler.plan.window"
        ]
    return [
        f"{told} chooses among deterministic trajectories, and sampler.plan is {plan.short}; use sampler.plan ode, or "
        'mark a plan of your own by @offers("neighbours")'
    ]


@whole_groups
@needs(
    _of_neighbours,
    Need("select", ([],), "compares each sample with its whole group", mend="leave select out"),
    _without_penalties,
)
class NeighbourObjective(Unmeasured):
    """Neighbor GRPO: the ratio of a choice among the group's next states.

    Args:
        setting: of the run.
        surrogate: The surrogate of the ratio.
        p: Exponent of the quasi-norm that advantages are divided by.
    """

    trains = "choices"

    def __init__(self, setting: ObjectiveSetting, *, surrogate: Surrogate = clip, p: Exponent = 0.8) -> None:
        self.policy, self.surrogate, self.p = setting.policy, surrogate, p

    def rows(self, experience: Experience, part: int, keep: Tensor | None) -> int:
        """How many anchors one part has; an anchor is a trained state."""
        return sum(b.stop - b.start for _, b in experience.batches(part, keep))

    def batches(self, experience: Experience, part: int, keep: Tensor | None) -> Iterator[Batch]:
        """Recorded batches of states."""
        return experience.batches(part, keep)

    def backward(
        self, experience: Experience, batch: Batch, advantages: Tensor, keep: Tensor | None, rows: Tensor
    ) -> Outcome:
        """Add the gradient of one recorded batch of anchors; an anchor is compared with the samples of its group."""
        transitions, states = batch
        policy, c = self.policy, transitions.coefficients
        policy.bind(experience.plan)
        velocity = policy.velocity_of(experience.prompts)
        new = velocity(transitions.x[states], transitions.step, transitions.prompt[states])
        x, old = (policy.brought(kept[states]).float() for kept in (transitions.x, transitions.velocity))
        delta = c.sigma - c.sigma_next
        moved, before = x - delta * new.float(), x - delta * old
        group = torch.tensor(transitions.prompt, device=x.device)
        own = torch.arange(states.start, states.stop, device=x.device)
        log_ratio = neighbour_log_ratio(moved, before, policy.brought(transitions.x_next), group, own)
        advantage = quasi_norm(advantages[transitions.node].to(x), group, p=self.p)
        same = group[own][:, None] == group[None, :]
        size = same.sum(1, keepdim=True)
        loss, metrics = policy_loss(
            log_ratio, torch.zeros_like(log_ratio), advantage.expand_as(log_ratio), same,
            surrogate=self.surrogate, weight=(1.0 / size).expand_as(log_ratio),
            penalty=None, reduce="token", denom=rows,
        )  # fmt: skip
        self.policy.weights.backward(loss)
        detached = log_ratio.detach()
        step = torch.full_like(detached, transitions.step, dtype=torch.long)
        total, wide = experience.plan.num_steps, advantage.expand_as(log_ratio)
        held = held_columns(detached, torch.zeros_like(detached), wide, same, surrogate=self.surrogate)
        statistics = step_statistics(detached, step, advantage[None, :], same, held, num_steps=total)
        return Outcome(statistics.cpu(), metrics, detached.abs().max().cpu())
