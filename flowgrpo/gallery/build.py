"""Builds the gallery: a page and its data, which can be opened from disk without a server or a network.

The page contains the style and the script. The data are in separate scripts, and the images are beside them. The
content-security policy admits our own script and style by their hashes, and no other inline code. So even a fault in
the page's escaping cannot make a browser run code from a prompt or a completion.
"""

import base64
import hashlib
import os
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..intake.links import check_links
from .clips import frame_counts, make_videos, video_file, videos_in
from .page_files import MARKER, copy_file, previous_files, remove_stale, write_bytes, write_marker
from .pages import inline_json, script, site_files
from .run_reading import Run, read_run
from .thumbnails import CACHE, Thumbnail, Thumbnails

SCRIPTS = (
    "elements.js", "store.js", "view.js", "order.js", "texts.js", "players.js", "frames.js", "marks.js", "cards.js",
    "controls.js", "picture.js", "tree.js", "charts.js", "curves.js", "page.js",
)  # fmt: skip


def build_gallery(
    runs: Path | Sequence[Path],
    out: Path | None = None,
    *,
    link: bool = False,
    live: bool = False,
    fps: float | None = None,
) -> Path:
    """Write the gallery of runs, finished or still running, and return the path of its `index.html`.

    A second build replaces only the files that have changed. Each file is written whole before it gets its final name.

    Args:
        runs: run folders (`config.yaml`, `samples/index.jsonl`, `metrics.jsonl`).
        out: where to write. The default for one run is `run/gallery`, whose page shows the images in `run/samples`.
            Any other folder gets copies of the images, and can be published by itself.
        link: do not copy images; the page in `out` shows the images in the runs' folders.
        live: the page looks for newer data every few seconds.
        fps: frames a second of videos; by default as the call of the run's recipe says.

    Raises:
        ValueError: a folder is no run or has no samples, a record is malformed, some runs are of images and some of
            text, several runs are given without `out`, or the output folder holds something that is not a gallery, or
            links that lead out of it.
    """
    folders = [Path(run) for run in ([runs] if isinstance(runs, str | os.PathLike) else runs)]
    home = folders[0] / "gallery" if len(folders) == 1 else None
    if out is None and home is None:
        raise ValueError(f"{len(folders)} runs have no common folder; name one for their gallery with --out")
    out = Path(out) if out is not None else home
    assert out is not None
    contents = read_runs(folders)
    check_links(out)
    previous = previous_files(out) | _thumbnails_in(out) | videos_in(out)
    remove_stale(out)
    # Files are listed before they are written, so that the next build knows a build that was cut short, and cleans up.
    out.mkdir(parents=True, exist_ok=True)
    write_marker(out, previous | {"index.html", CACHE})

    copying = not link and (home is None or out.resolve() != home.resolve())
    copies = {
        f"samples/{number}/{image}": run.samples / image
        for number, run in enumerate(contents)
        for image in (image_names(run) if copying else ())
    }
    bases = [f"samples/{number}/" if copying else samples_url(run, out) for number, run in enumerate(contents)]
    thumbnails = Thumbnails(out)
    images = make_thumbnails(thumbnails, contents)
    videos = make_videos(out, contents, images, fps)
    data = site_files(contents, images, bases, live, videos, places_from(out, contents))
    files = {f"data/{name}.js": script(name, part) for name, part in data.items()}
    thumbs = {thumbnail.file for of_run in images for thumbnail in of_run.values() if thumbnail}
    clips = {video_file(name) for of_run in videos for name in of_run.values()}
    wanted = {"index.html", CACHE, *copies, *files, *thumbs, *clips}
    write_marker(out, wanted | previous)
    thumbnails.save()
    for name, source in copies.items():
        copy_file(source, out / name)
    # The page and the list of files come last, so that every file that they name exists.
    for name in sorted(files, key=lambda name: name == "data/site.js"):
        write_bytes(out / name, files[name])
    write_bytes(out / "index.html", render().encode())
    for name in previous - wanted:
        (out / name).unlink(missing_ok=True)
    write_marker(out, wanted)
    return out / "index.html"


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read run folders, each once.

    Raises:
        ValueError: no run is given, a run is malformed, or some runs are of images and some of text.
    """
    if not folders:
        raise ValueError("no run was named; give the folders that `flowgrpo train` wrote")
    runs = [read_run(folder) for folder in dict.fromkeys(folders)]
    odd = next((run for run in runs if run.text != runs[0].text), None)
    if odd is not None:
        kinds = ("completions", "images") if odd.text else ("images", "completions")
        raise ValueError(
            f"{odd.folder} is a run of {kinds[0]}, and {runs[0].folder} is a run of {kinds[1]}; build one gallery each"
        )
    return runs


def make_thumbnails(thumbnails: Thumbnails, runs: Sequence[Run]) -> list[dict[str, Thumbnail | None]]:
    """For each run, the thumbnails by path."""
    images = [image_names(run) for run in runs]
    frames = {run.samples / name: count for run in runs for name, count in frame_counts(run).items()}
    made = thumbnails.make((run.samples / name for run, of_run in zip(runs, images) for name in of_run), frames)
    return [{name: made[run.samples / name] for name in of_run} for run, of_run in zip(runs, images)]


def image_names(run: Run) -> list[str]:
    """The images of a run, the images of its completions, and the pictures of its prompts, sorted."""
    shots = [shot for pair in run.pairs for shot in pair.shots.values()]
    pictures = {name for shot in shots for name in shot.pictures}
    return sorted({image for shot in shots for image, _ in shot.images} | pictures)


def samples_url(run: Run, out: Path) -> str:
    """Relative URL of a run's samples as seen from a gallery folder, ending in a slash."""
    way = os.path.relpath(run.samples.resolve(), out.resolve()).replace(os.sep, "/")
    return quote(way, errors="surrogateescape") + "/"


