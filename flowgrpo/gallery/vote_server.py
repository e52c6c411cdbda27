"""The page of `flowgrpo gallery --vote`: one person's ballots, on a page for this machine alone.

The data for the page do not say which sample is from which set.
"""

import re
import secrets
import threading
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ..votes.file import CHOICES, append_vote, read_votes
from ..votes.local_page import PageHandler, PageRefused, PageServer, number_in
from .run_reading import Run
from .vote_films import VoteFilms
from .vote_pairs import Ballot, Candidate, Source, ballots_of
from .vote_report import report_on
from .voted_samples import VotedSamples

TYPES = {
    ".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp", ".gif": "image/gif",
    ".avif": "image/avif", ".webm": "video/webm",
}  # fmt: skip
PARTS = {
    "": ("text/html; charset=utf-8", ("vote.html",)),
    "vote.css": ("text/css; charset=utf-8", ("style.css", "vote.css")),
    "vote.js": ("text/javascript; charset=utf-8", ("elements.js", "texts.js", "players.js", "vote.js")),
}


class Booth:
    """One person's ballots in their order, and the file that keeps the choices."""

    def __init__(
        self,
        runs: Sequence[Run],
        sources: Sequence[Source],
        path: Path,
        session: str | None = None,
        again: bool = False,
        fps: float | None = None,
    ) -> None:
        """Read the file, and continue the session where it stopped.

        Args:
            runs: the runs that the report covers.
            sources: see `sources_of`.
            path: file of votes; it need not exist yet.
            session: name of the session, which seeds the order. The default is the session of the last vote in the
                file, or a new session.
            again: also show pairs that the session has voted on.
            fps: frames a second of videos; by default as the call of each run's recipe says.

        Raises:
            ValueError: there is nothing to vote on, or the file holds something that is not a vote.
            ImportError: some samples are videos, and the package that encodes them is not there.
        """
        if session is not None and not re.fullmatch(r"[\w.-]{1,64}", session):
            raise ValueError(f"the session is {session!r}; use up to 64 letters, digits, '_', '.' and '-'")
        votes, _ = read_votes(path)
        self.runs, self.path = runs, path
        self.session = session or (votes[-1].session if votes else secrets.token_hex(4))
        self.ballots, self.same = ballots_of(sources, self.session)
        samples = VotedSamples(runs, path.parent)
        past = {vote.key: vote.choice for vote in votes if vote.session == self.session and samples.has(vote)}
        keys = [] if again else [ballot.key(path.parent) for ballot in self.ballots]
        self.choices = {number: past[key] for number, key in enumerate(keys) if key in past}
        self._turn = threading.Lock()
        sides = (side for ballot in self.ballots for side in (ballot.left, ballot.right))
        self._films = VoteFilms(fps) if any(side.film for side in sides) else None

    def progress(self) -> dict[str, Any]:
        """Number of ballots, of ballots that were voted on, and of equal pairs; and the next ballot (None: no more)."""
        following = next((number for number in range(len(self.ballots)) if number not in self.choices), None)
        return {"total": len(self.ballots), "voted": len(self.choices), "next": following, "same": self.same}

    def show(self, number: int) -> dict[str, Any]:
        """A ballot as the page gets it: what was asked, with its pictures, the samples, and the choice so far."""
        ballot = self._ballot(number)
        sides: dict[str, Any] = {}
        for side, its in (("left", ballot.left), ("right", ballot.right)):
            text, kind = its.shot.completion, "video" if its.film else "picture"
            sides[side] = {kind: f"{kind}s/{number}/{side}"} if text is None else {"completion": text}
            if text is not None:
                sides[side]["rendered"] = [f"rendered/{number}/{side}/{at}" for at in range(len(ballot.rendered(side)))]
        given = [f"prompts/{number}/{at}" for at in range(len(ballot.left.shot.pictures))]
        messages = [[one["role"], one["content"]] for one in ballot.left.shot.messages]
        shown = {"prompt": ballot.left.shot.prompt, "messages": messages, "pictures": given}
        return {"number": number, **shown, **sides, "choice": self.choices.get(number)}

    def given(self, number: int, at: int) -> Path:
        """The file of a picture of the prompt."""
        its = self._ballot(number).left
        if at >= len(its.shot.pictures):
            raise PageRefused(404, "there is no such picture")
        return its.source.run.samples / its.shot.pictures[at]

    def picture(self, number: int, side: str) -> Path:
        """The image file of a side."""
        file = self._side(number, side).file
        if file is None:
            raise PageRefused(404, "there is no such picture")
        return file

    def rendered(self, number: int, side: str, at: int) -> Path:
        """The file of an image that a reward made of the completion of a side."""
        its = self._side(number, side)
        names = self._ballot(number).rendered(side)
        if at >= len(names):
            raise PageRefused(404, "there is no such picture")
        return its.source.run.samples / names[at]

    def video(self, number: int, side: str) -> Path:
        """The video of a side as WebM; it is made when it is first asked for."""
        its = self._side(number, side)
        file = self._films.file(its) if self._films is not None and its.film else None
        if file is None:
            raise PageRefused(404, "there is no such video, or its frames cannot be read")
        return file

    def choose(self, number: int, choice: str) -> None:
        """Save a choice in the file.

        Raises:
            PageRefused: the images cannot be read, or the file cannot be written. The choice then does not count.
        """
        ballot = self._ballot(number)
        with self._turn:
            try:
                append_vote(self.path, ballot.vote(self.session, choice, self.path.parent))
            except OSError as error:
                # The message leaves the file's name out, because the name of an image would reveal its set.
                raise PageRefused(
                    500, f"the choice was not saved: {error.strerror or 'the disk may be full'}"
                ) from error
            self.choices[number] = choice

    def _side(self, number: int, side: str) -> Candidate:
        ballot = self._ballot(number)
        if side not in ("left", "right"):
            raise PageRefused(404, "a pair has a left and a right side only")
        return ballot.left if side == "left" else ballot.right

    def _ballot(self, number: int) -> Ballot:
        if not 0 <= number < len(self.ballots):
            raise PageRefused(404, f"there is no pair {number}")
        return self.ballots[number]


