"""The data of a gallery: small files, each read by the page when it is needed.

`site` holds facts about the runs, and the list of the other files. For each run, `pairs` holds prompts and seeds, and
`curves` holds the metrics. Each evaluation, and each iteration with saved training samples, has a file of scores and
thumbnails by pair. The details of its samples, which are looked at one by one, are in further files of MORE samples
each. Names given by users are list entries, never keys, so that no name can shadow a property.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from ..intake.json_text import parse_json
from ..votes.samples import PHASES, Sample
from .run_figures import group_spreads, short, summarize
from .run_reading import Run, is_iteration
from .thumbnails import Thumbnail

MORE = 250  # samples in one file of details


def site_files(
    runs: Sequence[Run],
    thumbnails: Sequence[Mapping[str, Thumbnail | None]],
    bases: Sequence[str],
    live: bool,
    videos: Sequence[Mapping[str, str]],
    places: Sequence[str | None],
) -> dict[str, Any]:
    """All data of a gallery, by file name.

    Args:
        runs: the run folders' contents.
        thumbnails: for each run, its thumbnails by path.
        bases: for each run, the relative URL of its samples, ending in a slash.
        live: whether the page should look for newer data.
        videos: for each run, the names of its videos by path.
        places: URLs relative to the page: of the working directory, then of each run folder; None if there is none.
    """
    shots = [shot for run in runs for pair in run.pairs for shot in pair.shots.values()]
    rewards = names([shot.rewards for shot in shots] + [shot.notes for shot in shots])
    columns = names(shot.columns for shot in shots)
    files: dict[str, Any] = {}
    described = []
    for number, (run, images, base, clips) in enumerate(zip(runs, thumbnails, bases, videos)):
        own = _run_files(f"r{number}", run, images, clips, rewards, columns)
        files |= own
        described.append(_describe(run, base, f"r{number}", rewards, images))
        described[-1]["remake"] |= {"place": places[number + 1], "start": places[0] if starts_here(run) else None}
    sets = [{"file": name, **_known(data)} for name, data in files.items() if "iteration" in data]
    site = {
        "live": live,
        "text": runs[0].text,
        "video": any(videos),
        "sound": any(shot.sound for shot in shots),
        "rewards": rewards,
        "columns": columns,
        "more": MORE,
        "noted": any(shot.notes for shot in shots),
        "runs": described,
        "sets": sets,
        "files": [[name, digest(data)] for name, data in files.items()],
    }
    return {"site": site, **files}


def script(name: str, data: object) -> bytes:
    """A data file: a script that gives the page its JSON, because a page opened from disk may not fetch files.

    The JSON is a string in the script: it is parsed, never run, so no key has a meaning in JavaScript. The file holds
    no markup, in case a server takes the file for a page.
    """
    return f"flowgrpoGallery({_json(name)},{_json(inline_json(data))});\n".encode()


def inline_json(data: object) -> str:
    """JSON that can stand inside a script element.

    It is plain ASCII. U+2028, U+2029 and lone surrogates are written as escapes. So are the three characters that could
    end the element, open a comment in it, or start an entity.
    """
    return _json(data).replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def digest(data: object) -> str:
    """A hash of the content, by which the page sees that a file has changed."""
    return hashlib.sha256(_json(data).encode()).hexdigest()[:16]


def names(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    """All keys in the order in which they first appear."""
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


def _json(data: object) -> str:
    return json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def _known(data: dict[str, Any]) -> dict[str, Any]:
    scored = [at for at, values in enumerate(data["rewards"]) if any(value is not None for value in values)]
    return {**{key: data[key] for key in ("run", "phase", "iteration")}, "count": len(data["pairs"]), "scored": scored}


def _describe(
    run: Run, base: str, key: str, rewards: Sequence[str], images: Mapping[str, Thumbnail | None]
) -> dict[str, Any]:
    facts = [(name, run.config.get(name)) for name in ("recipe", "method", "model", "pipeline")]
    return {
        "key": key,
        "id": identity(run),
        "name": run.name,
        "folder": run.folder.resolve().name,
        "base": base,
        "facts": [[name, value] for name, value in facts if isinstance(value, str)],
        "config": yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True),
        "skipped": run.skipped,
        "unreadable": sum(image is None for image in images.values()),
        "remake": remake(run),
        "done": _progress(run),
        "summary": [summary for reward in rewards if (summary := summarize(run, reward))],
    }


def _progress(run: Run) -> list[int] | None:
    """How many iterations are done, and how many the recipe has; None if the recipe does not say it."""
    section = run.config.get("run")
    planned = section.get("iterations") if isinstance(section, dict) else None
    done = max((int(row["iteration"]) + 1 for row in run.metrics if is_iteration(row)), default=0)
    return [done, planned] if isinstance(planned, int) else None


def _part(chosen: Any) -> str:
    """A part of a recipe on one line: its name, and its options whose values are numbers or words."""
    if not isinstance(chosen, dict):
        return str(chosen)
    options = {key: value for key, value in chosen.items() if key != "name" and isinstance(value, int | float | str)}
    named = " ".join(f"{key} {value}" for key, value in options.items() if not isinstance(value, bool))
    return f"{chosen.get('name')} ({named})" if named else str(chosen.get("name"))


def remake(run: Run) -> dict[str, Any]:
    """What decides how samples are made: `model`, `steps`, `evaluation_steps`, `settings`, and the `result`.

    `result` is the number of iterations behind the weights that the run left, if these are the weights of its best
    evaluation; else None, because they are the last weights.
    """

    def section(name: str) -> dict[str, Any]:
        value = run.config.get(name)
        return value if isinstance(value, dict) else {}

    def arguments(call: Any) -> str:
        return ", ".join(f"{key} {value}" for key, value in call.items()) if isinstance(call, dict) else ""

    sampler, model, evaluate = section("sampler"), section("model"), section("evaluate")
    steps = sampler.get("steps")
    settings = {
        "sampler": ", ".join(
            f"{key} {_part(sampler[key])}" for key in ("plan", "kernel", "solver") if sampler.get(key)
        ),
        "call": arguments(model.get("call")),
        "generation": ", ".join(f"{key} {value}" for key, value in section("generation").items() if value is not None),
        "evaluation": f"temperature {evaluate.get('temperature', 0)}" if run.text else arguments(evaluate.get("call")),
    }
    path = model.get("path")
    return {
        "model": path if isinstance(path, str) else None,
        "steps": steps if isinstance(steps, int) else None,
        "evaluation_steps": evaluate.get("steps") or (steps if isinstance(steps, int) else None),
        "settings": [[name, value] for name, value in settings.items() if value],
        "result": _best(run.folder) if evaluate.get("results") == "best" else None,
    }


def _best(folder: Path) -> int | None:
    """Iterations before the best evaluation of a run; None if the run has not kept it."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        return int(parse_json((folder / "best.json").read_text(encoding="utf-8"))["iteration"])
    return None


