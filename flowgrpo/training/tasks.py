"""The protocol of tasks that the training loop trains, and the task of images. `text_task.py` has the task of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ..configs.schema import Recipe
from ..configs.sections import EmaConfig
from ..core.addressing import address
from ..parts.traits import differentiates
from ..pipelines.experience import Experience, ImagesBeside, Scouted, join_experiences
from ..pipelines.policy import FlowPolicy
from ..pipelines.prompt_cache import encode_ahead
from ..rewards.runner import RewardBatch, RewardSet
from ..samplers.plans import Plan
from ..samplers.transitions import Rollout, chunks_of
from ..text.cutting import Parts
from ..weights.trained import TrainedWeights
from .controls import Controls
from .credit.combining import total_reward
from .data import PromptRow
from .folder.checkpoint import Stateful
from .images.critic import Critic
from .images.evaluator import Evaluator
from .images.images_beside import drawn
from .images.scouting import Scouts
from .images.sized_rollout import SizedPolicies, by_size, chosen, own_cuts, sized_rollout
from .joined_rollouts import JoinedObjective, Samples
from .losses.objective import Objective, ObjectiveSetting
from .losses.reward_gradient import differentiated
from .planning import PlanFor, budget_line, clip_bounds, forecast, levels_of, planner, scouts_line
from .prompts.prompt_rows import Size
from .reporting.clock import Clock
from .teachers import contexts_of, teachers_of

Kind = tuple[Size | None, tuple[int, ...]]
"""The size of prompts, and their trained steps."""
LEAST_FIDELITY = 15.0
"""Decibels below which a given image has hardly come back."""


class Collected(Protocol):
    """A finished rollout: L samples of some prompts, and N nodes that lead to the samples (for completions, N = L)."""

    @property
    def samples(self) -> Samples:
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
        """[L] tokens; for completions only."""

    @property
    def log_probs(self) -> Tensor | None:
        """[L] log-probs of whole samples under the sampler; for completions only."""

    @property
    def scouted(self) -> tuple[Scouted, ...]:
        """What the scouts of the prompts have found, in the order of the samples; empty if there were none."""

    @property
    def parts(self) -> Parts | None:
        """The parts of completions; None for images, and if the recipe does not cut completions."""

    def given(self) -> dict[str, list[Any]]:
        """Name -> L values that rewards get beside the columns of the prompts.

        For completions `completion_ids`, `truncated`, and `parts` if the recipe cuts them.
        """

    @property
    def columns(self) -> int:
        """Columns of the statistics of the ratio: denoising steps, or stretches of a completion."""

    def record(self) -> dict[str, float]:
        """The metrics of the rollout itself."""

    def origins(self) -> list[dict[str, Any]]:
        """[L] how each sample was made, for the index of samples."""

    def node_advantages(self, leaf: Tensor) -> Tensor:
        """[N] advantages of the nodes, from the advantages [L] of the samples."""

    def siblings(self, among: str) -> Tensor:
        """[L] ids of the sets within which samples are selected."""

    def kept(self, chosen: Tensor) -> Tensor:
        """[N] bool: nodes that are trained if only the chosen samples [L] are trained."""


Decoded = Callable[[Collected], None]
"""Called with a chunk of a rollout. A chunk has whole groups, and numbers its prompts as the rollout does."""


Score = Callable[[Sequence[PromptRow], Collected], Tensor]
"""`score(prompts, samples)`: [L] weighted sums of the rewards of a run; NaN where no reward applies."""


class Task(Protocol):
    """A model that the training loop samples and trains."""

    noun: str
    """What a sample is called, in the plural."""
    clock_parts: tuple[str, ...]
    """The parts into which the time of an iteration is divided."""
    update_part: str
    """The part that the time of the gradients counts as."""

    @property
    def weights(self) -> TrainedWeights:
        """The trained weights."""

    @property
    def device(self) -> torch.device:
        """The device of the model."""

    @property
    def result(self) -> str:
        """The folder of a run that gets the trained weights."""

    def compare_with(self, reference: Callable[[], AbstractContextManager[None]]) -> None:
        """Let penalties compare with the model in this context, in place of the base model."""

    def score_with(self, score: Score) -> None:
        """Let rollouts ask the rewards of the run."""

    def differentiate(self, rewards: RewardSet, rows: Sequence[PromptRow]) -> None:
        """Let the loss ask the rewards of the run for their gradients; `rows` are the prompts of the run."""

    def followers(self) -> dict[str, EmaConfig | None]:
        """Further averages of the weights, by name.

        `anchor` is the model with which penalties compare, `old` is the sampling policy, and `compared` is the policy
        with which the loss compares, if it is not the sampling policy.
        """

    controls: Controls
    """The coefficients of the loss that move."""

    def objective(self, recipe: Any, old: Callable[[], AbstractContextManager[None]] | None) -> Objective:
        """The loss of the recipe of the run, as it is in an iteration.

        `old` is a context with the policy that the loss compares with, if that policy lags behind.
        """

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
            keys: P numbers that address the randomness of each prompt.
            iteration: from 0.
            clock: measures where the time goes.
            cuts: the first prompt of each part after the first. Each part has an optimizer step of its own. A part may
                be empty.
            decoded: if the rollout is made in chunks, called with each chunk, in order.
        """

    def evaluation(self, rows: Sequence[PromptRow], keys: Sequence[int], clock: Clock) -> Any:
        """Sample prompts for an evaluation."""

    def learn(self, experience: Any, scores: RewardBatch) -> dict[str, float]:
        """Let models other than the policy learn from a rollout; returns metrics."""

    def settle(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Move the coefficients that depend on the metrics of an update; returns metrics."""

    def credit_model(self) -> Critic | None:
        """The critic that the credit of steps may ask."""

    def parts(self) -> dict[str, Stateful]:
        """The parts of the task that a checkpoint holds besides the weights, by file name."""

    def describe(self) -> Iterator[str]:
        """Lines for the start of a run that say what it will do."""

    def samples_per_iteration(self) -> int:
        """Samples of all processes in an iteration."""


class PolicyTask:
    """The base class of tasks whose model is a policy."""

    policy: Any
    controls: Controls

    @property
    def weights(self) -> TrainedWeights:
        """The trained weights."""
        weights: TrainedWeights = self.policy.weights
        return weights

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        device: torch.device = self.policy.device
        return device

    def compare_with(self, reference: Callable[[], AbstractContextManager[None]]) -> None:
        """Let penalties compare with the model in this context."""
        self.policy.reference = reference

    def score_with(self, score: Score) -> None:
        """Nothing: a rollout is scored when it is complete."""

    def differentiate(self, rewards: RewardSet, rows: Sequence[PromptRow]) -> None:
        """Nothing: the loss takes advantages."""

    def settle(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Move the coefficients that depend on the metrics."""
        return self.controls.settle(record)


class FlowTask(PolicyTask):
    """Images, videos or sounds of a flow-matching pipeline.

    Args:
        recipe: what to do.
        policy: samples and scores in training.
        evaluator: samples in evaluations. It has the same weights, and maybe another number of steps.
        plan_for: the plan of each iteration.
        critic: predicts rewards of states; None if the recipe has no critic.
        sized: the policies of the sizes of prompts; None if no prompt has a size of its own.
        fidelity: how well given images come back from their states, see `FlowPolicy.fidelity`; None if none are given.
        guided: of given images, whether the call has guidance, see `FlowPolicy.guides`.
        images: prompts with the images that penalty `data` learns beside a rollout; empty if there is no such penalty.
        scouts: choose the seeds that are sampled; None if the recipe has none.
        unread: negative prompts of the call that have no effect, see `FlowPolicy.unread`.
    """

    clock_parts: tuple[str, ...] = ("denoiser", "decode", "reward", "optimizer", "rest")
    update_part = "denoiser"

    def __init__(
        self,
        recipe: Recipe,
        policy: FlowPolicy,
        evaluator: Evaluator,
        plan_for: PlanFor,
        critic: Critic | None = None,
        sized: SizedPolicies | None = None,
        fidelity: float | None = None,
        guided: bool = False,
        images: Sequence[PromptRow] = (),
        scouts: Scouts | None = None,
        unread: Sequence[str] = (),
    ) -> None:
        self.recipe, self.policy, self.evaluator, self.plan_for, self.critic = (
            recipe, policy, evaluator, plan_for, critic,
        )  # fmt: skip
        self.sized, self.fidelity, self.guided, self.images, self.scouts = sized, fidelity, guided, images, scouts
        self.unread = unread
        self.apart = recipe.sampler.plan.get("each") == "prompt"
        self._score: Score | None = None
        self.controls = Controls(variance=recipe.objective.get("variance"))
        self.elements = math.prod(policy.denoiser.probe.latent_shape)
        self.noun = "images" if policy.denoiser.sampling_rate is None else "sounds"
        self.rewards: RewardSet | None = None
        self._planners: dict[Size, PlanFor] = {}

    @property
    def result(self) -> str:
        """`lora`, or `pipeline` for full weights."""
        return "lora" if self.weights.kind == "lora" else "pipeline"

    def differentiate(self, rewards: RewardSet, rows: Sequence[PromptRow]) -> None:
        """Let the loss ask these rewards for their gradients, and try it on an image of the first prompt.

        Raises:
            ValueError: the pipeline decodes, or a reward scores, in a way that has no gradient.
        """
        self.rewards = rewards
        if differentiates(self.recipe):
            state = torch.zeros(1, *self.policy.denoiser.probe.latent_shape, device=self.policy.device)
            differentiated(self.policy, rewards, state, rows[:1], rows)

    def followers(self) -> dict[str, EmaConfig | None]:
        """The averages that the recipe asks for."""
        objective = self.recipe.objective
        return {"anchor": self.recipe.reference, "old": objective.get("old"), "compared": objective.get("compared")}

    def score_with(self, score: Score) -> None:
        """Let scouts ask the rewards of the run."""
        self._score = score

    def objective(self, recipe: Recipe, old: Callable[[], AbstractContextManager[None]] | None) -> Objective:
        """The loss of a recipe; if prompts have sizes or windows of their own, the losses of all of them together."""

        def made(policy: FlowPolicy) -> Objective:
            elements = math.prod(policy.denoiser.probe.latent_shape)
            setting = ObjectiveSetting(recipe, policy, elements, self.controls, old, self.rewards)
            found: Objective = recipe.objective.make(setting, elements=elements)
            return found

        if self.sized is None and not self.apart:
            return made(self.policy)
        return JoinedObjective(lambda kind: made(self._policy(kind[0])))

    def rollout(
        self,
        rows: Sequence[PromptRow],
        keys: Sequence[int],
        iteration: int,
        clock: Clock,
        cuts: Sequence[int],
        decoded: Decoded | None = None,
    ) -> Any:
        """Roll out the plan of an iteration chunk by chunk, with the critic's guide if the recipe has one.

        If prompts have sizes or windows of their own, the prompts with one size and one window are rolled out
        together, one kind after the other.
        """
        if self.sized is None and not self.apart:
            plan = self.plan_for(iteration)
            scouted = self._scouted(rows, keys, plan, None, clock)
            return self._rollout(self.policy, plan, rows, keys, iteration, clock, cuts, decoded, scouted)
        draws = [(row.size, key if self.apart else None) for row, key in zip(rows, keys)]
        of_draw = {draw: self._plan(draw[0], iteration, draw[1]) for draw in dict.fromkeys(draws)}
        kinds: list[Kind] = [(size, of_draw[size, draw].trained_steps) for size, draw in draws]
        plans = {kind: of_draw[draw] for kind, draw in zip(kinds, draws)}
        groups = [(kind, places, chosen(rows, places), chosen(keys, places)) for kind, places in by_size(kinds)]
        # All scouts come first: once a chunk is decoded, rewards may be busy with it.
        found = [self._scouted(own, numbers, plans[kind], kind[0], clock) for kind, _, own, numbers in groups]
        parts = []
        for (kind, places, own, numbers), scouted in zip(groups, found):
            tell = None if decoded is None else partial(_tell_sized, decoded, kind, places)
            made = self._rollout(
                self._policy(kind[0]), plans[kind], own, numbers, iteration, clock, own_cuts(cuts, places), tell,
                scouted,
            )  # fmt: skip
            parts.append((kind, places, made))
        return sized_rollout(parts)

    def _policy(self, size: Size | None) -> FlowPolicy:
        """The policy of a size."""
        return self.policy if self.sized is None else self.sized.of(size)

    def _scouted(
        self, rows: Sequence[PromptRow], keys: Sequence[int], plan: Plan, size: Size | None, clock: Clock
    ) -> tuple[Scouted, ...]:
        """What scouts have found for prompts of one size; empty if the recipe has none."""
        if self.scouts is None:
            return ()
        assert self._score is not None
        return (self.scouts.send(rows, keys, plan, size, clock, self._score),)

    def _plan(self, size: Size | None, iteration: int, draw: int | None = None) -> Plan:
        """The plan of an iteration for prompts of a size, or for the prompt with a draw of its own."""
        plan_for = self.plan_for if size is None else self._planner(size)
        return plan_for(iteration, draw)

    def _planner(self, size: Size) -> PlanFor:
        """The plans of a size, whose noise levels may depend on the size."""
        assert self.sized is not None
        if size not in self._planners:
            levels = levels_of(self.recipe, self.sized.of(size).denoiser.probe.sigmas)
            self._planners[size] = planner(self.recipe, levels)
        return self._planners[size]

    def _rollout(
        self,
        policy: FlowPolicy,
        plan: Plan,
        rows: Sequence[PromptRow],
        keys: Sequence[int],
        iteration: int,
        clock: Clock,
        cuts: Sequence[int],
        decoded: Decoded | None,
        scouted: tuple[Scouted, ...],
    ) -> Experience:
        """Roll out a plan for prompts of one size, from the seeds that scouts have chosen, if there were any."""
        recipe, guide = self.recipe, None
        numbers = [own for one in scouted for own in one.numbers.tolist()] or None
        updates, by_edges = len(cuts) + 1, recipe.optimizer.cut == "edges"
        starts = () if by_edges else tuple(cuts)
        prompts = tuple(row.prompt for row in rows)
        teachers = teachers_of(recipe.model, rows)
        contexts = tuple(row.prompt for row in contexts_of(recipe.model, rows))
        encode_ahead(policy.denoiser.pipe, contexts)
        if self.critic is not None and recipe.sampler.guide is not None:
            guide = self.critic.guide(recipe.sampler.guide, prompts, plan)
        # The address of the iteration's first prompt is the same on every process.
        first = address(recipe.run.seed, 1, iteration * recipe.rollout.prompts)
        with clock.part("decode"):
            beside = self.beside(policy, keys)

        def made(chunk: slice) -> tuple[Rollout, Tensor]:
            if plan.given:
                with clock.part("decode"):
                    samples = [sample.read for row in rows[chunk] for sample in row.given]
                    return policy.given(samples, prompts, plan, chunk)
            with clock.part("denoiser"):
                rollout = policy.sample(
                    prompts, keys, plan, guide=guide, cuts=starts, chunk=chunk, numbers=numbers, told=clock.count
                )
            with clock.part("decode"):
                return rollout, policy.decode(rollout, prompts, clock.count)

        def sampled(chunk: slice) -> Experience:
            rollout, images = made(chunk)
            found = Experience(
                rollout,
                plan,
                prompts,
                images,
                updates,
                tuple(keys),
                starts,
                first,
                by_edges,
                teachers,
                contexts,
                beside,
                rows=tuple(rows),
                scouted=scouted,
                sampling_rate=policy.denoiser.sampling_rate,
            )
            if decoded is not None and recipe.rollout.chunk is not None:
                decoded(found)
            return found

        return join_experiences([sampled(chunk) for chunk in chunks_of(len(rows), recipe.rollout.chunk)])

    def beside(self, policy: FlowPolicy, keys: Sequence[int]) -> ImagesBeside | None:
        """The images of data that a penalty learns, one for each prompt of a rollout; None if there are none."""
        if not self.images:
            return None
        rows = drawn(self.images, keys)
        return policy.beside([row.given[0].read for row in rows], [row.prompt for row in rows])

    def evaluation(self, rows: Sequence[PromptRow], keys: Sequence[int], clock: Clock) -> Any:
        """Sample with deterministic steps over the evaluation's noise levels."""
        return self.evaluator.evaluation(rows, keys, clock)

    def learn(self, experience: Experience, scores: RewardBatch) -> dict[str, float]:
        """Train the critic; returns its error."""
        if self.critic is None:
            return {}
        return {"critic/error": self.critic.fit(experience, total_reward(scores, experience))}

    def credit_model(self) -> Critic | None:
        """The critic, if the recipe has one."""
        return self.critic

    def parts(self) -> dict[str, Stateful]:
        """The critic, and the coefficients that move."""
        return {**({} if self.critic is None else {"critic": self.critic}), **self.controls.parts()}

    def describe(self) -> Iterator[str]:
        """Lines on the pipeline, sizes, steps and the clip."""
        recipe, denoiser = self.recipe, self.policy.denoiser
        expected = forecast(recipe, levels_of(recipe, denoiser.probe.sigmas), self.elements)
        steps = expected.optimizer_steps
        high, nats = clip_bounds(recipe, self.elements)
        clip = f", clip {high:.1e} = ±{nats:.2g} nats" if high is not None and nats is not None else ""
        yield (
            f"{recipe.name}: {type(denoiser.pipe).__name__} ({recipe.model.path}), {recipe.model.train}, "
            f"{trained_numbers(self):,} trained parameters, replay {denoiser.variant}"
        )
        yield (
            f"{recipe.rollout.prompts} prompts × {expected.images // recipe.rollout.prompts} {self.noun} an iteration, "
            f"{len(denoiser.sigmas) - 1} steps, {steps} optimizer step{'' if steps == 1 else 's'}{clip}"
        )
        yield from (line for line in (budget_line(recipe), scouts_line(recipe)) if line is not None)
        if self.fidelity is not None:
            yield f"given images come back from their latents with {self.fidelity:.1f} dB (PSNR, the first prompt)"
            if self.fidelity < LEAST_FIDELITY:
                yield "note: this is very little; are the images of the kind that this pipeline makes?"
            if self.guided:
                yield (
                    "note: the pipeline is called with guidance, so the loss trains its guided velocity, and given "
                    "images are learned without guidance; turn it off, with model.call.guidance_scale=1 in most "
                    "pipelines, and 0 in some, such as Z-Image"
                )
        for name in self.unread:
            yield (
                f"note: model.call.{name} has no effect, because the pipeline is called without guidance; raise "
                "model.call.guidance_scale, or true_cfg_scale if the call has it (FLUX.1, Qwen-Image), or leave it out"
            )
        yield from (f"note: {warning}" for warning in expected.warnings)

    def samples_per_iteration(self) -> int:
        """Images of all processes in an iteration."""
        levels = levels_of(self.recipe, self.policy.denoiser.probe.sigmas)
        return forecast(self.recipe, levels, self.elements).images


def _tell_sized(decoded: Decoded, kind: Kind, places: Sequence[int], chunk: Collected) -> None:
    """Tell a chunk of the prompts of one kind, with the numbers that its prompts have in the whole rollout."""
    decoded(sized_rollout([(kind, places, chunk)]))


def trained_numbers(task: Task) -> int:
    """How many numbers are trained."""
    return sum(parameter.numel() for parameter in task.weights.parameters())
