"""What the loop knows of the models it trains, and images as such a task; text is the other (`text_task.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from ..configs.schema import EmaConfig, Recipe
from ..core.addressing import address
from ..pipelines.policy import Experience, FlowPolicy, join_experiences
from ..rewards.runner import RewardBatch
from ..samplers.plans import Plan
from ..samplers.transitions import chunks_of
from ..text.cutting import Parts
from ..weights.trained import TrainedWeights
from .controls import Controls
from .credit.combining import total_reward
from .data import PromptRow
from .folder.checkpoint import Stateful
from .images.critic import Critic
from .images.evaluator import Evaluator
from .losses.objective import Objective, ObjectiveSetting
from .planning import budget_line, clip_bounds, forecast
from .reporting.clock import Clock


class Collected(Protocol):
    """A finished rollout: L samples of some prompts, and N nodes that lead to them (for completions, N = L)."""

    @property
    def samples(self) -> Tensor | list[str]:
        """L images, videos or completions, as rewards take them."""

    @property
    def prompt_of_sample(self) -> list[int]:
        """[L] index of the prompt of each sample."""

    @property
    def groups(self) -> Tensor:
        """[L] ids of the groups in which samples are compared."""

    @property
    def outcomes(self) -> Tensor:
        """[L] bool: samples that are results, not previews of a state."""

    @property
    def lengths(self) -> Tensor | None:
        """[L] tokens; of completions only."""

    @property
    def log_probs(self) -> Tensor | None:
        """[L] of whole samples, by the sampler; of completions only."""

    @property
    def parts(self) -> Parts | None:
        """Into which samples are cut; of completions only, where the recipe cuts them."""

    @property
    def columns(self) -> int:
        """How many parts the statistics of the ratio distinguish: denoising steps, or stretches of a completion."""

    def record(self) -> dict[str, float]:
        """What the metrics say of the rollout itself."""

    def origins(self) -> list[dict[str, Any]]:
        """[L] what the index of samples says of how each came about."""

    def node_advantages(self, leaf: Tensor) -> Tensor:
        """[N] advantages of the nodes from those of the samples [L]."""

    def siblings(self, among: str) -> Tensor:
        """[L] ids of the samples among which some are selected."""

    def kept(self, chosen: Tensor) -> Tensor:
        """[N] bool: nodes that are trained if of the samples only the chosen [L] are."""


Decoded = Callable[[Collected], None]
"""Told of a chunk of a rollout, whole groups of samples, which number their prompts as the rollout does."""


class Task(Protocol):
    """What is sampled and trained."""

    noun: str
    """What a sample is called, in the plural."""
    clock_parts: tuple[str, ...]
    """Where the time of its iterations goes."""
    update_part: str
    """Which of them the gradients count as."""

    @property
    def weights(self) -> TrainedWeights:
        """What is trained."""

    @property
    def device(self) -> torch.device:
        """Of the model."""

    @property
    def result(self) -> str:
        """The folder of a run that gets the trained weights."""

    def compare_with(self, reference: Callable[[], AbstractContextManager[None]]) -> None:
        """Take the model in this context as what penalties compare with, in place of the base model."""

    def followers(self) -> dict[str, EmaConfig | None]:
        """Averages of the weights beside that of the results, by name: `anchor`, what penalties compare with, and
        `old`, the policy that samples."""

    def objective(self, old: Callable[[], AbstractContextManager[None]] | None) -> Objective:
        """The loss of the recipe; `old` is a context with the sampling policy, where that lags behind."""

    def rollout(
        self,
        rows: Sequence[PromptRow],
        keys: Sequence[int],
        iteration: int,
        clock: Clock,
        cuts: Sequence[int],
        decoded: Decoded | None = None,
    ) -> Any:
        """Sample prompts for training.

        Args:
            rows: P prompts.
            keys: P numbers that address the randomness of each.
            iteration: from 0.
            clock: told where the time goes.
            cuts: where the parts after the first begin that are optimizer steps of their own; a part may be empty.
            decoded: called with each chunk of the rollout, in order, where it is made in chunks.
        """

    def evaluation(self, rows: Sequence[PromptRow], keys: Sequence[int], clock: Clock) -> Any:
        """Sample prompts for an evaluation."""

    def learn(self, experience: Any, scores: RewardBatch) -> dict[str, float]:
        """Whatever learns from a rollout beside the policy; returns metrics."""

    def settle(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Coefficients that follow what an update measured, by its metrics; returns metrics."""

    def credit_model(self) -> Critic | None:
        """What the credit of steps may ask."""

    def parts(self) -> dict[str, Stateful]:
        """What of it a checkpoint holds beside the weights, by file name."""

    def describe(self) -> Iterator[str]:
        """Lines on what will be done, for the start of a run."""

    def samples_per_iteration(self) -> int:
        """Of all processes."""


