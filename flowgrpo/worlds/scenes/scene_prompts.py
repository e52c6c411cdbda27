"""Prompts of the embedded world, with GenEval's six skills for shapes and colours, and scenes that satisfy the prompts.

A prompt file has GenEval's columns: `tag` (the skill) and `include`, a list of
`{"class", "count", "color"?, "position"? = [relation, index of the other item]}`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .draw import COLOURS, GROUND, SHAPES, SIZE, Thing, draw

SKILLS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
RELATIONS = ("left of", "right of", "above", "below")
NUMBERS = {2: "two", 3: "three", 4: "four"}
FRAMES = (
    "{}",
    "a picture of {}",
    "a drawing of {}",
    "an image of {}",
    "a photo of {}",
    "a sketch of {}",
    "a scene with {}",
    "a card with {}",
)
FRESH_FRAMES = (
    "a picture with {}",
    "a drawing with {}",
    "an image with {}",
    "a photo with {}",
    "a sketch with {}",
    "a scene of {}",
    "a card of {}",
)
"""Frames of the test prompts of a skill of which training and held-out prompts have every wording. The words are those
of `FRAMES`, but the models were built without these frames."""
STYLED = ("single_object", "two_object", "counting", "position")
"""Skills whose prompts may name no colour."""
READ = 10
"""Most words of a prompt that the embedded model reads."""
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
HELDOUT_SHARE = 0.25
PER_SKILL = {"train": 240, "heldout": 70}
"""Largest number of shipped prompts of a skill."""
Meaning = tuple[Any, ...]


@dataclass(frozen=True)
class Item:
    """`count` things of one shape; with `colour` None any colour fits; `relation` is the place relative to `other`."""

    shape: str
    count: int = 1
    colour: str | None = None
    relation: str | None = None
    other: int = 0

    def as_include(self) -> dict[str, Any]:
        """The item in GenEval's metadata form."""
        entry: dict[str, Any] = {"class": self.shape, "count": self.count}
        if self.colour is not None:
            entry["color"] = self.colour
        if self.relation is not None:
            entry["position"] = [self.relation, self.other]
        return entry

    @classmethod
    def from_include(cls, entry: dict[str, Any]) -> Item:
        """Read GenEval's form; raises ValueError for a shape, colour or relation that this world does not have."""
        if not isinstance(entry, dict):
            raise ValueError(f"`include` lists {entry!r}; write objects such as {{'class': 'circle', 'count': 1}}")
        position = entry.get("position") or (None, 0)
        if not isinstance(position, list | tuple) or len(position) != 2 or not isinstance(position[1], int):
            raise ValueError(f"`include` has position {position!r}; write [relation, number of the other item]")
        relation, other = position
        for value, known, key in (
            (entry.get("class"), SHAPES, "class"),
            (entry.get("color"), (None, *COLOURS), "color"),
            (relation, (None, *RELATIONS), "position"),
        ):
            if value not in known:
                raise ValueError(f"`include` has {key} {value!r}; write one of {', '.join(map(str, known))}")
        count = entry.get("count", 1)
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"`include` has count {count!r}; write a whole number of 1 or more")
        return cls(entry["class"], count, entry.get("color"), relation, other)


def read_items(include: Any) -> tuple[Item, ...]:
    """All items of a prompt's `include`.

    Raises:
        ValueError: `include` is not a list with at least one item, this world does not have an item, or a relation is
            to an item that is not in the list.
    """
    if not isinstance(include, list | tuple) or not include:
        raise ValueError(f"`include` is {include!r}; write a list of at least one item (in a .jsonl file)")
    items = tuple(Item.from_include(entry) for entry in include)
    for k, item in enumerate(items):
        if item.relation is not None and (item.other == k or not 0 <= item.other < len(items)):
            raise ValueError(
                f"`include` places item {k} relative to item {item.other}; give the number of another item, counted "
                "from 0"
            )
    return items


@dataclass(frozen=True)
class ScenePrompt:
    """A prompt's words, its skill, and the items that it asks for."""

    text: str
    skill: str
    items: tuple[Item, ...]

    def as_record(self) -> dict[str, Any]:
        """One line of a prompt file."""
        return {"prompt": self.text, "tag": self.skill, "include": [item.as_include() for item in self.items]}


