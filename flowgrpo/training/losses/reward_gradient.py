"""The objective that follows the gradients of the rewards, through the pipeline's decoder and its last steps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ...core.addressing import address
from ...parts.choice import Choice
from ...parts.needs import Need, idle, needs, one_round
from ...parts.ranges import Whole
from ...parts.traits import offering
from ...pipelines.placement import offload_of
from ...rewards.base import SAMPLING_RATE
from ...samplers.moves import draw_noise
from ..data import columns_of
from ..extensions.extension import has_hook
from .edges import EdgeObjective, steps_to_score
from .objective import ObjectiveSetting, Outcome, pair

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ...pipelines.experience import Experience
    from ...pipelines.policy import FlowPolicy
    from ...pipelines.scored_edges import ScoredEdges
    from ...rewards.runner import RewardSet
    from ...samplers.transitions import Transitions
    from ..prompts.prompt_rows import PromptRow
    from .edges import Batch


CHANGING = ("samples_scored", "samples_compared", "advantages_made")
"""The hooks by which an extension may change scores and advantages."""


RENOISED = -7
"""In an address, the noise of a finished image that is noised again."""
NOT_DIFFERENTIABLE = "requires grad", "does not require grad", "modified by an inplace operation"
"""What torch says if a computation has no gradient: it leaves torch, has no graph, or writes into its own inputs."""


def chains_without_noise(recipe: Any, choice: Choice) -> list[str]:
    """A need of objectives that differentiate rewards at states: each state leads to one image without noise."""
    plan = recipe.sampler.plan
    if offering(plan, "noiseless") or offering(plan, "given"):
        return []
    return [
        f"objective {choice.short} differentiates steps without noise, and sampler.plan {plan.short} has steps with "
        "noise; use plan ode with a window, such as {name: ode, window: last}"
    ]


def _steps_of_euler(recipe: Any, choice: Choice) -> list[str]:
    if recipe.sampler.solver.name == "euler":
        return []
    return [
        f"objective {choice.short} differentiates steps of Euler, and sampler.solver is {recipe.sampler.solver.short}; "
        "use solver euler"
    ]


def weighted_sum(recipe: Any, choice: Choice) -> list[str]:
    """What changes scores after they were given has no gradient, so it must not be there."""
    why = f"objective {choice.short} takes the gradient of the weighted sum of the rewards as they are given"
    faults = []
    if recipe.combine.name != "sum":
        faults.append(f"{why}, and combine is {recipe.combine.short}; use combine sum")
    faults += [
        f"{why}, and reward {one.known_as} has {key}, which changes its scores; leave {key} out"
        for one in recipe.rewards
        for key in one.bent
    ]
    faults += [
        f"{why}, and extension {one.short} changes scores or advantages; leave the extension out"
        for one in recipe.extensions
        if any(has_hook(one, hook) for hook in CHANGING) and not getattr(one.target, "keeps_scores", False)
    ]
    return faults


def _one_pass(recipe: Any, choice: Choice) -> list[str]:
    faults = []
    if recipe.optimizer.epochs > 1:
        faults.append(
            f"objective {choice.short} differentiates the policy at its own samples, and optimizer.epochs "
            f"{recipe.optimizer.epochs} comes back to them when the policy has moved; use optimizer.epochs 1"
        )
    if recipe.optimizer.cut == "edges":
        faults.append(
            f"objective {choice.short} goes through the steps of an image in order, and optimizer.cut edges deals them "
            "out; use optimizer.cut prompts"
        )
    return faults


@needs(
    steps_to_score,
    chains_without_noise,
    _steps_of_euler,
    weighted_sum,
    _one_pass,
    one_round("takes the gradients of one rollout"),
    Need("select", ([],), "has a gradient for every image", mend="leave select out"),
    idle(
        "renoised", where=lambda choice: choice["at"] == "prediction",
        why="with at prediction, no finished image is differentiated",
    ),
    idle(
        "through", where=lambda choice: choice["at"] == "prediction",
        why="with at prediction, the gradient of a state goes through its own prediction alone",
    ),
)  # fmt: skip
class RewardGradientObjective(EdgeObjective):
    """The gradients of the rewards themselves, in the place of advantages; the rewards must be differentiable.

    The rewards are differentiated with respect to the images, and the gradients go back through the pipeline's own
    decoder into the trained steps of a rollout without noise. With `at: image`, they are the gradients of the finished
    images: DRaFT-K (2309.17400, Sec. 3), if the window is the last K steps. They go through the steps one after the
    other, from the last to the first, and each step is evaluated again. So K steps need the memory of one. Without
    `through`, they skip the steps that follow, so a window may lie anywhere: DRTune (2405.00760, Sec. 3.2). With
    `at: prediction`, a state is led at once to the clean image that its velocity predicts: ReFL (2304.05977,
    Algorithm 1). With `renoised`, the last step is differentiated at more than one state of each image: DRaFT-LV
    (2309.17400, Sec. 3).

    Args:
        setting: of the run.
        at: Where the rewards are differentiated: `image`, at the finished images, or `prediction`, at the clean image
            that each trained state predicts.
        through: Whether the gradient of a finished image goes through the predictions at the states after a step. If
            so, the window must end with the last step. If not, only the direct effect of each step is differentiated.
        renoised: How often each finished image x0 is noised again, to (1 - σ) x0 + σ ε with the noise level σ of the
            last step and new noise. The last step is taken from there, and the reward of its image is differentiated.
            The gradient is the mean over these images and the finished one. Only the last step may be trained.
    """

    trains = "gradients"

    def __init__(
        self,
        setting: ObjectiveSetting,
        *,
        at: Literal["image", "prediction"] = "image",
        through: bool = True,
        renoised: Whole = 0,
    ) -> None:
        super().__init__(setting)
        self.at, self.through, self.renoised = at, through and at == "image", renoised
        assert setting.rewards is not None
        self.rewards = setting.rewards
        self._image = self._chosen = torch.empty(0, dtype=torch.long)
        self._value, self._slope, self._uses = torch.empty(0), torch.empty(0), 1.0
        self._states: Tensor | None = None
        # The values and slopes of the images of a batch; which of the renoised states it has, 0 for the recorded ones.
        self._here, self._number = (torch.empty(0), torch.empty(0)), 0

    def prepare(self, experience: Experience) -> None:
        """Find the image to which each state leads."""
        self._image = experience.image_of_node()

    def measure(self, experience: Experience, part: int, advantages: Tensor, keep: Tensor | None) -> None:
        """Differentiate the rewards at the images of a part."""
        if self.at != "image":
            return
        low, high = experience.part(part)
        owner, x = experience.rollout.leaf_prompt, experience.rollout.x
        chosen = ((owner >= low) & (owner < high)).nonzero().flatten()
        self._value = torch.zeros(len(owner), device=self.policy.device)
        self._slope = torch.zeros(len(owner), *x.shape[1:], device=self.policy.device)
        if len(chosen):
            states, owners = self.policy.brought(x[chosen.to(x.device)]), owner[chosen].tolist()
            self._value[chosen], self._slope[chosen] = self._of_images(experience, states, owners)

    def _of_images(self, experience: Experience, x: Tensor, owners: Sequence[int]) -> tuple[Tensor, Tensor]:
        """[N] weighted sums of the rewards of decoded states [N, ...], and their gradients, [N, ...]."""
        return differentiated(self.policy, self.rewards, x, [experience.rows[p] for p in owners], experience.rows)

    def rows(self, experience: Experience, part: int, keep: Tensor | None) -> int:
        """How many trained edges one part has, from renoised states too."""
        return super().rows(experience, part, keep) * (1 + self.renoised)

    def batches(self, experience: Experience, part: int, keep: Tensor | None) -> Iterator[Batch]:
        """Recorded batches of states, the last step first."""
        return reversed(list(experience.batches(part, keep)))

    def score(self, experience: Experience, batch: Batch) -> ScoredEdges:
        """Recorded edges under the present policy, whose states have a gradient if a step before them is trained."""
        if self._number:
            return self._score_renoised(experience, batch)
        transitions, rows = batch
        x = self.policy.brought(transitions.x[rows]).float()
        self._states = None
        if self.through and transitions.step > experience.plan.trained_steps[0]:
            weights = self.policy.weights
            self._states = x.detach().requires_grad_()
            # A loss in float16 is scaled, and the gradients of weights are scaled back where they arrive.
            self._states.register_hook(lambda gradient: gradient / weights.loss_factor)
            scored = super().score(experience, (_alone(transitions, rows, self._states), slice(0, len(x))))
        else:
            scored = super().score(experience, batch)
        images = self._image[scored.node]
        if self.at == "image":
            self._chosen = images.to(self._value.device)
            self._here = self._value[self._chosen], self._slope[self._chosen]
            return scored
        sigma, moved = transitions.coefficients.sigma, scored.shift.detach().float() / scored.scale
        clean = x - sigma * (self.policy.brought(transitions.velocity[rows]).float() + moved)
        owners = experience.rollout.leaf_prompt[images].tolist()
        value, slope = self._of_images(experience, clean, owners)
        # A velocity moves the clean image by the whole noise level, and its step by the length of the step.
        self._here = value, -sigma / scored.scale * slope
        return scored

    def _score_renoised(self, experience: Experience, batch: Batch) -> ScoredEdges:
        """The last step from finished images that are noised again, with the rewards of the images that it makes."""
        transitions, rows = batch
        rollout, nodes = experience.rollout, transitions.node[transitions.edges_of(rows)]
        x0 = self.policy.brought(rollout.x[self._image[nodes].to(rollout.x.device)])
        owners, roots = rollout.prompt[nodes].tolist(), rollout.root[nodes].tolist()
        keys = [address(experience.keys[p], RENOISED, root, self._number) for p, root in zip(owners, roots)]
        sigma = transitions.coefficients.sigma
        noise = draw_noise(x0.shape[1:], keys, x0.device)
        x = ((1.0 - sigma) * x0.float() + sigma * noise).to(x0.dtype)
        # Nothing was predicted here before. The shift from a velocity of 0 is the whole step.
        still = replace(_alone(transitions, rows, x), velocity=torch.zeros_like(x))
        scored = super().score(experience, (still, slice(0, len(x))))
        moved = scored.shift.detach()
        self._here = self._of_images(experience, x.float() + moved.float(), owners)
        return replace(scored, shift=scored.shift - moved, divergence=torch.zeros_like(scored.divergence))

    def backward(
        self, experience: Experience, batch: Batch, advantages: Tensor, keep: Tensor | None, rows: Tensor
    ) -> Outcome:
        """Add the gradient of one recorded batch, and hand it on to the steps before."""
        self._uses = float(len(experience.plan.trained_steps)) if self.at == "image" else 1.0
        outcome = super().backward(experience, batch, advantages, keep, rows)
        if self._states is not None:
            assert self._states.grad is not None
            self._slope[self._chosen] -= self._states.grad * (rows / self._uses)
            self._states = None
        for number in range(1, self.renoised + 1):
            self._number = number
            again = super().backward(experience, batch, advantages, keep, rows)
            outcome.metrics = {name: value + again.metrics[name] for name, value in outcome.metrics.items()}
        self._number = 0
        return outcome

    def loss(
        self, scored: ScoredEdges, advantage: Tensor, mask: Tensor | None, penalty: Tensor | None, rows: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The rewards with the opposite sign, and the penalties; its gradient is exact, and its value is reported."""
        value, slope = self._here
        # All trained steps of an image add to one image, and the penalties are means over steps.
        along = -self._uses * (slope * scored.shift.float()).flatten(1).sum(1, keepdim=True)
        loss = along if penalty is None else along + penalty
        shown = -value[:, None] if penalty is None else -value[:, None] + penalty.detach()
        metrics = {"loss": pair(shown)}
        if penalty is not None:
            metrics["penalty"] = pair(penalty.detach())
        trained = loss if mask is None else loss * mask
        return trained.sum() / rows, metrics


