"""Masked diffusion as moves of the executor: a state is a row of token ids, and a step unmasks some of them.

A state of noise level sigma has ``sigma L`` masks among its L positions. A stochastic step draws a token at every mask,
and keeps the tokens of some positions (MaskGIT, arXiv:2202.04200; LLaDA, 2502.09992). A deterministic step does the
same with the likeliest tokens. So windows, trees and shared prefixes are the same plans as for latents.

The levels say how many tokens a step reveals at least. An order with a threshold reveals more of them where the model
is sure, so a state may be ahead of its level and have no mask long before the last step.

The log-prob of a step is the sum of the log-probs of the tokens that it reveals. With order `random` or `blocks` of
size 1, the positions do not depend on the tokens, and this is the exact density. With an order by confidence it is the
usual approximation, because the tokens that were drawn and not kept have a say in which positions are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ..core.categorical import NUMBERS, pick, tempered, token_log_probs
from ..core.completion_blocks import open_block
from ..parts.ranges import Count, Inside, NotNegative
from .kernels import Coefficients, Kernel
from .moves import Moved
from .solvers import History, Solver

Order = Callable[..., Tensor]
"""`order(chance [N, L], uniform [N, L] or None, *, ...) -> priority [N, L]`: masks with the highest priority first.

Masks of priority inf are revealed however many a step reveals.
"""


Pace = Callable[[Tensor, float, float, Sequence[int]], Tensor]
"""`pace(masks [N], sigma, sigma_next, keys [N]) -> [N]`: how many of the masks of each state an edge reveals."""


def confidence(
    chance: Tensor, uniform: Tensor | None, *, gumbel: NotNegative = 0.0, threshold: Inside | None = None
) -> Tensor:
    """The most likely tokens first (MaskGIT, arXiv:2202.04200, §3.2; LLaDA's low-confidence remasking).

    Args:
        chance: [N, L] log-prob of each drawn token; -inf where there is no mask.
        uniform: [N, L] in (0, 1); None in a deterministic step.
        gumbel: Factor of the Gumbel noise that is added to the log-probs.
        threshold: If given, a step also reveals all tokens whose probability is above it (Fast-dLLM, 2505.22618).
    """
    noisy = uniform is not None and gumbel > 0.0
    priority = chance - gumbel * (-uniform.log()).log().to(chance) if noisy else chance  # type: ignore[union-attr]
    return _with_sure(priority, chance, threshold)


def random(chance: Tensor, uniform: Tensor | None) -> Tensor:
    """Positions in random order, whatever the tokens are; in a deterministic step, the most likely tokens first.

    Args:
        chance: [N, L] log-prob of each drawn token; -inf where there is no mask.
        uniform: [N, L] in (0, 1); None in a deterministic step.
    """
    return chance if uniform is None else uniform.to(chance)


def blocks(chance: Tensor, uniform: Tensor | None, *, size: Count = 1, threshold: Inside | None = None) -> Tensor:
    """Blocks from left to right, and in a block the most likely tokens first (semi-autoregressive, LLaDA 2502.09992).

    Args:
        chance: [N, L] log-prob of each drawn token; -inf where there is no mask.
        uniform: [N, L] in (0, 1); None in a deterministic step.
        size: Positions of a block; with 1, tokens are written from left to right.
        threshold: If given, a step also reveals all tokens of the first block with masks whose probability is above it
            (Fast-dLLM, 2505.22618).
    """
    place = torch.arange(chance.shape[1], device=chance.device).expand_as(chance) // size
    first = place.masked_fill(chance == -torch.inf, chance.shape[1]).amin(1, keepdim=True)
    # Two stable sorts, because one number for block and probability would round either of them.
    likely = chance.sort(dim=1, descending=True, stable=True).indices
    order = likely.gather(1, place.gather(1, likely).sort(dim=1, stable=True).indices)
    earlier = torch.arange(chance.shape[1], 0, -1, device=chance.device).expand_as(chance).to(chance)
    priority = torch.empty_like(chance).scatter_(1, order, earlier)
    return _with_sure(priority, chance.masked_fill(place > first, -torch.inf), threshold)


def _with_sure(priority: Tensor, chance: Tensor, threshold: float | None) -> Tensor:
    return priority if threshold is None else priority.masked_fill(chance > math.log(threshold), torch.inf)


ORDERS: dict[str, Order] = {"confidence": confidence, "random": random, "blocks": blocks}
"""Orders of unmasking, by the names that recipes use."""


def linear(tokens: int, steps: int) -> list[int]:
    """As many tokens in each step, as far as the numbers divide; the first steps have the tokens that remain."""
    return [tokens // steps + (k < tokens % steps) for k in range(steps)]


def cosine(tokens: int, steps: int) -> list[int]:
    """Few tokens in the first steps and many in the last: ``cos(pi t / 2)`` of the masks are left (MaskGIT).

    Every step has at least one token.
    """
    masks = [tokens]
    for k in range(1, steps + 1):
        wanted = round(tokens * math.cos(math.pi * k / (2 * steps)))
        masks.append(max(min(wanted, masks[-1] - 1), steps - k))
    return [before - after for before, after in pairwise(masks)]


SCHEDULES: dict[str, Callable[[int, int], list[int]]] = {"linear": linear, "cosine": cosine}


def mask_levels(
    tokens: int, steps: int, schedule: str = "linear", block: int | None = None, key: str = "sampler.steps"
) -> tuple[float, ...]:
    """``T + 1`` shares of masked positions, from 1 to exactly 0.

    Args:
        tokens: positions of a completion.
        steps: number T of steps.
        schedule: a key of `SCHEDULES`.
        block: tokens of a block, if the model writes block after block.
        key: what a message calls the number of steps.

    Raises:
        ValueError: there are more steps than tokens, and a step must reveal one token at least; the completion ends
            within a block, or a step would reveal tokens of two blocks.
    """
    if not 1 <= steps <= tokens:
        raise ValueError(
            f"{key} is {steps} and generation.tokens {tokens}: a step reveals at least one token; use 1 to "
            f"{tokens} steps"
        )
    counts = SCHEDULES[schedule](tokens, steps)
    if block is not None:
        _check_blocks(tokens, steps, counts, block, key)
    left, levels = tokens, [1.0]
    for count in counts:
        left -= count
        levels.append(left / tokens)
    return tuple(levels)


def _check_blocks(tokens: int, steps: int, counts: Sequence[int], block: int, key: str) -> None:
    if tokens % block:
        raise ValueError(
            f"generation.tokens is {tokens}, and the model writes blocks of {block} tokens (model.block); use a "
            f"multiple, such as {-(-tokens // block) * block}"
        )
    ends, blocks = set(accumulate(counts)), tokens // block
    if not ends.issuperset(range(block, tokens, block)):
        whole = [blocks * each for each in range(1, block + 1) if block % each == 0]
        raise ValueError(
            f"with {key}={steps}, a step would reveal tokens of two blocks, and the model writes one block of {block} "
            f"tokens after another (model.block); use schedule linear and one of {', '.join(map(str, whole))} steps"
        )


def check_within_block(tokens: int, block: int, sigma: float, sigma_next: float) -> None:
    """Refuse a step between two levels that would reveal tokens of two blocks.

    Args:
        tokens: positions of a completion.
        block: tokens of a block.
        sigma: share of masked positions before the step.
        sigma_next: the share after it.

    Raises:
        ValueError: the step does not stay within a block.
    """
    before, after = (tokens - round(level * tokens) for level in (sigma, sigma_next))
    if before // block != (after - 1) // block:
        raise ValueError(
            f"a step goes from {before} to {after} tokens at once, and the model writes one block of {block} tokens "
            "after another (model.block); use a sampler.plan whose steps follow each other, and no side branches that "
            "skip steps"
        )


def unmask_kernel(temperature: float) -> Kernel:
    """The kernel of stochastic steps: its `std` is the temperature at which tokens are drawn."""
    return Kernel("unmask", function=lambda sigmas, i: (temperature, 0.0), exact=True)


class MaskMoves:
    """Moves of token ids [N, L], int64, in which `mask` stands for what is not revealed yet.

    Predictions are logits [N, L, V] of the model at every position, see `logits_of`.

    Args:
        length: positions L of a state.
        mask: id of the mask token.
        order: which positions a step reveals, with its options bound.
        device: device of the states.
        block: tokens of a block, if the model writes block after block. Predictions are logits [N, block, V] of the
            first block that has a mask, and the order is the order within it.
        ends: tokens that end a text, if a state is finished once its text is. Masks may be left behind the end.

    Attributes:
        pace: how many masks a stochastic step reveals, see `Pace`; None for as many as the levels say.
    """

    keeps_states = True
    pace: Pace | None = None

    def __init__(
        self,
        length: int,
        mask: int,
        order: Order,
        device: torch.device | str = "cpu",
        block: int | None = None,
        ends: Sequence[int] = (),
    ) -> None:
        self.length, self.mask, self.order, self.device = length, mask, order, torch.device(device)
        self.block, self.ends = block, torch.tensor(list(ends), dtype=torch.long, device=self.device)

    def start(self, keys: Sequence[int], common: Sequence[int], spread: float | None) -> Tensor:
        """Rows of masks."""
        return torch.full((len(keys), self.length), self.mask, device=self.device)

    def sample(
        self,
        prediction: Tensor,
        x: Tensor,
        coefficients: Coefficients,
        keys: Sequence[int],
        common: Sequence[int],
        spread: float | None,
        shift: Tensor | None,
    ) -> Moved:
        """Draw a token at every mask, and keep as many as the step reveals; each edge depends on its own key alone."""
        drawn_for = torch.stack([_uniform(key, self.length) for key in keys], dim=1).to(self.device)
        masks, level = (x == self.mask).sum(1), coefficients.sigma_next
        counts = self._counts(masks, coefficients.sigma, level)
        if self.pace is not None:
            counts = self.pace(masks, coefficients.sigma, level, keys)
        places = self.places(x)
        seen, of_token, of_order = (part(one, places) for one in (x, *drawn_for))
        masked, logits = (seen == self.mask) & self.going(x)[:, None], self._open(prediction)
        drawn = seen.clone()
        # A draw needs several numbers of float32 and float64 for each logit, so few masks are drawn at a time.
        for row, column in (few.unbind(1) for few in masked.nonzero().split(max(NUMBERS // logits.shape[-1], 1))):
            chosen = tempered(logits[row, column], coefficients.std)
            drawn[row, column] = pick(chosen, of_token[row, column])[0]
        reveal = self._revealed(logits, drawn, masked, counts, of_order)
        after = torch.where(reveal, drawn, seen)
        by_token = reveal_log_probs(logits, after, reveal, coefficients.std)
        whole = by_token.new_zeros(x.shape)
        return Moved(with_part(x, places, after), by_token.sum(1), with_part(whole, places, by_token))

    def solve(
        self,
        solver: str | Solver,
        prediction: Tensor,
        x: Tensor,
        sigma: float,
        sigma_next: float,
        history: History,
        last: bool,
    ) -> Tensor:
        """Reveal the likeliest tokens in the order's own way, without randomness. There is one solver."""
        counts, places = self._counts((x == self.mask).sum(1), sigma, sigma_next), self.places(x)
        seen, logits = part(x, places), self._open(prediction)
        masked = (seen == self.mask) & self.going(x)[:, None]
        likeliest = torch.where(masked, logits.argmax(-1), seen)
        reveal = self._revealed(logits, likeliest, masked, counts, None)
        return with_part(x, places, torch.where(reveal, likeliest, seen))

    def observe(self, prediction: Tensor, x: Tensor, sigma: float) -> History:
        """Nothing: no step looks back."""
        return History()

    def kept(self, prediction: Tensor) -> Tensor:
        """Nothing: the log-probs of the tokens are recorded with the edges."""
        return prediction.new_empty(len(prediction), 0)

    def places(self, x: Tensor) -> Tensor | None:
        """[N, block] the places whose logits a prediction for the states x has; None for all places."""
        return None if self.block is None else open_block(x == self.mask, self.block)

    def going(self, x: Tensor) -> Tensor:
        """[N] bool: whether a state has a mask left, before the end of its text if `ends` are given."""
        return ((x == self.mask) & self.counted(x)).any(1)

    def counted(self, x: Tensor) -> Tensor:
        """[N, L] bool: the places up to the first end token of each state, which is included; all without `ends`."""
        ended = torch.isin(x, self.ends)
        return ended.cumsum(1) - ended.long() == 0

    def _open(self, prediction: Tensor) -> Tensor:
        return without_mask(prediction, self.mask)

    def _counts(self, masks: Tensor, sigma: float, sigma_next: float) -> Tensor:
        """[N] how many of the masks [N] are revealed on the way to the level `sigma_next`."""
        if self.block is not None:
            check_within_block(self.length, self.block, sigma, sigma_next)
        due = (masks - round(sigma_next * self.length)).clamp(min=0)
        if self.pace is not None:
            return due
        # A state that is ahead of its level reveals as many as one that is not.
        return due.clamp(min=round(sigma * self.length) - round(sigma_next * self.length))

    def _revealed(
        self, logits: Tensor, tokens: Tensor, masked: Tensor, counts: Tensor, uniform: Tensor | None
    ) -> Tensor:
        """[N, K] bool: which of K places a step reveals, `counts` [N] of each state."""
        # Confidence is the probability under the model itself, whatever the temperature of the draw.
        chance = token_log_probs(logits, tokens).masked_fill(~masked, -torch.inf)
        priority = self.order(chance, uniform).masked_fill(~masked, -torch.inf)
        # A stable sort takes the left one of two equal positions on every device.
        first = priority.sort(dim=1, descending=True, stable=True).indices
        place = torch.arange(first.shape[1], device=first.device).expand_as(first)
        due = torch.empty_like(first).scatter_(1, first, place) < counts[:, None]
        return (due | (priority == torch.inf)) & masked


def part(whole: Tensor, places: Tensor | None) -> Tensor:
    """[N, K] what a tensor [N, L] has at some places; the tensor itself for None."""
    return whole if places is None else whole.gather(1, places)


def with_part(whole: Tensor, places: Tensor | None, found: Tensor) -> Tensor:
    """A tensor [N, L] with [N, K] values at some places, with gradients to them; the values themselves for None."""
    return found if places is None else whole.scatter(1, places, found)


def without_mask(logits: Tensor, mask: int) -> Tensor:
    """Logits [..., V] in which the mask token cannot be drawn."""
    banned = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    banned[mask] = True
    return logits.masked_fill(banned, -torch.inf)


def reveal_log_probs(logits: Tensor, tokens: Tensor, revealed: Tensor, temperature: float) -> Tensor:
    """[N, L] float32 log-probs of the revealed tokens at a temperature, with gradients to the logits; 0 elsewhere.

    Args:
        logits: [N, L, V], see `without_mask`.
        tokens: [N, L] ids after the step.
        revealed: [N, L] bool.
        temperature: above 0.
    """
    return torch.where(revealed, token_log_probs(logits, tokens, temperature), 0.0)


def _uniform(key: int, length: int) -> Tensor:
    """[2, length] numbers in (0, 1), float64: for the tokens, and for the order."""
    drawn = torch.rand(2, length, generator=torch.Generator().manual_seed(key), dtype=torch.float64)
    return drawn.clamp(min=2.0**-53)
