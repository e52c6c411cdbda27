"""The page of `flowgrpo gallery --vote`: a server for this machine alone, and one person's ballots.

Other pages of the same browser, and other programs of the machine, can reach a local port. So every address begins
with a random token. The Host must be ours, because an attacker may point a name of their own at this machine. A choice
must come as JSON, which a form of another site cannot send. The data for the page do not say which sample is from which
set.
"""

import hmac
import json
import re
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any

from ..votes.file import CHOICES, append_vote, read_votes
from .run_reading import Run
from .vote_films import VoteFilms
from .vote_pairs import Ballot, Candidate, Source, ballots_of
from .vote_report import report_on
from .voted_samples import VotedSamples

LONGEST = 1024  # bytes of a request's body
DRAINED = 1 << 20  # a body that is too long is still read up to this number of bytes, so that the answer arrives
TYPES = {
    ".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp", ".gif": "image/gif",
    ".avif": "image/avif", ".webm": "video/webm",
}  # fmt: skip
POLICY = (
    "default-src 'none'; img-src 'self'; style-src 'self'; script-src 'self'; connect-src 'self'; media-src blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PARTS = {
    "": ("text/html; charset=utf-8", ("vote.html",)),
    "vote.css": ("text/css; charset=utf-8", ("style.css", "vote.css")),
    "vote.js": ("text/javascript; charset=utf-8", ("elements.js", "texts.js", "players.js", "vote.js")),
}


