"""A person in the place of a reward model: the run waits while the person marks the good samples of each prompt."""

from __future__ import annotations

import io
import math
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...media.sound import write_sound
from ...media.video import FASTEST, RATE, SLOWEST, write_video
from ..pixels import load_picture, to_bytes
from ..scores import Scores
from .kept_marks import MarksFile, Medium, ShownGroup, check_name
from .marking import Desk, MarkingServer

PNG, WEBP, WAV = "image/png", "image/webp", "audio/wav"
SHOWN = ("image", "target_image")
"""Columns whose pictures are shown beside the samples."""
SIDE = 1024
"""Longest side of a prompt's picture on the page, in pixels."""


def announce(url: str) -> None:
    """Tell the person where the page is."""
    print(f"person: mark the samples at {url}", file=sys.stderr, flush=True)


class Person:
    """A person's marks: 1 for a sample that is marked as good, else 0. The run waits for them on a page.

    The page is for the browser of this machine alone, and its address is printed when it opens. It shows all samples of
    a prompt at once. A prompt that the person skips has no scores. All marks are kept in a file, by the content of the
    samples. So a run that goes on after an interruption asks about nothing twice, as long as it makes the same samples
    again.

    Args:
        answers: file of the marks, which ends in `.jsonl`. Several runs may share it.
        port: port of the page on 127.0.0.1; 0 takes any free port.
        question: what the page asks.
        fps: frames a second of videos.

    Raises:
        ValueError: an option is wrong, the file holds something else, or the run has several processes.
    """

    name = "person"
    whole_group = True

    def __init__(
        self, answers: str = "person.jsonl", *, port: int = 0, question: str = "Which are good?", fps: float = RATE
    ) -> None:
        self.check_options(self.name, {"answers": answers, "port": port, "question": question, "fps": fps})
        self.port, self.fps = port, float(fps)
        self.desk = Desk(MarksFile(Path(answers).expanduser()), question)
        self.announce: Callable[[str], None] = announce
        self._server: MarkingServer | None = None

    @staticmethod
    def check_options(name: str, options: Mapping[str, Any]) -> None:
        """Refuse options that could not work, before a model is loaded.

        Raises:
            ValueError: an option is wrong, or the run has several processes.
        """
        answers, port, fps = options.get("answers", "person.jsonl"), options.get("port", 0), options.get("fps", RATE)
        if not isinstance(answers, str) or not answers:
            raise ValueError(f"{name}: `answers` is {answers!r}; give the path of a file")
        check_name(Path(answers))
        if type(port) is not int or not 0 <= port < 2**16:
            raise ValueError(f"{name}: `port` is {port!r}; give a number from 0 to 65535")
        if isinstance(fps, bool) or not isinstance(fps, int | float) or not SLOWEST <= fps <= FASTEST:
            raise ValueError(f"{name}: `fps` is {fps!r}; give frames a second from {SLOWEST:g} to {FASTEST:g}")
        question = options.get("question", "?")
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"{name}: `question` is {question!r}; give a text")
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise ValueError(
                f"{name}: each of the {os.environ['WORLD_SIZE']} processes would open a page of its own; serve the "
                "reward in one process with `flowgrpo rewards serve person`, and use the reward `remote`"
            )

    def __call__(
        self,
        prompts: Sequence[str],
        groups: Sequence[int],
        images: Tensor | None = None,
        completions: Sequence[str] | None = None,
        sounds: Tensor | None = None,
        sampling_rate: int | None = None,
        **columns: Any,
    ) -> Scores:
        """Wait for the marks of whole groups.

        Args:
            prompts: B strings.
            groups: B group ids, in any order.
            images: [B, 3, H, W] in [0, 1], or videos [B, F, 3, H, W].
            completions: B strings, instead of images.
            sounds: [B, C, S] in [-1, 1], instead of images.
            sampling_rate: samples a second of sounds.
            columns: name -> B values. The pictures of the columns `image` and `target_image` are shown.

        Returns:
            Scores with B values, 1 or 0; NaN for the samples of a prompt that was skipped.

        Raises:
            ValueError: the port cannot be used.
        """
        rows: dict[int, list[int]] = {}
        for row, group in enumerate(groups):
            rows.setdefault(int(group), []).append(row)
        shown: list[str | Medium] = list(completions or ())
        if images is not None:
            shown = [_picture(image) if image.ndim == 3 else _film(image, self.fps) for image in to_bytes(images).cpu()]
        elif sounds is not None:
            assert sampling_rate is not None
            shown = [_sound(sound, sampling_rate) for sound in sounds.cpu()]
        given = [_given([columns[name][own[0]] for name in SHOWN if name in columns]) for own in rows.values()]
        asked = [
            ShownGroup(self.desk.question, prompts[own[0]], tuple(shown[row] for row in own), pictures)
            for own, pictures in zip(rows.values(), given, strict=True)
        ]
        if self._server is None and not all(self.desk.file.has(one) for one in asked):
            self._server = MarkingServer(self.desk, self.port)
            self.announce(self._server.url)
        values = torch.full((len(prompts),), math.nan)
        for own, marks in zip(rows.values(), self.desk.ask(asked), strict=True):
            if marks is not None:
                values[own] = torch.tensor(marks, dtype=torch.float32)
        return Scores(values)

    def close(self) -> None:
        """Close the page."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


def _picture(pixels: Tensor) -> Medium:
    from PIL import Image

    kept = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(kept, "PNG")
    return Medium(PNG, kept.getvalue())


def _film(frames: Tensor, fps: float) -> Medium:
    from PIL import Image

    stills = [Image.fromarray(frame.permute(1, 2, 0).numpy()) for frame in frames]
    return Medium(WEBP, _written("film.webp", lambda path: write_video(path, stills, fps)))


def _sound(sound: Tensor, rate: int) -> Medium:
    return Medium(WAV, _written("sound.wav", lambda path: write_sound(path, sound.numpy(), rate)))


def _written(name: str, write: Callable[[Path], None]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / name)
        return (Path(folder) / name).read_bytes()


def _given(values: Sequence[Any]) -> tuple[Medium, ...]:
    """The pictures of a prompt, small enough for a page. A column that holds something else than paths is left out."""
    from PIL import Image

    paths = [path for value in values for path in (value if isinstance(value, list) else [value])]
    found = []
    for path in paths:
        if not isinstance(path, str) or not Path(path).is_file():
            continue
        image = Image.fromarray(to_bytes(load_picture(Path(path))).permute(1, 2, 0).numpy())
        image.thumbnail((SIDE, SIDE))
        kept = io.BytesIO()
        image.save(kept, "PNG")
        found.append(Medium(PNG, kept.getvalue()))
    return tuple(found)
