"""Exports of the gallery: a contact sheet, an animated comparison, a single HTML file, a dataset folder."""

import base64
import json
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from PIL import Image, ImageDraw, ImageOps

from ..media.video import check_video, frames_of, write_video
from ..votes.samples import Sample
from .build import make_thumbnails, places_from, read_runs, render
from .clips import make_videos, rate_of_run, video_file
from .export_rows import Row, choose, rows_of
from .lettering import font_for, note_on
from .page_files import write_new
from .pages import names, site_files
from .run_reading import Run
from .thumbnails import Thumbnails

CELL, GAP, LINE = 192, 12, 18  # pixels: side of an image, space between, height of a line of text
SMALL, LARGE = 12, 14  # pixels: height of the letters of a sheet, and of the heading of a frame
Cells = list[Image.Image]  # an image, or the frames of a video, each in a square of CELL pixels
GIVEN = "prompt"
"""Heading of the pictures of the prompts."""
PAPER, INK, QUIET = "#ffffff", "#1b2023", "#5c666c"


def write_sheet(folders: Sequence[Path], path: Path, reward: str | None, order: str, count: int) -> Path:
    """Write a contact sheet (PNG).

    Each chosen prompt and seed has a row: the pictures of the prompt if there are any, the sample of the base model,
    and the last sample of every run.

    Raises:
        ValueError: see `choose`; or the runs are of text; or the file exists or is not named .png.
    """
    if path.suffix.lower() != ".png":
        raise ValueError(f"a contact sheet is a PNG file; name it {path.with_suffix('.png')}")
    runs, rows = _chosen(folders, reward, order, count)
    note_on([*(row.first.prompt for row in rows), *map(_label, runs)])
    sheet = _sheet(_labels(runs, rows), rows, _cells(runs, rows), 0)
    return write_new(path, lambda file: sheet.save(file, "PNG"))


def write_animation(
    folders: Sequence[Path], path: Path, reward: str | None, order: str, count: int, fps: float | None = None
) -> Path:
    """Write an animated comparison (WebP, GIF, MP4 or WebM) of the chosen prompts and seeds.

    Of images, the first frame shows the samples of the base model in a grid. Then each run has a frame with its last
    samples. If the prompts have pictures, a frame of them comes before. Of videos, it is the contact sheet with all
    videos playing, at `fps` frames a second; by default as the call of the first run's recipe says.

    Raises:
        ValueError: see `choose`; or the runs are of text; or the file exists or has another suffix.
        ImportError: the format needs a package that is not there.
    """
    check_video(path)
    runs, rows = _chosen(folders, reward, order, count)
    note_on([*(row.first.prompt for row in rows), *map(_label, runs)])
    cells = _cells(runs, rows)
    length = max(len(cell) for of_row in cells for cell in of_row)
    path.parent.mkdir(parents=True, exist_ok=True)
    if length > 1:
        sheets = [_sheet(_labels(runs, rows), rows, cells, at) for at in range(length)]
        write_video(path, sheets, rate_of_run(runs[0], fps))
    else:
        write_video(path, _turns(_labels(runs, rows), cells), rate=1)
    return path


SOUND_ROOM = 64 * 2**20
"""Most bytes of sounds in a gallery of one file; as text they take a third more."""


def write_single(folders: Sequence[Path], path: Path, fps: float | None = None) -> Path:
    """Write the whole gallery as one HTML file; images are included as thumbnails only, and videos and sounds whole.

    Sounds are included up to `SOUND_ROOM` bytes, those of the last iterations first. The others have no player.

    Raises:
        ValueError: see `build_gallery`; or the file exists.
    """
    runs = read_runs(folders)
    with tempfile.TemporaryDirectory() as folder:
        images = make_thumbnails(Thumbnails(Path(folder)), runs)
        videos = make_videos(Path(folder), runs, images, fps)
        files = {found.name: found.file for of_run in images for found in of_run.values() if found}
        clips = {name: video_file(name) for of_run in videos for name in of_run.values()}
        thumbs, moving = (
            [[name, _text_of(Path(folder) / file)] for name, file in some.items()] for some in (files, clips)
        )
    data = site_files(runs, images, ["" for _ in runs], False, videos, places_from(path.parent, runs))
    page = render({**data, "thumbs": {"images": thumbs, "videos": moving, "sounds": _sounds(runs)}})
    return write_new(path, lambda file: file.write_bytes(page.encode()))


