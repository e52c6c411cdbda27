"""Baselines that remember the rewards of a prompt from one iteration to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from .advantages import as_precise, group_advantages, sum_by_group
from .grouped import Grouped, grouped, one_per_row, standardised

Prompts: TypeAlias = Tensor | Sequence[int]


class PromptTable:
    """A row of numbers for every prompt seen, on the CPU. Rows are sorted by id, so a look-up is a tensor operation.

    Args:
        default: [C], the row of a prompt that has not been seen yet.
    """

    def __init__(self, default: Sequence[float]) -> None:
        self.default = torch.tensor(default, dtype=torch.float64)
        self.ids = torch.empty(0, dtype=torch.long)
        self.rows = torch.empty(0, len(default), dtype=torch.float64)

    def read(self, prompts: Tensor) -> Tensor:
        """Rows [B, C] of `prompts` [B]."""
        place = torch.searchsorted(self.ids, prompts)
        # An id above all others is looked up past the end, where the default row is.
        known = torch.cat([self.ids, prompts.new_zeros(1)])[place] == prompts
        return torch.where(known[:, None], torch.cat([self.rows, self.default[None]])[place], self.default)

    def write(self, prompts: Tensor, rows: Tensor) -> None:
        """Set the rows [B, C] of distinct `prompts` [B]."""
        ids = torch.unique(torch.cat([self.ids, prompts]))
        merged = self.default.repeat(len(ids), 1)
        merged[torch.searchsorted(ids, self.ids)] = self.rows
        merged[torch.searchsorted(ids, prompts)] = rows
        self.ids, self.rows = ids, merged

    def state_dict(self) -> dict[str, Tensor]:
        return {"ids": self.ids.clone(), "rows": self.rows.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over the prompts of `state_dict`.

        Raises:
            ValueError: If the state belongs to another kind of tracker.
        """
        ids, rows = state["ids"], state["rows"]
        if rows.shape != (len(ids), len(self.default)):
            raise ValueError(
                f"the state has rows of shape {tuple(rows.shape)} for {len(ids)} prompts, but this tracker keeps "
                f"{len(self.default)} numbers per prompt; load the state of the same kind of tracker"
            )
        self.ids, self.rows = ids.to(self.ids).clone(), rows.to(self.rows).clone()


def _by_prompt(rewards: Tensor, prompts: Prompts) -> tuple[Grouped, Tensor]:
    """Rewards [B] on the CPU, grouped by prompt, and the ids of these groups in their order."""
    ids = torch.as_tensor(prompts).to("cpu", torch.long)
    one_per_row(ids, len(ids), "prompts")
    one_per_row(rewards, len(ids), "rewards")
    return grouped(rewards.to("cpu"), ids), torch.unique(ids)


def smoothed_advantages(new: Tensor, total: Tensor, visits: Tensor) -> Tensor:
    """Blend advantages within this visit of a prompt with advantages among all its samples (DCPO, arXiv 2509.02333).

    With i visits, N = ((i - 1) new + total) / i and T = (new + (i - 1) total) / i. The result is N or T, whichever has
    the smaller absolute value. So neither a chance standard deviation of this visit nor a shift since earlier visits
    has its full effect.

    Args:
        new: [B] advantages, standardised among the samples of this visit.
        total: [B] advantages, standardised among all samples of the prompt so far, this visit included.
        visits: [B] number of visits so far, this visit included; at least 1.

    Returns:
        [B].
    """
    first = ((visits - 1.0) * new + total) / visits
    second = (new + (visits - 1.0) * total) / visits
    return torch.where(first.abs() <= second.abs(), first, second)


