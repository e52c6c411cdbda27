"""The schedule of unmasking is drawn and learned beside the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.addressing import address
from ...core.categorical import pick
from ...core.unmasking_schedules import count_log_probs, option_counts
from ...parts.needs import Need, needs, one_round
from ...parts.ranges import Count, Given, Positive
from ..credit.pooling import Batch, Pooled
from ..distributed.processes import Processes
from ..planning import levels_of
from ..reporting.clock import Clock
from .extension import Extension
from .rules import once


@needs(
    once, one_round("learns from the steps of one rollout"),
    Need("task", ("masked",), "draws how many masks a step reveals: only a masked model has masks",
         mend="leave the extension out"),
    Need("model.block", (None,), "draws how many masks a step reveals, and a model of blocks needs steps that end with "
         "its blocks", task="masked", mend="leave the extension out"),
    Need("sampler.order.threshold", (None,), "learns how many masks a step reveals, and a threshold would decide it",
         task="masked"),
    Need("generation.stop_at_end", (False,), "draws how many masks each step reveals, and a finished text would have "
         "none", task="masked"),
)  # fmt: skip
class Pacing(Extension):
    """Draws how many masks each step reveals, and learns the schedule with the model (Co-GRPO, 2512.22288).

    The number is the number of `sampler.schedule` plus an offset. Each step draws its offset from a categorical
    distribution of its own. The distributions are uniform at first. After each iteration, their logits move along the
    gradient of the mean of A log p: p is the probability of the number that an edge revealed, and A is the edge's
    advantage. The model learns as without this extension. An iteration is one step for the schedule, so its ratio is 1.
    Only trained edges count. Steps that take the likeliest tokens, and so evaluations too, keep to `sampler.schedule`.

    Args:
        reach: Largest offset; the offsets are all whole numbers from minus it to it.
        rate: Learning rate of the logits.
    """

    remembers = ("logits",)

    def __init__(self, *, reach: Count = 1, rate: Positive = 1.0, recipe: Given[Any]) -> None:
        self.rate, self.offsets = rate, torch.arange(-reach, reach + 1)
        self.levels = levels_of(recipe)
        self.logits = torch.zeros(len(self.levels) - 1, len(self.offsets), dtype=torch.float64)
        self._slope = torch.zeros_like(self.logits)

    def begin(self, task: Any, processes: Processes, clock: Clock) -> None:
        """Let the policy ask how many masks to reveal."""
        self.moves, self.processes = task.policy.moves, processes
        self.moves.pace = self.drawn

    def drawn(self, masks: Tensor, sigma: float, sigma_next: float, keys: Sequence[int]) -> Tensor:
        """[N] numbers of masks to reveal; each depends on the key of its edge alone.

        Args:
            masks: [N] masks before the step.
            sigma: level of the fixed schedule before the step.
            sigma_next: level after it.
            keys: N seeds.
        """
        step = self.levels.index(sigma)
        seeds = (torch.Generator().manual_seed(address(key, 1)) for key in keys)
        uniform = torch.cat([torch.rand(1, generator=one, dtype=torch.float64) for one in seeds])
        option = pick(self.logits[step].expand(len(keys), -1), uniform)[0]
        return self._options(masks.cpu(), step).gather(1, option[:, None])[:, 0].to(masks.device)

    def _options(self, masks: Tensor, step: int) -> Tensor:
        left = round(self.levels[step + 1] * self.moves.length)
        return option_counts(masks, left, len(self.levels) - 2 - step, self.offsets)

    def advantages_made(self, advantages: Tensor, samples: Pooled, batch: Batch) -> Tensor:
        """Find the gradient for the schedule; the advantages stay as they are."""
        logits, gain, edges = self.logits.clone().requires_grad_(), self.logits.new_zeros(()), 0
        for taken in batch.experience.rollout.transitions:
            masks = (taken.x == self.moves.mask).sum(1).cpu()[taken.state.cpu()]
            counts = masks - (taken.x_next == self.moves.mask).sum(1).cpu()
            found = count_log_probs(logits[taken.step], self._options(masks, taken.step), counts)
            gain = gain + (advantages[taken.node.to(advantages.device)].cpu().double() * found).sum()
            edges += len(counts)
        slope = torch.autograd.grad(gain, logits)[0] if edges else torch.zeros_like(logits)
        shared = self.processes.gather((slope.tolist(), edges))
        whole = torch.tensor([one for one, _ in shared], dtype=torch.float64).sum(0)
        self._slope = whole / max(sum(count for _, count in shared), 1)
        return advantages

    def update_done(self, samples: Pooled, record: Mapping[str, Any]) -> None:
        """Move the logits."""
        self.logits = self.logits + self.rate * self._slope

    def record(self) -> dict[str, float]:
        """The mean offset of the first half of the steps, and of the second."""
        mean = (self.logits.softmax(1) * self.offsets).sum(1)
        half = (len(mean) + 1) // 2
        return {"pace/early": float(mean[:half].mean()), "pace/late": float(mean[-half:].mean())}