def _phrases() -> Iterator[tuple[str, str, tuple[Item, ...]]]:
    def a(words: str) -> str:
        return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"

    pairs = list(itertools.permutations(SHAPES, 2))
    for shape in SHAPES:
        yield "single_object", a(shape), (Item(shape),)
    for one, two in pairs:
        yield "two_object", f"{a(one)} and {a(two)}", (Item(one), Item(two))
    for shape, (count, word), colour in itertools.product(SHAPES, NUMBERS.items(), (None, *COLOURS)):
        plural = f"{shape}es" if shape == "cross" else f"{shape}s"
        words = (word, plural) if colour is None else (word, colour, plural)
        yield "counting", " ".join(words), (Item(shape, count, colour),)
    for shape, colour in itertools.product(SHAPES, COLOURS):
        yield "colors", a(f"{colour} {shape}"), (Item(shape, colour=colour),)
    for (one, two), relation in itertools.product(pairs, RELATIONS):
        yield "position", f"{a(one)} {relation} {a(two)}", (Item(one, relation=relation, other=1), Item(two))
    for (one, two), (ink, tint) in itertools.product(pairs, itertools.permutations(COLOURS, 2)):
        text = f"{a(f'{ink} {one}')} and {a(f'{tint} {two}')}"
        yield "color_attr", text, (Item(one, colour=ink), Item(two, colour=tint))


def all_prompts(frames: Sequence[str] = FRAMES) -> list[ScenePrompt]:
    """Every prompt of the world, in a fixed order: each phrase in each frame."""
    return list(_world(tuple(frames)))


@cache
def _world(frames: tuple[str, ...]) -> tuple[ScenePrompt, ...]:
    """The same, made once: a build of the world asks dozens of times."""
    return tuple(
        ScenePrompt(frame.format(phrase), skill, items) for skill, phrase, items in _phrases() for frame in frames
    )


def meaning(items: Sequence[Item]) -> Meaning:
    """What items ask for, equal for all wordings: "a star above a cross" means the same as "a cross below a star"."""
    described = [(item.shape, item.count, item.colour or "") for item in items]
    for one, item in zip(described, items):
        if item.relation in ("right of", "below"):
            return OPPOSITE[item.relation], described[item.other], one
        if item.relation is not None:
            return item.relation, one, described[item.other]
    return "", *sorted(described)


