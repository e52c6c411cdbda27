"""What a part needs from the other parts of a recipe, declared next to its code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .choice import Choice, choices, chosen, default_of, options_model, plain, value_at
from .kinds import KINDS
from .section import Section
from .traits import OFFERED, offering

T = TypeVar("T", bound=Callable[..., Any])


class Something:
    """Means any value that is neither left out nor empty."""

    def __repr__(self) -> str:
        return "something"


SOMETHING = Something()


class Stated:
    """Means any value that is not left out, including 0 and an empty list."""

    def __repr__(self) -> str:
        return "a value"


STATED = Stated()


@dataclass(frozen=True)
class Need:
    """A condition of a part: a key of the recipe must have one of some values.

    Attributes:
        key: dotted key. If its value is a part, the name of the part counts.
        values: the allowed values. `SOMETHING` allows all values that are not empty, `STATED` allows all values that
            are not left out, and None allows a key that is left out.
        why: the rest of a sentence whose subject is the part, such as "compares states with what they become".
        unless: name of an option of the part itself. If the option is left out, empty, 0 or false, the need does not
            apply. None if the need always applies.
        task: task of the recipes to which the need applies, "images" or "text"; None for both.
        mend: what to write instead; made from `values` if it is None.
    """

    key: str
    values: tuple[Any, ...]
    why: str
    unless: str | None = None
    task: str | None = None
    mend: str | None = None

    def fault(self, recipe: Any, who: str) -> str | None:
        """The message about the part called `who`; None if the need is met."""
        if self.task is not None and recipe.task != self.task:
            return None
        found = value_at(recipe, self.key)
        if found in self.values or (SOMETHING in self.values and found not in (None, [], {}, False, 0)):
            return None
        if STATED in self.values and found is not None:
            return None
        wanted = " or ".join("nothing" if v is None else "a value" if v is SOMETHING else str(v) for v in self.values)
        has = "is left out" if found in (None, [], {}) else f"is {_shown(found)}"
        mend = f"leave {self.key} out" if self.values == (None,) else f"use {self.key} {wanted}"
        mend = f"set {self.key}" if self.values == (SOMETHING,) else mend
        return f"{who} {self.why}, and {self.key} {has}; {self.mend or mend}"


def _shown(found: Any) -> str:
    """A value of a recipe in a message; the parts of a list by their names."""
    if isinstance(found, list):
        return ", ".join(one.short if isinstance(one, Choice) else str(one) for one in found)
    return str(found)


Rule = Callable[..., "list[str]"]


def needs(*wanted: Need | Rule) -> Callable[[T], T]:
    """Let a part say what it needs from a recipe; a section says it in its attribute `needs`.

    Args:
        wanted: each a `Need`, or a function `(recipe, choice) -> list of faults` for what a `Need` cannot express.
    """

    def marked(part: T) -> T:
        part.needs = wanted  # type: ignore[attr-defined]
        return part

    return marked


def several_updates(why: str) -> Rule:
    """A need for more than one optimizer step per rollout; `why` is the rest of a sentence about the part."""

    def rule(recipe: Any, choice: Choice) -> list[str]:
        if recipe.optimizer.updates * recipe.optimizer.epochs > 1:
            return []
        return [
            f"{choice.kind} {choice.short} {why}. With one optimizer step per rollout, every loss is computed "
            "before the policy moves; use optimizer.updates or optimizer.epochs above 1"
        ]

    return rule


def at_least(key: str, least: Callable[[Any, Choice], int], why: str, mend: str = "use at least {least}") -> Rule:
    """A need of a number in the recipe that is not too small for the part.

    Args:
        key: dotted key of the number.
        least: the smallest number that fits, as a function of the recipe and the chosen part.
        why: the rest of a sentence whose subject is the part; `{least}` in it is the smallest number.
        mend: what to write instead; may hold `{least}` too.
    """

    def rule(recipe: Any, choice: Choice) -> list[str]:
        found, wanted = value_at(recipe, key), least(recipe, choice)
        if found >= wanted:
            return []
        told = f"{why}, and {key} is {found}; {mend}".format(least=wanted)
        return [f"{choice.kind} {choice.short} {told}"]

    return rule


def alone(offer: str, why: str) -> Rule:
    """A need that no other part of the recipe offers something.

    Args:
        offer: a key of `OFFERED`.
        why: the rest of a sentence whose subject is the part.
    """

    def rule(recipe: Any, choice: Choice) -> list[str]:
        others = [other for _, other in choices(recipe) if other is not choice and offering(other, offer)]
        does = OFFERED[offer].removeprefix("it ")
        return [
            f"{choice.kind} {choice.short} {why}, and {other.kind} {other.short} {does}; leave one of them out"
            for other in others
        ]

    return rule


def one_round(why: str, unless: str | None = None) -> Rule:
    """A need that every prompt is sampled in one round, without `rollout.budget` and `data.templates`.

    Args:
        why: the rest of a sentence whose subject is the part; a whole clause for a section.
        unless: name of an option of the part. If the option is left out, the need does not apply.
    """

    def rule(recipe: Any, place: Any) -> list[str]:
        if unless is not None and place.get(unless) is None:
            return []
        rounds = {"rollout.budget": recipe.rollout.budget, "data.templates": recipe.data.templates}
        who = f"{place.kind} {place.short} " if isinstance(place, Choice) else ""
        return [
            f"{who}{why}, and {key} samples a prompt in several rounds; leave one of them out"
            for key, given in rounds.items()
            if given
        ]

    return rule


def unscored(recipe: Any, columns: Sequence[str]) -> str | None:
    """The message about a reward `given` that has not one column of scores for each column of given samples."""
    for entry in recipe.rewards:
        scores = entry.options.get("scores") if entry.name == "given" else None
        if isinstance(scores, list) and scores and len(scores) != len(columns):
            return (
                f"reward {entry.known_as} names {len(scores)} columns of scores, and {', '.join(columns)} are "
                f"{len(columns)} columns of samples; name one column of scores for each, in the same order"
            )
    return None


def unscored_counts(recipe: Any, who: str) -> list[str]:
    """A fault of a loss of pairs: without a baseline, a sample without a score would count as one with the score 0."""
    chosen = recipe.advantage
    if chosen is None or chosen.get("baseline") != "none":
        return []
    return [
        f"{who} compares the best and the worst sample of a prompt, and with advantage.baseline none a sample without "
        "a score would have the advantage 0; use advantage.baseline mean"
    ]


def idle(*options: str, where: Callable[[Choice], bool], why: str) -> Rule:
    """A rule that options keep their defaults if another option leaves them without effect.

    Args:
        options: options of the part.
        where: whether the options have no effect, as a function of the chosen part.
        why: a clause that says why, such as "with scale none nothing is divided".
    """

    def rule(recipe: Any, choice: Choice) -> list[str]:
        return [fault for option in options if (fault := without_effect(choice, option, why))] if where(choice) else []

    return rule


def without_effect(choice: Choice, option: str, why: str) -> str | None:
    """The message for an option that has no effect; None if it has its default value, or if it has no default.

    Args:
        choice: the part.
        option: the option of the part.
        why: a clause that says why the option has no effect.
    """
    field = options_model(choice.kind, choice.name).model_fields[option]
    if field.is_required():
        return None
    return _of_no_use(f"{choice.kind} {choice.short}: {option}", option, choice[option], default_of(field), why)


def unused(section: Section, options: Sequence[str], why: str) -> list[str]:
    """The messages for keys of a section that have no effect but do not have their defaults.

    Args:
        section: the section with the keys.
        options: the keys that have no effect.
        why: a clause that says why they have no effect.
    """
    fields = type(section).model_fields
    found = [
        _of_no_use(option, option, getattr(section, option), default_of(fields[option]), why) for option in options
    ]
    return [fault for fault in found if fault]


def _of_no_use(who: str, option: str, value: Any, default: Any, why: str) -> str | None:
    usual = default if default is None or not isinstance(value, Choice) else chosen(value.kind, default)
    if plain(value) == plain(usual):
        return None
    usual = "null" if default is None else default
    return (
        f"{who} is {_written(value)}, and {why}, so it has no effect; leave it out, or write its default, {option}: "
        f"{usual}"
    )


def _written(value: Any) -> Any:
    """A value as a message shows it."""
    if not isinstance(value, Choice):
        return value
    options = ", ".join(f"{name} {plain(option)}" for name, option in value.options.items())
    return f"{value.short} with {options}" if options else value.short


def unmet(recipe: Any) -> list[str]:
    """Messages about the unmet needs of the parts and sections of a recipe."""
    faults = []
    for who, place, need in _all_needs(recipe):
        if not isinstance(need, Need):
            faults += need(recipe, place)
        elif _holds(need, place):
            fault = need.fault(recipe, who)
            faults += [fault] if fault else []
    # Several entries of a list may have the same need.
    return list(dict.fromkeys(faults))


def asking(recipe: Any, key: str) -> list[str]:
    """The parts and sections of a recipe that need a value at a key."""
    return [who for who, place, need in _all_needs(recipe) if isinstance(need, Need) and need.key == key
            and need.values != (None,) and _holds(need, place)]  # fmt: skip


def _holds(need: Need, place: Choice | Section) -> bool:
    """Whether a need applies, given the option of its part or section on which it depends."""
    if need.unless is None:
        return True
    given = place.get(need.unless) if isinstance(place, Choice) else getattr(place, need.unless)
    return given not in (None, False, 0, [])


def _all_needs(recipe: Any) -> list[tuple[str, Any, Need | Rule]]:
    """For every need: the name of the part or section, the part or section itself, and the need."""
    found: list[tuple[str, Any, Need | Rule]] = [
        (f"{choice.kind} {choice.short}", choice, need)
        for _, choice in choices(recipe)
        for need in (*KINDS[choice.kind].needs, *getattr(choice.target, "needs", ()))
    ]
    for key, section in _sections(recipe):
        for need in section.needs:
            option = need.unless if isinstance(need, Need) else None
            found.append((f"{key}.{option}" if option else key, section, need))
    return found


def _sections(section: Section, key: str = "") -> list[tuple[str, Section]]:
    """A section and all sections within it, with their dotted keys."""
    found = [(key, section)]
    for name in type(section).model_fields:
        value, place = getattr(section, name), f"{key}.{name}" if key else name
        for inner, where in [(value, place)] if not isinstance(value, list) else _numbered(value, place):
            if isinstance(inner, Section):
                found += _sections(inner, where)
    return found


def _numbered(entries: list[Any], place: str) -> list[tuple[Any, str]]:
    return [(entry, f"{place}.{number}") for number, entry in enumerate(entries)]
