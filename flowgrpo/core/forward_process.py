"""Losses of the forward process: they noise a finished image again, and make the prediction there more or less likely.

No method here needs a stochastic step or a transition's density: rollouts may use any solver. Rows are (image,
noise level) pairs: `x0` a clean latent, `noise` standard normal, `x = (1 - sigma) x0 + sigma noise`, and the
velocities are predictions at `x`, whose target is `noise - x0`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from ..parts.choice import Of
from ..parts.ranges import Positive
from ..parts.traits import compares, no_ratio, of_selection, whole_groups
from .advantages import goodness, group_index, sum_by_group
from .surrogates import clip, losses

Surrogate = Annotated[Callable[..., Tensor], Of("surrogate", "clip")]


def levels_to_draw(num_steps: int, levels: int | None = None, skip: int = 0, *, between: bool = False) -> range:
    """The steps of a rollout whose noise levels images can get; step 0 has the noisiest level.

    Args:
        num_steps: steps of the rollout. The level of its last step is never drawn, but for `between`.
        levels: only this many of the noisiest levels.
        skip: without this many of the noisiest levels.
        between: whether images can also get the levels between the level of a step and the next level.
    """
    return range(skip, min(levels or num_steps, num_steps if between else num_steps - 1))


@dataclass(frozen=True)
class Noised:
    """N images at one noise level, with the predictions of three policies.

    Attributes:
        velocity: [N, ...] velocity of the trained policy, with gradient.
        old: [N, ...] velocity of the policy that sampled.
        reference: [N, ...] velocity of the reference; None unless a method or a penalty needs it.
        x0: [N, ...] clean latents.
        noise: [N, ...].
        sigma: noise level in (0, 1].
        advantage: [N].
        group: [N] integer ids; whole groups.
        kept: [N] bool, the images that are trained; None for all.
    """

    velocity: Tensor
    old: Tensor
    reference: Tensor | None
    x0: Tensor
    noise: Tensor
    sigma: float
    advantage: Tensor
    group: Tensor
    kept: Tensor | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.sigma <= 1.0:
            raise ValueError(f"sigma is {self.sigma}; use a noise level in (0, 1]")
        for name in ("old", "reference", "x0", "noise"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != self.velocity.shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, velocity {tuple(self.velocity.shape)}")

    @property
    def x(self) -> Tensor:
        """[N, ...] the noised latents."""
        return (1.0 - self.sigma) * self.x0.float() + self.sigma * self.noise.float()

    def error(self, velocity: Tensor) -> Tensor:
        """[N] mean squared error of a prediction, float32."""
        return matching_error(velocity, self.x0, self.noise)


def matching_error(velocity: Tensor, x0: Tensor, noise: Tensor) -> Tensor:
    """[N] mean squared error of velocities at (1 - sigma) x0 + sigma noise, float32 (Flow Matching, 2210.02747)."""
    return _mean((velocity.float() - (noise.float() - x0.float())).square())


def _mean(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1)


def _size(difference: Tensor) -> Tensor:
    """[N] mean size of the numbers of a difference, at least 1e-5, without gradient."""
    return _mean(difference.detach().abs().double()).clamp(min=1e-5).to(difference)


def _surrogate_loss(surrogate: Surrogate, logp: Tensor, old_logp: Tensor, adv: Tensor) -> tuple[Tensor, Tensor]:
    log_ratio = (logp - old_logp.detach())[:, None]
    everywhere = torch.ones_like(log_ratio, dtype=torch.bool)
    loss = losses(surrogate, log_ratio, adv.to(logp)[:, None], logp[:, None], everywhere)
    return loss[:, 0], log_ratio.detach()[:, 0]


@no_ratio
def diffusion_nft(rows: Noised, *, beta: Positive = 1.0, bound: Positive = 5.0) -> tuple[Tensor, Tensor]:
    """Negative-aware fine-tuning (DiffusionNFT, arXiv 2509.16117): good images pull the model, bad images push it away.

    v+ = beta v + (1 - beta) v_old and v- = (1 + beta) v_old - beta v predict clean images x0+ and x0-. The probability
    that an image is a good one is rho = clamp(A / (2 bound) + 1/2, 0, 1). The loss is bound / beta (rho l+ + (1 - rho)
    l-) with l± = mean((x0± - x0)^2) / mean|x0± - x0|. The denominator of l± is detached and at least 1e-5.

    Args:
        rows: images at one noise level.
        beta: Strength of the implicit policies; 1 or 0.1 in the paper's runs.
        bound: The advantage at which an image counts as wholly good or bad.

    Returns:
        Loss [N] with gradient, and log ratios [N], which are 0 because this loss has no ratio.
    """
    v, old = rows.velocity.float(), rows.old.float().detach()
    x, x0 = rows.x, rows.x0.float()
    good = goodness(rows.advantage.to(v), bound)
    terms = []
    for sign, mixed in ((1, beta * v + (1.0 - beta) * old), (-1, (1.0 + beta) * old - beta * v)):
        difference = x - rows.sigma * mixed - x0
        terms.append((good if sign > 0 else 1.0 - good) * _mean(difference.square()) / _size(difference))
    return bound / beta * (terms[0] + terms[1]), torch.zeros_like(good)


def awm(
    rows: Noised, *, surrogate: Surrogate = clip, power: Positive = 0.25, scaled: bool = True
) -> tuple[Tensor, Tensor]:
    """Advantage-weighted matching (AWM, arXiv 2509.25050): policy gradient with a matching loss as the log-probability.

    logp = -sigma ((l + e)^p - e^p) / p with the error l of the velocity and e = 1e-10. This is the generalised Huber
    weighting of the released code; p = 1 gives the plain error times sigma. The old log-probability uses the same
    noise.

    Args:
        rows: images at one noise level.
        surrogate: Surrogate of the ratio; the paper clips at 1.
        power: The exponent p.
        scaled: Whether the log-probability has the factor sigma. RAM (2605.10759) has p = 1 without it.

    Returns:
        Loss [N] with gradient, and log ratios [N].
    """

    def log_prob(velocity: Tensor) -> Tensor:
        return -(rows.sigma if scaled else 1.0) / power * ((rows.error(velocity) + 1e-10) ** power - 1e-10**power)

    return _surrogate_loss(surrogate, log_prob(rows.velocity), log_prob(rows.old), rows.advantage)


@compares
@whole_groups
def dgpo(rows: Noised, *, surrogate: Surrogate = clip, beta: Positive = 100.0) -> tuple[Tensor, Tensor]:
    """Direct group preference optimisation (DGPO, arXiv 2510.08425): a group's images weighted by a preference.

    The weight w = sigmoid(sum over the group of A_i beta (l_i - l_i^ref) / G) is detached. It is near 0 for a group
    whose preferences the policy already has. Each image has the loss w A_i l_i, and its ratio is exp(l_old - l).

    Args:
        rows: images at one noise level, whole groups, with the reference's prediction. The images of a group should
            share their noise.
        surrogate: Surrogate of the ratio; the paper bounds it by a clip of 1e-2.
        beta: Strength of the preference.

    Returns:
        Loss [N] with gradient, and log ratios [N].

    Raises:
        ValueError: If the reference's prediction is missing.
    """
    error, reference = rows.error(rows.velocity), _reference_error(rows, "dgpo")
    index, count = group_index(rows.group, len(error), error.device)
    advantage = rows.advantage.to(error)
    gaps = torch.stack([advantage * beta * (error.detach() - reference), torch.ones_like(error)], dim=1)
    totals = sum_by_group(gaps, index, count)
    weight = torch.sigmoid(totals[:, 0] / totals[:, 1])[index]
    loss, log_ratio = _surrogate_loss(surrogate, -error, -rows.error(rows.old), advantage)
    return weight * loss, log_ratio


@whole_groups
@no_ratio
def crd(
    rows: Noised,
    *,
    beta: Positive = 1.0,
    bound: Positive = 5.0,
    relative: bool = True,
    temperature: Positive | None = None,
    match: Literal["squares", "logistic"] = "squares",
) -> tuple[Tensor, Tensor]:
    """Centred reward distillation (CRD, arXiv 2603.14128): implicit rewards are matched with the rewards of a group.

    The implicit reward of an image is how much its error has fallen since the old policy, r = l_old - l. The reward
    is the advantage as a number in [0, 1], a = clamp(A / (2 bound) + 1/2, 0, 1). Both are centred within the group,
    because the unknown normaliser of a prompt then cancels. The loss is
    bound / beta (beta (r - mean r) - (a - mean a))^2, where mean r has no gradient.

    Args:
        rows: images at one noise level, whole groups.
        beta: Strength of the implicit reward.
        bound: The advantage at which an image counts as wholly good or bad.
        relative: Whether an error is divided by the mean size of its numbers, which has no gradient and is at least
            1e-5, as in the released code.
        temperature: If left out, the means are plain. Otherwise there are two losses, and their mean is taken: in one
            the means have the weights softmax(a / temperature), in the other softmax(-a / temperature).
        match: `squares`, as above; or `logistic`: the cross-entropy of sigmoid(beta (r - mean r)) with the probability
            sigmoid(a - mean a).

    Returns:
        Loss [N] with gradient, and log ratios [N], which are 0 because this loss has no ratio.
    """

    def error(velocity: Tensor) -> Tensor:
        difference = velocity.float() - (rows.noise.float() - rows.x0.float())
        found = _mean(difference.square())
        return found / _size(difference) if relative else found

    implicit = error(rows.old.detach()) - error(rows.velocity)
    good = goodness(rows.advantage.to(implicit), bound)
    index, count = group_index(rows.group, len(good), good.device)
    losses = []
    for weight in _centres(good, index, count, temperature):
        means = sum_by_group(weight[:, None] * torch.stack([good, implicit.detach()], dim=1), index, count)[index]
        ours, given = beta * (implicit - means[:, 1]), good - means[:, 0]
        if match == "squares":
            losses.append((ours - given).square())
        else:
            wanted = torch.sigmoid(given)
            losses.append(torch.nn.functional.binary_cross_entropy_with_logits(ours, wanted, reduction="none"))
    return bound / beta * torch.stack(losses).mean(0), torch.zeros_like(good)


def _centres(good: Tensor, index: Tensor, count: int, temperature: float | None) -> list[Tensor]:
    """Weights [N] of a group's images in the means with which the images are compared; they add up to 1."""
    signs = (0.0,) if temperature is None else (1.0, -1.0)
    found = []
    for sign in signs:
        scores = sign * good / (temperature or 1.0)
        top = scores.new_full((count,), -torch.inf).scatter_reduce(0, index, scores, "amax")
        shares = (scores - top[index]).exp()
        found.append(shares / sum_by_group(shares[:, None], index, count)[index, 0])
    return found


