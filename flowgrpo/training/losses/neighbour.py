"""The objective of trajectories without noise: the ratio of a choice among the next states of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from ...core.addressing import address
from ...core.diagnostics import step_statistics
from ...core.neighbours import neighbour_log_ratio, quasi_norm
from ...core.objectives import held_columns, policy_loss
from ...core.surrogates import clip
from ...parts.choice import Choice, Of
from ...parts.needs import Need, needs
from ...parts.ranges import Count
from ...parts.traits import offering, whole_groups
from .objective import ObjectiveSetting, Outcome, Unmeasured

if TYPE_CHECKING:
    from ...pipelines.experience import Experience
    from ...samplers.transitions import Transitions

    Batch = tuple[Transitions, Tensor]

Surrogate = Annotated[Callable[..., Tensor], Of("surrogate", "clip")]
Exponent = Annotated[float, Field(ge=0.2, le=2)]
"""With a smaller exponent, the quasi-norm of a group grows until float32 loses the advantages."""


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

    The ratio is of Euler steps from the states of the rollout, whatever solver made the rollout.

    Args:
        setting: of the run.
        surrogate: The surrogate of the ratio.
        p: Exponent of the quasi-norm that advantages are divided by.
        anchors: How many samples of a group are trained at each step, drawn anew for every step; all if left out.
    """

    trains = "choices"

    def __init__(
        self,
        setting: ObjectiveSetting,
        *,
        surrogate: Surrogate = clip,
        p: Exponent = 0.8,
        anchors: Count | None = None,
    ) -> None:
        self.policy, self.surrogate, self.p, self.anchors = setting.policy, surrogate, p, anchors
        self.several = setting.recipe.optimizer.updates * setting.recipe.optimizer.epochs > 1
        self._before: dict[tuple[int, int], Tensor] = {}

    def prepare(self, experience: Experience) -> None:
        """Keep the velocities of the anchors before the policy moves, if the rollout has several updates.

        Anchors make other batches than sampling did, and a velocity depends on its batch by rounding. So the recorded
        velocities would not give ratios of exactly 1.
        """
        self._before = {}
        if self.anchors is None or not self.several:
            return
        with torch.no_grad():
            for part in range(experience.updates):
                for transitions, own in self.batches(experience, part, None):
                    velocity = self._velocity(experience, transitions, own)
                    self._before[transitions.step, int(own[0])] = velocity

    def rows(self, experience: Experience, part: int, keep: Tensor | None) -> int:
        """How many anchors one part has; an anchor is a trained state."""
        return sum(len(own) for _, own in self.batches(experience, part, keep))

    def batches(self, experience: Experience, part: int, keep: Tensor | None) -> Iterator[Batch]:
        """The anchors of recorded batches of states, as indices of states."""
        for transitions, batch in experience.batches(part, keep):
            own = torch.arange(batch.start, batch.stop)
            if self.anchors is not None:
                own = own[_drawn(experience, transitions, self.anchors)[own]]
            if len(own):
                yield transitions, own

    def backward(
        self, experience: Experience, batch: Batch, advantages: Tensor, keep: Tensor | None, rows: Tensor
    ) -> Outcome:
        """Add the gradient of one recorded batch of anchors; an anchor is compared with the samples of its group."""
        transitions, own = batch
        policy, c = self.policy, transitions.coefficients
        new = self._velocity(experience, transitions, own)
        x = policy.brought(states_of(transitions.x, own)).float()
        delta = c.sigma - c.sigma_next
        moved, before = x - delta * new.float(), x - delta * self._old(transitions, own, new).float()
        group = torch.tensor(transitions.prompt, device=x.device)
        own = own.to(x.device)
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

    def _velocity(self, experience: Experience, transitions: Transitions, own: Tensor) -> Tensor:
        self.policy.bind(experience.plan)
        velocity = self.policy.velocity_of(experience.prompts)
        owners = [transitions.prompt[k] for k in own.tolist()]
        return velocity(states_of(transitions.x, own), transitions.step, owners)

    def _old(self, transitions: Transitions, own: Tensor, new: Tensor) -> Tensor:
        if self.anchors is None:
            return self.policy.brought(states_of(transitions.velocity, own))
        return self._before[transitions.step, int(own[0])] if self.several else new.detach()


def states_of(kept: Tensor, own: Tensor) -> Tensor:
    """The states of a batch, whatever device the rollout is kept on."""
    return kept[own.to(kept.device)]


def _drawn(experience: Experience, transitions: Transitions, anchors: int) -> Tensor:
    """[S] bool: the states of a step that are anchors; their draw depends on seed, prompt and step alone."""
    owner = torch.tensor(transitions.prompt)
    chosen = torch.zeros(len(owner), dtype=torch.bool)
    for prompt in owner.unique().tolist():
        generator = torch.Generator().manual_seed(address(experience.keys[prompt], -4, transitions.step))
        mine = (owner == prompt).nonzero().flatten()
        chosen[mine[torch.randperm(len(mine), generator=generator)[:anchors]]] = True
    return chosen
