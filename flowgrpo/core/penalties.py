"""Penalties of images. A penalty times its weight in the recipe is added to the loss of a trained step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from ..parts.choice import Choice
from ..parts.needs import SOMETHING, Need, needs, several_updates
from ..parts.ranges import NotNegative, Positive, Share, Words
from ..parts.traits import OF_EDGES, TRAINED, compares, noises_again, trained
from .advantages import goodness
from .guards import likelihood_guard
from .objectives import gaussian_kl

Difference = Callable[[], Tensor]
SUSPECT = "suspect"
"""The mark of images that may exploit the trained reward."""


def _without_teachers() -> Tensor:
    raise ValueError(
        "a penalty reads `from_teacher`, and finished images have no teacher; use objective visited or transition"
    )


def without_images() -> Tensor:
    """Refuse what nothing can learn: images of data, where there are none."""
    raise ValueError(
        "a penalty reads `data_error`, and there are no images beside the rollout; add penalty data, whose `source` "
        "names them"
    )


@dataclass(frozen=True)
class Edges:
    """What a penalty reads: E edges of one denoising step; with objective `forward`, E images at one noise level.

    Attributes:
        step: number of the denoising step.
        std: standard deviation of the step's noise, per element; 1 for a step without noise, and None for images, whose
            predictions have no noise.
        shift: [E, ...] how far the step's mean (for images, the prediction) has moved since sampling, with gradient.
        log_ratio: [E, 1] log of the importance ratio, with gradient.
        advantage: [E].
        mask: [E, 1] bool, the edges that are trained; None for all.
        to_reference: gives `from_reference`, at the cost of one call of the denoiser.
        to_guided: gives `from_guided`.
        to_teacher: gives `from_teacher`, at the cost of one call of the denoiser.
        scale: how far the step's mean moves with the velocity; 1 for images.
        to_data: gives `data_error`, at the cost of one call of the denoiser with a gradient.
        marks: name -> [E] values that extensions left for penalties, see `mark`.
    """

    step: int
    std: float | None
    shift: Tensor
    log_ratio: Tensor
    advantage: Tensor
    mask: Tensor | None
    to_reference: Difference
    to_guided: Difference
    to_teacher: Difference = _without_teachers
    scale: float = 1.0
    to_data: Difference = without_images
    marks: Mapping[str, Tensor] = field(default_factory=dict)

    @cached_property
    def from_reference(self) -> Tensor:
        """[E, ...] the step's mean (for images, the prediction) minus the reference's, with gradient.

        A penalty that reads this property must be marked with `parts.traits.compares`.
        """
        return self.to_reference()

    @cached_property
    def from_guided(self) -> Tensor:
        """[E, ...] the step's mean minus the mean to which `sampler.guide` moved it; 0 before the guide is ready."""
        return self.to_guided()

    @cached_property
    def from_teacher(self) -> Tensor:
        """[E, ...] the step's mean minus the mean of the prompt's teacher (`model.teachers`), with gradient."""
        return self.to_teacher()

    @cached_property
    def data_error(self) -> Tensor:
        """[E] error of flow matching on the image of the data that each edge's prompt has, with gradient."""
        return self.to_data()

    def mark(self, name: str) -> Tensor:
        """[E] the values that an extension left under a name, by `batch.experience.mark(name, values)`.

        Raises:
            ValueError: no extension left values under this name.
        """
        if name not in self.marks:
            there = f"the marks are {', '.join(self.marks)}" if self.marks else "no extension marks anything"
            raise ValueError(
                f"a penalty reads the mark {name!r}, and {there}; add the extension that makes it (suspects makes "
                f"{SUSPECT!r})"
            )
        return self.marks[name]

    def divergence(self, difference: Tensor) -> Tensor:
        """[E] KL of two steps whose means differ by `difference`, per element, in nats; for images, the mean square."""
        if self.std is None:
            return difference.square().flatten(1).mean(1)
        wide = difference[:, None]
        return gaussian_kl(wide, torch.zeros_like(wide), self.std)[:, 0]


def _of_steps(recipe: Any, choice: Choice) -> list[str]:
    if not noises_again(recipe):
        return []
    return [
        f"penalty {choice.short} needs steps with noise, and objective {recipe.objective.short} trains "
        f"{TRAINED[trained(recipe)]}; use objective transition, or leave the penalty out"
    ]


@compares
def kl(edges: Edges) -> Tensor:
    """Exact KL of a step to the reference's step (Flow-GRPO, 2505.05470); for images, squared distance of predictions.

    Args:
        edges: E of one step.

    Returns:
        [E], per element of a latent.
    """
    return edges.divergence(edges.from_reference)


@compares
def adaptive_kl(edges: Edges, *, bound: Positive = 5.0, least: Share = 0.001) -> Tensor:
    """The penalty `kl`, stronger for better images (CRD, 2603.14128).

    Bad images may move far from the reference, so that a run begins fast. Good images may not, so that it ends without
    exploiting the reward. The KL has the weight least + (1 - least) clamp(A / (2 bound) + 1/2, 0, 1).

    Args:
        edges: E of one step.
        bound: The advantage at which an image counts as wholly good or bad.
        least: Share of the penalty's weight that wholly bad images have.

    Returns:
        [E], per element of a latent.
    """
    found = kl(edges)
    return (least + (1.0 - least) * goodness(edges.advantage.to(found), bound)) * found


@compares
def trust_region(edges: Edges, *, radius: NotNegative = 0.05) -> Tensor:
    """The part of the KL to the reference that lies beyond a radius, for each image by itself.

    Images within the radius are as free as without a penalty. A broken image, whose prediction is far from the
    reference, gets the whole penalty.

    Args:
        edges: E of one step.
        radius: KL without penalty, per element of a latent.

    Returns:
        [E], per element of a latent.
    """
    return (kl(edges) - radius).clamp(min=0)


