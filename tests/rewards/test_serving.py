"""The server of rewards: what it refuses before it costs anything, its queue, its counts and its end."""

import http.client
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from flowgrpo.cli import app as cli
from flowgrpo.configs.load import load_recipe
from flowgrpo.rewards import RewardSpec, build, resolve
from flowgrpo.rewards.inputs import Inputs
from flowgrpo.rewards.judges.judge_client import JudgeServer
from flowgrpo.rewards.registry import check_options
from flowgrpo.rewards.remote import Remote
from flowgrpo.rewards.serving import serve as running_module
from flowgrpo.rewards.serving import server as server_module
from flowgrpo.rewards.serving import wire
from flowgrpo.rewards.serving.metrics import Metrics
from flowgrpo.rewards.serving.serve import _stopped_by_signals, serve
from flowgrpo.rewards.serving.server import RewardServer
from flowgrpo.rewards.serving.service import Service, Stopping
from flowgrpo.rewards.serving.wire import WireLimits
from tests.rewards.served import Served

TOKEN = "s3cret-token"


def inputs(count: int = 2, **more: Any) -> Inputs:
    samples = torch.rand(count, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    given = {"samples": samples, "prompts": ["p"] * count, "columns": {}, "groups": None, **more}
    return Inputs(**given)


def ask(
    server: Served, body: bytes = b"", method: str = "POST", path: str = "/score", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    given = {"Content-Type": wire.CONTENT_TYPE} | {name.replace("_", "-"): value for name, value in headers.items()}
    # A server that has heard enough answers and hangs up; the answer is there to be read, as other clients do.
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.request(method, path, body or None, given)
    reply = connection.getresponse()
    found = reply.status, dict(reply.headers), reply.read()
    connection.close()
    return found


def head(length: int | str) -> bytes:
    """The head of a request to score."""
    lines = "POST /score HTTP/1.1", "Host: localhost", f"Content-Type: {wire.CONTENT_TYPE}", f"Content-Length: {length}"
    return "\r\n".join((*lines, "", "")).encode()


def error(reply: tuple[int, dict[str, str], bytes]) -> str:
    return str(json.loads(reply[2])["error"])


def request(server: Served, **more: Any) -> bytes:
    return wire.pack(inputs(**more), server.declaration.fingerprint)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_does_not_wake_the_waiting_service_ends_it(plugins: str, number: int) -> None:
    """The signal comes in another thread, so the wait goes on, as after a signal that comes just before the wait."""
    service, late = Service(build(RewardSpec(f"{plugins}:level"))), threading.Event()

    def elsewhere() -> None:
        time.sleep(0.3)
        signal.pthread_kill(threading.get_ident(), number)
        if not late.wait(20):
            service.stop()

    sender = threading.Thread(target=elsewhere)
    before = time.monotonic()
    with _stopped_by_signals(service, print):
        sender.start()
        service.run()
    late.set()
    sender.join()
    assert time.monotonic() - before < 10


def test_without_the_token_nothing_is_told_or_scored(served: Callable[..., Served]):
    server = served(token=TOKEN)
    for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": ""}):
        for method, path in (("POST", "/score"), ("GET", "/info"), ("GET", "/metrics")):
            status, _, body = ask(server, request(server) if method == "POST" else b"", method, path, **given)
            assert status == 401
            assert b"level" not in body
    assert ask(server, method="GET", path="/health")[0] == 200
    assert ask(server, request(server), Authorization=f"Bearer {TOKEN}")[0] == 200


def test_tokens_are_compared_in_constant_time(served: Callable[..., Served], monkeypatch: pytest.MonkeyPatch):
    server, compared = served(token=TOKEN), []
    real = server_module.hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return real(one, other)

    monkeypatch.setattr(server_module.hmac, "compare_digest", compare)
    for header_ in (None, "Bearer x", f"Bearer {TOKEN}", "Bearer ü" * 9):
        server.server.allows(header_)
    assert compared == [(32, 32)] * 4


def test_other_machines_need_a_token(plugins: str):
    service = Service(build(RewardSpec(f"{plugins}:level")))
    for host in ("0.0.0.0", "192.168.1.1", "example.org"):
        with pytest.raises(ValueError, match="--token-env NAME"):
            RewardServer(service, None, host=host)
        with pytest.raises(ValueError, match="--token-env NAME"):
            serve(f"{plugins}:surely_not_loaded", host=host)


def test_large_requests_are_refused_before_they_are_read(served: Callable[..., Served]):
    server = served(limits=WireLimits(most_bytes=1000))
    # More than any buffer on the way holds: the client has to get its answer while it is still sending.
    assert error(ask(server, b"x" * 20_000_000)).startswith("20000000 bytes are more than 1000")
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
        raw.sendall(head("9" * 5000))
        assert b" 413 " in raw.recv(1000)
    assert 'requests_total{status="413"} 2' in server.service.metrics.text({})


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": "application/json"}, 415),
        ({"Transfer_Encoding": "chunked"}, 411),
        ({"Content_Length": "-1"}, 411),
        ({"Content_Length": "1e3"}, 411),
        ({"Content_Length": "٣"}, 411),
    ],
)
def test_other_requests_are_refused(served: Callable[..., Served], given: dict[str, str], status: int):
    server = served()
    lines = {"Content-Type": wire.CONTENT_TYPE, "Content-Length": "0"} | {
        k.replace("_", "-"): v for k, v in given.items()
    }
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
        text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        raw.sendall(f"POST /score HTTP/1.1\r\nHost: localhost\r\n{text}\r\n".encode())
        assert raw.recv(1000).startswith(f"HTTP/1.1 {status} ".encode())
    assert ask(server, b"", "GET", "/score")[0] == 405
    assert ask(server, b"x", "POST", "/info")[0] == 404
    status, _, answer = ask(server, b"x", "PUT")
    assert (status, json.loads(answer)) == (501, {"error": "Unsupported method ('PUT')"})


