"""How far a language model has moved since it last saw each prompt, by a completion that it made then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..text.sampling import Sampled
from .data import PromptRow
from .processes import Processes
from .text_objective import TokenObjective
from .text_policy import Completions, TextPolicy


class Visits:
    """One completion of each prompt, of its last visit, with its tokens' log-probs under the policy that made it."""

    def __init__(self) -> None:
        self._items: dict[int, tuple[Tensor, Tensor]] = {}

    def last(self, prompt: int) -> tuple[Tensor, Tensor] | None:
        """Ids and log-probs [T] of a prompt's last visit; None for a prompt not seen yet."""
        return self._items.get(prompt)

    def remember(self, prompt: int, ids: Tensor, log_probs: Tensor) -> None:
        """Take ids and log-probs [T] in the place of what was known of a prompt."""
        self._items[prompt] = ids, log_probs

    def state_dict(self) -> dict[str, Any]:
        """Everything `load_state_dict` needs, as plain data."""
        return {"items": {prompt: list(item) for prompt, item in self._items.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._items = {prompt: (ids, log_probs) for prompt, (ids, log_probs) in state["items"].items()}


def moved_since(
    visits: Visits,
    policy: TextPolicy,
    rows: Sequence[PromptRow],
    completions: Any,
    processes: Processes,
    places: Sequence[int],
) -> list[float]:
    """How far the policy has moved from that of each prompt's last visit; the present visit is remembered.

    The mean over the tokens of a completion of the last visit of |log p then - log p now|, both by the training engine
    and before an update. That is how the released code of SPO (arXiv 2509.13232) measures the divergence by which its
    tracker forgets; it is at least the size of the mean log-ratio, the plain estimate of the KL. All processes must
    call it.

    Args:
        visits: by prompt id, the same on all processes.
        policy: scores.
        rows: P prompts of this process.
        completions: `Completions` of them.
        processes: of the run.
        places: [P] number of each prompt among those of the iteration.

    Returns:
        [B] for the completions, equal for those of a prompt; NaN for a prompt not seen before.
    """
    first = {prompt: row for row, prompt in reversed(list(enumerate(completions.prompt_of_sample)))}
    ids = [completions.sampled.ids[first[p]] for p in range(len(rows))]
    past = {p: known for p, row in enumerate(rows) if (known := visits.last(row.id)) is not None}
    found = _log_probs(
        policy,
        completions.prompts,
        [*range(len(rows)), *past],
        [*ids, *(tokens.tolist() for tokens, _ in past.values())],
    )
    distance = dict.fromkeys(range(len(rows)), torch.nan)
    for (p, (_, then)), now in zip(past.items(), found[len(rows) :]):
        distance[p] = float((then - now).abs().mean())
    fresh = [(row.id, torch.tensor(own), now) for row, own, now in zip(rows, ids, found)]
    for prompt, own, now in processes.pool(fresh, places)[0]:
        visits.remember(prompt, own, now)
    return [distance[p] for p in completions.prompt_of_sample]


@torch.no_grad()
def _log_probs(policy: TextPolicy, prompts: list[list[int]], owner: list[int], ids: list[list[int]]) -> list[Tensor]:
    """Log-probs [T] of the tokens of some completions, each of one of the prompts, on the CPU."""
    order = sorted(range(len(owner)), key=lambda k: owner[k])
    sampled = Sampled([ids[k] for k in order], [[]] * len(order), [True] * len(order))
    some = Completions(prompts, sampled, [""] * len(order), [owner[k] for k in order])
    found: list[Tensor] = [torch.empty(0)] * len(order)
    for batch in TokenObjective(policy.recipe, policy).batches(some, 0, None):
        for row, values in zip(batch, policy.log_probs(some, batch)[0]):
            found[order[row]] = values[: len(sampled.ids[row])].cpu().clone()
    return found
