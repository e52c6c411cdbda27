"""How often rewards agree with people's choices, from the file that `flowgrpo gallery --vote` writes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..rewards.base import RewardSpec
from ..votes.file import votes_file
from ..votes.interval import wilson
from ..votes.preferences import Preference, read_preferences, unreadable_note
from .folder import LabelledPicture, materials, picture_of
from .material import Material
from .trial import Trial

Key = tuple[str, str, frozenset[tuple[str, str]]]
"""A sample, its prompt, and the columns of the prompt: prompts with other pictures may have the same words."""


@dataclass(frozen=True)
class Agreement:
    """How often one reward agrees with the pairs of a file of votes.

    Attributes:
        name: name of the reward.
        right: pairs whose chosen sample it scores higher.
        wrong: pairs whose chosen sample it scores lower.
        equal: pairs whose two samples get the same score.
        absent: pairs of which it scores only one sample, or no sample.
        report: what the reward says of itself; "" for nothing.
    """

    name: str
    right: int
    wrong: int
    equal: int
    absent: int
    report: str = ""

    @property
    def share(self) -> float | None:
        """Share of right pairs among the pairs with two different scores; None if there is no such pair."""
        told = self.right + self.wrong
        return self.right / told if told else None

    def text(self) -> str:
        """The agreement as a line of text, and what the reward says of itself as another line."""
        told = self.right + self.wrong
        rest = f"; {self.equal} with equal scores, {self.absent} not scored"
        rest += f"\n  it says of itself: {self.report}" if self.report else ""
        if self.share is None:
            return f"{self.name}: tells no pair apart{rest}"
        low, high = wilson(self.right, told)
        return f"{self.name}: agrees on {self.share:.0%} of {told} pairs (95 %: {low:.0%} to {high:.0%}){rest}"

    def record(self) -> dict[str, Any]:
        """The agreement as a dictionary for JSON."""
        low, high = wilson(self.right, self.right + self.wrong)
        counts = {"right": self.right, "wrong": self.wrong, "equal": self.equal, "absent": self.absent}
        return {"reward": self.name, **counts, "share": self.share, "low": low, "high": high}


def agreement_with(specs: Sequence[RewardSpec], votes: Path) -> list[Agreement]:
    """Compare each reward with the pairs that people decided; ties, skipped pairs and revoked choices do not count.

    The reward gets a prompt's columns from the votes. In files of earlier versions all values are text; there a value
    that is valid JSON is decoded.

    Args:
        specs: the rewards.
        votes: the file of votes, or a folder of a run with `votes.jsonl`.

    Raises:
        ValueError: see `read_votes`; the file holds no decided pair; an image is missing, or is not the one that was
            voted on; or a reward cannot be made, or fails.
        MissingDependency: a reward needs a package that is not installed.
    """
    votes = votes_file(votes)
    preferences = read_preferences(votes)
    if not preferences:
        fault = "holds no decided pair" if votes.exists() else "does not exist"
        raise ValueError(f"{votes} {fault}; vote with `flowgrpo gallery RUN --vote` first")
    pictures = isinstance(preferences[0].chosen, Path)
    for one in preferences:
        if isinstance(one.chosen, Path) != pictures:
            kinds = ("completions", "pictures") if pictures else ("pictures", "completions")
            raise ValueError(
                f"{votes}, line {one.vote.line} is a choice between {kinds[0]}, and line {preferences[0].vote.line} "
                f"between {kinds[1]}; put them into two files"
            )
    parts = _pictures(preferences, votes) if pictures else [_completions(preferences)]
    found: list[Agreement] = []
    for spec in specs:
        trial = Trial(spec, "images" if pictures else "text")
        try:
            if trial.name in {one.name for one in found}:
                raise ValueError(f"two rewards are called {trial.name!r}; give one of them a `label`")
            found.append(_agreement(trial, parts, preferences))
        finally:
            trial.close()
    return found


def notes_on(votes: Path) -> list[str]:
    """What a reader of the agreements has to know about the file of votes."""
    unread = unreadable_note(votes)
    return [] if unread is None else [unread]


def as_json(agreements: Sequence[Agreement]) -> str:
    """The agreements, for `--json`."""
    return json.dumps([agreement.record() for agreement in agreements], indent=2, ensure_ascii=False) + "\n"


def _agreement(trial: Trial, parts: Sequence[Material], preferences: Sequence[Preference]) -> Agreement:
    scores: dict[Key, float] = {}
    for material in parts:
        trial.require_columns(material)
        scored = trial.score(material)
        if scored.failed:
            raise ValueError(f"reward {trial.name!r} fails on {material.source}: {scored.failure}")
        asked = [{name: values[row] for name, values in material.columns.items()} for row in range(len(material))]
        keys = map(_key, material.labels, material.prompts, asked)
        scores |= dict(zip(keys, scored.values.tolist(), strict=True))
    gaps = [scores[_key_of(one, one.chosen)] - scores[_key_of(one, one.rejected)] for one in preferences]
    return Agreement(
        trial.name,
        right=sum(gap > 0 for gap in gaps),
        wrong=sum(gap < 0 for gap in gaps),
        equal=sum(gap == 0 for gap in gaps),
        absent=sum(math.isnan(gap) for gap in gaps),
        report=trial.reward.report,
    )


def _sides(preferences: Sequence[Preference]) -> dict[Key, dict[str, Any]]:
    """Every sample once, with the columns of its prompt."""
    return {_key_of(one, side): _columns(one) for one in preferences for side in (one.chosen, one.rejected)}


def _key_of(preference: Preference, side: Path | str) -> Key:
    return _key(str(side), preference.prompt, _columns(preference))


def _key(side: str, prompt: str, columns: Mapping[str, Any]) -> Key:
    return side, prompt, frozenset((name, repr(value)) for name, value in columns.items() if value is not None)


def _columns(preference: Preference) -> dict[str, Any]:
    if preference.vote.values is not None:
        return preference.vote.values
    return {name: _value(text) for name, text in preference.vote.columns.items()}


def _pictures(preferences: Sequence[Preference], votes: Path) -> list[Material]:
    found: list[LabelledPicture] = []
    voted = {
        str(file): (one, side)
        for one in preferences
        for file, side in zip((one.chosen, one.rejected), one.vote.preferred or ())
    }
    for (file, prompt, _), columns in _sides(preferences).items():
        one, side = voted[file]
        if not Path(file).is_file():
            raise ValueError(f"{file}, which was voted on, is missing; put it back, or vote on another run")
        if not side.unchanged(votes.parent):
            raise ValueError(
                f"{votes}, line {one.vote.line}: {file} has changed since the vote; put the picture back, or take the "
                "line out"
            )
        found.append(picture_of(Path(file), prompt, columns, side.frames or 1))
    return list(materials(found))


def _completions(preferences: Sequence[Preference]) -> Material:
    sides = _sides(preferences)
    prompts = [prompt for _, prompt, _ in sides]
    asked = [key[1:] for key in sides]
    ids = {prompt: number for number, prompt in enumerate(dict.fromkeys(asked))}
    names = dict.fromkeys(name for columns in sides.values() for name in columns)
    return Material(
        [text for text, *_ in sides],
        prompts,
        {name: [columns.get(name) for columns in sides.values()] for name in names},
        [ids[prompt] for prompt in asked],
        [text for text, *_ in sides],
        f"{len(sides)} completions of {len(ids)} prompts",
    )


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
