"""The passes over finished completions: which tokens each pass masks, and how much each masked token weighs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...core.addressing import address
from ...core.likelihoods import Passes
from ...parts.choice import given_names

if TYPE_CHECKING:
    from ...configs.schema import MaskedRecipe
    from ...samplers.transitions import Rollout
    from ...text.masked_model import Frame
    from .masked_policy import MaskedPolicy, UnmaskedTexts


class Remasking:
    """Draws the passes of a likelihood. The same epoch of a rollout gets the same passes, whoever is evaluated.

    Args:
        recipe: for the length of completions and blocks.
        policy: whose completions are masked again.
        likelihood: the estimate of the log-probs.
    """

    def __init__(self, recipe: MaskedRecipe, policy: MaskedPolicy, likelihood: Callable[..., Passes]) -> None:
        self.recipe, self.policy, self.likelihood = recipe, policy, likelihood
        self._rows: dict[str, Tensor] = {}

    def forget(self) -> None:
        """Forget what is known of the last rollout."""
        self._rows = {}

    def drawn(self, experience: UnmaskedTexts, leaf: int, epoch: int) -> tuple[Passes, torch.Generator]:
        """The passes over a leaf, and the generator that drew them."""
        rollout = experience.rollout
        owner = int(rollout.leaf_prompt[leaf])
        place = int((rollout.leaf_prompt[:leaf] == owner).sum())
        generator = torch.Generator().manual_seed(address(experience.keys[owner], -1, place, epoch))
        given: dict[str, Any] = {}
        if asked := given_names(self.likelihood):
            if not self._rows:
                moves = self.policy.moves
                self._rows = {"steps": reveal_steps(rollout, moves.mask), "written": moves.counted(rollout.x).cpu()}
            has = {"block": self.recipe.model.block} | {name: rows[leaf] for name, rows in self._rows.items()}
            given = {name: has[name] for name in asked}
        return self.likelihood(self.recipe.generation.tokens, generator, **given), generator

    def framed(self, experience: UnmaskedTexts, leaf: int, epoch: int) -> tuple[Passes, list[Frame]]:
        """The passes over a leaf, and the prompt that each of them sees: a share of its tokens may be masked."""
        passes, generator = self.drawn(experience, leaf, epoch)
        frame = experience.frames[int(experience.rollout.leaf_prompt[leaf])]
        return passes, [self._veiled(frame, passes.prompt, generator) for _ in passes.masked]

    def _veiled(self, frame: Frame, share: float, generator: torch.Generator) -> Frame:
        if not share:
            return frame
        head, tail = frame
        hidden = (torch.rand(len(head), generator=generator) < share).tolist()
        return [self.policy.language.mask if hide else token for token, hide in zip(head, hidden)], tail


def reveal_steps(rollout: Rollout, mask: int) -> Tensor:
    """[leaves, L] the step of a rollout that revealed each token of its completions, in host memory; -1 for none.

    Args:
        rollout: of a masked model, with its states.
        mask: id of the mask token.
    """
    assert rollout.states is not None
    hidden, parent, depth = (rollout.states == mask).cpu(), rollout.parent.cpu(), rollout.depth.cpu()
    node = rollout.leaf.cpu()
    found = torch.full((len(node), hidden.shape[1]), -1)
    # All leaves go up at once; a node without a parent stays where it is.
    while bool((parent[node] >= 0).any()):
        before = torch.where(parent[node] >= 0, parent[node], node)
        found = torch.where(hidden[before] & ~hidden[node], depth[before][:, None], found)
        node = before
    return found