def places_from(page: Path, runs: Sequence[Run]) -> list[str | None]:
    """Relative URLs of the working directory and of the runs as seen from the folder of a page, ending in a slash.

    A page that is opened from disk makes paths for commands of them. They are relative, so that a page that is
    published does not tell where on a machine it was made. A place on another drive has none.
    """

    def seen(folder: Path) -> str | None:
        try:
            way = os.path.relpath(folder.resolve(), page.resolve()).replace(os.sep, "/")
            return quote(way, errors="surrogateescape") + "/"
        except ValueError:
            return None

    return [seen(Path()), *(seen(run.folder) for run in runs)]


def render(embedded: dict[str, Any] | None = None) -> str:
    """The page. With `embedded` (data by file name), the page contains its data and loads no file."""
    here = resources.files(__package__)
    style = here.joinpath("style.css").read_text(encoding="utf-8")
    code = "".join(here.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS)
    # For a page opened from disk, `'self'` matches nothing in some browsers, hence `file:`.
    own, images = ("", "data:") if embedded is not None else ("'self' file: ", "'self' file:")
    parts = {
        "policy": (
            f"default-src 'none'; img-src {images}; media-src {images}; style-src '{_digest(style)}'; "
            f"script-src {own}'{_digest(code)}'; base-uri 'none'; form-action 'none'"
        ),
        "style": style,
        "script": code,
        "data": "".join(
            f'<script type="application/json" id="data-{name}">{inline_json(data)}</script>\n'
            for name, data in (embedded or {}).items()
        ),
    }
    template = here.joinpath("index.html").read_text(encoding="utf-8")
    # All markers are replaced in one pass, so that a prompt that looks like a marker is not replaced.
    return re.sub(r"@@(\w+)@@", lambda match: parts[match[1]], template)


def _thumbnails_in(out: Path) -> set[str]:
    """Thumbnails on disk, because a build that was cut short may not have listed all of its thumbnails."""
    found = (path.relative_to(out).as_posix() for path in out.glob("thumbs/*/*.webp"))
    return {name for name in found if re.fullmatch(r"thumbs/[0-9a-f]{2}/[0-9a-f]{22}\.webp", name)}


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


__all__ = ["MARKER", "build_gallery", "read_runs", "render"]
