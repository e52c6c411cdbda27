"""Images that are sampled without noise in the steps: for the evaluations of a run, and the same outside of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...configs.schema import Recipe
from ...pipelines.experience import Experience, join_experiences
from ...pipelines.policy import FlowPolicy
from ...samplers.plans import Plan, StepPlan
from ...samplers.transitions import chunks_of
from ..data import PromptRow
from ..planning import levels_of
from ..reporting.clock import Clock

Seen = Callable[[int], None]
"""Called with the number of samples that are done."""


def company_of(recipe: Recipe) -> int:
    """How many images are made together: whole batches of the denoiser and of the decoder, from the first image on."""
    return math.lcm(recipe.rollout.batch, recipe.rollout.decode_batch)


class Evaluator:
    """Makes the images of the evaluations of a recipe.

    An image is the same to the last bit if it is made together with the same other images, see `company_of`.

    Args:
        recipe: for noise levels and seeds.
        policy: of the model, on the evaluation's number of steps.
    """

    def __init__(self, recipe: Recipe, policy: FlowPolicy) -> None:
        self.recipe, self.policy = recipe, policy

    def plan(self, roots: int) -> Plan:
        """A deterministic plan over the evaluation's noise levels, with `roots` images per prompt."""
        sigmas = levels_of(self.recipe, self.policy.denoiser.probe.sigmas, evaluation=True)
        return Plan(sigmas, tuple(StepPlan() for _ in sigmas[1:]), roots=roots)

    def evaluation(
        self, rows: Sequence[PromptRow], keys: Sequence[int], clock: Clock, seen: Seen | None = None
    ) -> Experience:
        """Images of held-out prompts.

        Args:
            rows: the prompts.
            keys: a number for each prompt that addresses its noises.
            clock: measures where the time goes.
            seen: called with the number of images that are done. If given, the images are made some at a time; they are
                the same images.
        """
        prompts, seeds = tuple(row.prompt for row in rows), self.recipe.evaluate.seeds
        plan, parts = self.plan(seeds), []
        size = None if seen is None else math.lcm(company_of(self.recipe), seeds) // seeds
        for part in chunks_of(len(rows), size):
            with clock.part("denoiser"):
                rollout = self.policy.sample(prompts, keys, plan, chunk=part, told=clock.count)
            with clock.part("decode"):
                images = self.policy.decode(rollout, prompts, clock.count)
            parts.append(Experience(rollout, plan, prompts, images, 1, tuple(keys)))
            if seen is not None:
                seen(part.stop * seeds)
        return join_experiences(parts)

    def images(self, prompts: Sequence[str], noises: Sequence[int], seen: Seen | None = None) -> Tensor:
        """[N, 3, H, W] images in [0, 1] of N prompts, on the CPU, each from the noise of its own seed.

        Videos are [N, F, 3, H, W].
        """
        plan, parts = self.plan(1), []
        for part in chunks_of(len(prompts), company_of(self.recipe)):
            rollout = self.policy.sample(prompts, noises, plan, chunk=part, noises=noises[part])
            parts.append(self.policy.decode(rollout, prompts))
            if seen is not None:
                seen(part.stop)
        return torch.cat(parts)