def differentiated(
    policy: FlowPolicy,
    rewards: RewardSet,
    x: Tensor,
    rows: Sequence[PromptRow],
    among: Sequence[PromptRow],
    more: Mapping[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """The weighted sums of the rewards of decoded states, and their gradients with respect to the states.

    Args:
        policy: decodes, `decode_batch` states at a time.
        rewards: of the run.
        x: [N, ...] final states.
        rows: N prompts.
        among: all prompts of the iteration, whose columns the rewards get.
        more: further columns, name -> the value of all states.

    Returns:
        [N] and [N, ...], float32.

    Raises:
        ValueError: the pipeline decodes, or a reward scores, in a way that has no gradient.
    """
    found, size, rate = [], policy.decode_batch, policy.denoiser.sampling_rate
    given = {**({} if rate is None else {SAMPLING_RATE: rate}), **(more or {})}
    for k in range(0, len(x), size):
        own = rows[k : k + size]
        columns = columns_of(own, {name: [value] * len(own) for name, value in given.items()}, among)
        found.append(_differentiated(policy, rewards, x[k : k + size], own, columns))
    return torch.cat([values for values, _ in found]), torch.cat([slopes for _, slopes in found])


def _differentiated(
    policy: FlowPolicy, rewards: RewardSet, x: Tensor, rows: Sequence[PromptRow], columns: Mapping[str, list[Any]]
) -> tuple[Tensor, Tensor]:
    kind, leaf = type(policy.denoiser.pipe).__name__, x.detach().float().requires_grad_()
    with offload_of(policy.denoiser.pipe).needed("vae", when_called=True):
        try:
            with torch.enable_grad():
                images = policy.denoiser.decode_with_graph(leaf, [row.prompt for row in rows])
            values, slopes = rewards.gradients(images.detach(), [row.text for row in rows], columns)
            (slope,) = torch.autograd.grad(images, leaf, slopes.to(images))
        except RuntimeError as error:
            if not any(sign in str(error) for sign in NOT_DIFFERENTIABLE):
                raise
            raise ValueError(
                f"{kind} decodes images in a way that has no gradient ({str(error).splitlines()[0]}), and the "
                "objective needs one; use an objective that compares rewards, such as transition or forward"
            ) from error
    return values.to(slope.device), slope


def _alone(transitions: Transitions, batch: slice, states: Tensor) -> Transitions:
    """The transitions of one batch, from these states."""
    edges = transitions.edges_of(batch)
    return replace(
        transitions,
        x=states,
        velocity=transitions.velocity[batch],
        prompt=transitions.prompt[batch],
        state=transitions.state[edges] - batch.start,
        x_next=transitions.x_next[edges],
        node=transitions.node[edges],
        log_prob=transitions.log_prob[edges],
        batches=(slice(0, len(states)),),
    )
