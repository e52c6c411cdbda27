"""The objective over whole completions of a masked model, whose log-probs are estimated by masking them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor

from ...core.answer_losses import dpo
from ...core.diagnostics import step_statistics
from ...core.likelihoods import Passes, elbo
from ...parts.choice import Of
from ...parts.needs import needs
from ...parts.traits import whole_groups
from ..losses.objective import Outcome, Unmeasured
from ..text.whole_answers import WholeAnswers, answer_loss, counts_answers, of_answers
from .remasking import Remasking

if TYPE_CHECKING:
    from ...configs.schema import MaskedRecipe
    from ...text.masked_model import Frame
    from ..controls import Controls
    from .masked_policy import MaskedPolicy, UnmaskedTexts


@dataclass(frozen=True)
class PassRows:
    """The passes over some completions, each of them a row.

    Attributes:
        owner: [U] the completion of each row, as an index into the R completions.
        frames: U prompts.
        masked: [U, L] bool: what the model does not see.
        weight: [U, L] of each masked token in the estimate; 0 elsewhere.
        counted: [R, L] bool: the tokens that have an estimate.
    """

    owner: Tensor
    frames: list[Frame]
    masked: Tensor
    weight: Tensor
    counted: Tensor


@needs(of_answers)
@whole_groups
class MaskedAnswers(Unmeasured):
    """A loss of the completions of each prompt, divided by the number of prompts or of completions.

    The log-prob of a completion is estimated. The reference and the policy that sampled are evaluated on the same masks
    as the policy that is trained, so the differences of their log-probs vary little (VRPO, arXiv 2505.19223, §3.2).
    Each pass over a rollout draws new masks. `answer_loss` says which completions win, lose, and are right.

    Args:
        recipe: what to do.
        policy: scores completions.
        controls: coefficients that move; this objective has none.
        loss: The loss of the completions of a prompt.
        likelihood: The estimate of the log-probs.
    """

    trains = "images"

    def __init__(
        self,
        recipe: MaskedRecipe,
        policy: MaskedPolicy,
        controls: Controls,
        *,
        loss: Annotated[Callable[..., Tensor], Of("answer loss", "dpo")] = dpo,
        likelihood: Annotated[Callable[..., Passes], Of("likelihood", "elbo")] = elbo,
    ) -> None:
        self.recipe, self.policy, self.loss = recipe, policy, loss
        self.remasking = Remasking(recipe, policy, likelihood)
        self.several = recipe.optimizer.updates * recipe.optimizer.epochs > 1
        self._each = counts_answers(loss)
        self._before: dict[tuple[int, int], Tensor] = {}
        self._epochs: dict[int, int] = {}

    def prepare(self, experience: UnmaskedTexts) -> None:
        """Keep the estimates of the policy that sampled, if the rollout has several updates."""
        self._before, self._epochs = {}, {}
        self.remasking.forget()
        if not self.several:
            return
        for epoch in range(self.recipe.optimizer.epochs):
            for part in range(experience.updates):
                for leaves in self.batches(experience, part, None):
                    found = self._estimate(experience, leaves, self._rows(experience, leaves, epoch))
                    self._before |= {(leaf, epoch): row for leaf, row in zip(leaves, found)}

    def rows(self, experience: UnmaskedTexts, part: int, keep: Tensor | None) -> int:
        """How many prompts a part has; for a loss with one value per completion, how many completions."""
        leaves = self._leaves(experience, part)
        return len(leaves) if self._each else len(experience.groups[leaves].unique())

    def batches(self, experience: UnmaskedTexts, part: int, keep: Tensor | None) -> Iterator[list[int]]:
        """Leaves of whole groups, with at most `rollout.batch` passes in all; of one group if it has more passes."""
        leaves, groups, most = self._leaves(experience, part), experience.groups.tolist(), self.recipe.rollout.batch
        batch, size = list[int](), 0
        for group in dict.fromkeys(groups[leaf] for leaf in leaves):
            mine = [leaf for leaf in leaves if groups[leaf] == group]
            own = sum(len(self.remasking.drawn(experience, leaf, 0)[0].masked) for leaf in mine)
            if batch and size + own > most:
                yield batch
                batch, size = [], 0
            batch, size = [*batch, *mine], size + own
        if batch:
            yield batch

    def _leaves(self, experience: UnmaskedTexts, part: int) -> list[int]:
        low, high = experience.part(part)
        owner = experience.rollout.leaf_prompt
        found: list[int] = ((owner >= low) & (owner < high) & experience.outcomes).nonzero().flatten().tolist()
        return found

    def backward(
        self, experience: UnmaskedTexts, batch: list[int], advantages: Tensor, keep: Tensor | None, rows: Tensor
    ) -> Outcome:
        """Add the gradient of one batch.

        If the passes are more than `rollout.batch`, the completions are evaluated without a graph first. The loss then
        says how much each log-prob counts, and the passes are evaluated again, `rollout.batch` at a time.
        """
        epoch = self._epochs.get(batch[0], 0)
        self._epochs[batch[0]] = epoch + 1
        passes, device = self._rows(experience, batch, epoch), self.policy.device
        whole = len(passes.frames) <= self.recipe.rollout.batch
        log_probs = self._estimate(experience, batch, passes, graph=whole)
        if not whole:
            log_probs.requires_grad_()
        counted, old = passes.counted, log_probs.detach()
        if self._before:
            old = torch.stack([self._before[leaf, epoch] for leaf in batch])

        def reference() -> Tensor:
            with self.policy.reference():
                return self._estimate(experience, batch, passes).sum(1)

        advantage = advantages[experience.rollout.leaf[batch]].to(device)
        answers = WholeAnswers(
            log_probs.sum(1), old.sum(1), counted.sum(1), counted.any(1), advantage,
            experience.groups[batch].to(device), reference, not experience.plan.given,
        )  # fmt: skip
        loss, metrics = answer_loss(self.loss, answers)
        loss = loss / rows
        if whole:
            self.policy.weights.backward(loss)
        else:
            (slope,) = torch.autograd.grad(loss, log_probs)
            for some in self._slices(passes):
                added = self._scored(experience, batch, passes, some)
                self.policy.weights.backward((added * slope[passes.owner[some]]).sum())
        ratio = torch.where(counted, log_probs.detach() - old, 0.0)
        metrics["entropy"] = torch.stack([-torch.where(counted, old, 0.0).sum(), counted.sum().float()])
        step = torch.zeros(len(batch), 1, dtype=torch.long, device=device)
        statistics = step_statistics(
            ratio, step, advantage[:, None], counted, None, num_steps=experience.plan.num_steps
        )
        return Outcome(statistics.cpu(), metrics, ratio.abs().max().cpu())

    def _rows(self, experience: UnmaskedTexts, leaves: Sequence[int], epoch: int) -> PassRows:
        """The passes over some leaves, leaf by leaf."""
        found = [self.remasking.framed(experience, leaf, epoch) for leaf in leaves]
        device, ids = self.policy.device, experience.rollout.x[list(leaves)]
        count = torch.tensor([len(passes.masked) for passes, _ in found])
        return PassRows(
            torch.arange(len(found)).repeat_interleave(count).to(device),
            [frame for _, frames in found for frame in frames],
            torch.cat([passes.masked for passes, _ in found]).to(device),
            torch.cat([passes.weight for passes, _ in found]).to(device),
            torch.stack([passes.counted for passes, _ in found]).to(device) & self.policy.moves.counted(ids),
        )

    def _estimate(
        self, experience: UnmaskedTexts, leaves: Sequence[int], passes: PassRows, *, graph: bool = False
    ) -> Tensor:
        """Estimated log-probs [R, L]; `rollout.batch` passes are evaluated at a time."""
        with torch.set_grad_enabled(graph):
            found = torch.cat([self._scored(experience, leaves, passes, some) for some in self._slices(passes)])
            return torch.stack([own.sum(0) for own in found.split(passes.owner.bincount().tolist())])

    def _slices(self, passes: PassRows) -> list[slice]:
        size = self.recipe.rollout.batch
        return [slice(low, low + size) for low in range(0, len(passes.frames), size)]

    def _scored(self, experience: UnmaskedTexts, leaves: Sequence[int], passes: PassRows, some: slice) -> Tensor:
        """[U, L] what some passes add to the estimates."""
        ids = experience.rollout.x[list(leaves)][passes.owner[some]]
        weight, masked = passes.weight[some], passes.masked[some]
        scored = self.policy.moves.counted(ids) & (weight > 0)
        return weight * self.policy.token_log_probs(passes.frames[some], ids, masked, scored)
