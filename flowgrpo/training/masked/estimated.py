"""The objective of finished completions, whose log-probs are estimated by masking them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from torch import Tensor

from ...core.addressing import address
from ...core.likelihoods import Passes, coupled
from ...core.surrogates import clip
from ...parts.choice import Of
from ...parts.needs import needs
from ..losses.objective import Objective
from .masked_objective import MaskedObjective, ScoredColumns, plain_inputs
from .trajectory import RevealObjective

if TYPE_CHECKING:
    from ...configs.schema import MaskedRecipe
    from ...text.masked_model import Frame
    from ..controls import Controls
    from .masked_policy import MaskedPolicy, UnmaskedTexts

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
        self.likelihood = likelihood
        self._before: dict[tuple[int, int], Tensor] = {}
        self._passes: dict[int, int] = {}

    def prepare(self, experience: UnmaskedTexts) -> None:
        """Keep the estimates of the policy that sampled, if the rollout has several updates."""
        self._before, self._passes = {}, {}
        if not self.several:
            return
        with torch.no_grad():
            for epoch in range(self.recipe.optimizer.epochs):
                for part in range(experience.updates):
                    for leaves in self.batches(experience, part, None):
                        found = self._estimate(experience, leaves, epoch)[0]
                        self._before |= {(leaf, epoch): row for leaf, row in zip(leaves, found)}

    def batches(self, experience: UnmaskedTexts, part: int, keep: Tensor | None) -> Iterator[list[int]]:
        """Leaves that are evaluated together, as many as `rollout.batch` in each pass of the likelihood."""
        low, high = experience.part(part)
        owner = experience.rollout.leaf_prompt
        leaves = ((owner >= low) & (owner < high) & experience.outcomes).nonzero().flatten().tolist()
        size = self.recipe.rollout.batch
        for first in range(0, len(leaves), size):
            yield leaves[first : first + size]

    def rows(self, experience: UnmaskedTexts, part: int, keep: Tensor | None) -> int:
        """How many tokens the kept completions of one part have."""
        leaves = [leaf for batch in self.batches(experience, part, keep) for leaf in batch]
        nodes = experience.rollout.leaf[leaves]
        return (len(leaves) if keep is None else int(keep[nodes].sum())) * self.recipe.generation.tokens

    def scored(self, experience: UnmaskedTexts, batch: list[int]) -> ScoredColumns:
        """The completions of a batch under the current policy."""
        epoch = self._passes.get(batch[0], 0)
        self._passes[batch[0]] = epoch + 1
        log_probs, counted = self._estimate(experience, batch, epoch)
        old = log_probs.detach()
        if self._before:
            old = torch.stack([self._before[leaf, epoch] for leaf in batch])

        def reference() -> Tensor:
            with torch.no_grad(), self.policy.reference():
                return self._estimate(experience, batch, epoch)[0]

        node = experience.rollout.leaf[batch]
        # There is no step, so all statistics are in the first column.
        step = torch.zeros(len(batch), 1, dtype=torch.long, device=log_probs.device)
        return ScoredColumns(log_probs, old, counted, node, step, reference)

    def _estimate(self, experience: UnmaskedTexts, leaves: Sequence[int], epoch: int) -> tuple[Tensor, Tensor]:
        """Estimated log-probs [R, L], and which of them count [R, L]."""
        policy, rollout = self.policy, experience.rollout
        ids = rollout.x[list(leaves)]
        owners = rollout.leaf_prompt.tolist()
        frames: list[list[Frame]] = []
        drawn: list[Passes] = []
        for leaf in leaves:
            place = owners[:leaf].count(owners[leaf])
            key = address(experience.keys[owners[leaf]], -1, place, epoch)
            generator = torch.Generator().manual_seed(key)
            passes = self.likelihood(ids.shape[1], generator)
            frame = policy.frame(experience.prompts[owners[leaf]])
            frames.append([self._veiled(frame, passes.prompt, generator) for _ in passes.masked])
            drawn.append(passes)
        masked = torch.stack([one.masked for one in drawn], 1).to(ids.device)
        weight = torch.stack([one.weight for one in drawn], 1).to(ids.device)
        total = torch.zeros(ids.shape, device=ids.device)
        for number, (seen, share) in enumerate(zip(masked, weight)):
            given = [frame[number] for frame in frames]
            total = total + share * policy.token_log_probs(given, ids, seen)
        return total, torch.stack([one.counted for one in drawn]).to(ids.device)

    def _veiled(self, frame: Frame, share: float, generator: torch.Generator) -> Frame:
        """A prompt in which a share of the tokens is masked."""
        if not share:
            return frame
        head, tail = frame
        hidden = (torch.rand(len(head), generator=generator) < share).tolist()
        return [self.policy.language.mask if hide else token for token, hide in zip(head, hidden)], tail


MASKED_OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "trajectory": RevealObjective,
    "estimated": EstimatedObjective,
}
"""`objective(recipe, policy, controls, *, ...)`: a class with the methods of `losses.objective.Objective`."""
