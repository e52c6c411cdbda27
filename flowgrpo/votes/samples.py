"""The samples of a run: reads `samples/index.jsonl`, checks every field, and lines samples up over the iterations.

A value may come from a stranger (prompts, notes, reward names), or a crash may have cut it short. All checks are made
here, so later code need not check again.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .lines import check_image, read_jsonl

PHASES = ("eval", "train")
Place = tuple[str, str, str, int]
"""Phase, prompt, seed, and number among the pairs with the same phase, prompt and seed."""
MOST_FRAMES = 2000  # a sample that claims more frames is shown as a picture


@dataclass(frozen=True)
class Rendering:
    """An image or video that a reward made of a completion."""

    image: str | None  # relative to samples/; None if its file is missing
    frames: int = 1  # more than 1 for a video, whose frames stand side by side in the image
    missing: str | None = None  # what `image` would be, if its file is missing


@dataclass(frozen=True)
class Sample:
    """One image or completion, as `samples/index.jsonl` records it."""

    phase: str  # one of PHASES
    iteration: int  # 0 is the model before training
    prompt: str
    prompt_id: str
    seed: str  # as text: 64-bit seeds do not survive JavaScript's numbers
    sample: int  # index among the samples of this call
    image: str | None  # relative to samples/, with forward slashes; None for text, and if the file is missing
    completion: str | None = None  # what a language model wrote; None for images
    rewards: dict[str, float] = field(default_factory=dict)  # finite scores only
    sub_scores: dict[str, dict[str, float]] = field(default_factory=dict)  # reward -> name -> score
    notes: dict[str, str] = field(default_factory=dict)  # reward -> what the reward wrote about the sample
    columns: dict[str, str] = field(default_factory=dict)  # the prompt file's other columns, as text
    values: dict[str, Any] = field(default_factory=dict)  # the same columns as they were written
    path: tuple[tuple[int, int], ...] = ()  # where its rollout branched: (denoising step, which child)
    noise: str | None = None  # seed of the generator of its initial noise, as text
    missing: str | None = None  # what `image` would be, if its file is missing
    steps: tuple[str, ...] = ()  # what a masked model had written after each step of unmasking
    pictures: tuple[str, ...] = ()  # copies of the pictures of the prompt, relative to samples/
    messages: tuple[dict[str, str], ...] = ()  # the whole conversation, if the prompt is one
    truncated: bool = False  # whether a completion was cut at the longest length
    rendered: dict[str, tuple[Rendering, ...]] = field(default_factory=dict)  # reward -> images of a completion
    frames: int = 1  # more than 1 for a video, whose frames stand side by side in the image
    sound: str | None = None  # relative to samples/; the image shows its spectrum; None if its file is missing

    @property
    def images(self) -> Iterator[tuple[str, int]]:
        """Its image files with their numbers of frames: of the sample itself, and those that rewards made of it."""
        if self.image:
            yield self.image, self.frames
        for made in self.rendered.values():
            yield from ((one.image, one.frames) for one in made if one.image)

    @property
    def asked(self) -> tuple[str, str]:
        """What names the prompt within its run: prompts with other pictures may have the same words."""
        return self.prompt_id, self.prompt

    @property
    def asked_anywhere(self) -> tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]]:
        """What names the prompt among several runs, whose prompt files may number it differently.

        Different conversations may end with the same message, which is their `prompt`.
        """
        return self.prompt, self.pictures, tuple((one["role"], one["content"]) for one in self.messages)


@dataclass(frozen=True)
class SamplePair:
    """The samples of one prompt and one seed at several iterations, all of one phase."""

    phase: str
    shots: dict[int, Sample]  # by iteration, increasing

    @property
    def first(self) -> Sample:
        """The earliest sample; it carries the prompt, the seed and the columns."""
        return next(iter(self.shots.values()))


def read_samples(index: Path) -> tuple[list[Sample], int]:
    """The samples of `samples/index.jsonl`, in the order of the file, and the number of unreadable lines.

    Raises:
        ValueError: there are no samples, a record does not follow the documentation, or the file mixes images and
            completions.
    """
    records, skipped = read_jsonl(index)
    known = [(f"{index}, line {line}", record) for line, record in records if record.get("phase") in PHASES]
    root = index.parent.resolve()
    samples = [parse_sample(record, root, where) for where, record in known]
    if not samples:
        raise ValueError(
            f"{index} has no samples (phase 'eval' or 'train') among its {len(records)} records. "
            "Build the gallery after the first evaluation."
        )
    text = samples[0].completion is not None
    for (where, _), sample in zip(known, samples):
        if (sample.completion is not None) != text:
            found, first = ("an `image`", "a `completion`") if text else ("a `completion`", "an `image`")
            raise ValueError(
                f"{where}: the record has {found}, and the first of the run has {first}. "
                "A run makes either images or text; use a separate folder for each."
            )
    return samples, skipped


def pair_samples(samples: Sequence[Sample]) -> tuple[SamplePair, ...]:
    """Line up the samples that share phase, prompt and seed over the iterations.

    If a prompt has several samples of one seed, they are matched in the order of their `sample` index. If a sample was
    recorded twice (before and after a resume), the last record counts.

    Returns:
        The pairs in the order of their first appearance, so that a run that goes on only appends to them.
    """
    # The text is part of the key, because a prompt file that was edited between runs may reuse a number.
    by_key: dict[tuple[str, str, str, str], dict[int, dict[int, Sample]]] = {}
    for one in samples:
        iterations = by_key.setdefault((one.phase, one.prompt_id, one.seed, one.prompt), {})
        iterations.setdefault(one.iteration, {})[one.sample] = one
    pairs = []
    for (phase, *_), iterations in by_key.items():
        ordered = {at: [own[number] for number in sorted(own)] for at, own in sorted(iterations.items())}
        for rank in range(max(len(own) for own in ordered.values())):
            pairs.append(SamplePair(phase, {at: own[rank] for at, own in ordered.items() if rank < len(own)}))
    return tuple(pairs)


def by_place(pairs: Iterable[SamplePair]) -> dict[Place, SamplePair]:
    """Return the pairs of a run by their places, in their order.

    The prompt's text names the place, because its number depends on the prompt file. If the file has a prompt several
    times, the pairs of the prompt and a seed are numbered in their order. The pairs of conversations that end with one
    message, and of prompts with other pictures, are numbered alike; so the files of marks need only the text.
    """
    found: dict[Place, SamplePair] = {}
    counts = Counter[tuple[str, str, str]]()
    for pair in pairs:
        own = (pair.phase, pair.first.prompt, pair.first.seed)
        place = (*own, counts[own])
        found[place] = pair
        counts[own] += 1
    return found


def parse_sample(record: dict[str, Any], samples: Path, where: str) -> Sample:
    """Check one record of `samples/index.jsonl`.

    Args:
        record: the decoded JSON object.
        samples: the folder that the path of the image is relative to, with links resolved.
        where: file and line, for the error message.

    Raises:
        ValueError: a field is missing or has a wrong type, the image lies outside `samples`, or the record has both or
            neither of `image` and `completion`.
    """
    for key, kinds in (("iteration", int), ("prompt", str), ("prompt_id", (int, str)), ("seed", int)):
        if not isinstance(record.get(key), kinds) or isinstance(record.get(key), bool):
            raise ValueError(f"{where}: `{key}` is {record.get(key)!r}. {_EXPECTED[key]}")
    if ("image" in record) == ("completion" in record):
        found = "both" if "image" in record else "neither"
        raise ValueError(f"{where}: a record has either an `image` or a `completion`, and this one has {found}.")
    image = check_image(record["image"], samples, where) if "image" in record else None
    completion = record.get("completion")
    if image is None and not isinstance(completion, str):
        raise ValueError(f"{where}: `completion` is {completion!r}. It must be the text that the model wrote.")
    columns = _mapping(record, "columns", where)
    sample, noise, frames = record.get("sample", 0), record.get("noise"), record.get("frames", 1)
    return Sample(
        phase=record["phase"],
        iteration=record["iteration"],
        prompt=record["prompt"],
        prompt_id=str(record["prompt_id"]),
        seed=str(record["seed"]),
        sample=sample if isinstance(sample, int) else 0,
        image=image if image and (samples / image).is_file() else None,
        completion=completion,
        rewards=finite_numbers(_mapping(record, "rewards", where)),
        sub_scores={
            name: finite_numbers(scores)
            for name, scores in _mapping(record, "sub_scores", where).items()
            if isinstance(scores, dict)
        },
        notes={name: str(note) for name, note in _mapping(record, "notes", where).items() if note},
        columns={name: as_text(value) for name, value in columns.items()},
        values=columns,
        path=_path(record, where),
        steps=_steps(record, where),
        missing=image if image and not (samples / image).is_file() else None,
        noise=str(noise) if isinstance(noise, int) and not isinstance(noise, bool) else None,
        pictures=_pictures(record, samples, where),
        messages=parse_messages(record.get("messages") or [], where),
        truncated=record.get("truncated") is True,
        rendered=_rendered(record, samples, where),
        frames=_frames(frames),
        sound=_sound(record, samples, where),
    )


_EXPECTED = {
    "iteration": "It must be a whole number, 0 for the model before training.",
    "prompt": "It must be the prompt's text.",
    "prompt_id": "It must be the number of the prompt in its file.",
    "seed": "It must be the whole number that seeded the sample.",
}


def finite_numbers(values: dict[str, Any]) -> dict[str, float]:
    """The finite numbers among `values`; a reward that does not apply is NaN or null, and is left out."""
    return {
        key: value
        for key, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)
    }


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond float
        return False


def _path(record: dict[str, Any], where: str) -> tuple[tuple[int, int], ...]:
    value = record.get("path") or []
    places = [tuple(place) if isinstance(place, list) else () for place in value] if isinstance(value, list) else [()]
    if any(len(place) != 2 or any(type(number) is not int for number in place) for place in places):
        raise ValueError(f"{where}: `path` is {value!r}. It must be a list of [step, child], whole numbers.")
    return tuple((step, child) for step, child in places)


def _pictures(record: dict[str, Any], samples: Path, where: str) -> tuple[str, ...]:
    value = record.get("pictures") or []
    if not isinstance(value, list):
        raise ValueError(f"{where}: `pictures` is {value!r:.80}. It must be a list of paths of images.")
    paths = [check_image(path, samples, where, "pictures") for path in value]
    return tuple(path for path in paths if (samples / path).is_file())


def _rendered(record: dict[str, Any], samples: Path, where: str) -> dict[str, tuple[Rendering, ...]]:
    found = {}
    for reward, value in _mapping(record, "rendered", where).items():
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise ValueError(f"{where}: `rendered` has {value!r:.80}. It must be a list of objects with an image each.")
        paths = [check_image(one.get("image"), samples, where, "rendered") for one in value]
        found[reward] = tuple(
            Rendering(path, _frames(one.get("frames", 1)))
            if (samples / path).is_file()
            else Rendering(None, missing=path)
            for path, one in zip(paths, value)
        )
    return found


def _sound(record: dict[str, Any], samples: Path, where: str) -> str | None:
    if record.get("sound") is None:
        return None
    path = check_image(record["sound"], samples, where, "sound", "a sound", {".wav"})
    return path if (samples / path).is_file() else None


def _frames(value: object) -> int:
    return value if type(value) is int and 1 < value <= MOST_FRAMES else 1


def _steps(record: dict[str, Any], where: str) -> tuple[str, ...]:
    value = record.get("steps") or []
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{where}: `steps` is {value!r:.80}. It must be a list of texts, one after each step.")
    return tuple(value)


def parse_messages(value: object, where: str) -> tuple[dict[str, str], ...]:
    """The messages of a conversation, with their roles and contents alone.

    Raises:
        ValueError: `value` is no list of messages.
    """
    if not isinstance(value, list) or not all(
        isinstance(one, dict) and all(isinstance(one.get(key), str) for key in ("role", "content")) for one in value
    ):
        raise ValueError(f"{where}: `messages` is {value!r:.80}. It must be a list of objects with role and content.")
    return tuple({"role": one["role"], "content": one["content"]} for one in value)


def _mapping(record: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    value = record.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{where}: `{key}` is {value!r}. It must be an object from names to values.")
    return value


def as_text(value: object) -> str:
    """The value of a column as text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
