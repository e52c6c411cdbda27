"""People's choices: the server, the page, and the command."""

import contextlib
import http.client
import json
import re
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flowgrpo.cli.app import app
from flowgrpo.gallery import vote_server
from flowgrpo.gallery.vote_server import Booth, VoteServer
from flowgrpo.votes.file import latest, read_votes
from flowgrpo.votes.local_page import LONGEST
from tests.gallery.folders import HOSTILE, Elements, write_run, written
from tests.gallery.test_browser import CHROMIUM, needs_chromium
from tests.gallery.voting import Client, booth, serving, write_mine, write_other


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_mine(tmp_path)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return write_other(tmp_path)


@pytest.fixture
def serve() -> Iterator[Callable[[Booth], Client]]:
    with ExitStack() as servers:
        yield lambda one: servers.enter_context(serving(one))


# The server


def test_what_the_page_gets_does_not_tell_the_sets_apart(
    run: Path, tmp_path: Path, serve: Callable[[Booth], Client]
) -> None:
    one = booth([run], tmp_path / "votes.jsonl")
    client = serve(one)
    for number, ballot in enumerate(one.ballots):
        pair = client.json(f"pairs/{number}")
        assert pair == {
            "number": number,
            "prompt": ballot.left.shot.prompt,
            "messages": [],
            "pictures": [],
            "left": {"picture": f"pictures/{number}/left"},
            "right": {"picture": f"pictures/{number}/right"},
            "choice": None,
        }
        headers = []
        for side in ("left", "right"):
            status, body, has = client.get(pair[side]["picture"])
            file = getattr(ballot, side).file
            assert (status, body, has["Content-Type"]) == (200, file.read_bytes(), "image/png")
            headers.append({key: value for key, value in has.items() if key not in ("Date", "Content-Length")})
        assert headers[0] == headers[1]  # no file name, time or tag of the file
    assert not re.search("iter|eval|base|tuned|mine", json.dumps([client.json("pairs/0"), client.json("progress")]))


def test_only_this_page_of_this_machine_is_answered(
    run: Path, tmp_path: Path, serve: Callable[[Booth], Client]
) -> None:
    votes = tmp_path / "votes.jsonl"
    client = serve(booth([run], votes))
    root, port = client.root, client.server.server_port
    assert client.server.server_address[0] == "127.0.0.1"
    assert re.fullmatch(rf"http://127\.0\.0\.1:{port}/[\w-]{{32}}/", root)
    good = json.dumps({"pair": 0, "choice": "left"}).encode()
    for wrong in ("", "x/", f"{client.server.token[:-1]}/", f"{client.server.token}x/", "%C3%A9/"):
        client.root = f"http://127.0.0.1:{port}/{wrong}"
        for place in ("", "progress", "pictures/0/left"):
            status, body, _ = client.get(place)
            assert status == 403
            assert client.server.token not in body.decode()
        assert client.post(good)[0] == 403
    client.root = root
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", f"127.0.0.1.x:{port}"):
        assert client.get("progress", Host=host)[0] == 403
        assert client.post(good, Host=host)[0] == 403
    for origin in ("null", "https://evil.example", f"http://evil.example:{port}", f"https://127.0.0.1:{port}"):
        assert client.post(good, Origin=origin)[0] == 403
    for place in ("*", "x", "//", ""):
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as line:
            line.request("GET", place or "/")
            assert line.getresponse().status == 403
    assert not votes.exists()
    assert client.get("progress", Host=f"localhost:{port}")[0] == 200
    assert client.post(good, Origin=f"http://127.0.0.1:{port}")[0] == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[" * LONGEST, 400),
        (b"[]", 400),
        (b'{"pair": 0}', 400),
        (b'{"pair": 0, "choice": "left", "more": 1}', 400),
        (b'{"pair": true, "choice": "left"}', 400),
        (b'{"pair": "0", "choice": "left"}', 400),
        (b'{"pair": 0, "choice": ["left"]}', 400),
        (b'{"pair": 0, "choice": "both"}', 400),
        (b'{"pair": -1, "choice": "left"}', 404),
        (b'{"pair": 12, "choice": "left"}', 404),
        (b'{"pair": 0, "choice": "left"}'.ljust(LONGEST + 1), 413),
        (b" " * 300_000, 413),
    ],
)
def test_bodies_that_are_no_choice_are_refused(
    run: Path, tmp_path: Path, serve: Callable[[Booth], Client], body: bytes, status: int
) -> None:
    client = serve(booth([run], tmp_path / "votes.jsonl"))
    answer = client.post(body)
    assert answer[0] == status
    assert json.loads(answer[1])["error"]
    assert not (tmp_path / "votes.jsonl").exists()
    assert client.vote(0, "left")[0] == 200


