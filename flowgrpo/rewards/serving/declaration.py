"""What a server says about its reward, so that the reward `remote` can behave like the served reward."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..base import FROM_RUN, RESERVED, Reward, parameters

SAMPLES = ("images", "completions")


@dataclass(frozen=True)
class Declaration:
    """The properties of a reward that its callers have to know.

    Attributes:
        reward: the name of the reward in the metrics.
        samples: what the reward can score: "images", "completions" or both.
        whole_group: whether the reward compares the samples of a group, so that each call needs whole groups.
        groups: whether the reward takes group ids.
        batch_size: largest number of samples in one call of the reward, or None.
        needed: arguments without which the reward cannot be called.
        columns: columns of the prompt file that the reward takes; None if it takes any column.
        of_run: columns that a run adds and that the reward names; other rewards do not get them.
        options: digest of the reward's options. The options themselves are not sent, because they may be private.
    """

    reward: str
    samples: tuple[str, ...]
    whole_group: bool
    groups: bool
    batch_size: int | None
    needed: tuple[str, ...]
    columns: tuple[str, ...] | None
    of_run: tuple[str, ...]
    options: str = ""

    @classmethod
    def of(cls, reward: Reward, source: str, options: Mapping[str, Any]) -> Declaration:
        """Return the declaration of a reward.

        Args:
            reward: the reward to declare.
            source: the name from which the reward was built; it is a part of the digest.
            options: the options with which the reward was built.

        Raises:
            ValueError: the reward can score neither images nor completions.
        """
        needed = tuple(reward.needed)
        wanted = tuple(kind for kind in SAMPLES if kind in needed)
        samples = wanted or tuple(kind for kind in SAMPLES if reward.takes(kind))
        if not samples or len(wanted) > 1:
            raise ValueError(
                f"reward {reward.name!r} takes {', '.join(needed) or 'nothing'}; a reward that is served takes "
                "`images` or `completions`"
            )
        found = parameters(reward.function)
        takes_any = found is None or any(p.kind is p.VAR_KEYWORD for p in found.values())
        known = [name for name in found or () if name not in (*RESERVED, *options)]
        text = json.dumps([source, {name: options[name] for name in sorted(options)}], default=repr)
        return cls(
            reward.name,
            samples,
            reward.whole_group,
            reward.takes_groups,
            reward.batch_size,
            needed,
            None if takes_any else tuple(known),
            tuple(name for name in known if name in FROM_RUN),
            hashlib.sha256(text.encode()).hexdigest()[:16],
        )

    @property
    def fingerprint(self) -> str:
        """A hash that is equal for servers that serve the same reward with the same options."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def signature(self) -> inspect.Signature:
        """The reward's signature: arguments that it needs have no default, and all others have the default None."""
        needed = dict.fromkeys(("prompts", *self.needed, *(("groups",) if self.whole_group else ())))
        optional = dict.fromkeys(
            (*self.samples, *(("groups",) if self.groups else ()), *(self.columns or ()), *self.of_run)
        )
        keyword = inspect.Parameter.KEYWORD_ONLY
        found = [inspect.Parameter(name, keyword) for name in needed]
        found += [inspect.Parameter(name, keyword, default=None) for name in optional if name not in needed]
        if self.columns is None:
            found.append(inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD))
        return inspect.Signature(found)

    def as_json(self) -> dict[str, Any]:
        """Return the declaration as JSON, for the server to send."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: Any) -> Declaration:
        """Return the declaration that a server sent.

        Raises:
            ValueError: what the server sent is not a declaration.
        """
        try:
            columns, size = told["columns"], told["batch_size"]
            declaration = cls(
                str(told["reward"]),
                tuple(str(kind) for kind in told["samples"]),
                bool(told["whole_group"]),
                bool(told["groups"]),
                None if size is None else int(size),
                tuple(str(name) for name in told["needed"]),
                None if columns is None else tuple(str(name) for name in columns),
                tuple(str(name) for name in told["of_run"]),
                str(told["options"]),
            )
            # Only this shows whether every name is a valid argument name.
            _ = declaration.signature
            return declaration
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"it does not declare a reward: {type(error).__name__}: {error}") from None
