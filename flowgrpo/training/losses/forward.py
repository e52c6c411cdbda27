"""Losses of the forward process. They take finished images and noise them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from torch import Tensor

from ...configs.sections import EmaConfig
from ...core.addressing import address
from ...core.diagnostics import step_statistics
from ...core.forward_process import Noised, diffusion_nft, levels_to_draw, preferred
from ...core.objectives import held_columns
from ...core.penalties import Edges
from ...core.surrogates import require_gradient
from ...parts.choice import Choice, Of, named
from ...parts.needs import at_least, needs, unscored_counts
from ...parts.ranges import Count, Whole
from ...parts.traits import compares_all, saying
from ...pipelines.scored_edges import data_error
from ...samplers.moves import draw_noise
from .noise_levels import Density, Draw, NoiseLevel, draw_levels
from .objective import ObjectiveSetting, Outcome, Penalties, Unmeasured, pair

if TYPE_CHECKING:
    from ...pipelines.experience import Experience

Loss = Annotated[Callable[..., tuple[Tensor, Tensor]], Of("forward loss", "diffusion_nft")]


@dataclass(frozen=True)
class ImagesAtLevel:
    """Images at one noise level; the images are indices into the rollout's leaves."""

    leaves: Tensor
    level: NoiseLevel

    @property
    def key(self) -> tuple[int, ...]:
        """The first image and the noise level: they tell a batch from the others of an optimizer step."""
        return int(self.leaves[0]), *self.level.address


_Predictions = dict[tuple[int, ...], Tensor]


def _leaves_a_level(recipe: Any, choice: Choice) -> list[str]:
    steps = recipe.sampler.rollout_steps
    skip, levels = choice["skip"], levels_to_draw(steps, choice["levels"], between=choice["draw"] == "between")
    if skip < len(levels):
        return []
    return [
        f"objective.skip is {skip}, and there are {len(levels)} noise levels to draw from; use at most "
        f"{len(levels) - 1}"
    ]


def _density_of_what(recipe: Any, choice: Choice) -> list[str]:
    if choice["density"] == "uniform" or choice["draw"] == "between":
        return []
    return [
        f"objective.density is {choice['density']}, which is for levels between the levels of the sampler, and "
        f"objective.draw is {choice['draw']}; add draw: between, or leave density out"
    ]


def _two_of_a_group(recipe: Any, choice: Choice) -> list[str]:
    loss = choice["loss"]
    if not getattr(loss.target, "of_selection", False):
        return []
    told = f"forward loss {loss.short}"
    lone = [one for one in recipe.select if one.get("keep") == 1 and one.get("among") != "split"]
    faults = [f"{told} compares two images of a group, and select {one.short} keeps 1; keep 2 or more" for one in lone]
    return faults + unscored_counts(recipe, told)


