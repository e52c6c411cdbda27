"""The advantages that a recipe chooses by name: they compare a sample with other samples.

An advantage is a function `(rewards [B], groups [B], *, ...) -> [B]`, or a class whose instances are called with these
arguments. A reward is the weighted sum of the recipe's rewards. It is NaN where no reward applies, or where the sample
is not a result. An advantage that needs more than the rewards asks for it by name, with a keyword-only parameter
`NAME: Given[...]`:

- `columns` [B, K] and `weights` [K]: the rewards before they are added, NaN where a reward is missing;
- `across` [B]: the sum in which a reward that a whole group lacks counts as its mean over the batch;
- `lengths` [B]: tokens of completions;
- `prompts` [B]: ids that stay the same over the run;
- `strata` [B]: ids of the strata of samples, where the part has an option `stratum`;
- `divergence` [B]: how far the policy has moved since it last saw the prompt, NaN for a new prompt. It is None if
  nothing measures the divergence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ...configs.reading_soundness import reward_place
from ...core.advantages import anchored_advantages, multi_reward_advantages
from ...core.baselines import beta_advantages, stratified_advantages, virtual_maximum_advantages
from ...core.outcomes import consistency_advantages, exponential_advantages, quantile_advantages
from ...parts.choice import Choice, given_names
from ...parts.needs import Need, needs
from ...parts.ranges import Given, NotNegative, Positive, Share
from .combining import total_reward
from .conditions import compares_samples, group_of_two, undivided
from .remembering import Cumulative, Tracked
from .scales import Ddof, Scale
from .strata import Stratum

if TYPE_CHECKING:
    from ...rewards.runner import RewardBatch

Baseline = Literal["mean", "loo", "length", "none"]


def _has_lengths(recipe: Any, choice: Choice) -> list[str]:
    if recipe.task == "text" or choice["baseline"] != "length":
        return []
    return ["advantage.baseline length weights by the lengths of completions; images have none, use mean"]


@needs(group_of_two, _has_lengths, undivided)
def group(
    rewards: Tensor,
    groups: Tensor,
    *,
    columns: Given[Tensor],
    weights: Given[Tensor],
    lengths: Given[Tensor | None],
    baseline: Baseline = "mean",
    scale: Scale = "group",
    eps: NotNegative = 1e-4,
    ddof: Ddof = 1,
) -> Tensor:
    """(reward - baseline) / (scale + eps) within a group (GRPO, arXiv 2402.03300).

    Args:
        rewards: [B].
        groups: [B].
        columns: [B, K].
        weights: [K].
        lengths: [B], for `baseline: length`.
        baseline: the mean of the group, the mean of the other samples of the group (`loo`), the mean weighted by the
            lengths of completions (`length`, OPO), or nothing.
        scale: what advantages are divided by, the standard deviation of the group or of the batch. With `none` (Dr.
            GRPO), rewards must be of about the size of 1. If they are much smaller, `optimizer.eps` outweighs their
            gradients.
        eps: added to the standard deviation.
        ddof: 1 for the sample standard deviation, 0 for the population one.
    """
    more: dict[str, Any] = {"lengths": lengths} if baseline == "length" else {}
    return multi_reward_advantages(
        columns, groups, weights, how="sum", baseline=baseline, scale=scale, eps=eps, ddof=ddof, **more
    )


@needs(
    group_of_two,
    _has_lengths,
    Need("combine", ("sum",), "normalises each reward by itself before it adds the rewards up"),
)
def gdpo(
    rewards: Tensor,
    groups: Tensor,
    *,
    columns: Given[Tensor],
    weights: Given[Tensor],
    lengths: Given[Tensor | None],
    baseline: Baseline = "mean",
    scale: Scale = "group",
    eps: NotNegative = 1e-4,
    ddof: Ddof = 1,
    whiten: bool = True,
) -> Tensor:
    """Each reward is compared within the group by itself; the weighted sum is whitened (GDPO, arXiv 2601.05242).

    Args:
        rewards: [B].
        groups: [B].
        columns: [B, K].
        weights: [K].
        lengths: [B], for `baseline: length`.
        baseline: of each reward; the mean of the group, the mean of the other samples of the group (`loo`), the mean
            weighted by the lengths of completions (`length`), or nothing.
        scale: what each reward is divided by: the standard deviation of the group, of the batch, or nothing.
        eps: added to the standard deviations, also to the one of the whitening.
        ddof: 1 for the sample standard deviation, 0 for the population one.
        whiten: whether the sum is divided by its standard deviation over the batch. MixGRPO's code only adds up.
    """
    more: dict[str, Any] = {"lengths": lengths} if baseline == "length" else {}
    return multi_reward_advantages(
        columns,
        groups,
        weights,
        how="gdpo" if whiten else "each",
        baseline=baseline,
        scale=scale,
        eps=eps,
        ddof=ddof,
        **more,
    )


def anchored(
    rewards: Tensor,
    groups: Tensor,
    *,
    across: Given[Tensor],
    k: Positive = 1.0,
    eps: NotNegative = 1e-4,
    ddof: Ddof = 1,
) -> Tensor:
    """A group that has lost its diversity is compared with the other groups (VGPO, arXiv 2512.12387).

    Args:
        rewards: [B].
        groups: [B].
        across: [B].
        k: the comparison within the group has weight min(1, k s / S), for the standard deviations s of the group and
            S of the batch.
        eps: added to standard deviations.
        ddof: 1 for the sample standard deviation, 0 for the population one.
    """
    return anchored_advantages(across, groups, k=k, eps=eps, ddof=ddof)


@needs(group_of_two)
def virtual_maximum(
    rewards: Tensor,
    groups: Tensor,
    *,
    maximum: float = 1.0,
    eps: NotNegative = 1e-4,
    ddof: Ddof = 1,
) -> Tensor:
    """A virtual sample of the highest reward is added to each group, so a failed group learns (NGRPO, 2509.18851).

    Args:
        rewards: [B].
        groups: [B].
        maximum: the highest reward that a sample can get.
        eps: added to the standard deviation.
        ddof: 1 for the sample standard deviation, 0 for the population one.
    """
    return virtual_maximum_advantages(rewards, groups, maximum=maximum, eps=eps, ddof=ddof)


@needs(group_of_two)
def beta(rewards: Tensor, groups: Tensor) -> Tensor:
    """Rewards of 0 and 1, normalised by a Beta density of the group's success rate (BNPO, arXiv 2506.02864)."""
    return beta_advantages(rewards, groups)


