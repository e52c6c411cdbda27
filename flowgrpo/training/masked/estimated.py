"""The objective of the tokens of finished completions, whose log-probs are estimated by masking them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...core.likelihoods import Passes, coupled
from ...core.surrogates import clip
from ...parts.choice import Of
from ...parts.needs import needs
from .masked_objective import MaskedObjective, ScoredColumns, plain_inputs
from .remasking import Remasking

if TYPE_CHECKING:
    from ...configs.schema import MaskedRecipe
    from ..controls import Controls
    from .masked_policy import MaskedPolicy, UnmaskedTexts

    Batch = tuple[list[int], int | None]
    """Leaves that are evaluated together, and the number of the pass; None for all passes."""

Surrogate = Annotated[Callable[..., Tensor], Of("surrogate", "clip")]
Likelihood = Annotated[Callable[..., Passes], Of("likelihood", "coupled")]


@needs(plain_inputs)
class EstimatedObjective(MaskedObjective):
    """A surrogate of the ratio of a completion's tokens, whose log-probs are estimated without the sampler's steps.

    Any sampler may have made the completions. Each pass over a rollout masks them anew. The policy that sampled is
    evaluated on the same masks, so the first ratio is exactly 1.

    Args:
        recipe: what to do.
        policy: samples and scores.
        controls: coefficients that move; this objective has none.
        surrogate: The surrogate of the ratio.
        likelihood: The estimate of the log-probs.
        level: `token` has a ratio for each token, `sequence` one for the completion: the exponential of the mean over
            its tokens.
    """

    trains = "images"

    def __init__(
        self,
        recipe: MaskedRecipe,
        policy: MaskedPolicy,
        controls: Controls,
        *,
        surrogate: Surrogate = clip,
        likelihood: Likelihood = coupled,
        level: Literal["token", "sequence"] = "token",
    ) -> None:
        super().__init__(recipe, policy, surrogate, level)
        self.remasking = Remasking(recipe, policy, likelihood)
        self._before: dict[tuple[int, int], Tensor] = {}
        self._passes: dict[tuple[int, int | None], int] = {}

    def prepare(self, experience: UnmaskedTexts) -> None:
        """Keep the estimates of the policy that sampled, if the rollout has several updates."""
        self._before, self._passes = {}, {}
        self.remasking.forget()
        if not self.several:
            return
        with torch.no_grad():
            for epoch in range(self.recipe.optimizer.epochs):
                for part in range(experience.updates):
                    for leaves in self._leaves(experience, part):
                        found = self._estimate(experience, leaves, epoch)[0]
                        self._before |= {(leaf, epoch): row for leaf, row in zip(leaves, found)}

    def batches(self, experience: UnmaskedTexts, part: int, keep: Tensor | None) -> Iterator[Batch]:
        """Leaves that are evaluated together, as many as `rollout.batch` in each pass of the likelihood.

        Passes that score different tokens are batches of their own, so that only one of them is in memory.
        """
        for leaves in self._leaves(experience, part):
            if self.level == "token" and self.remasking.drawn(experience, leaves[0], 0)[0].apart:
                count = max(len(self.remasking.drawn(experience, leaf, 0)[0].masked) for leaf in leaves)
                yield from ((leaves, number) for number in range(count))
            else:
                yield leaves, None

    def _leaves(self, experience: UnmaskedTexts, part: int) -> Iterator[list[int]]:
        low, high = experience.part(part)
        owner = experience.rollout.leaf_prompt
        leaves = ((owner >= low) & (owner < high) & experience.outcomes).nonzero().flatten().tolist()
        if self.policy.language.block is not None:
            # A batch is evaluated up to its last end, so texts of about one length are together, the longest first.
            lengths = self.policy.moves.counted(experience.rollout.x).sum(1).tolist()
            leaves.sort(key=lambda leaf: -lengths[leaf])
        size = self.recipe.rollout.batch
        for first in range(0, len(leaves), size):
            yield leaves[first : first + size]

    def rows(self, experience: UnmaskedTexts, part: int, keep: Tensor | None) -> int:
        """How many tokens the kept completions of one part have."""
        leaves = [leaf for batch in self._leaves(experience, part) for leaf in batch]
        sizes = self.policy.moves.counted(experience.rollout.x[leaves]).sum(1).cpu()
        return int((sizes if keep is None else sizes[keep[experience.rollout.leaf[leaves]].cpu()]).sum())

    def scored(self, experience: UnmaskedTexts, batch: Batch, advantages: Tensor) -> ScoredColumns:
        """The completions of a batch under the current policy."""
        leaves, number = batch
        epoch = self._passes.get((leaves[0], number), 0)
        self._passes[leaves[0], number] = epoch + 1
        log_probs, counted = self._estimate(experience, leaves, epoch, number)
        old = log_probs.detach()
        if self._before:
            old = torch.stack([self._before[leaf, epoch] for leaf in leaves])

        def reference() -> Tensor:
            with torch.no_grad(), self.policy.reference():
                return self._estimate(experience, leaves, epoch, number)[0]

        node = experience.rollout.leaf[leaves]
        # There is no step, so all statistics are in the first column.
        step = torch.zeros(len(leaves), 1, dtype=torch.long, device=log_probs.device)
        return ScoredColumns(log_probs, old, counted, node, step, reference)

    def _estimate(
        self, experience: UnmaskedTexts, leaves: Sequence[int], epoch: int, number: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """What `joined` gives, and which tokens count [R, L]; of one pass if it has a number."""
        policy, rollout = self.policy, experience.rollout
        ids = rollout.x[list(leaves)]
        found = [self.remasking.framed(experience, leaf, epoch) for leaf in leaves]
        drawn, frames = [passes for passes, _ in found], [seen for _, seen in found]
        masked = pad_sequence([one.masked for one in drawn]).to(ids.device)
        weight = pad_sequence([one.weight for one in drawn]).to(ids.device)
        written = self.policy.moves.counted(ids)
        counted = torch.stack([one.counted for one in drawn]).to(ids.device) & written
        places = range(len(masked)) if number is None else (number,)
        found = []
        for place in places:
            given = [frame[min(place, len(frame) - 1)] for frame in frames]
            scored = written & (weight[place] > 0)
            found.append(policy.token_log_probs(given, ids, masked[place], scored))
        joined = self.joined(found, [weight[place] for place in places], written)
        return joined, counted if number is None else counted & (weight[number] > 0)

    def joined(self, log_probs: Sequence[Tensor], weights: Sequence[Tensor], text: Tensor) -> Tensor:
        """[R, L] the estimates of log-probs [R, L] from the passes' log-probs and weights, [R, L] each.

        Args:
            log_probs: of each pass, with gradients.
            weights: of each pass.
            text: [R, L] bool: the tokens of the texts.
        """
        total = torch.zeros_like(log_probs[0])
        for weight, found in zip(weights, log_probs):
            total = total + weight * found
        return total
