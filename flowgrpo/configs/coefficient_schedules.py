"""Coefficients that change over a run: the number at a key of the recipe depends on the iteration."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from ..parts.choice import Choice, options_model
from ..parts.needs import unmet, unused
from ..parts.section import Section

R = TypeVar("R", bound=Section)
Shape = Literal["linear", "cosine", "steps"]
_Path = tuple[str | int, ...]
"""The place of a number in a recipe: names of keys and options, and numbers of entries of lists."""

MOVING = (
    "rewards.NAME.weight", "penalties.NAME.OPTION", "objective.OPTION", "objective.PART.OPTION",
    "objective.entropy.value", "objective.entropy.target", "sampler.kernel.OPTION",
)  # fmt: skip
"""The keys that may have a schedule."""
_WHY_NOT = {
    "optimizer": "the learning rate has schedules of its own, optimizer.warmup and optimizer.schedule, and the other "
    "settings of the optimizer are read once, when the run begins",
    "generation": "completions are sampled and scored with one temperature in all of a run",
    "rollout": "all iterations of a run have one size",
    "evaluate": "evaluations are compared with each other, so all of them are made in one way",
}
_FOUND_BY = {"lower": "balance", "upper": "balance", "lam": "variance"}
"""Option of a surrogate -> the option of the objective that may find its value."""


def scheduled_value(start: float, end: float, done: float, *, shape: Shape = "linear", levels: int = 2) -> float:
    """The value after a share `done` in [0, 1] of the way from `start` to `end`.

    `linear` moves at one speed. `cosine` begins and ends slowly: (1 - cos(pi done)) / 2 of the way is done. `steps` has
    `levels` stretches of equal length, each with a constant value; the first has `start`, and the last has `end`.
    """
    if shape == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    elif shape == "steps":
        done = min(math.floor(done * levels), levels - 1) / (levels - 1)
    # The sum may miss the end by a rounding.
    return end if done == 1 else start + (end - start) * done


class ScheduleConfig(Section):
    """A coefficient that changes over the run, such as the weight of a process reward (Atom-Searcher, 2508.12800).

    Its value follows from the number of the iteration alone.
    """

    key: str = Field(
        min_length=1,
        description=f"Key of a number, as overrides write it: {', '.join(f'`{key}`' for key in MOVING)}.",
    )
    start: float | None = Field(None, description="First value; by default the number that the recipe has at `key`.")
    end: float = Field(description="Last value. The weight of a penalty or of a teacher may end at 0.")
    over: int = Field(
        ge=1,
        description="Iterations from the first value to the last. They do not depend on `run.iterations`, so a longer "
        "run begins as a shorter one.",
    )
    after: int = Field(0, ge=0, description="Iterations that have the first value before it moves.")
    shape: Shape = Field(
        "linear",
        description="How the value moves: `linear` at one speed, `cosine` with a slow begin and end, or in `steps` of "
        "equal length.",
    )
    levels: int = Field(2, ge=2, description="With `steps`: how many different values there are.")

    def first(self, recipe: Any) -> float:
        """The first value, in a recipe that has the schedule."""
        found: float = _at(recipe, _path(recipe, self.key)) if self.start is None else self.start
        return found

    def value(self, recipe: Any, iteration: int) -> float:
        """The value in an iteration, counted from 0, in a recipe that has the schedule."""
        done = min(max((iteration - self.after) / self.over, 0.0), 1.0)
        return scheduled_value(self.first(recipe), self.end, done, shape=self.shape, levels=self.levels)

    @property
    def last_turn(self) -> int:
        """The first iteration that has the last value."""
        share = (self.levels - 1) / self.levels if self.shape == "steps" else 1.0
        return self.after + math.ceil(self.over * share)


def values_at(recipe: Any, iteration: int) -> dict[str, float]:
    """The values that coefficients with a schedule have in an iteration, by key."""
    return {one.key: one.value(recipe, iteration) for one in recipe.schedules}


def recipe_at(recipe: R, iteration: int) -> R:
    """The recipe with the values of an iteration; the recipe itself if nothing has a schedule."""
    for key, value in values_at(recipe, iteration).items():
        recipe = _with(recipe, _path(recipe, key), value)
    return recipe


def schedule_lines(recipe: Any) -> Iterator[str]:
    """A line on each coefficient with a schedule: where it begins and ends, and when."""
    last = recipe.run.iterations - 1
    for one in recipe.schedules:
        shape = {"linear": "", "cosine": " by a cosine", "steps": f" in {one.levels} levels"}[one.shape]
        begin, held = one.first(recipe), f"from iteration {one.after} on, " if one.after else ""
        line = f"{one.key} goes from {begin:g} to {one.end:g}{shape}, {held}over {one.over} iterations"
        if last < one.last_turn:
            line += f"; the run ends before, at {one.value(recipe, last):g}"
        yield line


def schedule_faults(recipe: Any, _: Any) -> list[str]:
    """What is wrong with the schedules of a recipe: their keys, their values, or the recipes that they lead to."""
    faults, paths = list[str](), list[_Path]()
    for number, one in enumerate(recipe.schedules):
        who = f"schedules.{number}"
        if one.shape != "steps":
            faults += [f"{who}: {fault}" for fault in unused(one, ["levels"], "only shape steps has levels")]
        try:
            path = _path(recipe, one.key)
            _require_moving(recipe, one.key, path)
            for name in ("start", "end"):
                if (value := getattr(one, name)) is not None:
                    _require_in_range(recipe, one.key, path, name, value)
        except ValueError as error:
            faults.append(f"{who}: {error}")
            continue
        if path in paths:
            faults.append(f"{who}: {one.key} has two schedules; write one")
        paths.append(path)
    if faults or not recipe.schedules:
        return faults
    return [*_reward_faults(recipe), *_on_the_way(recipe)]


def _on_the_way(recipe: Any) -> Iterator[str]:
    """What the parts of a recipe need of the numbers that a schedule leads to."""

    def steady(one: Any) -> list[str]:
        return unmet(one.model_copy(update={"schedules": []}))

    known = set(steady(recipe))
    for turn in sorted({0, *(one.last_turn for one in recipe.schedules)}):
        found = steady(recipe_at(recipe, turn))
        yield from (f"schedules: from iteration {turn} on, {fault}" for fault in found if fault not in known)
        known.update(found)


def _reward_faults(recipe: Any) -> Iterator[str]:
    """A reward of weight 0 is left out, so another one has to count, and parts that count rewards have to agree."""
    mine = [one for one in recipe.schedules if _path(recipe, one.key)[0] == "rewards"]
    for one in mine:
        if one.first(recipe) * one.end < 0:
            yield f"schedules: {one.key} changes its sign; let `start` and `end` have one sign"
            return
    if not any(one.first(recipe) * one.end == 0 for one in mine):
        return
    if alone := [one.known_as for one in recipe.rewards if one.at_least is not None or one.apart]:
        yield (
            f"schedules let the weight of a reward be 0, and reward {alone[0]} has `at_least` or `gate.apart`, which "
            "counts the rewards; leave one of them out, or let `start` and `end` be other numbers than 0"
        )
    for turn in sorted({0, *(one.last_turn for one in mine)}):
        if not any(reward.weight for reward in recipe_at(recipe, turn).rewards):
            yield (
                f"schedules: from iteration {turn} on, every reward has weight 0, so nothing is optimised; let one of "
                "them end, or start, at another weight"
            )
            return


def _require_moving(recipe: Any, key: str, path: _Path) -> None:
    """Refuse a key whose number is read once, or is found by something else."""
    head, owner, value = path[0], _at(recipe, path[:-1]), _at(recipe, path)
    option, entropy = path[-1], path[:2] == ("objective", "entropy")
    moves = {
        "rewards": path[2:] == ("weight",),
        "penalties": len(path) == 3,
        "objective": isinstance(owner, Choice) or entropy,
        "sampler": len(path) == 3 and path[1] == "kernel",
    }
    if not moves.get(str(head)) or (entropy and option not in ("value", "target")) or len(path) == 1:
        why = _WHY_NOT.get(str(head), "it is read once, when the run begins")
        raise ValueError(f"{key} cannot change over a run: {why}. These keys can: {', '.join(MOVING)}")
    if value is None:
        raise ValueError(f"{key} is left out, so nothing uses it; write its first value there")
    if not isinstance(value, float) or not math.isfinite(value):
        raise ValueError(
            f"{key} is {value if not isinstance(value, Choice | Section) else 'a section'}, and only a finite number "
            "that may have a fraction can change over a run; name another key"
        )
    if head == "rewards" and owner.at_least is not None:
        raise ValueError(
            f"{key} is the weight of a reward with `at_least`, which extension multipliers finds; leave one of them out"
        )
    if head == "rewards" and value == 0:
        raise ValueError(
            f"{key} is 0, so the reward is only recorded; write another weight there, and `start: 0` in the schedule"
        )
    finder = _FOUND_BY.get(str(option)) if path[:2] == ("objective", "surrogate") else None
    if finder is not None and recipe.objective.get(finder) is not None:
        raise ValueError(f"{key} is found by objective.{finder}; leave one of them out")
    if entropy and option == "value" and owner.target is not None:
        raise ValueError(
            f"{key} moves by itself, because objective.entropy.target holds the entropy; leave the target out, or move "
            "the target"
        )


def _require_in_range(recipe: Any, key: str, path: _Path, name: str, value: float) -> None:
    """Refuse a value that the recipe could not have at the key; a weight may be 0."""
    if path[:2] == ("sampler", "kernel") and value == 0:
        raise ValueError(
            f"{name} is 0, which takes the noise out of the steps, and a step without noise has no density; write a "
            "number above 0"
        )
    if path[-1] == "weight" and value == 0:
        return
    owner = _at(recipe, path[:-1])
    fields = (options_model(owner.kind, owner.name) if isinstance(owner, Choice) else type(owner)).model_fields
    field = fields[str(path[-1])]
    allowed: Any = field.annotation
    for limit in field.metadata:
        allowed = Annotated[allowed, limit]
    try:
        TypeAdapter(allowed).validate_python(value)
    except ValidationError as error:
        said = error.errors()[0]["msg"].removeprefix("Input ")
        raise ValueError(f"{name} is {value:g}, and {key} {said}; write another number") from None


def _path(recipe: Any, key: str) -> _Path:
    """The place of a key, in which an entry of a list is given by its label or its name.

    Raises:
        ValueError: there is no such place.
    """
    place, found = recipe, list[str | int]()
    for word in key.split("."):
        known = _inner(place)
        if word not in known:
            where = ".".join(map(str, found)) or "the recipe"
            has = f"there are {', '.join(dict.fromkeys(known))}" if known else "it has no keys"
            raise ValueError(f"key is {key}, and {where} has no {word!r}; {has}")
        step = known[word]
        found.append(step)
        place = _at(place, (step,))
    return tuple(found)


def _inner(place: Any) -> dict[str, str | int]:
    """What a key may name within a place of a recipe, with the step that leads there."""
    if isinstance(place, list):
        names: dict[str, str | int] = {}
        for number, entry in enumerate(place):
            label = str(getattr(entry, "known_as", None) or getattr(entry, "name", ""))
            names.setdefault(label, number)
            names.setdefault(label.rpartition(":")[2], number)
        return names
    if isinstance(place, Choice):
        return {name: name for name in place.options}
    return {name: name for name in type(place).model_fields} if isinstance(place, Section) else {}


def _at(place: Any, path: _Path) -> Any:
    """What is at a place of a recipe."""
    for step in path:
        place = place[step] if isinstance(place, Choice | list) else getattr(place, str(step))  # type: ignore[index]
    return place


def _with(place: Any, path: _Path, value: float) -> Any:
    """A copy of a place of a recipe, with a value at a path within it."""
    if not path:
        return value
    step, inner = path[0], _with(_at(place, path[:1]), path[1:], value)
    if isinstance(place, list):
        return [inner if number == step else entry for number, entry in enumerate(place)]
    if isinstance(place, Choice):
        return replace(place, options={**place.options, str(step): inner})
    return place.model_copy(update={str(step): inner})
