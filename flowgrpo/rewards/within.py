"""Rewards that call another reward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from .base import InvalidScores, Reward, RewardError, RewardSpec, Scores
from .inputs import Inputs
from .registry import build, outline, servers
from .runner import OF, RewardSet


def inner_reward(outer: str, option: str, name: Any, options: Any) -> Reward:
    """Make the reward that an option of another reward names.

    Args:
        outer: name of the outer reward, for messages.
        option: the option that names the inner reward; the option of that name with `_options` has its options.
        name: as in a recipe.
        options: a mapping, or None.

    Raises:
        ValueError: the reward cannot be made; the message says why.
        MissingDependency: the reward needs a package that is not installed.
    """
    return _inner(build, outer, option, name, options)


def check_inner(outer: str, option: str, name: Any, options: Any) -> Reward:
    """Refuse a wrong name or wrong options of an inner reward, without making it; see `inner_reward`.

    Returns:
        The outline of the reward, see `registry.outline`.

    Raises:
        ValueError: the name or an option is wrong.
        MissingDependency: the reward needs a package that is not installed.
    """
    return _inner(outline, outer, option, name, options)


def inner_servers(name: Any, options: Any) -> list[str]:
    """The servers that an inner reward asks, in words; see `registry.servers`."""
    return servers(RewardSpec(name, options=options or {}))


def _inner(make: Callable[[RewardSpec], Reward], outer: str, option: str, name: Any, options: Any) -> Reward:
    if not isinstance(name, str) or not (options is None or isinstance(options, Mapping)):
        raise ValueError(
            f"{outer}: {option} is {name!r} and {option}_options {options!r}; give the name of a reward and a mapping "
            "of its options"
        )
    try:
        return make(RewardSpec(name, options=options or {}))
    except ValueError as error:
        raise ValueError(f"{outer}: the reward {name!r} for `{option}` cannot be made: {error}") from error


def signature_of(*names: str) -> inspect.Signature:
    """Return the signature of a reward that takes these arguments and any columns.

    An outer reward needs every argument that its inner reward needs. If the outer reward has this signature as
    `__signature__`, missing columns are reported before anything is scored.
    """
    return inspect.Signature(
        [
            *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in dict.fromkeys(names)),
            inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD),
        ]
    )


def score_within(reward: Reward, inputs: Inputs, role: str) -> Scores:
    """Score samples with an inner reward, from within a call of an outer reward.

    The calls respect the batch size and the groups of the inner reward.

    Args:
        reward: the inner reward.
        inputs: B samples.
        role: what the inner reward is for the outer one, such as "judge"; for messages.

    Returns:
        Scores with float32 values [B].

    Raises:
        InvalidScores: the inner reward did not return one number for each sample.
        RuntimeError: the inner reward raised; its exception is `__cause__`.
        MissingDependency: the inner reward imports a package that is not installed.
    """
    try:
        # The caller of the outer reward makes the retries, because the outer reward is remote whenever this one is.
        alone = RewardSet([reward], retries=0)
        alone.keeps_rendered = True
        scored = alone.score(inputs.samples, inputs.prompts, inputs.columns, inputs.groups)
    except RewardError as error:
        # The error gives rows of this call. Only the caller knows which samples they are.
        cause = error.__cause__
        if isinstance(cause, InvalidScores):
            raise InvalidScores(f"as the {role}, {cause}", error.index) from error
        raise RuntimeError(
            f"the {role} {reward.name!r} failed on prompt {error.prompt!r}: {type(cause).__name__}: {cause}"
        ) from cause
    return Scores(
        scored.values[:, 0], scored.sub_scores.get(reward.name, {}), scored.notes.get(reward.name, ()),
        answers=scored.answers.get(reward.name, ()), parts=scored.parts.get(reward.name, ()),
        rendered={label.removeprefix(reward.name).removeprefix(OF): made for label, made in scored.rendered.items()},
    )  # fmt: skip
