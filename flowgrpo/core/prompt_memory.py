"""Memories of prompts: how much the rewards of a prompt vary, and which answers to it succeeded."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any


def answer_diversity(answers: Iterable[Hashable]) -> float:
    """How much the answers of a group differ: 0 if all are equal, 1 if no two are equal.

    The value is (distinct - 1) / (count - 1). An answer that is None could not be read and does not count. Fewer than
    two answers have the value 0.
    """
    known = [answer for answer in answers if answer is not None]
    return (len(set(known)) - 1) / (len(known) - 1) if len(known) > 1 else 0.0


class VarianceCurriculum:
    """A sampler that draws prompts more often if their rewards vary more (MMR1, arXiv 2509.21268).

    A lower bound of a group's gradient is proportional to the variance of its rewards, p (1 - p) for a success rate p.
    A prompt is drawn with probability mix / N + (1 - mix) v / sum of v over the N candidates, with
    v = variance + diversity. The diversity is any measure of how much the answers differ; the caller gives it.
    """

    def __init__(self, *, decay: float = 0.9, mix: float = 0.5) -> None:
        """Start with no history.

        Args:
            decay: weight of a prompt's past at each new observation of the prompt, in [0, 1].
            mix: share of uniform sampling in [0, 1]. If it is above 0, every prompt can still be drawn.

        Raises:
            ValueError: if a number is out of range.
        """
        for name, value in (("decay", decay), ("mix", mix)):
            if not 0 <= value <= 1:
                raise ValueError(f"`{name}` is {value}; use a number in [0, 1]")
        self._decay, self._mix = decay, mix
        self._sums: dict[Hashable, list[float]] = {}  # samples, rewards, squares, diversity; all decayed

    def observe(self, prompt: Hashable, rewards: Sequence[float], diversity: float = 0.0) -> None:
        """Add a group's rewards to the history of its prompt; NaN is left out.

        Args:
            prompt: its id, a string or a number.
            rewards: rewards of the group.
            diversity: diversity of the group's answers, on the scale of a variance.
        """
        known = [r for r in rewards if not math.isnan(r)]
        if not known:
            return
        new = [len(known), sum(known), sum(r * r for r in known), len(known) * diversity]
        old = self._sums.get(prompt, [0.0] * 4)
        self._sums[prompt] = [self._decay * before + float(now) for before, now in zip(old, new)]

    def rate(self, prompt: Hashable) -> float | None:
        """Decayed mean reward, the success rate of 0/1 rewards; None for a prompt without history."""
        sums = self._sums.get(prompt)
        return None if sums is None else sums[1] / sums[0]

    def score(self, prompt: Hashable) -> float | None:
        """Decayed variance of the rewards, plus diversity; None for a prompt without history."""
        sums = self._sums.get(prompt)
        if sums is None:
            return None
        count, first, second, diversity = sums
        spread = second / count - (first / count) ** 2
        # Equal rewards have a variance of 0 only up to rounding. Rounding must not decide which prompts are drawn.
        return (spread if spread > 1e-12 * second / count else 0.0) + diversity / count

    def probabilities(self, prompts: Sequence[Hashable]) -> list[float]:
        """Probability of drawing each candidate; a candidate without history gets the best score that is known.

        Raises:
            ValueError: if there is no candidate.
        """
        if not prompts:
            raise ValueError("`prompts` is empty; give the ids of the candidates")
        known = [self.score(prompt) for prompt in prompts]
        best = max((score for score in known if score is not None), default=1.0)
        scores = [best if score is None else score for score in known]
        total = sum(scores)
        if not total > 0:
            return [1 / len(prompts)] * len(prompts)
        return [self._mix / len(prompts) + (1 - self._mix) * score / total for score in scores]

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs, in plain numbers."""
        return {"sums": {prompt: list(sums) for prompt, sums in self._sums.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._sums = {prompt: [float(s) for s in sums] for prompt, sums in state["sums"].items()}


class Successes:
    """Past successes of every prompt, so that one can replace a failure in a group that has only failures.

    This is the experience replay of ARPO for GUI agents (arXiv 2505.16282). The latest successes are kept because they
    are closest to the policy. A success that is put back is off-policy, so store the log-probs from its sampling among
    its data.
    """

    def __init__(self, keep: int = 4) -> None:
        """Start empty.

        Args:
            keep: number of successes remembered for each prompt, at least 1.

        Raises:
            ValueError: if `keep` is below 1.
        """
        if keep < 1:
            raise ValueError(f"`keep` is {keep}; remember at least 1 success of a prompt")
        self._keep = keep
        self._items: dict[Hashable, deque[Any]] = {}

    def add(self, prompt: Hashable, item: Any) -> None:
        """Remember a success.

        Args:
            prompt: its id, a string or a number.
            item: plain data (numbers, strings, tensors, lists and dicts of them), so that a checkpoint can hold it.
        """
        self._items.setdefault(prompt, deque(maxlen=self._keep)).append(item)

    def of(self, prompt: Hashable) -> list[Any]:
        """Remembered successes of a prompt, the latest first."""
        return list(reversed(self._items.get(prompt, ())))

    def repairs(
        self, rewards: Iterable[float], prompts: Iterable[Hashable], success: float = 0.5
    ) -> list[tuple[int, Any]]:
        """Rows to replace, and their replacements: one failure of every group that has no success but remembers one.

        Args:
            rewards: reward of each row; a row with NaN is neither a failure nor a success, and is not replaced.
            prompts: prompt of each row; the rows of one prompt are a group.
            success: the least reward of a success.

        Returns:
            (row, item) pairs: the worst row of the group (the first among equals), and the prompt's latest success.
        """
        worst: dict[Hashable, tuple[float, int]] = {}
        solved: set[Hashable] = set()
        for row, (reward, prompt) in enumerate(zip(rewards, prompts)):
            if reward >= success:
                solved.add(prompt)
            elif not math.isnan(reward):
                worst[prompt] = min(worst.get(prompt, (reward, row)), (reward, row))
        return [
            (row, self._items[prompt][-1])
            for prompt, (_, row) in worst.items()
            if prompt not in solved and prompt in self._items
        ]

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs, as plain data."""
        return {"items": {prompt: list(items) for prompt, items in self._items.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._items = {prompt: deque(items, maxlen=self._keep) for prompt, items in state["items"].items()}