class VoteServer(PageServer):
    """Serves a booth on 127.0.0.1.

    Args:
        booth: the booth.
        port: port to listen at; 0 for any free port.

    Raises:
        ValueError: the port cannot be used.
    """

    def __init__(self, booth: Booth, port: int = 0) -> None:
        super().__init__(Handler, port, "name another with --port, or leave --port out")
        self.booth = booth


class Handler(PageHandler):
    """One request."""

    server: VoteServer

    def get(self, place: list[str]) -> None:
        """Answer with a part of the page, a pair, one of its samples, or the results."""
        booth = self.server.booth
        match place:
            case [name] if name in PARTS:
                kind, files = PARTS[name]
                here = resources.files(__package__)
                self.send_content(200, kind, b"".join(here.joinpath(file).read_bytes() for file in files))
            case ["progress"]:
                self.send_object(200, booth.progress())
            case ["report"]:
                self.send_object(200, report_on(booth.runs, booth.path).as_json())
            case ["pairs", number]:
                self.send_object(200, booth.show(number_in(number)))
            case ["pictures", number, side]:
                self._send_file(lambda: booth.picture(number_in(number), side))
            case ["videos", number, side]:
                self._send_file(lambda: booth.video(number_in(number), side))
            case ["rendered", number, side, at]:
                self._send_file(lambda: booth.rendered(number_in(number), side, number_in(at)))
            case ["prompts", number, at]:
                self._send_file(lambda: booth.given(number_in(number), number_in(at)))
            case _:
                raise PageRefused(404, "there is nothing at this address")

    def post(self, place: list[str]) -> None:
        """Take a choice."""
        if place != ["votes"]:
            raise PageRefused(404, "there is nothing at this address")
        vote = self.body()
        if set(vote) != {"pair", "choice"}:
            raise PageRefused(400, "the body must be an object of `pair` and `choice`")
        if type(vote["pair"]) is not int or vote["choice"] not in CHOICES:
            raise PageRefused(400, f"`pair` must be a whole number, and `choice` one of {', '.join(CHOICES)}")
        self.server.booth.choose(vote["pair"], vote["choice"])
        self.send_object(200, self.server.booth.progress())

    def _send_file(self, find: Callable[[], Path]) -> None:
        try:
            file = find()
            content = file.read_bytes()
        except OSError as error:
            raise PageRefused(404, f"the sample cannot be shown: {error.strerror}") from error
        self.send_content(200, TYPES[file.suffix.lower()], content, kept=True)
