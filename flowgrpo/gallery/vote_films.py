"""The videos of the pairs that people vote on, made while they vote."""

import tempfile
import threading
from pathlib import Path

from ..media.video import can_encode
from .clips import rate_of_run, write_clip
from .vote_pairs import Candidate


class VoteFilms:
    """Videos in a temporary folder, which is removed with this object.

    Args:
        fps: frames a second, or None for the rate of each run's call.

    Raises:
        ImportError: the package that encodes videos is not there. Nobody can choose between videos by their frames.
    """

    def __init__(self, fps: float | None) -> None:
        if not can_encode():
            raise ImportError(
                "the samples are videos, and a browser needs the package av to play them; install it with "
                "`pip install '.[video]'`"
            )
        self.fps = fps
        self._folder = tempfile.TemporaryDirectory(prefix="flowgrpo-vote-")
        self._made: dict[Path, Path | None] = {}
        self._turn = threading.Lock()

    def file(self, sample: Candidate) -> Path | None:
        """The video of a sample; None if its frames cannot be read.

        Raises:
            OSError: the disk has no room for the video.
        """
        source = sample.file
        assert source is not None
        # The page asks for the next pair in advance, and the same video must not be made twice.
        with self._turn:
            if source not in self._made:
                path = Path(self._folder.name) / f"{len(self._made)}.webm"
                rate = rate_of_run(sample.source.run, self.fps)
                self._made[source] = path if write_clip(path, source, sample.shot.frames, rate) else None
            return self._made[source]
