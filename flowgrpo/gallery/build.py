"""Building the gallery: one HTML file that opens from disk, without a server or a network.

Styles, script and data are inlined; images stay files, loaded lazily by relative path. The content-security
policy admits exactly our own script and style by their hashes, so that even a fault in the page's escaping
could not make a prompt or a completion run.
"""

import base64
import hashlib
import json
import math
import os
import re
import shutil
from importlib import resources
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from urllib.parse import quote

from .records import Pair, Run, Sample, read_run

MARKER = ".flowgrpo-gallery.json"
SAME = 1e-6  # gains up to this size count as no change, here and in page.js


def build_gallery(run: Path, out: Path | None = None) -> Path:
    """Write the gallery of a run, finished or still running, and return the path of its `index.html`.

    Building again replaces the files of the last build and nothing else; each file appears whole, under its
    final name, or not at all.

    Args:
        run: a run folder (`config.yaml`, `samples/index.jsonl`, `metrics.jsonl`).
        out: where to write. By default `run/gallery`, whose page shows the images in `run/samples`. Any
            other folder gets copies of the images, and can be published by itself.

    Raises:
        ValueError: `run` is not a run folder or has no evaluation samples, a record is malformed, or the
            output folder holds something that is not a gallery.
    """
    run = Path(run)
    home = run / "gallery"
    out = home if out is None else Path(out)
    contents = read_run(run)
    previous = _previous_files(out)
    copying = out.resolve() != home.resolve()
    images = sorted({shot.image for pair in contents.pairs for shot in pair.shots if shot and shot.image})
    copies = {f"samples/{image}": run / "samples" / image for image in images} if copying else {}
    page = render(payload(contents, "samples/" if copying else "../samples/"))

    out.mkdir(parents=True, exist_ok=True)
    wanted = {"index.html", *copies}
    # Listed before they are written: a build cut short is still known as ours, and the next one cleans up.
    _write_marker(out, wanted | previous)
    for name, source in copies.items():
        _copy(source, out / name)
    _write(out / "index.html", page.encode())
    for name in previous - wanted:
        (out / name).unlink(missing_ok=True)
    _write_marker(out, wanted)
    return out / "index.html"


def payload(run: Run, prefix: str) -> dict[str, Any]:
    """The page's data. Names given by users are list entries, never keys, so none can shadow a property.

    Args:
        run: the run folder's contents.
        prefix: relative URL of the samples folder, ending in a slash.
    """
    shots = [shot for pair in run.pairs for shot in pair.shots if shot]
    rewards = _names([shot.rewards for shot in shots] + [shot.notes for shot in shots])
    columns = _names(shot.columns for shot in shots)
    keys = _names(run.metrics)
    return {
        "name": run.name,
        "facts": run.facts,
        "config": run.config,
        "skipped": run.skipped,
        "text": run.text,
        "prefix": prefix,
        "checkpoints": run.checkpoints,
        "rewards": rewards,
        "columns": columns,
        "summary": [summary for reward in rewards if (summary := summarize(run, reward))],
        "iterations": [int(row["iteration"]) for row in run.metrics],
        "series": [
            {"key": key, "values": [_short(row.get(key)) for row in run.metrics]} for key in keys if key != "iteration"
        ],
        "pairs": [_pair(pair, rewards, columns) for pair in run.pairs],
    }