class VoteRefused(Exception):
    """A request that is refused, with a status and a message for the page."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


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
            raise VoteRefused(404, "there is no such picture")
        return its.source.run.samples / its.shot.pictures[at]

    def picture(self, number: int, side: str) -> Path:
        """The image file of a side."""
        file = self._side(number, side).file
        if file is None:
            raise VoteRefused(404, "there is no such picture")
        return file

    def rendered(self, number: int, side: str, at: int) -> Path:
        """The file of an image that a reward made of the completion of a side."""
        its = self._side(number, side)
        names = self._ballot(number).rendered(side)
        if at >= len(names):
            raise VoteRefused(404, "there is no such picture")
        return its.source.run.samples / names[at]

    def video(self, number: int, side: str) -> Path:
        """The video of a side as WebM; it is made when it is first asked for."""
        its = self._side(number, side)
        file = self._films.file(its) if self._films is not None and its.film else None
        if file is None:
            raise VoteRefused(404, "there is no such video, or its frames cannot be read")
        return file

    def choose(self, number: int, choice: str) -> None:
        """Save a choice in the file.

        Raises:
            VoteRefused: the images cannot be read, or the file cannot be written. The choice then does not count.
        """
        ballot = self._ballot(number)
        with self._turn:
            try:
                append_vote(self.path, ballot.vote(self.session, choice, self.path.parent))
            except OSError as error:
                # The message leaves the file's name out, because the name of an image would reveal its set.
                raise VoteRefused(
                    500, f"the choice was not saved: {error.strerror or 'the disk may be full'}"
                ) from error
            self.choices[number] = choice

    def _side(self, number: int, side: str) -> Candidate:
        ballot = self._ballot(number)
        if side not in ("left", "right"):
            raise VoteRefused(404, "a pair has a left and a right side only")
        return ballot.left if side == "left" else ballot.right

    def _ballot(self, number: int) -> Ballot:
        if not 0 <= number < len(self.ballots):
            raise VoteRefused(404, f"there is no pair {number}")
        return self.ballots[number]


class VoteServer(ThreadingHTTPServer):
    """Serves a booth on 127.0.0.1.

    Args:
        booth: the booth.
        port: port to listen at; 0 for any free port.
    """

    daemon_threads = True

    def __init__(self, booth: Booth, port: int = 0) -> None:
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except OSError as error:
            raise ValueError(
                f"the port {port} of 127.0.0.1 cannot be used ({error.strerror}); name another with --port, or leave "
                "--port out"
            ) from error
        self.booth = booth
        self.token = secrets.token_urlsafe(24)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error, unless the page was only closed before its answer came."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: VoteServer
    timeout = 30  # seconds that a silent client may hold its thread
    server_version, sys_version = "flowgrpo", ""

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer errors of the base class as JSON, with the headers of all other answers."""
        self._send_json(code, {"error": message or "refused"})

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because the addresses hold the token."""

    def _answer(self, act: Any) -> None:
        try:
            act(self._place())
        except VoteRefused as refused:
            self._send_json(refused.status, {"error": str(refused)})
        except ValueError as error:  # somebody may have changed the file of votes meanwhile
            self._send_json(500, {"error": str(error)})

    def _place(self) -> list[str]:
        """The parts of the address after the token."""
        hosts = {f"{name}:{self.server.server_port}" for name in ("127.0.0.1", "localhost")}
        asked = self.headers.get_all("Host", [])
        if len(asked) != 1 or asked[0] not in hosts:
            raise VoteRefused(403, "this page is for this machine only; open the address that the command printed")
        origin = self.headers.get("Origin")
        if origin is not None and origin.removeprefix("http://") not in hosts:
            raise VoteRefused(403, "another site may not use this page")
        start, _, address = self.path.partition("?")[0].partition("/")  # an address may also be `*` alone
        token, *rest = address.split("/")
        if start or not hmac.compare_digest(token.encode(errors="replace"), self.server.token.encode()):
            raise VoteRefused(403, "the address is not from this session; open the address that the command printed")
        return rest

    def _get(self, place: list[str]) -> None:
        booth = self.server.booth
        match place:
            case [name] if name in PARTS:
                kind, files = PARTS[name]
                here = resources.files(__package__)
                self._send(200, kind, b"".join(here.joinpath(file).read_bytes() for file in files))
            case ["progress"]:
                self._send_json(200, booth.progress())
            case ["report"]:
                self._send_json(200, report_on(booth.runs, booth.path).as_json())
            case ["pairs", number]:
                self._send_json(200, booth.show(_number(number)))
            case ["pictures", number, side]:
                self._send_file(lambda: booth.picture(_number(number), side))
            case ["videos", number, side]:
                self._send_file(lambda: booth.video(_number(number), side))
            case ["rendered", number, side, at]:
                self._send_file(lambda: booth.rendered(_number(number), side, _number(at)))
            case ["prompts", number, at]:
                self._send_file(lambda: booth.given(_number(number), _number(at)))
            case _:
                raise VoteRefused(404, "there is nothing at this address")

    def _post(self, place: list[str]) -> None:
        if place != ["votes"]:
            raise VoteRefused(404, "there is nothing at this address")
        body = self._body()
        try:
            vote = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise VoteRefused(400, "the body is not JSON") from error
        if not isinstance(vote, dict) or set(vote) != {"pair", "choice"}:
            raise VoteRefused(400, "the body must be an object of `pair` and `choice`")
        if type(vote["pair"]) is not int or vote["choice"] not in CHOICES:
            raise VoteRefused(400, f"`pair` must be a whole number, and `choice` one of {', '.join(CHOICES)}")
        self.server.booth.choose(vote["pair"], vote["choice"])
        self._send_json(200, self.server.booth.progress())

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()) or "Transfer-Encoding" in self.headers:
            raise VoteRefused(411, "a choice must be sent with a Content-Length")
        if int(length[:12]) > LONGEST:
            if int(length[:12]) <= DRAINED:
                self.rfile.read(int(length))
            raise VoteRefused(413, f"the body is longer than {LONGEST} bytes")
        if self.headers.get_content_type() != "application/json":
            raise VoteRefused(415, "a choice must be sent as application/json")
        return self.rfile.read(int(length))

    def _send_file(self, find: Callable[[], Path]) -> None:
        try:
            file = find()
            content = file.read_bytes()
        except OSError as error:
            raise VoteRefused(404, f"the sample cannot be shown: {error.strerror}") from error
        self._send(200, TYPES[file.suffix.lower()], content, kept=True)

    def _send_json(self, status: int, data: dict[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(data).encode())

    def _send(self, status: int, kind: str, content: bytes, *, kept: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        # The page loads the next pictures in advance. Each start has a new token, so no kept picture can be stale.
        self.send_header("Cache-Control", "private, max-age=86400" if kept else "no-store")
        self.end_headers()
        self.wfile.write(content)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise VoteRefused(404, "there is no such pair")
    return int(text)