def test_a_server_on_all_addresses_names_its_machine(served: Callable[..., Served]) -> None:
    server = served(host="0.0.0.0", token="0123456789abcdef")
    assert server.url == f"http://{socket.gethostname()}:{server.port}"


def test_a_request_that_stops_in_the_middle_frees_its_place(served: Callable[..., Served], monkeypatch):
    server = served(waiting=0)
    body = request(server)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
        raw.sendall(head(len(body)) + body[:-1])
        raw.shutdown(socket.SHUT_WR)
        assert b" 408 " in raw.recv(1000)
    assert ask(server, body)[0] == 200


def test_a_request_for_another_reward_is_told_what_is_served(served: Callable[..., Served]):
    server = served()
    status, _, body = ask(server, wire.pack(inputs(), "another"))
    assert status == 409
    assert json.loads(body)["declaration"] == server.declaration.as_json() | {
        name: list(getattr(server.declaration, name)) for name in ("samples", "needed", "columns", "of_run")
    }


@pytest.mark.parametrize(
    ("name", "given", "status", "message"),
    [
        ("level", {"samples": torch.full((2, 3, 4, 5), 2.0)}, 400, r"rewards take \[0, 1\]"),
        ("level", {"samples": torch.full((2, 3, 4, 5), float("nan"))}, 400, r"rewards take \[0, 1\]"),
        ("level", {"samples": ["a", "b"]}, 400, "scores `images`"),
        ("level", {"prompts": ["p"]}, 400, "prompts has 1 entries for 2 samples"),
        ("rich", {}, 400, "takes `taste`"),
        ("Apart", {}, 400, "compares whole groups"),
        ("fails", {"prompts": ["a", "b"]}, 500, "ZeroDivisionError: no edges"),
        ("worded", {"prompts": ["a", "b"]}, 422, "'good'"),
    ],
)
def test_failures_are_told_apart(served: Callable[..., Served], name: str, given: dict, status: int, message: str):
    server = served(name)
    reply = ask(server, request(server, **given))
    assert reply[0] == status
    with pytest.raises(ValueError, match=message):
        raise ValueError(error(reply))
    assert len(server.reports) == 1
    assert "samples_total 0" in server.service.metrics.text({})


# -- the queue --------------------------------------------------------------------------------------------------------


class Gate:
    """A reward that waits until it may go on, and counts the calls that are running."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Semaphore(0), threading.Semaphore(0)
        self.prompts, self.inside, self.most_inside, self.thread = [], 0, 0, None

    def __call__(self, images: torch.Tensor, prompts: list[str]) -> list[float]:
        self.inside += 1
        self.most_inside, self.thread = max(self.most_inside, self.inside), threading.current_thread()
        self.prompts.append(prompts[0])
        self.entered.release()
        assert self.opened.acquire(timeout=20)
        self.inside -= 1
        return [1.0] * len(prompts)


@pytest.fixture
def gated(served: Callable[..., Served]) -> Callable[..., tuple[Served, Gate]]:
    def make(**more: Any) -> tuple[Served, Gate]:
        server, gate = served("fails", **more), Gate()
        server.reward.function = gate
        return server, gate

    return make


class Asking(threading.Thread):
    """A request in a new thread."""

    def __init__(self, server: Served, prompt: str) -> None:
        super().__init__(daemon=True)
        self.server, self.body, self.status = server, request(server, prompts=[prompt] * 2), 0
        self.start()

    def run(self) -> None:
        self.status = ask(self.server, self.body)[0]


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for the next step of another thread, which sends no signal."""
    gone = threading.Event()
    for _ in range(20_000):
        if condition():
            return
        gone.wait(0.001)
    raise AssertionError("it did not happen")


