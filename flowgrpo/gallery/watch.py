"""Keeps the gallery up to date while runs go on."""

from collections.abc import Callable, Sequence
from pathlib import Path

from ..intake.json_text import lines_of
from .build import build_gallery
from .run_reading import Run, read_run


def watch(
    folders: Sequence[Path], out: Path | None, wait: Callable[[], object], report: Callable[[str], None], *,
    link: bool = False, fps: float | None = None,
) -> Path:  # fmt: skip
    """Build the gallery again whenever a run has written something, until all runs have ended.

    Only files whose content changed are written, and the page finds them by itself. When the last run has made its
    final evaluation, or `wait` raises KeyboardInterrupt, the page is told to stop looking for newer data.

    Args:
        folders: run folders; the function waits for the first samples of every run.
        out: see `build_gallery`.
        wait: called between two readings.
        report: called with a line of text for everything that was done.
        link: see `build_gallery`.
        fps: see `build_gallery`.
    """
    for folder in folders:
        if not (folder / "config.yaml").is_file():
            read_run(folder)  # says what is wrong with it
    seen: list[tuple[int, int]] | None = None
    page = None
    try:
        while True:
            now = _stamp(folders)
            if now != seen:
                if all(_has_samples(folder) for folder in folders):
                    page = build_gallery(folders, out, link=link, live=True, fps=fps)
                    report(f"{page}: {sum(size for size, _ in now):,} bytes of records")
                    if all(ended(read_run(folder)) for folder in folders):
                        break
                else:
                    report("waiting for the first samples")
                seen = now
            wait()
    except KeyboardInterrupt:
        report("no longer watching")
    if page is None:
        raise ValueError(f"no samples yet in {', '.join(map(str, folders))}; watch again when the runs evaluate")
    return build_gallery(folders, out, link=link, fps=fps)


def ended(run: Run) -> bool:
    """Whether the final evaluation is there: its metrics carry the number of iterations of the recipe."""
    settings = run.config.get("run")
    planned = settings.get("iterations") if isinstance(settings, dict) else None
    last = run.metrics[-1]["iteration"] if run.metrics else -1
    return isinstance(planned, int) and last >= planned


def _has_samples(folder: Path) -> bool:
    index = folder / "samples" / "index.jsonl"
    return index.is_file() and any(line.endswith("\n") for line in lines_of(index))


def _stamp(folders: Sequence[Path]) -> list[tuple[int, int]]:
    files = [folder / name for folder in folders for name in ("metrics.jsonl", "samples/index.jsonl", "config.yaml")]
    stats = [file.stat() if file.is_file() else None for file in files]
    return [(stat.st_size, stat.st_mtime_ns) if stat else (0, 0) for stat in stats]
