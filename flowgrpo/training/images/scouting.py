"""Scouts: cheap images of a prompt, whose scores decide which seeds are sampled with all steps (Sol-RL, 2604.06916).

Without noise in the steps, the first noise decides what an image shows. So an image of a few steps says much about the
rank of the image that has all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...configs.schema import Recipe
from ...pipelines.experience import Experience, Scouted
from ...pipelines.policy import FlowPolicy
from ...samplers.plans import Plan
from ...samplers.transitions import chunks_of
from ..credit.selecting import SELECTIONS
from ..data import PromptRow
from ..planning import scouting_plan
from ..prompts.prompt_rows import Size
from ..reporting.clock import Clock
from .sized_rollout import SizedPolicies


def seeds_to_sample(scores: Tensor, keep: int, choice: str) -> Tensor:
    """[P, keep] numbers of the scouts whose seeds are sampled again, in rising order.

    Args:
        scores: [P, S] of the scouts. If fewer than `keep` scouts of a prompt have a score, the first of the other
            scouts fill the places.
        keep: at most S.
        choice: a key of `SELECTIONS` whose only option is `keep`.
    """
    prompts, scouts = scores.shape
    groups = torch.arange(prompts).repeat_interleave(scouts)
    chosen = SELECTIONS[choice](scores.flatten(), groups, keep=keep).view(prompts, scouts)
    return (~chosen).long().argsort(dim=1, stable=True)[:, :keep].sort(dim=1).values


class Scouts:
    """Samples the scouts of a recipe, and chooses seeds by their scores.

    Args:
        recipe: has scouts.
        policies: of each size of prompts, on the steps of scouts. They share their weights with the rollout's policies.
    """

    def __init__(self, recipe: Recipe, policies: SizedPolicies) -> None:
        self.recipe, self.policies = recipe, policies

    def send(
        self,
        rows: Sequence[PromptRow],
        keys: Sequence[int],
        plan: Plan,
        size: Size | None,
        clock: Clock,
        score: Callable[[Sequence[PromptRow], Experience], Tensor],
    ) -> Scouted:
        """Sample and score the scouts of prompts of one size, some prompts at a time if the recipe has chunks.

        Args:
            rows: the prompts.
            keys: a number for each prompt that addresses its noises.
            plan: of the rollout for which seeds are chosen.
            size: of the prompts.
            clock: measures where the time goes.
            score: the weighted sum of the rewards of each image.
        """
        recipe, policy = self.recipe, self.policies.of(size)
        settings = recipe.rollout.scouts
        assert settings is not None
        cheap = scouting_plan(recipe, plan, policy.denoiser.probe.sigmas)
        scores, evaluations = [], 0
        for chunk in chunks_of(len(rows), recipe.rollout.chunk):
            found = self._sampled(policy, cheap, rows, keys, chunk, clock)
            with clock.part("reward"):
                scores.append(score(rows, found).view(-1, settings.group))
            evaluations += found.rollout.evaluations
        ranked = torch.cat(scores)
        return Scouted(ranked, seeds_to_sample(ranked, recipe.rollout.group, settings.keep), evaluations)

    def _sampled(
        self,
        policy: FlowPolicy,
        plan: Plan,
        rows: Sequence[PromptRow],
        keys: Sequence[int],
        chunk: slice,
        clock: Clock,
    ) -> Experience:
        prompts = tuple(row.prompt for row in rows)
        with clock.part("denoiser"):
            rollout = policy.sample(prompts, keys, plan, chunk=chunk, told=clock.count)
        with clock.part("decode"):
            images = policy.decode(rollout, prompts, clock.count)
        return Experience(rollout, plan, prompts, images, 1, tuple(keys), sampling_rate=policy.denoiser.sampling_rate)
