"""Budgets for the length of completions: penalties, and rewards for right answers that depend on the length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...parts.plugins import nearest
from ..inputs import Inputs
from ..scores import Scores
from ..within import check_inner, inner_reward, inner_servers, score_within, signature_of

MODES = ("linear", "cosine", "relative")
UNITS = ("characters", "words", "tokens")


class Length:
    """A length budget: a penalty for long completions, or a reward for right answers that falls with the length.

    L is the length of a completion. If it matters which completions are right, another reward, `correct`, decides this.

    "linear" is the soft overlong punishment of DAPO (arXiv 2503.14476, Eq. 13). List it beside a reward for right
    answers. With L_max = `limit` and L_cache = `buffer`:

        0 for L <= L_max - L_cache;    (L_max - L_cache - L) / L_cache up to L = L_max;    -1 beyond

    "cosine" is the reward of "Demystifying Long Chain-of-Thought Reasoning" (arXiv 2502.03373, section 4). It already
    contains the reward for right answers:

        r_long + (r_short - r_long) (1 + cos(pi L / L_max)) / 2 for L < L_max;    `exceeded` from L = L_max on

    with (r_short, r_long) = `right` for a right completion and `wrong` for a wrong one.

    "relative" is the penalty of "Training Language Models to Reason Efficiently" (arXiv 2502.04463), which GRPO-lambda
    switches on and off. List it beside a reward for right answers. m and s are the mean and the standard deviation
    (over n) of the lengths of the right completions in the group:

        -alpha sigmoid((L - m) / s) for a right completion (s = 0: -alpha / 2);    0 for a wrong one

    `tau` sets a condition on the group: the length counts only if at least this share of its completions is right.
    In other groups "linear" and "relative" give 0, and "cosine" gives 1 for a right completion and 0 for a wrong one.
    GRPO-lambda (arXiv 2505.18086) also decides by this share, but selects the best groups of the batch and has no
    threshold. `tau: 1` is the condition of ConciseR (arXiv 2505.21178): all completions are right.

    Args:
        limit: L_max, the length limit, in `unit`. Not for "relative".
        mode: one of the three above.
        buffer: L_cache, how far below `limit` the penalty starts. Only for "linear"; 0 makes a step at `limit`.
        unit: unit of the length: "characters", "words" (separated by white space) or "tokens".
        tokenizer: folder or name of the tokenizer that counts the tokens; transformers loads it.
        correct: name of the reward that tells right from wrong, as in a recipe. For "cosine", "relative" and `tau`.
        correct_options: options of the reward `correct`.
        threshold: a completion is right if the reward `correct` gives at least this score.
        tau: share in (0, 1], see above; if absent, the length always counts.
        right: r_short and r_long for right completions, for "cosine".
        wrong: r_short and r_long for wrong completions, for "cosine".
        exceeded: the value of a completion that reaches the limit, for "cosine".
        alpha: factor of the penalty, for "relative".

    Raises:
        ValueError: an option is wrong, is missing, or has no effect in this mode; or the reward `correct` cannot be
            made.
        MissingDependency: the reward `correct` needs a package that is not installed.
    """

    name = "length"

    def __init__(
        self,
        limit: float | None = None,
        mode: str = "linear",
        *,
        buffer: float = 0,
        unit: str = "characters",
        tokenizer: str | None = None,
        correct: str | None = None,
        correct_options: Mapping[str, Any] | None = None,
        threshold: float = 1.0,
        tau: float | None = None,
        right: Sequence[float] = (2.0, 1.0),
        wrong: Sequence[float] = (-10.0, 0.0),
        exceeded: float = -10.0,
        alpha: float = 0.2,
    ) -> None:
        _choice("mode", mode, MODES)
        _choice("unit", unit, UNITS)
        if mode == "relative":
            _refuse(limit is not None, "limit has no effect with `mode: relative`; leave it out")
        else:
            _refuse(not _is_number(limit, 0) or not limit, f"limit is {limit!r}; give a length above 0, such as 1000")
        _refuse(not _is_number(buffer, 0), f"buffer is {buffer!r}; give a number from 0 to limit")
        _refuse(bool(buffer) and mode != "linear", "buffer has an effect only with `mode: linear`; leave it out")
        _refuse(mode == "linear" and buffer > (limit or 0), f"buffer is {buffer!r}, more than the limit {limit!r}")
        _refuse(
            tau is not None and not (_is_number(tau, 0) and 0 < tau <= 1), f"tau is {tau!r}; give a share in (0, 1]"
        )
        _refuse(not _is_number(threshold), f"threshold is {threshold!r}; give a number")
        _refuse(not _is_number(alpha, 0), f"alpha is {alpha!r}; give a number of 0 or more")
        _refuse(not _is_number(exceeded), f"exceeded is {exceeded!r}; give a number")
        for name, pair in (("right", right), ("wrong", wrong)):
            fits = isinstance(pair, (list, tuple)) and len(pair) == 2 and all(map(_is_number, pair))
            _refuse(
                not fits, f"{name} is {pair!r}; give two numbers, for short and for long completions, such as [2, 1]"
            )
        asks = tau is not None or mode != "linear"
        _refuse(
            asks and correct is None,
            f"`mode: {mode}`{' with tau' if tau is not None else ''} needs to know which completions are right; "
            "name a reward that knows, such as `correct: answer`",
        )
        _refuse(
            not asks and correct is not None, "`correct` has no effect with `mode: linear` without tau; leave it out"
        )
        for name, changed, where in (
            ("correct_options", correct_options is not None and correct is None, "with `correct`"),
            ("threshold", threshold != 1.0 and not asks, "with `correct`"),
            ("alpha", alpha != 0.2 and mode != "relative", "with `mode: relative`"),
            ("right", [*right] != [2.0, 1.0] and mode != "cosine", "with `mode: cosine`"),
            ("wrong", [*wrong] != [-10.0, 0.0] and mode != "cosine", "with `mode: cosine`"),
            ("exceeded", exceeded != -10.0 and mode != "cosine", "with `mode: cosine`"),
        ):
            _refuse(changed, f"{name} has an effect only {where}; leave it out")
        _refuse(
            (unit == "tokens") != (tokenizer is not None),
            "`unit: tokens` and `tokenizer` go together: give the tokenizer's folder, or another unit",
        )
        self.limit, self.mode, self.buffer, self.unit = float(limit or 0), mode, float(buffer), unit
        self.threshold, self.tau, self.exceeded, self.alpha = threshold, tau, exceeded, alpha
        self.right, self.wrong = right, wrong
        self._tokenizer = None if tokenizer is None else _load_tokenizer(tokenizer)
        self.correct = None if correct is None else inner_reward(self.name, "correct", correct, correct_options)
        self.whole_group = tau is not None or mode == "relative" or bool(self.correct and self.correct.whole_group)
        self.remote = bool(self.correct and self.correct.remote)
        # A failed call of a remote reward is repeated as a whole, so each call has one group only.
        self.batch_size = 1 if self.remote else None
        needed = self.correct.needed if self.correct else []
        groups = ["groups"] if self.whole_group else []
        self.__signature__ = signature_of("prompts", "completions", *groups, *needed)

    @staticmethod
    def check_options(name: str, options: Mapping[str, Any]) -> None:
        """Refuse a reward for `correct` that cannot be made.

        Raises:
            ValueError: its name or one of its options is wrong.
        """
        if options.get("correct") is not None:
            check_inner(name, "correct", options["correct"], options.get("correct_options"))

    @staticmethod
    def served_at(options: Mapping[str, Any]) -> list[str]:
        """The servers that the reward for `correct` asks, in words."""
        return (
            [] if options.get("correct") is None else inner_servers(options["correct"], options.get("correct_options"))
        )

    def __call__(
        self,
        completions: Sequence[str],
        prompts: Sequence[str],
        groups: Sequence[int] | None = None,
        **columns: Any,
    ) -> Scores:
        """Return the values of completions by their length.

        Args:
            completions: B strings.
            prompts: B strings.
            groups: B group ids, in any order; needed only if the group matters.
            columns: name -> B values, for the reward `correct`.

        Returns:
            Scores with B values, NaN where `correct` gives no score. Sub-scores: `length`; with `correct` also the
            sub-scores of that reward, its score as `correct`, and `counted`, whether the length counted.
        """
        lengths = self._lengths(completions)
        if self.correct is None:
            return Scores([self._linear(length) for length in lengths], {"length": lengths})
        inputs = Inputs(list(completions), list(prompts), columns, None if groups is None else list(groups))
        scored = score_within(self.correct, inputs, "reward `correct`")
        given = scored.values.tolist()
        values, counted = [math.nan] * len(given), [math.nan] * len(given)
        for rows in _members(groups or [0] * len(given)):
            rows = [row for row in rows if not math.isnan(given[row])]
            right = [given[row] >= self.threshold for row in rows]
            # The product of a share and a count may be rounded up.
            counts = self.tau is None or sum(right) >= self.tau * len(right) - 1e-9
            found = (
                self._group([lengths[row] for row in rows], right)
                if counts
                else [float(is_right and self.mode == "cosine") for is_right in right]
            )
            for row, value in zip(rows, found, strict=True):
                values[row], counted[row] = value, float(counts)
        subs = {**scored.sub_scores, "correct": given, "length": lengths, "counted": counted}
        return Scores(values, subs, scored.notes, answers=scored.answers, rendered=scored.rendered)

    def close(self) -> None:
        """Close the reward `correct`."""
        if self.correct is not None:
            self.correct.close()

    def _lengths(self, completions: Sequence[str]) -> list[float]:
        if self._tokenizer is not None:
            return [float(len(self._tokenizer(text, add_special_tokens=False)["input_ids"])) for text in completions]
        return [float(len(text.split() if self.unit == "words" else text)) for text in completions]

    def _group(self, lengths: Sequence[float], right: Sequence[bool]) -> list[float]:
        """Return the values of the completions of a group in which the length counts."""
        if self.mode == "linear":
            return [self._linear(length) for length in lengths]
        if self.mode == "cosine":
            return [self._cosine(length, good) for length, good in zip(lengths, right)]
        of_right = [length for length, good in zip(lengths, right) if good]
        mean = math.fsum(of_right) / max(len(of_right), 1)
        spread = math.sqrt(math.fsum((length - mean) ** 2 for length in of_right) / max(len(of_right), 1))
        far = [(length - mean) / spread if spread else 0.0 for length in lengths]
        return [-self.alpha / (1 + math.exp(-z)) if good else 0.0 for z, good in zip(far, right)]

    def _linear(self, length: float) -> float:
        over = length - (self.limit - self.buffer)
        if over <= 0:
            return 0.0
        return -1.0 if length > self.limit else -over / self.buffer

    def _cosine(self, length: float, right: bool) -> float:
        if length >= self.limit:
            return float(self.exceeded)
        short, long = self.right if right else self.wrong
        return long + (short - long) * (1 + math.cos(math.pi * length / self.limit)) / 2


def _members(groups: Sequence[int]) -> list[list[int]]:
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    return list(members.values())


def _is_number(value: Any, least: float = -math.inf) -> bool:
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return known and math.isfinite(value) and value >= least


def _refuse(wrong: bool, message: str) -> None:
    if wrong:
        raise ValueError(f"length: {message}")


def _choice(name: str, value: Any, known: Sequence[str]) -> None:
    _refuse(value not in known, f"{name} is {value!r}{nearest(str(value), known)} Write one of {', '.join(known)}")


def _load_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"length: no tokenizer could be loaded from {name!r}: {error}") from error
