"""What a gallery shows, and notes on what it cannot show: unreadable lines, missing or damaged pictures, videos."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from ..media.video import can_encode
from ..votes.lines import iterate_jsonl
from .clips import frame_counts
from .run_reading import Run


def counts_of(runs: Sequence[Run]) -> str:
    """How many samples of which runs a gallery shows."""
    counts = [sum(len(pair.shots) for pair in run.pairs) for run in runs]
    if len(runs) == 1:
        return f"1 run, {_samples(counts[0])}"
    each = ", ".join(f"{count:,} of {run.folder}" for run, count in zip(runs, counts))
    return f"{len(runs)} runs, {_samples(sum(counts))}: {each}"


def _samples(count: int) -> str:
    return "1 sample" if count == 1 else f"{count:,} samples"


def notes_on(runs: Sequence[Run]) -> list[str]:
    """Lines of text that say what is left out of the gallery, and where; no line if everything is shown."""
    notes = []
    for run in runs:
        index, metrics = run.samples / "index.jsonl", run.folder / "metrics.jsonl"
        notes += _lines(index, [number for number, record in iterate_jsonl(index) if record is None])
        if metrics.is_file():
            read = list(iterate_jsonl(metrics))
            notes += _lines(
                metrics, [number for number, record in read if type((record or {}).get("iteration")) is not int]
            )
        notes += _pictures(run)
        notes += _videos(run)
    return notes


def _videos(run: Run) -> list[str]:
    count = len(frame_counts(run))
    if not count or can_encode():
        return []
    return [
        f"the {count} videos of {run.folder} are shown by their first frames; `pip install '.[video]'` makes them move"
    ]


def _lines(path: Path, unread: list[int]) -> list[str]:
    with path.open("rb") as file:
        lines = file.read().split(b"\n")
    # A run that still goes on may not have finished its last line.
    found = [number for number in unread if number < len(lines)]
    if not found:
        return []
    count = "1 line" if len(found) == 1 else f"{len(found)} lines"
    return [f"{count} of {path} cannot be read, the first is line {found[0]}; they are left out"]


def _pictures(run: Run) -> list[str]:
    shots = [shot for pair in run.pairs for shot in pair.shots.values()]
    missing = {shot.missing for shot in shots if shot.missing}
    missing |= {one.missing for shot in shots for made in shot.rendered.values() for one in made if one.missing}
    there = {image for shot in shots for image, _ in shot.images}
    lost = missing | {image for image in there if not _readable(run.samples / image)}
    if not lost:
        return []
    count = len(there) + len(missing)
    return [
        f"{len(lost)} of {count} pictures of {run.folder} are missing or damaged, the first is "
        f"{run.samples / sorted(lost)[0]}; their places are left empty"
    ]


def _readable(path: Path) -> bool:
    try:
        with Image.open(path) as image:
            image.verify()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return False
    return True
