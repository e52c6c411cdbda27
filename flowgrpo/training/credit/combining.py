"""How a recipe combines its rewards: corrected verdicts, gates, ensembles, and the weighted sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ...core.advantages import filled_rewards, weighted_total
from ...core.bounded_terms import unlikeliness_rewards
from ...core.combination import gated_rewards, group_gated_rewards, uncertainty_weighted_rewards, worst_case_rewards
from ...core.verifiers import corrected_rewards
from ...parts.needs import needs
from ...parts.ranges import NotNegative
from .conditions import compares_samples

if TYPE_CHECKING:
    from ...configs.reward_sections import RewardConfig
    from ...rewards.runner import RewardBatch


def weighted_sum(rewards: Tensor) -> Tensor:
    """The weighted sum. The comparison of samples adds the rewards up, because it decides how a missing one counts.

    Args:
        rewards: [L, K]; returned unchanged.
    """
    return rewards


@needs(compares_samples)
def worst(rewards: Tensor) -> Tensor:
    """The smallest of an ensemble's weighted rewards (worst-case optimisation, arXiv 2310.02743).

    Args:
        rewards: [L, K].
    """
    return worst_case_rewards(rewards)


@needs(compares_samples)
def agreement(rewards: Tensor, *, weight: NotNegative = 0.5) -> Tensor:
    """The mean of an ensemble's rewards minus their variance (uncertainty-weighted optimisation, arXiv 2310.02743).

    Args:
        rewards: [L, K].
        weight: what the variance over the ensemble is multiplied by.
    """
    return uncertainty_weighted_rewards(rewards, weight=weight)


COMBINATIONS: dict[str, Callable[..., Tensor]] = {"sum": weighted_sum, "worst": worst, "agreement": agreement}
"""`combination(rewards [L, K], *, ...) -> [L]`. The rewards are weighted; a missing reward is its mean in the group."""


class Comparable(Protocol):
    """L samples that are compared."""

    @property
    def groups(self) -> Tensor:
        """[L] ids of the groups of the samples."""

    @property
    def outcomes(self) -> Tensor:
        """[L] bool: samples that are results, not previews of a state."""

    @property
    def log_probs(self) -> Tensor | None:
        """[L] log-probs of whole samples under the sampler; for completions only."""


def peers_of(samples: Comparable) -> Tensor:
    """[L] ids of sets of samples. The mean over the set replaces a missing score.

    The results of a group are one set, and the other samples of the group are another.
    """
    return 2 * samples.groups + samples.outcomes.to(samples.groups)


def total_reward(scores: RewardBatch, samples: Comparable, *, previews: bool = False, between: bool = False) -> Tensor:
    """[L] weighted sum of the rewards that count; NaN where no reward applies.

    A missing score counts as its mean over the group, see `core.advantages.weighted_total`.

    Args:
        scores: of L samples.
        samples: their groups.
        previews: whether samples that are not results keep their sums. If not, their sums are NaN.
        between: whether the sums are for comparisons of groups with each other.
    """
    wider = samples.outcomes.long() if between else None
    total = weighted_total(scores.values, peers_of(samples), scores.weights, wider=wider)
    return total if previews else total.masked_fill(~samples.outcomes, torch.nan)


def counted_rewards(rewards: Sequence[RewardConfig]) -> list[RewardConfig]:
    """The rewards of a recipe whose weight is not 0, in the order of the columns of `combine`."""
    return [reward for reward in rewards if reward.weight != 0]


def compared_alone(rewards: Sequence[RewardConfig]) -> list[str]:
    """The names of rewards that do not enter the sum of a recipe: a constraint, or a reward that is kept `apart`."""
    return [reward.known_as for reward in rewards if reward.at_least is not None or reward.apart]


def combine(
    scores: RewardBatch,
    samples: Comparable,
    rewards: Sequence[RewardConfig],
    combination: Callable[[Tensor], Tensor] = weighted_sum,
) -> RewardBatch:
    """The rewards from which advantages are computed. Logs and saved samples keep the scores as the rewards gave them.

    The order is:

    1. corrections of `noise`;
    2. gates, which compare the scores as the rewards gave them, and do not see what other gates closed;
    3. what a reward loses where its success was likely (`unlikely`);
    4. the combination, which leaves one column or all of them.

    A reward of weight 0 has no column. It serves gates only.

    Args:
        scores: as the rewards gave them, [L, K].
        samples: their groups, and [L] `log_probs` of whole samples if a reward has `unlikely`.
        rewards: K entries of the recipe. A reward whose gate keeps it `apart` is NaN where the gate is closed.
        combination: with its options bound.

    Raises:
        ValueError: a reward with `noise` gave something other than 0, 1 and NaN, or the combination does not return
            one number per sample.
    """
    values = scores.values.clone()
    for k, reward in enumerate(rewards):
        if reward.noise is not None and reward.weight != 0:
            values[:, k] = _corrected(values[:, k], reward, scores.names[k])
    gated = values.clone()
    for k, reward in enumerate(rewards):
        if reward.gate is None:
            continue
        main = scores.values[:, scores.names.index(reward.gate.reward)]
        closed = torch.nan if reward.gate.closed is None or reward.gate.apart else reward.gate.closed
        if reward.gate.share is None:
            gated[:, k] = gated_rewards(values[:, k], main, threshold=reward.gate.at_least, closed=closed)
            continue
        success = (main >= reward.gate.at_least).to(main).masked_fill(main.isnan(), torch.nan)
        gated[:, k] = group_gated_rewards(
            values[:, k], success, peers_of(samples), at_least=reward.gate.share, closed=closed
        )
    for k, reward in enumerate(rewards):
        if reward.unlikely is not None and reward.weight != 0:
            assert samples.log_probs is not None
            gated[:, k] = unlikeliness_rewards(gated[:, k], samples.log_probs, peers_of(samples), beta=reward.unlikely)
    found = replace(scores, values=gated).counted()
    given = filled_rewards(found.values * found.weights, peers_of(samples))
    one = combination(given)
    if one is given:
        return found
    if not isinstance(one, Tensor) or one.shape != given.shape[:1]:
        what = tuple(one.shape) if isinstance(one, Tensor) else type(one).__name__
        raise ValueError(
            f"a combination has to give one number a sample, a tensor of shape ({len(given)},); it gave {what}"
        )
    return replace(scores, values=one.to(given.dtype)[:, None], names=("combined",), weights=torch.ones(1))


def _corrected(values: Tensor, reward: RewardConfig, name: str) -> Tensor:
    assert reward.noise is not None
    try:
        return corrected_rewards(
            values, false_positive=reward.noise.false_positive, false_negative=reward.noise.false_negative
        )
    except ValueError as error:
        raise ValueError(f"reward {name} has `noise`, which is for verdicts of 0 and 1: {error}") from None
