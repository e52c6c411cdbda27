"""Scoring with several rewards: batching, whole groups, retries, and what happens when a reward fails.

A failed score is never turned into a number. A remote reward is called again, with growing pauses. A local reward stops
the run at once: the sample is saved, and the error names the reward and the sample.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..parts.foreign import own_line
from .base import InvalidScores, MissingDependency, NoGradient, Reward, RewardError, RewardSpec, Scores, kind_of
from .inputs import Inputs, check_inputs, keep
from .pixels import to_bytes
from .registry import build, check_options, resolve
from .score_batches import RewardBatch, join_scores
from .time_limit import TimedOut
from .waiting import pause

OF = " / "
"""Between the name of a reward and what else its images are of."""


class RewardSet:
    """Several rewards that score the same samples.

    Args:
        specs: recipe entries, or rewards that are already built.
        quarantine: folder in which the samples of a failed call are saved; None saves nothing.
        retries: how often a call of a remote reward is repeated after it raised. A call is not repeated if the error's
            attribute `final` is true, because it would be refused again.
        base_delay: seconds before the first repetition; each further pause is twice as long.
        sleep: the function that waits; its argument is in seconds.

    Raises:
        ValueError: a name or option is wrong (one message lists all of them), or two rewards have the same name.
        MissingDependency: a reward needs a package that is not installed.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec | Reward],
        *,
        quarantine: Path | None = None,
        retries: int = 3,
        base_delay: float = 1.0,
        sleep: Callable[[float], object] = pause,
    ) -> None:
        if not specs:
            raise ValueError("no rewards given; list at least one under `rewards`")
        if retries < 0 or base_delay < 0:
            raise ValueError(f"retries is {retries} and base_delay {base_delay}; both must be 0 or more")
        _refuse_faulty(specs)
        self.rewards = [spec if isinstance(spec, Reward) else build(spec) for spec in specs]
        self.names = tuple(reward.name for reward in self.rewards)
        twice = sorted({name for name in self.names if self.names.count(name) > 1})
        if twice:
            raise ValueError(f"two rewards are called {twice[0]!r}; give one of them a `label`")
        self.weigh([reward.weight for reward in self.rewards])
        self.advice = ""
        """The last sentence about a failure: how to go on after it."""
        self.told: Callable[[str], None] | None = None
        """Called with the name of each reward before it scores."""
        self.keeps_rendered = False
        """Whether the scores keep the images that rewards make of completions."""
        self.quarantine = None if quarantine is None else Path(quarantine)
        self.retries, self.base_delay, self._sleep = retries, base_delay, sleep

    def weigh(self, weights: Sequence[float]) -> None:
        """Give the rewards these weights, one for each, from the next call on."""
        for reward, weight in zip(self.rewards, weights):
            reward.weight = float(weight)
        self.weights = torch.tensor([reward.weight for reward in self.rewards], dtype=torch.float32)

    def score(
        self,
        samples: Tensor | Sequence[str] | Sequence[Tensor],
        prompts: Sequence[str],
        columns: Mapping[str, Sequence[Any]] | None = None,
        groups: Tensor | Sequence[int] | None = None,
        first: int = 0,
    ) -> RewardBatch:
        """Score B samples with every reward.

        Args:
            samples: images [B, 3, H, W] or videos [B, F, 3, H, W], float in [0, 1]; a list of B images [3, H, W] or
                videos [F, 3, H, W] of several sizes, of which each size is scored in calls of its own; sounds
                [B, C, S], float in [-1, 1], with a column `sampling_rate`; or B completions. The images of a group
                have one size.
            prompts: B prompts.
            columns: the prompt file's further columns, name -> B values.
            groups: B group ids, in any order; rewards that compare whole groups need them.
            first: the number of the first of these samples in error messages; above 0 if other samples came before
                them.

        Returns:
            RewardBatch with values [B, K].

        Raises:
            ValueError: the inputs do not fit each other, or a reward needs a column that is not there.
            RewardError: a reward raised or returned something unusable.
            MissingDependency: a reward imports a package that is not installed.
        """
        if isinstance(samples, Tensor) or not any(isinstance(sample, Tensor) for sample in samples):
            return self._score(replace(check_inputs(samples, prompts, columns or {}, groups), first=first))
        return self._by_size(list(samples), prompts, columns or {}, groups, first)

    def _by_size(
        self,
        samples: Sequence[Any],
        prompts: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        groups: Tensor | Sequence[int] | None,
        first: int,
    ) -> RewardBatch:
        """Score images of several sizes, one size after the other."""
        sizes: dict[tuple[int, ...], list[int]] = {}
        for row, image in enumerate(samples):
            sizes.setdefault(tuple(image.shape), []).append(row)
        parts = []
        for rows in sizes.values():
            own = {name: [column[row] for row in rows] for name, column in columns.items()}
            chosen = None if groups is None else [int(groups[row]) for row in rows]
            images = torch.stack([samples[row] for row in rows])
            inputs = check_inputs(images, [prompts[row] for row in rows], own, chosen)
            parts.append(self._score(replace(inputs, first=first, rows=tuple(rows))))
        order = [row for rows in sizes.values() for row in rows]
        return join_scores(parts).taken(sorted(range(len(order)), key=order.__getitem__))

    def _score(self, inputs: Inputs) -> RewardBatch:
        """Score samples that are checked."""
        kind = kind_of(inputs.samples)
        for reward in self.rewards:
            reward.check(kind, inputs.columns, grouped=inputs.groups is not None)
        values = torch.full((len(inputs.prompts), len(self.rewards)), math.nan, dtype=torch.float32)
        sub_scores: dict[str, dict[str, list[float]]] = {}
        notes: dict[str, list[str]] = {}
        answers: dict[str, list[str | None]] = {}
        parts: dict[str, list[list[float] | None]] = {}
        rendered: dict[str, list[list[Tensor] | None]] = {}
        seconds: dict[str, float] = {}
        for k, reward in enumerate(self.rewards):
            start = time.perf_counter()
            if self.told is not None:
                self.told(reward.name)
            for rows in _batches(reward, inputs):
                scores = self._call(reward, inputs, rows)
                values[rows, k] = scores.values
                for key, column in scores.sub_scores.items():
                    full = sub_scores.setdefault(reward.name, {}).setdefault(key, [math.nan] * len(values))
                    _scatter(full, rows, column)
                if scores.notes:
                    _scatter(notes.setdefault(reward.name, [""] * len(values)), rows, scores.notes)
                if scores.answers:
                    _scatter(answers.setdefault(reward.name, [None] * len(values)), rows, scores.answers)
                if scores.parts:
                    _scatter(parts.setdefault(reward.name, [None] * len(values)), rows, scores.parts)
                for key, made in scores.rendered.items() if self.keeps_rendered and kind == "completions" else ():
                    label = f"{reward.name}{OF}{key}" if key else reward.name
                    _scatter(rendered.setdefault(label, [None] * len(values)), rows, [_in_bytes(own) for own in made])
                # Images of this call should not take memory during the next one.
                del scores
            seconds[reward.name] = time.perf_counter() - start
        return RewardBatch(
            values, self.names, self.weights, sub_scores, notes, seconds, answers=answers, parts=parts,
            rendered=rendered,
        )  # fmt: skip

    def gradients(
        self, images: Tensor, prompts: Sequence[str], columns: Mapping[str, Sequence[Any]] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The weighted sum of the rewards of B images or sounds, and its gradient with respect to them.

        Rewards of weight 0 are not asked.

        Args:
            images: [B, 3, H, W] or videos [B, F, 3, H, W], float in [0, 1]; or sounds [B, C, S], float in [-1, 1].
            prompts: B prompts.
            columns: the prompt file's further columns, name -> B values.

        Returns:
            [B] float32, and float32 of the shape of `images`, on the device of the images.

        Raises:
            ValueError: the inputs do not fit each other, a reward needs a column that is not there, or a reward is not
                differentiable.
            RewardError, MissingDependency: see `score`.
        """
        inputs = check_inputs(images, prompts, columns or {}, None)
        total = torch.zeros(len(images), device=images.device)
        slopes = torch.zeros(images.shape, device=images.device)
        for reward in (one for one in self.rewards if one.weight != 0.0):
            reward.check(kind_of(images), inputs.columns, grouped=True)
            for rows in _batches(reward, inputs):
                chosen, texts, own, _ = inputs.take(rows)
                try:
                    values, slope = reward.gradient(chosen, texts, own)
                except (NoGradient, MissingDependency):
                    raise
                except Exception as error:
                    raise self._failure(reward, inputs, rows, error, 1) from error
                total[rows] += reward.weight * values.to(total.device)
                slopes[rows] += reward.weight * slope.to(slopes.device)
        return total, slopes

    def only(self, k: int) -> RewardSet:
        """Return a set of the k-th reward alone, with the same settings."""
        alone = RewardSet(
            [self.rewards[k]],
            quarantine=self.quarantine,
            retries=self.retries,
            base_delay=self.base_delay,
            sleep=self._sleep,
        )
        alone.advice, alone.keeps_rendered = self.advice, self.keeps_rendered
        return alone

    def close(self) -> None:
        """Close every reward, even if closing one of them raises."""
        with ExitStack() as stack:
            for reward in reversed(self.rewards):
                stack.callback(reward.close)

    def _call(self, reward: Reward, inputs: Inputs, rows: list[int]) -> Scores:
        attempts = 1 + (self.retries if reward.remote else 0)
        for attempt in range(attempts):
            try:
                return reward.score(*inputs.take(rows))
            except MissingDependency:
                raise
            except TimedOut as error:
                raise self._failure(
                    reward, inputs, _hanging(reward, inputs, rows, error), error, attempt + 1
                ) from error
            except InvalidScores as error:
                guilty = rows if error.index is None else [rows[error.index]]
                raise self._failure(reward, inputs, guilty, error, attempt + 1) from error
            except Exception as error:
                if attempt + 1 < attempts and not getattr(error, "final", False):
                    self._sleep(self.base_delay * 2**attempt)
                    continue
                guilty, cause = rows, error
                if not reward.whole_group and not reward.remote:
                    guilty, cause = _bisect(reward.score, inputs, rows, error)
                raise self._failure(reward, inputs, guilty, cause, attempt + 1) from cause
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _failure(self, reward: Reward, inputs: Inputs, rows: list[int], error: Exception, attempts: int) -> RewardError:
        numbers = [inputs.number(row) for row in rows]
        index = numbers[0] if len(rows) == 1 else None
        prompt = inputs.prompts[rows[0]]
        where = (
            f"sample {index} (prompt {prompt!r})"
            if index is not None
            else f"a call with samples {numbers[0]} to {numbers[-1]} (the first prompt is {prompt!r})"
        )
        line = own_line(error)
        place = "" if line is None else f", at {line.filename}:{line.lineno}"
        parts = [f"reward {reward.name!r} failed on {where}{place}: {type(error).__name__}: {str(error).rstrip('.')}."]
        if isinstance(inputs.samples, Tensor) and inputs.samples.ndim == 5 and not isinstance(error, TimedOut):
            shape = [len(rows), *inputs.samples.shape[1:]]
            parts.append(f"`images` are videos here, of shape {shape}: samples, frames, channels, height, width.")
        if attempts > 1:
            parts.append(f"The call was tried {attempts} times.")
        if len(rows) > 1 and not (reward.whole_group or reward.remote or isinstance(error, InvalidScores)):
            hint = "" if isinstance(error, TimedOut) else "; if memory ran out, lower the reward's batch_size"
            parts.append(f"No single sample reproduces the failure{hint}.")
        saved = None
        if self.quarantine is not None:
            try:
                saved = keep(self.quarantine, reward.name, inputs, rows, error)
                parts.append(f"The samples are in {saved}.")
            except OSError as problem:
                # The failure of the reward itself must be reported. This second failure is only added to its message.
                parts.append(f"The samples could not be saved in {self.quarantine}: {problem}.")
        if self.advice:
            parts.append(self.advice)
        return RewardError(" ".join(parts), reward.name, index, numbers, prompt, saved)


def _refuse_faulty(specs: Sequence[RewardSpec | Reward]) -> None:
    """Raise one ValueError for all wrong names and options, before any model is loaded."""
    faults = []
    for spec in specs:
        if isinstance(spec, RewardSpec):
            try:
                check_options(resolve(spec.name), spec.options, spec.label or spec.name)
            except ValueError as error:
                faults.append(str(error))
    if faults:
        raise ValueError("\n".join(faults))


def _batches(reward: Reward, inputs: Inputs) -> Iterator[list[int]]:
    count = len(inputs.prompts)
    size = reward.batch_size or max(count, 1)
    if not reward.whole_group:
        yield from (list(range(start, min(start + size, count))) for start in range(0, count, size))
        return
    members: dict[int, list[int]] = {}
    for row, group in enumerate(inputs.groups or []):
        members.setdefault(group, []).append(row)
    batch: list[int] = []
    for rows in members.values():
        if batch and (len(batch) + len(rows) > size or not reward.takes_groups):
            yield batch
            batch = []
        batch = batch + rows
    if batch:
        yield batch


def _bisect(
    score: Callable[..., object], inputs: Inputs, rows: list[int], error: Exception
) -> tuple[list[int], Exception]:
    """Return the one sample that makes the call fail, with its exception; all rows if there is no such sample."""
    if len(rows) == 1:
        return rows, error
    for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
        try:
            score(*inputs.take(half))
        except Exception as smaller:
            guilty, cause = _bisect(score, inputs, half, smaller)
            return (guilty, cause) if len(guilty) == 1 else (rows, error)
    return rows, error


def _hanging(reward: Reward, inputs: Inputs, rows: list[int], error: TimedOut) -> list[int]:
    """Return the one sample that hangs by itself while another does not, or all rows.

    The search takes no longer than one more time limit.
    """
    if len(rows) == 1 or reward.whole_group or reward.remote or reward.limit is None:
        return rows
    # At each size, both halves may be tried. At the end, one more sample is tried.
    seconds = reward.limit.seconds / (2 * math.ceil(math.log2(len(rows))) + 1)

    def score(*taken: Any) -> None:
        other = reward.with_limit(seconds)
        try:
            other.score(*taken)
        except TimedOut:
            raise
        except Exception:
            # The call ended, and only this matters here. It may fail because the earlier call still hangs.
            return
        finally:
            other.stop()

    guilty, _ = _bisect(score, inputs, rows, error)
    if len(guilty) == 1:
        innocent = next(row for row in rows if row not in guilty)
        try:
            score(*inputs.take([innocent]))
        except TimedOut:
            return rows
    return guilty


def _in_bytes(images: Sequence[Tensor] | None) -> list[Tensor] | None:
    """A copy in 8 bits, which does not keep the memory of all images of the call."""
    return None if images is None else [to_bytes(image.detach()).cpu() for image in images]


def _scatter(full: list[Any], rows: list[int], values: Sequence[Any]) -> None:
    for row, value in zip(rows, values, strict=True):
        full[row] = value