class PolicyTask:
    """What tasks have in common that are a policy, with the weights that are trained."""

    policy: Any
    controls: Controls

    @property
    def weights(self) -> TrainedWeights:
        """Of the model."""
        weights: TrainedWeights = self.policy.weights
        return weights

    @property
    def device(self) -> torch.device:
        """Of the model."""
        device: torch.device = self.policy.device
        return device

    def compare_with(self, reference: Callable[[], AbstractContextManager[None]]) -> None:
        """Compare with the model in this context."""
        self.policy.reference = reference

    def settle(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Move the coefficients that follow a measurement."""
        return self.controls.settle(record)


class FlowTask(PolicyTask):
    """Images or videos of a flow-matching pipeline.

    Args:
        recipe: what to do.
        policy: samples and scores in training.
        evaluator: samples in evaluations; the same weights, maybe on another number of steps.
        plan_for: the plan of each iteration.
        critic: predicts rewards of states, where the recipe has one.
    """

    noun = "images"
    clock_parts: tuple[str, ...] = ("denoiser", "decode", "reward", "optimizer", "rest")
    update_part = "denoiser"

    def __init__(
        self,
        recipe: Recipe,
        policy: FlowPolicy,
        evaluator: Evaluator,
        plan_for: Callable[[int], Plan],
        critic: Critic | None = None,
    ) -> None:
        self.recipe, self.policy, self.evaluator, self.plan_for, self.critic = (
            recipe, policy, evaluator, plan_for, critic,
        )  # fmt: skip
        self.controls = Controls(variance=recipe.objective.get("variance"))
        self.elements = math.prod(policy.denoiser.probe.latent_shape)

    @property
    def result(self) -> str:
        """`lora`, or for full weights `pipeline`."""
        return "lora" if self.weights.kind == "lora" else "pipeline"

    def followers(self) -> dict[str, EmaConfig | None]:
        """Those of the objective."""
        return {"anchor": self.recipe.reference, "old": self.recipe.objective.get("old")}

    def objective(self, old: Callable[[], AbstractContextManager[None]] | None) -> Objective:
        """The form that the recipe asks for."""
        setting = ObjectiveSetting(self.recipe, self.policy, self.elements, self.controls, old)
        made: Objective = self.recipe.objective.make(setting, elements=self.elements)
        return made

    def rollout(
        self,
        rows: Sequence[PromptRow],
        keys: Sequence[int],
        iteration: int,
        clock: Clock,
        cuts: Sequence[int],
        decoded: Decoded | None = None,
    ) -> Experience:
        """Roll out the plan of an iteration chunk by chunk, with the critic's guide where the recipe has one."""
        recipe, plan, guide = self.recipe, self.plan_for(iteration), None
        prompts = tuple(row.prompt for row in rows)
        if self.critic is not None and recipe.sampler.guide is not None:
            guide = self.critic.guide(recipe.sampler.guide, prompts, plan)
        # That of the iteration's first prompt, whichever process has it.
        first = address(recipe.run.seed, 1, iteration * recipe.rollout.prompts)

        def sampled(chunk: slice) -> Experience:
            with clock.part("denoiser"):
                rollout = self.policy.sample(prompts, keys, plan, guide=guide, cuts=cuts, chunk=chunk)
            with clock.part("decode"):
                images = self.policy.decode(rollout, prompts)
            found = Experience(rollout, plan, prompts, images, len(cuts) + 1, tuple(keys), tuple(cuts), first)
            if decoded is not None and recipe.rollout.chunk is not None:
                decoded(found)
            return found

        return join_experiences([sampled(chunk) for chunk in chunks_of(len(rows), recipe.rollout.chunk)])

    def evaluation(self, rows: Sequence[PromptRow], keys: Sequence[int], clock: Clock) -> Experience:
        """Deterministic steps over the evaluation's noise levels."""
        return self.evaluator.evaluation(rows, keys, clock)

    def learn(self, experience: Experience, scores: RewardBatch) -> dict[str, float]:
        """The critic's lesson."""
        if self.critic is None:
            return {}
        return {"critic/error": self.critic.fit(experience, total_reward(scores, experience))}

    def credit_model(self) -> Critic | None:
        """The critic."""
        return self.critic

    def parts(self) -> dict[str, Stateful]:
        """The critic, and the coefficients that move."""
        return {**({} if self.critic is None else {"critic": self.critic}), **self.controls.parts()}

    def describe(self) -> Iterator[str]:
        """Pipeline, sizes, steps and the clip."""
        recipe, denoiser = self.recipe, self.policy.denoiser
        expected = forecast(recipe, recipe.sampler.sigmas or denoiser.probe.sigmas, self.elements)
        high, nats = clip_bounds(recipe, self.elements)
        clip = f", clip {high:.1e} = ±{nats:.2g} nats" if high is not None and nats is not None else ""
        yield (
            f"{recipe.name}: {type(denoiser.pipe).__name__} ({recipe.model.path}), {recipe.model.train}, "
            f"{trained_numbers(self):,} trained parameters, replay {denoiser.variant}"
        )
        yield (
            f"{recipe.rollout.prompts} prompts × {expected.images // recipe.rollout.prompts} images an iteration, "
            f"{len(denoiser.sigmas) - 1} steps, {expected.optimizer_steps} optimizer step(s){clip}"
        )
        if (line := budget_line(recipe)) is not None:
            yield line
        yield from (f"note: {warning}" for warning in expected.warnings)

    def samples_per_iteration(self) -> int:
        """Images."""
        sigmas = self.recipe.sampler.sigmas or self.policy.denoiser.probe.sigmas
        return forecast(self.recipe, sigmas, self.elements).images


def trained_numbers(task: Task) -> int:
    """How many numbers are trained."""
    return sum(parameter.numel() for parameter in task.weights.parameters())