def _levels_rise(recipe: Any, choice: Choice) -> list[str]:
    low, high = choice["low"], choice["high"]
    return (
        [] if low < high else [f"advantage.low is {low:g} and advantage.high {high:g}; use a low level below the high"]
    )


@needs(group_of_two, _levels_rise, undivided)
def quantile(
    rewards: Tensor,
    groups: Tensor,
    *,
    low: Share = 0.2,
    high: Share = 0.8,
    omega: NotNegative = 1.0,
    scale: Scale = "group",
    eps: NotNegative = 1e-4,
    ddof: Ddof = 1,
) -> Tensor:
    """The worst samples of a group count more, and the best count alike, by quantiles (RiskPO, arXiv 2510.00911).

    Args:
        rewards: [B].
        groups: [B].
        low: level of the lower quantile, below `high`.
        high: level of the upper quantile.
        omega: additional weight of the worst samples.
        scale: what advantages are divided by: the standard deviation of the group, of the batch, or nothing.
        eps: added to the standard deviation.
        ddof: 1 for the sample standard deviation, 0 for the population one.
    """
    return quantile_advantages(rewards, groups, low=low, high=high, omega=omega, scale=scale, eps=eps, ddof=ddof)


def consistency(
    rewards: Tensor,
    groups: Tensor,
    *,
    across: Given[Tensor],
    sharpness: NotNegative = 10.0,
    threshold: float = 0.3,
    eps: NotNegative = 1e-4,
    ddof: Ddof = 1,
) -> Tensor:
    """A group that agrees with itself is compared with the other groups (COPO, arXiv 2508.04138).

    Args:
        rewards: [B].
        groups: [B].
        across: [B].
        sharpness: how fast the weight moves from the group to the batch.
        threshold: entropy of a group's rewards, in nats, at which group and batch have the same weight.
        eps: added to standard deviations.
        ddof: 1 for the sample standard deviation, 0 for the population one.
    """
    return consistency_advantages(across, groups, sharpness=sharpness, threshold=threshold, eps=eps, ddof=ddof)


def knows_its_stratum(recipe: Any, choice: Choice) -> list[str]:
    """A need of parts with an option `stratum`: the recipe has the reward that `stratum` names."""
    asked: str = choice["stratum"].reward
    if reward_place(recipe.rewards, asked) is not None:
        return []
    labels = ", ".join(reward.label or reward.name for reward in recipe.rewards)
    return [f"advantage.stratum asks reward {asked!r}; the rewards are {labels}"]


