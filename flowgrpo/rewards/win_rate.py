"""Win rates in place of scores: every image is compared with the other images of its group.

Pref-GRPO (arXiv 2508.20751): if the images of a group are nearly equally good, dividing by the standard deviation of
their scores turns meaningless differences into large advantages. A win rate says only which image is better.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, TypeVar

from torch import Tensor

from .base import RESERVED, InvalidScores, Reward, RewardSpec, Scores, parameters
from .inputs import Inputs
from .registry import checked, construct, outline
from .within import inner_servers, score_within, signature_of

PAIR = ("first", "second")
PAIRS_PER_CALL = 32

T = TypeVar("T")


class WinRate:
    """Share of the comparisons within its group that an image wins, as decided by a judge of your choice.

    If p_ij is the judge's preference for image i over image j of the same group,

        win_rate_i = mean over j ≠ i of p_ij,    p_ij in [0, 1],    p_ji = 1 - p_ij

    as in Pref-GRPO (arXiv 2508.20751). The mean over a group is always 1/2, so it does not show what a run has learned.
    Evaluate with the judge itself or with another reward.

    A judge that compares has a method `compare(first, second, prompts, **columns)`, or is itself a function that takes
    `first` and `second`. Both are [P, 3, H, W] (or [P, F, 3, H, W], or P completions). The judge also gets P prompts,
    and the columns of the prompt file that it names. It returns P preferences for `first` in [0, 1]; NaN and None mean
    undecided and count 1/2. It may have the attributes of any reward; `batch_size` is the largest number of pairs in
    one call.

    Any other reward can be a judge too, by its scores. It scores every image once, and p_ij is 1, 0 or 1/2. An image to
    which the judge does not apply (NaN) takes part in no comparison.

    Args:
        judge: name of the judge, `path/to/file.py:name` or `package.module:name`, as for any reward.
        judge_options: options of the judge.
        both_orders: ask a judge that compares about (i, j) and about (j, i), and average the two answers, so that a
            bias for one position cancels. If false, ask once for each pair, with the earlier image first, as the
            released code of Pref-GRPO does.
        margin: two scores that differ by at most this much are a tie, 1/2 for each image. Only for a judge that scores;
            in the unit of its scores.

    Raises:
        ValueError: the judge cannot be made or called, or an option is wrong.
        MissingDependency: the judge needs a package that is not installed.
    """

    name = "win_rate"
    whole_group = True

    def __init__(
        self,
        judge: str,
        judge_options: Mapping[str, Any] | None = None,
        *,
        both_orders: bool = True,
        margin: float = 0.0,
    ) -> None:
        self.judge, self.compares = _make_judge(judge, judge_options)
        _check_settings(self.name, both_orders, margin)
        if margin and self.compares:
            raise ValueError(
                f"win_rate: margin is {margin!r}, but the judge {judge!r} compares pairs and gives no scores; "
                "leave margin out, and let the judge return 0.5 for a tie"
            )
        self.both_orders, self.margin = both_orders, margin
        self.device, self.remote = self.judge.device, self.judge.remote
        # A failed call of a remote reward is repeated as a whole, so each call has one group only.
        self.batch_size = 1 if self.remote else self.judge.batch_size
        needed = [name for name in self.judge.needed if not (self.compares and name in PAIR)]
        self.__signature__ = signature_of("prompts", "groups", *needed)

    @staticmethod
    def check_options(name: str, options: Mapping[str, Any]) -> None:
        """Refuse a judge that cannot be made, without making it.

        Raises:
            ValueError: the judge's name or one of its options is wrong, or another option is.
        """
        _check_settings(name, options.get("both_orders", True), options.get("margin", 0.0))
        _judge(_outlined, name, options["judge"], options.get("judge_options"))

    @staticmethod
    def served_at(options: Mapping[str, Any]) -> list[str]:
        """The servers that the judge asks, in words."""
        return inner_servers(options["judge"], options.get("judge_options"))

    def __call__(
        self,
        prompts: Sequence[str],
        groups: Sequence[int],
        images: Tensor | None = None,
        completions: Sequence[str] | None = None,
        **columns: Any,
    ) -> Scores:
        """Return the win rates of whole groups.

        Args:
            prompts: B strings.
            groups: B group ids, in any order.
            images: [B, 3, H, W] in [0, 1], or videos [B, F, 3, H, W].
            completions: B strings, instead of images.
            columns: name -> B values, for the judge.

        Returns:
            Scores with B values in [0, 1]; NaN for an image that was compared with no other, because it is alone in its
            group or has no score. For a judge that scores, the sub-scores are the judge's sub-scores, and its score as
            `score`. For a judge that compares, the sub-score is `undecided`, the share of the image's comparisons that
            were undecided.

        Raises:
            InvalidScores: the judge did not return one number for each image, or one number in [0, 1] for each pair.
            RuntimeError: a judge that scores raised an exception, which is `__cause__`.
        """
        samples = list(completions or ()) if images is None else images
        inputs = Inputs(samples, list(prompts), columns, list(groups))
        return self._by_comparing(inputs) if self.compares else self._by_scores(inputs)

    def close(self) -> None:
        """Close the judge."""
        self.judge.close()

    def _by_scores(self, inputs: Inputs) -> Scores:
        scored = score_within(self.judge, inputs, "judge")
        score = scored.values.tolist()
        pairs = [(i, j) for i, j in _pairs(inputs) if not (math.isnan(score[i]) or math.isnan(score[j]))]
        gaps = [score[i] - score[j] for i, j in pairs]
        preferences = [0.5 if abs(gap) <= self.margin else float(gap > 0) for gap in gaps]
        sub_scores = {**scored.sub_scores, "score": score}
        rates = win_rates(len(score), pairs, preferences)
        return Scores(rates, sub_scores, scored.notes, answers=scored.answers, rendered=scored.rendered)

    def _by_comparing(self, inputs: Inputs) -> Scores:
        clash = sorted(set(PAIR) & set(inputs.columns))
        if clash:
            raise ValueError(f"the prompts have a column {clash[0]!r}, which a judge receives anyway; rename it")
        pairs = _pairs(inputs)
        if self.both_orders:
            pairs = [order for i, j in pairs for order in ((i, j), (j, i))]
        size = self.judge.batch_size or PAIRS_PER_CALL
        answers: list[float] = []
        for start in range(0, len(pairs), size):
            answers += self._ask(inputs, pairs[start : start + size])
        count, undecided = len(inputs.prompts), [math.isnan(answer) for answer in answers]
        rates = win_rates(count, pairs, [0.5 if math.isnan(answer) else answer for answer in answers])
        return Scores(rates, {"undecided": _means(count, pairs, undecided, undecided)})

    def _ask(self, inputs: Inputs, pairs: Sequence[tuple[int, int]]) -> list[float]:
        """Return the judge's preference for the first sample of each pair; NaN if it has none."""
        first, prompts, columns, _ = inputs.take([i for i, _ in pairs])
        second = inputs.take([j for _, j in pairs])[0]
        try:
            answers = self.judge.call({**columns, "first": first, "second": second, "prompts": prompts}, len(pairs))
        except InvalidScores as error:
            # In the judge's error a row is a pair, but a row of this reward is an image. So the row is not passed on.
            raise InvalidScores(f"the judge was given {len(pairs)} pairs to compare: {error}") from error
        found: list[float] = answers.values.tolist()
        for answer, (i, j) in zip(found, pairs, strict=True):
            if not (math.isnan(answer) or 0 <= answer <= 1):
                raise InvalidScores(
                    f"the judge {self.judge.name!r} answered {answer:g} to images {i} and {j} of the call "
                    f"(prompt {inputs.prompts[i]!r}); return the probability in [0, 1] that `first` is better, "
                    "or NaN if undecided"
                )
        return found


