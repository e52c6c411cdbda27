"""How many tokens a step of unmasking reveals, as an action with a probability (Co-GRPO, arXiv 2512.22288)."""

from __future__ import annotations

import torch
from torch import Tensor


def option_counts(masks: Tensor, left: int, steps: int, offsets: Tensor) -> Tensor:
    """How many masks a step reveals with each option: the number of the fixed schedule, and some more or fewer.

    A step reveals at least one mask, and leaves one for each later step. The last step reveals all that are left.

    Args:
        masks: [N] masks before the step; more than `steps`.
        left: masks that the fixed schedule leaves after the step.
        steps: later steps.
        offsets: [K] what each option adds to the number of the fixed schedule.

    Returns:
        [N, K] numbers; several options may have the same.
    """
    most = (masks - steps)[:, None]
    least = torch.where(most == masks[:, None], most, most.clamp(max=1))
    return torch.minimum(torch.maximum(masks[:, None] - left + offsets.to(masks), least), most)


def count_log_probs(logits: Tensor, options: Tensor, counts: Tensor) -> Tensor:
    """[N] log-probs of the numbers that were revealed, with a gradient: the sum over the options that reveal as many.

    Args:
        logits: [K] of the options.
        options: [N, K] see `option_counts`.
        counts: [N] numbers; an option has each number.
    """
    same = options == counts[:, None]
    return logits.log_softmax(0).masked_fill(~same, -torch.inf).logsumexp(1)
