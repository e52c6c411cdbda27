"""What an update computes on a rollout: one class a form, all with the same three methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ..configs.schema import Recipe
from ..configs.soundness import FORWARD_FORMS
from ..core.addressing import address
from ..core.diagnostics import step_statistics
from ..core.forward import FORWARD, Noised
from ..core.guards import likelihood_guard
from ..core.neighbours import neighbour_log_ratio, quasi_norm
from ..core.objectives import held_columns, policy_loss
from ..core.offpolicy import r2vpo, ratio_variance
from ..pipelines.policy import PENALTIES, Experience, FlowPolicy
from ..samplers.records import Transitions
from ..samplers.rollout import draw_noise
from .balance import Balance
from .controls import Controls
from .planning import surrogate_of

Edges = tuple[Transitions, slice]


@dataclass
class Outcome:
    """What one batch contributed.

    Attributes:
        statistics: [steps, 2, 5], see `core.diagnostics.step_statistics`.
        metrics: name -> [sum, count].
        error: largest |log ratio|.
    """

    statistics: Tensor
    metrics: dict[str, Tensor]
    error: Tensor


class Objective(Protocol):
    """A form of loss over the rows of a rollout."""

    def prepare(self, experience: Any) -> None:
        """Whatever must be computed before the weights move."""

    def measure(self, experience: Any, part: int, advantages: Tensor, keep: Tensor | None) -> Tensor | None:
        """What an optimizer step must know of all its batches before the first: sums of this rank, None for nothing."""

    def settle(self, sums: Tensor) -> None:
        """Take what was measured, added over ranks."""

    def rows(self, experience: Any, part: int, keep: Tensor | None) -> int:
        """Rows of one part that enter the loss, on this rank."""

    def batches(self, experience: Any, part: int, keep: Tensor | None) -> Iterator[Any]:
        """Batches of them."""

    def backward(self, experience: Any, batch: Any, advantages: Tensor, keep: Tensor | None, rows: Tensor) -> Outcome:
        """Add one batch's gradient of the loss over `rows`, the count of the whole optimizer step."""


class Unmeasured:
    """An objective whose optimizer steps need to know nothing of all their batches."""

    def measure(self, experience: Any, part: int, advantages: Tensor, keep: Tensor | None) -> None:
        """Nothing."""

    def settle(self, sums: Tensor) -> None:
        """Never called."""