def test_requests_of_other_shapes_are_refused(run: Path, tmp_path: Path, serve: Callable[[Booth], Client]) -> None:
    client = serve(booth([run], tmp_path / "votes.jsonl"))
    good = b'{"pair": 0, "choice": "left"}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        assert client.post(good, Content_Type=kind)[0] == 415
    assert client.post(good, place="progress")[0] == 404
    for place in ("votes", "vote.py", "../style.css", "pictures/0", "pictures/0/middle", "pictures/-1/left", "pairs/99",
                  "pairs/" + "9" * 400, "pairs/²", "pictures/0/left/..%2f..", "run/config.yaml"):  # fmt: skip
        assert client.get(place.replace("²", "%C2%B2"))[0] == 404, place
    for length, status in (("-5", 411), ("x", 411), (None, 411), ("9" * 30, 413), ("0" * 12 + "29", 413)):
        connection = http.client.HTTPConnection("127.0.0.1", client.server.server_port, timeout=20)
        connection.putrequest("POST", f"/{client.server.token}/votes")
        if length is not None:
            connection.putheader("Content-Length", length)
        connection.endheaders()
        assert connection.getresponse().status == status
        connection.close()
    for method in ("PUT", "DELETE", "OPTIONS"):
        assert client.ask(urllib.request.Request(client.root, method=method))[0] == 501
    assert not (tmp_path / "votes.jsonl").exists()


def test_page_and_answers_admit_nothing_from_outside(
    run: Path, tmp_path: Path, serve: Callable[[Booth], Client]
) -> None:
    client = serve(booth([run], tmp_path / "votes.jsonl"))
    for place in ("", "vote.js", "vote.css", "progress", "pairs/0", "pictures/0/left", "nowhere"):
        _, body, headers = client.get(place)
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; img-src 'self'; style-src 'self'; script-src 'self';")
        assert "unsafe" not in policy
        assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")
        if place in ("", "vote.js", "vote.css"):
            text = body.decode().replace("http://www.w3.org/2000/svg", "")
            assert not re.search(r"https?:|[\"'(]//|@import|innerHTML|insertAdjacent|\beval\(|document\.write", text)
    assert "prompt" not in Elements(client.get()[1].decode()).written  # nothing of the run stands in the page


def test_an_image_that_is_gone_is_an_answer_and_not_a_vote(
    run: Path, tmp_path: Path, serve: Callable[[Booth], Client]
) -> None:
    one = booth([run], tmp_path / "votes.jsonl")
    client = serve(one)
    file = one.ballots[0].left.file
    assert file is not None
    file.unlink()
    assert client.get("pictures/0/left")[0] == 404
    status, answer = client.vote(0, "left")
    assert status == 500
    assert "not saved" in answer["error"]
    assert file.name not in answer["error"]
    assert client.json("progress")["voted"] == 0


# The command


def test_command_reports_and_writes_preferences(run: Path, other: Path, tmp_path: Path) -> None:
    one = booth([run], run / "votes.jsonl")
    for number in range(12):
        one.choose(number, "left" if one.ballots[number].left.source.iteration == 10 else "right")
    done = CliRunner().invoke(app, ["gallery", str(run), "--report", "--vote-dataset", str(tmp_path / "pairs")])
    assert done.exit_code == 0, done.output
    assert "iteration 10 against iteration 0: 100 % of 12 (95 %: 76 to 100 %); ties 0 of 12" in done.output
    assert (tmp_path / "pairs" / "metadata.jsonl").is_file()
    assert not (run / "gallery").exists()
    failed = CliRunner().invoke(app, ["gallery", str(run), str(other), "--report"])
    assert "name a file for the choices with --votes" in str(failed.exception)


def test_command_serves_and_an_interrupt_prints_the_report(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def served(server: VoteServer) -> None:
        server.booth.choose(0, "tie")
        raise KeyboardInterrupt

    monkeypatch.setattr(VoteServer, "serve_forever", served)
    done = CliRunner().invoke(app, ["gallery", str(run), "--vote", "--session", "ann"])
    assert done.exit_code == 0, done.output
    assert "12 pairs, 0 of them done in session ann" in done.output
    assert re.search(r"open http://127\.0\.0\.1:\d+/[\w-]+/ and", done.output)
    assert "no choice yet; ties 1 of 1 (100 %)" in done.output
    refused = CliRunner().invoke(app, ["gallery", str(run), "--vote", "--session", "a/b"])
    assert "the session is 'a/b'" in str(refused.exception)


# In a browser

SCRIPT = vote_server.PARTS["vote.js"]
# Chromium's virtual time does not stand still while a picture is decoded, but it does during a request. So the driver
# waits by requests: otherwise the document may be written before the page shows it.
DRIVER = """
(async () => {
  const settled = async () => {
    while (!state.ready && !state.results && byId("fault").hidden) await (await fetch("progress")).json();
  };
  for (const key of KEYS) {
    await settled();
    document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  }
  await settled();
})();
"""


@pytest.fixture
def see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Elements]:
    """Opens a page, presses keys, and returns the document."""

    def see(address: str, *keys: str) -> Elements:
        assert CHROMIUM is not None
        driver = tmp_path / "driver.js"
        driver.write_text(f"const KEYS = {json.dumps(keys)};{DRIVER}")
        kind, files = SCRIPT
        monkeypatch.setitem(vote_server.PARTS, "vote.js", (kind, (*files, str(driver))))
        words = [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=120000", "--dump-dom", address,
        ]  # fmt: skip
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
        page = Elements(done.stdout)
        assert "hidden" in next(has for _, has in page.tags if has.get("id") == "fault"), page.text("p", id="fault")
        return page

    return see


