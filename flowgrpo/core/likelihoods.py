"""Estimates of the log-prob of a completion under a masked language model, without the steps that made it.

A likelihood gives passes: which positions of the completion a pass masks, and the weight of each masked position. The
estimate of the log-prob of token l is the sum over passes of weight x log p(x_l | the tokens that are not masked). A
generator draws the masks, so the policy that samples and the policy that is trained see the same masks. The likelihood
`trace` draws nothing: it takes the masks of the sampler.

The estimate is a lower bound if its weights are 1 / t, for a pass that masks the share t of the tokens, divided by the
number of passes. `upper_bound` gives an upper bound with the same passes and weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..parts.ranges import Count, Given, Share


@dataclass(frozen=True)
class Passes:
    """M passes over a completion of L positions.

    Attributes:
        masked: [M, L] bool: the positions that a pass masks.
        weight: [M, L] weight of each masked position in the estimate; 0 elsewhere.
        counted: [L] bool: the positions that have an estimate.
        prompt: share of the prompt's tokens that a pass masks, in [0, 1).
        apart: whether each position has a weight in one pass alone, so that one pass after another can be trained.
    """

    masked: Tensor
    weight: Tensor
    counted: Tensor
    prompt: float = 0.0
    apart: bool = False


def fully_masked(length: int, generator: torch.Generator, *, prompt: Share = 0.15) -> Passes:
    """One pass in which the whole completion is masked (diffu-GRPO of d1, arXiv 2504.12216, §3.2).

    Tokens of the prompt are masked at random, so each update sees the prompt in another way.

    Args:
        length: positions L of the completion.
        generator: of the masks.
        prompt: Share of the prompt's tokens that are masked.
    """
    everywhere = torch.ones(1, length, dtype=torch.bool)
    return Passes(everywhere, everywhere.float(), everywhere[0], prompt)


def coupled(length: int, generator: torch.Generator, *, pairs: Count = 1, whole: bool = True) -> Passes:
    """Pairs of masks that complement each other (coupled-GRPO of DiffuCoder, arXiv 2506.20639).

    A pair masks each position in exactly one of its two passes, at the levels t and 1 - t. So a pair scores every token
    once, and the estimate varies less than with independent masks. The estimate is the mean over the pairs, and over
    the pass in which everything is masked.

    Args:
        length: positions L of the completion.
        generator: of the masks.
        pairs: Number of pairs.
        whole: Whether the pass in which everything is masked counts as one more pair.
    """
    masks = [torch.ones(1, length, dtype=torch.bool)] if whole else []
    for _ in range(pairs):
        level = torch.rand(1, generator=generator, dtype=torch.float64)
        one = torch.rand(length, generator=generator, dtype=torch.float64) < level
        masks += [one[None], ~one[None]]
    masked = torch.cat(masks)
    return Passes(masked, masked.float() / (pairs + whole), torch.ones(length, dtype=torch.bool))


def quadrature(length: int, generator: torch.Generator, *, levels: Count = 2, draws: Count = 1) -> Passes:
    """The evidence lower bound by Gauss' quadrature over the noise level (GDPO for diffusion LMs, arXiv 2510.08554).

    The bound is the integral over t in (0, 1) of E[sum over masked positions of log p] / t. The levels are the nodes of
    Gauss and Legendre, which are fixed. Only the masks at each level are random.

    Args:
        length: positions L of the completion.
        generator: of the masks.
        levels: Nodes of the quadrature; n nodes are exact for polynomials of degree 2n - 1 in t.
        draws: Masks at each level.
    """
    masks, weights = [], []
    for level, share in zip(*gauss_legendre(levels)):
        for _ in range(draws):
            masked = torch.rand(length, generator=generator, dtype=torch.float64) < level
            masks.append(masked)
            weights.append(masked.float() * (share / (level * draws)))
    return Passes(torch.stack(masks), torch.stack(weights), torch.ones(length, dtype=torch.bool))


def elbo(length: int, generator: torch.Generator, *, levels: Count = 8, ranges: bool = True) -> Passes:
    """The evidence lower bound by Monte Carlo over the number of masked tokens (LLaDA, arXiv 2502.09992, Eq. 6).

    A pass masks n of the L positions, where n is uniform from 1 to L. Its weight is L / (n x `levels`). Each pass has a
    level of its own, and one mask: of all ways to spend so many passes, this one has the smallest variance (VRPO, arXiv
    2505.19223).

    Args:
        length: positions L of the completion.
        generator: of the masks.
        levels: Number of passes.
        ranges: Whether one level is drawn from each of `levels` ranges of equal size, so that together they vary less
            than levels that are drawn from 1 to L independently.
    """
    share = torch.rand(levels, generator=generator, dtype=torch.float64)
    share = (share + torch.arange(levels)) / levels if ranges else share
    count = (share * length).long()[:, None] + 1
    order = torch.rand(levels, length, generator=generator, dtype=torch.float64).argsort(1).argsort(1)
    masked = order < count
    return Passes(masked, masked.float() * (length / (count * levels)), torch.ones(length, dtype=torch.bool))


def uniform(length: int, generator: torch.Generator, *, draws: Count = 1) -> Passes:
    """Masks at levels that are drawn uniformly, and the log-probs of what they mask (UniGRPO of MMaDA, 2505.15809).

    A position that no pass masks has no estimate and no gradient.

    Args:
        length: positions L of the completion.
        generator: of the masks.
        draws: Number of levels, each with one mask.
    """
    levels = torch.rand(draws, 1, generator=generator, dtype=torch.float64)
    masked = torch.rand(draws, length, generator=generator, dtype=torch.float64) < levels
    times = masked.sum(0)
    return Passes(masked, masked.float() / times.clamp(min=1), times > 0)


def trace(
    length: int, generator: torch.Generator, *, steps: Given[Tensor], block: Given[int | None], shrink: Count = 1
) -> Passes:
    """The steps that the sampler took, several of them at a time (TraceRL, arXiv 2509.06949).

    A pass masks what was still masked before its steps, and scores what they revealed. If the model writes block after
    block, the steps of each block are counted on their own, and a pass holds one part of every block: for finished
    blocks, the model then evaluates all of them at once.

    Args:
        length: positions L of the completion.
        generator: not used.
        steps: [L] the step that revealed each position; -1 for none, and such a position is always masked.
        block: tokens of a block; None if there are no blocks.
        shrink: Number of steps that a pass holds.
    """
    written = steps >= 0
    parts = steps.masked_fill(~written, int(steps.max()) + 1).view(-1, length if block is None else block)
    # The rank of a step among the steps of its block: steps of other blocks may lie between two of them.
    rank = torch.stack([part.unique(return_inverse=True)[1] for part in parts]).flatten()
    held = rank // shrink
    number = torch.arange(int(held[written].max()) + 1)[:, None]
    return Passes((held >= number) | ~written, ((held == number) & written).float(), written, apart=True)


def blocks(
    length: int,
    generator: torch.Generator,
    *,
    written: Given[Tensor],
    size: Count = 32,
    draws: Count = 2,
    prompt: Share = 0.15,
) -> Passes:
    """The evidence lower bound, with masks as a sampler of blocks has them (SPG, arXiv 2510.09541).

    A pass chooses a block of the text. It masks n of the block's tokens, where n is uniform from 1 to all of them, and
    everything behind the block. The weights of the bound follow from the number of tokens that are masked in all. The
    passes over a completion choose different blocks, as long as there are some.

    Args:
        length: positions L of the completion.
        generator: of the masks.
        written: [L] bool: the positions of the text; what follows it is masked.
        size: Tokens of a block.
        draws: Number of passes.
        prompt: Share of the tokens of the prompt, and of the blocks before the chosen one, that are masked too.
    """
    count = int(written.sum())
    starts = torch.arange(0, count, size)
    starts = starts[torch.randperm(len(starts), generator=generator)]
    masks = []
    for number in range(draws):
        start = int(starts[number % len(starts)])
        end = min(start + size, count)
        masked = torch.ones(length, dtype=torch.bool)
        masked[:start] = torch.rand(start, generator=generator) < prompt
        most = 1 + int(torch.randint(end - start, (1,), generator=generator))
        masked[start:end] = torch.randperm(end - start, generator=generator) < most
        masks.append(masked)
    masked = torch.stack(masks)
    return Passes(masked, bound_weights(masked, written), (masked & written).any(0), prompt)


def bound_weights(masked: Tensor, text: Tensor) -> Tensor:
    """[M, L] weights of a lower bound: 1 / (M t) where a pass masks the share t of a text, and 0 elsewhere.

    Args:
        masked: [M, L] bool: the positions that each of M passes masks, and at least one of the text.
        text: [L] bool: the positions of the text.
    """
    scored = masked & text
    return scored.float() * (text.sum() / (scored.sum(1, True) * len(masked)))


def upper_bound(log_probs: Sequence[Tensor], weights: Sequence[Tensor], text: Tensor, *, beta: float) -> Tensor:
    """An upper bound of the log-prob of texts, up to a constant (the EUBO of SPG, arXiv 2510.09541).

    A token adds 1/beta log(sum over passes of weight x p^beta). Tokens that no pass masks add the mean of the others.
    If the sum is over all masks, tokens are revealed in random order, and beta is at least their number, then the bound
    holds without the constant, by Hölder's inequality.

    Args:
        log_probs: M tensors [R, L] with gradients: the masked tokens in each pass.
        weights: M tensors [R, L] of a lower bound, see `Passes`.
        text: [R, L] bool: the tokens of the texts.
        beta: Power of the probabilities. The larger it is, the more of a token's gradient is in its likeliest pass.

    Returns:
        [R, L], whose sum is the bound; 0 for tokens that no pass masks.
    """
    weight = torch.stack(list(weights)) * text
    seen = (weight > 0).any(0)
    # A token that no pass masks would have the logarithm of 0, and NaN as its gradient.
    terms = weight.masked_fill(~seen, 1.0).log() + beta * torch.stack(list(log_probs))
    each = torch.where(seen, terms.logsumexp(0) / beta, 0.0)
    return each * (text.sum(1, True) / seen.sum(1, True).clamp(min=1))


LIKELIHOODS: dict[str, Callable[..., Passes]] = {
    "fully_masked": fully_masked,
    "coupled": coupled,
    "quadrature": quadrature,
    "elbo": elbo,
    "uniform": uniform,
    "trace": trace,
    "blocks": blocks,
}
"""`likelihood(length, generator, *, ...) -> Passes`. A run gives `steps`, `block` and `written` to one that asks."""


@lru_cache(maxsize=64)
def gauss_legendre(count: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Nodes in (0, 1), rising, and weights that sum to 1; exact for polynomials of degree ``2 count - 1``.

    They follow from the eigenvalues of the Jacobi matrix (Golub and Welsch 1969).
    """
    k = torch.arange(1, count, dtype=torch.float64)
    beside = k / (4 * k**2 - 1).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(beside, 1) + torch.diag(beside, -1))
    return ((nodes + 1) / 2).unbind(), vectors[0].square().unbind()