class TransitionObjective:
    """The ratio of the steps' own transitions: every GRPO form but two."""

    def __init__(self, recipe: Recipe, policy: FlowPolicy, elements: int, controls: Controls) -> None:
        self.recipe, self.policy, self.elements, self.controls = recipe, policy, elements, controls
        self.surrogate = surrogate_of(recipe, elements)
        chosen = recipe.objective.balance
        self.balance = None if chosen is None else Balance(chosen)
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
                    scored = self.policy.score(experience, transitions, states, penalised=False)
                node, log_ratio = scored.node, scored.log_ratio
            mask = None if keep is None else keep[node].to(log_ratio.device)[:, None]
            total += self.balance.contributions(log_ratio, advantages[node], mask)
        return total

    def settle(self, sums: Tensor) -> None:
        """Take the bounds that the contributions ask for."""
        assert self.balance is not None
        self.balance.settle(sums)
        self.surrogate = self.balance.surrogate

    def rows(self, experience: Experience, part: int, keep: Tensor | None) -> int:
        """Trained edges of one part."""
        nodes = [t.node[t.edges_of(b)] for t, b in experience.batches(part)]
        return sum(len(n) if keep is None else int(keep[n].sum()) for n in nodes)

    def batches(self, experience: Experience, part: int, keep: Tensor | None) -> Iterator[Edges]:
        """Recorded batches of states with an edge that is kept."""
        return experience.batches(part, keep)

    def backward(
        self, experience: Experience, batch: Edges, advantages: Tensor, keep: Tensor | None, rows: Tensor
    ) -> Outcome:
        """Add the gradient of one recorded batch of states."""
        scored = self.policy.score(experience, *batch)
        advantage = advantages[scored.node]
        mask = None if keep is None else keep[scored.node].to(advantage.device)[:, None]
        weight = scored.weight * self._trusted(scored.log_ratio, advantage[:, None], scored.divergence)
        penalties = {**scored.penalties, **self._guarded(scored.log_ratio, advantage, mask)}
        loss, metrics = policy_loss(
            scored.log_ratio,
            torch.zeros_like(scored.log_ratio),
            advantage,
            mask,
            surrogate=self.surrogate,
            weight=weight,
            penalty=self._penalty(penalties),
            reduce="token",
            denom=rows,
        )
        self.policy.weights.backward(loss)
        for name, value in penalties.items():
            metrics[name] = _pair(value.detach())
        if self.balance is not None:
            metrics |= self.balance.metrics(metrics["loss"][1])
        detached = scored.log_ratio.detach()
        if self.controls.variance is not None:
            metrics["ratio_variance"] = ratio_variance(detached, torch.ones_like(detached) if mask is None else mask)
        held = held_columns(detached, torch.zeros_like(detached), advantage, mask, surrogate=self.surrogate)
        statistics = step_statistics(
            detached, scored.steps, advantage[:, None], mask, held, num_steps=experience.plan.num_steps
        )
        return Outcome(statistics.cpu(), metrics, detached.abs().max().cpu())

    def _penalty(self, penalties: dict[str, Tensor]) -> Tensor | None:
        scaled = [getattr(self.recipe.objective, name) * value for name, value in penalties.items()]
        return torch.stack(scaled).sum(0) if scaled else None

    def _guarded(self, log_ratio: Tensor, advantage: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        """LLDS on edges [E, 1], each an action of its own; none if the recipe does not ask for it."""
        objective = self.recipe.objective
        if not objective.llds:
            return {}
        good = advantage if objective.llds_rows == "good" else None
        return {"llds": likelihood_guard(log_ratio, torch.zeros_like(log_ratio), mask, good)}

    def _trusted(self, log_ratio: Tensor, advantage: Tensor, divergence: Tensor) -> Tensor | float:
        """Flow-DPPO's mask (2606.11025): 0 where a step has moved too far and would move further."""
        limit = self.recipe.objective.trust_nats
        if limit is None:
            return 1.0
        outward = (log_ratio.detach() * advantage) > 0
        return (~(outward & (divergence >= limit / self.elements))).float()


class NeighbourObjective(Unmeasured):
    """Neighbor GRPO: the ratio of a choice among the group's next states."""

    def __init__(self, recipe: Recipe, policy: FlowPolicy, elements: int) -> None:
        self.recipe, self.policy = recipe, policy
        self.surrogate = surrogate_of(recipe, elements)
        self.options = recipe.objective.form_options

    def prepare(self, experience: Experience) -> None:
        """Nothing: the rollout has recorded it."""

    def rows(self, experience: Experience, part: int, keep: Tensor | None) -> int:
        """Anchors of one part: its trained states."""
        return sum(b.stop - b.start for _, b in experience.batches(part, keep))

    def batches(self, experience: Experience, part: int, keep: Tensor | None) -> Iterator[Edges]:
        """Recorded batches of states."""
        return experience.batches(part, keep)

    def backward(
        self, experience: Experience, batch: Edges, advantages: Tensor, keep: Tensor | None, rows: Tensor
    ) -> Outcome:
        """Add the gradient of one recorded batch of anchors, each over the samples of its group."""
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
        advantage = quasi_norm(advantages[transitions.node].to(x), group, p=self.options.get("p", 0.8))
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


@dataclass(frozen=True)
class _Images:
    """Whole groups of images at one noise level: leaves as indices into the rollout's, and the step."""

    leaves: Tensor
    step: int


class ForwardObjective(Unmeasured):
    """A loss of the forward process (`core.forward`) on the images of a rollout.

    Noise levels are those of the rollout's own table, for which every replay variant of the denoiser is exact;
    the released codes also draw levels between them. The last level before 0 is never drawn.
    """

    def __init__(
        self,
        recipe: Recipe,
        policy: FlowPolicy,
        elements: int,
        old: Callable[[], AbstractContextManager[None]] | None,
    ) -> None:
        objective = recipe.objective
        self.recipe, self.policy, self.old = recipe, policy, old
        self.surrogate = surrogate_of(recipe, elements)
        method = form_of(recipe)
        assert method is not None
        self.method = method
        self.compares = objective.kl > 0 or objective.form in ("dgpo", "flow_dpo")
        self.several = recipe.optimizer.updates * recipe.optimizer.epochs > 1
        self._before: dict[tuple[int, int], Tensor] = {}

    def prepare(self, experience: Experience) -> None:
        """Predictions of the policy before it moves, where several updates will need them."""
        self._before = {}
        if not self.several:
            return
        with torch.no_grad(), self.old() if self.old is not None else nullcontext():
            for part in range(experience.updates):
                for batch in self.batches(experience, part, None):
                    x = self._noised(experience, batch)[2]
                    self._before[batch.step, int(batch.leaves[0])] = self._velocity(experience, batch, x)

    def rows(self, experience: Experience, part: int, keep: Tensor | None) -> int:
        """(Image, noise level) pairs of one part."""
        return sum(self._kept(experience, b, keep) for b in self.batches(experience, part, keep))

    def batches(self, experience: Experience, part: int, keep: Tensor | None) -> Iterator[_Images]:
        """Whole groups at one of the drawn noise levels."""
        low, high = experience.part(part)
        owner = experience.rollout.leaf_prompt
        count = max(self.policy.batch // self.recipe.rollout.group, 1)
        for step in self._steps(experience):
            for first in range(low, high, count):
                chosen = (owner >= first) & (owner < min(first + count, high))
                yield _Images(chosen.nonzero().flatten(), step)

    def backward(
        self, experience: Experience, batch: _Images, advantages: Tensor, keep: Tensor | None, rows: Tensor
    ) -> Outcome:
        """Add the gradient of one batch of images."""
        x0, noise, x = self._noised(experience, batch)
        velocity = self._velocity(experience, batch, x)
        nodes = experience.rollout.leaf[batch.leaves]
        noised = Noised(
            velocity=velocity,
            old=self._old(experience, batch, x, velocity),
            reference=self._reference(experience, batch, x) if self.compares else None,
            x0=x0,
            noise=noise,
            sigma=experience.plan.sigmas[batch.step],
            advantage=advantages[nodes],
            group=experience.groups[batch.leaves].to(x.device),
        )
        loss, log_ratio = self.method(noised, self.surrogate)
        metrics = {"loss": _pair(loss.detach()), "log_ratio_sq": _pair(log_ratio.square())}
        metrics["ratio"] = _pair(log_ratio.exp())
        if self.recipe.objective.kl and noised.reference is not None:
            apart = (velocity.float() - noised.reference.float()).square().flatten(1).mean(1)
            metrics["kl"] = _pair(apart.detach())
            loss = loss + self.recipe.objective.kl * apart
        kept = torch.ones_like(loss) if keep is None else keep[nodes].to(loss)
        self.policy.weights.backward((kept * loss).sum() / rows)
        step = torch.full_like(log_ratio, batch.step, dtype=torch.long)
        total = experience.plan.num_steps
        adv = advantages[nodes].to(log_ratio)
        column = log_ratio[:, None]
        held = held_columns(column, torch.zeros_like(column), adv, surrogate=self.surrogate)[:, 0]
        statistics = step_statistics(log_ratio, step, adv, None, held, num_steps=total)
        return Outcome(statistics.cpu(), metrics, log_ratio.abs().max().cpu())

    def _steps(self, experience: Experience) -> list[int]:
        """Levels of this rollout, rising; drawn once for all its prompts, whichever process has them."""
        total, count = experience.plan.num_steps - 1, self.recipe.objective.times
        if count is None or count >= total:
            return list(range(total))
        key = experience.keys[0] if experience.key is None else experience.key
        generator = torch.Generator().manual_seed(address(key, -2))
        return sorted(torch.randperm(total, generator=generator)[:count].tolist())

    def _kept(self, experience: Experience, batch: _Images, keep: Tensor | None) -> int:
        return len(batch.leaves) if keep is None else int(keep[experience.rollout.leaf[batch.leaves]].sum())

    def _noised(self, experience: Experience, batch: _Images) -> tuple[Tensor, Tensor, Tensor]:
        """Clean latents, noise (one for the images of a prompt, as DGPO has it) and noised latents."""
        rollout = experience.rollout
        x0 = self.policy.brought(rollout.x[batch.leaves.to(rollout.x.device)])
        keys = [address(experience.keys[p], -1, batch.step) for p in rollout.leaf_prompt[batch.leaves].tolist()]
        noise = draw_noise(x0.shape[1:], keys, x0.device)
        sigma = experience.plan.sigmas[batch.step]
        return x0, noise, ((1.0 - sigma) * x0.float() + sigma * noise).to(x0.dtype)

    def _velocity(self, experience: Experience, batch: _Images, x: Tensor) -> Tensor:
        self.policy.bind(experience.plan)
        owners = experience.rollout.leaf_prompt[batch.leaves].tolist()
        return self.policy.velocity_of(experience.prompts)(x, batch.step, owners)

    def _old(self, experience: Experience, batch: _Images, x: Tensor, velocity: Tensor) -> Tensor:
        before = self._before.get((batch.step, int(batch.leaves[0])))
        if before is not None:
            return before
        if self.old is None:
            return velocity.detach()
        with torch.no_grad(), self.old():
            return self._velocity(experience, batch, x)

    def _reference(self, experience: Experience, batch: _Images, x: Tensor) -> Tensor:
        with torch.no_grad(), self.policy.reference():
            return self._velocity(experience, batch, x)


def _pair(values: Tensor) -> Tensor:
    return torch.stack([values.sum(), values.new_tensor(float(values.numel()))])


def objective_of(
    recipe: Recipe,
    policy: FlowPolicy,
    elements: int,
    old: Callable[[], AbstractContextManager[None]] | None,
    controls: Controls,
) -> Objective:
    """The objective a recipe asks for.

    Args:
        recipe: what to do.
        policy: what is trained.
        elements: numbers in a latent.
        old: a context in which the policy is the one that sampled, where that lags behind.
        controls: coefficients that move.
    """
    if recipe.objective.form in FORWARD_FORMS:
        return ForwardObjective(recipe, policy, elements, old)
    if recipe.objective.form == "neighbour":
        return NeighbourObjective(recipe, policy, elements)
    return TransitionObjective(recipe, policy, elements, controls)


def form_of(recipe: Recipe) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """The forward-process loss of a recipe with its hyper-parameters, or None for another form.

    Raises:
        ValueError: a hyper-parameter that the form does not have.
    """
    name, options = recipe.objective.form, recipe.objective.form_options
    function: Callable[..., Any] | None = FORWARD.get(name)
    target = function or (quasi_norm if name == "neighbour" else None)
    found = inspect.signature(target).parameters.items() if target else ()
    known = [n for n, p in found if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            raise ValueError(
                f"objective.form_options has {option!r}, which form {name} does not take; it takes "
                f"{', '.join(known) or 'none'}"
            )
        if not options[option] > 0:
            raise ValueError(f"objective.form_options.{option} is {options[option]:g}; use a number above 0")
    return partial(function, **options) if function else None


def compares_with_base(recipe: Recipe) -> bool:
    """Whether anything is compared with the base model, whose full weights must then be kept."""
    objective = recipe.objective
    compares = objective.kl > 0 or objective.w2 > 0 or objective.form in ("dgpo", "flow_dpo")
    return compares and objective.anchor is None


def penalties_of(recipe: Recipe) -> list[str]:
    """The penalties that a recipe gives a weight."""
    return [name for name in PENALTIES if getattr(recipe.objective, name) > 0]
