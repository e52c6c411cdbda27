"""Runs to vote on, booths, votes, and requests to the server of the page."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowgrpo.gallery.build import read_runs
from flowgrpo.gallery.vote_pairs import sources_of
from flowgrpo.gallery.vote_server import Booth, VoteServer
from flowgrpo.votes.file import Side, Vote
from tests.gallery.folders import HOSTILE, picture, record, write_run

SKILLS = ("colour", "count")


def write_mine(tmp_path: Path) -> Path:
    """12 prompts at 0, 5 and 10."""
    records = [
        record(at, prompt, 0, 0.5, prompt=f"{prompt} {HOSTILE}", columns={"skill": SKILLS[prompt % 2]})
        for at in (0, 5, 10)
        for prompt in range(12)
    ]
    return write_run(tmp_path / "run", records, name=f"mine {HOSTILE}")


def write_other(tmp_path: Path) -> Path:
    """Prompts 3 to 14 of `write_mine`, numbered otherwise, at 0 and 10."""
    records = [record(at, 40 + p, 0, 0.5, prompt=f"{p} {HOSTILE}") for at in (0, 10) for p in range(3, 15)]
    run = write_run(tmp_path / "other", records, name="other")
    for number, row in enumerate(records):
        picture(run / "samples" / row["image"], (number, 200, 1))
    return run


def booth(folders: list[Path], votes: Path, session: str | None = "ann", **settings: Any) -> Booth:
    runs = read_runs(folders)
    return Booth(runs, sources_of(runs, settings.pop("sets", "base,last")), votes, session, **settings)


def asked(one: Booth) -> list[tuple[str, int, int]]:
    """Prompt, and iterations on the left and right, of every ballot in order."""
    found = [(b.left.shot.prompt, b.left.source.iteration, b.right.source.iteration) for b in one.ballots]
    return [(prompt.split()[0], left, right) for prompt, left, right in found]


def make_vote(choice: str = "left", **changes: Any) -> Vote:
    sides = [
        Side("run", ".", at, "1", 0, None, completion=f"text {at}", sha256="") for at in changes.pop("at", (0, 10))
    ]
    vote = Vote("ann", "2026-01-01T00:00:00+00:00", "a prompt", "0", {"skill": "count"}, sides[0], sides[1], choice)
    return replace(vote, **changes)


class Client:
    """Requests to a server on this machine."""

    def __init__(self, server: VoteServer) -> None:
        self.server, self.root = server, server.url

    def get(self, place: str = "", **headers: str) -> tuple[int, bytes, Any]:
        return self.ask(urllib.request.Request(self.root + place, headers=headers))

    def post(self, body: bytes, place: str = "votes", **headers: str) -> tuple[int, bytes, Any]:
        headers = {"Content-Type": "application/json"} | {key.replace("_", "-"): it for key, it in headers.items()}
        return self.ask(urllib.request.Request(self.root + place, body, headers))

    def ask(self, request: urllib.request.Request) -> tuple[int, bytes, Any]:
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, answer.read(), answer.headers
        except urllib.error.HTTPError as refusal:
            with refusal:
                return refusal.code, refusal.read(), refusal.headers

    def json(self, place: str) -> Any:
        status, body, _ = self.get(place)
        assert status == 200, body
        return json.loads(body)

    def vote(self, pair: object, choice: object) -> tuple[int, Any]:
        status, body, _ = self.post(json.dumps({"pair": pair, "choice": choice}).encode())
        return status, json.loads(body)


@contextmanager
def serving(one: Booth) -> Iterator[Client]:
    """Serve a booth in a thread."""
    server = VoteServer(one)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield Client(server)
    finally:
        server.shutdown()
        server.server_close()