@needs(
    at_least("rollout.batch", lambda recipe, choice: recipe.rollout.group, "takes whole groups of {least} in a call"),
    _leaves_a_level,
    _density_of_what,
    _two_of_a_group,
)
class ForwardObjective(Unmeasured):
    """A loss of the forward process on the images of a rollout; any sampler may have made the images.

    The noise levels are the levels of the rollout, for which every replay variant of the denoiser is exact, or lie
    between them. The last level before 0 is drawn only with `between`.

    Args:
        setting: of the run.
        loss: The loss of the predictions for noised images.
        times: How many noise levels each image gets, drawn anew in every iteration; if left out, all, or with `between`
            as many as the rollout has.
        old: An average of the weights that samples; if left out, the trained weights themselves sample.
        compared: An average of the weights with which the loss compares the trained weights; if left out, the policy
            that samples. CRD (2603.14128) sets the two apart: near the policy that samples, the differences that its
            loss compares with the rewards would vanish.
        levels: From how many of the noisiest levels they are drawn (DGPO's code draws from five of ten); all if left
            out.
        skip: How many of the noisiest levels are never drawn. The first level is pure noise, which AWM's code leaves
            out.
        draw: `any`: the levels of a rollout are drawn without further order. `ranges`: the levels are divided into
            `times` ranges of equal size, and one level of each range is drawn, as in the code of AWM. `between`: the
            same, and the levels of the rollout are joined to a line, on which any level down to 0 can be drawn.
        density: With `between`, where on this line levels are drawn. `uniform`: everywhere alike. `logit_normal`: more
            in the middle, as models such as Stable Diffusion 3 are trained (2403.03206, Eq. 19, with mean 0 and
            standard deviation 1). `falling`: most at the noisiest level, and linearly less to none at level 0, as RAM
            (2605.10759) draws them.
        noise: `prompt`: the images of a prompt share their noise, as in DGPO's code. At pure noise they are then one
            state, which is evaluated once. `image`: each image has noise of its own, as in the code of DiffusionNFT
            and AWM.
    """

    trains = "images"

    def __init__(
        self,
        setting: ObjectiveSetting,
        *,
        loss: Loss = diffusion_nft,
        times: Count | None = None,
        old: EmaConfig | None = None,
        compared: EmaConfig | None = None,
        levels: Count | None = None,
        skip: Whole = 0,
        draw: Draw = "any",
        density: Density = "uniform",
        noise: Literal["prompt", "image"] = "prompt",
    ) -> None:
        self.recipe, self.policy, self.old, self.times = setting.recipe, setting.policy, setting.old, times
        self.noise, self.levels, self.skip = noise, levels, skip
        self.draw: Draw = draw
        self.density: Density = density
        self.loss = loss
        # The metrics ask the surrogate which images are clipped.
        self.surrogate: Callable[..., Tensor] | None = None
        if isinstance(loss, partial):
            self.surrogate = loss.keywords.get("surrogate")
        self.penalties = Penalties(setting.recipe.penalties, setting.elements)
        self.compares = bool(saying(setting.recipe, "compares"))
        self.several = setting.recipe.optimizer.updates * setting.recipe.optimizer.epochs > 1
        # Most losses need no prediction for an image that is not trained. But with several updates, the predictions
        # from before the updates are of whole groups, and a prediction depends on its batch by rounding.
        function = getattr(loss, "func", loss)
        self.apart = not self.several and not compares_all(function)
        self.has_ratio = not getattr(function, "no_ratio", False)
        self._before: _Predictions = {}
        self._of_old: _Predictions = {}
        self._of_reference: _Predictions = {}
        self._measured: Experience | None = None

    def prepare(self, experience: Experience) -> None:
        """Keep the predictions of the policy before it moves, if the rollout has several updates."""
        self._before = {}
        if self.several:
            whole = [batch for part in range(experience.updates) for batch in self.batches(experience, part, None)]
            self._before = self._predictions(experience, whole, self.old or nullcontext)

    def measure(self, experience: Experience, part: int, advantages: Tensor, keep: Tensor | None) -> None:
        """Make the predictions of the old policy and of the reference, with one exchange of the weights for each.

        An exchange moves all trained weights, which may be a whole model. So there is not one for each batch.
        """
        batches = list(self.batches(experience, part, keep))
        self._measured, self._of_old, self._of_reference = experience, {}, {}
        if self.old is not None and not self.several:
            self._of_old = self._predictions(experience, batches, self.old)
        if self.compares:
            self._of_reference = self._predictions(experience, batches, self.policy.as_reference)

    @torch.no_grad()
    def _predictions(
        self,
        experience: Experience,
        batches: Sequence[ImagesAtLevel],
        weights: Callable[[], AbstractContextManager[None]],
    ) -> _Predictions:
        made: _Predictions = {}
        with weights():
            for batch in batches:
                found = self._velocity(experience, batch, self._noised(experience, batch)[2])
                # There are as many as images and noise levels, so they wait where the states of the rollout do.
                made[batch.key] = found if self.policy.store is None else self.policy.store(found)
        return made

    def rows(self, experience: Experience, part: int, keep: Tensor | None) -> int:
        """How many pairs of an image and a noise level one part has."""
        return sum(self._kept(experience, b, keep) for b in self.batches(experience, part, keep))

    def batches(self, experience: Experience, part: int, keep: Tensor | None) -> Iterator[ImagesAtLevel]:
        """Batches of whole groups, each at one of the drawn noise levels; without the images that no loss needs."""
        low, high = experience.part(part)
        owner, groups = experience.rollout.leaf_prompt, experience.groups
        mine, sizes = groups[(owner >= low) & (owner < high)].unique(return_counts=True)
        # The side branches of a step are a group of their own.
        count = max(self.policy.batch // max(sizes.tolist(), default=1), 1)
        for level in self.drawn_levels(experience):
            for chosen in mine.split(count) if len(mine) else ():
                leaves = torch.isin(groups, chosen).nonzero().flatten()
                if keep is not None and self.apart:
                    leaves = leaves[keep.cpu()[experience.rollout.leaf[leaves]]]
                if len(leaves):
                    yield ImagesAtLevel(leaves, level)

    def backward(
        self, experience: Experience, batch: ImagesAtLevel, advantages: Tensor, keep: Tensor | None, rows: Tensor
    ) -> Outcome:
        """Add the gradient of one batch of images."""
        nodes = experience.rollout.leaf[batch.leaves]
        noised = self._rows(experience, batch, advantages[nodes], None if keep is None else keep[nodes])
        loss, log_ratio = self.losses(experience, batch, noised)
        require_gradient(named("forward loss", self.loss), loss, "`rows.velocity`")
        metrics = {"loss": pair(loss.detach())}
        if self.has_ratio:
            metrics |= {"log_ratio_sq": pair(log_ratio.square()), "ratio": pair(log_ratio.exp())}
        if experience.plan.given and noised.reference is not None and self.trains == "images":
            metrics["preferred"] = pair(preferred(noised))
        level, owners = batch.level, experience.rollout.leaf_prompt[batch.leaves].tolist()
        to_data = partial(data_error, self.policy, experience, owners, level.step, level.sigma, level.address)
        marks = experience.marks_of(nodes)
        penalties = self.penalties.of(_edges(noised, batch.level.step, log_ratio, to_data, marks))
        for name, value in penalties.items():
            metrics[name] = pair(value[:, 0].detach())
        for term in self.penalties.weighted(penalties):
            loss = loss + term[:, 0]
        kept = torch.ones_like(loss) if keep is None else keep[nodes].to(loss)
        self.policy.weights.backward((kept * loss).sum() / rows)
        adv = advantages[nodes].to(log_ratio)
        steps = torch.full_like(log_ratio, batch.level.step, dtype=torch.long)
        statistics = step_statistics(
            log_ratio, steps, adv, None, self._held(log_ratio, adv),
            num_steps=experience.plan.num_steps,
        )  # fmt: skip
        return Outcome(statistics.cpu(), metrics, log_ratio.abs().max().cpu())

    def losses(self, experience: Experience, batch: ImagesAtLevel, noised: Noised) -> tuple[Tensor, Tensor]:
        """[N] losses of a batch, with gradient, and [N] log ratios."""
        return self.loss(noised)

    def _rows(
        self, experience: Experience, batch: ImagesAtLevel, advantage: Tensor, kept: Tensor | None = None
    ) -> Noised:
        x0, noise, x = self._noised(experience, batch)
        velocity = self._velocity(experience, batch, x)
        return Noised(
            velocity=velocity,
            old=self._old(experience, batch, velocity),
            reference=self._reference(experience, batch) if self.compares else None,
            x0=x0,
            noise=noise,
            sigma=batch.level.sigma,
            advantage=advantage,
            group=experience.groups[batch.leaves].to(x.device),
            kept=None if kept is None else kept.to(x.device),
        )

    def _held(self, log_ratio: Tensor, advantage: Tensor) -> Tensor | None:
        """[N] bool: images whose ratio has no gradient because of a bound; None if the loss has no surrogate."""
        if self.surrogate is None:
            return None
        column = log_ratio[:, None]
        return held_columns(column, torch.zeros_like(column), advantage, surrogate=self.surrogate)[:, 0]

    def drawn_levels(self, experience: Experience) -> Sequence[NoiseLevel]:
        """Noise levels of this rollout, falling. They are the same for all its prompts, on every process."""
        plan, generator = experience.plan, drawing(experience)
        steps = levels_to_draw(plan.num_steps, self.levels, self.skip, between=self.draw == "between")
        return draw_levels(plan.sigmas, steps, self.times, self.draw, self.density, generator)

    def _kept(self, experience: Experience, batch: ImagesAtLevel, keep: Tensor | None) -> int:
        return len(batch.leaves) if keep is None else int(keep[experience.rollout.leaf[batch.leaves]].sum())

    def _noised(self, experience: Experience, batch: ImagesAtLevel) -> tuple[Tensor, Tensor, Tensor]:
        """Clean latents, noise and noised latents."""
        rollout = experience.rollout
        x0 = self.policy.brought(rollout.x[batch.leaves.to(rollout.x.device)])
        noise = self.noise_of(experience, batch, x0.shape[1:]).to(x0.device)
        sigma = batch.level.sigma
        return x0, noise, ((1.0 - sigma) * x0.float() + sigma * noise).to(x0.dtype)

    def noise_of(self, experience: Experience, batch: ImagesAtLevel, shape: Sequence[int]) -> Tensor:
        """[N, *shape] the noise of each image, float32."""
        rollout = experience.rollout
        owners = rollout.leaf_prompt[batch.leaves].tolist()
        # The place of an image in its group does not depend on its batch.
        everyone = rollout.leaf_prompt.tolist()
        places = [everyone[:leaf].count(owner) for leaf, owner in zip(batch.leaves.tolist(), owners)]
        keys = [
            address(experience.keys[p], -1, *batch.level.address, *([] if self.noise == "prompt" else [place]))
            for p, place in zip(owners, places)
        ]
        return draw_noise(shape, keys)

    def _one_state(self, level: NoiseLevel) -> bool:
        """Whether all images of a prompt are the same state at a noise level: their common noise, and nothing else."""
        return self.noise == "prompt" and level.sigma == 1.0

    def _velocity(self, experience: Experience, batch: ImagesAtLevel, x: Tensor) -> Tensor:
        step = batch.level.step
        between = batch.level.sigma != experience.plan.sigmas[step]
        self.policy.bind(experience.plan, {step: batch.level.sigma} if between else None)
        velocity = self.policy.velocity_of(experience.prompts)
        owners = experience.rollout.leaf_prompt[batch.leaves].tolist()
        if not self._one_state(batch.level):
            return velocity(x, step, owners)
        prompts = sorted(set(owners))
        first = [owners.index(prompt) for prompt in prompts]
        found = velocity(x[first], step, prompts)
        return found[[prompts.index(owner) for owner in owners]]

    def _old(self, experience: Experience, batch: ImagesAtLevel, velocity: Tensor) -> Tensor:
        if batch.key in self._before:
            return self.policy.brought(self._before[batch.key])
        return velocity.detach() if self.old is None else self._once(self._of_old, experience, batch, self.old)

    def _reference(self, experience: Experience, batch: ImagesAtLevel) -> Tensor:
        return self._once(self._of_reference, experience, batch, self.policy.as_reference)

    def _once(
        self, made: _Predictions, experience: Experience, batch: ImagesAtLevel,
        weights: Callable[[], AbstractContextManager[None]],
    ) -> Tensor:  # fmt: skip
        """A prediction that `measure` made. It is used once, because the weights move afterwards."""
        if self._measured is experience and batch.key in made:
            return self.policy.brought(made.pop(batch.key))
        return self.policy.brought(self._predictions(experience, [batch], weights)[batch.key])


def drawing(experience: Experience) -> torch.Generator:
    """A generator for the noise levels of an iteration, the same on every process."""
    key = experience.keys[0] if experience.key is None else experience.key
    return torch.Generator().manual_seed(address(key, -2))


def _edges(
    noised: Noised, step: int, log_ratio: Tensor, to_data: Callable[[], Tensor], marks: Mapping[str, Tensor]
) -> Edges:
    """The input of penalties for noised images."""

    def to_reference() -> Tensor:
        if noised.reference is None:
            raise ValueError(
                "a penalty reads `from_reference`, but is not marked; mark it with @compares of flowgrpo.parts.traits"
            )
        return noised.velocity.float() - noised.reference.float()

    def to_guided() -> Tensor:
        raise ValueError("a penalty reads `from_guided`, and finished images have no guide; use objective transition")

    return Edges(
        step=step,
        std=None,
        shift=noised.velocity.float() - noised.old.float(),
        log_ratio=log_ratio[:, None],
        advantage=noised.advantage,
        mask=None,
        to_reference=to_reference,
        to_guided=to_guided,
        to_data=to_data,
        marks=marks,
    )
