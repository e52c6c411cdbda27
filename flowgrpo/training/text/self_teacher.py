"""What a teacher predicts for the tokens of completions: the policy when it knows more, or another model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.categorical import relative_logits

if TYPE_CHECKING:
    # This imports the libraries of models, and a recipe is read without them.
    from .text_policy import Completions, TextPolicy


@dataclass(frozen=True)
class Target:
    """What one or several teachers of a batch of R completions of up to T tokens predict.

    Attributes:
        taught: [R] bool, completions that have a teacher among them. The other attributes are 0 for the others.
        ids: [R, T, K] the tokens that are likeliest for the teacher.
        log_probs: [R, T, K] their log-probs under the teacher.
        own: [R, T] the log-probs of the completions' own tokens under the teacher.
        entropy: [R, T] of the teacher, in nats; None if nobody asked.
    """

    taught: Tensor
    ids: Tensor
    log_probs: Tensor
    own: Tensor
    entropy: Tensor | None = None

    def gaps(self, logits: Tensor, ids: Tensor, rows: Sequence[int], first: int, *, temperature: float) -> Tensor:
        """A `Measure` of the student: the log-probs of the teacher's tokens less the token's own log-prob.

        Equal completions have one teacher, see `teachers_of`, so it does not matter which of them is scored.
        """
        return relative_logits(logits, ids, self.ids[list(rows), first : first + ids.shape[1]], temperature)

    def beside(self, other: Target) -> Target:
        """What these teachers and others predict for one batch. No completion has two teachers."""
        both = None if self.entropy is None or other.entropy is None else self.entropy + other.entropy
        ids, told = self.ids + other.ids, self.log_probs + other.log_probs
        return Target(self.taught | other.taught, ids, told, self.own + other.own, both)


def teachers_of(experience: Completions) -> list[list[int] | None]:
    """The context of each completion's teacher; None for a completion without a teacher.

    Completions are scored once if they are equal. So the first of equal completions of a prompt decides.
    """
    if experience.teachers is None:
        return [None] * len(experience.samples)
    first: dict[tuple[int, ...], list[int] | None] = {}
    pairs = zip(experience.prompt_of_sample, experience.sampled.ids)
    return [first.setdefault((p, *ids), own) for (p, ids), own in zip(pairs, experience.teachers)]


@torch.no_grad()
def predicted(
    policy: TextPolicy,
    experience: Completions,
    teachers: Sequence[list[int] | None],
    batch: Sequence[int],
    top: int,
    *,
    entropy: bool,
    tokens: int | None = None,
) -> Target | None:
    """What the teachers of some completions predict; None if none of them has a teacher.

    Args:
        policy: the teacher: the policy itself with its current weights, or another model.
        experience: the rollout.
        teachers: the context of each completion's teacher, see `teachers_of`.
        batch: R rows of the rollout.
        top: how many of the likeliest tokens are told.
        entropy: whether entropies are told. For these, the distributions over all tokens are made in float32.
        tokens: only ids below this number may be told; all if left out.
    """
    places = [k for k, row in enumerate(batch) if teachers[row] is not None]
    if not places:
        return None
    knowing = replace(experience, contexts=[one or experience.context(row) for row, one in enumerate(teachers)])
    measure = partial(likeliest, top=top, tokens=tokens, temperature=policy.recipe.generation.temperature)
    found = policy.statistics(knowing, [batch[k] for k in places], entropy=entropy, measure=measure)
    assert found.measured is not None
    gaps, ids = found.measured.chunk(2, -1)
    width, place = int(experience.lengths[list(batch)].max()), torch.tensor(places, device=ids.device)

    def spread(values: Tensor) -> Tensor:
        whole = values.new_zeros(len(batch), width, *values.shape[2:])
        whole[place, : values.shape[1]] = values
        return whole

    taught = torch.zeros(len(batch), dtype=torch.bool, device=ids.device)
    taught[place] = True
    unsure = None if found.entropy is None else spread(found.entropy)
    told = gaps + found.log_probs[..., None]
    return Target(taught, spread(ids.long()), spread(told), spread(found.log_probs), unsure)


def likeliest(
    logits: Tensor, ids: Tensor, rows: Sequence[int], first: int, *, top: int, tokens: int | None, temperature: float
) -> Tensor:
    """[R, T, 2 K] the likeliest tokens: their log-probs less the token's own log-prob, and their ids.

    float32 holds every id below 2^24.
    """
    known = logits[:, : ids.shape[1], :tokens]
    told = known.topk(min(top, known.shape[-1])).indices
    return torch.cat([relative_logits(logits, ids, told, temperature), told.float()], -1)
