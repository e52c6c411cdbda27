"""GenEval's rules: what detected objects say about a prompt's objects, counts, colours and positions.

Ghosh et al., "GenEval: An Object-Focused Framework for Evaluating Text-to-Image Alignment" (2310.11513), section 3.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...parts.plugins import nearest
from ..backbones.detector import Detection

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")
MARGIN = 0.1


@dataclass(frozen=True)
class Wanted:
    """One entry of `include` or `exclude`.

    Attributes:
        label: class of the objects.
        count: how many objects; for `exclude`, the number from which on there are too many.
        colour: colour of the objects, or None.
        relation: where the objects are, relative to the objects of the entry with the number `other`; or None.
        other: number of an earlier entry.
    """

    label: str
    count: int
    colour: str | None = None
    relation: str | None = None
    other: int = 0


@dataclass(frozen=True)
class Verdict:
    """What the rules say about one image.

    Attributes:
        benchmark: whether the image passes the benchmark: at least the wanted objects, and fewer excluded ones than
            their limit.
        strict: whether all requirements are met with exactly the wanted counts; excluded objects do not matter.
        partial: mean over all requirements of the degree to which each is met, in [0, 1]; 1 if `strict` is true.
        faults: the requirements that are not met, in words.
    """

    benchmark: bool
    strict: bool
    partial: float
    faults: tuple[str, ...]


def read_wanted(entries: Any, labels: Sequence[str]) -> tuple[Wanted, ...]:
    """Read a GenEval column: a list of `{class, count, color?, position?: [relation, index]}`, or its JSON text.

    Raises:
        ValueError: an entry has another form, or asks for a class, colour or relation that is not known.
    """
    try:
        entries = json.loads(entries) if isinstance(entries, str) else entries
    except ValueError:
        raise ValueError(
            f"geneval: {entries!r:.80} is not a list of objects such as [{{class: dog, count: 1}}]"
        ) from None
    if not isinstance(entries, Sequence) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ValueError(f"geneval: {entries!r:.80} is not a list of objects such as [{{class: dog, count: 1}}]")
    return tuple(_read_entry(entry, place, labels) for place, entry in enumerate(entries))


def _read_entry(entry: Mapping[str, Any], place: int, labels: Sequence[str]) -> Wanted:
    label, count, colour = entry.get("class"), entry.get("count", 1), entry.get("color")
    position = entry.get("position") or (None, 0)
    relation, other = position if isinstance(position, (list, tuple)) and len(position) == 2 else (position, -1)
    if not isinstance(label, str) or label not in labels:
        raise ValueError(f"geneval: the detector has no class {label!r}{nearest(str(label), labels)}")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"geneval: the count of {label!r} is {count!r}; give 1 or more")
    if colour is not None and colour not in COLOURS:
        raise ValueError(f"geneval: {colour!r} is not one of the colours {', '.join(COLOURS)}")
    if relation is not None and (relation not in RELATIONS or other not in range(place)):
        raise ValueError(
            f"geneval: the position of {label!r} is {position!r:.80}; give a list of one of {', '.join(RELATIONS)} and "
            "the number of an earlier object"
        )
    return Wanted(label, count, colour, relation, other)


def judge(
    found: Sequence[Detection],
    include: Sequence[Wanted],
    exclude: Sequence[Wanted],
    colours: Callable[[Sequence[Detection]], Sequence[str]],
) -> Verdict:
    """Apply the rules to one image.

    Args:
        found: the detections in the image, the most confident first.
        include: what the image should show.
        exclude: what the image should not show: `count` or more objects of a class.
        colours: function from detections of one class to their colours; it is called only if a colour is wanted.
    """
    by_label: dict[str, list[Detection]] = {}
    for detection in found:
        by_label.setdefault(detection.label, []).append(detection)
    faults: list[str] = []
    credits: list[float] = []
    groups: list[list[Detection] | None] = []
    benchmark = strict = True
    for wanted in include:
        objects = by_label.get(wanted.label, [])
        number = len(objects)
        credits.append(max(0.0, 1 - abs(number - wanted.count) / wanted.count))
        enough, exact = number >= wanted.count, number == wanted.count
        if not exact:
            faults.append(f"{number} {wanted.label} instead of {wanted.count}")
        chosen = objects[: wanted.count]
        if wanted.colour is not None:
            seen = sorted(colours(chosen)) if enough else []
            right = seen.count(wanted.colour)
            # With a wrong count it is not clear which objects are meant, so there is no credit.
            credits.append(right / wanted.count if exact else 0.0)
            if enough and right < wanted.count:
                faults.append(f"{wanted.label} {', '.join(seen)} instead of {wanted.colour}")
            enough, exact = enough and right == wanted.count, exact and right == wanted.count
        if wanted.relation is not None:
            holds = enough and _all_related(chosen, groups[wanted.other], wanted.relation)
            credits.append(float(holds and exact))
            if enough and not holds:
                faults.append(f"{wanted.label} not {wanted.relation} {include[wanted.other].label}")
            enough, exact = enough and holds, exact and holds
        groups.append(chosen if enough else None)
        benchmark, strict = benchmark and enough, strict and exact
    for unwanted in exclude:
        number = len(by_label.get(unwanted.label, []))
        if number >= unwanted.count:
            benchmark = False
            faults.append(f"{number} {unwanted.label} where fewer than {unwanted.count} are allowed")
    return Verdict(benchmark, strict, math.fsum(credits) / len(credits) if credits else 1.0, tuple(faults))


def _all_related(objects: Sequence[Detection], others: Sequence[Detection] | None, relation: str) -> bool:
    return others is not None and all(relation in relations(one.box, other.box) for one in objects for other in others)


def relations(one: Sequence[float], other: Sequence[float]) -> set[str]:
    """Return where one box lies relative to another.

    The offset between the centres is reduced by a tenth of both sizes, on each axis. A relation holds if what remains
    on its axis is more than half of the distance between the centres. So diagonal neighbours have two relations.

    Args:
        one: left, top, right, bottom.
        other: left, top, right, bottom.
    """
    offset = [(one[k] + one[k + 2] - other[k] - other[k + 2]) / 2 for k in (0, 1)]
    sizes = [one[k + 2] - one[k] + other[k + 2] - other[k] for k in (0, 1)]
    length = math.hypot(*offset)
    if length == 0:
        return set()
    dx, dy = (math.copysign(max(abs(part) - MARGIN * size, 0.0), part) / length for part, size in zip(offset, sizes))
    holds = {"left of": dx < -0.5, "right of": dx > 0.5, "above": dy < -0.5, "below": dy > 0.5}
    return {relation for relation, true in holds.items() if true}