class CumulativeStandardiser:
    """Advantages standardised over all samples of a prompt so far (smooth standardisation of DCPO, 2509.02333).

    A group whose rewards are all equal learns from the comparison with earlier visits. On the first visit the result is
    the advantage of GRPO.

    Args:
        eps: Added to standard deviations.
        ddof: 1 for the sample standard deviation, 0 for the population one.
    """

    def __init__(self, *, eps: float = 1e-4, ddof: int = 1) -> None:
        self.eps = eps
        self.ddof = ddof
        self._table = PromptTable([0.0, 0.0, 0.0, 0.0])  # visits, samples, mean, sum of squares about it

    def advantages(self, rewards: Tensor, prompts: Prompts) -> Tensor:
        """Remember `rewards` [B] of one visit to each of their prompts; return advantages [B].

        A NaN enters no statistic and gets advantage 0. A visit without any reward does not count as a visit. Call this
        method once per iteration, with whole groups.

        Args:
            rewards: [B].
            prompts: [B] integer ids that stay the same over the run; they are the groups.

        Raises:
            ValueError: If a reward is infinite, or shapes do not match.
        """
        data, ids = _by_prompt(rewards, prompts)
        moments = data.moments(0)
        count = moments.count[:, 0]
        mean = torch.where(count > 0, (moments.minimum + moments.offset)[:, 0], 0.0)
        visits, samples, past, squares = self._table.read(ids).unbind(1)
        # Chan et al.: sums about the mean of the union follow from sums about the means of the parts.
        whole = (samples + count).clamp(min=1)
        shift = mean - past
        centre = torch.where(samples > 0, past + shift * count / whole, mean)
        squares = squares + moments.std[:, 0].square() * count + shift.square() * samples * count / whole
        rows = torch.stack([visits + (count > 0), samples + count, centre, squares], 1)
        self._table.write(ids, rows)
        deviation = (squares / (whole - self.ddof)).sqrt()
        total = torch.where(squares > 0, 1.0 / (deviation + self.eps), 0.0)[data.index]
        total = total * (data.values[:, 0] - centre[data.index])
        new = standardised(data.values, data.index, data.moments(self.ddof), self.eps)[:, 0]
        blended = smoothed_advantages(new, total, rows[data.index, 0])
        return data.restore(blended[:, None]).to(rewards.device)

    def state_dict(self) -> dict[str, Tensor]:
        return self._table.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._table.load_state_dict(state)