def win_rates(count: int, pairs: Sequence[tuple[int, int]], preferences: Sequence[float]) -> list[float]:
    """Return the mean preference for each sample, over all comparisons in which the sample takes part.

    Args:
        count: B, the number of samples.
        pairs: P pairs of rows; a pair may occur more than once, in either order.
        preferences: P preferences in [0, 1] for the first row of the pair; the second row has 1 minus this.

    Returns:
        B means in [0, 1]; NaN for a sample that is in no pair. The means do not depend on the order of the pairs.
    """
    # Answers are float32 and this is float64, so p + (1 - p) is exactly 1 and opposite answers tie exactly.
    return _means(count, pairs, preferences, [1.0 - preference for preference in preferences])


def _means(
    count: int, pairs: Sequence[tuple[int, int]], of_first: Sequence[float], of_second: Sequence[float]
) -> list[float]:
    values: list[list[float]] = [[] for _ in range(count)]
    for (i, j), one, other in zip(pairs, of_first, of_second, strict=True):
        values[i].append(one)
        values[j].append(other)
    # The sum is exact, so equally good images have means that are equal to the last bit, at whatever places they stand.
    return [math.fsum(row) / len(row) if row else math.nan for row in values]


def _pairs(inputs: Inputs) -> list[tuple[int, int]]:
    """Return all pairs of rows within a group, the earlier row first; groups in the order in which they appear."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(inputs.groups or ()):
        members.setdefault(group, []).append(row)
    return [pair for rows in members.values() for pair in combinations(rows, 2)]


def _check_settings(reward: str, both_orders: Any, margin: Any) -> None:
    if not isinstance(both_orders, bool):
        raise ValueError(f"{reward}: both_orders is {both_orders!r}; give true or false")
    if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not 0 <= margin < math.inf:
        raise ValueError(f"{reward}: margin is {margin!r}; give a number of 0 or more, such as 0.01")


def _judge(make: Callable[[RewardSpec], T], reward: str, name: Any, options: Any) -> T:
    """What `make` returns for the entry of the judge.

    Raises:
        ValueError: the name or an option is wrong; the message says of which reward.
    """
    if not isinstance(name, str) or not (options is None or isinstance(options, Mapping)):
        raise ValueError(
            f"{reward}: judge is {name!r} and judge_options {options!r}; give the name of a reward "
            "('gold', 'path/to/file.py:name' or 'package.module:name') and a mapping of its options"
        )
    try:
        return make(RewardSpec(name, options=options or {}))
    except ValueError as error:
        raise ValueError(f"{reward}: the judge {name!r} cannot be made: {error}") from error


def _outlined(spec: RewardSpec) -> None:
    """Check the entry of a judge. The instances of a class that compares need not be callable."""
    if not hasattr(checked(spec), "compare"):
        outline(spec)


def _make_judge(name: str, options: Mapping[str, Any] | None) -> tuple[Reward, bool]:
    """Return the judge, and whether it compares pairs (True) or scores images (False).

    Raises:
        ValueError: the name or an option is wrong, or the name is not the name of a judge.
        MissingDependency: the judge needs a package that is not installed.
    """
    scorer, label, bound = _judge(construct, "win_rate", name, options)
    compare = getattr(scorer, "compare", None)
    found = parameters(scorer) if callable(scorer) else None
    if not callable(compare):
        compare = scorer if set(PAIR) <= set(found or ()) else None
    if compare is None and not callable(scorer):
        raise ValueError(
            f"win_rate: the judge {name!r} is a {type(scorer).__name__} that can neither compare nor score; give it "
            "`compare(self, first, second, prompts, **columns)` or `__call__(self, images, prompts, **columns)`"
        )
    if compare is None:
        return Reward(scorer, label, options=bound), False
    judge = Reward(compare, label, options=bound, owner=scorer)
    strange = sorted(set(judge.needed) & set(RESERVED) - {"prompts"})
    if strange or not all(judge.takes(word) for word in PAIR):
        raise ValueError(
            f"win_rate: the judge {name!r} compares with the arguments {inspect.signature(compare)}, but it is called "
            "with `first`, `second`, `prompts` and columns; write `compare(self, first, second, prompts, **columns)`"
        )
    return judge, True