def test_one_is_scored_and_a_few_wait_and_more_are_turned_away(gated):
    server, gate = gated(waiting=2)
    asking = [Asking(server, "first")]
    assert gate.entered.acquire(timeout=20)
    for prompt in ("second", "third"):
        asking.append(Asking(server, prompt))
        wait_until(lambda: server.service._jobs.qsize() == len(asking) - 1)
    status, headers, _ = ask(server, request(server))
    assert (status, headers["Retry-After"]) == (503, "1")
    assert json.loads(ask(server, method="GET", path="/health")[2]) == {"status": "ok"}
    assert "flowgrpo_reward_admitted 3\n" in ask(server, method="GET", path="/metrics")[2].decode()
    for _ in asking:
        gate.opened.release()
    for each in asking:
        each.join()
    assert [each.status for each in asking] == [200, 200, 200]
    assert gate.prompts == ["first", "second", "third"]
    assert gate.most_inside == 1
    assert gate.thread is server.thread


def test_who_has_hung_up_is_not_scored(gated):
    server, gate = gated(waiting=2)
    first = Asking(server, "first")
    assert gate.entered.acquire(timeout=20)
    body = request(server, prompts=["gone"] * 2)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
        raw.sendall(head(len(body)) + body)
        wait_until(lambda: server.service._jobs.qsize() == 1)
    last = Asking(server, "last")
    wait_until(lambda: server.service._jobs.qsize() == 2)
    gate.opened.release()
    gate.opened.release()
    first.join()
    last.join()
    assert gate.prompts == ["first", "last"]


# -- the end ----------------------------------------------------------------------------------------------------------


def test_a_server_that_ends_finishes_what_it_was_given(gated):
    server, gate = gated(waiting=2)
    first = Asking(server, "first")
    assert gate.entered.acquire(timeout=20)
    second = Asking(server, "second")
    wait_until(lambda: server.service._jobs.qsize() == 1)
    server.service.stop()
    status, headers, _ = ask(server, request(server))
    assert (status, headers["Retry-After"]) == (503, "5")
    assert ask(server, method="GET", path="/health")[0] == 503
    gate.opened.release()
    gate.opened.release()
    server.close()
    first.join()
    second.join()
    assert (first.status, second.status) == (200, 200)
    with pytest.raises(ConnectionRefusedError):
        ask(server, method="GET", path="/health")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(plugins: str, number: int):
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    found: list[Any] = []

    def client(url: str) -> None:
        away = Remote(url)
        found.append(away(images=inputs().samples, prompts=["p", "q"]).values)
        os.kill(os.getpid(), number)

    def report(line: str) -> None:
        if line.startswith("serving "):
            found.append(line)
            threading.Thread(target=client, args=(line.rpartition(" ")[2],)).start()

    serve(f"{plugins}:level", {"gain": 2.0}, port=0, report=report)
    assert found[0].startswith("serving level (images) at http://127.0.0.1:")
    assert torch.equal(found[1], 2 * inputs().samples.flatten(1).mean(1))
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_a_signal_during_a_request_says_what_the_server_waits_for(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import os, signal\n\n\ndef mine(images, **_):\n    os.kill(os.getpid(), signal.SIGTERM)\n"
                    "    return [1.0] * len(images)\n")  # fmt: skip
    found: list[str] = []
    clients: list[threading.Thread] = []
    scores: list[list[float]] = []

    def report(line: str) -> None:
        found.append(line)
        if line.startswith("serving "):
            away = Remote(line.rpartition(" ")[2])
            score = partial(away, images=inputs().samples, prompts=["p", "q"])
            clients.append(threading.Thread(target=lambda: scores.append(score().values.tolist())))
            clients[0].start()

    serve(f"{file}:mine", port=0, report=report)
    clients[0].join()
    assert found[1].startswith("ending: requests that have begun are finished first; a second signal ends")
    assert scores == [[1.0, 1.0]]


def test_a_reward_that_exits_does_not_end_its_service(plugins: str):
    service = Service(build(RewardSpec(f"{plugins}:level")))
    level = service.reward.function

    def exits_once(images: torch.Tensor) -> None:
        service.reward.function = level
        raise SystemExit(0)

    service.reward.function = exits_once
    found: list[Any] = []

    def client() -> None:
        try:
            with service.admit():
                try:
                    service.score(inputs())
                except RuntimeError as problem:
                    found.append(str(problem))
                found.append(service.score(inputs()).values)
        finally:
            service.stop()

    thread = threading.Thread(target=client)
    thread.start()
    service.run()
    thread.join()
    assert "raised SystemExit(0)" in found[0]
    assert torch.equal(found[1], inputs().samples.flatten(1).mean(1))


