"""The policy of a flow-matching pipeline: it rolls out a plan, and scores the trained edges again."""

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
    edge_bounds,
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
        plan: the plan of the rollout.
        prompts: P texts.
        samples: images [L, 3, H, W] in [0, 1] (videos [L, F, 3, H, W]), in the order of the leaves, on the CPU.
        updates: number of parts into which the prompts are cut, one for each update.
        keys: P numbers; each addresses the noise of one prompt.
        cuts: the first prompt of each part except the first part. Without it, the parts are nearly equal.
        key: addresses the random numbers that are drawn once for all prompts of an iteration. Without it, this is the
            first of `keys`.
        by_edges: whether the parts share the trained edges, and not the prompts.
    """

    rollout: Rollout
    plan: Plan
    prompts: tuple[str, ...]
    samples: Tensor
    updates: int
    keys: tuple[int, ...] = ()
    cuts: tuple[int, ...] | None = None
    key: int | None = None
    by_edges: bool = False

    @property
    def prompt_of_sample(self) -> list[int]:
        """Prompt of each leaf, as an index into `prompts`."""
        return self.rollout.leaf_prompt.tolist()

    @property
    def groups(self) -> Tensor:
        """[L] group of each leaf: its prompt, and for a side branch also the step where it begins and its stride.

        TempFlow-GRPO (2508.04324) compares only branches of one step. G²RPO (2510.01982) compares only branches of one
        stride.
        """
        rollout = self.rollout
        if not any(step.side for step in self.plan.steps):
            return rollout.leaf_prompt
        size = self.plan.num_steps + 1
        left = rollout.leaf_prompt * size + rollout.branch[rollout.leaf]
        return left * size + rollout.stride[rollout.leaf].clamp(max=self.plan.num_steps)

    @property
    def columns(self) -> int:
        """Number of denoising steps."""
        return self.plan.num_steps

    @property
    def lengths(self) -> None:
        """None: images have no lengths."""

    @property
    def log_probs(self) -> None:
        """None: the density of an image says nothing about its quality."""

    @property
    def parts(self) -> None:
        """None: images are not cut into parts."""

    def record(self) -> dict[str, float]:
        """The number of states that the denoiser evaluated."""
        return {"evaluations": self.rollout.evaluations}

    @property
    def outcomes(self) -> Tensor:
        """[L] bool: True for a leaf that is an image of the plan, False for a preview of an intermediate state."""
        rollout, plan = self.rollout, self.plan
        sides = [(i + 1, plan.coefficients(i)[1]) for i, step in enumerate(plan.steps) if step.side]
        probed = torch.tensor([branch for branch, c in sides if c is not None and c.std == 0.0], dtype=torch.long)
        return ~torch.isin(rollout.branch[rollout.leaf], probed)

    def origins(self) -> list[dict[str, Any]]:
        """For each of L leaves: `path`, the [step, child] of every branching above it, and `noise`, the root's seed.

        There is no `noise` if the initial noises of a prompt share a part, because then no single seed gives them.
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
        """[N] advantage of each node: the mean advantage of the leaves [L] below it (for a chain, the leaf's own)."""
        values = self.leaf_values(leaf.masked_fill(~self.outcomes, torch.nan))
        return node_values(self.rollout.parent, values)

    def siblings(self, among: str) -> Tensor:
        """[L] the group of each leaf, or the last split of the tree above the leaf if `among` is "split"."""
        if among == "group":
            return self.groups
        rollout, below = self.rollout, self._images_below()
        node = rollout.leaf
        while bool((alone := below[node] == 1).any()):
            node = torch.where(alone, rollout.parent[node], node)
        return node

    def kept(self, chosen: Tensor) -> Tensor:
        """[N] bool: the nodes that are trained if only the chosen images [L] are trained.

        A node with one image below it is trained if this image is chosen. A node with several images is always trained,
        because BranchGRPO prunes only after the last split.
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
        """[N] number of images below each node, without previews."""
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
        """The recorded batches of states of one part, in the order of sampling, or in a random order by edges.

        With `keep` [N], only batches that have an edge to a kept node.

        Raises:
            ValueError: the parts share the edges, and there are more parts than batches.
        """
        recorded = list(batches_of(self.rollout))
        if self.by_edges:
            key = self.keys[0] if self.key is None else self.key
            generator = torch.Generator().manual_seed(address(key, -3))
            recorded = [recorded[k] for k in torch.randperm(len(recorded), generator=generator).tolist()]
            counts = [len(transitions.node[transitions.edges_of(batch)]) for transitions, batch in recorded]
            chosen = recorded[slice(*edge_bounds(counts, self.updates)[update : update + 2])]
        else:
            low, high = self.part(update)
            chosen = [(t, batch) for t, batch in recorded if low <= t.prompt[batch.start] < high]
        for transitions, batch in chosen:
            if keep is None or bool(keep[transitions.node[transitions.edges_of(batch)]].any()):
                yield transitions, batch


def join_experiences(chunks: list[Experience]) -> Experience:
    """Join the chunks of one rollout, which are in the order of their prompts. The list `chunks` is emptied."""
    if len(chunks) == 1:
        return chunks.pop()
    rollouts, samples = [chunk.rollout for chunk in chunks], [chunk.samples for chunk in chunks]
    # No reference to the states is kept here, so that their memory is freed while they are joined.
    first = replace(chunks[0], rollout=replace(rollouts[0], transitions=()))
    chunks.clear()
    return replace(first, rollout=join_rollouts(rollouts), samples=torch.cat(samples))


def part_of(prompts: int, updates: int, update: int) -> tuple[int, int]:
    """Range of prompts in part `update` of `updates` nearly equal parts."""
    return update * prompts // updates, (update + 1) * prompts // updates


def part_bounds(prompts: int, updates: int, cuts: Sequence[int] | None) -> list[int]:
    """The first prompt of each part, and at last the number of prompts. Without `cuts` the parts are nearly equal."""
    if cuts is None:
        cuts = [part_of(prompts, updates, k)[0] for k in range(1, updates)]
    return [0, *cuts, prompts]


@dataclass(frozen=True)
class ScoredEdges:
    """Trained edges under the current policy; each edge is a row, and there is one column.

    Attributes:
        log_ratio: [E, 1] log of the importance ratio in the chosen form, with gradients.
        node: [E] the node to which each edge leads.
        steps: [E, 1] denoising step.
        weight: [E, 1] step weight.
        divergence: [E, 1] KL between the sampling policy's step and the current step, per latent element, detached.
        shift: [E, ...] how far the step's mean has moved since sampling, with gradients.
        std: standard deviation of the step's noise, per element.
        to_reference: gives [E, ...], the mean minus the reference's mean, by another call of the denoiser.
        to_guided: gives [E, ...], the mean minus the mean of the guided step that was taken; 0 if there was no guide.
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
        weights: the trained weights.
        ratio: form of the importance ratio, see `samplers.kernels.log_ratio`.
        weight: per-step weight of the surrogate: `guard` is 1/|∂μ/∂v| (GRPO-Guard's δ, exact for every
            kernel), `noise` is s divided by its mean over the trained steps (TempFlow-GRPO, Eq. 8), `equalise` is
            s/|J| divided by its median over the trained steps (SAGE-GRPO, 2603.21872: the gradient of a plain ratio is
            |J|/s).
        batch: number of states in one call of the denoiser.
        decode_batch: number of images that are decoded at once.
        store: where the states of a rollout are kept between sampling and training: `device` or `host`.

    Attributes:
        reference: a context in which the pipeline is the reference of the penalties: the base model, or an anchor.
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
        """The velocity as a function of states, step, and the row of each state's prompt, for the executor."""
        return lambda x, i, rows: self.denoiser.velocity(self.brought(x), i, [prompts[row] for row in rows])

    def brought(self, x: Tensor) -> Tensor:
        """The states of a rollout, moved to the device of the model."""
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
        """Roll out one tree for each prompt; `keys` address the noise, `updates` or `cuts` say where the parts begin.

        With a `chunk`, only the prompts of this range are rolled out. Their numbers and their noise are the same as in
        a rollout of all prompts. `noises` are the seeds of the initial noises, one for each root.
        """
        self.bind(plan)
        self.denoiser.caller.keep_encodings(len(prompts))
        if self.denoiser.variant == "auto":
            # The check finds the layout of the states. It runs with gradients, because it checks the path of training.
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
        """Bind the denoiser to a plan's noise levels."""
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
        """Evaluate one recorded batch of states again, and compare the result with the sampling policy.

        The mean shifts by Δμ = J·Δv, and J = ∂μ/∂v is one number per step. So the ratio is computed from the shift of
        the velocity. The ratio is then exactly 1 while the prediction is unchanged, and no precision is lost in a
        difference of log-probs.
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
        """[E, ...] the mean of each edge minus the reference's mean, with gradients."""
        c, batch = transitions.coefficients, replayed.states
        with torch.no_grad(), self.reference():
            reference = velocity(transitions.x[batch], transitions.step, transitions.prompt[batch])
        scale = jacobian(c.sigma, c.sigma_next, c.kappa)
        return (scale * (replayed.velocity - reference))[replayed.rows()]

    def _to_guided(self, transitions: Transitions, replayed: ReplayedEdges, shift: Tensor) -> Tensor:
        """[E, ...] the mean of each edge minus the guided mean, with gradients."""
        wide = shift.to(torch.promote_types(shift.dtype, torch.float32))
        if transitions.shift is None:
            # Until the guide is ready, this is 0, so that nothing is learnt from the guide.
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
