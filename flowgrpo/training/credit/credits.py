"""The credits that a recipe chooses by name: they give every step or token its advantage.

A credit is a function `(judged, *, ...) -> [N]`. It gives an advantage for each node of the rollout. The step that
leads to the node gets this advantage. For text, a completion is a node, and a credit may also give [N, T], an advantage
for each token. `Judged` is what a credit is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from torch import Tensor

from ...core.advantages import group_advantages
from ...core.prefix_tree import anchor_prefix_advantages
from ...core.trees import anchor_tree_advantages
from ...parts.choice import Choice
from ...parts.needs import Need, needs, without_effect
from ...parts.ranges import NotNegative
from ...parts.traits import part_scores
from .combining import total_reward
from .conditions import (
    compares_itself,
    group_of_two,
    of_tokens,
    one_tree,
    reads_previews,
    scores_of_parts,
    transitions,
    undivided,
    works_on_samples,
)
from .form_credits import FORM_CREDITS
from .scales import Ddof, Scale, ScaleWithin
from .step_credits import at_nodes, critic, depth, process, step_rewards, turning, value
from .token_credits import least_of_parts, least_returns, parts, prefix

if TYPE_CHECKING:
    from ...rewards.runner import RewardBatch
    from ..images.critic import Critic


@dataclass(frozen=True)
class Judged:
    """A rollout of this process, and the scores of its samples.

    Attributes:
        experience: the rollout; a `pipelines.experience.Experience` for images, a
            `training.text.text_policy.Completions` for text. It has L samples and N nodes; a completion is a node.
        scores: [L, K] of its samples, after gates and corrections.
        advantages: [L] of the samples; None where `advantage` is null.
        critic: of the recipe; None where it has none.
        task: what the samples are.
    """

    experience: Any
    scores: RewardBatch
    advantages: Tensor | None
    critic: Critic | None = None
    task: Literal["images", "text", "masked"] = "images"

    def rewards(self, *, previews: bool = False, across: bool = False) -> Tensor:
        """[L] weighted sums of the rewards; NaN where no reward applies.

        Args:
            previews: whether previews of a state have their sums. If not, they are NaN.
            across: whether the sums are for comparisons of groups with each other. If so, a reward that a whole group
                lacks counts as its mean over the batch.
        """
        return total_reward(self.scores, self.experience, previews=previews, between=across)

    def of_samples(self) -> Tensor:
        """[N] advantages of the nodes: the advantage of the sample below, or the mean over several samples below.

        Raises:
            ValueError: `advantage` is null.
        """
        if self.advantages is None:
            raise ValueError(
                "the credit works on the advantages of samples, and advantage is null; write advantage: group"
            )
        found: Tensor = self.experience.node_advantages(self.advantages)
        return found


@needs(works_on_samples)
def leaf(judged: Judged) -> Tensor:
    """The advantage of the sample; where several samples are below a node, the mean of their advantages."""
    return judged.of_samples()


def _one_comparison(recipe: Any, choice: Choice) -> list[str]:
    advantage = recipe.advantage
    if advantage is None or (advantage.name == "group" and advantage["scale"] != "batch"):
        return []
    return [
        "credit anchor compares the weighted sum of rewards, by state and by group; use advantage group, with scale "
        "group or none"
    ]


def _lengths_differ(recipe: Any, choice: Choice) -> list[str]:
    if recipe.task == "text" or choice["scale"] == "none":
        return []
    why = "all images are equally many steps from a state, so the standard deviation divides the discount out"
    fault = without_effect(choice, "gamma", why)
    return [fault + ", or use credit.scale none"] if fault else []


@needs(
    _lengths_differ, works_on_samples, _one_comparison, one_tree, of_tokens, transitions,
    Need("combine", ("sum",), "compares the weighted sum of rewards, by state and by group"),
    undivided,
)  # fmt: skip
def anchor(
    judged: Judged,
    *,
    omega: NotNegative = 1.0,
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0,
    scale: ScaleWithin = "group",
    eps: NotNegative = 1e-4,
    ddof: Ddof = 1,
) -> Tensor:
    """The sample's advantage plus the advantage of a step among the steps from its state (GiGPO, arXiv 2505.10978).

    A step is a denoising step in a tree of images, or a token after a prefix.

    Args:
        judged: of images or completions.
        omega: weight of the comparison by state.
        gamma: discount per step.
        scale: what differences by state are divided by: the standard deviation of a state's steps, or nothing.
        eps: added to that standard deviation.
        ddof: of the comparison by state; 1 for the sample standard deviation, 0 for the population one.
    """
    experience, rewards, advantages = judged.experience, judged.rewards(), judged.advantages
    assert advantages is not None
    options: dict[str, Any] = {"weight": omega, "discount": gamma, "scale": scale, "eps": eps, "ddof": ddof}
    if judged.task == "text":
        options["contexts"] = experience.context_numbers()
        return anchor_prefix_advantages(experience.sampled.ids, rewards, experience.groups, advantages, **options)
    rollout = experience.rollout
    return anchor_tree_advantages(rollout.parent, rollout.leaf, rewards, experience.groups, advantages, **options)


def _within(recipe: Any, choice: Choice) -> list[str]:
    if recipe.task == "images" or choice["scale"] != "batch":
        return []
    return ["credit minimum compares parts within a group; use credit.scale group or none"]


@part_scores
@needs(
    compares_itself, group_of_two, of_tokens, scores_of_parts, reads_previews, transitions, _within, undivided
)  # fmt: skip
def minimum(
    judged: Judged,
    *,
    temperature: NotNegative = 0.0,
    scale: Scale = "group",
    eps: NotNegative = 1e-4,
    ddof: Ddof = 1,
) -> Tensor:
    """The least reward from a step on, or for completions the least score from a part on (PURE, arXiv 2504.15275).

    Images are compared within a step, and completions with all parts of the group.

    Args:
        judged: of images or completions.
        temperature: above 0, the minimum is soft: the sum of the softmin-weighted rewards from the step on.
        scale: what returns are divided by: the standard deviation of the group, of the batch (images), or nothing.
        eps: added to the standard deviation.
        ddof: 1 for the sample standard deviation, 0 for the population one.
    """
    comparison: dict[str, Any] = {"scale": scale, "eps": eps, "ddof": ddof}
    if judged.task == "text":
        return least_of_parts(judged, temperature, **comparison)
    experience = judged.experience
    nodes, rewards = step_rewards(experience.rollout, judged.rewards(previews=True))
    prompt = experience.rollout.prompt[nodes[:, 0]]
    return at_nodes(
        experience, nodes, group_advantages(least_returns(rewards[:, 1:], temperature), prompt, **comparison)
    )


CREDITS: dict[str, Callable[..., Tensor]] = {
    "leaf": leaf,
    "depth": depth,
    "turning": turning,
    "value": value,
    "critic": critic,
    "process": process,
    "prefix": prefix,
    "anchor": anchor,
    "parts": parts,
    "minimum": minimum,
    **FORM_CREDITS,
}
"""`credit(judged, *, ...) -> [N]`, or [N, T] by token."""
