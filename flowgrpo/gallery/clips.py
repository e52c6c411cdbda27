"""The videos of a gallery: VP9 in WebM, which every current browser plays. Each is made once."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image

from ..media.video import can_encode, frames_of, rate_of, write_video
from .page_files import NO_ROOM
from .run_reading import Run
from .thumbnails import Thumbnail

_FORMAT = "video-1"  # part of every name: change it when the same frames would make another file


def frame_counts(run: Run) -> dict[str, int]:
    """The number of frames of each image that is a video, by its path."""
    shots = (shot for pair in run.pairs for shot in pair.shots.values())
    return {image: frames for shot in shots for image, frames in shot.images if frames > 1}


def video_file(name: str) -> str:
    """The path of a video within the gallery."""
    return f"videos/{name[:2]}/{name[2:]}.webm"


def videos_in(out: Path) -> set[str]:
    """Videos on disk, because a build that was cut short may not have listed all of its videos."""
    found = (path.relative_to(out).as_posix() for path in out.glob("videos/*/*.webm"))
    return {name for name in found if re.fullmatch(r"videos/[0-9a-f]{2}/[0-9a-f]{22}\.webm", name)}


def make_videos(
    out: Path, runs: Sequence[Run], thumbnails: Sequence[Mapping[str, Thumbnail | None]], fps: float | None
) -> list[dict[str, str]]:
    """Write the videos that are not there yet.

    Args:
        out: the gallery folder.
        runs: the runs.
        thumbnails: for each run, its thumbnails by path. The content of an image names its video.
        fps: frames a second, or None for the rate of each run's call.

    Returns:
        For each run, the names of its videos by path. A sample is left out if its picture cannot be cut into
        its frames. All are left out if the package av is not there.

    Raises:
        OSError: the disk has no room for a video.
    """
    if not can_encode():
        return [{} for _ in runs]
    return [_videos_of(out, run, images, fps) for run, images in zip(runs, thumbnails)]


def rate_of_run(run: Run, fps: float | None) -> float:
    """Frames a second of the videos of a run: `fps` if it is given, or else as the call of the run's recipe says."""
    model = run.config.get("model")
    return fps if fps is not None else rate_of(model.get("call") if isinstance(model, dict) else None)


def write_clip(path: Path, source: Path, frames: int, rate: float) -> bool:
    """Write the video of a picture whose frames stand side by side.

    Returns:
        Whether it could be written: the picture may be damaged, or may not be cut into so many frames.

    Raises:
        OSError: the disk has no room for the video.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with Image.open(source) as opened:
            strip = opened.convert("RGB")
        write_video(path, frames_of(strip, frames), rate)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise
        return False
    return True


def _videos_of(out: Path, run: Run, images: Mapping[str, Thumbnail | None], fps: float | None) -> dict[str, str]:
    rate = rate_of_run(run, fps)
    found = {}
    for image, frames in frame_counts(run).items():
        thumbnail = images.get(image)
        if thumbnail is None or thumbnail.width % frames:
            continue
        name = hashlib.sha256(f"{_FORMAT} {frames} {rate} {thumbnail.name}".encode()).hexdigest()[:24]
        if (out / video_file(name)).is_file() or write_clip(out / video_file(name), run.samples / image, frames, rate):
            found[image] = name
    return found
