"""The policy of a flow-matching pipeline: rollouts of a plan, and their trained edges scored again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.objectives import gaussian_kl
from ..core.trees import depth_advantages, node_values
from ..samplers.kernels import Coefficients, guard_weight, jacobian, log_ratio, step
from ..samplers.plans import Plan
from ..samplers.rollout import Rollout, RolloutRunner, Transitions, batches_of, replay
from .denoiser import Denoiser
from .weights import TrainedWeights

Ratio = Literal["gaussian", "guard", "cps_released"]
Weighting = Literal["none", "guard", "noise"]


@dataclass(frozen=True)
class Experience:
    """A finished rollout with its images.

    Attributes:
        rollout: the trees.
        plan: what was done.
        prompts: P texts.
        images: [L, 3, H, W] in [0, 1] (videos [L, F, 3, H, W]), leaf by leaf, on the CPU.
        updates: how many parts of whole prompts it was cut into.
    """

    rollout: Rollout
    plan: Plan
    prompts: tuple[str, ...]
    images: Tensor
    updates: int

    @property
    def prompt_of_sample(self) -> list[int]:
        """Prompt of each leaf, as an index into `prompts`."""
        return self.rollout.leaf_prompt.tolist()

    @property
    def groups(self) -> Tensor:
        """[L] group of each leaf: its prompt, and for side branches also the step they left the main line at.

        TempFlow-GRPO (2508.04324) compares branches of one step only.
        """
        rollout = self.rollout
        if not any(step.side for step in self.plan.steps):
            return rollout.leaf_prompt
        return rollout.leaf_prompt * (self.plan.num_steps + 1) + rollout.branch[rollout.leaf]

    def node_advantages(self, leaf: Tensor, how: Literal["leaf", "depth"] = "leaf") -> Tensor:
        """[N] advantage of each node from values at the leaves [L].

        `leaf`: the mean over the leaves below a node (for chains, the leaf's own). `depth`: leaf *rewards* are
        fused upwards and standardised within each depth of each tree (BranchGRPO, 2509.06040).
        """
        rollout = self.rollout
        values = torch.full((len(rollout.parent),), torch.nan, dtype=torch.float32)
        values[rollout.leaf] = leaf.float()
        fused = node_values(rollout.parent, values)
        if how == "leaf":
            return fused
        tree = rollout.prompt * (int(rollout.root.max()) + 1) + rollout.root
        return depth_advantages(fused, rollout.depth, tree)

    def trained_edges(self, update: int) -> int:
        """Trained edges of one part."""
        return sum(edges.stop - edges.start for edges in (t.edges_of(b) for t, b in self.batches(update)))

    def batches(self, update: int) -> Iterator[tuple[Transitions, slice]]:
        """The recorded batches of states of one part, in the order of sampling."""
        low, high = part_of(len(self.prompts), self.updates, update)
        for transitions, batch in batches_of(self.rollout):
            if low <= transitions.prompt[batch.start] < high:
                yield transitions, batch


def part_of(prompts: int, updates: int, update: int) -> tuple[int, int]:
    """Range of prompts in part `update` of `updates` nearly equal parts."""
    return update * prompts // updates, (update + 1) * prompts // updates


@dataclass(frozen=True)
class Scored:
    """Trained edges under the present policy; one row each, one column.

    Attributes:
        log_ratio: [E, 1] log of the importance ratio in the chosen form, with gradients.
        node: [E] node each edge leads to.
        steps: [E, 1] denoising step.
        weight: [E, 1] step weight.
        penalty: [E, 1] KL to the reference, not scaled; None if not asked for.
    """

    log_ratio: Tensor
    node: Tensor
    steps: Tensor
    weight: Tensor
    penalty: Tensor | None


class FlowPolicy:
    """A pipeline's denoiser as a policy.

    Args:
        denoiser: the pipeline.
        weights: what is trained.
        ratio: form of the importance ratio, see `samplers.kernels.log_ratio`.
        weight: per-step weight of the surrogate: `guard` is 1/|∂μ/∂v| (GRPO-Guard's δ, exact for every
            kernel), `noise` is s over its mean on the trained steps (TempFlow-GRPO, Eq. 8).
        batch: states in one call of the denoiser.
        decode_batch: images decoded at once.
        reference_kl: whether `score` evaluates the reference too.
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
        reference_kl: bool = False,
    ) -> None:
        self.denoiser, self.weights = denoiser, weights
        self.ratio, self.weight = ratio, weight
        self.batch, self.decode_batch, self.reference_kl = batch, decode_batch, reference_kl
        self.device = next(iter(weights.modules.values())).device

    def velocity_of(self, prompts: Sequence[str]) -> Callable[[Tensor, int, Sequence[int]], Tensor]:
        """The velocity as the executor calls it: states, step, and for each state the row of its prompt."""
        return lambda x, i, rows: self.denoiser.velocity(x, i, [prompts[row] for row in rows])

    def sample(self, prompts: Sequence[str], keys: Sequence[int], plan: Plan, updates: int = 1) -> Rollout:
        """Roll out one tree per prompt; `keys` address the noise."""
        if plan.sigmas != self.denoiser.sigmas:
            self.denoiser.bind(plan.sigmas)
        if self.denoiser.variant == "auto":
            # The check settles the layout of the states, and is to see the path that training takes.
            with torch.enable_grad():
                self.denoiser.self_check(prompts[:2])
        cuts = [part_of(len(prompts), updates, k)[0] for k in range(1, updates)]
        probe = self.denoiser.probe
        runner = RolloutRunner(
            self.velocity_of(prompts), plan, probe.latent_shape,
            dtype=probe.dtype, device=self.device, batch=self.batch, cuts=cuts,
        )  # fmt: skip
        return runner.run(keys)

    def decode(self, rollout: Rollout, prompts: Sequence[str]) -> Tensor:
        """Images of the leaves, on the CPU."""
        texts = [prompts[p] for p in rollout.leaf_prompt.tolist()]
        size = self.decode_batch
        parts = [self.denoiser.decode(rollout.x[k : k + size], texts[k : k + size]) for k in range(0, len(texts), size)]
        return torch.cat([part.cpu() for part in parts])

    def score(self, experience: Experience, transitions: Transitions, batch: slice) -> Scored:
        """Evaluate one recorded batch of states again and compare with the sampling policy.

        Δμ = J·Δv with J = ∂μ/∂v a number per step, so the ratio is taken from the shift of the velocity
        itself: it is exactly 1 while the prediction is unchanged, and loses nothing to subtraction.
        """
        if experience.plan.sigmas != self.denoiser.sigmas:
            self.denoiser.bind(experience.plan.sigmas)
        c = transitions.coefficients
        velocity = self.velocity_of(experience.prompts)
        replayed = replay(velocity, transitions, batch)
        rows = replayed.rows()
        old = replayed.old_velocity()
        scale = jacobian(c.sigma, c.sigma_next, c.kappa)
        x_next = transitions.x_next[replayed.edges]
        noise = step(old[rows], transitions.x[batch][rows], c, x_next=x_next).noise
        ratio = log_ratio((scale * (replayed.velocity - old))[rows], noise, c.std, form=self.ratio)
        penalty = None
        if self.reference_kl:
            with torch.no_grad(), self.weights.reference():
                reference = velocity(transitions.x[batch], transitions.step, transitions.prompt[batch])
            means = (scale * replayed.velocity)[rows, None], (scale * reference)[rows, None]
            penalty = gaussian_kl(*means, c.std)
        ones = torch.ones_like(ratio.detach())[:, None]
        return Scored(
            log_ratio=ratio[:, None],
            node=transitions.node[replayed.edges],
            steps=torch.full_like(ones, transitions.step, dtype=torch.long),
            weight=ones * self.step_weight(experience.plan, transitions.step, c),
            penalty=penalty,
        )

    def step_weight(self, plan: Plan, i: int, coefficients: Coefficients) -> float:
        """Weight of the surrogate at step `i`."""
        if self.weight == "guard":
            return guard_weight(coefficients)
        if self.weight == "noise":
            stds = [(side or main).std for main, side in (plan.coefficients(t) for t in plan.trained_steps)]
            return coefficients.std * len(stds) / sum(stds)
        return 1.0
