"""What a reward is, how it is called, and what it may return.

A reward is a plain function or an object with `__call__`. It is always called with keyword arguments:

    def my_reward(images, prompts, **columns) -> scores         # [B, 3, H, W] or [B, F, 3, H, W], in [0, 1]
    def my_reward(sounds, prompts, sampling_rate, **columns) -> scores    # [B, C, S], in [-1, 1]; samples a second
    def my_reward(completions, prompts, **columns) -> scores    # B strings

Every column of the prompt file is passed by its name, as a list of B values. A reward gets only the columns that its
signature takes, or all of them if it has `**columns`. If the recipe cuts completions into parts, the column `parts` has
B lists of the texts of the parts. An object (or function) may carry attributes:

    name         the name of the reward in the metrics
    device       the device to which the images are moved before the call
    batch_size   the largest number of samples in one call (default: all)
    whole_group  True: each call has complete groups only. If the signature takes `groups`, the group ids are passed
                 as `groups` (B ints). Otherwise each call has exactly one group
    remote       True: a call that raises may be repeated
    close()      called once at the end
"""

from __future__ import annotations

import copy
import difflib
import importlib.util
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..parts.foreign import contained
from ..parts.plugins import nearest
from .scores import InvalidScores, Scores, normalise
from .time_limit import TimeLimit, check_time_limit

__all__ = [
    "InvalidScores",
    "MissingDependency",
    "Reward",
    "RewardError",
    "RewardSpec",
    "Scores",
    "missing_dependency",
    "parameters",
    "require",
]

T = TypeVar("T")
KINDS = ("images", "sounds", "completions")
"""What rewards score, by the names of their arguments."""
RESERVED = (*KINDS, "prompts", "groups")
SAMPLING_RATE = "sampling_rate"
"""A column that a run of sounds adds. A reward gets the only value of all rows, samples a second."""
NOISE_KEY = "noise_key"
OF_TEXT = ("completion_ids", "truncated", NOISE_KEY)
"""Columns that a run of text adds to the columns of the prompts: the token ids of each completion, whether it was cut
at the longest length, and a seed for noise of a reward's own. The completions of a prompt have the same seed, which is
another one in each iteration, and the same in all evaluations."""
OF_GIVEN = ("given_place", "given_places")
"""Columns that a run on given samples adds: the place of a sample among the samples of its prompt, 0 for the best, and
their number."""
OF_RECOVERED = ("inverted", "noisiness")
"""Columns that objective `direct_align` adds where it differentiates: whether an image was recovered by a step towards
noise, and where its noise level lies in the range of the objective, from 0 at the lowest level to 1 at the highest."""
FROM_RUN = (*OF_TEXT, *OF_GIVEN, *OF_RECOVERED, SAMPLING_RATE)
"""Columns that are given to a reward that names them, and not to one that takes any column."""
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_PACKAGES = {
    "cv2": "opencv-python-headless",
    "math_verify": "'math-verify[antlr4_13_2]'",
    "open_clip": "open_clip_torch",
    "PIL": "pillow",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}


def kind_of(samples: Tensor | Sequence[Any]) -> str:
    """What samples are, one of `KINDS`: images and videos have two or three dimensions more than a list, sounds one."""
    if not isinstance(samples, Tensor):
        return "completions"
    return "sounds" if samples.ndim == 3 else "images"


def within_range(samples: Tensor) -> Tensor:
    """A copy of images with numbers from 0 to 1, or of sounds with numbers from -1 to 1."""
    return samples.clamp(-1 if kind_of(samples) == "sounds" else 0, 1)


class MissingDependency(ImportError):
    """A reward needs a package that is not installed; the message says which."""


class RewardError(RuntimeError):
    """A reward failed while it scored, or while it was closed. The original exception is `__cause__`.

    Attributes:
        reward: the reward's name.
        index: row of the sample that made the reward fail, or None if no single sample was found.
        indices: rows of the call that failed; `index` alone if `index` is known.
        prompt: prompt of the first row in `indices`; empty if there are no rows.
        saved: folder in which the samples of `indices` were saved, or None.
    """

    def __init__(
        self,
        message: str,
        reward: str,
        index: int | None = None,
        indices: Sequence[int] = (),
        prompt: str = "",
        saved: Path | None = None,
    ) -> None:
        super().__init__(message)
        self.reward, self.index, self.indices = reward, index, list(indices)
        self.prompt, self.saved = prompt, saved