def summarize(run: Run, reward: str) -> dict[str, Any] | None:
    """How one reward moved from the first evaluated iteration to the last, over samples of the same seed.

    The standard error is that of the mean gain over prompts, the seeds of a prompt being averaged first:
    they are not independent. Pairs in which the reward does not apply to one sample are left out. `whole`
    holds the trainer's own means of those two evaluations, which may cover more samples than were saved.

    Returns:
        The statistics, or None when no pair has this reward at both ends.
    """
    before, after = [], []
    gains: dict[tuple[str, str], list[float]] = {}
    for pair in run.pairs:
        base, tuned = pair.shots[0], pair.shots[-1]
        if base and tuned and reward in base.rewards and reward in tuned.rewards:
            before.append(base.rewards[reward])
            after.append(tuned.rewards[reward])
            gains.setdefault((base.prompt_id, base.prompt), []).append(after[-1] - before[-1])
    if not before:
        return None
    every = [gain for group in gains.values() for gain in group]
    per_prompt = [fmean(group) for group in gains.values()]
    means = {row["iteration"]: row.get(f"eval/{reward}") for row in run.metrics}
    whole = [means.get(run.checkpoints[0]), means.get(run.checkpoints[-1])]
    return {
        "reward": reward,
        "before": _short(fmean(before)),
        "after": _short(fmean(after)),
        "error": _short(stdev(per_prompt) / math.sqrt(len(per_prompt))) if len(per_prompt) > 1 else None,
        "prompts": len(per_prompt),
        "pairs": len(every),
        "gained": sum(gain > SAME for gain in every),
        "lost": sum(gain < -SAME for gain in every),
        "whole": None if None in whole else [_short(mean) for mean in whole],
    }


def render(data: dict[str, Any]) -> str:
    """Put the data, script and style into the page's template."""
    here = resources.files(__package__)
    style = here.joinpath("style.css").read_text(encoding="utf-8")
    script = "".join(here.joinpath(name).read_text(encoding="utf-8") for name in ("charts.js", "texts.js", "page.js"))
    parts = {
        "policy": (
            f"default-src 'none'; img-src 'self' file:; style-src '{_digest(style)}'; "
            f"script-src '{_digest(script)}'; base-uri 'none'; form-action 'none'"
        ),
        "style": style,
        "script": script,
        "data": inline_json(data),
    }
    template = here.joinpath("index.html").read_text(encoding="utf-8")
    # One pass, so that a prompt that looks like a placeholder stays a prompt.
    return re.sub(r"@@(\w+)@@", lambda match: parts[match[1]], template)


def inline_json(data: object) -> str:
    """JSON that can stand inside a script element.

    Plain ASCII: U+2028, U+2029 and lone surrogates come out as escapes, and so do the three characters that
    could end the element, open a comment in it, or start an entity.
    """
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _pair(pair: Pair, rewards: list[str], columns: list[str]) -> dict[str, Any]:
    first = pair.first
    return {
        "prompt": first.prompt,
        "id": first.prompt_id,
        "seed": first.seed,
        "columns": [first.columns.get(name) for name in columns],
        "shots": [_shot(shot, rewards) if shot else None for shot in pair.shots],
    }


def _shot(shot: Sample, rewards: list[str]) -> dict[str, Any]:
    image = quote(shot.image) if shot.image else None
    return {
        **({"image": image} if shot.completion is None else {"completion": shot.completion}),
        "rewards": [_short(shot.rewards.get(name)) for name in rewards],
        "parts": [
            [f"{reward} / {name}", _short(score)]
            for reward, scores in shot.sub_scores.items()
            for name, score in scores.items()
        ],
        "notes": [[rewards.index(reward), note] for reward, note in shot.notes.items()],
    }


def _names(mappings: Any) -> list[str]:
    """All keys in the order in which they first appear."""
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


def _short(value: float | None) -> float | None:
    """Nine digits: enough to tell a ratio of 1 from one that is off by a float32 rounding."""
    return None if value is None else float(f"{value:.9g}")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _previous_files(out: Path) -> set[str]:
    """Names of the files that the last build left in `out`; refuses a folder that is somebody else's."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return set()
    try:
        names = json.loads((out / MARKER).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{out} exists and was not written by the gallery (it has no readable {MARKER}). "
            "Name a new or an empty folder."
        ) from error
    root = out.resolve()
    return {name for name in names if isinstance(name, str) and (out / name).resolve().is_relative_to(root)}


def _write_marker(out: Path, names: set[str]) -> None:
    _write(out / MARKER, (json.dumps({"files": sorted(names)}, indent=1) + "\n").encode())


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _copy(source: Path, path: Path) -> None:
    """Copy an image, unless an equal copy (by size and time) is there from the last build."""
    kept, fresh = path.stat() if path.is_file() else None, source.stat()
    if kept and (kept.st_size, kept.st_mtime_ns) == (fresh.st_size, fresh.st_mtime_ns):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        shutil.copy2(source, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