def _sounds(runs: Sequence[Run]) -> list[list[str]]:
    """Sounds as text, with the names by which the page knows them: the number of the run and the path."""
    found = [
        (iteration, f"{number}/{quote(shot.sound)}", run.samples / shot.sound)
        for number, run in enumerate(runs)
        for pair in run.pairs
        for iteration, shot in pair.shots.items()
        if shot.sound
    ]
    room, kept = SOUND_ROOM, list[list[str]]()
    for _, name, file in sorted(found, key=lambda one: -one[0]):
        if file.is_file() and (size := file.stat().st_size) <= room:
            room -= size
            kept.append([name, _text_of(file)])
    return kept


def write_dataset(folders: Sequence[Path], path: Path) -> Path:
    """Write all samples as a folder for `datasets.load_dataset`: images and `metadata.jsonl`; for text, `data.jsonl`.

    Every row has `file_name` (text: `completion`), `prompt`, `prompt_id`, `seed`, `run`, `phase` and `iteration`. If
    there are videos, it has `frames`: how many stand side by side in the image, 1 for a picture. Of a sound, the image
    shows the spectrum, and `sound` is the path of the WAV file in the folder. Every row has `reward_NAME` for each
    reward and `column_NAME` for each column of the prompt file; a missing value is null. The text `notes` holds the
    notes of the rewards. `rendered_NAME` lists the images that a reward made of the completion.

    Raises:
        ValueError: see `build_gallery`; or the folder exists.
    """
    runs = read_runs(folders)
    if path.exists():
        raise ValueError(f"{path} exists; name a new folder")
    samples = [
        (number, pair.phase, shot)
        for number, run in enumerate(runs)
        for pair in run.pairs
        for shot in pair.shots.values()
        if shot.image or shot.completion is not None
    ]
    rewards, columns = names(shot.rewards for *_, shot in samples), names(shot.columns for *_, shot in samples)
    rendered = names(shot.rendered for *_, shot in samples)
    videos = any(shot.frames > 1 for *_, shot in samples)
    copies: dict[Path, str] = {}

    def copied(image: Path, folder: Path) -> str:
        if image not in copies:
            copies[image] = f"images/rendered-{len(copies):06d}{image.suffix.lower()}"
            (folder / "images").mkdir(exist_ok=True)
            shutil.copyfile(image, folder / copies[image])
        return copies[image]

    def write(folder: Path) -> None:
        lines: list[str] = []
        folder.mkdir()
        for number, phase, shot in samples:
            row: dict[str, Any] = {"completion": shot.completion}
            if shot.image:
                # A word in the name could be taken for the name of a split when the folder is read.
                row = {"file_name": f"images/{len(lines):06d}{Path(shot.image).suffix.lower()}"}
                (folder / "images").mkdir(exist_ok=True)
                shutil.copyfile(runs[number].samples / shot.image, folder / row["file_name"])
            row |= {"frames": shot.frames} if videos else {}
            if shot.sound:
                row["sound"] = f"sounds/{len(lines):06d}.wav"
                (folder / "sounds").mkdir(exist_ok=True)
                shutil.copyfile(runs[number].samples / shot.sound, folder / row["sound"])
            for name in rendered:
                made = [runs[number].samples / one.image for one in shot.rendered.get(name, ()) if one.image]
                row[f"rendered_{name}"] = [copied(image, folder) for image in made]
            row |= {"prompt": shot.prompt, "prompt_id": shot.prompt_id, "seed": shot.seed}
            row |= {"run": runs[number].name, "phase": phase, "iteration": shot.iteration}
            row |= {f"reward_{name}": shot.rewards.get(name) for name in rewards}
            row |= {f"column_{name}": shot.columns.get(name) for name in columns}
            row["notes"] = "\n".join(f"{reward}: {note}" for reward, note in shot.notes.items())
            lines.append(json.dumps(row) + "\n")
        (folder / ("data.jsonl" if runs[0].text else "metadata.jsonl")).write_text("".join(lines), encoding="utf-8")

    try:
        return write_new(path, write)
    finally:
        for left in path.parent.glob(f".{path.name}.*.tmp"):
            shutil.rmtree(left, ignore_errors=True)