class NoGradient(ValueError):
    """A reward cannot be differentiated with respect to the images.

    Args:
        reward: name of the reward.
        why: a clause that says why.

    Attributes:
        why: the clause.
    """

    def __init__(self, reward: str, why: str) -> None:
        self.why = why
        super().__init__(
            f"reward {reward!r} has no gradient with respect to the images: {why}. Compute it with torch from "
            "`images`, without torch.no_grad, numpy or PIL; or give it weight 0, so that it is only reported; or use "
            "an objective that needs no gradient of rewards, such as transition"
        )


@dataclass(frozen=True)
class RewardSpec:
    """One entry of a recipe's `rewards` list.

    Attributes:
        name: a registered name, `path/to/file.py:name` or `package.module:name`.
        weight: factor in the combined reward; a reward of weight 0 is recorded and has no other effect.
        options: keyword arguments for the constructor of a class; for a function, values bound to its parameters.
        label: name under which the reward is reported; it tells two entries of the same reward apart.
        time_limit: seconds that one call may take; None sets no limit.
    """

    name: str
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str | None = None
    time_limit: float | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a reward needs a `name`; `flowgrpo rewards` lists the known names")
        if isinstance(self.weight, bool) or not math.isfinite(self.weight):
            raise ValueError(f"reward {self.name!r}: weight is {self.weight!r}; give a finite number")
        if self.time_limit is not None:
            check_time_limit(self.label or self.name, self.time_limit)


def missing_dependency(reward: str, error: ModuleNotFoundError) -> MissingDependency:
    """Return the error to raise if a reward could not import an optional package."""
    module = (error.name or str(error)).partition(".")[0]
    package = _PACKAGES.get(module, module)
    return MissingDependency(
        f"reward {reward!r} needs the package {module!r}, which is not installed: pip install {package}"
    )


