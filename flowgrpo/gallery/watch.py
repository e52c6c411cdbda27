"""Keeps the gallery up to date while runs go on."""

from collections.abc import Callable, Sequence
from pathlib import Path

from ..intake.json_text import lines_of
from .build import build_gallery
from .run_reading import Run, read_run


class Follower:
    """The gallery of runs that go on. It is built again when a run has written something.

    Only files whose content changed are written, and the open page finds them by itself.

    Args:
        folders: run folders; nothing is built before every run has samples.
        out: see `build_gallery`.
        link: see `build_gallery`.
        fps: see `build_gallery`.

    Raises:
        ValueError: a folder is not a run.

    Attributes:
        page: the page, if it was built.
        size: bytes of the records that the page shows.
    """

    def __init__(
        self, folders: Sequence[Path], out: Path | None = None, *, link: bool = False, fps: float | None = None
    ) -> None:
        for folder in folders:
            if not (folder / "config.yaml").is_file():
                read_run(folder)  # says what is wrong with it
        self.folders, self.out, self.link, self.fps = folders, out, link, fps
        self.page: Path | None = None
        self.size = 0
        self._seen: list[tuple[int, int]] | None = None

    def look(self) -> bool:
        """Build the gallery if something is new and every run has samples; returns whether something is new."""
        now = _stamp(self.folders)
        if now == self._seen:
            return False
        if all(_has_samples(folder) for folder in self.folders):
            self.page = build_gallery(self.folders, self.out, link=self.link, live=True, fps=self.fps)
            self.size = sum(size for size, _ in now)
        self._seen = now
        return True

    def ended(self) -> bool:
        """Whether every run has made its final evaluation."""
        return all(ended(read_run(folder)) for folder in self.folders)

    def close(self) -> Path | None:
        """Tell the page to stop looking for newer data; returns the page, or None if there are no samples yet."""
        return None if self.page is None else build_gallery(self.folders, self.out, link=self.link, fps=self.fps)


def watch(
    folders: Sequence[Path], out: Path | None, wait: Callable[[], object], report: Callable[[str], None], *,
    link: bool = False, fps: float | None = None,
) -> Path:  # fmt: skip
    """Follow runs until the last of them has made its final evaluation, or `wait` raises KeyboardInterrupt.

    Args:
        folders: run folders; the function waits for the first samples of every run.
        out: see `build_gallery`.
        wait: called between two readings.
        report: called with a line of text for everything that was done.
        link: see `build_gallery`.
        fps: see `build_gallery`.

    Raises:
        ValueError: a folder is not a run, or there were no samples.
    """
    follower = Follower(folders, out, link=link, fps=fps)
    try:
        while True:
            if follower.look():
                shown = f"{follower.page}: {follower.size:,} bytes of records"
                report(shown if follower.page else "waiting for the first samples")
                if follower.page and follower.ended():
                    break
            wait()
    except KeyboardInterrupt:
        report("no longer watching")
    page = follower.close()
    if page is None:
        raise ValueError(f"no samples yet in {', '.join(map(str, folders))}; watch again when the runs evaluate")
    return page


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
