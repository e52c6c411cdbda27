"""Images that are sampled without noise in the steps: for the evaluations of a run, and the same outside of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ...configs.schema import Recipe
from ...pipelines.experience import Experience, join_experiences
from ...pipelines.policy import FlowPolicy
from ...samplers.plans import Plan, StepPlan
from ...samplers.transitions import chunks_of
from ..data import PromptRow
from ..planning import base_from, levels_of
from ..prompts.prompt_rows import Size
from ..reporting.clock import Clock
from .sized_rollout import SizedPolicies, SizedRollout, by_size, chosen, sized_rollout, sizes_of

Made = Callable[[Sequence[PromptRow], Experience, Sequence[int]], None]
"""Called with prompts, some of their images, and the number of each image among all of an evaluation.

Images are numbered prompt by prompt, in the order of the evaluation's prompts."""


AT_ONCE = 64
"""About how many images an evaluation has in the works at a time; fewer if a rollout has fewer."""


def company_of(recipe: Recipe) -> int:
    """How many images are made together: whole batches of the denoiser and of the decoder, from the first image on."""
    return math.lcm(recipe.rollout.batch, recipe.rollout.decode_batch)


class Evaluator:
    """Makes the images of the evaluations of a recipe.

    An image is the same to the last bit if it is made together with the same other images, see `company_of`.

    Args:
        recipe: for noise levels, seeds, and the share of the trained weights.
        policy: of the model, on the evaluation's number of steps.
        sized: the policies of the sizes of prompts; without it, no prompt may have a size of its own.
    """

    def __init__(self, recipe: Recipe, policy: FlowPolicy, sized: SizedPolicies | None = None) -> None:
        self.recipe, self.policy, self.sized = recipe, policy, sized
        self._base_from = base_from(recipe)

    def plan(self, roots: int, policy: FlowPolicy | None = None) -> Plan:
        """A deterministic plan over the evaluation's noise levels, with `roots` images per prompt."""
        sigmas = levels_of(self.recipe, (policy or self.policy).denoiser.probe.sigmas, evaluation=True)
        return Plan(sigmas, tuple(StepPlan() for _ in sigmas[1:]), roots=roots)

    def evaluation(
        self, rows: Sequence[PromptRow], keys: Sequence[int], clock: Clock, made: Made | None = None
    ) -> Experience | SizedRollout:
        """Images of held-out prompts; if prompts have sizes, one size after the other.

        Args:
            rows: the prompts.
            keys: a number for each prompt that addresses its noises.
            clock: measures where the time goes.
            made: called with each part of the images. If given, the images are made a company at a time, else some
                companies at a time; they are the same images.
        """
        if all(row.size is None for row in rows):
            return self._of_one_size(self.policy, rows, range(len(rows)), keys, clock, made)
        parts = []
        for size, places in by_size(sizes_of(rows)):
            own = chosen(rows, places), places, chosen(keys, places)
            parts.append((size, places, self._of_one_size(self._policy(size), *own, clock, made)))
        return sized_rollout(parts)

    def _policy(self, size: Size | None) -> FlowPolicy:
        if size is None:
            return self.policy
        assert self.sized is not None
        return self.sized.of(size)

    def _of_one_size(
        self,
        policy: FlowPolicy,
        rows: Sequence[PromptRow],
        places: Sequence[int],
        keys: Sequence[int],
        clock: Clock,
        made: Made | None,
    ) -> Experience:
        prompts, seeds = tuple(row.prompt for row in rows), self.recipe.evaluate.seeds
        plan, parts = self.plan(seeds, policy), []

        def counted(before: int) -> Callable[[int, int], None]:
            return lambda done, _: clock.count(before + done, len(rows) * seeds)

        fewest = math.lcm(company_of(self.recipe), seeds)
        most = min(AT_ONCE, self.recipe.rollout.prompts * self.recipe.rollout.group)
        some = fewest if made is not None else fewest * max(most // fewest, 1)
        for part in chunks_of(len(rows), some // seeds):
            with clock.part("denoiser"):
                rollout = policy.sample(prompts, keys, plan, chunk=part, told=clock.count, base_from=self._base_from)
            with clock.part("decode"):
                images = policy.decode(rollout, prompts, counted(part.start * seeds))
            parts.append(
                Experience(rollout, plan, prompts, images, 1, tuple(keys), sampling_rate=policy.denoiser.sampling_rate)
            )
            if made is not None:
                made(rows, parts[-1], [place * seeds + seed for place in places[part] for seed in range(seeds)])
        return join_experiences(parts)

    def images(
        self, prompts: Sequence[str], noises: Sequence[int], sizes: Sequence[Size | None] | None = None
    ) -> Tensor | list[Tensor]:
        """Images [N, 3, H, W] in [0, 1] of N prompts, on the CPU, each from the noise of its own seed.

        Videos are [N, F, 3, H, W]. With `sizes`, one for each prompt, the images are a list, in the order of the
        prompts.
        """
        found = dict(self.each_image(prompts, noises, sizes))
        images = [found[place] for place in range(len(prompts))]
        return torch.stack(images) if sizes is None or all(size is None for size in sizes) else images

    def each_image(
        self, prompts: Sequence[str], noises: Sequence[int], sizes: Sequence[Size | None] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """The images of `images`, each with the number of its prompt, as they are made."""
        for size, places in by_size(sizes or [None] * len(prompts)):
            policy, texts, seeds = self._policy(size), chosen(prompts, places), chosen(noises, places)
            plan = self.plan(1, policy)
            for part in chunks_of(len(texts), company_of(self.recipe)):
                rollout = policy.sample(texts, seeds, plan, chunk=part, noises=seeds[part], base_from=self._base_from)
                yield from zip(places[part], policy.decode(rollout, texts), strict=True)
