"""The record of a rollout with its images, and the parts into which its prompts or edges are cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..core.addressing import address
from ..core.trees import node_values
from ..samplers.plans import Plan
from ..samplers.transitions import Rollout, Transitions, batches_of, edge_bounds, join_rollouts


@dataclass(frozen=True)
class ImagesBeside:
    """Images of data that a penalty learns beside a rollout, one for each of its P prompts.

    Attributes:
        x: [P, ...] their states, in the storage dtype.
        prompts: P texts, the images' own.
    """

    x: Tensor
    prompts: tuple[str, ...]


@dataclass(frozen=True)
class Scouted:
    """What the scouts of P prompts have found; see `training.images.scouting`.

    Attributes:
        scores: [P, S] weighted sums of the rewards of the scouts; NaN where no reward applies.
        numbers: [P, G] the scouts whose seeds are sampled again, in rising order.
        evaluations: number of states that the denoiser evaluated.
    """

    scores: Tensor
    numbers: Tensor
    evaluations: int


@dataclass(frozen=True)
class Experience:
    """A finished rollout with its images.

    Attributes:
        rollout: the trees.
        plan: the plan of the rollout.
        prompts: P texts.
        samples: images [L, 3, H, W] in [0, 1] (videos [L, F, 3, H, W]) or sounds [L, C, S] on the CPU, or L texts, in
            the order of the leaves.
        updates: number of parts into which the prompts are cut, one for each update.
        keys: P numbers; each addresses the noise of one prompt.
        cuts: the first prompt of each part except the first part. Without it, the parts are nearly equal.
        key: addresses the random numbers that are drawn once for all prompts of an iteration. Without it, this is the
            first of `keys`.
        by_edges: whether the parts share the trained edges, and not the prompts.
        teachers: the name of each prompt's teacher; empty if there are no teachers.
        contexts: P texts, what each prompt's teacher reads, with its pictures; empty if all read the prompts.
        beside: images of data, one for each of all P prompts; None if no penalty learns them.
        rows: what the data say of each prompt, for losses that ask the rewards.
        marks: name -> [N] values of the nodes that extensions leave for penalties.
        scouted: what the scouts of all P prompts have found; empty if there were none.
        sampling_rate: of sounds, samples a second.
    """

    rollout: Rollout
    plan: Plan
    prompts: tuple[str, ...]
    samples: Tensor | list[str]
    updates: int
    keys: tuple[int, ...] = ()
    cuts: tuple[int, ...] | None = None
    key: int | None = None
    by_edges: bool = False
    teachers: tuple[str, ...] = ()
    contexts: tuple[str, ...] = ()
    beside: ImagesBeside | None = None
    rows: tuple[Any, ...] = ()
    scouted: tuple[Scouted, ...] = ()
    sampling_rate: int | None = None
    marks: dict[str, Tensor] = field(default_factory=dict, compare=False)

    def mark(self, name: str, values: Tensor) -> None:
        """Leave values [N] of the nodes for penalties, under a name."""
        self.marks[name] = values

    def marks_of(self, node: Tensor) -> dict[str, Tensor]:
        """Name -> [E] marks of some nodes [E], on the device of `node`."""
        return {name: values.to(node.device)[node] for name, values in self.marks.items()}

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

    def given(self) -> dict[str, list[Any]]:
        """Name -> L values that rewards get beside the columns of the prompts.

        Of texts, the key of each text's prompt. Of sounds, their sampling rate. Of given samples, the place of each
        among the samples of its prompt, and their number.
        """
        texts = not isinstance(self.samples, Tensor)
        own = {"noise_key": [self.keys[p] for p in self.rollout.leaf_prompt.tolist()]} if texts and self.keys else {}
        if self.sampling_rate is not None:
            own = {"sampling_rate": [self.sampling_rate] * len(self.rollout.leaf_prompt)}
        if not self.plan.given:
            return own
        places = self.rollout.root[self.rollout.leaf].tolist()
        return {**own, "given_place": places, "given_places": [self.plan.roots] * len(places)}

    def record(self) -> dict[str, float]:
        """The number of states that the denoiser evaluated, with those of scouts."""
        return {"evaluations": self.rollout.evaluations + sum(one.evaluations for one in self.scouted)}

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
        Given images have no `noise` either.
        """
        rollout, parents = self.rollout, self.rollout.parent.tolist()
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)
        own = self.plan.root_spread is None and bool(self.keys) and not self.plan.given
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
        rollout, below = self.rollout, self._images_below(self.outcomes)
        node = rollout.leaf
        while bool((alone := below[node] == 1).any()):
            node = torch.where(alone, rollout.parent[node], node)
        return node

    def image_of_node(self) -> Tensor:
        """[N] the image to which each node leads, as an index of the leaves; any of them if there are several."""
        found = torch.full((len(self.rollout.parent),), -1)
        node, image = self.rollout.leaf, torch.arange(len(self.rollout.leaf))
        while len(node):
            found[node] = image
            node = self.rollout.parent[node]
            node, image = node[node >= 0], image[node >= 0]
        return found

    def kept(self, chosen: Tensor) -> Tensor:
        """[N] bool: the nodes that are trained if only the chosen images [L] are trained.

        A node is trained if one of the images below it is chosen. BranchGRPO chooses one of each last split at least,
        so it prunes only after the last split.
        """
        shown = self._images_below(self.outcomes)
        return (self._images_below(self.outcomes & chosen) > 0) | (shown == 0)

    def _images_below(self, images: Tensor) -> Tensor:
        """[N] number of some of the images [L] below each node."""
        count = torch.zeros(len(self.rollout.parent), dtype=torch.long)
        node = self.rollout.leaf[images]
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
    texts = [text for part in samples if isinstance(part, list) for text in part]
    # No reference to the states is kept here, so that their memory is freed while they are joined.
    first = replace(chunks[0], rollout=replace(rollouts[0], transitions=()))
    chunks.clear()
    images = [part for part in samples if isinstance(part, Tensor)]
    samples.clear()
    return replace(first, rollout=join_rollouts(rollouts), samples=torch.cat(images) if images else texts)


def part_of(prompts: int, updates: int, update: int) -> tuple[int, int]:
    """Range of prompts in part `update` of `updates` nearly equal parts."""
    return update * prompts // updates, (update + 1) * prompts // updates


def part_bounds(prompts: int, updates: int, cuts: Sequence[int] | None) -> list[int]:
    """The first prompt of each part, and at last the number of prompts. Without `cuts` the parts are nearly equal."""
    if cuts is None:
        cuts = [part_of(prompts, updates, k)[0] for k in range(1, updates)]
    return [0, *cuts, prompts]