def require(module: str) -> None:
    """Raise ModuleNotFoundError if a module is not installed, without importing the module."""
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of a callable by name, or None if it has no readable signature (some built-ins)."""
    # nn.Module.__call__ hides the signature that its author wrote.
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return None


class Reward:
    """A plug-in of any kind, called in one uniform way.

    Args:
        function: the callable that scores.
        name: the name under which the reward is reported.
        weight: factor in the combined reward.
        options: values bound to parameters of `function`.
        owner: the object that has the attributes, if `function` is one of its methods; None if `function` itself has
            them.
        limit: the time limit of each call; None makes the calls in the caller's thread, without a limit.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        weight: float = 1.0,
        options: Mapping[str, Any] | None = None,
        owner: Any = None,
        limit: TimeLimit | None = None,
    ) -> None:
        if not callable(function):
            raise ValueError(
                f"reward {name!r} is a {type(function).__name__} that cannot be called; "
                "give it `__call__(self, images, prompts, **columns)`"
            )
        called = function if inspect.isroutine(function) else type(function).__call__
        if inspect.iscoroutinefunction(called):
            raise ValueError(f"reward {name!r} is async, but rewards are called without `await`; write `def`")
        self.function, self.name, self.weight, self.limit = function, name, float(weight), limit
        self._owner = function if owner is None else owner
        self.whole_group = bool(getattr(self._owner, "whole_group", False))
        self.remote = bool(getattr(self._owner, "remote", False))
        self.device: Any = getattr(self._owner, "device", None)
        report = getattr(self._owner, "report", "")
        self.report = report if isinstance(report, str) else ""
        self.batch_size: int | None = getattr(self._owner, "batch_size", None)
        size = self.batch_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"reward {name!r}: batch_size is {size!r}; give an integer of 1 or more, or None")
        self._options = dict(options or {})
        found = parameters(function)
        self._parameters: Mapping[str, inspect.Parameter] = found or {}
        self._takes_any = found is None or any(p.kind is p.VAR_KEYWORD for p in found.values())

    @property
    def takes_groups(self) -> bool:
        """Whether the plug-in gets the group ids."""
        return "groups" in self._parameters or (self.whole_group and self._takes_any)

    @property
    def needed(self) -> list[str]:
        """Names of the arguments that the plug-in cannot do without: they have no default and no bound option."""
        return [
            p.name
            for p in self._parameters.values()
            if p.default is p.empty and p.kind not in _VARIADIC and p.name not in self._options
        ]

    @property
    def optional(self) -> list[str]:
        """Names of the columns that the plug-in reads only if the prompt file has them: their default is None."""
        named = self._parameters.values()
        return [p.name for p in named if p.default is None and p.name not in (*RESERVED, *OF_RECOVERED, *self._options)]

    def takes(self, name: str) -> bool:
        """Whether the plug-in can be given an argument of this name."""
        return self._takes_any or name in self._parameters

    def check(self, kind: str, columns: Collection[str], *, grouped: bool) -> None:
        """Refuse a call that could not work, before anything is scored.

        Args:
            kind: "images", "sounds" or "completions".
            columns: names of the prompt file's columns.
            grouped: whether group ids are known.

        Raises:
            ValueError: a column that the reward needs is missing, the group ids are missing, or the signature cannot be
                used.
        """
        if self.whole_group and not grouped:
            raise ValueError(f"reward {self.name!r} compares whole groups: pass `groups`, B group ids")
        only_positional = [p.name for p in self._parameters.values() if p.kind is p.POSITIONAL_ONLY]
        if only_positional:
            raise ValueError(
                f"reward {self.name!r}: rewards are called with keywords, but {', '.join(only_positional)} "
                "is positional-only; remove the `/` from its signature"
            )
        known = {kind, "prompts", *columns, *self._options, *(["groups"] if grouped else [])}
        if not self._takes_any and not self._parameters:
            raise ValueError(f"reward {self.name!r} takes no arguments; give it `{kind}`, `prompts` or columns")
        missing = [name for name in self.needed if name not in known]
        if "parts" in missing:
            raise ValueError(
                f"reward {self.name!r} scores the `parts` of completions, but this run does not cut completions; add a "
                "section such as parts: {cut: lines} to a recipe of text"
            )
        if OF_GIVEN[0] in missing:
            raise ValueError(
                f"reward {self.name!r} reads how the data rank given samples, and these samples are not given; use "
                "sampler.plan given (text: rollout.form given), and in evaluations other rewards, with evaluate.rewards"
            )
        for other in (name for name in KINDS if name != kind and name in missing):
            raise ValueError(
                f"reward {self.name!r} scores `{other}`, but the samples here are {kind}; choose a reward of {kind}"
            )
        if SAMPLING_RATE in missing and kind != "sounds":
            raise ValueError(
                f"reward {self.name!r} reads the `{SAMPLING_RATE}` of sounds, but the samples here are {kind}; choose "
                f"a reward of {kind}"
            )
        if missing:
            of_run = {"images": OF_GIVEN, "sounds": (SAMPLING_RATE,)}.get(kind, (*OF_TEXT, *OF_GIVEN, "parts"))
            own = sorted({*columns} - {*RESERVED, *of_run})
            added = sorted(known - {*own, *self._options})
            # A name that the run adds is no column to choose. It is meant only if there is a slip of the pen.
            advice = nearest(missing[0], [*own, *difflib.get_close_matches(missing[0], added, cutoff=0.8)])
            if missing[0] == "image":
                # The nearest name would be `images`, and these are the samples.
                advice = ". A column `image` has the picture of each prompt; of another name, write FILE?image=NAME"
            raise ValueError(
                f"reward {self.name!r} takes {', '.join(f'`{name}`' for name in missing)}, which the prompts "
                f"do not have; their columns: {', '.join(own) or 'none'}; the run adds {', '.join(added)}{advice}"
            )

    def score(
        self,
        samples: Tensor | Sequence[str],
        prompts: Sequence[str],
        columns: Mapping[str, Sequence[Any]] | None = None,
        groups: Sequence[int] | None = None,
    ) -> Scores:
        """Score B samples in one call.

        Args:
            samples: images [B, 3, H, W] or videos [B, F, 3, H, W], float in [0, 1]; sounds [B, C, S], float in
                [-1, 1]; or B completions.
            prompts: B strings.
            columns: name -> B values.
            groups: B group ids.

        Returns:
            Scores with float32 values [B] on the CPU, NaN where the reward does not apply.

        Raises:
            InvalidScores: the reward did not return one finite number, NaN or None for each sample.
            MissingDependency: the reward imports a package that is not installed.
            Quit: the reward raised something that is not an `Exception`, such as `SystemExit`.
            TimedOut: the call took longer than its time limit, or an earlier call still hangs.
        """
        arguments: dict[str, Any] = {"prompts": prompts}
        if isinstance(samples, Tensor) and self.device is not None:
            samples = samples.to(self.device)
        arguments[kind_of(samples)] = samples
        arguments.update(columns or {})
        if groups is not None and self.takes_groups:
            arguments["groups"] = list(groups)
        return self.call(arguments, len(prompts))

    def call(self, arguments: Mapping[str, Any], count: int) -> Scores:
        """Call the plug-in with the `arguments` that it takes, and return `count` scores; see `score`."""
        return self._within_limit(partial(self._call, self._taken(arguments), count))

    def gradient(
        self, images: Tensor, prompts: Sequence[str], columns: Mapping[str, Sequence[Any]] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Score B images or sounds in one call, and differentiate each score with respect to its own sample.

        Args:
            images: [B, 3, H, W] or videos [B, F, 3, H, W], float in [0, 1]; or sounds [B, C, S], float in [-1, 1].
            prompts: B strings.
            columns: name -> B values.

        Returns:
            The scores [B], float32, and their gradients, float32 of the shape of `images`. Both are on the reward's
            device. Where the reward does not apply, both are 0.

        Raises:
            NoGradient: the scores do not depend on the images differentiably.
            InvalidScores, MissingDependency, Quit, TimedOut: see `score`.
        """
        if self.remote or self.whole_group:
            why = "compares whole groups" if self.whole_group else "scores in another process"
            raise NoGradient(self.name, f"it {why}")
        leaf = images.detach().float() if self.device is None else images.detach().float().to(self.device)
        leaf = within_range(leaf).contiguous().requires_grad_()
        taken = self._taken({kind_of(leaf): leaf, "prompts": prompts, **(columns or {})})
        return self._within_limit(partial(self._differentiated, taken, leaf))

    def _differentiated(self, taken: Mapping[str, Any], leaf: Tensor) -> tuple[Tensor, Tensor]:
        with contained(), torch.enable_grad():
            try:
                result = self.function(**{**taken, **self._options})
            except ModuleNotFoundError as error:
                raise missing_dependency(self.name, error) from error
            except RuntimeError as error:
                if "requires grad" in str(error):
                    raise NoGradient(self.name, f"it leaves torch ({error})") from error
                raise
            found = result.values if isinstance(result, Scores) else result
            # This also refuses another number of scores, and scores that are infinite.
            applies = normalise(_detached(result), len(leaf), self.name).values.isfinite()
            if not isinstance(found, Tensor) or not found.requires_grad:
                what = "a tensor without a graph" if isinstance(found, Tensor) else f"a {type(found).__name__}"
                raise NoGradient(self.name, f"it returns {what}")
            applies = applies.to(found.device)
            try:
                (slope,) = torch.autograd.grad(found[applies].sum(), leaf, allow_unused=True)
            except RuntimeError as error:
                raise NoGradient(self.name, f"torch cannot compute it ({error})") from error
        if slope is None:
            raise NoGradient(self.name, "its scores do not depend on the images")
        there = applies.to(leaf.device).view(-1, *[1] * (leaf.ndim - 1))
        return torch.where(applies, found.detach().float(), 0.0), torch.where(there, slope, 0.0)

    def _taken(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that the plug-in takes."""
        taken = {
            name: value
            for name, value in arguments.items()
            if name in self._parameters or (self._takes_any and name not in FROM_RUN)
        }
        if SAMPLING_RATE in taken and "sounds" in arguments:
            taken[SAMPLING_RATE] = taken[SAMPLING_RATE][0]
        return taken

    def with_limit(self, seconds: float) -> Reward:
        """Return a copy of this reward with another time limit. The copy has its own thread for its calls."""
        other = copy.copy(self)
        other.limit = TimeLimit(seconds, self.name)
        return other

    def _within_limit(self, call: Callable[[], T]) -> T:
        return call() if self.limit is None else self.limit(call)

    def _call(self, taken: Mapping[str, Any], count: int) -> Scores:
        with contained():
            try:
                with torch.no_grad():
                    result = self.function(**{**taken, **self._options})
            except ModuleNotFoundError as error:
                raise missing_dependency(self.name, error) from error
            return normalise(result, count, self.name, taken.get("parts"))

    def close(self) -> None:
        """Call the plug-in's own `close`, if it has one. A plug-in that hangs is not closed.

        Raises:
            RewardError: the plug-in's `close` raised, or took longer than the time limit.
        """
        close = getattr(self._owner, "close", None)
        try:
            if callable(close) and not (self.limit and self.limit.given_up):
                self._within_limit(partial(_call_contained, close))
        except Exception as error:
            said = f"{type(error).__name__}: {str(error).rstrip('.')}"
            raise RewardError(f"reward {self.name!r} failed while it was closed: {said}.", self.name) from error
        finally:
            self.stop()

    def stop(self) -> None:
        """Let the thread of the time limit end, unless it hangs. The plug-in itself is not closed."""
        if self.limit is not None:
            self.limit.close()


def _detached(result: Any) -> Any:
    """A result of a reward whose values have no graph."""
    if isinstance(result, Tensor):
        return result.detach()
    if isinstance(result, Scores) and isinstance(result.values, Tensor):
        return replace(result, values=result.values.detach())
    return result


def _call_contained(call: Callable[[], object]) -> None:
    with contained():
        call()
