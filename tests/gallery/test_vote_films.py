"""Votes on videos: the page plays both sides together, and its server makes each video once."""

import io
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowgrpo.gallery import vote_films
from flowgrpo.gallery.vote_server import Booth, VoteServer
from flowgrpo.media.video import can_encode
from flowgrpo.votes.file import read_votes
from tests.gallery.browser import LivePage
from tests.gallery.folders import film, write_films
from tests.gallery.test_browser import CHROMIUM, needs_chromium
from tests.gallery.voting import Client, booth

pytestmark = pytest.mark.skipif(not can_encode(), reason="the package av is not installed")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_films(tmp_path / "run")


@pytest.fixture
def serve() -> Iterator[Callable[[Booth], Client]]:
    servers: list[VoteServer] = []

    def serve(one: Booth) -> Client:
        servers.append(VoteServer(one))
        threading.Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return Client(servers[-1])

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def length(content: bytes) -> tuple[int, float]:
    """The number of frames of a video, and its frames a second."""
    import av

    with av.open(io.BytesIO(content)) as container:
        stream = container.streams.video[0]
        return sum(1 for _ in container.decode(stream)), float(stream.average_rate)


@pytest.mark.parametrize(("fps", "rate"), [(None, 24.0), (4.0, 4.0)])
def test_both_sides_are_videos_that_do_not_tell_the_sets_apart(
    run: Path, serve: Callable[[Booth], Client], fps: float | None, rate: float
) -> None:
    (run / "config.yaml").write_text(json.dumps({"name": "films", "model": {"call": {"frame_rate": 24}}}))
    client = serve(booth([run], run / "votes.jsonl", fps=fps))
    for number in range(2):
        pair = client.json(f"pairs/{number}")
        assert {side: pair[side] for side in ("left", "right")} == {
            "left": {"video": f"videos/{number}/left"},
            "right": {"video": f"videos/{number}/right"},
        }
        headers = []
        for side in ("left", "right"):
            status, body, has = client.get(f"videos/{number}/{side}")
            assert (status, has["Content-Type"], length(body)) == (200, "video/webm", (12, rate))
            headers.append({key: value for key, value in has.items() if key not in ("Date", "Content-Length")})
        assert headers[0] == headers[1]
    assert client.get("videos/0/middle")[0] == client.get("videos/2/left")[0] == 404


def test_a_video_is_made_once_and_removed_with_its_server(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    write = vote_films.write_clip

    def counted(path: Path, *words: Any) -> bool:
        made.append(path)
        return write(path, *words)

    monkeypatch.setattr(vote_films, "write_clip", counted)
    one = booth([run], run / "votes.jsonl")
    asking = [threading.Thread(target=one.video, args=(0, "left")) for _ in range(3)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert len(made) == 1
    assert one.video(0, "left") == made[0]
    assert made[0].is_file()
    assert one.video(0, "right") == made[1] != made[0]
    del one
    assert not made[0].parent.exists()


def test_frames_that_cannot_be_read_are_no_video(run: Path, serve: Callable[[Booth], Client]) -> None:
    one = booth([run], run / "votes.jsonl")
    client = serve(one)
    left, right = (getattr(one.ballots[0], side).file for side in ("left", "right"))
    film(left, 5)  # the index says 12 frames
    right.write_bytes(b"no picture")
    for side in ("left", "right"):
        status, body, _ = client.get(f"videos/0/{side}")
        assert status == 404
        assert "eval" not in body.decode()
    right.unlink()
    assert client.get("videos/1/left")[0] == 200


def test_without_the_package_nobody_votes_on_frames(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vote_films, "can_encode", lambda: False)
    with pytest.raises(ImportError, match=r"pip install '\.\[video\]'"):
        booth([run], run / "votes.jsonl")


class VotePage(LivePage):
    """The page of votes."""

    def open(self, address: str) -> None:
        """Go to the address, and wait for the first pair."""
        self.tell("Page.navigate", url=address)
        self.wait("typeof state !== 'undefined' && state.ready")

    def press(self, key: str) -> None:
        """Press a key."""
        self.value(f"document.dispatchEvent(new KeyboardEvent('keydown', {{ key: {json.dumps(key)}, bubbles: true }}))")


@pytest.fixture
def show(tmp_path: Path) -> Iterator[Callable[[str], VotePage]]:
    pages: list[VotePage] = []

    def show(address: str) -> VotePage:
        assert CHROMIUM is not None
        pages.append(VotePage(CHROMIUM, tmp_path / f"profile-{len(pages)}", address))
        return pages[-1]

    yield show
    for page in pages:
        page.close()


@pytest.mark.slow
@needs_chromium
def test_videos_play_in_step_and_a_key_stops_both(
    run: Path, serve: Callable[[Booth], Client], show: Callable[[str], VotePage]
) -> None:
    one = booth([run], run / "votes.jsonl")
    page = show(serve(one).root)
    shown = "[films().length, films().every(v => v.muted && v.loop && !v.controls && v.src.startsWith('blob:'))]"
    assert page.value(shown) == [2, True]
    page.wait("films().every(video => video.currentTime > 0.2)")
    apart = "Math.abs(films()[0].currentTime - films()[1].currentTime)"
    page.wait(f"Math.min({apart}, films()[0].duration - {apart}) < 0.15")
    page.press("p")
    assert page.value("films().map(video => video.paused)") == [True, True]
    page.wait("byId('motion').textContent === 'Play p'")
    page.press("p")
    page.wait("byId('motion').textContent === 'Pause p'")
    page.press("ArrowLeft")
    page.wait("state.ready && state.at === 1 && films().length === 2 && films()[0].currentTime > 0")
    page.press("t")
    page.wait("state.results")
    votes = read_votes(run / "votes.jsonl")[0]
    assert [(vote.choice, vote.left.frames, vote.right.frames) for vote in votes] == [("left", 12, 12), ("tie", 12, 12)]
    assert page.value("byId('results-title').textContent") == "All pairs are done"


@pytest.mark.slow
@needs_chromium
def test_a_pair_whose_video_is_lost_can_only_be_skipped(
    run: Path, serve: Callable[[Booth], Client], show: Callable[[str], VotePage]
) -> None:
    one = booth([run], run / "votes.jsonl")
    file = one.ballots[0].left.file
    assert file is not None
    shutil.copyfile(run / "config.yaml", file)
    page = show(serve(one).root)
    assert page.value("[...document.querySelectorAll('.absent')].map(one => one.textContent)") == [
        "the video cannot be shown; skip this pair"
    ]
    page.wait("films().length === 1 && !films()[0].paused && byId('motion').textContent === 'Pause p'")
    enabled = "[...byId('choices').children].filter(one => !one.disabled && !one.hidden).map(one => one.textContent)"
    assert page.value(enabled) == ["Skip s", "Pause p"]
    page.press("ArrowLeft")
    page.press("s")
    page.wait("state.ready && state.at === 1")
    assert [vote.choice for vote in read_votes(run / "votes.jsonl")[0]] == ["skip"]