def _text_of(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


def _chosen(folders: Sequence[Path], reward: str | None, order: str, count: int) -> tuple[list[Run], list[Row]]:
    runs = read_runs(folders)
    if runs[0].text:
        raise ValueError(f"{runs[0].folder} is a run of text; sheets and animations show images")
    rows = rows_of(runs)
    rewards = names(shot.rewards for row in rows for shot in row.shots if shot)
    return runs, choose(rows, rewards, reward, order, count)


def _label(run: Run) -> str:
    return f"{run.name}, iteration {run.iterations('eval')[-1]}"


def _labels(runs: Sequence[Run], rows: Sequence[Row]) -> list[str]:
    """The headings of the cells of a row."""
    return [*([GIVEN] if _pictured(rows) else []), "base", *(_label(run) for run in runs)]


def _pictured(rows: Sequence[Row]) -> bool:
    return any(row.first.pictures for row in rows)


def _sheet(labels: Sequence[str], rows: Sequence[Row], cells: Sequence[Sequence[Cells]], at: int) -> Image.Image:
    """The contact sheet, with frame number `at` of every video; a shorter video stays at its last frame."""
    width = GAP + len(labels) * (CELL + GAP)
    height = GAP + LINE + len(rows) * (CELL + 3 * LINE + GAP)
    sheet = Image.new("RGB", (max(width, 420), height), PAPER)
    pen = ImageDraw.Draw(sheet)
    for column, label in enumerate(labels):
        _letter(pen, (GAP + column * (CELL + GAP), GAP // 2), label, CELL, INK)
    top = GAP + LINE
    for row, of_row in zip(rows, cells):
        _letter(pen, (GAP, top), row.first.prompt, sheet.width - 2 * GAP, INK)
        scores = [*([""] if labels[0] == GIVEN else []), *map(_scores_line, row.shots)]
        for column, (line, cell) in enumerate(zip(scores, of_row, strict=True)):
            left = GAP + column * (CELL + GAP)
            sheet.paste(cell[min(at, len(cell) - 1)], (left, top + LINE))
            _letter(pen, (left, top + LINE + CELL + 2), line, CELL, QUIET)
        top += CELL + 3 * LINE + GAP
    return sheet


def _turns(labels: Sequence[str], cells: Sequence[Sequence[Cells]]) -> list[Image.Image]:
    """For each heading, a grid of its cells."""
    across = min(len(cells), 6)
    size = (GAP + across * (CELL + GAP), LINE + 2 * GAP + -(-len(cells) // across) * (CELL + GAP))
    frames = []
    for column, label in enumerate(labels):
        frame = Image.new("RGB", size, PAPER)
        pen = ImageDraw.Draw(frame)
        _letter(pen, (GAP, GAP // 2), label, size[0] - 2 * GAP, INK, LARGE)
        for place, of_row in enumerate(cells):
            left, top = place % across * (CELL + GAP), place // across * (CELL + GAP)
            frame.paste(of_row[column][0], (GAP + left, GAP + LINE + top))
        frames.append(frame)
    return frames


def _cells(runs: Sequence[Run], rows: Sequence[Row]) -> list[list[Cells]]:
    """For each row, the cells of `_labels`."""
    cells = [[_frames(shot, run) for shot, run in zip(row.shots, [runs[0], *runs])] for row in rows]
    if _pictured(rows):
        return [[[_given(row.first, runs[0])], *of_row] for row, of_row in zip(rows, cells)]
    return cells


def _given(shot: Sample, run: Run) -> Image.Image:
    """The pictures of a prompt side by side within a square."""
    found = []
    for name in shot.pictures:
        with (
            suppress(OSError, ValueError, SyntaxError, Image.DecompressionBombError),
            Image.open(run.samples / name) as opened,
        ):
            found.append(ImageOps.contain(opened.convert("RGBA"), (CELL, CELL)))
    if not found:
        return _square(None)
    joined = Image.new("RGBA", (sum(image.width for image in found), max(image.height for image in found)))
    left = 0
    for image in found:
        joined.paste(image, (left, (joined.height - image.height) // 2))
        left += image.width
    return _square(joined)


def _frames(shot: Sample | None, run: Run) -> Cells:
    """The image, or each frame of a video, within a square; an empty square if there is no readable image."""
    if shot is None or shot.image is None:
        return [_square(None)]
    try:
        with Image.open(run.samples / shot.image) as opened:
            image = opened.convert("RGBA")
        shown = [image] if image.width % shot.frames else frames_of(image, shot.frames)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return [_square(None)]
    return [_square(frame) for frame in shown]


def _square(image: Image.Image | None) -> Image.Image:
    cell = Image.new("RGB", (CELL, CELL), "#eef1f2")
    if image is None:
        return cell
    scale = CELL / max(image.size)
    how = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    image = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))), how)
    cell.paste(image, ((CELL - image.width) // 2, (CELL - image.height) // 2), image)
    return cell


def _scores_line(shot: Sample | None) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in shot.rewards.items()) if shot else "no image"


def _letter(
    pen: ImageDraw.ImageDraw, at: tuple[int, int], text: str, width: int, colour: str, size: int = SMALL
) -> None:
    """Draw a text as one line; the end of a line that is too long is replaced by an ellipsis."""
    line = " ".join(text[:400].split())
    font = font_for(line, size)
    while line and pen.textlength(line, font) > width:
        line = line[: len(line) * 9 // 10].rstrip("…") + "…" if len(line) > 2 else ""
    pen.text(at, line, colour, font)