@compares
@whole_groups
@of_selection
@no_ratio
def flow_dpo(rows: Noised, *, beta: Positive = 100.0) -> tuple[Tensor, Tensor]:
    """Direct preference optimisation of flows, on pairs of the rollout's images, own or given (Flow-DPO, 2501.13918).

    Of the trained images of each group, the image with the largest advantage and the image with the smallest one are a
    pair. The loss of a pair is -log sigmoid(-beta / 2 ((l_w - l_w^ref) - (l_l - l_l^ref))). A group of equal advantages
    has no pair.

    Args:
        rows: images at one noise level, with the reference's prediction; of each group, at least the trained images.
        beta: Strength of the KL to the reference.

    Returns:
        Loss [N] with gradient: each image of a pair has half of the pair's loss, other images have 0. And log ratios
        [N], all 0.

    Raises:
        ValueError: If the reference's prediction is missing.
    """
    gap = rows.error(rows.velocity) - _reference_error(rows, "flow_dpo")
    best, worst, differ = _extremes(rows, gap)
    loss = -torch.nn.functional.logsigmoid(-0.5 * beta * (gap[best] - gap[worst])) * differ
    halves = torch.zeros_like(gap).index_add(0, torch.cat([best, worst]), 0.5 * torch.cat([loss, loss]))
    return halves, torch.zeros_like(gap).detach()


