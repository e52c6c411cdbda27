"""The page on which a person marks samples, and the calls that wait for the marks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from importlib import resources
from typing import Any

from ...votes.local_page import PageHandler, PageRefused, PageServer, number_in
from ..waiting import within
from .kept_marks import MarksFile, Medium, ShownGroup

LONGEST = 1 << 16
WAIT_SECONDS = 3600.0
PARTS = {
    "": ("text/html; charset=utf-8", "marking.html"),
    "marking.css": ("text/css; charset=utf-8", "marking.css"),
    "marking.js": ("text/javascript; charset=utf-8", "marking.js"),
}


class Desk:
    """The samples that wait for marks. One call waits at a time, and others wait for their turn.

    Args:
        file: keeps the marks.
        question: what the page asks.
    """

    def __init__(self, file: MarksFile, question: str) -> None:
        self.file, self.question = file, question
        self.call = 0
        self._open: list[ShownGroup] = []
        self._turn, self._lock, self._done = threading.Lock(), threading.Lock(), threading.Event()

    def ask(self, asked: Sequence[ShownGroup]) -> list[tuple[int, ...] | None]:
        """Return the marks of each of these; wait until the person has said them.

        Raises:
            Unwanted: the run is to end before the person has answered.
        """
        with self._turn:
            new = {one.key: one for one in asked if not self.file.has(one)}
            if new:
                with self._lock:
                    self._done.clear()
                    self._open, self.call = list(new.values()), self.call + 1
                try:
                    while not within(self._done, WAIT_SECONDS):
                        pass
                finally:
                    with self._lock:
                        self._open = []
            return [self.file.of(one) for one in asked]

    def state(self) -> dict[str, Any]:
        """What the page shows: how many prompts wait, how many of them are marked, and the next one."""
        with self._lock:
            left = [place for place, one in enumerate(self._open) if not self.file.has(one)]
            return {
                "call": self.call,
                "question": self.question,
                "total": len(self._open),
                "done": len(self._open) - len(left),
                "next": left[0] if left else None,
                "marked": len(self.file),
            }

    def show(self, call: int, place: int) -> dict[str, Any]:
        """The samples of a prompt as the page gets them, with the marks that they have so far."""
        one = self._asked(call, place)
        known = self.file.has(one)
        return {
            "prompt": one.prompt,
            "given": [f"given/{call}/{place}/{at}" for at in range(len(one.given))],
            "samples": [
                {"text": sample}
                if isinstance(sample, str)
                else {"kind": sample.kind, "address": f"samples/{call}/{place}/{at}"}
                for at, sample in enumerate(one.samples)
            ],
            "marks": list(self.file.of(one) or ()) if known else [],
            "known": known,
        }

    def picture(self, call: int, place: int, at: int, *, given: bool) -> Medium:
        """A sample that is no text, or with `given` a picture of the prompt."""
        one = self._asked(call, place)
        shown = one.given if given else one.samples
        found = shown[at] if at < len(shown) else None
        if not isinstance(found, Medium):
            raise PageRefused(404, "there is no such picture")
        return found

    def mark(self, call: int, place: int, marks: Sequence[int] | None) -> None:
        """Keep what the person says; the call goes on when it was the last of its prompts."""
        one = self._asked(call, place)
        if marks is not None and len(marks) != len(one.samples):
            raise PageRefused(400, f"there are {len(one.samples)} samples; send a mark for each")
        with self._lock:
            try:
                self.file.add(one, marks)
            except OSError as error:
                why = error.strerror or "the disk may be full"
                raise PageRefused(500, f"the marks were not saved in {self.file.path}: {why}") from error
            if all(self.file.has(other) for other in self._open):
                self._done.set()

    def _asked(self, call: int, place: int) -> ShownGroup:
        with self._lock:
            if call != self.call or place >= len(self._open):
                raise PageRefused(409, "the run no longer asks about these samples")
            return self._open[place]


class MarkingServer(PageServer):
    """Serves a desk on 127.0.0.1, in a thread of its own.

    Args:
        desk: the desk.
        port: port to listen at; 0 for any free port.

    Raises:
        ValueError: the port cannot be used.
    """

    def __init__(self, desk: Desk, port: int) -> None:
        super().__init__(MarkingHandler, port, "give the reward `person` another `port`, or leave it out")
        self.desk = desk
        threading.Thread(target=self.serve_forever, name="marking page", daemon=True).start()


class MarkingHandler(PageHandler):
    """One request."""

    server: MarkingServer

    def get(self, place: list[str]) -> None:
        """Answer with a part of the page, the state, a prompt, or one of its pictures."""
        desk = self.server.desk
        match place:
            case [name] if name in PARTS:
                kind, file = PARTS[name]
                self.send_content(200, kind, resources.files(__package__).joinpath(file).read_bytes())
            case ["state"]:
                self.send_object(200, desk.state())
            case ["prompts", call, number]:
                self.send_object(200, desk.show(number_in(call), number_in(number)))
            case ["samples" | "given" as what, call, number, at]:
                found = desk.picture(number_in(call), number_in(number), number_in(at), given=what == "given")
                self.send_content(200, found.kind, found.content, kept=True)
            case _:
                raise PageRefused(404, "there is nothing at this address")

    def post(self, place: list[str]) -> None:
        """Take marks."""
        if place != ["marks"]:
            raise PageRefused(404, "there is nothing at this address")
        said = self.body(LONGEST)
        if set(said) != {"call", "number", "marks"} or not all(
            type(said[name]) is int and said[name] >= 0 for name in ("call", "number")
        ):
            raise PageRefused(400, "the body must be an object of `call`, `number` and `marks`")
        marks = said["marks"]
        if marks is not None and not (
            isinstance(marks, list) and all(type(mark) is int and mark in (0, 1) for mark in marks)
        ):
            raise PageRefused(400, "`marks` must be null, or a list of 0 and 1")
        self.server.desk.mark(said["call"], said["number"], marks)
        self.send_object(200, self.server.desk.state())
