"""Trained edges under the present policy, and their differences from other policies, a guide and images of data.

The differences are computed only if a penalty reads them, because most of them cost a call of the denoiser.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.addressing import address
from ..core.forward_process import matching_error
from ..core.penalties import without_images
from ..samplers.kernels import jacobian
from ..samplers.moves import draw_noise
from ..samplers.transitions import ReplayedEdges, Transitions, Velocity
from .experience import Experience

if TYPE_CHECKING:
    from .policy import FlowPolicy

IMAGE_NOISE = -6
"""In an address, the noise of an image of the data."""


@dataclass(frozen=True)
class ScoredEdges:
    """Trained edges under the current policy; each edge is a row, and there is one column.

    Attributes:
        log_ratio: [E, 1] log of the importance ratio in the chosen form, with gradients; 0 for a step without noise,
            which has no ratio.
        node: [E] the node to which each edge leads.
        steps: [E, 1] denoising step.
        weight: [E, 1] step weight.
        divergence: [E, 1] KL between the sampling policy's step and the current step, per latent element, detached.
        shift: [E, ...] how far the step's mean has moved since sampling, with gradients.
        std: standard deviation of the step's noise, per element; 1 for a step without noise.
        to_reference: gives [E, ...], the mean minus the reference's mean, by another call of the denoiser.
        to_guided: gives [E, ...], the mean minus the mean of the guided step that was taken; 0 if there was no guide.
        to_teacher: gives [E, ...], the mean minus the mean of the teacher of the edge's prompt.
        scale: how far the step's mean moves with the velocity.
        to_data: gives [E], the error of flow matching on the data's image of the edge's prompt, by another call of the
            denoiser.
    """

    log_ratio: Tensor
    node: Tensor
    steps: Tensor
    weight: Tensor
    divergence: Tensor
    shift: Tensor
    std: float
    to_reference: Callable[[], Tensor]
    to_guided: Callable[[], Tensor]
    to_teacher: Callable[[], Tensor]
    scale: float
    to_data: Callable[[], Tensor]


def data_error(
    policy: FlowPolicy, experience: Experience, owners: Sequence[int], step: int, sigma: float, level: tuple[int, ...]
) -> Tensor:
    """[N] error of flow matching on the data's image of each of N prompts, with gradients.

    Each image is evaluated once. The denoiser must be bound to the levels of the rollout, with `sigma` at `step`.

    Args:
        policy: evaluates the images.
        experience: the rollout, with images beside it.
        owners: N numbers of prompts of the rollout.
        step: the denoising step.
        sigma: its noise level.
        level: what tells this level from the others of the rollout, for the noise.

    Raises:
        ValueError: there are no images beside the rollout.
    """
    images = experience.beside
    if images is None:
        return without_images()
    # The pictures of the images' prompts are remembered beside the rollout's pictures.
    policy.denoiser.caller.keep_encodings(len(experience.prompts) + len(images.prompts))
    prompts = sorted(set(owners))
    x0 = policy.brought(images.x[prompts])
    keys = [address(experience.keys[prompt], IMAGE_NOISE, *level) for prompt in prompts]
    noise = draw_noise(x0.shape[1:], keys, x0.device)
    x = ((1.0 - sigma) * x0.float() + sigma * noise).to(x0.dtype)
    velocity = policy.denoiser.velocity(x, step, [images.prompts[prompt] for prompt in prompts])
    error = matching_error(velocity, x0, noise)
    return error[[prompts.index(owner) for owner in owners]]


def to_data(policy: FlowPolicy, experience: Experience, transitions: Transitions, replayed: ReplayedEdges) -> Tensor:
    """[E] error of flow matching at the step's noise level, on the image of each edge's prompt."""
    step, owners = transitions.step, transitions.prompt[replayed.states]
    return data_error(policy, experience, owners, step, experience.plan.sigmas[step], (step,))[replayed.rows()]


def to_reference(policy: FlowPolicy, transitions: Transitions, replayed: ReplayedEdges, velocity: Velocity) -> Tensor:
    """[E, ...] the mean of each edge minus the reference's mean, with gradients."""
    c, batch = transitions.coefficients, replayed.states
    with torch.no_grad(), policy.as_reference():
        reference = velocity(transitions.x[batch], transitions.step, transitions.prompt[batch])
    scale = jacobian(c.sigma, c.sigma_next, c.kappa)
    return (scale * (replayed.velocity - reference))[replayed.rows()]


def to_teacher(policy: FlowPolicy, experience: Experience, transitions: Transitions, replayed: ReplayedEdges) -> Tensor:
    """[E, ...] the mean of each edge minus the mean of the teacher of its prompt, with gradients."""
    if not experience.teachers:
        raise ValueError(
            "a penalty reads `from_teacher`, and the recipe has no model.teachers; write "
            '@needs(Need("model.teachers", (SOMETHING,), "compares with teachers")) above the penalty'
        )
    c, batch = transitions.coefficients, replayed.states
    x, owners = transitions.x[batch], transitions.prompt[batch]
    names = [experience.teachers[prompt] for prompt in owners]
    contexts = experience.contexts or experience.prompts
    if experience.contexts:
        # What is encoded of the teachers' pictures is remembered beside what is encoded of the prompts' pictures.
        policy.denoiser.caller.keep_encodings(len(experience.prompts) + len(contexts))
    velocity = policy.velocity_of(contexts)
    taught = torch.empty_like(replayed.velocity)
    for name in dict.fromkeys(names):
        rows = [row for row, one in enumerate(names) if one == name]
        with torch.no_grad(), policy.as_teacher(name):
            taught[rows] = velocity(x[rows], transitions.step, [owners[row] for row in rows])
    scale = jacobian(c.sigma, c.sigma_next, c.kappa)
    return (scale * (replayed.velocity - taught))[replayed.rows()]


def to_guided(policy: FlowPolicy, transitions: Transitions, replayed: ReplayedEdges, shift: Tensor) -> Tensor:
    """[E, ...] the mean of each edge minus the guided mean, with gradients."""
    wide = shift.to(torch.promote_types(shift.dtype, torch.float32))
    if transitions.shift is None:
        # Until the guide is ready, this is 0, so that nothing is learnt from the guide.
        return wide - wide.detach()
    target = transitions.coefficients.std * policy.brought(transitions.shift[replayed.edges])
    return wide - target.to(wide.dtype).detach()