@pytest.mark.slow
@needs_chromium
def test_keys_choose_in_a_browser_and_nothing_runs(
    run: Path, tmp_path: Path, serve: Callable[[Booth], Client], see: Callable[..., Elements]
) -> None:
    path = tmp_path / "votes.jsonl"
    one = booth([run], path)
    page = see(serve(one).root, "ArrowLeft", "t", "b", "ArrowRight", "s")
    votes, _ = read_votes(path)
    assert [vote.choice for vote in votes] == ["left", "tie", "right", "skip"]
    assert [vote.key for vote in latest(votes)] == [one.ballots[number].key(tmp_path) for number in range(3)]
    assert page.text("h2", id="prompt") == one.ballots[3].left.shot.prompt
    assert page.text("span", id="count") == "pair 4 · 3 of 12 pairs done"
    images = [has for tag, has in page.tags if tag == "img"]
    assert [(has["src"], has["alt"]) for has in images] == [
        ("pictures/3/left", "Left picture"),
        ("pictures/3/right", "Right picture"),
    ]
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not [key for _, has in page.tags for key in has if key.startswith("on")]
    shown = json.dumps([has for tag, has in page.tags])
    assert not re.search(r"iter-|eval-|mine", shown)


@pytest.mark.slow
@needs_chromium
def test_texts_are_shown_as_text_and_the_end_shows_the_report(
    tmp_path: Path, serve: Callable[[Booth], Client], see: Callable[..., Elements]
) -> None:
    records = [written(at, prompt, f"{at} {HOSTILE}", prompt=HOSTILE) for at in (0, 5) for prompt in (1, 2)]
    run = write_run(tmp_path / "run", [row | {"seed": row["prompt_id"]} for row in records])
    client = serve(booth([run], run / "votes.jsonl"))
    page = see(client.root)
    words = [text for (_, has), text in zip(page.tags, page.texts) if has.get("class") == "words"]
    assert sorted(words) == [f"0 {HOSTILE}", f"5 {HOSTILE}"]
    assert page.text("h2", id="prompt") == HOSTILE
    assert {tag for tag, _ in page.tags}.isdisjoint({"img", "iframe"})

    ended = see(client.root, "ArrowRight", "t")
    assert ended.text("h2", id="results-title") == "All pairs are done"
    assert "1 of 2 (50 %)" in ended.written
    assert "iteration 5" in ended.written
    assert [vote.choice for vote in read_votes(run / "votes.jsonl")[0]] == ["right", "tie"]


@pytest.mark.parametrize(
    ("words", "owner"),
    [
        (("--session", "ann"), "--vote"),
        (("--sets", "base,1"), "--vote"),
        (("--again",), "--vote"),
        (("--order", "lost"), "--sheet or --animation"),
        (("--count", "3"), "--sheet or --animation"),
        (("--link",), "--out"),
        (("--every", "9"), "--watch"),
        (("--votes", "v.jsonl"), "--vote, --report, --vote-dataset or --favourites"),
    ],
)
def test_an_option_without_the_one_that_it_belongs_to_is_refused(words: tuple[str, ...], owner: str, run: Path) -> None:
    refused = CliRunner().invoke(app, ["gallery", str(run), *words])
    assert isinstance(refused.exception, ValueError)
    assert str(refused.exception) == f"{words[0]} belongs to {owner}; add {owner}, or leave {words[0]} out"
    assert not (run / "gallery").exists()


def test_a_port_that_is_taken_and_a_file_that_cannot_be_written_are_told(run: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = CliRunner().invoke(app, ["gallery", str(run), "--vote", "--port", str(port)])
    assert isinstance(refused.exception, ValueError)
    assert f"the port {port} of 127.0.0.1 cannot be used" in str(refused.exception)
    below = run / "config.yaml" / "v.jsonl"
    refused = CliRunner().invoke(app, ["gallery", str(run), "--vote", "--votes", str(below)])
    assert isinstance(refused.exception, ValueError)
    assert "config.yaml, which is a file; name another place" in str(refused.exception)