@no_ratio
def matching(rows: Noised) -> tuple[Tensor, Tensor]:
    """Flow matching on the images themselves: supervised fine-tuning, the same for good and bad images.

    The loss is the mean squared error of the velocity (Flow Matching, 2210.02747, with straight paths). Advantages have
    no effect. With images of a rollout, a selection such as `{name: best, keep: 1}` says which images are learned
    (RAFT, 2304.06767).

    Args:
        rows: images at one noise level.

    Returns:
        Loss [N] with gradient, and log ratios [N], all 0.
    """
    error = rows.error(rows.velocity)
    return error, torch.zeros_like(error).detach()


def preferred(rows: Noised) -> Tensor:
    """[G] whether the policy prefers the best image of each group to the worst, as it should: 1, 0, or 0.5 if neither.

    A policy prefers the image whose error it has lowered more, compared with the reference. This is the sign of the
    implicit reward of DPO. Groups of equal advantages are left out.

    Args:
        rows: images at one noise level, with the reference's prediction.
    """
    gap = rows.error(rows.velocity).detach() - _reference_error(rows, "preferred")
    best, worst, differ = _extremes(rows, gap)
    return ((gap[worst] - gap[best]).sign() / 2.0 + 0.5)[differ]


def _extremes(rows: Noised, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each group, the trained images with the largest and the smallest advantage, and whether these differ."""
    index, count = group_index(rows.group, len(like), like.device)
    advantage = rows.advantage.to(like)
    left_out = torch.zeros_like(index, dtype=torch.bool) if rows.kept is None else ~rows.kept
    best = arg_extreme(advantage.masked_fill(left_out, -torch.inf), index, count, 1.0)
    worst = arg_extreme(advantage.masked_fill(left_out, torch.inf), index, count, -1.0)
    return best, worst, advantage[best] > advantage[worst]


def arg_extreme(values: Tensor, index: Tensor, count: int, sign: float) -> Tensor:
    """[count] the first row of each group that holds the largest (sign 1) or smallest (-1) value."""
    top = values.new_full((count,), -torch.inf).scatter_reduce(0, index, sign * values, "amax")
    rows = torch.arange(len(values), device=values.device)
    reached = torch.where(sign * values == top[index], rows, len(values))
    return torch.full((count,), len(values), device=values.device).scatter_reduce(0, index, reached, "amin")


def _reference_error(rows: Noised, method: str) -> Tensor:
    if rows.reference is None:
        raise ValueError(f"{method} compares with the reference; give the reference's velocity")
    return rows.error(rows.reference).detach()


FORWARD: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "diffusion_nft": diffusion_nft,
    "awm": awm,
    "dgpo": dgpo,
    "crd": crd,
    "flow_dpo": flow_dpo,
    "matching": matching,
}
"""`loss(rows, *, ...) -> (loss [N] with gradient, log ratios [N])`, by the names that recipes use."""
