"""Reading a run folder and pairing its evaluation samples, seed by seed.

Every value read here may have been written by a stranger (prompts, notes, reward names) or cut short by
a crash, so each field is checked on the way in and nothing downstream has to check again.
"""

import json
import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".avif"})

# A backslash is a path separator to browsers; control characters and lone surrogates are never in our names.
_BAD_IN_PATH = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]")
_SECRET_KEY = re.compile(r"(^|[_-])(token|secret|password|passwd|api[_-]?key|authorization)$", re.IGNORECASE)
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")


@dataclass(frozen=True)
class Sample:
    """One image or completion of an evaluation, as `samples/index.jsonl` records it."""

    iteration: int  # 0 is the model before training
    prompt: str
    prompt_id: str
    seed: str  # as text: 64-bit seeds do not survive JavaScript's numbers
    sample: int  # index among the samples of this prompt
    image: str | None  # relative to samples/, with forward slashes; None when the file is gone and for text
    completion: str | None = None  # what a language model wrote; None for images
    rewards: dict[str, float] = field(default_factory=dict)  # finite scores only
    sub_scores: dict[str, dict[str, float]] = field(default_factory=dict)  # reward -> name -> score
    notes: dict[str, str] = field(default_factory=dict)  # reward -> what the reward wrote about the sample
    columns: dict[str, str] = field(default_factory=dict)  # the prompt file's other columns, as text


@dataclass(frozen=True)
class Pair:
    """The samples of one prompt and one seed through training."""

    shots: tuple[Sample | None, ...]  # one for each of Run.checkpoints; None where it was not sampled

    @property
    def first(self) -> Sample:
        """The earliest sample there is; it carries the prompt, the seed and the columns."""
        return next(shot for shot in self.shots if shot is not None)


@dataclass(frozen=True)
class Run:
    """What the page needs of a run folder."""

    name: str
    facts: tuple[tuple[str, str], ...]  # (key, value) of the recipe's top-level names
    config: str  # the recipe as YAML, secrets removed
    metrics: tuple[dict[str, float], ...]  # by increasing "iteration", one entry each, finite values only
    checkpoints: tuple[int, ...]  # evaluated iterations, increasing
    pairs: tuple[Pair, ...]
    skipped: int  # lines that could not be read
    text: bool  # whether the samples are completions; else they are images


def read_run(folder: Path) -> Run:
    """Read a run folder written by `flowgrpo train`, finished or still running.

    Args:
        folder: holds `config.yaml`, `samples/index.jsonl` and, usually, `metrics.jsonl`.

    Raises:
        ValueError: the folder is not a run, has no evaluation samples, or holds a record that is not as
            documented (a wrong type, an image outside `samples/`, images and completions together).
    """
    config_file, index = folder / "config.yaml", folder / "samples" / "index.jsonl"
    if not config_file.is_file():
        raise ValueError(
            f"{folder} is not a run folder: it has no config.yaml. Give the folder that `flowgrpo train` wrote."
        )
    if not index.is_file():
        raise ValueError(
            f"{folder} has no samples yet: {index} does not exist. Build the gallery after the first evaluation."
        )
    try:
        config = yaml.safe_load(config_file.read_text(encoding="utf-8", errors="replace"))
    except yaml.YAMLError as error:
        raise ValueError(f"{config_file} is not readable YAML: {error}. Restore it, or train again.") from error
    config = _without_secrets(config if isinstance(config, dict) else {})
    records, bad_samples = read_jsonl(index)
    evaluated = [(f"{index}, line {line}", record) for line, record in records if record.get("phase") == "eval"]
    samples = [parse_sample(record, index.parent, where) for where, record in evaluated]
    if not samples:
        raise ValueError(
            f"{index} has no evaluation samples (phase 'eval') among its {len(records)} records. "
            "Switch evaluation on in the recipe, or build the gallery after the first evaluation."
        )
    text = "completion" in evaluated[0][1]
    for where, record in evaluated:
        if ("completion" in record) != text:
            found, first = ("an `image`", "a `completion`") if text else ("a `completion`", "an `image`")
            raise ValueError(
                f"{where}: the record has {found}, and the first of the run has {first}. "
                "A run is either of images or of text; give each a folder of its own."
            )
    metrics, bad_metrics = read_metrics(folder / "metrics.jsonl")
    checkpoints, pairs = pair_samples(samples)
    name = config.get("name")
    keys = ("recipe", "method", "model", "pipeline")
    return Run(
        name=name if isinstance(name, str) and name.strip() else folder.resolve().name,
        facts=tuple((key, config[key]) for key in keys if isinstance(config.get(key), str)),
        config=yaml.safe_dump(config, sort_keys=False, allow_unicode=True),
        metrics=metrics,
        checkpoints=checkpoints,
        pairs=pairs,
        skipped=bad_samples + bad_metrics,
        text=text,
    )


def read_jsonl(path: Path) -> tuple[list[tuple[int, dict[str, Any]]], int]:
    """The objects of a JSON-lines file with their line numbers, and how many lines were unreadable.

    A crash leaves a last line cut short, and a resumed run goes on appending after it, so an unreadable
    line may stand anywhere; it costs only itself.
    """
    records, skipped = [], 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict):
                records.append((number, record))
            else:
                skipped += 1
    return records, skipped


