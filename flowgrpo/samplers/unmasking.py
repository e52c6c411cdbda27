"""Masked diffusion as moves of the executor: a state is a row of token ids, and a step unmasks some of them.

A state of noise level sigma has ``sigma L`` masks among its L positions. A stochastic step draws a token at every mask,
and keeps the tokens of some positions (MaskGIT, arXiv:2202.04200; LLaDA, 2502.09992). A deterministic step does the
same with the likeliest tokens. So windows, trees and shared prefixes are the same plans as for latents.

The log-prob of a step is the sum of the log-probs of the tokens that it reveals. With order `random` or `blocks` of
size 1, the positions do not depend on the tokens, and this is the exact density. With an order by confidence it is the
usual approximation, because the tokens that were drawn and not kept have a say in which positions are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..core.categorical import NUMBERS, pick, tempered, token_log_probs
from ..parts.ranges import Count, NotNegative
from .kernels import Coefficients, Kernel
from .moves import Moved
from .solvers import History, Solver

Order = Callable[..., Tensor]
"""`order(chance [N, L], uniform [N, L] or None, *, ...) -> priority [N, L]`: masks with the highest priority first."""


Pace = Callable[[Tensor, float, float, Sequence[int]], Tensor]
"""`pace(masks [N], sigma, sigma_next, keys [N]) -> [N]`: how many of the masks of each state an edge reveals."""


def confidence(chance: Tensor, uniform: Tensor | None, *, gumbel: NotNegative = 0.0) -> Tensor:
    """The most likely tokens first (MaskGIT, arXiv:2202.04200, §3.2; LLaDA's low-confidence remasking).

    Args:
        chance: [N, L] log-prob of each drawn token.
        uniform: [N, L] in (0, 1); None in a deterministic step.
        gumbel: Factor of the Gumbel noise that is added to the log-probs.
    """
    if uniform is None or gumbel == 0.0:
        return chance
    return chance - gumbel * (-uniform.log()).log().to(chance)


def random(chance: Tensor, uniform: Tensor | None) -> Tensor:
    """Positions in random order, whatever the tokens are; in a deterministic step, the most likely tokens first.

    Args:
        chance: [N, L] log-prob of each drawn token.
        uniform: [N, L] in (0, 1); None in a deterministic step.
    """
    return chance if uniform is None else uniform.to(chance)


def blocks(chance: Tensor, uniform: Tensor | None, *, size: Count = 1) -> Tensor:
    """Blocks from left to right, and in a block the most likely tokens first (semi-autoregressive, LLaDA 2502.09992).

    Args:
        chance: [N, L] log-prob of each drawn token.
        uniform: [N, L] in (0, 1); None in a deterministic step.
        size: Positions of a block; with 1, tokens are written from left to right.
    """
    place = torch.arange(chance.shape[1], device=chance.device) // size
    # A probability is between 0 and 1, so it orders the positions of a block and never exceeds the next block.
    return chance.exp().clamp(max=0.999) - place


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


def mask_levels(tokens: int, steps: int, schedule: str = "linear") -> tuple[float, ...]:
    """``T + 1`` shares of masked positions, from 1 to exactly 0.

    Raises:
        ValueError: there are more steps than tokens, and a step must reveal one token at least.
    """
    if not 1 <= steps <= tokens:
        raise ValueError(
            f"sampler.steps is {steps} and generation.tokens {tokens}: a step reveals at least one token; use 1 to "
            f"{tokens} steps"
        )
    left, levels = tokens, [1.0]
    for count in SCHEDULES[schedule](tokens, steps):
        left -= count
        levels.append(left / tokens)
    return tuple(levels)


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

    Attributes:
        pace: how many masks a stochastic step reveals, see `Pace`; None for as many as the levels say.
    """

    keeps_states = True
    pace: Pace | None = None

    def __init__(self, length: int, mask: int, order: Order, device: torch.device | str = "cpu") -> None:
        self.length, self.mask, self.order, self.device = length, mask, order, torch.device(device)

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
        draws = torch.stack([_uniform(key, self.length) for key in keys]).to(self.device)
        masked = x == self.mask
        logits = self._open(prediction)
        drawn = x.clone()
        places = masked.nonzero()
        # A draw needs several numbers of float32 and float64 for each logit, so few masks are drawn at a time.
        for row, column in (part.unbind(1) for part in places.split(max(NUMBERS // logits.shape[-1], 1))):
            chosen = tempered(logits[row, column], coefficients.std)
            drawn[row, column] = pick(chosen, draws[row, 0, column])[0]
        counts = self._counts(masked, coefficients.sigma_next)
        if self.pace is not None:
            counts = self.pace(masked.sum(1), coefficients.sigma, coefficients.sigma_next, keys)
        reveal = self._revealed(logits, drawn, masked, counts, draws[:, 1])
        x_next = torch.where(reveal, drawn, x)
        by_token = reveal_log_probs(logits, x_next, reveal, coefficients.std)
        return Moved(x_next, by_token.sum(1), by_token)

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
        masked, logits = x == self.mask, self._open(prediction)
        likeliest = torch.where(masked, logits.argmax(-1), x)
        reveal = self._revealed(logits, likeliest, masked, self._counts(masked, sigma_next), None)
        return torch.where(reveal, likeliest, x)

    def observe(self, prediction: Tensor, x: Tensor, sigma: float) -> History:
        """Nothing: no step looks back."""
        return History()

    def kept(self, prediction: Tensor) -> Tensor:
        """Nothing: the log-probs of the tokens are recorded with the edges."""
        return prediction.new_empty(len(prediction), 0)

    def _open(self, prediction: Tensor) -> Tensor:
        return without_mask(prediction, self.mask)

    def _counts(self, masked: Tensor, sigma_next: float) -> Tensor:
        """[N] how many masks lead to the level `sigma_next`."""
        return (masked.sum(1) - round(sigma_next * self.length)).clamp(min=0)

    def _revealed(
        self, logits: Tensor, tokens: Tensor, masked: Tensor, counts: Tensor, uniform: Tensor | None
    ) -> Tensor:
        """[N, L] bool: the masks that a step reveals, `counts` [N] of each state."""
        # Confidence is the probability under the model itself, whatever the temperature of the draw.
        chance = token_log_probs(logits, tokens)
        priority = self.order(chance, uniform).masked_fill(~masked, -torch.inf)
        # A stable sort takes the left one of two equal positions on every device.
        first = priority.sort(dim=1, descending=True, stable=True).indices
        place = torch.arange(self.length, device=first.device).expand_as(first)
        return (torch.empty_like(first).scatter_(1, first, place) < counts[:, None]) & masked


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
