"""Rewards that score with another reward."""

from __future__ import annotations

import inspect

from .base import InvalidScores, Reward, RewardError, Scores
from .inputs import Inputs
from .runner import RewardSet


def signature_of(*names: str) -> inspect.Signature:
    """The signature of a reward that takes these arguments and any columns.

    What the reward within needs the outer one needs: with this as `__signature__` it is checked before anything is
    scored.
    """
    return inspect.Signature(
        [
            *(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in dict.fromkeys(names)),
            inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD),
        ]
    )


def score_within(reward: Reward, inputs: Inputs, role: str) -> Scores:
    """Score samples with a reward, in calls as it wants them, from within the call of another.

    Args:
        reward: the one within.
        inputs: B samples.
        role: what it is for the outer reward, such as "judge"; for messages.

    Returns:
        Scores with float32 values [B].

    Raises:
        InvalidScores: it returned something that is not one number a sample.
        RuntimeError: it raised; its exception is `__cause__`.
        MissingDependency: it imports a package that is not installed.
    """
    try:
        # Retries are for whoever calls the outer reward, which is as remote as this one.
        scored = RewardSet([reward], retries=0).score(inputs.samples, inputs.prompts, inputs.columns, inputs.groups)
    except RewardError as error:
        # It counts rows of this call, which only the caller can trace to a sample.
        cause = error.__cause__
        if isinstance(cause, InvalidScores):
            raise InvalidScores(f"as the {role}, {cause}", error.index) from error
        raise RuntimeError(
            f"the {role} {reward.name!r} failed on prompt {error.prompt!r}: {type(cause).__name__}: {cause}"
        ) from cause
    return Scores(
        scored.values[:, 0], scored.sub_scores.get(reward.name, {}), scored.notes.get(reward.name, ()),
        answers=scored.answers.get(reward.name, ()), parts=scored.parts.get(reward.name, ()),
    )  # fmt: skip