def identity(run: Run) -> str:
    """A name of the run that stays while it goes on: from its name, its folder's name and its first sample.

    The page keeps a person's favourites and notes under it.
    """
    first = run.pairs[0].first
    return digest([run.name, run.folder.resolve().name, first.prompt, first.seed, first.noise])


def starts_here(run: Run) -> bool:
    """Whether the recipe names a file or folder by a path that leads there from the working directory only."""
    model, data = run.config.get("model"), run.config.get("data")
    named = [section.get(key) for section, key in ((model, "path"), (data, "heldout")) if isinstance(section, dict)]
    paths = [Path(name) for name in named if isinstance(name, str) and name]
    return any(not path.is_absolute() and path.exists() for path in paths)


def _run_files(
    key: str,
    run: Run,
    images: Mapping[str, Thumbnail | None],
    videos: Mapping[str, str],
    rewards: Sequence[str],
    columns: Sequence[str],
) -> dict[str, Any]:
    prompts: dict[tuple[str, str], tuple[int, Sample]] = {}
    for pair in run.pairs:
        first = pair.first
        prompts.setdefault(first.asked, (len(prompts), first))
    firsts = [first for _, first in prompts.values()]
    files: dict[str, Any] = {
        f"{key}-pairs": {
            "prompts": [first.prompt for first in firsts],
            "ids": [first.prompt_id for first in firsts],
            "columns": [[first.columns.get(name) for name in columns] for first in firsts],
            # Columns that are JSON here, because the prompt file has no text there.
            "typed": [
                [at for at, name in enumerate(columns) if not isinstance(first.values.get(name, ""), str)]
                for first in firsts
            ],
            "pictures": [[_picture(name, images) for name in first.pictures] for first in firsts],
            "messages": [[[one["role"], one["content"]] for one in first.messages] for first in firsts],
            "pairs": [[prompts[pair.first.asked][0], pair.first.seed, PHASES.index(pair.phase)] for pair in run.pairs],
        },
        f"{key}-curves": {
            "metrics": _series(run),
            "steps": [[iteration, step, _pairs_of(values)] for iteration, step, values in run.steps],
            "groups": group_spreads(run.pairs, rewards, images),
        },
    }
    for phase in PHASES:
        for iteration in run.iterations(phase):
            shots = [
                (number, pair.shots[iteration])
                for number, pair in enumerate(run.pairs)
                if pair.phase == phase and iteration in pair.shots
            ]
            name = f"{key}-{phase}-{iteration:06d}"
            files[name] = {
                "run": int(key[1:]), "phase": phase, "iteration": iteration, **_scores(shots, images, rewards),
            }  # fmt: skip
            if any(shot.sound for _, shot in shots):
                files[name]["sounds"] = [quote(shot.sound) if shot.sound else None for _, shot in shots]
            if videos:
                files[name]["videos"] = [videos.get(shot.image) if shot.image else None for _, shot in shots]
            for start in range(0, len(shots), MORE):
                part = [shot for _, shot in shots[start : start + MORE]]
                files[f"{name}-{start // MORE}"] = {
                    "details": [_details(shot, rewards, images, videos) for shot in part]
                }
    return files