@needs(group_of_two, knows_its_stratum, compares_samples)
def stratified(
    rewards: Tensor,
    groups: Tensor,
    *,
    strata: Given[Tensor],
    stratum: Stratum,
    alpha: Share = 0.8,
    eps: NotNegative = 1e-4,
    ddof: Ddof = 1,
) -> Tensor:
    """A sample is compared with the samples of its prompt that are like it (Stratified GRPO, arXiv 2510.06214).

    Args:
        rewards: [B].
        groups: [B].
        strata: [B], made from `stratum`.
        stratum: which samples of a prompt are alike.
        alpha: weight of the comparison within the stratum. The comparison within the group has the rest.
        eps: added to standard deviations.
        ddof: 1 for the sample standard deviation, 0 for the population one.
    """
    return stratified_advantages(rewards, groups, strata, alpha=alpha, eps=eps, ddof=ddof)


@needs(group_of_two)
def exponential(rewards: Tensor, groups: Tensor, *, sharpness: Positive = 1.0) -> Tensor:
    """Weights that are exponential in the reward, of good samples minus bad ones, for a loss without a ratio (wd1).

    Args:
        rewards: [B].
        groups: [B].
        sharpness: factor of the rewards in the exponent.
    """
    return exponential_advantages(rewards, groups, sharpness=sharpness)


ADVANTAGES: dict[str, Callable[..., Any]] = {
    "group": group,
    "gdpo": gdpo,
    "anchored": anchored,
    "virtual_maximum": virtual_maximum,
    "beta": beta,
    "quantile": quantile,
    "consistency": consistency,
    "stratified": stratified,
    "exponential": exponential,
    "tracked": Tracked,
    "cumulative": Cumulative,
}
"""`advantage(rewards [B], groups [B], *, ...) -> [B]`; an advantage that remembers is a class."""


@dataclass(frozen=True)
class Compared:
    """What an advantage may ask for about L samples, by name."""

    scores: RewardBatch
    samples: Any

    @cached_property
    def rewards(self) -> Tensor:
        """[L] weighted sums of the rewards; NaN where no reward applies, and for samples that are not results."""
        return total_reward(self.scores, self.samples)

    @property
    def across(self) -> Tensor:
        """[L] weighted sums of the rewards, for comparisons of groups with each other."""
        return total_reward(self.scores, self.samples, between=True)

    @property
    def columns(self) -> Tensor:
        """[L, K] rewards; NaN for samples that are not results."""
        return self.scores.values.masked_fill(~self.samples.outcomes[:, None], torch.nan)

    @property
    def weights(self) -> Tensor:
        """[K] weights of the rewards."""
        return self.scores.weights

    def given(self, name: str) -> Any:
        """The value with this name.

        Raises:
            ValueError: no value has this name.
        """
        if name in ("columns", "weights", "across"):
            return getattr(self, name)
        if name not in SAMPLES:
            known = ", ".join((*SAMPLES, "columns", "weights", "across"))
            raise ValueError(f"an advantage asks for {name!r}, which a run does not give; it gives {known}")
        return getattr(self.samples, name)


SAMPLES = ("lengths", "prompts", "strata", "divergence")


def refuse_not_finite(where: str, found: Tensor, known: Tensor) -> None:
    """Refuse advantages that are NaN or infinite where what they are made of is finite: 0 would take their place.

    Args:
        where: what made the advantages.
        found: advantages, of any shape.
        known: bool, of the same shape: where an advantage has to be finite.

    Raises:
        ValueError: an advantage is not finite. The message says how many are not.
    """
    wrong = known & ~found.isfinite()
    if bool(wrong.any()):
        value = float(found[wrong][0])
        raise ValueError(
            f"{where} gave {value} for {int(wrong.sum())} of {int(known.sum())} samples or steps that have rewards; "
            "return finite numbers (a division by a standard deviation needs a small number added to it)"
        )


def compare(advantage: Callable[..., Tensor], scores: RewardBatch, samples: Any) -> Tensor:
    """[L] advantages of samples.

    Args:
        advantage: a function with its options bound, or an instance of a class. An instance learns from the samples.
        scores: [L, K], combined.
        samples: have `groups`, `outcomes` and what the advantage asks for.

    Raises:
        ValueError: the advantage asks for a name that does not exist, or does not return one finite number per
            sample that has a reward.
    """
    compared = Compared(scores, samples)
    target: Any = advantage.func if isinstance(advantage, partial) else advantage
    code = target if hasattr(target, "__code__") else type(target).__call__
    found = advantage(compared.rewards, samples.groups, **{name: compared.given(name) for name in given_names(code)})
    rows = len(compared.rewards)
    if not isinstance(found, Tensor) or found.shape != (rows,):
        what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"an advantage has to be a tensor of shape ({rows},), one number a sample; it gave {what}")
    refuse_not_finite("the advantage", found, compared.rewards.isfinite())
    return found.to(compared.rewards.dtype)
