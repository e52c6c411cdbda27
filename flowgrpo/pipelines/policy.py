"""The policy of a flow-matching pipeline: rollouts of a plan, and their trained edges scored again."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.addressing import address
from ..core.trees import node_values
from ..samplers.kernels import Coefficients, guard_weight, jacobian, log_ratio, row_mean, step
from ..samplers.plans import Plan
from ..samplers.rollout import Guide, RolloutRunner
from ..samplers.transitions import (
    ReplayedEdges,
    Rollout,
    Transitions,
    Velocity,
    batches_of,
    brought,
    join_rollouts,
    replay,
    to_host,
)
from ..weights.trained import TrainedWeights
from .denoiser import Denoiser
from .placement import offload_of
from .prompt_cache import encode_ahead

Ratio = Literal["gaussian", "guard", "cps_released"]
Weighting = Literal["none", "guard", "noise", "equalise"]


@dataclass(frozen=True)
class Experience:
    """A finished rollout with its images.

    Attributes:
        rollout: the trees.
        plan: what was done.
        prompts: P texts.
        samples: images [L, 3, H, W] in [0, 1] (videos [L, F, 3, H, W]), leaf by leaf, on the CPU.
        updates: how many parts of whole prompts it was cut into.
        keys: P numbers that address the noise of each prompt.
        cuts: first prompts of the parts after the first; nearly equal parts if left out.
        key: addresses what is drawn once for all prompts of an iteration; the first of `keys` if left out.
    """

    rollout: Rollout
    plan: Plan
    prompts: tuple[str, ...]
    samples: Tensor
    updates: int
    keys: tuple[int, ...] = ()
    cuts: tuple[int, ...] | None = None
    key: int | None = None

    @property
    def prompt_of_sample(self) -> list[int]:
        """Prompt of each leaf, as an index into `prompts`."""
        return self.rollout.leaf_prompt.tolist()

    @property
    def groups(self) -> Tensor:
        """[L] group of each leaf: its prompt, and for side branches also where they left and how they went on.

        TempFlow-GRPO (2508.04324) compares branches of one step only, and G²RPO (2510.01982) those of one stride.
        """
        rollout = self.rollout
        if not any(step.side for step in self.plan.steps):
            return rollout.leaf_prompt
        size = self.plan.num_steps + 1
        left = rollout.leaf_prompt * size + rollout.branch[rollout.leaf]
        return left * size + rollout.stride[rollout.leaf].clamp(max=self.plan.num_steps)

    @property
    def columns(self) -> int:
        """Denoising steps."""
        return self.plan.num_steps

    @property
    def lengths(self) -> None:
        """Images have none."""

    @property
    def log_probs(self) -> None:
        """None: the density of an image says nothing of it."""

    @property
    def parts(self) -> None:
        """Images are not cut."""

    def record(self) -> dict[str, float]:
        """Calls of the denoiser, counted in states."""
        return {"evaluations": self.rollout.evaluations}

    @property
    def outcomes(self) -> Tensor:
        """[L] bool: leaves that are images of the plan, not previews of one of its states."""
        rollout, plan = self.rollout, self.plan
        sides = [(i + 1, plan.coefficients(i)[1]) for i, step in enumerate(plan.steps) if step.side]
        probed = torch.tensor([branch for branch, c in sides if c is not None and c.std == 0.0], dtype=torch.long)
        return ~torch.isin(rollout.branch[rollout.leaf], probed)

    def origins(self) -> list[dict[str, Any]]:
        """[L] for each leaf: `path`, the [step, child] of every branching above it, and `noise`, the seed of its root.

        Without `noise` where the initial noises of a prompt share a part, which no single seed gives.
        """
        rollout, parents = self.rollout, self.rollout.parent.tolist()
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)
        own = self.plan.root_spread is None and bool(self.keys)
        found = []
        for node in rollout.leaf.tolist():
            prompt, root = int(rollout.prompt[node]), int(rollout.root[node])
            path: list[list[int]] = []
            while (parent := parents[node]) >= 0:
                if len(children[parent]) > 1:
                    path.append([int(rollout.depth[parent]), children[parent].index(node)])
                node = parent
            noise = {"noise": address(self.keys[prompt], 0, root)} if own else {}
            found.append({"path": path[::-1], **noise})
        return found

    def leaf_values(self, leaf: Tensor) -> Tensor:
        """[N] values at the leaves [L], NaN at inner nodes."""
        values = torch.full((len(self.rollout.parent),), torch.nan, dtype=torch.float32)
        values[self.rollout.leaf] = leaf.float()
        return values

    def node_advantages(self, leaf: Tensor) -> Tensor:
        """[N] advantage of each node: the mean of those of the leaves [L] below it (for chains, the leaf's own)."""
        values = self.leaf_values(leaf.masked_fill(~self.outcomes, torch.nan))
        return node_values(self.rollout.parent, values)

    def siblings(self, among: str) -> Tensor:
        """[L] the groups, or with `among` "split" the last split of the tree above each leaf."""
        if among == "group":
            return self.groups
        rollout, below = self.rollout, self._images_below()
        node = rollout.leaf
        while bool((alone := below[node] == 1).any()):
            node = torch.where(alone, rollout.parent[node], node)
        return node

    def kept(self, chosen: Tensor) -> Tensor:
        """[N] bool: nodes that are trained if of the images only the chosen [L] are.

        A node with one image below it stays if its image does; a node with several always stays (BranchGRPO prunes
        after the last split only).
        """
        rollout, below = self.rollout, self._images_below()
        node = rollout.leaf[self.outcomes & ~chosen]
        keep = torch.ones(len(rollout.parent), dtype=torch.bool)
        while len(node):
            keep[node] = False
            node = rollout.parent[node]
            node = node[(node >= 0) & (below[node] == 1)]
        return keep

    def _images_below(self) -> Tensor:
        """[N] images that come of each node, previews not counted."""
        count = torch.zeros(len(self.rollout.parent), dtype=torch.long)
        node = self.rollout.leaf[self.outcomes]
        while len(node):
            count.index_add_(0, node, torch.ones_like(node))
            node = self.rollout.parent[node]
            node = node[node >= 0]
        return count

    def part(self, update: int) -> tuple[int, int]:
        """Range of prompts in part `update`; it may be empty."""
        bounds = part_bounds(len(self.prompts), self.updates, self.cuts)
        return bounds[update], bounds[update + 1]

    def batches(self, update: int, keep: Tensor | None = None) -> Iterator[tuple[Transitions, slice]]:
        """The recorded batches of states of one part, in the order of sampling.

        With `keep` [N] only batches with an edge to a node that is kept.
        """
        low, high = self.part(update)
        for transitions, batch in batches_of(self.rollout):
            if not low <= transitions.prompt[batch.start] < high:
                continue
            if keep is None or bool(keep[transitions.node[transitions.edges_of(batch)]].any()):
                yield transitions, batch


def join_experiences(chunks: list[Experience]) -> Experience:
    """Chunks of one rollout, in the order of their prompts, as one; see `samplers.chunks`. `chunks` is emptied."""
    if len(chunks) == 1:
        return chunks.pop()
    rollouts, samples = [chunk.rollout for chunk in chunks], [chunk.samples for chunk in chunks]
    # Without its states, which are let go as they are joined.
    first = replace(chunks[0], rollout=replace(rollouts[0], transitions=()))
    chunks.clear()
    return replace(first, rollout=join_rollouts(rollouts), samples=torch.cat(samples))


def part_of(prompts: int, updates: int, update: int) -> tuple[int, int]:
    """Range of prompts in part `update` of `updates` nearly equal parts."""
    return update * prompts // updates, (update + 1) * prompts // updates


def part_bounds(prompts: int, updates: int, cuts: Sequence[int] | None) -> list[int]:
    """Where the parts of a rollout begin, and its end; without `cuts` they are nearly equal."""
    if cuts is None:
        cuts = [part_of(prompts, updates, k)[0] for k in range(1, updates)]
    return [0, *cuts, prompts]


@dataclass(frozen=True)
class ScoredEdges:
    """Trained edges under the present policy; one row each, one column.

    Attributes:
        log_ratio: [E, 1] log of the importance ratio in the chosen form, with gradients.
        node: [E] node each edge leads to.
        steps: [E, 1] denoising step.
        weight: [E, 1] step weight.
        divergence: [E, 1] KL of the sampling policy's step and this one, per latent element, detached.
        shift: [E, ...] how far the step's mean has moved since sampling, with gradients.
        std: standard deviation of the step's noise, per element.
        to_reference: gives [E, ...], the mean less the reference's, by another call of the denoiser.
        to_guided: gives [E, ...], the mean less that of the guided step that was taken; 0 where it had no guide.
    """

    log_ratio: Tensor
    node: Tensor
    steps: Tensor
    weight: Tensor
    divergence: Tensor
    shift: Tensor
    std: float
    to_reference: Callable[[], Tensor]
    to_guided: Callable[[], Tensor]


class FlowPolicy:
    """A pipeline's denoiser as a policy.

    Args:
        denoiser: the pipeline.
        weights: what is trained.
        ratio: form of the importance ratio, see `samplers.kernels.log_ratio`.
        weight: per-step weight of the surrogate: `guard` is 1/|∂μ/∂v| (GRPO-Guard's δ, exact for every
            kernel), `noise` is s over its mean on the trained steps (TempFlow-GRPO, Eq. 8), `equalise` is s/|J|
            over its median on them (SAGE-GRPO, 2603.21872: the gradient of a plain ratio is |J|/s).
        batch: states in one call of the denoiser.
        decode_batch: images decoded at once.
        store: where the states of a rollout wait between sampling and training: `device` or `host`.

    Attributes:
        reference: a context in which the pipeline is what penalties compare with; the base model, or an anchor.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        weights: TrainedWeights,
        *,
        ratio: Ratio = "guard",
        weight: Weighting = "guard",
        batch: int = 32,
        decode_batch: int = 32,
        store: Literal["device", "host"] = "device",
    ) -> None:
        self.denoiser, self.weights = denoiser, weights
        self.ratio, self.weight = ratio, weight
        self.batch, self.decode_batch = batch, decode_batch
        self.store = to_host if store == "host" else None
        self.reference: Callable[[], AbstractContextManager[None]] = weights.reference
        self.device = next(iter(weights.modules.values())).device

    def velocity_of(self, prompts: Sequence[str]) -> Velocity:
        """The velocity as the executor calls it: states, step, and for each state the row of its prompt."""
        return lambda x, i, rows: self.denoiser.velocity(self.brought(x), i, [prompts[row] for row in rows])

    def brought(self, x: Tensor) -> Tensor:
        """States of a rollout, on the device of the model."""
        return brought(x, self.device)

    def sample(
        self,
        prompts: Sequence[str],
        keys: Sequence[int],
        plan: Plan,
        updates: int = 1,
        guide: Guide | None = None,
        cuts: Sequence[int] | None = None,
        chunk: slice | None = None,
        noises: Sequence[int] | None = None,
    ) -> Rollout:
        """Roll out one tree per prompt; `keys` address the noise, `updates` or `cuts` say where its parts begin.

        With a `chunk`, prompts of this range only, under the same numbers and with the same noise as beside the others;
        `noises` are the seeds of their initial noises themselves, root by root.
        """
        self.bind(plan)
        self.denoiser.caller.keep_encodings(len(prompts))
        if self.denoiser.variant == "auto":
            # The check settles the layout of the states, and is to see the path that training takes.
            with torch.enable_grad():
                self.denoiser.self_check(prompts[:2])
        probe = self.denoiser.probe
        runner = RolloutRunner(
            self.velocity_of(prompts), plan, probe.latent_shape,
            dtype=probe.dtype, device=self.device, batch=self.batch,
            cuts=part_bounds(len(prompts), updates, cuts)[1:-1], guide=guide, initial_std=self.denoiser.initial_std,
            store=self.store,
        )  # fmt: skip
        chosen = chunk or slice(0, len(keys))
        encode_ahead(self.denoiser.pipe, prompts[chosen])
        return runner.run(keys[chosen], chosen.start, noises)

    def bind(self, plan: Plan) -> None:
        """Put the denoiser on a plan's noise levels."""
        if plan.sigmas != self.denoiser.sigmas:
            self.denoiser.bind(plan.sigmas)

    def decode(self, rollout: Rollout, prompts: Sequence[str]) -> Tensor:
        """Images of the leaves, on the CPU."""
        texts = [prompts[p] for p in rollout.leaf_prompt.tolist()]
        size = self.decode_batch
        ranges = [slice(k, k + size) for k in range(0, len(texts), size)]
        with offload_of(self.denoiser.pipe).needed("vae", when_called=True):
            parts = [self.denoiser.decode(self.brought(rollout.x[k]), texts[k]).cpu() for k in ranges]
        return torch.cat(parts)

    def score(self, experience: Experience, transitions: Transitions, batch: slice) -> ScoredEdges:
        """Evaluate one recorded batch of states again and compare with the sampling policy.

        Δμ = J·Δv with J = ∂μ/∂v a number per step, so the ratio is taken from the shift of the velocity
        itself: it is exactly 1 while the prediction is unchanged, and loses nothing to subtraction.
        """
        self.bind(experience.plan)
        c = transitions.coefficients
        velocity = self.velocity_of(experience.prompts)
        replayed = replay(velocity, transitions, batch)
        rows = replayed.rows()
        old = self.brought(replayed.old_velocity())
        scale = jacobian(c.sigma, c.sigma_next, c.kappa)
        x_next = self.brought(transitions.x_next[replayed.edges])
        noise = step(old[rows], self.brought(transitions.x[batch])[rows], c, x_next=x_next).noise
        shift = (scale * (replayed.velocity - old))[rows]
        ratio = log_ratio(shift, noise, c.std, form=self.ratio)
        ones = torch.ones_like(ratio.detach())[:, None]
        return ScoredEdges(
            log_ratio=ratio[:, None],
            node=transitions.node[replayed.edges],
            steps=torch.full_like(ones, transitions.step, dtype=torch.long),
            weight=ones * self.step_weight(experience.plan, transitions.step, c),
            divergence=row_mean(shift.detach().float().square())[:, None] / (2.0 * c.std**2),
            shift=shift,
            std=c.std,
            to_reference=partial(self._to_reference, transitions, replayed, velocity),
            to_guided=partial(self._to_guided, transitions, replayed, shift),
        )

    def _to_reference(self, transitions: Transitions, replayed: ReplayedEdges, velocity: Velocity) -> Tensor:
        """[E, ...] the mean of each edge less the reference's, with gradients."""
        c, batch = transitions.coefficients, replayed.states
        with torch.no_grad(), self.reference():
            reference = velocity(transitions.x[batch], transitions.step, transitions.prompt[batch])
        scale = jacobian(c.sigma, c.sigma_next, c.kappa)
        return (scale * (replayed.velocity - reference))[replayed.rows()]

    def _to_guided(self, transitions: Transitions, replayed: ReplayedEdges, shift: Tensor) -> Tensor:
        """[E, ...] the mean of each edge less the guided one, with gradients."""
        wide = shift.to(torch.promote_types(shift.dtype, torch.float32))
        if transitions.shift is None:
            # Before the guide is ready there is nothing to learn from it.
            return wide - wide.detach()
        target = transitions.coefficients.std * self.brought(transitions.shift[replayed.edges])
        return wide - target.to(wide.dtype).detach()

    def step_weight(self, plan: Plan, i: int, coefficients: Coefficients) -> float:
        """Weight of the surrogate at step `i`."""
        if self.weight == "guard":
            return guard_weight(coefficients)
        trained = [plan.trained_coefficients(t) for t in plan.trained_steps]
        if self.weight == "noise":
            return coefficients.std * len(trained) / sum(c.std for c in trained)
        if self.weight == "equalise":
            scales = [c.std * guard_weight(c) for c in trained]
            return coefficients.std * guard_weight(coefficients) / statistics.median(scales)
        return 1.0