def _series(run: Run) -> dict[str, Any]:
    keys = [key for key in names(run.metrics) if key != "iteration"]
    return {
        "iterations": [int(row["iteration"]) for row in run.metrics],
        "series": [[key, [short(row.get(key)) for row in run.metrics]] for key in keys],
    }


def _scores(
    shots: Sequence[tuple[int, Sample]], images: Mapping[str, Thumbnail | None], rewards: Sequence[str]
) -> dict[str, Any]:
    thumbnails = [images.get(shot.image) if shot.image else None for _, shot in shots]
    return {
        "pairs": [number for number, _ in shots],
        "rewards": [[short(shot.rewards.get(name)) for _, shot in shots] for name in rewards],
        "thumbs": [thumbnail.name if thumbnail else None for thumbnail in thumbnails],
    }


def _picture(name: str, images: Mapping[str, Thumbnail | None]) -> list[str | None]:
    """Of a picture of a prompt: the address of its file, and the name of its thumbnail."""
    thumbnail = images.get(name)
    return [quote(name), thumbnail.name if thumbnail else None]


def _rendering(name: str | None, images: Mapping[str, Thumbnail | None], videos: Mapping[str, str]) -> list[str | None]:
    """Of an image of a completion: the address of its file, and the names of its thumbnail and of its video."""
    return [None, None, None] if name is None else [*_picture(name, images), videos.get(name)]


def _details(
    shot: Sample, rewards: Sequence[str], images: Mapping[str, Thumbnail | None], videos: Mapping[str, str]
) -> dict[str, Any]:
    sample: dict[str, Any] = {"completion": shot.completion} if shot.completion is not None else {}
    if shot.image:
        sample["image"] = quote(shot.image)
    if shot.path:
        sample["path"] = [list(place) for place in shot.path]
    if shot.rendered:
        sample["rendered"] = [
            [reward, [_rendering(one.image, images, videos) for one in made]] for reward, made in shot.rendered.items()
        ]
    if shot.noise is not None:
        sample["noise"] = shot.noise
    if shot.steps:
        sample["steps"] = list(shot.steps)
    return {
        **sample,
        "parts": [
            [f"{reward} / {name}", short(score)]
            for reward, scores in shot.sub_scores.items()
            for name, score in scores.items()
        ],
        "notes": [[rewards.index(reward), note] for reward, note in shot.notes.items()],
    }


def _pairs_of(values: Mapping[str, float]) -> list[list[Any]]:
    return [[name, short(value)] for name, value in values.items()]
