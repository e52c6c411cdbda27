"""How far a language model has moved since it last saw each prompt, measured on a completion from then."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...parts.choice import Choice, given_names
from ...parts.needs import Need, needs, one_round
from ...parts.traits import offers
from ...text.sampling import Sampled
from ..credit.pooling import DIVERGENCE, Batch
from ..text.text_objective import statistics_of
from ..text.text_policy import Completions, TextPolicy
from .measured import MeasuredByPolicy
from .rules import once, without


def _is_asked(recipe: Any, choice: Choice) -> list[str]:
    chosen = recipe.advantage
    code = None if chosen is None else chosen.target
    if code is not None and DIVERGENCE in given_names(code.__call__ if isinstance(code, type) else code):
        return []
    return [
        f"extension visits tells an advantage how fast to forget, and advantage "
        f"{'is left out' if chosen is None else f'{chosen.short} does not ask for it'}; use advantage tracked, or one "
        f"of your own with a keyword-only parameter `{DIVERGENCE}: Given[Tensor | None]`"
    ]


@offers("divergence", "memory")
@needs(
    once,
    Need("task", ("text",), "scores the last sample of a prompt again: the tokens of a completion can be kept for "
         "every prompt, and the latents of an image cannot", mend="leave the extension out"),
    _is_asked,
    one_round("scores one completion of a prompt again"),
    without("compares with the policy that last saw a prompt", replay="puts back completions of an older policy"),
    Need("rollout.form", ("plain",), "scores completions of the prompt alone"),
)  # fmt: skip
class Visits(MeasuredByPolicy):
    """`tracked` forgets a prompt faster if the policy has moved further since the last visit (SPO, 2509.13232).

    Without this extension, the past of all prompts fades at the same rate. One completion of the last visit of each
    prompt is kept, with the log-probs of its tokens under the policy that made it. The distance is the mean over these
    tokens of |log p then - log p now|. Both log-probs are computed by the training engine, before an update. The
    released code measures the distance in this way. It is never smaller than the absolute mean log-ratio, the plain
    estimate of the KL.
    """

    column = metric = DIVERGENCE
    remembers = ("items",)

    def __init__(self) -> None:
        self.items: dict[int, tuple[Tensor, Tensor]] = {}

    def last(self, prompt: int) -> tuple[Tensor, Tensor] | None:
        """Ids and log-probs [T] of a prompt's last visit; None for a prompt not seen yet."""
        return self.items.get(prompt)

    def measured(self, batch: Batch) -> list[float]:
        """[B] how far the policy has moved since the last visit of each prompt; remembers this visit.

        All completions of a prompt have the same distance. The distance is NaN for a prompt that was not seen before.
        """
        rows, completions = batch.rows, batch.experience
        first = {prompt: row for row, prompt in reversed(list(enumerate(completions.prompt_of_sample)))}
        ids = [completions.sampled.ids[first[p]] for p in range(len(rows))]
        past = {p: known for p, row in enumerate(rows) if (known := self.last(row.id)) is not None}
        found = _log_probs(
            self.policy,
            completions.prompts,
            [*range(len(rows)), *past],
            [*ids, *(tokens.tolist() for tokens, _ in past.values())],
        )
        distance = dict.fromkeys(range(len(rows)), torch.nan)
        for (p, (_, then)), now in zip(past.items(), found[len(rows) :]):
            distance[p] = float((then - now).abs().mean())
        fresh = [(row.id, torch.tensor(own), now) for row, own, now in zip(rows, ids, found)]
        for prompt, own, now in self.processes.pool(fresh, batch.places)[0]:
            self.items[prompt] = own, now
        return [distance[p] for p in completions.prompt_of_sample]


def _log_probs(policy: TextPolicy, prompts: list[list[int]], owner: list[int], ids: list[list[int]]) -> list[Tensor]:
    """Log-probs [T] of the tokens of each completion, on the CPU.

    Args:
        policy: scores.
        prompts: as tokens.
        owner: the index of the prompt of each completion.
        ids: the completions, as tokens.
    """
    order = sorted(range(len(owner)), key=lambda k: owner[k])
    sampled = Sampled([ids[k] for k in order], [[]] * len(order), [True] * len(order))
    some = Completions(prompts, sampled, [""] * len(order), [owner[k] for k in order])
    found: list[Tensor] = [torch.empty(0)] * len(order)
    for rows, statistics in statistics_of(policy, some):
        for row, values in zip(rows, statistics.log_probs):
            found[order[row]] = values[: len(sampled.ids[row])].cpu().clone()
    return found