def read_metrics(path: Path) -> tuple[tuple[dict[str, float], ...], int]:
    """The finite numbers of `metrics.jsonl` by iteration, and how many lines were unreadable.

    An iteration written twice (before and after a resume) keeps its later values.
    """
    if not path.is_file():
        return (), 0
    records, skipped = read_jsonl(path)
    rows: dict[int, dict[str, float]] = {}
    for _, record in records:
        iteration = record.get("iteration")
        if isinstance(iteration, int) and not isinstance(iteration, bool):
            rows.setdefault(iteration, {}).update(_numbers(record))
        else:
            skipped += 1
    return tuple(rows[iteration] for iteration in sorted(rows)), skipped


def parse_sample(record: dict[str, Any], samples: Path, where: str) -> Sample:
    """Check one record of `samples/index.jsonl`.

    Args:
        record: the decoded JSON object.
        samples: the folder that its image is relative to.
        where: file and line, for the error message.

    Raises:
        ValueError: a field is missing or of a wrong type, the image lies outside `samples`, or there is not
            exactly one of `image` and `completion`.
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
    sample = record.get("sample", 0)
    return Sample(
        iteration=record["iteration"],
        prompt=record["prompt"],
        prompt_id=str(record["prompt_id"]),
        seed=str(record["seed"]),
        sample=sample if isinstance(sample, int) else 0,
        image=image if image and (samples / image).is_file() else None,
        completion=completion,
        rewards=_numbers(_mapping(record, "rewards", where)),
        sub_scores={
            name: _numbers(scores)
            for name, scores in _mapping(record, "sub_scores", where).items()
            if isinstance(scores, dict)
        },
        notes={name: str(note) for name, note in _mapping(record, "notes", where).items() if note},
        columns={name: _text(value) for name, value in _mapping(record, "columns", where).items()},
    )


_EXPECTED = {
    "iteration": "It must be a whole number, 0 for the model before training.",
    "prompt": "It must be the prompt's text.",
    "prompt_id": "It must be the number of the prompt in its file.",
    "seed": "It must be the whole number that seeded the sample.",
}


def check_image(image: object, samples: Path, where: str) -> str:
    """Return `image` if it names an image file inside `samples`, links followed.

    Raises:
        ValueError: it is not text, not an image, absolute, climbs with "..", or leads outside by a link.
    """
    fix = "It must be a path inside samples/, such as 'iter-000000/eval-0003.png'."
    if not isinstance(image, str) or not image or _BAD_IN_PATH.search(image):
        raise ValueError(f"{where}: `image` is {image!r}. {fix}")
    absolute = image.startswith("/") or re.match(r"[A-Za-z]:", image)
    if absolute or ".." in image.split("/") or not (samples / image).resolve().is_relative_to(samples.resolve()):
        raise ValueError(f"{where}: `image` {image!r} leads outside {samples}. {fix}")
    if Path(image).suffix.lower() not in IMAGE_SUFFIXES:
        raise ValueError(f"{where}: `image` {image!r} is not one of {', '.join(sorted(IMAGE_SUFFIXES))}.")
    return image


def pair_samples(samples: list[Sample]) -> tuple[tuple[int, ...], tuple[Pair, ...]]:
    """Line up the samples that share prompt and seed over the evaluated iterations.

    When a prompt has several samples of one seed they are matched in the order of their `sample` index. A
    sample recorded twice (before and after a resume) counts once, as last written.

    Returns:
        The evaluated iterations, increasing, and the pairs in the order in which they first appear.
    """
    checkpoints = tuple(sorted({sample.iteration for sample in samples}))
    column = {iteration: index for index, iteration in enumerate(checkpoints)}
    by_key: dict[tuple[str, str, str], dict[int, dict[int, Sample]]] = defaultdict(lambda: defaultdict(dict))
    for sample in samples:
        # The text belongs to the key: a prompt file edited between runs may reuse a number.
        by_key[sample.prompt_id, sample.seed, sample.prompt][sample.iteration][sample.sample] = sample
    pairs = []
    for iterations in by_key.values():
        ordered = {
            column[iteration]: [found[index] for index in sorted(found)] for iteration, found in iterations.items()
        }
        for rank in range(max(len(found) for found in ordered.values())):
            row = (ordered.get(index, []) for index in range(len(checkpoints)))
            pairs.append(Pair(tuple(found[rank] if rank < len(found) else None for found in row)))
    return checkpoints, tuple(pairs)


def _mapping(record: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    value = record.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{where}: `{key}` is {value!r}. It must be an object from names to values.")
    return value


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    """The finite numbers among `values`: a reward that does not apply is NaN or null."""
    return {
        key: value
        for key, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _without_secrets(value: Any) -> Any:
    """A copy of a configuration fit to publish: keys that hold credentials are blanked."""
    if isinstance(value, dict):
        return {
            key: "(hidden)"
            if item and isinstance(item, str) and _SECRET_KEY.search(str(key))
            else _without_secrets(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_without_secrets(item) for item in value]
    return _URL_LOGIN.sub("", value) if isinstance(value, str) else value
