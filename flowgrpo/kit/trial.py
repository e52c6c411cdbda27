"""A reward under observation: it is called in the same way as in training, and its calls are watched."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import os
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..rewards.base import InvalidScores, MissingDependency, NoGradient, RewardError, RewardSpec, Scores
from ..rewards.registry import build
from ..rewards.runner import RewardSet
from ..rewards.time_limit import TimedOut
from .material import Material

POLL_SECONDS = 0.002
SCORED = {"images": "images", "sounds": "sounds", "text": "completions"}
"""Task -> the argument of rewards that holds its samples."""


@dataclass(frozen=True)
class TrialScores:
    """The scores of a call, or its failure.

    Attributes:
        values: [B] float64, NaN where the reward does not apply; all NaN after a failure.
        failure: what went wrong, in words; empty if nothing did.
        invalid: whether the failure was an unusable returned value, and not an exception.
    """

    values: Tensor
    failure: str = ""
    invalid: bool = False

    @property
    def failed(self) -> bool:
        """Whether there are no values."""
        return bool(self.failure)


@dataclass
class Watch:
    """Stands in for a reward's function, and looks at what goes in and what comes out.

    Attributes:
        inner: the reward's function.
        close_look: compare the arguments before and after a call, which costs a copy of the arguments.
        changed: names of the arguments that a call wrote into.
        dtypes: dtypes of the tensors and arrays that calls returned.
        holds_graph: whether a returned tensor could be differentiated, although gradients were off.
        calls, samples, seconds: number of calls, number of samples in them, and time spent in them.
    """

    inner: Callable[..., Any]
    close_look: bool = False
    changed: set[str] = field(default_factory=set)
    dtypes: set[str] = field(default_factory=set)
    holds_graph: bool = False
    calls: int = 0
    samples: int = 0
    seconds: float = 0.0

    def __call__(self, **arguments: Any) -> Any:
        """Call the reward."""
        before = _copied(arguments) if self.close_look else {}
        began = time.perf_counter()
        result = self.inner(**arguments)
        self.seconds += time.perf_counter() - began
        self.calls += 1
        self.samples += next((len(v) for k, v in arguments.items() if k in (*SCORED.values(), "prompts")), 0)
        self.changed |= {name for name, value in before.items() if not _same(value, arguments[name])}
        values = result.values if isinstance(result, Scores) else result
        subs = list(result.sub_scores.values()) if isinstance(result, Scores) else []
        for one in (values, *subs):
            if isinstance(one, Tensor):
                self.holds_graph |= one.requires_grad
        if isinstance(values, (Tensor, np.ndarray)):
            self.dtypes.add(str(values.dtype).removeprefix("torch."))
        return result


class Trial:
    """A reward, called through the same code as in training.

    Args:
        spec: a recipe's entry.
        task: "images", "sounds" or "text"; by default what the reward's signature says, and else "images".
        frames: for a reward of videos, how many frames each picture becomes; see `panned`. None leaves pictures as they
            are. Videos stay as they are.

    Attributes:
        reward: the scorer.
        watch: what was seen of its calls.
        low, high: least and greatest score so far.
        loaded_bytes: by how many bytes the process grew while the reward was made; None where the system does not tell.

    Raises:
        ValueError: the name or an option is wrong, or the reward cannot score samples of this task.
        MissingDependency: the reward needs a package that is not installed.
    """

    def __init__(self, spec: RewardSpec, task: str | None = None, frames: int | None = None) -> None:
        self.spec, self.frames = spec, frames
        with PeakMemory() as memory:
            self.reward = build(spec)
        self.loaded_bytes = memory.peak_bytes
        needed = self.reward.needed
        self.task = task or next((one for one, kind in SCORED.items() if kind in needed), "images")
        for wrong in (kind for one, kind in SCORED.items() if one != self.task and kind in needed):
            raise ValueError(f"reward {self.reward.name!r} scores `{wrong}`, and cannot be checked on {self.task}")
        if frames is not None and self.task != "images":
            raise ValueError(
                f"reward {self.reward.name!r} scores {SCORED[self.task]}, which have no frames; leave out --frames"
            )
        self.watch = Watch(self.reward.function)
        self.reward.function = self.watch
        self._set = RewardSet([self.reward])
        self.low, self.high = math.inf, -math.inf

    @property
    def noun(self) -> str:
        """What it scores, in a message about one sample."""
        return {"images": "picture", "sounds": "sound"}.get(self.task, "completion")

    @property
    def name(self) -> str:
        """The name under which the reward is reported."""
        return self.reward.name

    def require_columns(self, material: Material) -> None:
        """Raise ValueError if the material lacks a column that the reward needs; the error names the column."""
        self.reward.check(SCORED[self.task], self._columns(material), grouped=True)

    def score(self, material: Material) -> TrialScores:
        """Scores of the material, or how the reward failed on it; warnings of the reward are not shown.

        Raises:
            RewardError: it took longer than its time limit, after which it can score nothing more.
            MissingDependency: it imports a package that is not installed.
        """
        nothing = torch.full((len(material),), torch.nan, dtype=torch.float64)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # A reward that writes into its columns must not spoil what is scored after it.
                columns = copy.deepcopy(self._columns(material))
                samples = material.samples
                if self.frames is not None and isinstance(samples, Tensor) and not material.moving:
                    samples = panned(samples, self.frames)
                batch = self._set.score(samples, material.prompts, columns, material.groups)
        except MissingDependency:
            raise
        except RewardError as error:
            cause = error.__cause__
            if isinstance(cause, TimedOut):
                raise
            return TrialScores(nothing, f"{type(cause).__name__}: {cause}", isinstance(cause, InvalidScores))
        values = batch.values[:, 0].double()
        known = values[~values.isnan()].tolist()
        self.low, self.high = min([self.low, *known]), max([self.high, *known])
        return TrialScores(values)

    def lacks_gradient(self, material: Material) -> str | None:
        """Why the first score has no gradient with respect to its sample; "" if it has one, None if nobody knows."""
        one = material.take([0])
        samples = one.samples
        if not isinstance(samples, Tensor):
            return None
        if self.frames is not None and not one.moving:
            samples = panned(samples, self.frames)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.reward.gradient(samples, one.prompts, copy.deepcopy(self._columns(one)))
        except NoGradient as error:
            return error.why
        except Exception:
            return None
        return ""

    def _columns(self, material: Material) -> dict[str, list[Any]]:
        """The columns of the material; for a reward that scores parts, also the lines of each completion as parts."""
        columns = dict(material.columns)
        if "parts" in self.reward.needed and isinstance(material.samples, list):
            columns["parts"] = [text.splitlines(keepends=True) or [text] for text in material.samples]
        return columns

    def another(self) -> Trial:
        """The same reward, made anew."""
        return Trial(self.spec, self.task, self.frames)

    def close(self) -> None:
        """Release what the reward holds."""
        self._set.close()


def panned(images: Tensor, frames: int) -> Tensor:
    """Videos [B, F, 3, H, W] of pictures [B, 3, H, W] that move to the right by a pixel a frame, and wrap around."""
    return torch.stack([images.roll(at, dims=-1) for at in range(frames)], dim=1)


class PeakMemory:
    """Measures by how much this process grows while a block runs.

    Attributes:
        peak_bytes: the largest growth seen, in bytes; None where the system does not tell.
    """

    def __init__(self) -> None:
        self.peak_bytes: int | None = None
        self._stop = threading.Event()

    def __enter__(self) -> PeakMemory:
        self._start = resident_bytes()
        if self._start is not None:
            self.peak_bytes = 0
            self._thread = threading.Thread(target=self._poll, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._start is not None:
            self._stop.set()
            self._thread.join()
            self._look()

    def _poll(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            self._look()

    def _look(self) -> None:
        now = resident_bytes()
        if now is not None and self._start is not None:
            self.peak_bytes = max(self.peak_bytes or 0, now - self._start)


def resident_bytes() -> int | None:
    """Memory that this process holds, where the system tells."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


class NewTensors:
    """Tensors that were made in a block and are still alive."""

    def __enter__(self) -> NewTensors:
        # With the objects that exist already, every search would take most of a second.
        gc.freeze()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        gc.unfreeze()

    def alive(self) -> tuple[int, int]:
        """Bytes of the tensors, and how many of them hold the graph of a computation."""
        gc.collect()
        # `isinstance` asks an object for its class, and a lazy module would answer by importing what it replaces.
        tensors: list[Tensor] = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
        size = sum(tensor.nelement() * tensor.element_size() for tensor in tensors)
        return size, sum(tensor.grad_fn is not None for tensor in tensors)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators that a reward may draw from, and set them back at the end."""
    python, legacy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)


def generator_states() -> tuple[Any, ...]:
    """States of the global generators, to be compared."""
    legacy = tuple(str(part) if not isinstance(part, np.ndarray) else part.tobytes() for part in np.random.get_state())
    return random.getstate(), legacy, torch.get_rng_state().numpy().tobytes()


def _copied(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in arguments.items()}


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor):
        return before.shape == after.shape and bool((before == after).all())
    return bool(before == after)