class ValueTracker:
    """A running success rate per prompt as the baseline of single samples (SPO, arXiv 2509.13232).

    The rate of a prompt is the mean a / (a + b) of a Beta distribution. New rewards r multiply a and b by a factor rho,
    then add r to a and 1 - r to b. The factor is rho = 2 ** (-D / half_life), within `low`..`high`. D is the KL
    divergence by which the policy has moved since its last visit to the prompt. A prompt that has not been seen before
    has a + b = 1 / (1 - low), the size of the shortest memory.

    Args:
        prior: Rate of a prompt that has not been seen before, in (0, 1).
        half_life: The divergence that halves the weight of the memory, above 0.
        low: Smallest factor, in [0, `high`].
        high: Largest factor, below 1, so that the memory is never longer than 1 / (1 - high) samples.

    Raises:
        ValueError: If a number is out of range.
    """

    def __init__(self, *, prior: float = 0.5, half_life: float = 0.06, low: float = 0.875, high: float = 0.96) -> None:
        if not 0.0 < prior < 1.0:
            raise ValueError(f"`prior` is {prior}; use a success rate between 0 and 1")
        if not half_life > 0:
            raise ValueError(f"`half_life` is {half_life}; use a divergence above 0")
        if not 0.0 <= low <= high < 1.0:
            raise ValueError(f"`low` is {low} and `high` is {high}; use 0 <= low <= high < 1")
        self.half_life = half_life
        self.low = low
        self.high = high
        self.strength = 1.0 / (1.0 - low)
        self._table = PromptTable([self.strength * prior, self.strength * (1.0 - prior)])

    def values(self, prompts: Prompts) -> Tensor:
        """Success rates [B] of `prompts` [B] ids, float32, on the CPU."""
        rows = self._table.read(torch.as_tensor(prompts).to("cpu", torch.long))
        return (rows[:, 0] / rows.sum(1)).to(torch.float32)

    def start(self, prompts: Prompts, values: Tensor) -> None:
        """Start distinct `prompts` [B] at the success rates `values` [B] of samples drawn before the run.

        Raises:
            ValueError: If a rate is outside 0..1, a prompt is given twice, or shapes do not match.
        """
        ids = torch.as_tensor(prompts).to("cpu", torch.long)
        rates = as_precise(one_per_row(values, len(ids), "values").to("cpu"))
        if not bool(((rates >= 0) & (rates <= 1)).all()):
            raise ValueError("`values` holds a rate outside 0..1; give the success rate of each prompt")
        if len(torch.unique(ids)) != len(ids):
            raise ValueError("`prompts` holds an id twice; give each prompt once, with the mean of its samples")
        self._table.write(ids, self.strength * torch.stack([rates, 1.0 - rates], 1))

    def update(self, rewards: Tensor, prompts: Prompts, divergence: Tensor | None = None) -> None:
        """Update the rates with the rewards of a batch.

        Args:
            rewards: [B] in 0..1; NaN is left out.
            prompts: [B] integer ids that stay the same over the run; a prompt may occur several times.
            divergence: [B] KL of each sample's policy to the policy of the prompt's last visit; it is averaged over the
                prompt's samples. None for 0. A negative estimate counts as 0.

        Raises:
            ValueError: If a reward is outside 0..1, a divergence is missing, or shapes do not match.
        """
        data, ids = _by_prompt(rewards, prompts)
        values = data.values
        known = (~values.isnan()).to(values)
        if bool(((values < 0) | (values > 1)).any()):
            raise ValueError("`rewards` holds a value outside 0..1; scale rewards to 0..1 for a success rate")
        moved = torch.zeros_like(values)
        if divergence is not None:
            moved = as_precise(one_per_row(divergence, len(values), "divergence").to("cpu"))[:, None]
            if bool((moved.isnan() & (known > 0)).any()):
                raise ValueError("`divergence` is NaN where `rewards` is not; give it for every sample with a reward")
        parts = torch.cat([known, torch.where(known > 0, moved, 0.0), values.nan_to_num(0.0)], 1)
        count, drift, gain = sum_by_group(parts, data.index, data.count).unbind(1)
        factor = torch.exp2(-drift / count / self.half_life).clamp(self.low, self.high)
        rows = self._table.read(ids)
        updated = factor[:, None] * rows + torch.stack([gain, count - gain], 1)
        seen = count > 0
        self._table.write(ids[seen], updated[seen])

    def advantages(
        self,
        rewards: Tensor,
        prompts: Prompts,
        divergence: Tensor | None = None,
        *,
        eps: float = 1e-4,
        ddof: int = 1,
    ) -> Tensor:
        """Return the advantages [B] of a batch, and `update` the rates with the batch.

        A = (d - mean(d)) / (std(d) + eps) over the batch, gathered from all ranks. Here d is the reward minus the rate
        before this batch. A NaN enters no statistic and gets 0. A batch whose d are all equal gets 0.
        """
        baseline = self.values(prompts)
        self.update(rewards, prompts, divergence)
        difference = as_precise(rewards) - as_precise(baseline.to(rewards.device))
        found = group_advantages(difference, torch.zeros(len(rewards), dtype=torch.long), eps=eps, ddof=ddof)
        return found.to(torch.promote_types(rewards.dtype, torch.float32))

    def sampling_weights(self, prompts: Prompts, *, floor: float = 0.05) -> Tensor:
        """Probabilities [B] of drawing `prompts` [B] next, proportional to sqrt(v (1 - v)) + floor for the rate v.

        Raises:
            ValueError: If `floor` is not above 0; some prompts would then never be drawn again.
        """
        if not floor > 0:
            raise ValueError(f"`floor` is {floor}; use a number above 0, so that every prompt can be drawn again")
        values = self.values(prompts)
        weights = (values * (1.0 - values)).sqrt() + floor
        return weights / weights.sum()

    def state_dict(self) -> dict[str, Tensor]:
        return self._table.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._table.load_state_dict(state)