def test_nobody_waits_for_a_service_that_broke(plugins: str):
    service = Service(build(RewardSpec(f"{plugins}:level")))

    def breaks(images: torch.Tensor) -> None:
        raise KeyboardInterrupt

    service.reward.function = breaks
    caught: list[BaseException] = []

    def client() -> None:
        with service.admit():
            try:
                service.score(inputs())
            except RuntimeError as problem:
                caught.append(problem)

    thread = threading.Thread(target=client)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        service.run()
    thread.join()
    assert len(caught) == 1
    with pytest.raises(Stopping):
        service.score(inputs())
    with pytest.raises(Stopping), service.admit():
        pass


# -- counts and the command -------------------------------------------------------------------------------------------


def test_counts_are_in_the_text_format_of_prometheus():
    metrics = Metrics('my "reward"\n')
    metrics.answered(200), metrics.answered(503), metrics.answered(200)
    metrics.received(100), metrics.received(20)
    metrics.scored(4, 0.5, failed=False), metrics.scored(3, 0.25, failed=True)
    lines = metrics.text({"places": ("Places.", 5)}).splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        'flowgrpo_reward_info{reward="my \\"reward\\"\\n"} 1',
        'flowgrpo_reward_requests_total{status="200"} 2',
        'flowgrpo_reward_requests_total{status="503"} 1',
        "flowgrpo_reward_samples_total 4",
        "flowgrpo_reward_failures_total 1",
        "flowgrpo_reward_received_bytes_total 120",
        "flowgrpo_reward_scoring_seconds_sum 0.75",
        "flowgrpo_reward_scoring_seconds_count 2",
        "flowgrpo_reward_places 5",
    ]
    assert "# TYPE flowgrpo_reward_samples_total counter" in lines


def test_the_command_passes_everything_on(monkeypatch: pytest.MonkeyPatch):
    called: dict[str, Any] = {}
    monkeypatch.setattr(running_module, "serve", lambda *words, **more: called.update(words=words, **more))
    words = "rewards serve gold --options dense=true --options target=1e-3 --options names=[a,b] --host ::1 --port 0"
    monkeypatch.setattr(
        sys, "argv", ["flowgrpo", *words.split(), "--token-env", "T", "--waiting", "1", "--max-mb", "3"]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert called["words"] == ("gold", {"dense": True, "target": 1e-3, "names": ["a", "b"]})
    assert (called["host"], called["port"], called["token_env"], called["waiting"]) == ("::1", 0, "T", 1)
    assert called["limits"] == WireLimits(most_bytes=3 << 20)


def test_an_entry_of_a_recipe_is_served_with_its_options(monkeypatch: pytest.MonkeyPatch):
    called: list[Any] = []
    monkeypatch.setattr(running_module, "serve", lambda *words, **more: called.append(words))
    entry = "{name: gold, options: {dense: true, target: 0.5}}"
    monkeypatch.setattr(sys, "argv", ["flowgrpo", "rewards", "serve", entry, "--options", "target=0.25"])
    with pytest.raises(SystemExit):
        cli.main()
    assert called == [("gold", {"dense": True, "target": 0.25})]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{name:\xa0gold,label:\xa0mine}", "leave label and time_limit out of"),
        ("name:\xa0gold,\xa0options:\xa0{}", "without its braces; write"),
        ("gold --options dense", "'dense' is not key=value"),
        ("gold --options dense=[", "'[' is not a YAML value"),
        ("gold --options denes=1", "has no option 'denes'; did you mean 'dense'"),
        ("goldd", "there is no reward 'goldd'; did you mean 'gold'"),
        ("gold --token-env SURELY_UNSET", "SURELY_UNSET is not set"),
        ("gold --host 0.0.0.0", "can be reached from other machines"),
    ],
)
def test_mistakes_are_one_message(monkeypatch, capsys, words: str, message: str):
    given = [word.replace("\xa0", " ") for word in words.split(" ")]
    monkeypatch.setattr(sys, "argv", ["flowgrpo", "rewards", "serve", *given, "--port", "0"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    errors = capsys.readouterr().err
    assert message in errors
    assert "Traceback" not in errors


def test_a_port_that_is_taken_is_said_before_the_reward_is_loaded(tmp_path: Path):
    path = tmp_path / "slow.py"
    path.write_text("raise AssertionError('loaded')")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{port} .*choose another --port"):
            serve(f"{path}:reward", port=port)


def test_examples_in_the_docs_are_recipes_with_options_that_exist(tmp_path: Path):
    page = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(examples) >= 7
    for example in examples:
        file = tmp_path / "example.yaml"
        file.write_text(example, encoding="utf-8")
        for entry in load_recipe(file).rewards:
            check_options(resolve(entry.name), entry.options, entry.name)
            inner = entry.options.get("judge_options", entry.options)
            if "server" in inner:
                JudgeServer.read(
                    entry.name, {name: value for name, value in inner["server"].items() if name != "key_env"}
                )