def _has_suspects(recipe: Any, choice: Choice) -> list[str]:
    if any(extension.short == "suspects" for extension in recipe.extensions):
        return []
    return [
        f"penalty {choice.short} is for suspect images, and nothing says which images are suspect; add {{name: "
        "suspects, light: [REWARD]} to extensions, or use penalty kl"
    ]


@compares
@needs(_has_suspects)
def gated_kl(edges: Edges) -> Tensor:
    """The penalty `kl` for suspect images alone, which extension `suspects` finds (GARDO, 2512.24138).

    The other images are as free as without a penalty. The penalty is the mean over the suspect images of the iteration,
    so its weight does not depend on how many there are.

    Args:
        edges: E of one step.

    Returns:
        [E], per element of a latent; 0 for an image that is not suspect.
    """
    found = kl(edges)
    return edges.mark(SUSPECT).to(found) * found


@compares
@needs(_of_steps)
def w2(edges: Edges) -> Tensor:
    """Squared 2-Wasserstein distance of a step to the reference's step (AC-Flow, 2510.18072).

    Args:
        edges: E of one step.

    Returns:
        [E], per element of a latent.
    """
    wide = edges.from_reference[:, None]
    # For Gaussians of one standard deviation, it is the squared distance of their means.
    return (2.0 * gaussian_kl(wide, torch.zeros_like(wide), 1.0))[:, 0]


@needs(_of_steps)
def stepwise(edges: Edges) -> Tensor:
    """KL of a step to the step that sampled (SAGE-GRPO, 2603.21872).

    Args:
        edges: E of one step.

    Returns:
        [E], per element of a latent.
    """
    return edges.divergence(edges.shift)


@needs(
    _of_steps,
    Need("sampler.guide", (SOMETHING,), "learns a guided step"),
)
def distil(edges: Edges) -> Tensor:
    """KL of a step to the guided step, so that the policy learns what the guide did (Euphonium).

    Args:
        edges: E of one step.

    Returns:
        [E], per element of a latent.
    """
    return edges.divergence(edges.from_guided)


def _visits_states(recipe: Any, choice: Choice) -> list[str]:
    if trained(recipe) in OF_EDGES:
        return []
    return [
        f"penalty {choice.short} compares the steps of a rollout, and objective {recipe.objective.short} trains "
        f"{TRAINED[trained(recipe)]}; use objective visited, or objective transition beside a reward"
    ]


@needs(_visits_states, Need("model.teachers", (SOMETHING,), "compares with teachers"))
def taught(edges: Edges, *, of: Literal["step", "velocity"] = "step") -> Tensor:
    """KL of a step to the step of the prompt's teacher, on the states of the policy (DiffusionOPD, 2605.15055).

    With noise, it is the exact KL of two Gaussians, ‖μ - μ_T‖² / (2 s²). Without noise, it is ‖μ - μ_T‖² / 2, where μ
    is the end of a step of Euler.

    Args:
        edges: E of one step.
        of: What is compared: `step` compares the means of the step, `velocity` the velocities, ‖v - v_T‖² (DanceOPD,
            2606.27377).

    Returns:
        [E], per element of a latent.
    """
    if of == "velocity":
        return (edges.from_teacher / edges.scale).square().flatten(1).mean(1)
    return edges.divergence(edges.from_teacher)


def data(edges: Edges, *, source: Words, column: Words = "image") -> Tensor:
    """Flow matching on images of data, in the place of a KL to the reference (DDRL, 2512.04332).

    In each iteration, each prompt of the rollout gets one image of the source, with the image's own prompt. The image
    is noised to the noise level of the step. All samples of a prompt share the image and its noise, so the penalty
    costs little.

    Args:
        edges: E of one step.
        source: A prompt file or data set with images, as plan `given` reads them.
        column: The column that holds the image of each prompt.

    Returns:
        [E], the mean squared error of the velocity at the noised image.
    """
    return edges.data_error


def _by_densities(recipe: Any, choice: Choice) -> list[str]:
    if trained(recipe) in ("states", "velocities", "gradients", "targets", "recovered"):
        return [
            f"penalty {choice.short} checks whether a step became less likely, and objective {recipe.objective.short} "
            "has no ratio of densities; use objective transition, or leave the penalty out"
        ]
    ratio = recipe.objective.get("ratio", "gaussian")
    if ratio == "gaussian":
        return []
    return [
        f"penalty {choice.short} checks whether a step became less likely, and objective.ratio {ratio} is not the "
        "ratio of its densities; use ratio gaussian"
    ]


@needs(
    _of_steps,
    _by_densities,
    several_updates("compares with the policy that sampled, and has no effect before the policy has moved"),
)
def llds(edges: Edges, *, rows: Literal["all", "good"] = "all") -> Tensor:
    """The drop of the log-density of a sampled step since sampling (LLDS, 2512.04220).

    Args:
        edges: E of one step.
        rows: Edges that are penalised: `all`, or `good` for edges whose advantage is above 0.

    Returns:
        [E], not negative.
    """
    good = edges.advantage if rows == "good" else None
    return likelihood_guard(edges.log_ratio, torch.zeros_like(edges.log_ratio), edges.mask, good)[:, 0]


PENALTIES: dict[str, Callable[..., Tensor]] = {
    "kl": kl,
    "adaptive_kl": adaptive_kl,
    "trust_region": trust_region,
    "gated_kl": gated_kl,
    "w2": w2,
    "stepwise": stepwise,
    "distil": distil,
    "taught": taught,
    "data": data,
    "llds": llds,
}
"""Penalties by the names that recipes use, in the order in which they are added up."""