def is_heldout(text: str) -> bool:
    """Whether a prompt belongs to the held-out quarter; only a hash of its words decides."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELDOUT_SHARE * 2**64


def split(heldout: bool, per_skill: int | None = None, seed: int = 0) -> list[ScenePrompt]:
    """The train or held-out prompts, at most `per_skill` of each skill (drawn with `seed`), with skills in turn."""
    rng = np.random.default_rng([seed, heldout])
    chosen: list[list[ScenePrompt]] = []
    for skill in SKILLS:
        pool = [p for p in all_prompts() if p.skill == skill and is_heldout(p.text) == heldout]
        chosen.append(_drawn(pool, per_skill or len(pool), rng))
    return _in_turn(chosen)


def _drawn(pool: Sequence[ScenePrompt], most: int, rng: np.random.Generator) -> list[ScenePrompt]:
    return [pool[k] for k in rng.permutation(len(pool))[:most]]


def _in_turn(chosen: Sequence[Sequence[ScenePrompt]]) -> list[ScenePrompt]:
    return [p for rank in itertools.zip_longest(*chosen) for p in rank if p is not None]


def shipped(seed: int = 0) -> dict[str, list[ScenePrompt]]:
    """The prompts of the files that ship: `train`, `heldout` and `test`.

    No wording is in two of them. Test prompts are for measurements alone: nothing may be chosen by them. There are as
    many of each skill and number as in `heldout`, and what they ask for is as new as the world allows:

    - `color_attr`: no training or held-out prompt asks for the same scene;
    - `counting` and `position`: no held-out prompt asks for the same scene. (Training prompts ask for nearly all
      scenes of these skills.)
    - `single_object`, `two_object` and `colors`: the frames are new. The world has only 45 scenes of these skills, and
      training prompts ask for all of them in all of `FRAMES` that `heldout` leaves.
    """
    train, heldout = split(False, PER_SKILL["train"], seed), split(True, PER_SKILL["heldout"], seed)
    rng, chosen = np.random.default_rng([seed, 2]), []
    for skill in SKILLS:
        wanted = Counter(p.items[0].count for p in heldout if p.skill == skill)
        unseen, found = _unseen(skill, train, heldout, wanted), []
        for prompt in _drawn(unseen, len(unseen), rng):
            if wanted[prompt.items[0].count]:
                wanted[prompt.items[0].count] -= 1
                found.append(prompt)
        chosen.append(found)
    return {"train": train, "heldout": heldout, "test": _in_turn(chosen)}


def _unseen(
    skill: str, train: Sequence[ScenePrompt], heldout: Sequence[ScenePrompt], wanted: Counter[int]
) -> list[ScenePrompt]:
    """Wordings of a skill that neither set has: of scenes of neither, else not of `heldout`, or else in new frames."""
    texts = {p.text for p in (*train, *heldout)}
    asked, held = ({meaning(p.items) for p in rows} for rows in (train, heldout))
    unused = [p for p in all_prompts() if p.skill == skill and p.text not in texts]
    for known in (asked | held, held):
        fitting = [p for p in unused if meaning(p.items) not in known]
        if not wanted - Counter(p.items[0].count for p in fitting):
            return fitting
    return [p for p in all_prompts(FRESH_FRAMES) if p.skill == skill]


def styled(heldout: bool, colour: str = "red") -> list[dict[str, Any]]:
    """Prompts that name no colour, and in column `detailed` the same prompts with every shape in one colour.

    `include` asks for this colour, as `detailed` does. So the verifier says how well a model keeps to a style that its
    prompt does not name. Held-out prompts have phrases that no training prompt has. No prompt is in the test set.

    Args:
        heldout: which of the two sets.
        colour: of the style.
    """
    chosen: dict[str, list[dict[str, Any]]] = {skill: [] for skill in STYLED}
    tested = {prompt.text for prompt in shipped()["test"]}
    for skill, phrase, items in _phrases():
        if skill not in STYLED or any(item.colour for item in items) or is_heldout(phrase) != heldout:
            continue
        detailed = phrase
        for shape in SHAPES:
            detailed = re.sub(
                rf"\ban? (?={shape}\b)|\b(?={shape}(?:es|s)\b)", lambda m: _before(m[0], colour), detailed
            )
        coloured = tuple(replace(item, colour=colour) for item in items)
        for frame in FRAMES:
            told = frame.format(detailed)
            if len(told.split()) <= READ and (text := frame.format(phrase)) not in tested:
                record = ScenePrompt(text, skill, coloured).as_record()
                chosen[skill].append({**record, "detailed": told})
    rng = np.random.default_rng([0, 3, heldout])
    rows = itertools.zip_longest(*([own[k] for k in rng.permutation(len(own))] for own in chosen.values()))
    return [record for rank in rows for record in rank if record is not None]


def _before(article: str, colour: str) -> str:
    return f"{'an' if colour[0] in 'aeiou' else 'a'} {colour} " if article else f"{colour} "


def write_prompt_files(folder: Path) -> None:
    """Write `train.jsonl`, `heldout.jsonl`, `test.jsonl` (see `shipped`), `style.jsonl` and `style_heldout.jsonl`."""
    files = {name: [p.as_record() for p in prompts] for name, prompts in shipped().items()}
    files |= {"style": styled(heldout=False), "style_heldout": styled(heldout=True)}
    for name, records in files.items():
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def radius_range(things: int) -> tuple[float, float]:
    """The smallest and the largest radius of a thing in a drawn scene of so many things, in pixels."""
    return {1: (9.0, 12.0), 2: (8.0, 10.5), 3: (7.0, 8.5)}.get(things, (6.5, 7.5))


def compose(items: tuple[Item, ...], rng: np.random.Generator) -> list[Thing]:
    """A random scene that shows exactly what `items` ask for; everything that they leave open is drawn at random."""
    wanted = [item for item in items for _ in range(item.count)]
    low, high = radius_range(len(wanted))
    colours = [item.colour or str(rng.choice(list(COLOURS))) for item in wanted]
    for _ in range(10_000):
        radii = np.round(2 * rng.uniform(low, high, len(wanted))) / 2
        reach = np.ceil(1.3 * radii).astype(int) + 1
        places = [(int(rng.integers(r, SIZE - r)), int(rng.integers(r, SIZE - r))) for r in reach]
        things = [Thing(i.shape, c, x, y, float(r)) for i, c, (x, y), r in zip(wanted, colours, places, radii)]
        if _apart(things) and _related(items, things):
            return things
    raise RuntimeError(f"no room for {items}")


def sample_scenes(
    count: int, rng: np.random.Generator, shares: tuple[int, ...] = (1,) * len(SKILLS)
) -> Iterator[tuple[ScenePrompt, list[Thing], NDArray[np.uint8]]]:
    """`count` prompts with the skills in the given shares, each with its scene and its picture [64, 64, 3]."""
    pools = [[p for p in all_prompts() if p.skill == skill] for skill in SKILLS]
    turns = [pool for pool, share in zip(pools, shares, strict=True) for _ in range(share)]
    for k in range(count):
        pool = turns[k % len(turns)]
        prompt = pool[int(rng.integers(len(pool)))]
        things = compose(prompt.items, rng)
        yield prompt, things, np.round(255 * draw(things, ground_colour(rng))).astype(np.uint8)


def _apart(things: list[Thing]) -> bool:
    return all(
        max(abs(p.x - q.x), abs(p.y - q.y)) >= 1.15 * (p.radius + q.radius) + 2
        for p, q in itertools.combinations(things, 2)
    )


def _related(items: tuple[Item, ...], things: list[Thing]) -> bool:
    """Whether all relations hold. Only items of count one have relations, so item k is thing k."""
    return all(
        item.relation is None or _clearly(item.relation, things[k], things[item.other]) for k, item in enumerate(items)
    )


def _clearly(relation: str, thing: Thing, other: Thing) -> bool:
    """Whether the relation holds with a margin: the offset along its axis is over 4 pixels larger than across it."""
    dx, dy = thing.x - other.x, thing.y - other.y
    along, across = (dx, dy) if relation in ("left of", "right of") else (dy, dx)
    sign = -1 if relation in ("left of", "above") else 1
    return sign * along > abs(across) + 4


def disturb(items: tuple[Item, ...], rng: np.random.Generator) -> tuple[Item, ...]:
    """The items with one change (count, colour, shape or relation), for a wrong caption."""
    changed = list(items)
    k = int(rng.integers(len(items)))
    item = items[k]
    options = ["shape"]
    if len(items) == 1:
        options.append("count")
    if item.colour is not None:
        options += ["colour", "colour"]
    if item.relation is not None:
        options += ["relation", "relation"]
    kind = str(rng.choice(options))
    if kind == "shape":
        used = {other.shape for other in items}
        changed[k] = replace(item, shape=str(rng.choice([s for s in SHAPES if s not in used])))
    elif kind == "count":
        changed[k] = replace(item, count=int(rng.choice([c for c in (1, 2, 3, 4) if c != item.count])))
    elif kind == "colour":
        changed[k] = replace(item, colour=str(rng.choice([c for c in COLOURS if c != item.colour])))
    else:
        others = [r for r in RELATIONS if r != item.relation]
        changed[k] = replace(item, relation=str(rng.choice(others)))
    return tuple(changed)


def ground_colour(rng: np.random.Generator) -> tuple[float, float, float]:
    """A random light colour for the ground, near `GROUND`."""
    shade = rng.uniform(-0.03, 0.03) + rng.uniform(-0.012, 0.012, 3)
    r, g, b = (float(v) for v in np.asarray(GROUND) + shade)
    return r, g, b
