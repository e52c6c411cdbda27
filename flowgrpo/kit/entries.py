"""Rewards as they are named on a command line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..configs.yaml_text import parse_yaml_value
from ..rewards.base import RewardSpec

YARDSTICKS = {
    "images": (RewardSpec("gold", options={"dense": True}, label="gold_dense"), RewardSpec("proxy")),
    "sounds": (RewardSpec("loudness"),),
    "text": (RewardSpec("answer"),),
}
"""Rewards to compare a reward with, on samples of the embedded models and drawn sounds; the first for images and text
scores the true goal."""
KEYS = ("name", "options", "label", "time_limit")
OF_TRAINING = ("weight", "noise", "gate", "unlikely", "at_least")
"""Keys of an entry that say what a run does with the scores."""


def parse_reward(text: str, options: Mapping[str, Any] | None = None, time_limit: float | None = None) -> RewardSpec:
    """A reward from a name, `file.py:name` or `module:name`, or an entry of a recipe, `{name: …, options: {…}}`.

    Args:
        text: the name or the entry.
        options: further options.
        time_limit: seconds that one call may take, if the entry gives no limit.

    Raises:
        ValueError: the text is not an entry of a recipe, or the entry has an unknown key.
    """
    if re.match(r"\s*name\s*:\s", text):
        raise ValueError(f"{text!r:.80} is an entry of a recipe without its braces; write '{{{text.strip():.80}}}'")
    if not text.lstrip().startswith("{"):
        return RewardSpec(text, options=dict(options or {}), time_limit=time_limit)
    try:
        entry = parse_yaml_value(text)
    except ValueError as error:
        raise ValueError(f"{text!r:.80} is no entry of a recipe: {error}") from None
    if not isinstance(entry, dict):
        raise ValueError(f"{text!r} is no entry of a recipe; write {{name: gold, options: {{dense: true}}}}")
    # An empty `options:` is none, as in a recipe.
    given = {} if entry.get("options") is None else entry["options"]
    label = entry.get("label")
    named = isinstance(entry.get("name"), str) and isinstance(label, str | None)
    if not named or not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        raise ValueError(
            f"{text!r} is no entry of a recipe; write {{name: gold, options: {{dense: true}}, label: mine}}"
        )
    strange = [str(key) for key in entry if key not in KEYS]
    if strange:
        known = f"its keys are {', '.join(KEYS)}"
        about = " (the others say what training does with the scores)" if set(strange) <= {*OF_TRAINING} else ""
        raise ValueError(f"leave {', '.join(strange)} out of {text!r:.80}; here {known}{about}")
    return RewardSpec(
        entry["name"], options={**given, **(options or {})}, label=label,
        time_limit=entry.get("time_limit", time_limit),
    )  # fmt: skip


def parse_rewards(
    words: Sequence[str], assignments: Sequence[str] | None = None, time_limit: float | None = None
) -> list[RewardSpec]:
    """The rewards of a command line: every command on rewards reads them here.

    Args:
        words: names or entries, as for `parse_reward`.
        assignments: `key=value`, options of the only reward.
        time_limit: seconds that one call may take, for entries that give no limit.

    Raises:
        ValueError: as for `parse_reward`; an assignment is none; or there are several rewards that could be meant.
    """
    options = _options(assignments or [])
    if options and len(words) != 1:
        named = next((word for word in words if not word.lstrip().startswith("{")), "NAME")
        key, _, value = (assignments or [""])[0].partition("=")
        raise ValueError(
            f"--options {key}={value} says nothing about which of {len(words)} rewards it is for; write the options "
            f"into the reward: '{{name: {named}, options: {{{key}: {value}}}}}'"
        )
    return [parse_reward(word, options, time_limit) for word in words]


def _options(assignments: Sequence[str]) -> dict[str, Any]:
    """Options of a reward, with values as in a recipe."""
    found: dict[str, Any] = {}
    for word in assignments:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ValueError(f"--options {word!r} is not key=value; write for example --options target=0.4")
        try:
            found[name] = parse_yaml_value(value)
        except ValueError as error:
            raise ValueError(f"--options {word!r}: {error}") from None
    return found


def parse_range(text: str) -> tuple[float, float]:
    """`LOW,HIGH` as two numbers; raises ValueError for anything else."""
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--range is {text!r}; write two numbers, such as 0,1") from None
    if not low < high:
        raise ValueError(f"--range is {text!r}; write the smaller number first")
    return low, high
